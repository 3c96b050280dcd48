"""The budgeted loop (Algorithm 1, and Algorithm 10 for composed methods): propose, apply, read, accept, record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from apportion.core.budget import Budget
from apportion.core.knob import Knob, Setting, Value
from apportion.core.ledger import Kind, Ledger, Row
from apportion.core.meter import Meter, Reading
from apportion.core.policy import LEAST_PROGRESS, Policy, Proposal, State
from apportion.core.rule import Rule, check_rules, rule_for
from apportion.errors import KnobError, LedgerError

M = TypeVar("M")
ROUNDING = 1e-12
OVER_BUDGET = "measured over budget"
TOO_NEAR = "measured too near the budget"
UNDER_FLOOR = "measured under the quality floor"


class Outcome(Enum):
    """How a run ended: met, or one of the named failure signatures."""

    MET = "met"
    EARLY_BREAK = "early break"
    QUALITY_COLLAPSE = "quality collapse"
    BUDGET_VIOLATION = "budget violation"
    OUT_OF_STEPS = "out of steps"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _REMEDY[self]


_REMEDY = {
    Outcome.MET: "nothing to do",
    Outcome.EARLY_BREAK: "no single move saves cost any more: free more knobs, use finer values or another policy",
    Outcome.QUALITY_COLLAPSE: "every remaining move breaks the quality floor: raise the budget, lower the floor or add "
    "a rule that restores quality",
    Outcome.BUDGET_VIOLATION: "the fresh measurement kept exceeding the prediction: quieten the machine and start in "
    "another folder, with a profile that was calibrated now",
    Outcome.OUT_OF_STEPS: "the step limit ran out first: ask for fewer rungs or a looser budget, or raise max_steps",
}


@dataclass(frozen=True)
class Guard(Generic[M]):
    """Reads the quality of a finished model closer than that of every move is read, against a floor of its own.

    ``read`` gives readings to record with the check; the one named ``key`` may not lie under the floor, judged at ``z``
    standard errors below it.
    """

    read: Callable[[M], Mapping[str, Reading]]
    floor: float
    key: str = "quality"
    z: float = 0.0

    def holds(self, readings: Mapping[str, Reading]) -> bool:
        return readings[self.key].lower(self.z) >= self.floor


@dataclass(frozen=True)
class Result(Generic[M]):
    """Where a run ended. ``measured`` holds the fresh readings of the last check, empty where none was made."""

    outcome: Outcome
    model: M
    setting: Setting
    readings: Mapping[str, Reading]
    measured: Mapping[str, Reading]
    budget: Budget

    @property
    def met(self) -> bool:
        return self.outcome is Outcome.MET


def budgeted_loop(
    model: M,
    *,
    knobs: Sequence[Knob],
    rules: Mapping[str, Rule[M]],
    meters: Mapping[str, Meter[M]],
    budget: Budget,
    policy: Policy,
    ledger: Ledger,
    quality: str = "quality",
    quality_floor: float | None = None,
    quality_slack: float = 0.0,
    restored_by: str | None = None,
    check: Callable[[M], Mapping[str, Reading]] | None = None,
    guard: Guard[M] | None = None,
    confirm: Callable[[M], Mapping[str, Reading]] | None = None,
    max_checks: int = 5,
    aim: Budget | None = None,
    max_steps: int = 10_000,
    z: float = 0.0,
    break_on_reject: bool = False,
    pause_to_restore: bool = False,
    spare: Mapping[str, float] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Result[M]:
    """Moves knobs until the budget is met, quality would fall under its floor, or nothing saves cost any more.

    A move is accepted only if it lowers the cost by more than rounding, which is the excess over the budget judged at
    ``z`` standard errors above each reading, or, for a knob that restores, raises quality at no more cost. So the
    accepted costs never increase, whatever the noise of the meters, and the run ends after at most ``max_steps`` rows
    (Proposition 1).

    When the readings say that the budget is met, ``check`` has the last word: fresh readings of the quantities in the
    budget. If they exceed it, the limits that the loop works towards are scaled down by reading over check, and the run
    goes on; after ``max_checks`` such checks it ends as a budget violation, never as a success. Where nothing saves any
    more a check is made, too, as readings may be too high. Knobs that restore quality change no cost, so the first
    check comes before them, and one more after them. With that one ``guard`` has the last word on quality: under its
    floor the run ends as a quality collapse.

    The run is a function of its ledger: started again with the same arguments and the ledger of a killed run, it goes
    on where that one stopped, without reading anything twice.

    Args:
        model: where to start; rules never change it.
        knobs: the decisions, each starting at its dearest value; knobs of several methods compose.
        rules: the rule of every knob, by knob name or by a dotted prefix of it.
        meters: by the key they read; must cover the budget's keys and ``quality``.
        budget: absolute limits.
        policy: proposes trials and moves.
        ledger: empty, or the ledger of the run to go on with.
        quality_floor: no model whose quality reads lower ends a run as met, unless ``guard`` says so.
        quality_slack: how far under the floor moves may go on the way, where knobs can restore quality; moves that go
            lower are rejected.
        restored_by: the reading that a knob which restores must raise, where a finer one than quality is read.
        check: measures a finished model afresh.
        guard: judges the quality of a finished model that was measured to be within the budget.
        confirm: measures a finished model that passed both once more, later; its readings replace those of ``check``.
        aim: limits that the loop works towards at first, the budget's by default; looser ones where readings may be
            too high, so that checks lead it to the budget from above and nothing more than needed is cut.
        break_on_reject: end at the first rejected move, as Algorithm 1 is written, instead of asking the policy again.
        spare: shares of limits, by key, that a check leaves free where quality is restored after it, as the model is
            then measured once more and would have to be cut, restored or not, if that came out a little higher. Where
            nothing more can be saved, what is within the budget is enough.
        pause_to_restore: end where the budget is met and quality would be restored next; called again on the same
            ledger without this, the run goes on from there. What a policy only tries is tried before.
        on_row: told of every new row, for progress display.
    """
    _check_arguments(knobs, rules, meters, budget, quality)
    if check is None and (guard is not None or confirm is not None):
        raise KnobError("a guard or a confirmation follows what a check has measured; give both")
    run = _Run(
        model,
        knobs,
        rules,
        meters,
        budget,
        aim or budget,
        ledger,
        quality,
        restored_by or quality,
        z,
        spare or {},
        on_row,
    )
    floor = None if quality_floor is None else quality_floor - quality_slack
    while True:
        if run.over == 0.0:
            last = ledger[-1]
            restore = _finish(policy, run.state()) if len(ledger) <= max_steps else None
            if (
                restore is not None
                and (check is None or last.kind == "check")
                and (last.kind != "check" or last.accepted)
            ):
                if pause_to_restore and restore.commit:
                    return run.result(Outcome.MET, _last_check(ledger))
                run.step(restore.knob, restore.value, commit=restore.commit, floor=None)
                continue
            restored = restore is None
            low = quality_floor is not None and run.readings[quality].value < quality_floor
            if restored and low and guard is None:
                return run.result(Outcome.QUALITY_COLLAPSE, _last_check(ledger))
            if check is None:
                return run.result(Outcome.MET, {})
            if last.kind != "check":
                if len(ledger) > max_steps:
                    return run.result(Outcome.OUT_OF_STEPS, _last_check(ledger))
                run.check(check, *((guard, confirm) if restored else (None, None)), restores=not restored)
                continue
            if last.accepted:
                return run.result(Outcome.MET, last.readings)
            if last.note == UNDER_FLOOR:
                return run.result(Outcome.QUALITY_COLLAPSE, last.readings)
        num_failed = sum(row.kind == "check" and not row.accepted and row.note != TOO_NEAR for row in ledger)
        if num_failed >= max_checks or run.hopeless:
            return run.result(Outcome.BUDGET_VIOLATION, _last_check(ledger))
        if len(ledger) > max_steps:
            return run.result(Outcome.OUT_OF_STEPS, _last_check(ledger))
        last = ledger[-1]
        stop_here = break_on_reject and last.kind == "move" and not last.accepted
        proposal = None if stop_here else policy.propose(run.state())
        if run.is_near and (proposal is None or run.restores(proposal.knob)):
            run.take_near()
            continue
        if proposal is None and check is not None and run.has_moved:  # what is left to save may be an error of readings
            restored = _finish(policy, run.state()) is None
            run.check(check, *((guard, confirm) if restored else (None, None)), restores=not restored)
            continue
        if proposal is None:
            return run.result(_why_stuck(run.state().rows_here()), _last_check(ledger))
        run.step(proposal.knob, proposal.value, commit=proposal.commit, floor=floor)


class _Run(Generic[M]):
    """The moving parts of one run; everything but the model is read off the ledger."""

    def __init__(
        self,
        model: M,
        knobs: Sequence[Knob],
        rules: Mapping[str, Rule[M]],
        meters: Mapping[str, Meter[M]],
        budget: Budget,
        aim: Budget,
        ledger: Ledger,
        quality: str,
        restored_by: str,
        z: float,
        spare: Mapping[str, float],
        on_row: Callable[[Row], None] | None,
    ) -> None:
        self.knobs = {knob.name: knob for knob in knobs}
        self.rules, self.meters, self.ledger = rules, meters, ledger
        self.quality, self.restored_by, self.z, self.spare, self.on_row = quality, restored_by, z, spare, on_row
        self.promised, self.budget = budget, aim
        self.hopeless = False  # a check failed at a reading of nothing, from where no limit can be lowered
        self._before_near: Budget | None = None  # the limits before a check was too near them, as long as nothing moved
        self.model = model
        self.setting = Setting.dearest(knobs)
        self.readings: Mapping[str, Reading] = {}
        self._last_trial: tuple[Setting, M] | None = None
        if ledger:
            self._replay()
        else:
            readings = self._read(model)
            self._record("start", readings, accepted=True)
            self.readings = readings

    @property
    def over(self) -> float:
        """The cost of where the run stands, under the limits it works towards now."""
        return self.budget.excess(self.readings, self.z)

    def state(self) -> State:
        return State(
            tuple(self.knobs.values()),
            tuple(self.ledger),
            self.setting,
            self.readings,
            self.budget,
            self.quality,
            self.z,
        )

    def step(self, name: str, value: Value, *, commit: bool, floor: float | None) -> None:
        """Applies a proposal, reads it unless it was read from here already, and accepts or rejects it."""
        if name not in self.knobs:
            raise KnobError(f"the policy proposed the unknown knob {name!r}; the knobs are {', '.join(self.knobs)}")
        knob = self.knobs[name]
        knob.check(value)
        began = time.perf_counter()
        setting = self.setting.replace(name, value)
        known = next((row for row in self.state().rows_here() if row.setting == setting and row.knob == name), None)
        candidate: M | None = None
        if self._last_trial is not None and self._last_trial[0] == setting:
            candidate = self._last_trial[1]
        if candidate is None and (known is None or commit):
            candidate = rule_for(knob, self.rules).apply(self.model, knob, value)
        if known is not None:
            readings: Mapping[str, Reading] = known.readings
        else:
            assert candidate is not None
            readings = self._read(candidate)
        accepted, note = False, ""
        if commit:
            accepted, note = self._judge_restored(readings) if knob.restores else self._judge(readings, floor)
        self._record(
            "move" if commit else "trial",
            readings,
            accepted,
            began=began,
            knob=name,
            value=value,
            setting=setting,
            note=note,
        )
        if accepted:
            assert candidate is not None
            self.model, self.setting, self.readings = candidate, setting, readings
            self._last_trial, self._before_near = None, None
        elif candidate is not None:
            self._last_trial = (setting, candidate)

    def check(
        self,
        measure: Callable[[M], Mapping[str, Reading]],
        guard: Guard[M] | None,
        confirm: Callable[[M], Mapping[str, Reading]] | None,
        *,
        restores: bool,
    ) -> None:
        """Measures the model afresh; where that exceeds the promise, tightens the limits the loop works towards."""
        began = time.perf_counter()
        measured = dict(measure(self.model))
        note = "" if self.promised.met(measured, self.z) else OVER_BUDGET
        if not note and restores and not self._with_spare.met(measured, self.z):
            note = TOO_NEAR
        if not note and guard is not None:
            measured |= guard.read(self.model)
            note = "" if guard.holds(measured) else UNDER_FLOOR
        if not note and confirm is not None:
            measured |= confirm(self.model)
            note = "" if self.promised.met(measured, self.z) else OVER_BUDGET
        self._record("check", measured, not note, began=began, note=note)
        if note:
            self._tighten(measured, note)
        else:
            self._loosen()

    @property
    def has_moved(self) -> bool:
        """Whether a move was accepted since the last check."""
        since = next((row for row in reversed(self.ledger) if row.kind == "check" or _moved(row)), None)
        return since is not None and since.kind != "check"

    @property
    def is_near(self) -> bool:
        """Whether the model was measured to be within the budget, though with too little to spare."""
        return self._before_near is not None

    def take_near(self) -> None:
        """Accepts that measurement after all, under the limits from before it."""
        assert self._before_near is not None
        self.budget, self._before_near = self._before_near, None
        self._record("check", dict(_last_check(self.ledger)), True)
        self._loosen()

    def restores(self, name: str) -> bool:
        return name in self.knobs and self.knobs[name].restores

    def result(self, outcome: Outcome, measured: Mapping[str, Reading]) -> Result[M]:
        return Result(outcome, self.model, self.setting, self.readings, measured, self.promised)

    def _judge(self, readings: Mapping[str, Reading], floor: float | None) -> tuple[bool, str]:
        if not self.budget.excess(readings, self.z) < self.over * (1 - LEAST_PROGRESS):
            return False, "no progress"
        if floor is not None and readings[self.quality].value < floor:
            return False, "quality floor"
        return True, ""

    def _judge_restored(self, readings: Mapping[str, Reading]) -> tuple[bool, str]:
        if self.budget.excess(readings, self.z) > self.over:
            return False, "costs more"
        if not readings[self.restored_by].value > self.readings[self.restored_by].value:
            return False, "nothing restored"
        return True, ""

    def _read(self, model: M) -> dict[str, Reading]:
        return {name: meter.read(model) for name, meter in self.meters.items()}

    def _record(
        self,
        kind: Kind,
        readings: Mapping[str, Reading],
        accepted: bool,
        *,
        began: float | None = None,
        knob: str | None = None,
        value: Value | None = None,
        setting: Setting | None = None,
        note: str = "",
    ) -> None:
        row = Row(
            step=len(self.ledger),
            kind=kind,
            knob=knob,
            value=value,
            setting=self.setting if setting is None else setting,
            readings=dict(readings),
            cost=(self.promised if kind == "check" else self.budget).excess(readings, self.z),
            accepted=accepted,
            note=note,
            seconds=0.0 if began is None else time.perf_counter() - began,
        )
        self.ledger.append(row)
        if self.on_row is not None:
            self.on_row(row)

    @property
    def _with_spare(self) -> Budget:
        return self.promised.scaled({key: 1 - share for key, share in self.spare.items()})

    def _tighten(self, measured: Mapping[str, Reading], note: str) -> None:
        """Scales each limit that the check broke, so that the run stands above it again and has to go on."""
        self._before_near = self.budget if note == TOO_NEAR else None
        factors = {}
        for limit in (self._with_spare if note == TOO_NEAR else self.promised).limits:
            found = measured[limit.key]
            over = max(found.value, limit.value) / limit.value  # doubt alone is no measure of how much more to save
            if over == 1.0:
                over = found.upper(self.z) / limit.value
            if over > 1:
                now = next(lim.value for lim in self.budget.limits if lim.key == limit.key)
                wanted = min(now, self.readings[limit.key].upper(self.z) / over)
                if wanted <= 0:
                    self.hopeless = True
                    return
                factors[limit.key] = math.nextafter(wanted, 0.0) / now
        self.budget = self.budget.scaled(factors)

    def _loosen(self) -> None:
        """Raises limits that readings stand above, where a check found the model within the budget all the same."""
        factors = {}
        for limit in self.budget.limits:
            upper = self.readings[limit.key].upper(self.z)
            if upper > limit.value:
                factors[limit.key] = (1 + ROUNDING) * upper / limit.value
        self.budget = self.budget.scaled(factors)

    def _replay(self) -> None:
        """Rebuilds model, setting and limits from the ledger by applying its accepted moves again."""
        self.readings = self.ledger[0].readings
        for row in self.ledger[1:]:
            if row.kind == "move" and row.accepted:
                assert row.knob is not None
                assert row.value is not None
                if row.knob not in self.knobs:
                    raise LedgerError(f"the ledger moves the knob {row.knob!r}, which this run does not have")
                knob = self.knobs[row.knob]
                self.model = rule_for(knob, self.rules).apply(self.model, knob, row.value)
                self.setting, self.readings, self._before_near = row.setting, row.readings, None
            elif row.kind == "check" and not row.accepted:
                self._tighten(row.readings, row.note)
            elif row.kind == "check":
                self.budget, self._before_near = self._before_near or self.budget, None
                self._loosen()


def _check_arguments(
    knobs: Sequence[Knob], rules: Mapping[str, Rule[M]], meters: Mapping[str, Meter[M]], budget: Budget, quality: str
) -> None:
    check_rules(knobs, rules)
    missing = [name for name in (*budget.keys, quality) if name not in meters]
    if missing:
        raise KnobError(f"no meter reads {', '.join(missing)}; meters are given for {', '.join(meters)}")


def _moved(row: Row) -> bool:
    return row.kind == "move" and row.accepted


def _finish(policy: Policy, state: State) -> Proposal | None:
    finish = getattr(policy, "finish", None)
    return None if finish is None else finish(state)


def _last_check(ledger: Ledger) -> Mapping[str, Reading]:
    return next((row.readings for row in reversed(ledger) if row.kind == "check"), {})


def _why_stuck(rows_here: Sequence[Row]) -> Outcome:
    floored = any(row.kind == "move" and row.note == "quality floor" for row in rows_here)
    return Outcome.QUALITY_COLLAPSE if floored else Outcome.EARLY_BREAK
