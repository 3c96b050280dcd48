"""Targets: where and how a model will run. A target's name is its identity in budgets, stores and certificates."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass

from apportion.errors import TargetError

_NAME = re.compile(r"torch-cpu-([1-9][0-9]{0,2})t")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware, runtime, threads and precision; batch and shape are the model's example inputs."""

    name: str
    runtime: str = "torch"
    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1


def find_target(name: str | None) -> Target:
    """The target of a name, or torch eager on one thread when none is given.

    Raises:
        TargetError: no such target, or not on this machine.
    """
    name = name or "torch-cpu-1t"
    match = _NAME.fullmatch(name)
    if match is None:
        raise TargetError(f"unknown target {name!r}; possible here: {', '.join(available_targets())}")
    threads = int(match[1])
    if threads > (os.cpu_count() or 1):
        raise TargetError(f"target {name!r} needs {threads} cores; possible here: {', '.join(available_targets())}")
    return Target(name=name, threads=threads)


def available_targets() -> list[str]:
    cores = os.cpu_count() or 1
    return [f"torch-cpu-{threads}t" for threads in sorted({1, 2, cores}) if threads <= cores]


def machine() -> dict[str, object]:
    """What a certificate says about the machine."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
