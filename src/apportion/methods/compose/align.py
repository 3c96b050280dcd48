r"""Alignment: reorders heads, neurons and channels of one network so that they match another's before both are mixed.

Networks that compute the same may hold their units in another order; averaging them as they are destroys both. Which
units belong together across layers is what the partition knows. Shape letters: U units, N examples, K their numbers.

.. math:: \max_\pi \sum_u S_{u, \pi(u)} \quad \text{(eq. C31)}

with :math:`S` the inner products of the units' weights, or the correlations of what they compute on some inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from apportion.errors import ModelError
from apportion.methods.compose.compat import check_sources
from apportion.methods.compose.source import open_source
from apportion.models.channels import input_weight, layer_kind
from apportion.models.network import Network, forward
from apportion.models.partition import Member, Module, Partition

By: TypeAlias = Literal["weights", "activations"]
Orders: TypeAlias = dict[str, tuple[int, ...]]
_MAX_ROUNDS = 20


def align(
    reference: Network,
    other: Network,
    partition: Partition,
    *,
    by: By = "weights",
    batches: Sequence[Mapping[str, Tensor]] = (),
) -> Orders:
    """Reorders the units of ``other`` in place to match the reference; returns the order found for every module.

    ``orders[name][u]`` is the unit of ``other`` that took the place of unit ``u``.

    Args:
        partition: of the reference; blocks are not reordered.
        by: ``weights`` needs no data; ``activations`` compares what units compute on ``batches``.
    """
    parts = [part for part in partition if part.kind != "blocks"]
    if by == "activations":
        if not batches:
            raise ModelError("matching by activations needs inputs; give some, or match by weights")
        return _align_activations(reference, other, parts, batches)
    total = {part.name: torch.arange(part.num_units) for part in parts}
    for _ in range(_MAX_ROUNDS):
        changed = False
        for part in parts:  # units of one part may be inputs of another, so one pass may not be enough
            order_U = _best_order(_weight_likeness(reference.module, other.module, part))
            if not torch.equal(order_U, torch.arange(part.num_units)):
                permute_units(other.module, part, order_U)
                total[part.name] = total[part.name][order_U]
                changed = True
        if not changed:
            break
    return {name: tuple(order_U.tolist()) for name, order_U in total.items()}


def _align_activations(
    reference: Network, other: Network, parts: Sequence[Module], batches: Sequence[Mapping[str, Tensor]]
) -> Orders:
    """What a unit computes does not depend on the order of the others, so one look at every part is enough.

    Units that compute nothing on the inputs are told apart by their weights.
    """
    mine, theirs = _record(reference, parts, batches), _record(other, parts, batches)
    orders = {}
    for part in parts:
        likeness_UU = 1e-6 * _weight_likeness(reference.module, other.module, part)
        if part.name in mine:
            for first_UN, second_UN in zip(mine[part.name], theirs[part.name], strict=True):
                likeness_UU += _correlation(first_UN) @ _correlation(second_UN).T
        order_U = _best_order(likeness_UU)
        permute_units(other.module, part, order_U)
        orders[part.name] = tuple(order_U.tolist())
    return orders


def align_folders(reference: str, other: str, out: Path, *, data: str | None = None, seed: int = 0) -> dict[str, Any]:
    """Writes a copy of one checkpoint, aligned to another; by weights, or by activations where data are given."""
    from apportion.models.load import load
    from apportion.models.save import save
    from apportion.tasks.batches import load_splits

    first, second = load(reference, tokens=16), load(other, tokens=16)
    check_sources([open_source(reference), open_source(other)])
    batches = load_splits(first, data, seed=seed).calibration.batches if data else ()
    before = _distance(first.module, second.module)
    orders = align(first, second, Partition.of(first), by="activations" if data else "weights", batches=batches)
    save(second, out)
    return {
        "units": sum(map(len, orders.values())),
        "moved": sum(place != unit for order in orders.values() for place, unit in enumerate(order)),
        "distance_before": before,
        "distance_after": _distance(first.module, second.module),
        "by": "activations" if data else "weights",
    }


def _distance(first: nn.Module, second: nn.Module) -> float:
    """Norm of the difference of all weights as a share of the first's norm."""
    apart = size = 0.0
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        apart += float((mine - theirs).detach().double().square().sum())
        size += float(mine.detach().double().square().sum())
    return (apart / size) ** 0.5 if size else 0.0


def permute_units(module: nn.Module, part: Module, order_U: Tensor) -> None:
    """Puts unit ``order_U[u]`` of a part in the place of unit ``u``, in every layer that holds it; in place."""
    for member in part.members:
        layer = module.get_submodule(member.layer)
        channels = _channel_order(member, order_U)
        with torch.no_grad():
            for tensor, dim in _sides(layer, member):
                tensor.copy_(tensor.index_select(dim, channels))


def _best_order(likeness_UU: Tensor) -> Tensor:
    """The assignment of most likeness; of equal ones that which moves least."""
    size = len(likeness_UU)
    scale = float(likeness_UU.abs().max()) or 1.0
    stay_UU = torch.eye(size, dtype=torch.float64) * scale * 1e-12
    return torch.from_numpy(linear_sum_assignment((likeness_UU + stay_UU).numpy(), maximize=True)[1])


def _weight_likeness(reference: nn.Module, other: nn.Module, part: Module) -> Tensor:
    r"""Inner products of the weights of units, summed over the layers that hold them, each layer scaled to one."""
    likeness_UU = torch.zeros(part.num_units, part.num_units, dtype=torch.float64)
    for member in part.members:
        pairs = zip(
            _sides(reference.get_submodule(member.layer), member),
            _sides(other.get_submodule(member.layer), member),
            strict=True,
        )
        for (mine, dim), (theirs, _) in pairs:
            mine_UK, theirs_UK = _by_unit(mine, dim, member, part), _by_unit(theirs, dim, member, part)
            norm = float(mine_UK.norm() * theirs_UK.norm())
            if norm > 0:
                likeness_UU += (mine_UK @ theirs_UK.T) / norm
    return likeness_UU


def _correlation(value_UN: Tensor) -> Tensor:
    centred_UN = value_UN - value_UN.mean(-1, keepdim=True)
    return torch.nn.functional.normalize(centred_UN, dim=-1)


def _record(
    network: Network, parts: Sequence[Module], batches: Sequence[Mapping[str, Tensor]]
) -> dict[str, list[Tensor]]:
    """What the units of every part put out on all batches: for each number of a unit a matrix of shape (U, N)."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    members = {part.name: next((m for m in part.members if m.side == "out"), None) for part in parts}
    for part in parts:
        member = members[part.name]
        if member is None:
            continue
        layer = network.module.get_submodule(member.layer)

        def keep(layer: nn.Module, _args: Any, output: Tensor, name: str = part.name) -> None:
            dim = 1 if layer_kind(layer) in ("conv", "depthwise", "norm") and output.dim() == 4 else output.dim() - 1
            seen.setdefault(name, []).append(output.detach().double().movedim(dim, 0).flatten(1))

        handles.append(layer.register_forward_hook(keep))
    try:
        with torch.no_grad():
            for batch in batches:
                forward(network.module, batch)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for part in parts:
        member = members[part.name]
        if member is not None and part.name in seen:
            value_CN = torch.cat(seen[part.name], 1)
            value_UKN = torch.stack([value_CN[places] for places in _channels(member, part.num_units)])
            found[part.name] = list(value_UKN.unbind(1))
    return found


def _channels(member: Member, num_units: int) -> list[list[int]]:
    places: list[list[int]] = [[] for _ in range(num_units)]
    for channel, unit in enumerate(member.units):
        if unit >= 0:
            places[unit].append(channel)
    return places


def _channel_order(member: Member, order_U: Tensor) -> Tensor:
    places = _channels(member, len(order_U))
    channels = torch.arange(len(member.units))
    for unit, source in enumerate(order_U.tolist()):
        channels[places[unit]] = torch.tensor(places[source])
    return channels


def _by_unit(tensor: Tensor, dim: int, member: Member, part: Module) -> Tensor:
    rows = tensor.detach().double().movedim(dim, 0).reshape(tensor.shape[dim], -1)
    return torch.stack([rows[places].flatten() for places in _channels(member, part.num_units)])


def _sides(layer: nn.Module, member: Member) -> list[tuple[Tensor, int]]:
    """The tensors of a layer that run over a member's channels, and the dimension that does."""
    kind = layer_kind(layer)
    if kind in ("linear", "conv"):
        weight, dim_in = input_weight(layer)
        if member.side == "in":
            return [(weight, dim_in)]
        bias = getattr(layer, "bias", None)
        return [(weight, 1 - dim_in)] + ([(bias, 0)] if isinstance(bias, Tensor) else [])
    found = []
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(layer, name, None)
        if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[0] == len(member.units):
            found.append((tensor, 0))
    return found if member.side == "out" else []
