"""Meters read one quantity of a model in one unit; a reading carries its own uncertainty."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

M_contra = TypeVar("M_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A value in a unit, with its standard error and the number of samples behind it."""

    value: float
    unit: str
    stderr: float = 0.0
    count: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and math.isfinite(self.stderr) and self.stderr >= 0 and self.count >= 1):
            raise ValueError(
                f"a reading must be finite with a non-negative standard error, got {self.value!r} ± {self.stderr!r} "
                f"over {self.count!r} samples; a candidate that can't be read is an outcome, not a reading"
            )

    def upper(self, z: float) -> float:
        """The value plus ``z`` standard errors."""
        return self.value + z * self.stderr

    def lower(self, z: float) -> float:
        """The value minus ``z`` standard errors."""
        return self.value - z * self.stderr

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Reading:
        return cls(
            value=float(fields["value"]),
            unit=str(fields["unit"]),
            stderr=float(fields["stderr"]),
            count=int(fields["count"]),
        )


class Meter(Protocol[M_contra]):
    """Reads one quantity of a model, in one unit."""

    @property
    def unit(self) -> str: ...

    def read(self, model: M_contra) -> Reading: ...
