"""The folder of a search: what was asked, the ledger, the measurements, the network, its trace and its certificate."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from apportion.core.budget import Budget
from apportion.core.folder import RunFolder
from apportion.errors import ApportionError
from apportion.methods.search.select import RULES
from apportion.methods.search.spaces import SPACES


@dataclass(frozen=True, kw_only=True)
class SearchRunConfig:
    """What a search was asked for; saved in its folder, and what makes a run the same run.

    ``targets`` are names; several must all be in their band. ``sigma`` is the noise of one evaluation, None to estimate
    it from ``pilot`` evaluations of the anchor. ``train_on`` is the torch device of the trainings. ``align`` is the
    grid of widths, None to use the target's usual one.
    """

    space: str
    targets: tuple[str, ...] = ("torch-cpu-1t",)
    budget: str | None = None
    anchor: dict[str, Any] | None = None
    data: str = "digits"
    tolerance: float = 0.05
    confidence: float = 0.95
    epsilon: float = 2.0
    sigma: float | None = None
    pilot: int = 6
    rule: str = "lucb"
    max_evaluations: int = 100
    steps: int = 100
    final_steps: int = 400
    image_size: int | None = None
    num_train: int | None = None
    align: int | None = None
    memory: bool = False
    calibration: int = 16
    train_on: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise ApportionError(f"unknown space {self.space!r}; possible are {', '.join(SPACES)}")
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ApportionError(f"targets are {', '.join(self.targets) or 'none'}; name at least one, each once")
        if self.rule not in RULES:
            raise ApportionError(f"unknown selection rule {self.rule!r}; possible are {', '.join(RULES)}")
        if not 0 < self.tolerance < 1 or not 0 < self.confidence < 1:
            raise ApportionError(
                f"tolerance {self.tolerance:g} and confidence {self.confidence:g} are shares between 0 and 1"
            )
        if not self.epsilon > 0:
            raise ApportionError(f"epsilon is {self.epsilon:g} points; give a difference above 0 that matters")
        for name in ("max_evaluations", "steps", "final_steps", "pilot", "calibration"):
            if getattr(self, name) < 1:
                raise ApportionError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.budget is not None:
            Budget.parse(self.budget)
            if self.anchor is not None:
                raise ApportionError("a budget and an anchor were both given; the search is anchored at one of them")


class SearchFolder(RunFolder):
    """Paths and files of one search."""

    what = "search"
    file = "search.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    def start(self, config: SearchRunConfig) -> str:
        """Saves what was asked and returns the run's identity; refuses a folder that holds another run."""
        run = identity(config)
        self.begin(run, asdict(config))
        return run

    def config(self) -> SearchRunConfig:
        """What the run was asked for."""
        config = self.asked({field.name for field in fields(SearchRunConfig)})
        return SearchRunConfig(**{**config, "targets": tuple(config["targets"])})


def identity(config: SearchRunConfig) -> str:
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()
