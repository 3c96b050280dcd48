"""Which blend of checkpoints fits a few labelled examples? Weights by task against merges, single sources and tuning.

.venv/bin/python benchmarks/compose_tasks/run.py [--quick] [--prepare] [--ablations] [--workers N]

Trains six sources of all-MiniLM-L6-v2 on unlike domains first (minutes on two cores), then draws tasks from classes or
rows that none has seen (ID) and from domains that none has seen (OOD). Settings of every method are chosen on
validation tasks. --prepare only writes the texts that train_sources.py needs, for a machine with a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import Outcome
from crew import Crew, Job
from library import SOURCES, prepare, train
from world import CHANGE, CHANGED, GRID, MERGES, OURS, STAYS, STUDIES, TABLE, TRIED, World, without

from apportion.numerics.cvar import cvar
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
Rows = dict[tuple[str, str], dict[str, list[Outcome]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few tasks, short training, no residuals: a look, not a result"
    )
    parser.add_argument("--prepare", action="store_true", help="only write the texts of the sources")
    parser.add_argument("--report", action="store_true", help="only print the tables of the rows that are there")
    parser.add_argument("--ablations", action="store_true", help="also vary sources, shots, noise and mixtures")
    parser.add_argument("--steps", type=int, help="of training every source")
    parser.add_argument("--tasks", type=int, help="tasks of ID and of OOD; two fifths of it for every ablation")
    parser.add_argument("--workers", type=int, default=1, help="processes, where a GPU or many cores can feed them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task after so many")
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results", help="the same folder goes on")
    options = parser.parse_args()
    if options.prepare:
        print(prepare())
        return
    if not options.report:
        work(options)
    report(options.out)


def work(options: argparse.Namespace) -> None:
    """Adds the rows that are missing to ``tasks.jsonl``, and says in ``run.json`` how they came about."""
    summary, start = Summary(HERE), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = options.tasks or (3 if options.quick else 60)
    folder = train(options.steps or (120 if options.quick else 400), options.workers)
    print(f"sources after {summary.seconds:.0f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        crew = Crew(World(folder, Path(scratch), device, count, options.quick), options.workers)
        chosen = settle(crew, num_lessons=10 if options.quick else 150, num_valid=3 if options.quick else 40)
        print(f"router and settings after {summary.seconds:.0f} s: {chosen}", flush=True)
        known = {(row["study"], row["setting"], row["task"]) for row in read(options.out)}
        studies = list(STUDIES) if options.ablations else [TABLE, CHANGE]
        wanted = [job for job in jobs(studies, count) if job not in known]
        with (options.out / "tasks.jsonl").open("a") as file:
            for (study, setting, place), found in crew.until(wanted, start + options.seconds):
                for name, outcome in found.items():
                    row = {"study": study, "setting": setting, "task": place, "arm": name, **outcome.__dict__}
                    file.write(json.dumps(row) + "\n")
                file.flush()
        crew.close()
    told = {
        "chosen": chosen,
        **summary.conditions(("torch", "transformers")),
        "conditions": {"load": round(os.getloadavg()[0], 2), "device": device, "workers": options.workers},
        "quick": options.quick,
    }
    if device == "cuda":
        told["machine"] |= {"gpu": torch.cuda.get_device_name()}
    (options.out / "run.json").write_text(json.dumps(told, indent=1) + "\n")


def report(out: Path) -> None:
    """Prints the tables and writes the summary."""
    rows: Rows = {}
    for row in read(out):
        outcome = Outcome(**{field.name: row[field.name] for field in fields(Outcome)})
        rows.setdefault((row["study"], row["setting"]), {}).setdefault(row["arm"], []).append(outcome)
    studies = [study for study in STUDIES if any(one == study for one, _ in rows)]
    for study in studies:
        lines = table(rows) if study == TABLE else changes(rows) if study == CHANGE else ablation(rows, study)
        print("\n".join(lines) + "\n")
    told = json.loads((out / "run.json").read_text())
    figures = summarise(rows, str(told["chosen"]["mode"]))
    print(json.dumps(figures, indent=1))
    tasks = {side: len(rows[TABLE, side]["base"]) for side in STUDIES[TABLE].settings}
    summary = {
        "figures": figures,
        "tasks": tasks,
        "ablations": {study: means(rows, study) for study in studies[1:]},
        **told,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def read(out: Path) -> list[dict[str, Any]]:
    path = out / "tasks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def settle(crew: Crew, num_lessons: int, num_valid: int) -> dict[str, object]:
    """Router, merges and shuffled sources, and the settings that do best on the validation tasks.

    Half of these are of domains that a source knows, half of domains whose source was taken away.
    """
    scratch = crew.world.scratch
    lessons = crew.map([("embed", "", 0), *(("lesson", "", place) for place in range(num_lessons))])[1:]
    np.savez(
        scratch / "lessons.npz",
        **{f"prototype{n}": lesson[0] for n, lesson in enumerate(lessons)},
        **{f"teacher{n}": lesson[1] for n, lesson in enumerate(lessons)},
    )
    crew.map(
        [
            *(("router", name, 0) for name in ("", *SOURCES)),
            *(("shuffle", name, 0) for name in SOURCES[1:]),
            *(("merge", without(name, hidden), 0) for hidden in ("", *SOURCES) for name in GRID),
        ]
    )
    found = crew.map([(side, "", place) for side in ("valid", "far") for place in range(num_valid)])
    scores = {name: float(np.mean([one[name].accuracy for one in found])) for name in (*GRID, *TRIED)}
    merges = {kind: max((n for n in GRID if n.startswith(kind)), key=lambda n: scores[n]) for kind in MERGES}
    stay = {mode: max(stays, key=lambda stay: scores[f"{mode} {stay:g}"]) for mode, stays in STAYS.items()}
    best = max(OURS, key=lambda mode: scores[f"{mode} {stay[mode]:g}"])
    chosen: dict[str, object] = {"merges": merges, "mode": best, "stay": stay, "scores": scores}
    (scratch / "chosen.json").write_text(json.dumps(chosen))
    return chosen


def jobs(studies: Sequence[str], count: int) -> Iterator[Job]:
    """The table's sides in turn; then settings one by one, so that sources change seldom, on fewer tasks each."""
    for study in studies:
        settings = STUDIES[study].settings
        if study in (TABLE, CHANGE):
            yield from ((study, setting, place) for place in range(count) for setting in settings)
        else:
            few = max(2, count * 2 // 5)
            yield from ((study, setting, place) for setting in settings for place in range(few))


def summarise(rows: Rows, mode: str) -> dict[str, float]:
    def mean(side: str, name: str) -> float:
        return float(np.mean([outcome.accuracy for outcome in rows[TABLE, side][name]]))

    figures: dict[str, float] = {}
    for side in STUDIES[TABLE].settings:
        figures[f"accuracy_ours_{side}"] = mean(side, mode)
        figures[f"accuracy_no_adapt_{side}"] = mean(side, "no-adapt")
        figures[f"accuracy_best_merge_{side}"] = max(mean(side, name) for name in (*MERGES, "greedy soup", "lorahub"))
        figures[f"accuracy_best_single_{side}"] = mean(side, "best single")
        figures[f"accuracy_oracle_{side}"] = mean(side, "oracle")
        figures[f"accuracy_hindsight_{side}"] = mean(side, "hindsight")
        figures[f"accuracy_base_{side}"] = mean(side, "base")
    both = [outcome for side in STUDIES[TABLE].settings for outcome in rows[TABLE, side]["oracle, 2 sources"]]
    figures["active_sources"] = float(np.mean([outcome.active for outcome in both]))
    return {name: round(value, 4) for name, value in figures.items()}


def table(rows: Rows) -> list[str]:
    lines = ["| method | ID, % | OOD, % | worst fifth, % | active | entropy | seconds |", "|---" * 7 + "|"]
    for name in rows[TABLE, "id"]:
        cells, both = [], []
        for side in STUDIES[TABLE].settings:
            outcomes = rows[TABLE, side][name]
            values = 100 * np.array([outcome.accuracy for outcome in outcomes])
            cells.append(f"{values.mean():.1f} ± {1.96 * values.std(ddof=1) / len(values) ** 0.5:.1f}")
            both += outcomes
        cells.append(f"{100 * (1 - cvar([1 - outcome.accuracy for outcome in both], 0.8)):.1f}")
        for key, form in (("active", ".1f"), ("entropy", ".2f"), ("seconds", ".1f")):
            cells.append(format(float(np.mean([getattr(outcome, key) for outcome in both])), form))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def means(rows: Rows, study: str) -> dict[str, dict[str, float]]:
    """Mean accuracies in per cent by setting and method, and the number of tasks."""
    return {
        setting: {name: round(100 * float(np.mean([o.accuracy for o in found[name]])), 2) for name in found}
        | {"tasks": len(next(iter(found.values())))}
        for setting in STUDIES[study].settings
        if (found := rows.get((study, setting)))
    }


def ablation(rows: Rows, study: str) -> list[str]:
    names = list(next(found for (one, _), found in rows.items() if one == study))
    lines = [f"| {study} | tasks | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for setting, found in means(rows, study).items():
        lines.append(f"| {setting} | {found['tasks']} | {' | '.join(f'{found[name]:.1f}' for name in names)} |")
    return lines


def changes(rows: Rows) -> list[str]:
    """Accuracy on tasks of a source's domain, and the weight that it gets when the router meets it later."""
    lines = [f"| {CHANGE} | tasks | known to the router | added later | taken away | weight added later |"]
    lines.append("|---" * 6 + "|")
    for setting, found in means(rows, CHANGE).items():
        late: Mapping[str, list[Outcome]] = rows[CHANGE, setting]
        weight = float(np.mean([outcome.weight for outcome in late["added later"]]))
        cells = " | ".join(f"{found[name]:.1f}" for name in CHANGED)
        lines.append(f"| {setting} | {found['tasks']} | {cells} | {weight:.2f} |")
    return lines


if __name__ == "__main__":
    main()
