r"""Side branches: what the gated delta adds to a frozen layer, for a batch that mixes tasks.

.. math:: y_n = W x_n + b + (a^{(t_n)} \odot \Delta) x_n \quad \text{(eq. A15; the paper's eq. 19 read literally)}

Gates belong to rows or columns of a layer's weight, so a branch is those rows or columns of the delta that some task
has open, with its outputs or inputs scaled by the gates of each example's task: one small product for the whole batch.
Shape letters: N examples, T tasks, G groups, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.errors import ModelError
from apportion.methods.adapt.groups import Groups, places
from apportion.models.network import Network


class Branch(Protocol):
    """Takes a layer's input and output and the task of every example; returns the output with the branch added."""

    def __call__(self, x: Tensor, output: Tensor, task_N: Tensor) -> Tensor: ...

    def held(self) -> Iterator[Tensor]:
        """The tensors it keeps."""
        ...


@dataclass(frozen=True, eq=False)
class Gated:
    """The delta of one parameter, the dimension that runs over groups, and each one's group."""

    delta: Tensor
    dim: int
    group_C: Tensor

    def of_tasks(self, gate_TG: Tensor) -> Tensor:
        """A vector's delta under the gates of every task, shape (T, C)."""
        return gate_TG[:, self.group_C].to(self.delta.device, self.delta.dtype) * self.delta


@dataclass(frozen=True, eq=False)
class Site:
    """A layer that side branches run beside."""

    name: str
    layer: nn.Module
    weight: Gated | None
    bias: Gated | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(gated.delta for gated in (self.weight, self.bias) if gated is not None)

    def branch(self, gate_TG: Tensor, run_G: Tensor) -> Branch | None:
        """The branch of the groups that run; None where none of this layer's does. Both vectors end with a one."""
        kind = Product if isinstance(self.layer, nn.Linear) else Norm
        return kind.of(self, gate_TG, run_G)


def sites_of(network: Network, groups: Groups, stacks: nn.ModuleList) -> tuple[Site, ...]:
    """The layers that may change, with their deltas.

    Raises:
        ModelError: one of them is neither linear nor a layer norm.
    """
    found = places(network, groups)
    delta = {
        name: bundle.delta.detach()[place]  # type: ignore[operator]
        for bundle in stacks
        for place, name in enumerate(bundle.names)  # type: ignore[arg-type]
    }
    gated = {name: Gated(delta[name], place.dim, torch.tensor(place.group)) for name, place in found.items()}
    sites = []
    for name in dict.fromkeys(parameter.rpartition(".")[0] for parameter in found):
        layer = network.module.get_submodule(name)
        if not isinstance(layer, nn.Linear | nn.LayerNorm):
            kind = type(layer).__name__
            raise ModelError(f"{name} is a {kind}; side branches run beside linear layers and layer norms only")
        sites.append(Site(name, layer, gated.get(f"{name}.weight"), gated.get(f"{name}.bias")))
    return tuple(sites)


def delta_norms(sites: tuple[Site, ...], num_groups: int) -> Tensor:
    """The Frobenius norm of every group's delta, over all the parameters it lies in, shape (G,)."""
    square_G = torch.zeros(num_groups + 1)
    for site in sites:
        for gated in (site.weight, site.bias):
            if gated is not None:
                square_C = gated.delta.float().square().movedim(gated.dim, 0).reshape(len(gated.group_C), -1).sum(1)
                square_G.index_add_(0, gated.group_C, square_C.cpu())
    return square_G[:num_groups].sqrt()


@dataclass(frozen=True, eq=False)
class Plan:
    """The branches of some tasks, made once: layers by name, without those that have nothing open."""

    row_of: Mapping[str, int]
    run_G: Tensor
    branches: Mapping[str, Branch]
    size_bytes: int

    @classmethod
    def of(cls, sites: tuple[Site, ...], names: tuple[str, ...], gate_TG: Tensor, run_G: Tensor) -> Plan:
        """``gate_TG`` and ``run_G`` are without the group that is always on."""
        ended_TG = torch.cat([gate_TG, torch.ones(len(gate_TG), 1)], dim=1)
        ended_G = torch.cat([run_G, torch.ones(1, dtype=torch.bool)])
        made = {site.name: site.branch(ended_TG, ended_G) for site in sites}
        branches = {name: branch for name, branch in made.items() if branch is not None}
        known = {tensor.untyped_storage().data_ptr() for site in sites for tensor in site.tensors}
        held = [tensor for branch in branches.values() for tensor in branch.held()]
        size_bytes = sum(t.numel() * t.element_size() for t in held if t.untyped_storage().data_ptr() not in known)
        return cls({name: row for row, name in enumerate(names)}, run_G, branches, size_bytes)


@dataclass(frozen=True, eq=False)
class Shift:
    """What the delta of a bias adds."""

    shift_TC: Tensor

    @classmethod
    def of(cls, bias: Gated | None, gate_TG: Tensor, run_G: Tensor) -> Shift | None:
        if bias is None or not run_G[bias.group_C].any():
            return None
        return cls(bias.of_tasks(gate_TG))

    def __call__(self, x: Tensor, output: Tensor, task_N: Tensor) -> Tensor:
        return output.add_(_spread(self.shift_TC[task_N], x))

    def held(self) -> Iterator[Tensor]:
        yield self.shift_TC


@dataclass(frozen=True, eq=False)
class Product:
    """What the delta of a linear layer adds: a product over its open rows or columns, and the shift of its bias.

    ``index_C`` picks the channels that run, all where it is None; ``inner_C`` is the bias where it has the rows' gates.
    """

    delta: Tensor
    gate_TC: Tensor
    index_C: Tensor | None
    rows: bool
    inner_C: Tensor | None
    shift: Shift | None

    @classmethod
    def of(cls, site: Site, gate_TG: Tensor, run_G: Tensor) -> Product | Shift | None:
        weight, bias = site.weight, site.bias
        if weight is None or not run_G[weight.group_C].any():
            return Shift.of(bias, gate_TG, run_G)
        run_C, device = run_G[weight.group_C], weight.delta.device
        index_C = None if run_C.all() else run_C.nonzero()[:, 0].to(device)
        inside = bias is not None and weight.dim == 0 and torch.equal(bias.group_C, weight.group_C)
        return cls(
            weight.delta if index_C is None else weight.delta.index_select(weight.dim, index_C),
            gate_TG[:, weight.group_C][:, run_C].to(device, weight.delta.dtype),
            index_C,
            weight.dim == 0,
            bias.delta[run_C.to(device)] if bias is not None and inside else None,
            None if inside else Shift.of(bias, gate_TG, run_G),
        )

    def __call__(self, x: Tensor, output: Tensor, task_N: Tensor) -> Tensor:
        gate = _spread(self.gate_TC[task_N], x)
        if self.rows:
            made = functional.linear(x, self.delta, self.inner_C).mul_(gate)
            output = output.add_(made) if self.index_C is None else output.index_add_(-1, self.index_C, made)
        else:
            some = x if self.index_C is None else x.index_select(-1, self.index_C)
            output = output.add_(functional.linear(some * gate, self.delta))
        return output if self.shift is None else self.shift(x, output, task_N)

    def held(self) -> Iterator[Tensor]:
        yield from (t for t in (self.delta, self.gate_TC, self.index_C, self.inner_C) if t is not None)
        if self.shift is not None:
            yield from self.shift.held()


@dataclass(frozen=True, eq=False)
class Norm:
    """A layer norm, run again with the scale and shift of each example's task."""

    scale_TC: Tensor
    shift_TC: Tensor
    shape: tuple[int, ...]
    eps: float

    @classmethod
    def of(cls, site: Site, gate_TG: Tensor, run_G: Tensor) -> Norm | None:
        weight, bias, layer = site.weight, site.bias, site.layer
        if not any(run_G[gated.group_C].any() for gated in (weight, bias) if gated is not None):
            return None
        assert isinstance(layer, nn.LayerNorm)
        assert weight is not None  # a norm without a scale has nothing that may change
        scale_TC = layer.weight.detach() + weight.of_tasks(gate_TG)
        shift_TC = torch.zeros_like(scale_TC) if bias is None else layer.bias.detach() + bias.of_tasks(gate_TG)
        return cls(scale_TC, shift_TC, layer.normalized_shape, layer.eps)

    def __call__(self, x: Tensor, output: Tensor, task_N: Tensor) -> Tensor:
        plain = functional.layer_norm(x, self.shape, eps=self.eps)
        return torch.addcmul(_spread(self.shift_TC[task_N], x), plain, _spread(self.scale_TC[task_N], x))

    def held(self) -> Iterator[Tensor]:
        yield from (self.scale_TC, self.shift_TC)


def _spread(value_NC: Tensor, like: Tensor) -> Tensor:
    """One row for every example, the same at all its places."""
    return value_NC.reshape(len(value_NC), *[1] * (like.dim() - 2), -1)
