"""Policies of compress beyond the core's: priced, exact, learned, and a remedy for compositions that break early."""

from __future__ import annotations

from pathlib import Path

from apportion.core.policy import Greedy, Policy, RankedBy, Scheduled
from apportion.errors import ApportionError

LIKENESS = "likeness"
METHODS = (("prune*",), ("depth.*", "tokens"), ("lowrank.*", "sparse.*"), ("quantise*",))
"""The knobs of every method that backtracking composes, in order of preference; each knob of ``fit`` is in one."""
SHIPPED = Path(__file__).with_name("policy.json")


def policy_named(name: str, quality_floor: float | None = None) -> Policy:
    """The policy of a name; ``learned:FILE`` reads what ``recipes/train_policy.py`` wrote, ``learned`` what ships."""
    kind, _, file = name.partition(":")
    if kind == "greedy":
        return RankedBy(Greedy(), LIKENESS)
    if kind == "scheduled":
        return Scheduled(("prune*", "*"))
    if kind == "priced":
        from apportion.methods.compress.policies.priced import Priced

        return RankedBy(Priced(), LIKENESS)
    if kind == "exact":
        from apportion.methods.compress.policies.exact import Exact

        return RankedBy(Exact(), LIKENESS)
    if kind == "backtracking":
        from apportion.methods.compress.policies.composed import Backtracking

        return Backtracking(tuple(Scheduled(stages) for stages in METHODS), quality_floor)
    if kind == "learned":
        from apportion.methods.compress.policies.learned import Learned, Ranker

        return RankedBy(Learned(Ranker.load(Path(file) if file else SHIPPED)), LIKENESS)
    raise ApportionError(f"unknown policy {name!r}")
