"""Peers under the same number of evaluations: Optuna's TPE and NSGA-II with constraints, and regularised evolution.

Costs may be looked up for free by everyone; an architecture over the budget is turned down before it is evaluated and
costs no evaluation. The last evaluations go to the most promising, so that nobody is judged on one lucky draw.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable

import optuna

from apportion.core.knob import Setting
from apportion.methods.search.spaces.nasbench201 import EDGES, OPS, Nasbench201

optuna.logging.set_verbosity(optuna.logging.ERROR)
FINALISTS, FINAL_SHARE = 6, 0.15


class Purse:
    """Counts evaluations and keeps their means."""

    def __init__(self, evaluate: Callable[[Setting, int], float], limit: int) -> None:
        self.evaluate, self.limit = evaluate, limit
        self.values: dict[Setting, list[float]] = defaultdict(list)
        self.spent = 0

    @property
    def search_left(self) -> int:
        return int(self.limit * (1 - FINAL_SHARE)) - self.spent

    def draw(self, arch: Setting) -> float:
        value = self.evaluate(arch, len(self.values[arch]))
        self.values[arch].append(value)
        self.spent += 1
        return value

    def mean(self, arch: Setting) -> float:
        return sum(self.values[arch]) / len(self.values[arch])

    def best(self) -> Setting:
        """Spends what is left on the finalists in turns, and returns the best mean."""
        finalists = sorted(self.values, key=self.mean, reverse=True)[:FINALISTS]
        while self.spent < self.limit:
            self.draw(min(finalists, key=lambda arch: len(self.values[arch])))
        return max(finalists, key=self.mean)


def optuna_search(
    sampler: str, space: Nasbench201, purse: Purse, over: Callable[[Setting], float], seed: int
) -> Setting | None:
    """``over`` is the relative excess over the budget; positive is infeasible."""

    def objective(trial: optuna.Trial) -> float:
        arch = Setting({edge: trial.suggest_categorical(edge, OPS) for edge in EDGES})
        excess = over(arch) if space.kept[space.row[arch]] else 1.0
        trial.set_constraint("over", excess)
        if excess > 0:
            return 0.0  # ranked by its violation, never by this
        value = purse.draw(arch)
        if purse.search_left <= 0:
            trial.study.stop()
        return value

    samplers = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed),
        "nsga2": lambda: optuna.samplers.NSGAIISampler(seed=seed, population_size=20),
    }
    study = optuna.create_study(direction="maximize", sampler=samplers[sampler]())
    study.optimize(objective, n_trials=4 * purse.limit)
    return purse.best() if purse.values else None


def regularised_evolution(
    space: Nasbench201, purse: Purse, over: Callable[[Setting], float], seed: int, population: int = 25, sample: int = 5
) -> Setting | None:
    """Aging evolution (Real et al. 2019): the best of a random few has a child, the oldest dies."""
    rng = random.Random(seed)

    def fits(arch: Setting) -> bool:
        return bool(space.kept[space.row[arch]]) and over(arch) <= 0

    living: deque[tuple[Setting, float]] = deque()
    for _ in range(20_000):
        if len(living) == population or purse.search_left <= 0:
            break
        arch = space.random(rng)
        if fits(arch):
            living.append((arch, purse.draw(arch)))
    while living and purse.search_left > 0:
        parent = max(rng.sample(list(living), min(sample, len(living))), key=lambda one: one[1])[0]
        for _ in range(200):
            edge = rng.choice(EDGES)
            child = parent.replace(edge, rng.choice([op for op in OPS if op != parent[edge]]))
            if fits(child):
                break
        else:
            child = parent
        living.append((child, purse.draw(child)))
        if len(living) > population:
            living.popleft()
    return purse.best() if purse.values else None
