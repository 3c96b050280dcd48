"""The folder of a search: what was asked, the ledger, the measurements, the network, its trace and its certificate."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from apportion.core.budget import Budget
from apportion.core.folder import RunFolder
from apportion.errors import ApportionError
from apportion.methods.search.select import RULES
from apportion.methods.search.spaces import SPACES
from apportion.methods.search.utilities import UTILITIES

MAX_PERCENT = 400.0


@dataclass(frozen=True, kw_only=True)
class SearchRunConfig:
    """What a search was asked for; saved in its folder, and what makes a run the same run.

    ``targets`` are names; several must all be in their band. The band ends at ``budget``, or is around the cost of the
    architecture ``anchor`` or around ``anchor_cost``. ``start`` is an architecture to begin at, brought into the band.
    ``utilities``: the first is maximised; with several, the result comes with its local Pareto set. ``sigma`` is the
    noise of one evaluation, None to estimate it from ``pilot`` evaluations of the anchor. ``train_on`` is the torch
    device of the trainings. ``align`` is the grid of widths, None to audit it on the target.
    """

    space: str
    targets: tuple[str, ...] = ("torch-cpu-1t",)
    budget: str | None = None
    anchor: dict[str, Any] | None = None
    anchor_cost: str | None = None
    start: dict[str, Any] | None = None
    utilities: tuple[str, ...] = ("accuracy",)
    data: str = "digits"
    tolerance: float = 0.05
    confidence: float = 0.95
    epsilon: float = 2.0
    sigma: float | None = None
    pilot: int = 6
    rule: str = "lucb"
    max_evaluations: int = 50
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
        wrong = set(self.utilities) - set(UTILITIES)
        if wrong or not self.utilities or len(set(self.utilities)) != len(self.utilities):
            raise ApportionError(
                f"utilities are {', '.join(self.utilities) or 'none'}; name one or more of {', '.join(UTILITIES)}, "
                "each once"
            )
        if self.image_size is not None and self.image_size < 4:
            raise ApportionError(f"images of {self.image_size} pixels a side were asked for; give at least 4")
        if self.align is not None and self.align < 1:
            raise ApportionError(f"widths can't be multiples of {self.align}; give at least 1")
        if self.sigma is not None and not self.sigma > 0:
            raise ApportionError(f"sigma is {self.sigma:g} points; give the noise of one evaluation, above 0")
        if sum(one is not None for one in (self.budget, self.anchor, self.anchor_cost)) > 1:
            raise ApportionError("a budget and an anchor were both given; the search is anchored at one of them")
        for asked in (self.budget, self.anchor_cost):
            if asked is not None and percent_of(asked) is None:
                Budget.parse(asked)


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
        lists = {name: tuple(config[name]) for name in ("targets", "utilities")}
        return SearchRunConfig(**{**config, **lists})


def found_by(path: Path, space: str) -> dict[str, Any]:
    """The architecture that a finished search of the same space found, such as one on another target."""
    result = SearchFolder(path).result() if path.is_dir() else None
    if result is None or "arch" not in result:
        raise ApportionError(f"{path} holds no finished search; give the run folder of one, not of a front")
    if result["space"] != space:
        raise ApportionError(f"{path} is a search of {result['space']}, not of {space}; give one of the same space")
    arch = result["arch"]
    if not isinstance(arch, dict) or not all(
        type(value) is int if name.endswith(".width") else isinstance(value, str | int | float)
        for name, value in arch.items()
    ):
        raise ApportionError(f"{path}/result.json is damaged: its architecture is none; run that search again")
    return arch


def identity(config: SearchRunConfig) -> str:
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()


def percent_of(text: str) -> float | None:
    """A bare percentage, which is of the template's cost and may be above 100; None for other costs.

    Example:
        >>> percent_of("80%"), percent_of("1.5ms")
        (80.0, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", text)
    if match is None:
        return None
    value = float(match[1])
    if not 0.0 < value <= MAX_PERCENT:
        raise ApportionError(
            f"{text.strip()} of the template's cost is asked for; give more than 0% and at most {MAX_PERCENT:.0f}%"
        )
    return value
