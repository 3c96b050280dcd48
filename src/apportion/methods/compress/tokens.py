"""Token merging and depth as knobs and rules: how many tokens an encoder is left with, and how many of its blocks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion.core.knob import Choice, Knob, Value
from apportion.methods.compress.norms import renormalised
from apportion.models.cut import slice_network
from apportion.models.network import Network, float_outputs, forward
from apportion.models.partition import Module, Partition
from apportion.models.skip import first_tensor
from apportion.models.tokens import Tokens as Left
from apportion.models.tokens import merge_tokens
from apportion.tasks.batches import Examples

TOKENS, DEPTH = "tokens", "depth"
_SHARES = (0.25, 0.5, 0.75)


def tokens_knob(network: Network, partition: Partition) -> Knob | None:
    """The number of tokens left at the end of an encoder; None where merging them is not known to work.

    It works where one list of blocks passes tokens on, with at most a mask beside them, and the output has the same
    shapes afterwards: tried on the example inputs. Language models are left out, whose tokens must not see later ones.
    """
    blocks = _encoder(partition)
    if blocks is None or network.readout == "token-logits":
        return None
    num_tokens = _num_tokens(network, blocks)
    if num_tokens is None or num_tokens < 8:
        return None
    rule = Tokens(partition, num_tokens)
    try:
        with torch.inference_mode():
            wanted = float_outputs(forward(network.module, network.inputs))
            found = float_outputs(forward(rule.merged(network, num_tokens // 4).module, network.inputs))
    except (RuntimeError, TypeError, IndexError, ValueError):  # its blocks take more than tokens and a mask
        return None
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in found]:
        return None
    counts = (max(2, round(share * num_tokens)) for share in _SHARES)
    return Choice(TOKENS, (*counts, num_tokens), granularity="global")


@dataclass(frozen=True)
class Tokens:
    """Merges tokens evenly from the second block on, down to a number at the last (eq. R5)."""

    partition: Partition
    num_tokens: int

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        assert isinstance(value, int)
        return self.merged(model, value)

    def merged(self, model: Network, num_left: int) -> Network:
        module = copy.deepcopy(model.module)
        left: Left = {}
        if num_left < self.num_tokens:
            blocks = _encoder(self.partition)
            assert blocks is not None
            names = [name for name, _ in blocks.blocks]
            step = (self.num_tokens - num_left) / (len(names) - 1)
            left = {
                name: (round(self.num_tokens - step * place), self.num_tokens)
                for place, name in enumerate(names[1:], start=1)
            }
        merge_tokens(module, left)
        return model.replace(module=module, edits=replace(model.edits, tokens=left))


def depth_knobs(partition: Partition) -> list[Knob]:
    """One knob for every list of blocks: how many of the first it keeps, which is where the network exits."""
    return [
        Choice(f"{DEPTH}.{module.name}", range(max(1, module.minimum), module.num_units + 1))
        for module in partition
        if module.kind == "blocks" and module.num_units > max(1, module.minimum)
    ]


@dataclass(frozen=True)
class Depth:
    """Leaves out the blocks after the first so many; what follows the blocks reads what these leave."""

    partition: Partition
    calibration: Examples | None = None

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        assert isinstance(value, int)
        name = knob.name.removeprefix(f"{DEPTH}.")
        left = set(self.partition.kept_in(model)[name])
        kept = tuple(sorted(left.intersection(range(value)))) or (min(left),)  # pruning may have left out the first
        sliced = slice_network(model, self.partition, {name: kept})
        return sliced if self.calibration is None else renormalised(sliced, self.calibration)


def _encoder(partition: Partition) -> Module | None:
    """The blocks of an encoder: of a network with one list of them, each with heads."""
    lists = [module for module in partition if module.kind == "blocks"]
    heads = any(module.kind == "heads" for module in partition)
    return lists[0] if len(lists) == 1 and heads and lists[0].num_units > 1 else None


@torch.inference_mode()
def _num_tokens(network: Network, blocks: Module) -> int | None:
    """How many tokens enter the blocks; None where what enters is no sequence."""
    shapes: list[Any] = []
    first = network.module.get_submodule(blocks.blocks[0][0])
    handle = first.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(first_tensor(args, kwargs).shape), with_kwargs=True
    )
    try:
        forward(network.module, network.inputs)
    finally:
        handle.remove()
    return int(shapes[0][1]) if len(shapes[0]) == 3 else None
