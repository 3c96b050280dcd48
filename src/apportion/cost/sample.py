"""A sample: one measured configuration, the share of work each part keeps, and what the clock said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apportion.errors import ApportionError

Shares = Mapping[str, float]


class CostError(ApportionError, ValueError):
    """A cost model that can't be fitted, read or asked what it was asked."""


@dataclass(frozen=True)
class Sample:
    """``shares`` maps every part to the share of its work that is left (0: the part is gone, 1: untouched).

    ``stderr_ms`` is the standard error of the latency, 0 where unknown.
    """

    shares: Shares
    latency_ms: float
    stderr_ms: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_ms) and self.latency_ms > 0):
            raise CostError(f"a sample's latency is {self.latency_ms!r} ms; it must be finite and above 0, drop it")
        if not (math.isfinite(self.stderr_ms) and self.stderr_ms >= 0):
            raise CostError(f"a sample's standard error is {self.stderr_ms!r} ms; give a finite one, or 0 if unknown")
        for part, share in self.shares.items():
            check_share(part, share)

    def to_json(self) -> dict[str, Any]:
        return {"shares": dict(self.shares), "latency_ms": self.latency_ms, "stderr_ms": self.stderr_ms}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Sample:
        return cls(
            shares={str(part): number(share, part) for part, share in fields["shares"].items()},
            latency_ms=number(fields["latency_ms"], "latency_ms"),
            stderr_ms=number(fields.get("stderr_ms", 0.0), "stderr_ms"),
        )


def check_share(part: str, share: float) -> None:
    """Refuses a share outside [0, 1]."""
    if not 0.0 <= share <= 1.0:
        raise CostError(f"part {part!r} has share {share!r}; a share lies between 0 (gone) and 1 (untouched)")


def check_pairs(predictions: Sequence[float], latencies_ms: Sequence[float], at_least: int = 1) -> None:
    """Refuses predictions and latencies that don't pair up, are too few, or are not positive numbers."""
    if len(predictions) != len(latencies_ms) or len(predictions) < at_least:
        raise CostError(
            f"got {len(predictions)} predictions and {len(latencies_ms)} latencies; "
            f"give one of each for at least {at_least} configurations"
        )
    for name, values in (("prediction", predictions), ("latency", latencies_ms)):
        for value in values:
            if not (math.isfinite(value) and value > 0):
                raise CostError(f"a {name} is {value!r} ms; all must be finite and above 0, drop or remeasure it")


def number(value: Any, name: str) -> float:
    """A finite number from JSON, or a one-line error."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CostError(f"{name} is {value!r} in the saved cost model; it must be a finite number, calibrate again")
    return float(value)


def numbers(values: Any, name: str) -> tuple[float, ...]:
    """A list of finite numbers from JSON, or a one-line error."""
    if not isinstance(values, (list, tuple)):
        raise CostError(f"{name} is {values!r} in the saved cost model; it must be a list of numbers, calibrate again")
    return tuple(number(value, name) for value in values)
