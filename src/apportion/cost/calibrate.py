"""Calibrating latency: measure a few sizes of a network side by side, fit the additive model, know the floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from apportion.core.meter import Reading
from apportion.cost.additive import AdditiveCost, Work
from apportion.device.measure import Session
from apportion.device.meters import flops_by_part
from apportion.models.cut import slice_network
from apportion.models.network import Network
from apportion.models.partition import Module, Partition
from apportion.models.skip import Skip

BASELINE = "baseline"
CHEAPEST = "cheapest"
MeasureNetworks = Callable[[Mapping[str, Network]], Session]


@dataclass(frozen=True)
class Calibration:
    """What was measured before a run: the baseline, the floor, and the model that prices everything between."""

    cost: AdditiveCost
    baseline: Reading
    floor: Reading
    session: Session


def calibrate(network: Network, partition: Partition, measure: MeasureNetworks) -> Calibration:
    """Measures anchor networks interleaved and fits the additive model to them.

    The anchors: the network itself, each kind of module at half its size, all kinds at half, and the smallest network
    that the partition allows, whose latency is the floor.
    """
    anchors = {BASELINE: network}
    for name, sizes in anchor_sizes(partition).items():
        anchors[name] = slice_network(network, partition, partition.keep(sizes))
    session = measure(anchors)
    readings = {name: session.latency(name) for name in anchors}
    cost = AdditiveCost.fit(
        [work_of(anchor, partition) for anchor in anchors.values()], [reading.value for reading in readings.values()]
    )
    return Calibration(cost, readings[BASELINE], readings[CHEAPEST], session)


def anchor_sizes(partition: Partition) -> dict[str, dict[str, int]]:
    """How many units each module keeps in every anchor but the baseline."""
    half = {module.name: _half(module) for module in partition}
    kinds = sorted({module.kind for module in partition})
    anchors = {
        f"half {kind}": {module.name: half[module.name] for module in partition if module.kind == kind}
        for kind in kinds
    }
    if len(kinds) > 1:
        anchors["half"] = half
    anchors[CHEAPEST] = {module.name: module.sizes()[0] for module in partition}
    return anchors


def _half(module: Module) -> int:
    return min(module.sizes(), key=lambda size: abs(size - module.num_units / 2))


def work_of(network: Network, partition: Partition) -> Work:
    """Work by kind: operations in attention, in MLPs and elsewhere, and the number of blocks left."""
    flops = flops_by_part(network)
    attention = sum(flops.get(part.name.removesuffix(".heads"), 0) for part in partition if part.kind == "heads")
    neurons = {member.layer for part in partition if part.kind == "neurons" for member in part.members}
    mlp = sum(flops.get(layer, 0) for layer in neurons)
    blocks = [name for part in partition for name, _ in part.blocks]
    left = sum(not isinstance(network.module.get_submodule(name), Skip) for name in blocks)
    return {
        "attention": float(attention),
        "mlp": float(mlp),
        "other": float(max(0, flops[""] - attention - mlp)),
        "blocks": float(left),
    }


@dataclass(frozen=True)
class PredictedLatency:
    """A meter that predicts: the additive model's latency of a network, in milliseconds."""

    cost: AdditiveCost
    partition: Partition
    unit: str = "ms"

    def read(self, model: Network) -> Reading:
        return Reading(value=self.cost.predict(work_of(model, self.partition)), unit=self.unit)
