"""The conditions that timings ran under, over all processes, and what they say of intervals that are not tight."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Disturbance = Literal["busy", "noisy"]
BUSY_RATIO = 1.2  # wall over CPU time per thread: the process was kept from running for a sixth of its time
BUSY_STEAL = 0.05
_WORST = ("wall_per_cpu", "load", "steal_ratio")
_SUMS = ("processes", "wall_s", "cpu_s")


def conditions_of(runs: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """The conditions of a session from those of its processes; ``wall_per_cpu`` is per thread, of the worst one."""
    ratios = [run["wall_s"] * threads / max(run["cpu_s"], 1e-9) for run in runs]
    conditions = {
        "processes": len(runs),
        "tight": all(run["tight"] for run in runs),
        "wall_s": sum(run["wall_s"] for run in runs),
        "cpu_s": sum(run["cpu_s"] for run in runs),
        "threads": threads,
        "cores": os.cpu_count() or 1,
        "wall_per_cpu": max(ratios, default=0.0),
        "load": max((run["load"] for run in runs), default=0.0),
        "steal_ratio": max((run["steal_ratio"] for run in runs), default=0.0),
        "versions": runs[0]["versions"] if runs else {},
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return conditions | _energy_of(runs) | {"disturbed": disturbance(conditions)}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of two sessions as one: sums of processes and times, the worst of what disturbs."""
    together = {
        **one,
        **{name: max(one[name], other[name]) for name in _WORST if name in one and name in other},
        **{name: one[name] + other[name] for name in _SUMS if name in one and name in other},
        **{name: other[name] for name in ("measured_at",) if name in other},
        "tight": one.get("tight", True) and other.get("tight", True),
        **_energy_of([one, other]),
    }
    return together | {"disturbed": disturbance(together)}


def _energy_of(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where joules come from, if they were asked for; the first that says there are none speaks for all."""
    energy = [one["energy"] for one in told if "energy" in one]
    missing = [one for one in energy if one["provenance"] == "unavailable"]
    return {"energy": (missing or energy)[0]} if energy else {}


def disturbance(conditions: Mapping[str, Any]) -> Disturbance | None:
    """What kept the intervals from being tight, or None where they are: the machine is busy, or the timings noisy.

    A busy machine keeps a process from running. Several threads also wait for each other, so that there a high ratio
    of wall to CPU time means a busy machine only where more wants to run than there are cores.
    """
    if conditions.get("tight", True):
        return None
    ratio, load, steal = (conditions.get(name, 0.0) for name in _WORST)
    crowded = conditions.get("threads", 1) == 1 or load > conditions.get("cores", 1)
    return "busy" if steal >= BUSY_STEAL or (ratio >= BUSY_RATIO and crowded) else "noisy"


def explain(conditions: Mapping[str, Any]) -> str | None:
    """The disturbance in one line, with the figures that tell it; None where there was none."""
    kind = disturbance(conditions)
    if kind is None:
        return None
    ratio, load, steal = (conditions.get(name, 0.0) for name in _WORST)
    told = f"wall/CPU {ratio:.1f} per thread, load {load:.1f}, stolen {steal:.0%}"
    if kind == "busy":
        return f"machine too busy: {told}"
    return f"noisy: the intervals are wide, though the machine does not look busy ({told}); time longer"
