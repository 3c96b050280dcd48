"""Low rank as knobs and a rule: a layer becomes two thin ones that compute nearly the same on the calibration data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from apportion.core.knob import Choice, Knob, Value
from apportion.errors import KnobError, ModelError
from apportion.methods.compress.layers import find_layer, plain_layers
from apportion.methods.compress.rows import observe
from apportion.models.channels import side_layer
from apportion.models.factored import Factored, break_even, factored, fill, matrix, replace_layer
from apportion.models.network import Network, forward
from apportion.numerics.lowrank import best_rank
from apportion.tasks.batches import Examples

PREFIX = "lowrank"
FULL = 1.0
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
MULTIPLE = 16
_UNSEEN = 1e-6  # weight of directions that the data do not show, relative to those they do


def lowrank_knobs(network: Network, *, shares: Sequence[float] = SHARES, multiple: int = MULTIPLE) -> list[Knob]:
    """One knob per layer that can be factored: its rank as a share of the break-even rank, 1 being the layer itself.

    At a share both the numbers held and the operations done are that share of the dense layer's, or a little less,
    as ranks are multiples of ``multiple``. Two thin layers are two kernels to launch and may take longer than one: the
    clock decides.
    """
    if not all(0 < share < FULL for share in shares):
        raise KnobError(f"shares of the break-even rank must lie between 0 and 1, got {list(shares)}")
    knobs = []
    for name in factorable(network):
        layer = network.module.get_submodule(name)
        by_rank = {rank_at(layer, share, multiple): share for share in sorted(shares)}
        values = sorted(share for rank, share in by_rank.items() if rank < break_even(layer))
        if values:
            knobs.append(Choice(f"{PREFIX}.{name}", (*values, FULL)))
    return knobs


def rank_at(layer: nn.Module, share: float, multiple: int = MULTIPLE) -> int:
    """The rank that a share of a layer's break-even rank stands for, a multiple of ``multiple``; finer when small."""
    most = break_even(layer)
    while multiple > 1 and most < 4 * multiple:
        multiple //= 2
    return max(multiple, int(share * most) // multiple * multiple)


def factorable(network: Network) -> list[str]:
    """The layers that the model runs without, when two others stand for them.

    Some models look at a layer's weight instead of calling it; these layers are found by trying.
    """
    names = plain_layers(network)
    if _runs(network, names):
        return names
    return [name for name in names if _runs(network, [name])]


@torch.no_grad()
def _runs(network: Network, names: Sequence[str]) -> bool:
    shared = [*network.module.parameters(), *network.module.buffers()]
    module = copy.deepcopy(network.module, {id(tensor): tensor for tensor in shared})
    for name in names:
        pair = factored(module.get_submodule(name), 1)
        for parameter in pair.parameters():
            parameter.zero_()
        replace_layer(module, name, pair)
    try:
        forward(module, network.inputs)
    except Exception:  # whatever a model may do with a layer's weight
        return False
    return True


@dataclass(frozen=True)
class LowRank:
    """Replaces a layer by two of a lower rank: the best on the outputs it computes for the examples (eq. P7).

    Judged on the model as it stands, after all moves before. A layer with a bias takes over in it what the lost
    directions hold on average. Factoring again to a lower rank is the same as factoring to it at once.
    """

    examples: Examples
    multiple: int = MULTIPLE

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        assert isinstance(value, float)
        name = knob.name.removeprefix(f"{PREFIX}.")
        layer = find_layer(model.module, name)
        if layer is None:
            return model
        rank = rank_at(layer, value, self.multiple)
        if isinstance(layer, Factored):
            if value == FULL:
                raise KnobError(f"{name} has rank {layer.rank} by now and can't rise; start from the original model")
            if rank >= layer.rank:  # a layer that pruning made small has finer ranks
                return model
        elif value == FULL or rank >= break_even(layer):
            return model
        return factor(model, name, rank, self.examples)


def factor(network: Network, name: str, rank: int, examples: Examples) -> Network:
    """A copy in which the layer named has a rank, by the best approximation of its outputs on the examples."""
    layer = network.module.get_submodule(name)
    edits = network.edits
    if any(f"{name}.{part}" in edits.widths for part in ("down", "up")):
        raise ModelError(f"{name} was sliced after it was factored and traced again; shrink {name}.down instead")
    if not 0 < rank < break_even(layer):
        raise ModelError(f"{name} can't have rank {rank}; possible are 1 to {-(-break_even(layer) // 1) - 1:g}")
    weight_OI = matrix(layer).double()
    bias = side_layer(layer, "out").bias
    bias_O = None if bias is None else bias.detach().double()  # type: ignore[operator]
    mean_O, moment_OO = _output_moments(network, name, examples, weight_OI)
    if bias_O is not None:
        moment_OO = moment_OO - torch.outer(mean_O, mean_O)
    up_OR, down_RI = best_rank(weight_OI, _with_unseen(moment_OO, weight_OI), rank)
    if bias_O is not None:
        bias_O = mean_O + up_OR @ (up_OR.T @ (bias_O - mean_O))
    module = copy.deepcopy(network.module)
    pair = factored(module.get_submodule(name), rank)
    fill(pair, down_RI, up_OR, bias_O)
    replace_layer(module, name, pair)
    return network.replace(module=module, edits=replace(edits, ranks={**edits.ranks, name: rank}))


def _output_moments(network: Network, name: str, examples: Examples, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and second moment of what a layer writes."""
    num_rows = 0
    mean_O, moment_OO = weight_OI.new_zeros(len(weight_OI)), weight_OI.new_zeros(len(weight_OI), len(weight_OI))

    def see(_name: str, _x: Tensor, y_RO: Tensor) -> None:
        nonlocal num_rows
        num_rows += len(y_RO)
        mean_O.add_(y_RO.double().sum(0))
        moment_OO.add_(y_RO.double().T @ y_RO.double())

    observe(network, examples, [name], see)
    return mean_O / max(num_rows, 1), moment_OO / max(num_rows, 1)


def _with_unseen(moment_OO: Tensor, weight_OI: Tensor) -> Tensor:
    """Adds a trace of the weight's own moment, which decides between directions that the data do not show."""
    own_OO = weight_OI @ weight_OI.T
    scale = (moment_OO.trace() or torch.ones((), dtype=own_OO.dtype)) / own_OO.trace().clamp_min(1e-300)
    return moment_OO + _UNSEEN * scale * own_OO
