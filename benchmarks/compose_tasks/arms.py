"""The ways to make a model for a task that are compared; each returns query accuracy and what it used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from library import Library, Task
from torch import Tensor

from apportion.methods.compose.blend import layer_groups
from apportion.methods.compose.choose import Choice, best_single, greedy_soup, oracle, with_residual
from apportion.methods.compose.compose import ComposeConfig, compose
from apportion.methods.compose.private import PrivateMeans
from apportion.methods.compose.refine import MODES, Mode, refine
from apportion.methods.compose.resident import Resident
from apportion.methods.compose.router import Router
from apportion.methods.compose.support import support_loss
from apportion.models.network import read_out
from apportion.models.registry import find_packaged
from apportion.numerics.simplex import entropy


@dataclass(frozen=True)
class Outcome:
    """Accuracy on the queries, active sources, entropy of the weights, and seconds to make the model.

    ``weight`` is that of the source that a study is about.
    """

    accuracy: float
    active: float
    entropy: float
    seconds: float
    weight: float | None = None


def accuracy(library: Library, task: Task, mean_CP: Tensor | None = None) -> float:
    """Nearest class mean of the support, under the network as it is set."""
    with torch.no_grad():
        query = read_out(library.network, task.query.inputs)
        if mean_CP is None:
            feature, label = read_out(library.network, task.support.inputs), task.support.label_N
            onehot = torch.nn.functional.one_hot(label, int(task.query.label_N.max()) + 1).to(feature.dtype)
            mean_CP = (onehot.T @ feature) / onehot.sum(0).clamp_min(1)[:, None]
            mean_CP[onehot.sum(0) == 0] = 1e3
        return float((torch.cdist(query, mean_CP).argmin(-1) == task.query.label_N).double().mean())


def prototypes(library: Library, task: Task) -> Tensor:
    """Class means of the support under the base: what the router sees."""
    library.set_state(library.base)
    with torch.no_grad():
        feature = read_out(library.network, task.support.inputs)
        onehot = torch.nn.functional.one_hot(task.support.label_N).to(feature.dtype)
        return ((onehot.T @ feature) / onehot.sum(0).clamp_min(1)[:, None]).cpu()


def judged(library: Library, blend: Resident, task: Task, choose: Callable[[], Choice]) -> Outcome:
    began = time.perf_counter()
    blend.edits = {}
    choice = choose()
    blend.edits = choice.edits
    blend.set_weights(choice.weight_LS)
    seconds = time.perf_counter() - began
    result = Outcome(
        accuracy(library, task),
        float((choice.weight_LS > 0).any(0).sum()),
        float(entropy(choice.weight_LS).mean()),
        seconds,
    )
    blend.edits = {}
    return result


def fixed_merge(folder: Path, names: Sequence[str], settings: Mapping[str, str | float], out: Path) -> None:
    """Writes a merge that looks at no data, made by the tool itself."""
    options = dict(settings)
    method = str(options.pop("method"))
    config = ComposeConfig(
        sources=tuple(str(folder / name) for name in names),
        method=method,
        base=None if method == "soup" else str(find_packaged("minilm")),
        skip=("embeddings.position_ids",) if method != "soup" else (),
        threads=1,
        **options,
    )
    compose(config, out)


def lorahub(blend: Resident, base: dict[str, Tensor], task: Task, seed: int, trials: int = 40) -> dict[str, Tensor]:
    """LoraHub's search: free coefficients on the differences, support loss plus 0.05 · mean |c|, without gradients.

    The published code asks Nevergrad's NGOpt; this is a (1 + 1) evolution strategy with as many trials.
    """
    rng = np.random.default_rng(seed)
    num_sources = len(blend.sources)

    def loss(coefficient: np.ndarray) -> float:
        state = _shifted(blend, base, coefficient)
        with torch.no_grad():
            for name, parameter in blend.parameters.items():
                parameter.copy_(state[name])
        return support_loss(blend.network, task.support) + 0.05 * float(np.abs(coefficient).mean())

    best, width = np.zeros(num_sources), 0.4
    value = loss(best)
    for _ in range(trials - 1):
        trial = np.clip(best + width * rng.standard_normal(num_sources), -1.5, 1.5)
        found = loss(trial)
        if found < value:
            best, value, width = trial, found, 1.3 * width
        else:
            width *= 0.93
    return _shifted(blend, base, best)


def _shifted(blend: Resident, base: dict[str, Tensor], coefficient: np.ndarray) -> dict[str, Tensor]:
    state = {}
    for name, parameter in blend.parameters.items():
        weight = torch.as_tensor(coefficient, dtype=parameter.dtype, device=parameter.device)
        mixed = (weight @ blend.held_SN[name]).view_as(parameter)
        state[name] = base[name] * (1 - weight.sum()) + mixed
    return state


def uniform(blend: Resident) -> Tensor:
    return torch.full((1, len(blend.sources)), 1 / len(blend.sources), dtype=torch.float64)


class Arms:
    """All methods over one library; ``run`` judges them on a task."""

    def __init__(
        self, library: Library, fixed: Mapping[str, dict], router: Router | None, source_SP: Tensor | None
    ) -> None:
        self.library, self.fixed, self.router, self.source_SP = library, fixed, router, source_SP
        self.blend = library.blend()
        self.stay = dict.fromkeys(MODES, 0.0)
        """The price of leaving the router's weights that validation chose for every mode."""

    @cached_property
    def by_layer(self) -> Resident:
        return self.library.blend(groups=layer_groups(list(self.library.base)))

    def run(self, task: Task, names: Sequence[str], seed: int) -> dict[str, Outcome]:
        return {name: self._one(name, task, seed) for name in names}

    def _one(self, name: str, task: Task, seed: int) -> Outcome:
        library, blend = self.library, self.blend
        if name in self.fixed or name == "base":
            library.set_state(library.base if name == "base" else self.fixed[name])
            count = 0.0 if name == "base" else float(len(blend.sources))
            return Outcome(accuracy(library, task), count, 0.0, 0.0)
        if name == "lorahub":
            began = time.perf_counter()
            library.set_state(lorahub(blend, library.base, task, seed))
            return Outcome(accuracy(library, task), float(len(blend.sources)), 0.0, time.perf_counter() - began)
        choices: dict[str, Callable[[], Choice]] = {
            "uniform": lambda: Choice(uniform(blend), 0.0),
            "best single": lambda: best_single(blend, task.support),
            "greedy soup": lambda: greedy_soup(blend, task.support),
            "oracle": lambda: oracle(blend, task.support),
            "oracle, 2 sources": lambda: oracle(blend, task.support, max_active=2),
            "hindsight": lambda: oracle(blend, task.query),
            "single + residual": lambda: with_residual(blend, task.support, best_single(blend, task.support), 8),
            "oracle + residual": lambda: with_residual(blend, task.support, oracle(blend, task.support), 8),
            "oracle + scattered": lambda: with_residual(
                blend, task.support, oracle(blend, task.support), 8, scattered=True
            ),
        }
        mode, _, stay = name.partition(" ")
        if mode in MODES:
            price = float(stay or self.stay[mode])
            return judged(library, blend, task, lambda: self._routed(task, cast(Mode, mode), price))
        if name == "oracle, by layer":
            return judged(library, self.by_layer, task, lambda: oracle(self.by_layer, task.support))
        if name.startswith("private"):
            return self._private(task, float(name.split()[1]), seed)
        return judged(library, blend, task, choices[name])

    def weights(self, prototype_CP: Tensor) -> Tensor:
        assert self.router is not None
        assert self.source_SP is not None
        with torch.no_grad():
            return self.router(prototype_CP, self.source_SP).double()

    def _routed(self, task: Task, mode: Mode, stay: float) -> Choice:
        start_LS = self.weights(prototypes(self.library, task))
        blend = self.blend
        weight_LS = refine(
            mode,
            start_LS,
            lambda weight_LS: blend.loss(weight_LS, task.support),
            lambda weight_LS: blend.objective(task.support, weight_LS),
            stay=stay / len(task.support),
        )
        return Choice(weight_LS, 0.0)

    def _private(self, task: Task, epsilon: float, seed: int) -> Outcome:
        """Router and classifier from noisy class means only; no residual."""
        began = time.perf_counter()
        means = PrivateMeans(epsilon=epsilon, delta=1e-3, seed=seed)
        self.library.set_state(self.library.base)
        label = task.support.label_N.cpu()
        with torch.no_grad():
            noisy = means.release(read_out(self.library.network, task.support.inputs).cpu(), label)
            weight_LS = self.weights(noisy)
            self.blend.set_weights(weight_LS)
            mean_CP = means.release(read_out(self.library.network, task.support.inputs).cpu(), label)
        seconds = time.perf_counter() - began
        mean_CP = mean_CP.to(self.library.device)
        active = float((weight_LS > 0).any(0).sum())
        return Outcome(accuracy(self.library, task, mean_CP), active, float(entropy(weight_LS).mean()), seconds)
