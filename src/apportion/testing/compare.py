"""Policies side by side on the same toys: what they read, and what quality they end with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.core.budget import Budget, Limit
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import budgeted_loop
from apportion.core.policy import Policy
from apportion.testing.toys import Counting, Toy


@dataclass(frozen=True)
class Replay:
    """One policy on one toy."""

    met: bool
    num_readings: int
    quality: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Standing:
    """One policy over all toys."""

    policy: str
    num_met: int
    num_toys: int
    readings: float
    quality: float


def replay(policy: Policy, toy: Toy, *, share: float) -> Replay:
    """Runs a policy until ``share`` of the toy's latency is left, counting the models that it read."""
    counting = Counting(toy.meters["quality"])
    limit_ms = share * toy.meters["latency"].read(toy.start).value
    ledger = Ledger()
    result = budgeted_loop(
        toy.start,
        knobs=toy.knobs,
        rules=toy.rules,
        meters={**toy.meters, "quality": counting},
        budget=Budget((Limit(quantity="latency", value=limit_ms, unit="ms"),)),
        policy=policy,
        ledger=ledger,
    )
    return Replay(result.met, len(counting.models), result.readings["quality"].value, tuple(ledger))


def compare(policies: Mapping[str, Policy], toys: Sequence[Toy], *, share: float = 0.5) -> list[Standing]:
    """Means of readings and final quality over the same toys, in the order given."""
    standings = []
    for name, policy in policies.items():
        runs = [replay(policy, toy, share=share) for toy in toys]
        standings.append(
            Standing(
                policy=name,
                num_met=sum(run.met for run in runs),
                num_toys=len(runs),
                readings=statistics.fmean(run.num_readings for run in runs),
                quality=statistics.fmean(run.quality for run in runs),
            )
        )
    return standings


def as_table(standings: Sequence[Standing]) -> str:
    """The standings as text, at most 80 columns wide."""
    lines = [f"{'policy':<24} {'met':>9} {'readings':>10} {'quality':>10}"]
    lines += [
        f"{one.policy:.24}{'':<{max(0, 24 - len(one.policy))}} {f'{one.num_met} of {one.num_toys}':>9} "
        f"{one.readings:>10.1f} {one.quality:>10.4f}"
        for one in standings
    ]
    return "\n".join(lines)
