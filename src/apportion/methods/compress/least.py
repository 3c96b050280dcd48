"""The floor of a run: what the smallest network that its knobs lead to costs, where that is known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apportion.core.budget import Budget, format_quantity
from apportion.core.knob import Knob
from apportion.core.meter import Meter, Reading
from apportion.cost.calibrate import Anchored
from apportion.errors import InfeasibleError
from apportion.methods.compress.lowrank import PREFIX as LOWRANK
from apportion.methods.compress.prune import GLOBAL
from apportion.methods.compress.prune import PREFIX as PRUNE
from apportion.methods.compress.sparsity import PREFIX as SPARSE
from apportion.methods.compress.tokens import DEPTH, TOKENS
from apportion.models.cut import slice_network
from apportion.models.network import Int8, Network
from apportion.models.partition import Partition


def counted_floor(
    network: Network,
    partition: Partition,
    knobs: Sequence[Knob],
    meters: Mapping[str, Meter[Network]],
    int8: Int8 | None = None,
) -> dict[str, Reading]:
    """What can be counted of the smallest network, by the meters that need no clock; zero where it is not known.

    Args:
        int8: how the network may be quantised, where it may.
    """
    kinds = _kinds(knobs)
    smallest = smallest_network(network, partition, knobs)
    floor = {key: meter.read(smallest) for key, meter in meters.items()}
    if int8 is not None:
        floor["size"] = meters["size"].read(smallest.replace(calibration=(smallest.inputs,), int8=int8))
    unknown = {LOWRANK: ("params", "size", "flops"), SPARSE: ("size",), TOKENS: ("flops", "memory")}
    quantities = {quantity for kind in kinds for quantity in unknown.get(kind, ())}
    for key in [key for key in floor if key.partition("@")[0] in quantities]:
        floor[key] = Reading(value=0.0, unit=floor[key].unit)
    return floor


def smallest_network(network: Network, partition: Partition, knobs: Sequence[Knob]) -> Network:
    """The network with every unit cut that these knobs may cut."""
    return slice_network(network, partition, _least_kept(partition, knobs))


def _least_kept(partition: Partition, knobs: Sequence[Knob]) -> dict[str, tuple[int, ...]]:
    """The units that every module is left with when all knobs that cut stand at their cheapest."""
    least = {knob.name: knob.cheapest for knob in knobs}
    keep = {}
    for module in partition:
        if GLOBAL in least or f"{PRUNE}.{module.name}" in least:
            keep[module.name] = module.kept(module.sizes()[0])
        elif f"{DEPTH}.{module.name}" in least:
            keep[module.name] = tuple(range(int(least[f"{DEPTH}.{module.name}"])))
    return keep


def smallest_is_known(knobs: Sequence[Knob]) -> bool:
    """Whether nothing runs with less than every unit cut: fewer tokens or lower ranks may, and are not measured."""
    return not _kinds(knobs) & {TOKENS, LOWRANK}


def clock_floor(knobs: Sequence[Knob], calibrations: Sequence[Anchored]) -> Reading:
    """The least latency that was measured on the way to these knobs, in any precision; zero where it is not known.

    The anchors are the whole network and the one with every unit cut that may be.
    """
    if not smallest_is_known(knobs):
        return Reading(value=0.0, unit="ms")
    cut = bool(_kinds(knobs) & {PRUNE, GLOBAL, DEPTH})
    floors = [anchored.floor if cut else anchored.baseline for anchored in calibrations]
    return min(floors, key=lambda reading: reading.value)


def _kinds(knobs: Sequence[Knob]) -> set[str]:
    return {knob.name.partition(".")[0] for knob in knobs}


def refuse_below(floor: Mapping[str, Reading], budget: Budget, baseline: Mapping[str, Reading]) -> None:
    """Raises ``InfeasibleError`` for the first limit that lies under the floor."""
    for limit in budget.limits:
        reading = floor[limit.key]
        if reading.value > limit.value:
            share = reading.value / baseline[limit.key].value
            raise InfeasibleError(
                f"budget {limit} can't be met: the smallest network measures "
                f"{format_quantity(reading.value, reading.unit)} ({share:.0%} of the original); raise the budget"
            )
