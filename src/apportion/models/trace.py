"""Which channels of which layers belong together: Torch-Pruning's dependency graph, read once per model.

Two kinds of coupled sets come out of it. *Channels and neurons*: a channel of a producing layer, with all the places
in other layers that carry the same channel. *Heads*: the layers around one attention operation; here the graph says
which layers they are, and the head size says which of their channels form a head (heads that share a key-value head
belong to one unit).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch_pruning as tp
from torch import Tensor, nn
from torch_pruning import ops
from torch_pruning.dependency import graph as tp_graph
from transformers.pytorch_utils import Conv1D

from apportion.errors import TraceError
from apportion.models.channels import CUSTOM, Side, layer_kind, mixes_channels, num_channels
from apportion.models.network import float_outputs, forward, traceable

HEAD_SIZE_NAMES = ("head_dim", "attention_head_size", "head_size", "d_kv", "d_head")
HEAD_COUNT_NAMES = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)
HEAD_WIDTH_NAMES = ("all_head_size", "split_size", "inner_dim", "embed_dim")
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Embedding, nn.LayerNorm, Conv1D)


@dataclass(frozen=True)
class Coupled:
    """Channels that can only go together: for every layer and side, the unit that each channel belongs to (-1: none).

    ``per_unit`` says by how much an attribute of a module falls when one unit goes. ``layouts`` lists other ways to
    read a fused projection, to be tried when the first does not hold.
    """

    name: str
    kind: str
    num_units: int
    units: Mapping[tuple[str, Side], tuple[int, ...]]
    per_unit: Mapping[tuple[str, str], int] = field(default_factory=dict)
    layouts: tuple[Mapping[tuple[str, Side], tuple[int, ...]], ...] = ()


@dataclass
class Trace:
    """What tracing found: the coupled sets, and for the layers left alone the reason why."""

    coupled: list[Coupled]
    refused: dict[str, str]


def trace(module: nn.Module, inputs: Mapping[str, Tensor]) -> Trace:
    """Traces a model on example inputs.

    Raises:
        TraceError: the model can't run on the inputs or keeps no autograd graph.
    """
    graph = _dependency_graph(module, inputs)
    names = {layer: name for name, layer in module.named_modules()}
    position = {name: index for index, name in enumerate(names.values())}
    shared = shared_weights(module)
    result = Trace([], {})
    in_attention: set[nn.Module] = set()
    for region in _attention_regions(graph):
        in_attention |= region.producers
        _add(
            result,
            lambda region=region: _heads(module, names, region),
            names,
            region.producers | region.consumers,
            shared,
        )
    for group in _channel_groups(graph, in_attention, result.refused, names):
        root = group[0].dep.target.module
        _add(result, lambda group=group: _channels(graph, names, group), names, {root}, shared)
    result.coupled.sort(key=lambda coupled: min(position[layer] for layer, _ in coupled.units))
    if not result.coupled:
        reasons = sorted(result.refused.items(), key=lambda pair: "leave the model" in pair[1])
        layer, reason = next(iter(reasons), ("the model", "has no linear or convolution layer"))
        raise TraceError(f"no part of the model can be sliced: {layer}: {reason}")
    return result


class _Refused(Exception):
    """A coupled set that can't be sliced; the text says why."""


def _add(result: Trace, build: Any, names: Any, roots: set[nn.Module], shared: set[nn.Module]) -> None:
    label = min(names.get(layer, "?") for layer in roots)
    tied = [names[layer] for layer in roots if layer in shared]
    try:
        if tied:
            raise _Refused(f"{tied[0]} shares its weight with another layer")
        result.coupled.append(build())
    except _Refused as refusal:
        result.refused[label] = str(refusal)


def _dependency_graph(module: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    graph = tp.DependencyGraph()
    try:
        with warnings.catch_warnings(), traceable(module):
            warnings.simplefilter("ignore")
            graph.build_dependency(
                module,
                example_inputs=dict(inputs),
                forward_fn=lambda model, given: _differentiable(forward(model, given)),
                customized_pruners=CUSTOM,
                verbose=False,
            )
    except TraceError:
        raise
    except Exception as error:  # whatever a user's forward may raise
        where = _innermost(error)
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise TraceError(f"can't trace the model: {where} failed with {type(error).__name__}: {first}") from error
    return graph


def _differentiable(output: Any) -> list[Tensor]:
    tensors = [tensor for tensor in float_outputs(output) if tensor.grad_fn is not None]
    if not tensors:
        raise TraceError(
            "can't trace the model: its output carries no autograd graph (a no_grad block, a detach, or an op "
            "without a gradient lies on the way); trace needs a differentiable forward pass"
        )
    return tensors


def _innermost(error: BaseException) -> str:
    frame = error.__traceback__
    name = "forward"
    while frame is not None:
        name = frame.tb_frame.f_code.co_qualname
        frame = frame.tb_next
    return f"op {name!r}"


def shared_weights(module: nn.Module) -> set[nn.Module]:
    """The layers whose weight is another layer's, too."""
    owners: dict[int, list[nn.Module]] = {}
    for layer in module.modules():
        weight = layer._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(layer)
    return {layer for layers in owners.values() if len(layers) > 1 for layer in layers}


# ---------------------------------------------------------------- channels and neurons


def _channel_groups(graph: Any, in_attention: set[nn.Module], refused: Any, names: Any) -> Iterator[Any]:
    """All channel groups but those of attention projections, whose channels can't be followed one by one."""
    roots = (nn.Linear, nn.modules.conv._ConvNd, Conv1D)
    most = 200 * len(graph.module2node)

    class Limited(tp_graph.Group):
        def add_dep(self, dep: Any, idxs: Any) -> None:
            if len(self._group) > most:
                raise _Refused("its channels lead around in circles")
            super().add_dep(dep, idxs)

    visited: list[Any] = []
    original, tp_graph.Group = tp_graph.Group, Limited
    try:
        for layer in list(graph.module2node):
            if layer in in_attention or not isinstance(layer, roots) or any(layer is v for v in visited):
                continue
            pruner = graph.get_pruner_of_module(layer)
            if pruner is None or pruner.get_out_channels(layer) is None:
                continue
            try:
                group = graph.get_pruning_group(
                    layer, pruner.prune_out_channels, list(range(pruner.get_out_channels(layer)))
                )
            except _Refused as refusal:
                refused[names[layer]] = str(refusal)
                continue
            outs = [dep.target.module for dep, _ in group if graph.is_out_channel_pruning_fn(dep.handler)]
            visited += outs
            if not any(out in in_attention for out in outs):
                yield group
    finally:
        tp_graph.Group = original


def _channels(graph: Any, names: Mapping[Any, str], group: Any) -> Coupled:
    root = group[0].dep.target.module
    num_units = num_channels(root, "out")
    single = graph.get_pruning_group(root, group[0].dep.handler, [0])
    closure = {i for dep, idxs in single if dep.target.module is root for i in idxs}
    units: dict[tuple[str, Side], list[int]] = {}
    if closure == {0}:
        _collect(graph, names, group, units, lambda item: item.root_idxs)
    else:  # one layer feeds several parts that are combined again, as in fused gated MLPs: close each unit by itself
        seen: set[int] = set()
        unit = -1
        for first in range(num_units):
            if first in seen:
                continue
            unit += 1
            one = graph.get_pruning_group(root, group[0].dep.handler, [first])
            closed = {i for dep, idxs in one if dep.target.module is root for i in idxs}
            if len(closed) != len(closure) or closed & seen or first not in closed:
                raise _Refused("its channels depend on each other in no regular way")
            seen |= closed
            _collect(graph, names, one, units, lambda item, unit=unit: [unit] * len(item.idxs))
        num_units = unit + 1
    consumers = [name for name, side in units if side == "in" and mixes_channels(_find(names, name))]
    if not consumers:
        raise _Refused("its channels leave the model")
    if num_units < 2:
        raise _Refused("it has a single channel")
    kind = "neurons" if isinstance(root, nn.Linear | Conv1D) else "channels"
    producers = sorted(name for name, side in units if side == "out" and mixes_channels(_find(names, name)))
    return Coupled(
        name=producers[0],
        kind=kind,
        num_units=num_units,
        units={key: tuple(units[key]) for key in sorted(units)},
    )


def _collect(graph: Any, names: Mapping[Any, str], group: Any, units: Any, unit_of: Any) -> None:
    for item in group:
        layer = item.dep.target.module
        if ops.module2type(layer) == ops.OPTYPE.OUTPUT:
            raise _Refused("its channels leave the model")
        if type(layer) not in CUSTOM and _is_operation(layer):
            continue
        if layer_kind(layer) is None:
            label = names.get(layer, "a bare parameter")
            raise _Refused(f"its channels pass {label} ({type(layer).__name__}), which mixes or fixes them")
        side: Side = "out" if graph.is_out_channel_pruning_fn(item.dep.handler) else "in"
        if layer_kind(layer) in ("depthwise", "norm", "activation"):
            side = "out"
        whole = units.setdefault((names[layer], side), [-1] * num_channels(layer, side))
        for index, unit in zip(item.idxs, unit_of(item), strict=True):
            if not 0 <= index < len(whole):
                raise _Refused(f"its channels can't be followed to {names[layer]}")
            whole[index] = unit


def _is_operation(layer: Any) -> bool:
    return type(layer).__module__ == ops.__name__ or (
        isinstance(layer, nn.Module) and not any(True for _ in layer.parameters())
    )


def _find(names: Mapping[Any, str], name: str) -> nn.Module:
    return next(layer for layer, other in names.items() if other == name)


# ---------------------------------------------------------------- attention heads


@dataclass
class _Region:
    """The layers around one attention operation: those it reads from and those that read from it."""

    producers: set[nn.Module]
    consumers: set[nn.Module]


def _attention_regions(graph: Any) -> list[_Region]:
    regions: list[_Region] = []
    seen: set[int] = set()
    for node in list(graph.module2node.values()):
        if not _is_attention(node) or id(node) in seen:
            continue
        region = _Region(set(), set())
        stack = [node]
        seen.add(id(node))
        while stack:
            here = stack.pop()
            for neighbours, found in ((here.inputs, region.producers), (here.outputs, region.consumers)):
                for neighbour in neighbours:
                    layer = neighbour.module
                    if isinstance(layer, _LAYERS) and not isinstance(layer, nn.LayerNorm):
                        found.add(layer)
                    elif id(neighbour) not in seen and not isinstance(layer, nn.Parameter):
                        seen.add(id(neighbour))
                        stack.append(neighbour)
        if region.producers and region.consumers and region not in regions:
            regions.append(region)
    return regions


def _is_attention(node: Any) -> bool:
    name = node.grad_fn.name() if hasattr(node.grad_fn, "name") else ""
    return "ScaledDotProduct" in name or name.startswith("SoftmaxBackward")


def _heads(module: nn.Module, names: Mapping[Any, str], region: _Region) -> Coupled:
    for layer in region.producers | region.consumers:
        if layer_kind(layer) != "linear":
            raise _Refused(f"attention reads or feeds {names[layer]} ({type(layer).__name__})")
    if len(region.consumers) != 1:
        listed = ", ".join(sorted(names[layer] for layer in region.consumers))
        raise _Refused(f"the heads feed several layers ({listed})")
    (consumer,) = region.consumers
    owners = {names[layer].rpartition(".")[0] for layer in region.producers | region.consumers}
    width = num_channels(consumer, "in")
    head_size = _head_size(module, owners, width)
    if head_size is None or width % head_size:
        raise _Refused(f"the head size of {', '.join(sorted(owners))} is in none of {', '.join(HEAD_SIZE_NAMES)}")
    widths = {names[layer]: num_channels(layer, "out") for layer in region.producers}
    num_heads = width // head_size
    fused = len(widths) == 1
    (smallest,) = {min(widths.values())}
    num_units = num_heads if fused else smallest // head_size
    if fused and (smallest - width) % 2 == 0 and smallest < 3 * width:  # one projection for grouped queries
        num_units = (smallest - width) // 2 // head_size
    if num_units < 2 or num_heads % num_units or any(w % num_units for w in widths.values()):
        raise _Refused(f"{num_heads} heads over projections of widths {sorted(widths.values())} form no equal units")

    def split(size: int) -> list[int]:
        return [index // (size // num_units) for index in range(size)]

    key_out: Side = "out"
    fixed = {(names[consumer], "in"): tuple(split(width))}
    if fused:
        (name,) = widths
        rest = (widths[name] - width) // 2
        layouts = [split(width) + split(rest) + split(rest), split(widths[name])]  # by part; by head
    else:
        layouts = [[]]
        fixed |= {(name, key_out): tuple(split(size)) for name, size in widths.items()}
    per_unit = {}
    for owner in sorted(owners):
        for attribute in HEAD_COUNT_NAMES + HEAD_WIDTH_NAMES:
            value = getattr(module.get_submodule(owner), attribute, None)
            if type(value) is int and value % num_units == 0 and value > 0:
                per_unit[owner, attribute] = value // num_units
    variants = [fixed | ({(name, key_out): tuple(layout)} if fused else {}) for layout in layouts]
    variants = [{key: variant[key] for key in sorted(variant)} for variant in variants]
    return Coupled(
        name=_common_owner(owners),
        kind="heads",
        num_units=num_units,
        units=variants[0],  # type: ignore[arg-type]
        per_unit=per_unit,
        layouts=tuple(variants[1:]),  # type: ignore[arg-type]
    )


def _head_size(module: nn.Module, owners: set[str], width: int) -> int | None:
    parts = [module.get_submodule(owner) for owner in owners]
    for name in HEAD_SIZE_NAMES:
        for part in parts:
            if type(getattr(part, name, None)) is int:
                return getattr(part, name)
    for name in HEAD_COUNT_NAMES:
        for part in parts:
            count = getattr(part, name, None)
            if type(count) is int and count > 0 and width % count == 0:
                return width // count
    return None


def _common_owner(owners: set[str]) -> str:
    parts = [owner.split(".") for owner in sorted(owners)]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common) or "attention"
