"""From folders that specialise wrote to tasks on one resident backbone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apportion.cost.profile import Profile
from apportion.errors import ApportionError
from apportion.methods.adapt.adapt import read_learned
from apportion.methods.adapt.folder import SpecialFolder
from apportion.methods.adapt.make import HEADS
from apportion.methods.adapt.pool import read_pool
from apportion.methods.adapt.shared import SharedTasks
from apportion.methods.adapt.shared_clock import SharedClock
from apportion.tasks.support import read_support


def load_tasks(
    run: Path, folders: Sequence[Path], *, budget_ms: float | None = None, profile: Path | None = None
) -> SharedTasks:
    """One backbone with the tasks of some specialised folders, named as these are.

    A folder gives its mixture, its examples and its kind of head. The slice in it stays unused: a shared backbone is
    whole, so its features are others, and heads are fitted again to the examples.

    Args:
        budget_ms: opens only as many groups as keep it in a batch of any of these tasks; needs ``profile``.
        profile: a file of shared mode's clock, which ``calibrate_shared`` made.

    Raises:
        ApportionError: no finished run, or a folder that is not a specialised one of this run.
        InfeasibleError: the budget is under what the backbone takes.
    """
    if (budget_ms is None) != (profile is None):
        raise ApportionError("a budget in shared mode needs the profile of its clock; give budget_ms and profile both")
    names = [folder.name for folder in folders]
    if len(set(names)) != len(names) or not names:
        raise ApportionError(
            f"the folders {', '.join(names) or 'none'} were given; give one or more, named differently"
        )
    told = {folder.name: _told(folder, run) for folder in folders}
    learned = read_learned(run)
    shared = SharedTasks.of(learned.family)
    for name, task in told.items():
        shared.add(name, torch.tensor(task["mixture"]))
    if budget_ms is not None and profile is not None:
        clock = SharedClock.of(Profile.load(profile), shared.network, shared.groups)
        clock.open_within(shared, budget_ms)
    for name, task in told.items():
        domain = read_support(task["support"])
        if list(domain.classes) != task["classes"]:
            raise ApportionError(
                f"the examples {task['support']} of {name} are of other classes now than when it was specialised; "
                "specialise again"
            )
        inputs = read_pool(shared.network, domain).at(np.arange(len(domain)))
        label_S = torch.from_numpy(domain.label_N)
        shared.fit_head(name, inputs, label_S, domain.classes, HEADS[task["head"]](shared.scale))
    return shared


def _told(path: Path, run: Path) -> dict[str, Any]:
    """What a folder says of its task."""
    folder = SpecialFolder(path)
    asked = folder.read(folder.file).get("config")
    result = folder.result()
    if result is None:
        raise ApportionError(f"{path} is not finished; specialise again")
    if not isinstance(asked, dict) or not {"run", "support", "head"} <= asked.keys() or asked["head"] not in HEADS:
        raise ApportionError(f"{path / folder.file} is damaged; specialise again")
    if Path(asked["run"]).resolve() != run.resolve():
        raise ApportionError(f"{path} was specialised from {asked['run']}, not from {run}; tasks share one run")
    mixture, classes = result.get("mixture"), result.get("classes")
    numbers = isinstance(mixture, list) and all(isinstance(share, int | float) for share in mixture)
    if not numbers or not isinstance(classes, list):
        raise ApportionError(f"{path / 'result.json'} has no mixture or no classes; specialise again")
    return {"mixture": mixture, "classes": classes, "support": asked["support"], "head": asked["head"]}
