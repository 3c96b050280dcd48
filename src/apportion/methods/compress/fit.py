"""Fit: from a model and a budget to a smaller model, measured, with its certificate, in a run folder."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from apportion.core.budget import Budget
from apportion.core.certificate import Certificate
from apportion.core.folder import whole_folder
from apportion.core.ledger import Row
from apportion.core.loop import Outcome
from apportion.core.meter import Reading
from apportion.core.progress import Progress, Silent
from apportion.device.build import model_files, needs_build
from apportion.device.runtimes.inputs import INPUTS
from apportion.device.target import machine
from apportion.errors import ApportionError
from apportion.methods.compress.bench import (
    Bench,
    budget_target,
    contents_of,
    counted_anywhere,
    model_digest,
)
from apportion.methods.compress.floor import KEPT
from apportion.methods.compress.importance import order_by_importance
from apportion.methods.compress.judge import load_examples
from apportion.methods.compress.plan import CONFIDENCE, Plan, Z
from apportion.methods.compress.policies import LIKENESS
from apportion.methods.compress.prices import tell_prices
from apportion.methods.compress.repair import PREFIX as REPAIR
from apportion.methods.compress.rundir import FitConfig, RunDir, Rung
from apportion.methods.compress.way import Walked
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.models.safefile import file_digest, folder_digest
from apportion.models.save import save


def fit(config: FitConfig, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Shrinks a model until a fresh measurement says that it meets the budget, and leaves everything in ``folder``.

    On the way it leaves a ladder of rungs, each cut out of the one before, repaired, measured and certified. Started
    again with the same folder it goes on where it stopped; a finished run is returned as it is.

    Returns:
        The result as it stands in ``result.json``: budget, baseline, final, quality before and after, met, outcome, and
        the ladder.

    Raises:
        InfeasibleError: the budget lies under what the smallest network measures.
    """
    began = time.perf_counter()
    progress = progress or Silent()
    asked = Budget.parse(config.budget)
    target = budget_target(asked, config.target)
    asked = counted_anywhere(asked)
    torch.manual_seed(config.seed)
    with progress.stage("load"):
        network = load(
            config.model,
            batch=config.batch,
            tokens=config.tokens,
            seed=config.seed,
            size=config.size,
            factory=config.factory,
        )
        guard = config.quality_floor is not None
        splits = load_examples(network, config.data, config.quality, seed=config.seed, guard=guard)
        rundir = RunDir(folder)
        run = rundir.start(config, model_digest(network), contents_of(config))
    finished = rundir.result()
    if finished is not None:
        return finished
    with progress.stage("trace and score importance"):
        partition = Partition.of(network)
        partition = order_by_importance(network, partition, config.importance, splits.calibration)  # type: ignore[arg-type]
    plan = Plan(network, partition, splits, asked, Bench(rundir, run, config, target, network), progress)
    report = _climb(plan, rundir, asked, run)
    report["seconds"] = time.perf_counter() - began
    rundir.write("result.json", report)
    return report


def _climb(plan: Plan, rundir: RunDir, asked: Budget, run: str) -> dict[str, Any]:
    """Runs rung after rung, down to the budget asked for or to the first that can't be met."""
    start, ladder = plan.network, []
    setting: dict[str, Any] = {}
    last: dict[str, Any] = {}
    budgets = plan.rung_budgets()
    for place, (wanted, budget) in enumerate(budgets, start=1):
        rung = rundir.rung(place)
        told = rung.result()
        if told is not None and not {"setting", "final", "met"} <= told.keys():
            raise ApportionError(f"{rung.path / 'result.json'} is damaged; delete it, and the rung is finished again")
        if told is None:
            name = "fit" if len(budgets) == 1 else f"rung {place} of {len(budgets)}"
            walked = plan.run(start, setting, budget, rung, f"{run}/{place}", name)
            told = _report(plan, rung, wanted, budget, walked)
            rung.write("result.json", told)
            start = walked.result.model
        else:
            start = _reload(plan.network, rung)
        setting = told["setting"]
        final = {key: Reading.from_json(fields) for key, fields in told["final"].items()}
        steps = plan.bench.config.repair_steps if told.get("trained", True) else 0  # what earlier versions told
        plan.learn(start, final, repair_steps=told.get("repair_steps", steps))
        ladder.append(
            {"rung": place} | {key: told.get(key) for key in ("limits", "final", "quality_after", "floor", "met")}
        )
        if told["met"] or place == 1:  # the smallest that was certified, else what the first came to
            rundir.use(place)
        last = told
        if not told["met"]:
            break
    return {
        **last,
        "budget": str(asked),
        "limits": {limit.key: limit.value for limit in plan.budget.limits},
        "met": last["met"] and len(ladder) == len(budgets),
        "ladder": ladder,
        "run": str(rundir.path),
    }


def _reload(original: Network, rung: Rung) -> Network:
    """The model of a finished rung; its files belong to this run, so its factory is the original's."""
    saved = load(str(rung.model), factory=original.origin.factory)
    return original.replace(module=saved.module, edits=saved.edits, calibration=saved.calibration, int8=saved.int8)


def _prices(plan: Plan, budget: Budget, rows: Sequence[Row]) -> dict[str, Any]:
    """Prices in the unit of the first limit, by the reading that moves are weighed by."""
    limit = budget.limits[0]
    quality = LIKENESS if LIKENESS in plan.selection.meters() else "quality"
    return tell_prices(rows, limit.key, quality, limit.unit)


def _keep_artefact(plan: Plan, rung: Rung) -> dict[str, str]:
    """Keeps the files that the runtime opened beside the model; their digests are what the certificate is about."""
    if not needs_build(plan.bench.target):
        path = rung.model / "model.safetensors"
        return {path.name: file_digest(path)}
    built = plan.bench.built(rung.model)
    with whole_folder(rung.artefact) as draft:
        for path in (*model_files(built), built / INPUTS):
            shutil.copyfile(path, draft / path.name)
    return {path.name: file_digest(path) for path in model_files(rung.artefact)}


def _report(plan: Plan, rung: Rung, asked: Budget, budget: Budget, walked: Walked) -> dict[str, Any]:
    result = walked.result
    save(result.model, rung.model)
    before, after = plan.judged(result.model, rung.model)
    session = plan.session(result.model, budget, rung.model, twice=result.met) if plan.foreseen else None
    final = plan.measured(result.model, budget, rung.model, twice=result.met)
    target = plan.bench.target
    floor = plan.kept.floor(result.measured) if plan.kept is not None and KEPT in result.measured else None
    met = result.met and budget.met(final, Z)  # a run that went on elsewhere was measured anew
    outcome = Outcome.BUDGET_VIOLATION if result.met and not met else result.outcome
    conditions = dict(session.conditions) if session else {}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    measured_at = conditions.pop("measured_at", now)
    report = {
        "budget": str(asked),
        "limits": {limit.key: limit.value for limit in budget.limits},
        "target": target.name,
        "baseline": {key: reading.to_json() for key, reading in plan.baseline.items()},
        "final": {key: reading.to_json() for key, reading in final.items()},
        "quality": plan.quality_name,
        "quality_before": before.to_json(),
        "quality_after": after.to_json(),
        "quality_of": plan.splits.report.description,
        "quality_floor": plan.bench.config.quality_floor,
        "floor": None if floor is None else floor.to_json(CONFIDENCE),
        "outcome": outcome.value,
        "remedy": outcome.remedy,
        "met": met,
        "precision": result.model.precision,
        "int8": plan.told_int8(result.model),
        "prices": _prices(plan, budget, walked.rows),
        "left_out": list(plan.offer.left_out),
        "setting": {name: value for name, value in result.setting.items() if name != REPAIR},
        "repair_steps": walked.repair_steps,
    }
    if met:
        certificate = Certificate(
            files=_keep_artefact(plan, rung),
            asked=str(asked),
            budget=budget,
            baseline=plan.baseline,
            measured=final,
            quality={"before": before, "after": after},
            artefact=folder_digest(rung.model),
            target=target.name,
            conditions={
                "machine": machine(),
                "isa": target.isa,
                "inputs": {name: list(tensor.shape) for name, tensor in plan.network.inputs.items()},
                **conditions,
            },
            measured_at=measured_at,
            confidence=CONFIDENCE,
            z=Z,
            floor=floor,
        )
        rung.write("certificate.json", certificate.to_json())
    return report
