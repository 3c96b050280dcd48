"""The plan of a run: knobs, rules, meters, absolute limits, and the budgets of the rungs on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from apportion.core.budget import Budget, format_quantity
from apportion.core.knob import Knob
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import Result, budgeted_loop
from apportion.core.meter import Meter, Reading
from apportion.core.policy import Greedy, Policy, Restoring, Scheduled
from apportion.core.progress import Progress
from apportion.cost.calibrate import Anchored
from apportion.cost.parts import Parts
from apportion.cost.predicted import PredictedLatency
from apportion.device.measure import Session
from apportion.errors import InfeasibleError
from apportion.methods.compress.bench import Bench, latency_limit, read_artefact, static_meters
from apportion.methods.compress.prune import PREFIX as PRUNE
from apportion.methods.compress.prune import Prune, prune_knobs
from apportion.methods.compress.quantise import PREFIX as QUANTISE
from apportion.methods.compress.quantise import AsRun, Quantise, int8_twin, quantise_knob
from apportion.methods.compress.repair import PREFIX as REPAIR
from apportion.methods.compress.repair import Distil, DistilOptions, repair_knob
from apportion.methods.compress.rundir import Rung
from apportion.models.cut import slice_network
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.models.save import save
from apportion.numerics.stats import normal_quantile
from apportion.tasks.batches import Splits
from apportion.tasks.quality import quality_meter

CONFIDENCE = 0.95
Z = normal_quantile(CONFIDENCE)
_POLICIES: dict[str, Policy] = {"greedy": Greedy(), "scheduled": Scheduled()}


class Plan:
    """A run worked out and checked against the floor."""

    def __init__(
        self,
        network: Network,
        partition: Partition,
        splits: Splits,
        asked: Budget,
        bench: Bench,
        progress: Progress,
    ) -> None:
        config = bench.config
        self.network, self.partition, self.bench, self.progress = network, partition, bench, progress
        self.knobs = prune_knobs(partition, num_steps=config.num_steps)
        self.calibration: Anchored | None = None
        self.meters: dict[str, Meter[Network]] = static_meters()
        self.latency = latency_limit(asked)
        twin = int8_twin(bench.target) if config.quantise else None
        self.int8: Anchored | None = None
        if twin is not None:
            bench.target = bench.target.with_isa(twin.isa)  # one instruction set for both
        if self.latency is not None:
            parts = Parts.of(network, partition)
            with progress.stage("calibrate the clock"):
                self.calibration = bench.calibrate(network, parts)
            if twin is not None:
                with progress.stage("calibrate the clock in int8"):
                    self.int8 = bench.calibrate(network, parts, twin)
            cost = self.calibration.cost
            self.meters[self.latency.key] = PredictedLatency(cost, parts, int8=self.int8.cost if self.int8 else None)
        self.baseline = {key: meter.read(network) for key, meter in self.meters.items()}
        if self.latency is not None and self.calibration is not None:
            self.baseline[self.latency.key] = self.calibration.baseline
        self.asked, self.budget = asked, asked.resolve(self.baseline)
        self._refuse_below_floor()
        with progress.stage("read the original's answers"):
            self.selection = AsRun(quality_meter(network, splits.training, splits.selection, config.quality))
            self.report = quality_meter(network, splits.training, splits.report, config.quality)
            self.floor = self._floor(config.quality_floor)
        self.splits = splits

    @property
    def quality_name(self) -> str:
        return type(self.report).__name__.lower()

    def _floor(self, share: float | None) -> float | None:
        """The quality floor on the examples chosen with: a share of what the original reads there."""
        return None if share is None else share * self.selection.read(self.network).value

    def rung_budgets(self) -> list[tuple[Budget, Budget]]:
        """What the rungs are asked for, as written and in absolute limits: evenly spaced ratios down to the budget."""
        count = self.bench.config.rungs
        budgets = []
        for place in range(1, count + 1):
            factors = {}
            for limit in self.budget.limits:
                start = max(self.baseline[limit.key].value, limit.value)
                factors[limit.key] = (start / limit.value) ** (1 - place / count)
            budgets.append((self.asked.scaled(factors), self.budget.scaled(factors)))
        return budgets

    def run(self, start: Network, budget: Budget, rung: Rung, ledger: Ledger, name: str) -> Result[Network]:
        """The budgeted loop from one rung to the next, with its progress bar."""
        config = self.bench.config
        with self.progress.stage(f"{name} ({config.policy})") as update:
            first = 0.0

            def on_row(row: Row) -> None:
                nonlocal first
                first = first or ledger[0].cost
                if row.accepted and first:
                    update(1 - min(1.0, row.cost / first))

            def check(network: Network) -> dict[str, Reading]:
                save(network, rung.model)
                return self.measured(network, budget, rung.model)

            knobs, policy = self._from_here(start), _POLICIES[config.policy]
            if self.int8 is not None and start.precision == "fp32":
                knobs.append(quantise_knob())
            if config.repair_steps:
                knobs.append(repair_knob(2))
                policy = Restoring(policy, share=1.1)  # a rung is short: repair at its end, or when stuck
            return budgeted_loop(
                start,
                knobs=knobs,
                rules={
                    PRUNE: Prune(self.partition),
                    QUANTISE: Quantise(self.splits.calibration),
                    REPAIR: self._distil(),
                },
                meters={**self.meters, "quality": self.selection},
                budget=budget,
                policy=policy,
                ledger=ledger,
                quality_floor=self.floor,
                quality_slack=1.0 if config.repair_steps else 0.0,
                check=check,
                max_steps=config.max_steps,
                z=Z,
                on_row=on_row,
            )

    def measured(self, network: Network, budget: Budget, folder: Path) -> dict[str, Reading]:
        """What the model saved in a folder costs, measured if the budget is about the clock."""
        session = self.session(network, budget, folder) if self.latency else None
        artefact = self.bench.artefact(network, folder)
        return read_artefact(network, folder, self.latency, self.baseline, session, artefact)

    def session(self, network: Network, budget: Budget, folder: Path) -> Session:
        artefact = self.bench.artefact(network, folder)

        def clear(session: Session) -> bool:
            measured = read_artefact(network, folder, self.latency, self.baseline, session, artefact)
            return budget.met(measured, Z) or not budget.met(measured)

        return self.bench.session(folder, clear)

    def _from_here(self, start: Network) -> list[Knob]:
        """The pruning knobs, starting at what the start has kept."""
        kept = {f"{PRUNE}.{name}": len(units) for name, units in self.partition.kept_in(start).items()}
        here = []
        for knob in self.knobs:
            below = tuple(value for value in knob.values if isinstance(value, int) and value < kept[knob.name])
            here.append(replace(knob, values=(*below, kept[knob.name])))
        return here

    def _distil(self) -> Distil:
        config = self.bench.config
        blocks = [name for module in self.partition for name, _ in module.blocks]
        options = DistilOptions(steps=config.repair_steps, seed=config.seed)
        return Distil(
            self.network, self.splits.training, blocks, options, self.bench.rundir.path / "repaired", self.progress
        )

    def _refuse_below_floor(self) -> None:
        sizes = {module.name: module.sizes()[0] for module in self.partition}
        smallest = slice_network(self.network, self.partition, self.partition.keep(sizes))
        floor = {key: meter.read(smallest) for key, meter in self.meters.items()}
        if self.latency is not None and self.calibration is not None:
            floors = [anchored.floor for anchored in (self.calibration, self.int8) if anchored is not None]
            floor[self.latency.key] = min(floors, key=lambda reading: reading.value)
        for limit in self.budget.limits:
            reading = floor[limit.key]
            if reading.value > limit.value:
                share = reading.value / self.baseline[limit.key].value
                raise InfeasibleError(
                    f"budget {limit} can't be met: the smallest network measures "
                    f"{format_quantity(reading.value, reading.unit)} ({share:.0%} of the original); raise the budget"
                )
