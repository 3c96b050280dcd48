"""A profile: the measured facts and the fitted cost model of one network on one target, saved as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.core.meter import Reading
from apportion.cost.distortion import Fidelity
from apportion.cost.model import CostModel
from apportion.cost.parts import View
from apportion.cost.sample import CostError
from apportion.device.measure import Shape
from apportion.device.power import PowerCurve
from apportion.device.target import Target, machine

VERSION = 3
WITHOUT_VIEW = 2  # whose channels counted in one multiple, read or written


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a calibration leaves: ``cost`` predicts and bounds, ``baseline`` and ``floor_ms`` were measured.

    ``view`` is how ``cost`` sees sizes (``Parts.seen``). ``fidelity`` is None where a correction made it untrue.
    ``power`` was read where the machine had an energy counter.
    """

    model: str
    target: Target
    shape: Shape
    baseline: Reading
    floor_ms: float | None
    cost: CostModel
    view: View
    seed: int
    seconds: float
    machine: Mapping[str, object]
    failures: Mapping[str, str]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    fidelity: Fidelity | None = None
    power: PowerCurve | None = None

    def elsewhere(self) -> str | None:
        """One line where this machine is another one than the profile was made on, else None."""
        here = machine()
        for name in ("processor", "instructions", "cores", "system"):
            then = self.machine.get(name, here[name])
            if then != here[name]:
                return f"the profile was made on another machine ({name} {then}, here {here[name]}); calibrate here"
        return None

    def save(self, path: Path) -> None:
        """Writes the profile; the file appears whole or not at all."""
        fields = {
            "apportion_profile": VERSION,
            "model": self.model,
            "target": self.target.to_json(),
            "shape": self.shape.to_json(),
            "baseline": self.baseline.to_json(),
            "floor_ms": self.floor_ms,
            "cost": self.cost.to_json(),
            "view": self.view.to_json(),
            "seed": self.seed,
            "seconds": self.seconds,
            "machine": dict(self.machine),
            "failures": dict(self.failures),
            "conditions": dict(self.conditions),
            "fidelity": None if self.fidelity is None else self.fidelity.to_json(),
            "power": None if self.power is None else self.power.to_json(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads a profile and checks it.

        Raises:
            CostError: no such file, or not a profile.
        """
        try:
            fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if fields["apportion_profile"] == WITHOUT_VIEW and not fields["widths"]:
                fields["view"] = {"grid": fields["grid"], "grid_in": fields["grid"], "activations": False}
            elif fields["apportion_profile"] != VERSION:
                raise CostError(f"{path} is a profile of another version than {VERSION}; calibrate again")
            fidelity, power = fields.get("fidelity"), fields.get("power")
            return cls(
                model=str(fields["model"]),
                target=Target(**fields["target"]),
                shape=Shape(**fields["shape"]),
                baseline=Reading.from_json(fields["baseline"]),
                floor_ms=None if fields["floor_ms"] is None else float(fields["floor_ms"]),
                cost=CostModel.from_json(fields["cost"]),
                view=View.from_json(fields["view"]),
                seed=int(fields["seed"]),
                seconds=float(fields["seconds"]),
                machine=dict(fields["machine"]),
                failures=dict(fields["failures"]),
                conditions=dict(fields.get("conditions", {})),
                fidelity=None if fidelity is None else Fidelity.from_json(fidelity),
                power=None if power is None else PowerCurve.from_json(power),
            )
        except CostError:
            raise
        except FileNotFoundError:
            raise CostError(f"no profile {path}; make one with apportion calibrate") from None
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            raise CostError(f"{path} is not a profile ({detail}); make one with apportion calibrate") from None
