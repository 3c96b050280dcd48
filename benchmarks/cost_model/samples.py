"""Saved sweeps: what was measured of one network on one target, in a file that is fitted and audited later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from apportion.cost.draw import Sizes
from apportion.cost.sweep import Swept
from apportion.device.target import machine


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A sweep over ``sizes``: the first ``num_fit`` are for fitting, the next ``num_bound`` for the bound."""

    network: str
    target: str
    device: str
    seconds: float
    num_fit: int
    num_bound: int
    sizes: Sequence[Sizes]
    swept: Swept

    def save(self, path: Path) -> None:
        fields = {
            **{name: getattr(self, name) for name in ("network", "target", "device", "num_fit", "num_bound")},
            "seconds": round(self.seconds, 1),
            "torch": torch.__version__,
            "sizes": list(self.sizes),
            "swept": self.swept.to_json(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> Saved:
        fields = json.loads(path.read_text())
        fields.pop("torch")
        return cls(**fields | {"swept": Swept.from_json(fields["swept"])})


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else str(machine()["processor"])
