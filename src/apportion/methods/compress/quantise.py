"""Post-training quantisation as a knob and a rule: int8 through the tools of the target's own runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from apportion.core.knob import Choice, Knob, Value
from apportion.core.meter import Meter, Reading
from apportion.methods.compress.repair import answer_loss
from apportion.models.network import Int8, Network, read_out
from apportion.models.partition import Partition
from apportion.models.quantise import input_ranges, quantised_layers, simulate
from apportion.tasks.batches import Examples
from apportion.tasks.shaped import shaped

PREFIX = "quantise"
BUT = "int8 but "
REST = "rest"


def quantise_knob(num_layers: int = 0) -> Knob:
    """The precision of the network: int8, int8 but for the most sensitive of so many layers, or fp32.

    Layers left in float double from state to state, up to half of them; with ``num_layers`` 0 it is all or none.
    """
    counts = [2**power for power in range(num_layers.bit_length()) if 2 ** (power + 1) <= num_layers]
    return Choice(PREFIX, ("int8", *(f"{BUT}{count}" for count in counts), "fp32"), granularity="global")


@dataclass(frozen=True)
class Quantise:
    """Gives a network the inputs that its int8 ranges are set by; the runtime quantises when it builds.

    ``recipe`` says how, ``order`` which layers are left in float first.
    """

    calibration: Examples
    recipe: Int8 = field(default_factory=Int8)
    order: tuple[str, ...] = ()

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        if value == "fp32":
            return model.replace(calibration=())
        return self.quantised(model, int(str(value).removeprefix(BUT)) if value != "int8" else 0)

    def quantised(self, model: Network, num_in_float: int = 0) -> Network:
        """The network in int8 but for the first layers of the order."""
        int8 = replace(self.recipe, in_float=self.order[:num_in_float])
        return model.replace(calibration=self.inputs(model), int8=int8)

    def inputs(self, model: Network) -> tuple[dict[str, Tensor], ...]:
        return tuple(shaped(self.calibration, model))


def precision_groups(network: Network, partition: Partition, recipe: Int8) -> dict[str, tuple[str, ...]]:
    """The modules whose precision is decided together: every block by itself, and all layers outside of blocks."""
    blocks = {name: (name,) for module in partition for name, _ in module.blocks}
    inside = Int8(in_float=tuple(blocks))
    rest = tuple(name for name in quantised_layers(network.replace(int8=recipe)) if inside.covers(name))
    return {**blocks, **({REST: rest} if rest else {})}


def mixed_knobs(groups: Mapping[str, tuple[str, ...]]) -> list[Knob]:
    """One knob for every group: int8 or fp32."""
    return [Choice(f"{PREFIX}.{name}", ("int8", "fp32")) for name in groups]


@dataclass(frozen=True)
class QuantiseParts:
    """Puts one group of modules into int8 and leaves the others as they are; ``rule`` says how."""

    rule: Quantise
    groups: Mapping[str, tuple[str, ...]]

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        parts = set(self.groups[knob.name.removeprefix(f"{PREFIX}.")])
        everything = {name for names in self.groups.values() for name in names}
        in_float = set(model.int8.in_float) if model.precision == "int8" else everything
        in_float = in_float - parts if value == "int8" else in_float | parts
        if in_float == everything:
            return model.replace(calibration=())
        int8 = replace(self.rule.recipe, in_float=tuple(sorted(in_float)))
        return model.replace(calibration=model.calibration or self.rule.inputs(model), int8=int8)


@torch.inference_mode()
def by_sensitivity(network: Network, calibration: Examples, recipe: Int8 | None = None) -> tuple[str, ...]:
    """The layers that a recipe quantises, the one first whose rounding alone moves the network's answers furthest.

    How far is the loss that repair trains on (eq. R1, R2), on the calibration examples.
    """
    wanted = [read_out(network, batch) for batch in calibration.batches]
    network = network.replace(calibration=tuple(shaped(calibration, network)))
    recipe = recipe or Int8()
    ranges = input_ranges(network.module, network.calibration)
    losses = {}
    for layer in quantised_layers(network.replace(int8=recipe)).keys() & ranges:
        others = tuple(name for name in ranges if name != layer)
        run = simulate(network.replace(int8=replace(recipe, in_float=others)), ranges)
        answers = [read_out(run, batch) for batch in calibration.batches]
        pairs = zip(answers, wanted, strict=True)
        losses[layer] = sum(answer_loss(answer, like, network.readout).item() for answer, like in pairs)
    return tuple(sorted(losses, key=lambda name: (-losses[name], name)))


@dataclass(frozen=True)
class AsRun:
    """Reads quality of what will run: in simulated int8 where a network is to be quantised."""

    meter: Meter[Network]

    @property
    def unit(self) -> str:
        return self.meter.unit

    def read(self, model: Network) -> Reading:
        return self.meter.read(simulate(model) if model.calibration else model)
