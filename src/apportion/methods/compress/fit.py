"""Fit: from a model and a budget to a smaller model, measured, with its certificate, in a run folder."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from apportion.core.budget import Budget, Limit, format_quantity
from apportion.core.certificate import Certificate
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import Result, budgeted_loop
from apportion.core.meter import Meter, Reading
from apportion.core.policy import Greedy, Policy, Scheduled
from apportion.core.progress import Progress, Silent
from apportion.cost.calibrate import Anchored, anchor_sizes, calibrate_on_anchors
from apportion.cost.parts import Parts
from apportion.cost.predicted import PredictedLatency
from apportion.cost.sweep import Swept, sweep
from apportion.device.measure import Candidate, Session, Shape, measure
from apportion.device.meters import FlopCount, ParameterCount, SizeOnDisk
from apportion.device.probe import working_target
from apportion.device.store import Store
from apportion.device.target import Target, machine
from apportion.errors import BudgetError, InfeasibleError
from apportion.methods.compress.importance import order_by_importance
from apportion.methods.compress.prune import PREFIX, Prune, prune_knobs
from apportion.methods.compress.rundir import FitConfig, RunDir
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.models.safefile import folder_digest
from apportion.models.save import save
from apportion.numerics.stats import normal_quantile
from apportion.tasks.agreement import Agreement
from apportion.tasks.batches import Splits, load_splits

CONFIDENCE = 0.95
Z = normal_quantile(CONFIDENCE)
FINAL = "final"
BASELINE = "baseline"
_POLICIES: Mapping[str, Policy] = {"greedy": Greedy(), "scheduled": Scheduled()}


def fit(config: FitConfig, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Shrinks a model until a fresh measurement says that it meets the budget, and leaves everything in ``folder``.

    Started again with the same folder it goes on where it stopped; a finished run is returned as it is.

    Returns:
        The result as it stands in ``result.json``: budget, baseline, final, quality before and after, met, outcome.

    Raises:
        InfeasibleError: the budget lies under what the smallest network measures.
    """
    began = time.perf_counter()
    progress = progress or Silent()
    asked = Budget.parse(config.budget)
    target = budget_target(asked, config.target)
    torch.manual_seed(config.seed)
    with progress.stage("load"):
        network = load(config.model, batch=config.batch, tokens=config.tokens, seed=config.seed, factory=config.factory)
        splits = load_splits(network, config.data, seed=config.seed)
        rundir = RunDir(folder)
        run = rundir.start(config, model_digest(network))
    finished = rundir.result()
    if finished is not None:
        return finished
    with progress.stage("trace and score importance"):
        partition = Partition.of(network)
        partition = order_by_importance(network, partition, config.importance, splits.calibration)  # type: ignore[arg-type]
    bench = Bench(rundir, run, config, target, network)
    plan = Plan(network, partition, splits, asked, bench, progress)
    with Ledger(rundir.ledger, run=run) as ledger:
        result = plan.run(config, ledger, progress)
        report = _report(config, rundir, asked, target, plan, result, progress)
    report["seconds"] = time.perf_counter() - began
    rundir.write("result.json", report)
    return report


class Bench:
    """Measures networks of one run on its target; sessions are stored, so that a resumed run measures nothing twice."""

    def __init__(self, rundir: RunDir, run: str, config: FitConfig, target: Target, network: Network) -> None:
        self.rundir, self.run, self.config, self.target = rundir, run, config, target
        self.store = Store(rundir.store)
        self.factory = network.origin.factory
        self.original = Candidate(name=BASELINE, ref=network.origin.ref, factory=self.factory)
        self.shape = Shape(batch=config.batch, tokens=config.tokens, seed=config.seed)

    def calibrate(self, network: Network, parts: Parts) -> Anchored:
        """The quick cost model through a few anchors, measured once per run."""
        sizes = anchor_sizes(parts.partition)

        def now() -> dict[str, Any]:
            return sweep(network, parts, list(sizes.values()), self.target, self.shape, seconds_each=0.8).to_json()

        stored = self.store.get_or_make({"run": self.run, "what": "anchors"}, now)
        return calibrate_on_anchors(parts, Swept.from_json(stored), list(sizes))

    def measure_final(self, clear: Callable[[Session], bool] = lambda session: True) -> Session:
        """The saved model against the original, side by side in several fresh processes.

        Processes are added, to at most twice as many, while the session is not ``clear`` about the budget.
        """
        candidates = [self.original, Candidate(name=FINAL, ref=str(self.rundir.model), factory=self.factory)]

        def more(processes: int) -> Session:
            return measure(candidates, self.target, self.shape, processes=processes, seconds=1.5).require()

        session = more(self.config.processes)
        while not clear(session) and session.conditions["processes"] < 2 * self.config.processes:
            session = session.plus(more(1))
        return session


class Plan:
    """A run worked out: knobs, meters and absolute limits, checked against the floor."""

    def __init__(
        self,
        network: Network,
        partition: Partition,
        splits: Splits,
        asked: Budget,
        bench: Bench,
        progress: Progress,
    ) -> None:
        self.network, self.partition, self.bench = network, partition, bench
        self.knobs = prune_knobs(partition, num_steps=bench.config.num_steps)
        self.calibration: Anchored | None = None
        self.meters: dict[str, Meter[Network]] = static_meters()
        latency = latency_limit(asked)
        if latency is not None:
            with progress.stage("calibrate the clock"):
                parts = Parts.of(network, partition)
                self.calibration = bench.calibrate(network, parts)
            self.meters[latency.key] = PredictedLatency(self.calibration.cost, parts)
        self.baseline = {key: meter.read(network) for key, meter in self.meters.items()}
        if latency is not None and self.calibration is not None:
            self.baseline[latency.key] = self.calibration.baseline
        self.latency = latency
        self.budget = asked.resolve(self.baseline)
        self._refuse_below_floor()
        with progress.stage("read the original's answers"):
            self.selection = Agreement(network, splits.selection)
            self.report = Agreement(network, splits.report)

    def run(self, config: FitConfig, ledger: Ledger, progress: Progress) -> Result[Network]:
        """The budgeted loop with its progress bar."""
        with progress.stage(f"fit ({config.policy})") as update:
            start = 0.0

            def on_row(row: Row) -> None:
                nonlocal start
                start = start or ledger[0].cost
                if row.accepted and start:
                    update(1 - min(1.0, row.cost / start))

            return budgeted_loop(
                self.network,
                knobs=self.knobs,
                rules={PREFIX: Prune(self.partition)},
                meters={**self.meters, "quality": self.selection},
                budget=self.budget,
                policy=_POLICIES[config.policy],
                ledger=ledger,
                quality_floor=config.quality_floor,
                check=self.check,
                max_steps=config.max_steps,
                z=Z,
                on_row=on_row,
            )

    def check(self, network: Network) -> dict[str, Reading]:
        """Saves the model and measures that file."""
        save(network, self.bench.rundir.model)
        return self.measured(network, self.session(network) if self.latency else None)

    def session(self, network: Network) -> Session:
        """The measurements of the model in the run folder, which is this network's; taken once."""

        def clear(session: Session) -> bool:
            measured = self.measured(network, session)
            return self.budget.met(measured, Z) or not self.budget.met(measured)

        keep = {name: list(units) for name, units in network.edits.keep.items()}
        what = {"run": self.bench.run, "what": "check", "keep": keep}
        stored = self.bench.store.get_or_make(what, lambda: self.bench.measure_final(clear).to_json())
        return Session.from_json(stored)

    def measured(self, network: Network, session: Session | None) -> dict[str, Reading]:
        return read_artefact(network, self.bench.rundir.model, self.latency, self.baseline, session)

    def _refuse_below_floor(self) -> None:
        sizes = {module.name: module.sizes()[0] for module in self.partition}
        smallest = slice_network(self.network, self.partition, self.partition.keep(sizes))
        floor = {key: meter.read(smallest) for key, meter in self.meters.items()}
        if self.latency is not None and self.calibration is not None:
            floor[self.latency.key] = self.calibration.floor
        for limit in self.budget.limits:
            reading = floor[limit.key]
            if reading.value > limit.value:
                share = reading.value / self.baseline[limit.key].value
                raise InfeasibleError(
                    f"budget {limit} can't be met: the smallest network measures "
                    f"{format_quantity(reading.value, reading.unit)} ({share:.0%} of the original); raise the budget"
                )


def static_meters() -> dict[str, Meter[Network]]:
    """Meters that need no clock, by the name they go by in budgets."""
    return {"params": ParameterCount(), "size": SizeOnDisk(), "flops": FlopCount()}


def read_artefact(
    network: Network,
    folder: Path,
    latency: Limit | None,
    baseline: Mapping[str, Reading],
    session: Session | None,
) -> dict[str, Reading]:
    """What a saved model costs: its file's size, its counts, and its latency where a session measured it.

    Under a relative limit the latency is the measured ratio times the baseline, so that a slower hour on the machine,
    which slows both, does not count.
    """
    readings = {name: meter.read(network) for name, meter in static_meters().items()}
    readings["size"] = Reading(value=float((folder / "model.safetensors").stat().st_size), unit="B")
    if latency is not None and session is not None:
        if latency.relative:
            ratio, base = session.ratio(FINAL, BASELINE), baseline[latency.key]
            readings[latency.key] = Reading(
                value=ratio.value * base.value, unit="ms", stderr=ratio.stderr * base.value, count=ratio.count
            )
        else:
            readings[latency.key] = session.latency(FINAL)
    return readings


def budget_target(budget: Budget, option: str | None) -> Target:
    """The one target of a budget: from its limits, or from the option."""
    named = {limit.target for limit in budget.limits if limit.target} | ({option} if option else set())
    if len(named) > 1:
        raise BudgetError(f"the budget and --target name several targets ({', '.join(sorted(named))}); give one")
    unknown = [limit.quantity for limit in budget.limits if limit.quantity in ("energy", "memory")]
    if unknown:
        raise BudgetError(f"fit can't measure {unknown[0]} here yet; possible are latency, size, params, flops")
    return working_target(named.pop() if named else None)


def latency_limit(budget: Budget) -> Limit | None:
    return next((limit for limit in budget.limits if limit.quantity == "latency"), None)


def model_digest(network: Network) -> str:
    """Content digest of the original's files; a factory's model has none and goes by its reference."""
    if network.origin.folder is None:
        return network.origin.ref
    return folder_digest(network.origin.folder)


def _report(
    config: FitConfig,
    rundir: RunDir,
    asked: Budget,
    target: Target,
    plan: Plan,
    result: Result[Network],
    progress: Progress,
) -> dict[str, Any]:
    with progress.stage("judge on held-out examples"):
        before, after = plan.report.read(plan.network), plan.report.read(result.model)
    save(result.model, rundir.model)
    session = (
        plan.session(result.model) if plan.latency else None
    )  # taken by the check, unless the run ended before one
    final = plan.measured(result.model, session)
    report = {
        "budget": str(asked),
        "limits": {limit.key: limit.value for limit in plan.budget.limits},
        "target": target.name,
        "baseline": {key: reading.to_json() for key, reading in plan.baseline.items()},
        "final": {key: reading.to_json() for key, reading in final.items()},
        "quality_before": before.to_json(),
        "quality_after": after.to_json(),
        "quality_of": plan.report.examples.description,
        "outcome": result.outcome.value,
        "remedy": result.outcome.remedy,
        "met": result.met,
        "run": str(rundir.path),
    }
    if result.met:
        certificate = Certificate(
            asked=str(asked),
            budget=plan.budget,
            baseline=plan.baseline,
            measured=final,
            quality={"before": before, "after": after},
            artefact=folder_digest(rundir.model),
            target=target.name,
            conditions={"machine": machine(), **(session.conditions if session else {})},
            measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            confidence=CONFIDENCE,
            z=Z,
        )
        rundir.write("certificate.json", certificate.to_json())
    return report
