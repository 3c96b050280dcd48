"""The plan of a run: knobs, rules, meters, absolute limits, and the budgets of the rungs on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from apportion.core.budget import Budget
from apportion.core.knob import Knob, Value
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import budgeted_loop
from apportion.core.meter import Meter, Reading
from apportion.core.policy import Restoring
from apportion.core.progress import Progress
from apportion.cost.parts import Parts
from apportion.device.measure import Session
from apportion.device.memory import SpreadPeak
from apportion.device.probe import int8_twin
from apportion.device.target import Target
from apportion.errors import BudgetError
from apportion.methods.compress.adapters import Adapters, require_peft
from apportion.methods.compress.bench import Bench, limit_on, measured_limits, read_artefact, static_meters
from apportion.methods.compress.floor import FloorMeter
from apportion.methods.compress.foreseen import Foreseen, foresee_energy, foresee_latency
from apportion.methods.compress.judge import Judge, meter_of, meter_over
from apportion.methods.compress.least import counted_floor, refuse_below, smallest_is_known, smallest_network
from apportion.methods.compress.offer import Offer, cuts, precisions, thinnings
from apportion.methods.compress.policies import LIKENESS, policy_named
from apportion.methods.compress.quantise import Quantise, by_sensitivity
from apportion.methods.compress.recipe import Tried, can_mix, quickest, try_recipes
from apportion.methods.compress.repair import PREFIX as REPAIR
from apportion.methods.compress.repair import Distil, DistilOptions, Towards, repair_knob, require_labels
from apportion.methods.compress.rulenames import parse_rules
from apportion.methods.compress.rundir import CHOICE, Rung
from apportion.methods.compress.way import Walked, Way, in_float, is_precision
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.models.safefile import folder_digest
from apportion.models.save import save
from apportion.numerics.stats import normal_quantile
from apportion.tasks.batches import Examples, Splits

CONFIDENCE = 0.95
Z = normal_quantile(CONFIDENCE)
LOOSER, MAX_CHECKS = 1.2, 12
EARLY = 1 / 3  # of the steps of a repair
SPARE = 0.02  # of a limit, for what two sessions differ by
FAR = 0.06  # over a limit, as a share of it: more than two processes can mistake


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
        self.allowed = parse_rules(config.rules, config.importance)
        if "adapters" in self.allowed:
            require_peft()
        if "finetune" in self.allowed:
            require_labels(network, splits)
        self.asked = asked
        self.overstated: dict[str, float] = {}
        self.spare_steps = 0
        self._judged: dict[str, tuple[Reading, Reading]] = {}
        twin = int8_twin(bench.target) if "quantise" in self.allowed else None
        if twin is not None:
            bench.target = bench.target.with_isa(twin.isa)  # one instruction set for both
        self.splits = splits
        with progress.stage("read the original's answers"):
            self.report = meter_of(network, splits, splits.report, config.quality)
            self.selection = Judge(network, self._meter_over(splits.selection), splits.selection)
            self.floor: float | None = None
            self.kept: FloorMeter | None = None
            if config.quality_floor is not None:
                self.floor = self._floor(config.quality_floor, self.selection.meter)
                self.kept = FloorMeter(network, self._meter_over(splits.guard), splits.guard, bench)
        self.recipe: Tried | None = None
        self.tried: list[Tried] = []
        self.quantise, self.num_mixed = Quantise(splits.calibration), 0
        if twin is not None:
            with progress.stage("try ways of int8"):
                self._choose_int8()
        self.offer = self._offered()
        self.foreseen = self._foresee(twin) if measured_limits(asked) else {}
        counted = static_meters(asked, bench.target)
        self.meters = counted | {key: one.meter for key, one in self.foreseen.items()}
        self.baseline = {key: meter.read(network) for key, meter in counted.items()}
        self.baseline |= {key: one.baseline for key, one in self.foreseen.items()}
        memory = limit_on("memory", asked)
        if memory is not None:
            self.meters[memory.key] = SpreadPeak(network, counted[memory.key])  # the check reads the peak itself
        self.budget = asked.resolve(self.baseline)
        int8 = None if self.recipe is None else self.recipe.int8
        least = counted_floor(network, partition, self.offer.knobs, counted, int8)
        refuse_below(least | {key: one.floor for key, one in self.foreseen.items()}, self.budget, self.baseline)

    def _foresee(self, twin: Target | None) -> dict[str, Foreseen]:
        """What is known beforehand of every measured limit, by its key."""
        network, bench, knobs = self.network, self.bench, self.offer.knobs
        parts, int8 = Parts.of(network, self.partition), None
        with self.progress.stage("calibrate the clock"):
            known = bench.known if bench.config.profile is not None else bench.calibrate
            fp32 = known(network, parts)
        if twin is not None and self.recipe is not None:
            with self.progress.stage("calibrate the clock in int8"):
                int8 = bench.calibrate(network.replace(int8=self.recipe.int8), parts, twin)
        latency = foresee_latency(fp32, int8, knobs)
        foreseen = {}
        for limit in measured_limits(self.asked):
            foreseen[limit.key] = latency
            if limit.quantity == "energy":
                with self.progress.stage("read the energy"):
                    foreseen[limit.key] = foresee_energy(latency, bench.energies(self._smallest()))
        return foreseen

    def _smallest(self) -> dict[str, Network]:
        """The networks that nothing goes below, in every precision; none where that is not known."""
        if not smallest_is_known(self.offer.knobs):
            return {}
        fp32 = smallest_network(self.network, self.partition, self.offer.knobs)
        return {"smallest": fp32} | ({} if self.recipe is None else {"smallest-int8": self.quantise.quantised(fp32)})

    def _choose_int8(self) -> None:
        """The recipe of int8 that is quickest here at no loss, and the layers that it leaves in float first."""
        self.tried = try_recipes(self.network, self.quantise, self.bench, self.selection.meter, self.splits.selection)
        self.recipe = quickest(self.tried, saves_time=bool(measured_limits(self.asked)))
        if self.recipe is None:
            return
        recipe = self.recipe.int8
        self.quantise = Quantise(self.splits.calibration, recipe)
        if not recipe.mixes:
            return
        what = {"run": self.bench.run, "what": "sensitivity to int8"}
        order = self.bench.store.get_or_make(
            what, lambda: {"order": list(by_sensitivity(self.network, self.splits.calibration, recipe))}
        )["order"]
        self.quantise = Quantise(self.splits.calibration, recipe, tuple(order))
        self.num_mixed = len(order) if can_mix(self.network, self.quantise, self.bench) else 0

    def told_int8(self, network: Network) -> dict[str, Any] | None:
        """How a network is quantised, if it is, and what every recipe read; None where int8 was no choice."""
        if not self.tried:
            return None
        used = asdict(network.int8) if network.precision == "int8" else None
        return {"used": used, "offered": self.recipe is not None, "tried": [one.to_json() for one in self.tried]}

    def _offered(self) -> Offer:
        calibration, config = self.splits.calibration, self.bench.config
        offer = cuts(self.network, self.partition, calibration, config, self.allowed)
        if self.recipe is not None:
            where = self.bench.target.name
            offer |= precisions(self.network, self.partition, self.quantise, self.num_mixed, self.allowed, where)
        offer |= thinnings(self.network, self.partition, calibration, self.asked, self.allowed, self.bench.target)
        if not offer.knobs:
            raise BudgetError(
                f"none of the rules {', '.join(sorted(self.allowed))} changes {', '.join(self.asked.keys)} on "
                f"{self.bench.target.name}; allow others with --rules"
            )
        return offer

    @property
    def quality_name(self) -> str:
        return type(self.report).__name__.lower()

    def _meter_over(self, examples: Examples) -> Meter[Network]:
        """The meter of the report, over other examples."""
        return meter_over(self.report, self.network, self.splits, examples, self.bench.config.quality)

    def _floor(self, share: float, meter: Meter[Network]) -> float:
        """A share of what the original reads."""
        quality = meter.read(self.network).value
        if quality <= 0:
            raise BudgetError(f"the original's {self.quality_name} is {quality:.2g}, of which no share is a floor")
        return share * quality

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

    def run(
        self, start: Network, setting: Mapping[str, Value], budget: Budget, rung: Rung, run: str, name: str
    ) -> Walked:
        """From one rung, whose setting is given, to the next, by the better of its ways.

        Where int8 is not enough and parts have to go as well, the same parts may be worth more in float: int8 saves
        little in layers that are small already. So that way is walked, too, until it would be repaired at its end. The
        one that is more like the original there is gone to the end; where repair may turn them round, both have a short
        one before they are compared. Weights are kept in float, so rungs stay nested.
        """
        knobs = self._knobs_from(setting)
        others = tuple(knob for knob in knobs if not is_precision(knob))
        choice = 0 < len(others) < len(knobs)
        way = Way(start, tuple(knobs), rung.ledger, run, name)
        if not choice:
            return self._walk(way, budget, rung)
        back = Way(in_float(start), others, rung.float_ledger, f"{run}/in-float", f"{name}, in float")
        told = rung.choice()
        if told is None:
            told = self._choose(way, back, budget, rung)
            rung.write(CHOICE, told)  # a run that goes on after this must not choose again, by what came later
        taken, left = (back, way) if told["in_float"] else (way, back)
        last = self._walk(taken, budget, rung)
        if last.result.met or not told["both_met"]:
            return replace(last, repair_steps=last.repair_steps + told["repair_steps"])
        other = self._walk(left, budget, rung)  # repaired, the better one broke its budget or its floor
        return replace(other if other.result.met else last, repair_steps=last.repair_steps + other.repair_steps)

    def _choose(self, way: Way, back: Way, budget: Budget, rung: Rung) -> dict[str, Any]:
        """Which of two ways to go to the end, whether both came to the budget, and the steps the other one trained."""
        found = self._walk(way, budget, rung, until="repair")
        uncut = all(found.result.setting[knob.name] == knob.dearest for knob in back.knobs)
        if found.result.model.precision == "fp32" or uncut:
            return {"in_float": False, "both_met": False, "repair_steps": 0}
        other = self._walk(back, budget, rung, until="repair")
        ahead, behind = (other, found) if other.rank > found.rank else (found, other)
        if not (ahead.stands and ahead.num_repairs <= behind.num_repairs):  # a repair may turn them round
            other, found = (self._walk(one, budget, rung, until="compared") for one in (back, way))
        in_float = other.rank > found.rank
        return {
            "in_float": in_float,
            "both_met": other.result.met and found.result.met,
            "repair_steps": (found if in_float else other).repair_steps,
        }

    def _walk(
        self,
        way: Way,
        budget: Budget,
        rung: Rung,
        until: Literal["end", "repair", "compared"] = "end",
    ) -> Walked:
        """The budgeted loop along a way with its progress bar.

        Args:
            until: where to stop: at its end, where it would be repaired there, or once an early repair was tried, too.
        """
        config = self.bench.config
        way.ledger.parent.mkdir(parents=True, exist_ok=True)
        with self.progress.stage(f"{way.name} ({config.policy})") as update, Ledger(way.ledger, run=way.run) as ledger:
            first = 0.0

            def on_row(row: Row) -> None:
                nonlocal first
                first = first or ledger[0].cost
                if row.accepted and first:
                    update(1 - min(1.0, row.cost / first))

            def check(network: Network) -> dict[str, Reading]:
                save(network, rung.model)
                return self.measured(network, budget, rung.model)

            def confirm(network: Network) -> dict[str, Reading]:
                self.judged(network, rung.model)
                return self.measured(network, budget, rung.model, twice=True)

            knobs, distil = list(way.knobs), None
            slack = math.inf if self.towards is not None and config.repair_steps else 0.0
            policy = policy_named(config.policy, None if self.floor is None else self.floor - slack)
            if slack:
                distil = self._distil()
                knobs.append(repair_knob(2, early=distil.early_steps > 0))
                policy = Restoring(  # a rung is short: repair at its end, or when stuck, or when quality collapses
                    policy,
                    share=1.1,
                    by=self._restored_by(),
                    early=distil.early_steps > 0,
                    tries=until == "compared",
                    when_stuck=until == "end",
                )
            result = budgeted_loop(
                way.start,
                knobs=knobs,
                rules={**self.offer.rules, **({} if distil is None else {REPAIR: distil})},
                meters={**self.meters, **self.selection.meters()},
                budget=budget,
                policy=policy,
                ledger=ledger,
                quality_floor=self.floor,
                quality_slack=slack,
                restored_by=self._restored_by(),
                check=check,
                guard=None if self.kept is None else self.kept.guard(rung.model),
                confirm=confirm if self.foreseen else None,
                max_checks=MAX_CHECKS,
                aim=self._aim(budget),
                max_steps=config.max_steps,
                z=Z,
                spare=dict.fromkeys(self.foreseen, SPARE),
                pause_to_restore=until != "end",
                on_row=on_row,
            )
            turns = [row.value for row in ledger if row.knob == REPAIR]
            trained = (
                0 if distil is None else sum(distil.steps(knobs[-1], value) for value in turns if value is not None)
            )
            return Walked(result, tuple(ledger), trained, self._restored_by() or "quality")

    def measured(self, network: Network, budget: Budget, folder: Path, *, twice: bool = False) -> dict[str, Reading]:
        """What the model saved in a folder costs, measured if the budget is about the clock or the counter."""
        session = self.session(network, budget, folder, twice=twice) if self.foreseen else None
        artefact = self.bench.opened(folder)
        return read_artefact(network, folder, self.asked, self.bench.target, self.baseline, session, artefact)

    def session(self, network: Network, budget: Budget, folder: Path, *, twice: bool = False) -> Session:
        """The measurements of a check; ``twice`` with those of the second half, which are taken later."""
        artefact = self.bench.opened(folder)

        def measured(session: Session) -> dict[str, Reading]:
            return read_artefact(network, folder, self.asked, self.bench.target, self.baseline, session, artefact)

        def within(session: Session) -> bool:
            return budget.met(measured(session), Z)

        def clear(session: Session) -> bool:
            return within(session) or not budget.met(measured(session))

        def over(session: Session) -> bool:
            return budget.excess(measured(session)) > FAR

        return self.bench.session(folder, clear, over, within, twice=twice)

    def judged(self, network: Network, folder: Path) -> tuple[Reading, Reading]:
        """The quality of the original and of the model saved in a folder, on held-out examples; read once."""
        content = folder_digest(folder)
        if content not in self._judged:
            with self.progress.stage("judge on held-out examples"):
                before = self.report.read(self.network)
                after = self.bench.read_quality(self.report, self.splits.report, network, folder)
            self._judged[content] = before, after
        return self._judged[content]

    def learn(self, network: Network, final: Mapping[str, Reading], *, repair_steps: int) -> None:
        """Remembers for the next rung how much predictions overstate this one, and the repair that it left over."""
        self.spare_steps = max(0, self.spare_steps + self.bench.config.repair_steps - repair_steps)
        for key, foreseen in self.foreseen.items():
            self.overstated[key] = max(1.0, foreseen.meter.read(network).value / final[key].value)

    def _aim(self, budget: Budget) -> Budget:
        """Limits to plan towards: looser where predicted, by what predictions overstated before and may further."""
        return budget.scaled({key: LOOSER * self.overstated.get(key, 1.0) for key in self.foreseen})

    def _knobs_from(self, setting: Mapping[str, Value]) -> list[Knob]:
        """The knobs that save cost, starting where the rung before ended."""
        here = []
        for knob in self.offer.knobs:
            last = knob.values.index(setting[knob.name]) if knob.name in setting else len(knob.values) - 1
            here.append(replace(knob, values=knob.values[: last + 1]))
        return here

    @property
    def towards(self) -> Towards | None:
        """What a repair trains towards; None where no rule repairs."""
        taught, labelled = bool(self.allowed & {"repair", "adapters"}), "finetune" in self.allowed
        if taught:
            return "both" if labelled else "teacher"
        return "labels" if labelled else None

    def _restored_by(self) -> str | None:
        """The reading that a repair must raise: likeness, but quality where labels alone are trained on."""
        return LIKENESS if LIKENESS in self.selection.meters() and self.towards != "labels" else None

    def _distil(self) -> Distil:
        config = self.bench.config
        assert self.towards is not None
        blocks = [name for module in self.partition for name, _ in module.blocks]
        options = DistilOptions(towards=self.towards, steps=config.repair_steps, seed=config.seed)
        repair = Adapters if "adapters" in self.allowed else Distil
        return repair(
            self.network,
            self.splits.training,
            blocks,
            options,
            self.bench.rundir.path / "repaired",
            self.progress,
            self.spare_steps,
            int(EARLY * config.repair_steps),
        )
