"""The names of the rules that ``fit`` can be allowed, read and checked before anything is loaded."""

from __future__ import annotations

from apportion.errors import ApportionError, KnobError

RULES = (
    *("prune", "prune-all", "quantise", "mixed", "lowrank", "sparse", "tokens", "depth"),
    *("repair", "adapters", "finetune"),
)
PATTERN = "sparse-"
COMPARABLE = ("taylor", "fisher", "hessian")
"""Importances that measure every module in the same unit, that of the loss; the others compare units of one module."""


def parse_rules(text: str, importance: str = COMPARABLE[0]) -> frozenset[str]:
    """The rules named in ``prune,quantise``; refuses unknown ones, and ones that can't go together.

    ``sparse-2:4`` is ``sparse`` with the pattern 2:4 in place of shares.
    """
    allowed = frozenset(name.strip() for name in text.split(","))
    unknown = sorted(name for name in allowed if name not in RULES and not name.startswith(PATTERN))
    if unknown:
        raise ApportionError(f"unknown rule {unknown[0]!r}; possible are {', '.join(RULES)}, sparse-N:M")
    patterns = patterns_in(allowed)
    if "sparse" in allowed and patterns:
        raise ApportionError("sparse and sparse-N:M set the same weights to zero; allow one of them")
    if "mixed" in allowed and "quantise" not in allowed:
        raise ApportionError("mixed says block by block what quantise says for all; allow quantise, too")
    if {"prune", "prune-all"} <= allowed:
        raise ApportionError("prune and prune-all cut the same units, one by module and one across; allow one of them")
    if "prune-all" in allowed and importance not in COMPARABLE:
        raise ApportionError(
            f"prune-all compares units across modules, which {importance} does not; use --importance "
            f"{', '.join(COMPARABLE[:-1])} or {COMPARABLE[-1]}"
        )
    return allowed


def patterns_in(allowed: frozenset[str]) -> tuple[str, ...]:
    """The N:M patterns that rules ask for."""
    patterns = tuple(sorted(name.removeprefix(PATTERN) for name in allowed if name.startswith(PATTERN)))
    for pattern in patterns:
        parse_pattern(pattern)
    return patterns


def parse_pattern(text: str) -> tuple[int, int]:
    """``"2:4"`` as the two numbers: at most 2 of every 4 stay."""
    kept, _, of = text.partition(":")
    if not (kept.isdigit() and of.isdigit() and 0 < int(kept) <= int(of) <= 64):
        raise KnobError(f"pattern {text!r} is not N:M; write it like '2:4', with N at most M and M at most 64")
    return int(kept), int(of)
