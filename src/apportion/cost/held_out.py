"""Held-out samples for a profile: configurations it has not seen, measured on its target now; and its correction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from apportion.core.meter import Reading
from apportion.cost.bound import num_needed
from apportion.cost.draw import draw_many
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.cost.recalibrate import How
from apportion.cost.sample import CostError, Sample
from apportion.cost.sweep import sweep
from apportion.models.load import is_factory, load
from apportion.models.partition import Partition

MAX_CORRECTING = 8
MIN_JUDGING = 4
ALPHA = 0.05  # of the new bound where the old profile has none


@dataclass(frozen=True)
class HeldOut:
    """Unseen configurations on the clock of now, with the whole network's latency beside them.

    ``drift`` is the relative error that all of them share, ``conditions`` what they ran under.
    """

    samples: Sequence[Sample]
    baseline: Reading
    drift: float = 0.0
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def as_of(self, then: Reading) -> list[Sample]:
        """The same in the milliseconds of a clock on which the whole network took ``then``."""
        scale = then.value / self.baseline.value
        return [Sample(s.shares, s.latency_ms * scale, s.stderr_ms * scale) for s in self.samples]


@dataclass(frozen=True)
class Corrected:
    """A profile that speaks of the clock of now, and the samples that nothing in it has seen."""

    profile: Profile
    unseen: Sequence[Sample]
    num_lacking: int

    def explain(self) -> str:
        """One line on the bound of the corrected profile."""
        bound = self.profile.cost.bound
        if bound is not None:
            return f"its new bound {bound.explain()}"
        return f"it has no bound: {self.num_lacking} more configurations would give it one; raise --count by as many"


def measure_held_out(
    profile: Profile,
    *,
    count: int,
    seed: int,
    confirmed: str | None = None,
    on_share: Callable[[float], None] | None = None,
) -> HeldOut:
    """Draws and measures configurations of the profile's network.

    Args:
        confirmed: the network's reference, which must be repeated where it is a factory: code named in a file is run
            only when the user names it, too.
    """
    if seed == profile.seed:
        raise CostError(f"seed {seed} drew the configurations that the profile was calibrated with; give another seed")
    if count < 2:
        raise CostError(f"asked for {count} configurations; give at least 2")
    if is_factory(profile.model) and confirmed != profile.model:
        raise CostError(f"the profile's model comes from the factory {profile.model!r}; confirm it with --model")
    shape = profile.shape
    network = load(profile.model, batch=shape.batch, tokens=shape.tokens, seed=shape.seed, size=shape.size)
    parts = Parts.of(network, Partition.of(network)).seen(profile.view)
    if parts.signature_of != dict(profile.cost.law.signature_of):
        raise CostError(f"{profile.model} has other parts than when the profile was made; calibrate again")
    drawn = draw_many(parts, count, seed)
    swept = sweep(network, parts, drawn, profile.target, shape, on_chunk=on_share)
    return HeldOut(list(swept.samples.values()), swept.baseline, swept.drift, swept.conditions)


def correct(profile: Profile, held_out: HeldOut, how: How) -> Corrected:
    """The profile on the clock of now: some samples correct it, others bound it where they are enough, the rest judge.

    The whole network's latency is the new baseline, and the floor moves with it.
    """
    old = profile.cost.bound
    alpha = ALPHA if old is None else old.alpha
    samples = list(held_out.samples)
    num_correcting = min(len(samples) // 2, MAX_CORRECTING)
    cost = profile.cost.recalibrated(samples[:num_correcting], how)
    left = samples[num_correcting:]
    needed = num_needed(alpha)
    lacking = max(0, MAX_CORRECTING + needed + MIN_JUDGING - len(samples))
    if not lacking:
        num_bounding = max(needed, 2 * len(left) // 3)
        cost, left = cost.bounded(left[:num_bounding], alpha, drift=held_out.drift), left[num_bounding:]
    ratio = held_out.baseline.value / profile.baseline.value
    floor_ms = None if profile.floor_ms is None else profile.floor_ms * ratio
    now = replace(profile, cost=cost, baseline=held_out.baseline, floor_ms=floor_ms, fidelity=None)
    return Corrected(now, left, lacking)
