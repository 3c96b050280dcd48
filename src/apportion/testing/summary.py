"""What a benchmark leaves: its figures with the commit, the machine and the versions beside them."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from apportion.core.folder import write_whole
from apportion.device.target import machine


class Summary:
    """The ``results/summary.json`` of a benchmark's folder; commit and clock are read when the run begins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, time.perf_counter()
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
        self.commit = done.stdout.strip() or "unknown"

    @property
    def seconds(self) -> float:
        return round(time.perf_counter() - self.began, 1)

    def conditions(self, packages: Sequence[str]) -> dict[str, Any]:
        """What the figures depend on: the commit, the machine, and the versions of some packages."""
        versions = {name: version(name) for name in packages} | {"python": platform.python_version()}
        return {"commit": self.commit, "machine": machine(), "versions": versions, "seconds": self.seconds}

    def write(
        self,
        figures: Mapping[str, Any],
        *,
        packages: Sequence[str] = ("torch",),
        quick: bool = False,
        name: str = "summary",
        **more: Any,
    ) -> None:
        """Writes the figures with their conditions; those of a quick run beside the full run's, never over them.

        Args:
            packages: whose versions matter.
            more: fields to add, or to put in place of the usual ones.
        """
        path = self.folder / "results" / f"{name}{'_quick' if quick else ''}.json"
        path.parent.mkdir(exist_ok=True)
        told = {"figures": dict(figures), **self.conditions(packages), "quick": quick, **more}
        write_whole(path, (json.dumps(told, indent=1) + "\n").encode())
