"""Composing for a task: sources and a few labelled examples in, the blend and the few edits that the task needs out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apportion.core.budget import Budget
from apportion.core.progress import Progress
from apportion.errors import BudgetError, ModelError
from apportion.methods.compose.blend import Blend, layer_groups
from apportion.methods.compose.choose import Choice, best_single, greedy_soup, oracle, with_residual, within_budget
from apportion.methods.compose.compose import ComposeConfig, Opened, open_all, write
from apportion.methods.compose.folder import refuse_foreign
from apportion.methods.compose.prices import measure_prices
from apportion.methods.compose.recipes import Linear
from apportion.methods.compose.refine import MODES, STAY, refine, truncate
from apportion.methods.compose.router import load_router, source_embedding
from apportion.methods.compose.support import Support, encode, outputs
from apportion.methods.compose.taskcache import cached_choice, task_key
from apportion.models.load import load
from apportion.tasks.domain import Domain
from apportion.tasks.heads import class_means
from apportion.tasks.support import read_support


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What the task is and what the result may use.

    ``budget`` limits what forming the model costs (``"40ms"``): reading and adding the sources of every block, and its
    edits, as measured here. ``router`` is a file of a trained router, whose weights ``mode`` refines; it needs the base
    whose features it was trained on.
    """

    support: str
    block_weights: bool = False
    residual_blocks: int = 0
    max_sources: int | None = None
    budget: str | None = None
    router: str | None = None
    mode: str = "gradient-free"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ModelError(f"mode {self.mode!r} is not known; possible are {', '.join(MODES)}")
        if self.residual_blocks < 0 or (self.max_sources is not None and self.max_sources < 1):
            raise ModelError(
                f"residual {self.residual_blocks} and max-sources {self.max_sources} must be at least 0 and at least 1"
            )
        self.limit_ms()

    def limit_ms(self) -> float | None:
        if self.budget is None:
            return None
        limits = Budget.parse(self.budget).limits
        if len(limits) != 1 or limits[0].quantity != "latency" or limits[0].relative:
            raise BudgetError(f"budget {self.budget!r} is not one time; write it like 40ms")
        return limits[0].value


def compose_for(
    config: ComposeConfig, task: TaskConfig, out: Path, *, store: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Chooses the weights by the support set and writes the folder ``out``; returns what was done."""
    refuse_foreign(out)
    domain = read_support(task.support)
    opened = open_all(config, store)
    with tempfile.TemporaryDirectory(prefix="apportion-") as scratch:
        blend, support = prepare(config, opened, domain, Path(scratch) / "model", task.block_weights, progress)
        key = task_key(
            domain, opened.sources, {"method": config.method, "seed": config.seed, **asdict(replace(task, support=""))}
        )
        choice = _remembered(key, lambda: _choose(config, task, opened, blend, support, progress))
    weight_S = [float(weight) for weight in choice.weight_LS.mean(0)]
    by_tensor = {name: [float(w) for w in choice.weight_LS[blend.row[name]]] for name in blend.parameters}
    edits = {name: edit.numpy().reshape(-1) for name, edit in choice.edits.items()}
    recipe = Linear(weight_S=weight_S, normalise=False, by_tensor=by_tensor, edits=edits)
    found: dict[str, Any] = {
        "support": {"name": domain.name, "examples": len(domain), "classes": list(domain.classes)},
        "support_loss": choice.loss,
        "active_sources": int((choice.weight_LS > 0).any(0).sum()),
        "block_weights": dict(zip(blend.groups, choice.weight_LS.tolist(), strict=True))
        if task.block_weights
        else None,
        "residual": sorted(edits),
        "search": choice.notes,
    }
    return write(config, opened, recipe, out, found=found, progress=progress)


def prepare(
    config: ComposeConfig, opened: Opened, domain: Domain, scratch: Path, by_layer: bool, progress: Progress | None
) -> tuple[Blend, Support]:
    """A network that can become any mixture of the sources, built from their average, and the support as its inputs."""
    average = Linear(weight_S=(1.0,) * len(opened.sources))
    write(replace(config, method="soup", dtype="F32", weights=None), opened, average, scratch, progress=progress)
    network = load(str(scratch), tokens=8)
    first = opened.sources[0]
    names = [name for name, stored in first.tensors.items() if stored.mixable and name not in opened.copied]
    blend = Blend(network, opened.sources, layer_groups(names) if by_layer else None, opened.copied)
    return blend, encode(network, domain)


def _remembered(key: Mapping[str, Any], make: Callable[[], Choice]) -> Choice:
    """A choice from the cache of tasks, or made and kept there."""
    made: list[Choice] = []

    def arrays() -> dict[str, Any]:
        choice = make()
        made.append(choice)
        edits = {f"edit/{name}": edit.numpy() for name, edit in choice.edits.items()}
        return {"weight": choice.weight_LS.numpy(), "loss": np.array([choice.loss]), **edits}

    found = cached_choice(key, arrays)
    if made:
        return made[0]
    edits = {name.removeprefix("edit/"): torch.from_numpy(a) for name, a in found.items() if name.startswith("edit/")}
    return Choice(torch.from_numpy(found["weight"]), float(found["loss"][0]), edits, {"remembered": True})


def _choose(
    config: ComposeConfig,
    task: TaskConfig,
    opened: Opened,
    blend: Blend,
    support: Support,
    progress: Progress | None,
) -> Choice:
    if config.method == "best-single":
        return best_single(blend, support, progress)
    if config.method == "greedy-soup":
        return greedy_soup(blend, support, progress)
    if config.method == "router":
        choice = routed(task, opened, blend, support)
    else:
        choice = oracle(blend, support, max_active=task.max_sources, progress=progress)
    if task.residual_blocks:
        choice = with_residual(blend, support, choice, task.residual_blocks, seed=config.seed, progress=progress)
    limit = task.limit_ms()
    if limit is not None:
        prices = measure_prices(blend.sources, blend.groups)
        choice = within_budget(blend, support, choice, prices, limit)
    return choice


def routed(task: TaskConfig, opened: Opened, blend: Blend, support: Support) -> Choice:
    """The router's weights, refined as the mode says.

    A source that the router's file does not know is embedded by what it changes on the support's inputs (their labels
    are not looked at), so that it can be used without retraining.
    """
    if task.router is None or opened.base is None:
        raise ModelError("the router works on features of a base; give --router FILE and --base")
    router, known = load_router(Path(task.router))
    probe = Blend(blend.network, [opened.base, *opened.sources], copied=opened.copied)

    def features(place: int) -> torch.Tensor:
        weight_LS = torch.zeros(1, len(probe.sources), dtype=torch.float64)
        weight_LS[0, place] = 1
        probe.set_weights(weight_LS)
        return outputs(blend.network, support)

    base_NP = features(0)
    prototype_CP = class_means(base_NP, support.label_N, len(support.classes))
    new = [source.name for source in opened.sources if source.name not in known]
    for place, source in enumerate(opened.sources, start=1):
        if source.name in new:
            known[source.name] = source_embedding(base_NP, features(place))
    with torch.no_grad():
        weight_LS = router(prototype_CP, torch.stack([known[source.name] for source in opened.sources])).double()
    if len(weight_LS) not in (1, len(blend.groups)):
        raise ModelError(f"the router gives weights of {len(weight_LS)} blocks, the model has {len(blend.groups)}")
    weight_LS = weight_LS.expand(len(blend.groups), -1).clone()
    if task.max_sources is not None:
        weight_LS = truncate(weight_LS, task.max_sources)
    mode: Any = task.mode
    weight_LS = refine(
        mode,
        weight_LS,
        lambda trial_LS: blend.loss(trial_LS, support),
        lambda trial_LS: blend.objective(support, trial_LS),
        max_active=task.max_sources,
        stay=STAY[mode] / len(support),
    )
    return Choice(weight_LS, blend.loss(weight_LS, support), notes={"mode": task.mode, "new_sources": new})
