"""Structured pruning as knobs and a rule: how many units each module keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from apportion.core.knob import Choice, Knob, Value
from apportion.methods.compress.norms import renormalised
from apportion.models.cut import slice_network
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples

PREFIX = "prune"
GLOBAL = "prune-all"


def prune_knobs(partition: Partition, *, num_steps: int = 8) -> list[Knob]:
    """One knob per module: the number of units it keeps, in at most ``num_steps`` steps."""
    return [
        Choice(f"{PREFIX}.{module.name}", module.sizes(num_steps)) for module in partition if len(module.sizes()) > 1
    ]


@dataclass(frozen=True)
class Prune:
    """Slices a module down to the units that its order of importance puts first.

    Where ``calibration`` examples are given, batch norms get the statistics that they have in the sliced network.
    """

    partition: Partition
    calibration: Examples | None = None

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        name = knob.name.removeprefix(f"{PREFIX}.")
        assert isinstance(value, int)
        return _cut(model, self.partition, {name: value}, self.calibration)


def global_knob(sizes: Mapping[float, Mapping[str, int]]) -> Knob:
    """One knob for all modules: the share of their parameters that the units kept hold; ``sizes`` says which units."""
    return Choice(GLOBAL, sorted(sizes), granularity="global")


@dataclass(frozen=True)
class PruneAll:
    """Slices all modules at once, as one order over the units of all of them says (``global_sizes``)."""

    partition: Partition
    sizes: Mapping[float, Mapping[str, int]]
    calibration: Examples | None = None

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        assert isinstance(value, float)
        return _cut(model, self.partition, self.sizes[value], self.calibration)


def _cut(model: Network, partition: Partition, sizes: Mapping[str, int], calibration: Examples | None) -> Network:
    """The network without the units that come last, of those that other knobs have left."""
    left = {name: set(units) for name, units in partition.kept_in(model).items()}
    keep = {}
    for name, size in sizes.items():
        module = partition[name]
        standing = [unit for unit in module.order if unit in left[name]]
        wanted = set(module.order[:size])
        kept = [unit for unit in standing if unit in wanted]
        keep[name] = tuple(sorted(kept if len(kept) >= module.minimum else standing[: module.minimum]))
    sliced = slice_network(model, partition, keep)
    return sliced if calibration is None else renormalised(sliced, calibration)
