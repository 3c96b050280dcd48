"""A certificate: what was promised, what was measured, on what, where, when and with which confidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from apportion.core.budget import Budget, Limit
from apportion.core.meter import Reading
from apportion.errors import ApportionError

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The share of the original's quality that was asked for, and the share that was kept on the guard's examples.

    ``confidence`` is how sure it has to be: at one half the value decides, above that a one-sided lower bound.
    ``kept`` is after over before, with the paired standard error; ``examples`` says on what it was read.
    """

    asked: float
    confidence: float
    kept: Reading
    before: Reading
    after: Reading
    examples: str

    def __post_init__(self) -> None:
        if not (0 <= self.asked <= 1 and 0.5 <= self.confidence < 1):
            raise ValueError(f"a floor of {self.asked!r} at the confidence {self.confidence!r}")

    @property
    def met(self) -> bool:
        return self.kept.lower(floor_z(self.confidence)) >= self.asked

    @property
    def doubt(self) -> float:
        """The chance of so high a reading where the share kept is just the floor; one half where it reads the floor."""
        if not self.kept.stderr:
            return float(self.kept.value < self.asked)
        return NormalDist().cdf((self.asked - self.kept.value) / self.kept.stderr)

    def to_json(self, confidence: float) -> dict[str, Any]:
        """With what follows from the readings: the lower bound at a confidence, the doubt, and the verdict."""
        return {
            "asked": self.asked,
            "confidence": self.confidence,
            "kept": self.kept.to_json(),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "examples": self.examples,
            "at_least": {"value": self.kept.lower(floor_z(confidence)), "confidence": confidence},
            "doubt": self.doubt,
            "met": self.met,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Floor:
        return cls(
            asked=float(fields["asked"]),
            confidence=float(fields["confidence"]),
            **{name: Reading.from_json(fields[name]) for name in ("kept", "before", "after")},
            examples=str(fields["examples"]),
        )


def floor_z(confidence: float) -> float:
    """Standard errors under the reading at which a floor is judged; none at a confidence of one half."""
    return NormalDist().inv_cdf(confidence)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """About one artefact on one target; ``met`` compares the promise with the readings at ``z`` standard errors.

    The promise is the budget, and the quality floor where one was asked for.

    ``artefact`` is the content digest of the model's files, ``files`` the SHA-256 of those that the target's runtime
    opened, by name, ``conditions`` says where it was measured (machine, versions, number of processes),
    ``measured_at`` when, as an ISO 8601 time.
    """

    asked: str
    budget: Budget
    baseline: Mapping[str, Reading]
    measured: Mapping[str, Reading]
    quality: Mapping[str, Reading]
    artefact: str
    target: str
    conditions: Mapping[str, Any]
    measured_at: str
    confidence: float
    z: float
    files: Mapping[str, str] = field(default_factory=dict)
    floor: Floor | None = None

    @property
    def met(self) -> bool:
        return self.budget.met(self.measured, self.z) and (self.floor is None or self.floor.met)

    def to_json(self) -> dict[str, Any]:
        return {
            "apportion_certificate": VERSION,
            "asked": self.asked,
            "budget": [
                {"quantity": lim.quantity, "value": lim.value, "unit": lim.unit, "target": lim.target}
                for lim in self.budget.limits
            ],
            "baseline": {name: reading.to_json() for name, reading in self.baseline.items()},
            "measured": {name: reading.to_json() for name, reading in self.measured.items()},
            "quality": {name: reading.to_json() for name, reading in self.quality.items()},
            "floor": None if self.floor is None else self.floor.to_json(self.confidence),
            "artefact": self.artefact,
            "files": dict(self.files),
            "target": self.target,
            "conditions": dict(self.conditions),
            "measured_at": self.measured_at,
            "confidence": self.confidence,
            "z": self.z,
            "met": self.met,
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Certificate:
        """Reads a saved certificate; ``met`` is worked out again, not believed."""
        try:
            fields = json.loads(text)
            if fields["apportion_certificate"] != VERSION:
                raise ValueError(f"version {fields['apportion_certificate']!r}")
            certificate = cls(
                asked=str(fields["asked"]),
                budget=Budget(tuple(Limit(**limit) for limit in fields["budget"])),
                baseline={name: Reading.from_json(reading) for name, reading in fields["baseline"].items()},
                measured={name: Reading.from_json(reading) for name, reading in fields["measured"].items()},
                quality={name: Reading.from_json(reading) for name, reading in fields["quality"].items()},
                artefact=str(fields["artefact"]),
                target=str(fields["target"]),
                conditions=dict(fields["conditions"]),
                measured_at=str(fields["measured_at"]),
                confidence=float(fields["confidence"]),
                z=float(fields["z"]),
                files={str(name): str(digest) for name, digest in fields.get("files", {}).items()},
                floor=None if fields.get("floor") is None else Floor.from_json(fields["floor"]),
            )
            if not (0 < certificate.confidence < 1 and 0 <= certificate.z < float("inf")):
                raise ValueError(f"confidence {certificate.confidence!r} with z {certificate.z!r}")
            certificate.met  # noqa: B018  a verdict that can't be worked out is refused here, not later
            return certificate
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ApportionError(f"not a certificate of version {VERSION} ({detail})") from None
