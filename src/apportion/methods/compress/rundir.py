"""The run folder: what was asked, the measurements, and a ladder of rungs: models with ledger and certificate.

``model`` and ``certificate.json`` at the top are links to those of the rung in use, which ``retarget`` changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from apportion.core.folder import Folder, RunFolder
from apportion.errors import ApportionError
from apportion.methods.compress.rulenames import parse_rules
from apportion.models.size import Size


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What a fit was asked for; saved in the run folder, and what makes a run the same run."""

    model: str
    budget: str
    factory: str | None = None
    data: str | None = None
    target: str | None = None
    policy: str = "greedy"
    importance: str = "taylor"
    quality: str = "auto"
    quality_floor: float | None = None
    floor_confidence: float = 0.5
    profile: str | None = None
    rules: str = "prune,quantise,repair"
    rungs: int = 2
    repair_steps: int = 150
    seed: int = 0
    batch: int = 1
    tokens: int = 64
    size: Size | None = None
    num_steps: int = 8
    max_steps: int = 2000
    processes: int = 6  # an even number: every other one opens the candidates in reverse

    def __post_init__(self) -> None:
        if self.policy.partition(":")[0] not in POLICIES:
            raise ApportionError(f"unknown policy {self.policy!r}; possible are {', '.join(POLICIES)}")
        if self.importance not in IMPORTANCES:
            raise ApportionError(f"unknown importance {self.importance!r}; possible are {', '.join(IMPORTANCES)}")
        parse_rules(self.rules, self.importance)
        if self.quality_floor is not None and not 0 <= self.quality_floor <= 1:
            raise ApportionError(f"quality floor {self.quality_floor:g} is outside 0 to 1; give it as a share of 1")
        if not 0.5 <= self.floor_confidence < 1:
            raise ApportionError(
                f"floor confidence {self.floor_confidence:g} is outside 0.5 to 1; 0.5 judges the value, 0.95 a bound"
            )
        if self.quality not in QUALITIES:
            raise ApportionError(f"unknown quality {self.quality!r}; possible are {', '.join(QUALITIES)}")
        if self.repair_steps < 0:
            raise ApportionError(f"repair_steps must be at least 0, got {self.repair_steps}")
        for name in ("batch", "tokens", "num_steps", "max_steps", "processes", "rungs"):
            if getattr(self, name) < 1:
                raise ApportionError(f"{name} must be at least 1, got {getattr(self, name)}")


QUALITIES = ("auto", "agreement", "accuracy", "retrieval", "likelihood", "r2")  # named here, as tasks load torch
POLICIES = ("greedy", "scheduled", "priced", "exact", "backtracking", "learned")
IMPORTANCES = ("taylor", "magnitude", "fisher", "activation", "hessian")


CHOICE = "choice.json"


class Rung(Folder):
    """One rung of the ladder: a model, how it was found, what it promises."""

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    def choice(self) -> dict[str, Any] | None:
        """Which way was taken to this rung, where it was compared with another."""
        return self.read(CHOICE) if (self.path / CHOICE).is_file() else None

    @property
    def float_ledger(self) -> Path:
        """Of the way that goes back to float; there where both were tried."""
        return self.path / "in-float" / "ledger.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def artefact(self) -> Path:
        """The files that the target's runtime opened when this rung was certified; none on torch targets."""
        return self.path / "artefact"


class RunDir(RunFolder):
    """Paths and files of one run; ``model`` is a link to the model of the rung in use."""

    version = 2

    def rung(self, place: int) -> Rung:
        """The rungs are numbered from 1; the last one meets the budget asked for."""
        return Rung(self.path / "rungs" / str(place))

    @property
    def rung_in_use(self) -> Rung:
        """The rung that ``model`` stands for now; what reads more than one of its files asks once and keeps it."""
        return Rung(self.model.resolve().parent)

    def use(self, place: int) -> None:
        """Makes a rung the one in use; a reader sees the old one or the new one, never a mixture."""
        self._link(self.model, self.rung(place).model.relative_to(self.path))
        self._link(self.path / "certificate.json", Path("model", "..", "certificate.json"))

    def _link(self, place: Path, to: Path) -> None:
        if place.is_symlink() and place.readlink() == to:
            return
        link = place.with_name(f".{place.name}.{os.getpid()}")
        link.unlink(missing_ok=True)
        link.symlink_to(to)
        link.replace(place)

    def start(self, config: FitConfig, model_digest: str, contents: Mapping[str, str]) -> str:
        """Saves what was asked and returns the run's identity; refuses a folder that holds another run."""
        run = identity(config, model_digest, contents)
        self.begin(run, asdict(config))
        return run

    def config(self) -> FitConfig:
        """What the run was asked for."""
        return FitConfig(**self.asked({field.name for field in fields(FitConfig)}, LATER))


LATER = {
    "floor_confidence": 0.5,
    "size": None,
}  # fields that came after the first runs, whose identity they leave as it was


def identity(config: FitConfig, model_digest: str, contents: Mapping[str, str]) -> str:
    """What makes a run the same: its settings, its model, and the contents of the files that it reads."""
    asked = {name: value for name, value in asdict(config).items() if name not in LATER or value != LATER[name]}
    read = {"contents": dict(contents)} if contents else {}
    text = json.dumps({"config": asked, "model": model_digest, **read}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
