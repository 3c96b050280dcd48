"""The folders of adapt: a run with what was learned, and a specialised model with its certificate."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from apportion.core.folder import RunFolder
from apportion.device.target import Target, find_target, is_sibling, target_names
from apportion.errors import ApportionError, DataError
from apportion.methods.adapt.family import FamilyConfig
from apportion.methods.adapt.train import TrainConfig

SCHEME = 5  # raised when training changes, so that a run begun before it is not gone on with
LATER: Mapping[str, Any] = {  # settings that came since, saved only where they are not these: older runs stay readable
    "int8": False,
    "masks": "groups",
    "gains": (0.0, 1.0),
    "window": 0,
    "damping": 0.5,
    "precision": "fp32",
    "checkpoint": False,
    "near": 0.0,
    "search": 0,
}
SPECIAL = {"run", "support", "budget", "target", "head", "risk", "refine"}
LATER_SPECIAL: Mapping[str, Any] = {
    "averse": 0.0,
    "steps": None,
    "confidence": 0.95,
    "precision": "auto",
    "depths": False,
}


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """What a run was asked for.

    ``tasks`` is a protocol's name, a TOML file of one, or domains between commas; ``profiles`` are files that calibrate
    wrote, and targets without one are calibrated first. With ``int8`` slices are priced in int8 as well, on targets
    whose runtime has it.
    """

    model: str
    tasks: str
    targets: tuple[str, ...]
    profiles: tuple[str, ...] = ()
    steps: int = 300
    episodes: int = 4
    ways: int = 5
    shots: int = 5
    queries: int = 5
    experts: int = 4
    allocation: str = "learned"
    objective: str = "mean"
    beta: float = 0.7
    tightest: float = 0.15
    masks: str = "groups"
    capacity: float = 0.9
    batch: int = 1
    tokens: int = 32
    int8: bool = False
    rate: float = 2e-4
    gains: tuple[float, float] = (0.0, 1.0)
    window: int = 0
    damping: float = 0.5
    precision: str = "fp32"
    checkpoint: bool = False
    near: float = 0.0
    search: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise DataError(f"targets {', '.join(self.targets) or 'none'} were given; name one or more, each once")
        for target in self.targets:
            float_target(target)
        self.family()
        self.training()

    def family(self) -> FamilyConfig:
        return FamilyConfig(
            num_experts=self.experts,
            allocation=self.allocation,
            tightest=self.tightest,
            masks=self.masks,
            seed=self.seed,
        )

    def training(self, *, images: bool = False) -> TrainConfig:
        """Settings of training; images are varied and features held, as ``benchmarks/adapt_vision`` does."""
        return TrainConfig(
            hold=1.0 if images else 0.0,
            vary=0.5 if images else 0.0,
            steps=self.steps,
            episodes=self.episodes,
            objective=self.objective,
            beta=self.beta,
            capacity=self.capacity,
            rate=self.rate,
            gains=self.gains,
            window=self.window,
            damping=self.damping,
            precision=self.precision,
            checkpoint=self.checkpoint,
            near=self.near,
            search=self.search,
            warmup=min(100, self.steps // 5),
            seed=self.seed,
        )


class AdaptFolder(RunFolder):
    """Paths and files of one run of adapt."""

    what = "adapt"
    file = "adapt.json"

    @property
    def log(self) -> Path:
        return self.path / "training.jsonl"

    @property
    def tensors(self) -> Path:
        return self.path / "family.safetensors"

    def profile(self, target: str) -> Path:
        return self.path / "profiles" / f"{target}.json"

    @property
    def beside(self) -> Path:
        """What the whole network takes in int8, as a share of float, by int8 target, measured side by side."""
        return self.path / "beside.json"

    def shares_in_int8(self) -> dict[str, float]:
        """What ``beside`` holds; nothing in a run that has not measured it."""
        shares = self.read(self.beside.name) if self.beside.is_file() else {}
        if not all(isinstance(share, float) and 0 < share < math.inf for share in shares.values()):
            raise ApportionError(f"{self.beside} is damaged; delete it, and adapt with --int8 measures it again")
        return shares

    def start(self, config: AdaptConfig, model_digest: str) -> None:
        """Saves what was asked; refuses a folder that holds another run."""
        asked = _unusual(asdict(config), LATER)
        content = json.dumps([SCHEME, asked, model_digest], sort_keys=True)
        self.begin(hashlib.sha256(content.encode()).hexdigest(), asked)

    def config(self) -> AdaptConfig:
        asked = self.asked({field.name for field in fields(AdaptConfig)}, LATER)
        try:
            rows = {name: tuple(value) for name, value in asked.items() if isinstance(value, list)}
            return AdaptConfig(**{**asked, **rows})
        except TypeError as error:
            raise ApportionError(f"{self.path / self.file} is damaged ({error}); start the run again") from None


class SpecialFolder(RunFolder):
    """A specialised model: the model, its head, and its certificate."""

    what = "specialised model"
    file = "specialise.json"

    @property
    def head(self) -> Path:
        return self.path / "head.safetensors"

    def start(self, asked: dict[str, Any]) -> None:
        asked = _unusual(asked, LATER_SPECIAL)
        self.begin(hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(), asked)

    def clear(self) -> None:
        """Takes away what an earlier start wrote about its model, the certificate first."""
        for path in (self.path / "certificate.json", self.path / "result.json", self.head):
            path.unlink(missing_ok=True)

    def config(self) -> dict[str, Any]:
        return self.asked(SPECIAL | LATER_SPECIAL.keys(), LATER_SPECIAL)


def float_target(name: str) -> Target:
    """The target of a name, if it runs float networks: int8 is a way to run a slice, and priced beside these."""
    target = find_target(name)
    if target.precision != "fp32":
        plain = next(one for one in target_names() if is_sibling(find_target(one), target))
        raise DataError(f"{name} is in int8; name {plain}, with --int8 where its slices are to run in int8, too")
    return target


def _unusual(asked: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Without the later settings that are as usual."""
    return {name: value for name, value in asked.items() if name not in later or value != later[name]}
