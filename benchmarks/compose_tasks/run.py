"""Which blend of checkpoints fits a few labelled examples? Weights by task against merges, single sources and tuning.

.venv/bin/python benchmarks/compose_tasks/run.py [--quick] [--prepare] [--ablations]

Trains six sources of all-MiniLM-L6-v2 on unlike domains first (minutes on two cores), then draws tasks from classes or
rows that none has seen (ID) and from domains that none has seen (OOD). Settings of every method are chosen on
validation tasks. --prepare only writes the texts that train_sources.py needs, for a machine with a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from arms import Arms, Outcome, accuracy, fixed_merges, prototypes
from library import SOURCES, Library, Pool, Task, draw, judged, prepare, prepared, train

from apportion.device.target import machine
from apportion.methods.compose.choose import oracle
from apportion.methods.compose.router import Lesson, Router, TrainConfig, source_embedding
from apportion.methods.compose.router import train as train_router
from apportion.models.network import read_out
from apportion.numerics.cvar import cvar

HERE = Path(__file__).parent
GRID = {
    "soup": {"method": "soup"},
    **{f"task arithmetic {s:g}": {"method": "task-arithmetic", "scale": s} for s in (0.2, 0.35)},
    **{f"ties {s:g}": {"method": "ties", "scale": s, "density": 0.2} for s in (0.5, 1.0)},
    **{f"dare {s:g}": {"method": "dare", "scale": s, "density": 0.5} for s in (0.2, 0.35)},
}
MERGES = ("soup", "task arithmetic", "ties", "dare")
SEARCHED = ("best single", "greedy soup", "lorahub", "single + residual")
OURS = ("no-adapt", "gradient-free", "gradient")
ORACLES = ("oracle", "oracle, 2 sources", "oracle, by layer", "oracle + residual", "hindsight")
PRIVATE = ("private 8", "private 2")
ALL = ("base", *MERGES, *SEARCHED, *OURS, *ORACLES, *PRIVATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few tasks, short training, no residuals: a look, not a result"
    )
    parser.add_argument("--prepare", action="store_true", help="only write the texts of the sources")
    parser.add_argument("--ablations", action="store_true", help="also vary sources, shots, noise and mixtures")
    parser.add_argument("--steps", type=int, help="of training every source")
    parser.add_argument("--tasks", type=int, help="tasks of ID and of OOD each")
    options = parser.parse_args()
    if options.prepare:
        print(prepare())
        return
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = options.tasks or (3 if options.quick else 60)
    folder = train(options.steps or (120 if options.quick else 400))
    library = Library(folder, device=device)
    pools = {side: judged(side) for side in ("valid", "id", "ood")}
    valid = tasks(library, pools["valid"], 3 if options.quick else 20, seed=1)
    lessons, source_SP = make_lessons(library, 10 if options.quick else 150)
    router = fit_router(lessons, source_SP)
    states = fixed_merges(folder, SOURCES, GRID)
    arms = Arms(library, states, router, source_SP)
    chosen = choose_settings(arms, valid)
    arms.fixed = {name: states[best] for name, best in chosen["merges"].items()}
    names = tuple(name for name in ALL if not (options.quick and "residual" in name))  # the slowest by far
    drawn = {side: tasks(library, pools[side], count, seed=2) for side in ("id", "ood")}
    rows = {side: evaluate(arms, drawn[side], names) for side in drawn}
    print("\n".join(table(rows, names)), flush=True)
    print("\n" + "\n".join(library_changes(arms, lessons, source_SP, drawn["id"])), flush=True)
    figures = summarise(rows, str(chosen["mode"]))
    extra = ablations(arms, pools, count) if options.ablations else {}
    for title, lines in extra.items():
        print(f"\n{title}\n" + "\n".join(lines), flush=True)
    summary = {
        "figures": figures,
        "chosen": chosen,
        "commit": _commit(),
        "machine": machine() | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "conditions": {"tasks": count, "load": round(os.getloadavg()[0], 2), "device": device},
        "seconds": round(time.perf_counter() - began, 1),
        "quick": options.quick,
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    with (HERE / "results" / "tasks.jsonl").open("w") as file:
        for side, found in rows.items():
            for name, outcomes in found.items():
                for place, outcome in enumerate(outcomes):
                    file.write(json.dumps({"side": side, "arm": name, "task": place, **outcome.__dict__}) + "\n")


def tasks(library: Library, pools: Sequence[Pool], count: int, seed: int, **settings) -> list[Task]:
    """Tasks of fifteen classes; every second one has its classes from two pools."""
    rng = np.random.default_rng(seed)
    drawn = []
    for place in range(count):
        first = pools[place % len(pools)]
        if place % 2 and len(pools) > 1:
            others = [pool for pool in pools if pool is not first]
            parts = [(first, 8), (others[int(rng.integers(len(others)))], 7)]
        else:
            parts = [(first, 15)]
        drawn.append(draw(library, parts, rng, **settings))
    return drawn


def make_lessons(library: Library, count: int) -> tuple[list[Lesson], torch.Tensor]:
    """The oracle's weights on tasks drawn from the sources' own training texts, and an embedding of every source."""
    pools = prepared()
    rng = np.random.default_rng(5)
    probes = [text for pool in pools for text in _some(pool.domain.content, 48, rng)]
    source_SP = embeddings(library, probes)
    blend = library.blend()
    lessons = []
    for task in tasks(library, pools, count, seed=4):
        choice = oracle(blend, task.support, max_steps=6)
        lessons.append(Lesson(prototypes(library, task), choice.weight_LS.float()))
    return lessons, source_SP


def fit_router(lessons: Sequence[Lesson], source_SP: torch.Tensor) -> Router:
    torch.manual_seed(0)
    router = Router(source_SP.shape[1])
    train_router(router, lessons, source_SP, TrainConfig(epochs=40))
    return router.eval()


def library_changes(arms: Arms, lessons: Sequence[Lesson], source_SP: torch.Tensor, drawn: Sequence[Task]) -> list[str]:
    """A source that the router was not trained with, and one that is taken away: accuracy on tasks of its domain."""
    lines = ["| source | known to the router | added later | taken away | weight when added later |", "|---" * 5 + "|"]
    for place, name in enumerate(SOURCES):
        own = [task for task in drawn if name in task.pools]
        if not own:
            continue
        others = [other for other in range(len(SOURCES)) if other != place]
        fewer = [
            Lesson(lesson.prototype_CP, teacher / teacher.sum(-1, keepdim=True))
            for lesson in lessons
            if float((teacher := lesson.teacher_LS[:, others]).sum()) > 0.1
        ]
        late = fit_router(fewer, source_SP[others])
        known, added, removed, weights = [], [], [], []
        for task in own:
            prototype_CP = prototypes(arms.library, task)
            with torch.no_grad():
                settings = (
                    (known, arms.router(prototype_CP, source_SP)),
                    (added, late(prototype_CP, source_SP)),
                    (removed, _without(arms.router(prototype_CP, source_SP), place)),
                )
            weights.append(float(settings[1][1][0, place]))
            for scores, weight_LS in settings:
                arms.blend.set_weights(weight_LS.double())
                scores.append(accuracy(arms.library, task))
        cells = " | ".join(f"{100 * float(np.mean(scores)):.1f}" for scores in (known, added, removed))
        lines.append(f"| {name} | {cells} | {float(np.mean(weights)):.2f} |")
    return lines


def _without(weight_LS: torch.Tensor, place: int) -> torch.Tensor:
    kept_LS = weight_LS.clone()
    kept_LS[:, place] = 0
    return kept_LS / kept_LS.sum(-1, keepdim=True)


def embeddings(library: Library, probes: Sequence[str]) -> torch.Tensor:
    """An embedding of every source from texts without labels."""
    inputs = library.encode(probes, [0] * len(probes)).inputs

    def features(state) -> torch.Tensor:
        library.set_state(state)
        with torch.no_grad():
            return read_out(library.network, inputs).cpu()

    base_NP = features(library.base)
    return torch.stack([source_embedding(base_NP, features(state)) for state in library.states.values()])


def choose_settings(arms: Arms, valid: Sequence[Task]) -> dict[str, object]:
    """The scale of every merge and the mode of the router that do best on the validation tasks."""
    scores = {name: np.mean([o.accuracy for o in found]) for name, found in evaluate(arms, valid, tuple(GRID)).items()}
    merges = {kind: max((n for n in GRID if n.startswith(kind)), key=lambda n: scores[n]) for kind in MERGES}
    modes = {n: np.mean([o.accuracy for o in found]) for n, found in evaluate(arms, valid, OURS).items()}
    return {"merges": merges, "mode": max(modes, key=lambda name: modes[name])}


def evaluate(arms: Arms, drawn: Sequence[Task], names: Sequence[str]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    for place, task in enumerate(drawn):
        for name, outcome in arms.run(task, names, seed=place).items():
            found[name].append(outcome)
    return found


def summarise(rows: Mapping[str, Mapping[str, list[Outcome]]], mode: str) -> dict[str, float]:
    def mean(side: str, name: str) -> float:
        return float(np.mean([outcome.accuracy for outcome in rows[side][name]]))

    figures: dict[str, float] = {}
    for side in ("id", "ood"):
        figures[f"accuracy_ours_{side}"] = mean(side, mode)
        figures[f"accuracy_no_adapt_{side}"] = mean(side, "no-adapt")
        figures[f"accuracy_best_merge_{side}"] = max(mean(side, name) for name in (*MERGES, "greedy soup", "lorahub"))
        figures[f"accuracy_best_single_{side}"] = mean(side, "best single")
        figures[f"accuracy_oracle_{side}"] = mean(side, "oracle")
        figures[f"accuracy_hindsight_{side}"] = mean(side, "hindsight")
        figures[f"accuracy_base_{side}"] = mean(side, "base")
    both = [outcome for side in ("id", "ood") for outcome in rows[side]["oracle, 2 sources"]]
    figures["active_sources"] = float(np.mean([outcome.active for outcome in both]))
    return {name: round(value, 4) for name, value in figures.items()}


def table(rows: Mapping[str, Mapping[str, list[Outcome]]], names: Sequence[str]) -> list[str]:
    lines = ["| method | ID, % | OOD, % | worst fifth, % | active | entropy | seconds |", "|---" * 7 + "|"]
    for name in names:
        cells = []
        for side in ("id", "ood"):
            values = 100 * np.array([outcome.accuracy for outcome in rows[side][name]])
            cells.append(f"{values.mean():.1f} ± {1.96 * values.std(ddof=1) / len(values) ** 0.5:.1f}")
        both = [outcome for side in ("id", "ood") for outcome in rows[side][name]]
        cells.append(f"{100 * (1 - cvar([1 - outcome.accuracy for outcome in both], 0.8)):.1f}")
        for key, form in (("active", ".1f"), ("entropy", ".2f"), ("seconds", ".1f")):
            cells.append(format(float(np.mean([getattr(outcome, key) for outcome in both])), form))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def ablations(arms: Arms, pools: Mapping[str, Sequence[Pool]], count: int) -> dict[str, list[str]]:
    """One thing varied at a time, on ID tasks; a few methods."""
    library, few = (
        arms.library,
        ("base", "soup", "best single", "greedy soup", "oracle", "oracle, by layer", "no-adapt"),
    )
    found: dict[str, list[str]] = {}

    def vary(title: str, settings: Mapping[str, Callable[[], list[Task]]], arms: Arms = arms, names=few) -> None:
        lines = [f"| {title} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for label, make in settings.items():
            scores = evaluate(arms, make(), names)
            means = [100 * float(np.mean([o.accuracy for o in scores[name]])) for name in names]
            lines.append(f"| {label} | {' | '.join(f'{m:.1f}' for m in means)} |")
        found[title] = lines

    ident = pools["id"]
    vary("shots", {str(n): lambda n=n: tasks(library, ident, count, 7, shots=n) for n in (1, 2, 5, 10, 20)})
    vary("wrong labels", {f"{n:.0%}": lambda n=n: tasks(library, ident, count, 8, noise=n) for n in (0.0, 0.2, 0.4)})
    vary("typing errors in queries", {"some": lambda: tasks(library, ident, count, 9, corrupt=_typos)})
    vary(
        "share of the first domain",
        {f"{a}0/{b}0": lambda a=a, b=b: _mixtures(library, ident, count, a, b) for a, b in ((5, 5), (7, 3), (9, 1))},
    )
    lines = ["| irrelevant sources added | soup | best single | greedy soup | oracle |", "|---" * 5 + "|"]
    drawn = tasks(library, ident, max(4, count // 4), 10)
    for extra in (0, 2, 10, 26):
        crowd = _crowded(library, extra)
        scores = evaluate(Arms(crowd, {}, None, None), drawn, ("best single", "greedy soup", "oracle"))
        blend = crowd.blend()
        uniform = torch.full((1, len(blend.sources)), 1 / len(blend.sources), dtype=torch.float64)
        soup = []
        for task in drawn:
            blend.set_weights(uniform)
            soup.append(accuracy(crowd, task))
        means = [np.mean(soup), *(np.mean([o.accuracy for o in scores[n]]) for n in scores)]
        lines.append(f"| {extra} | {' | '.join(f'{100 * m:.1f}' for m in means)} |")
    found["irrelevant sources"] = lines
    return found


def _crowded(library: Library, extra: int) -> Library:
    """The library with sources that know nothing: differences of real ones, their numbers shuffled."""
    crowd = object.__new__(Library)
    crowd.__dict__.update(library.__dict__)
    generator = torch.Generator().manual_seed(0)
    crowd.states = dict(library.states)
    real = list(library.states)
    for number in range(extra):
        source = library.states[real[number % len(real)]]
        state = {}
        for name, tensor in source.items():
            delta = (tensor - library.base[name]).reshape(-1)
            shuffled = delta[torch.randperm(len(delta), generator=generator).to(delta.device)]
            state[name] = library.base[name] + shuffled.view_as(tensor)
        crowd.states[f"noise-{number}"] = state
    return crowd


def _mixtures(library: Library, pools: Sequence[Pool], count: int, first: int, second: int) -> list[Task]:
    rng = np.random.default_rng(11)
    drawn = []
    for place in range(count):
        others = [pool for pool in pools if pool is not pools[place % len(pools)]]
        parts = [(pools[place % len(pools)], first), (others[int(rng.integers(len(others)))], second)]
        drawn.append(draw(library, parts, rng))
    return drawn


def _typos(text: str) -> str:
    """Two neighbouring letters of every third word exchanged."""
    words = text.split()
    for place in range(0, len(words), 3):
        word = words[place]
        if len(word) > 3:
            words[place] = word[0] + word[2] + word[1] + word[3:]
    return " ".join(words)


def _some(content: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    return [content[int(place)] for place in rng.choice(len(content), min(count, len(content)), replace=False)]


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
