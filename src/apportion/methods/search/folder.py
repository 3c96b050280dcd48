"""The folder of a search: what was asked, the ledger, the measurements, the network, its trace and its certificate."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from apportion.core.budget import Budget
from apportion.core.certificate import Certificate
from apportion.errors import ApportionError
from apportion.methods.search.select import RULES
from apportion.methods.search.spaces import SPACES

VERSION = 1
FILE = "search.json"


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


class SearchFolder:
    """Paths and files of one search; every file appears whole or not at all."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise ApportionError(f"{path} is a file; give a folder for the run")
        self.path = path

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def store(self) -> Path:
        return self.path / "measurements.sqlite"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def start(self, config: SearchRunConfig) -> str:
        """Saves what was asked and returns the run's identity; refuses a folder that holds another run."""
        run = identity(config)
        if (self.path / FILE).is_file():
            if self._read(FILE).get("identity") != run:
                raise ApportionError(f"{self.path} holds a search with other settings; choose another -o folder")
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise ApportionError(f"{self.path} is not empty and holds no search; choose another -o folder")
        else:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ApportionError(f"can't make the folder {self.path} ({error.strerror}); choose another") from None
            self.write(FILE, {"apportion_search": VERSION, "identity": run, "config": asdict(config)})
        return run

    def config(self) -> SearchRunConfig:
        """What the run was asked for."""
        saved = self._read(FILE)
        config = saved.get("config")
        known = {field.name for field in fields(SearchRunConfig)}
        if saved.get("apportion_search") != VERSION or not isinstance(config, dict) or set(config) != known:
            raise ApportionError(f"{self.path}/{FILE} is no search of version {VERSION}; give the folder of a search")
        return SearchRunConfig(**{**config, "targets": tuple(config["targets"])})

    def certificate(self) -> Certificate:
        path = self.path / "certificate.json"
        if not path.is_file():
            raise ApportionError(f"{self.path} has no certificate; the search is not finished: start it again to go on")
        return Certificate.from_json(path.read_text(encoding="utf-8"))

    def result(self) -> dict[str, Any] | None:
        return self._read("result.json") if (self.path / "result.json").is_file() else None

    def write(self, name: str, content: object) -> None:
        draft = self.path / f".{name}.tmp"
        with draft.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / name)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ApportionError(f"{self.path} holds no search ({name} is missing); give another folder") from None
        except ValueError:
            raise ApportionError(f"{path} is damaged; start the search again in another folder") from None
        if not isinstance(content, dict):
            raise ApportionError(f"{path} is damaged; start the search again in another folder")
        return content


def identity(config: SearchRunConfig) -> str:
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()
