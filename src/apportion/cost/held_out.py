"""Held-out samples for a profile: configurations it has not seen, measured on its target now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from apportion.cost.draw import draw_many
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError, Sample
from apportion.cost.sweep import sweep
from apportion.models.load import is_factory, load
from apportion.models.partition import Partition


def measure_held_out(
    profile: Profile,
    *,
    count: int,
    seed: int,
    confirmed: str | None = None,
    on_share: Callable[[float], None] | None = None,
) -> tuple[list[Sample], Mapping[str, Any]]:
    """Draws and measures configurations of the profile's network; also returns the conditions they ran under.

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
    network = load(profile.model, batch=shape.batch, tokens=shape.tokens, seed=shape.seed)
    parts = Parts.of(network, Partition.of(network)).seen(grid=profile.grid, widths=profile.widths)
    if parts.signature_of != dict(profile.cost.law.signature_of):
        raise CostError(f"{profile.model} has other parts than when the profile was made; calibrate again")
    drawn = draw_many(parts, count, seed)
    swept = sweep(network, parts, drawn, profile.target, shape, on_chunk=on_share)
    scale = profile.baseline.value / swept.baseline.value  # predictions are about the machine as it was calibrated
    samples = [Sample(s.shares, s.latency_ms * scale, s.stderr_ms * scale) for s in swept.samples.values()]
    return samples, swept.conditions
