"""Policies choose the next value of a knob from the ledger alone, so that a resumed run goes on as it would have."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from apportion.core.budget import Budget
from apportion.core.knob import Knob, Setting, Value
from apportion.core.ledger import Row
from apportion.core.meter import Reading

LEAST_PROGRESS = 1e-6  # of the excess; models that predict costs leave less than this where a move saves nothing
FALLEN = 0.15  # of quality: a collapse


@dataclass(frozen=True)
class Proposal:
    """Set ``knob`` to ``value``; a trial is read and recorded, a commit moves the run there if the loop accepts it."""

    knob: str
    value: Value
    commit: bool = True


@dataclass(frozen=True)
class State:
    """What a policy sees: the knobs, the rows so far, where the run stands and the budget it must reach.

    ``z`` is the number of standard errors that costs are judged with, ``quality`` the name of the quality reading.
    """

    knobs: tuple[Knob, ...]
    rows: Sequence[Row]
    setting: Setting
    readings: Mapping[str, Reading]
    budget: Budget
    quality: str
    z: float

    def next_moves(self) -> list[tuple[Knob, Value]]:
        """The next cheaper value of every knob that saves cost, without those already rejected from here.

        Values that were read to save nothing are passed over: kernels may need several steps to have less to do. Where
        that leaves no move, they are offered again unless they were read from here: other moves may have changed that.
        """
        idle = self._idle()
        here = {(row.knob, row.value) for row in self.rows_here()}
        return self._beyond(idle) or self._beyond(idle & here)

    def _beyond(self, passed: Collection[tuple[str | None, Value | None]]) -> list[tuple[Knob, Value]]:
        """The next cheaper value of every knob that is not passed over, without those already rejected from here."""
        rejected = self.rejected_here()
        moves = []
        for knob in self.knobs:
            value = None if knob.restores else knob.cheaper(self.setting[knob.name])
            while value is not None and (knob.name, value) in passed:
                value = knob.cheaper(value)
            if value is not None and (knob.name, value) not in rejected:
                moves.append((knob, value))
        return moves

    def _idle(self) -> set[tuple[str | None, Value | None]]:
        """Knobs and values that saved nothing where they were read last."""
        idle: set[tuple[str | None, Value | None]] = set()
        before = math.inf
        for row in self.rows:
            if row.kind in ("trial", "move"):
                saves = self.budget.excess(row.readings, self.z) < before * (1 - LEAST_PROGRESS)
                (idle.discard if saves else idle.add)((row.knob, row.value))
            if row.kind in ("start", "move") and row.accepted:
                before = self.budget.excess(row.readings, self.z)
        return idle

    def rejected_here(self) -> set[tuple[str | None, Value | None]]:
        """Knobs and values of the moves that were rejected from the current setting."""
        return {(row.knob, row.value) for row in self.rows_here() if row.kind == "move" and not row.accepted}

    def rows_here(self) -> list[Row]:
        """Rows proposed from the current setting: those after the last accepted one."""
        here: list[Row] = []
        for row in reversed(self.rows):
            if row.kind in ("start", "move") and row.accepted:
                break
            here.append(row)
        return here[::-1]


class Policy(Protocol):
    """Chooses the next setting from the ledger; None when it has nothing left to propose.

    A policy may also have a method ``finish`` with the same arguments, asked when the budget reads as met and before
    the fresh check: it may still propose to restore quality.
    """

    def propose(self, state: State) -> Proposal | None: ...


@dataclass(frozen=True)
class Greedy:
    r"""Takes the move that loses least quality per unit of cost saved.

    .. math:: (k, v) = \arg\min_{k, v} \frac{Q(M) - Q(T(M, k, v))}{C(M) - C(T(M, k, v))}

    A move that loses nothing has the ratio zero; among equals the one that saves most is taken, so that a coarse or
    noisy meter of quality does not make small moves look better than large ones.

    Every knob's next value is tried once; after that only the most promising one is tried again from the new setting
    and taken while it still is the most promising (lazy evaluation: as parts are removed the others matter more, so
    an old ratio is an optimistic one).
    """

    def propose(self, state: State) -> Proposal | None:
        best: tuple[tuple[float, float], Knob, Value, bool] | None = None
        for knob, value in state.next_moves():
            found = _last_ratio(state, knob, value)
            if found is None:
                return Proposal(knob.name, value, commit=False)
            ratio, fresh = found
            if best is None or ratio < best[0]:
                best = (ratio, knob, value, fresh)
        if best is None:
            return None
        _, knob, value, fresh = best
        return Proposal(knob.name, value, commit=fresh)


def _last_ratio(state: State, knob: Knob, value: Value) -> tuple[tuple[float, float], bool] | None:
    """The newest known quality loss per cost saved of a move (and minus the saving, to compare equals by), and whether
    it was read from the current setting.

    Before the move itself has been tried, a shallower move of the same knob stands in for it.
    """
    here: Mapping[str, Reading] = state.readings
    fresh = True
    newest_start = None  # readings at the setting a row was proposed from
    for position in range(len(state.rows) - 1, -1, -1):
        row = state.rows[position]
        if row.kind in ("start", "move") and row.accepted:
            fresh = False
            continue
        if row.knob == knob.name and row.kind in ("trial", "move"):
            if fresh and row.value == value:
                newest_start = here
            else:
                newest_start = _readings_before(state.rows, position)
                fresh = False
            loss = newest_start[state.quality].value - row.readings[state.quality].value
            saved = state.budget.excess(newest_start, state.z) - state.budget.excess(row.readings, state.z)
            if saved <= 0 and row.value != value:
                return None  # a step that saves nothing says nothing about the one after it
            return (max(loss, 0.0) / saved if saved > 0 else math.inf, -saved), fresh
    return None


def _readings_before(rows: Sequence[Row], position: int) -> Mapping[str, Reading]:
    for row in reversed(rows[:position]):
        if row.kind in ("start", "move") and row.accepted:
            return row.readings
    raise AssertionError("a ledger opens with its start row")


@dataclass(frozen=True)
class Scheduled:
    """Walks the knobs in a fixed order: stage by stage, and within a stage all knobs down in step.

    ``stages`` are patterns over knob names (``("prune.*", "quantise.*")`` prunes first); a stage is left when none of
    its knobs can move. Nothing is tried first, so a run takes one reading per move.
    """

    stages: tuple[str, ...] = ("*",)

    def propose(self, state: State) -> Proposal | None:
        moves = state.next_moves()
        for pattern in self.stages:
            matching = [move for move in moves if fnmatch.fnmatchcase(move[0].name, pattern)]
            if matching:
                knob, value = min(matching, key=lambda move: move[0].depth(move[1]))
                return Proposal(knob.name, value)
        return None


@dataclass(frozen=True)
class RankedBy:
    """Lets another policy weigh its moves by a finer reading than quality, where the loop reads one of that name."""

    inner: Policy
    name: str

    def propose(self, state: State) -> Proposal | None:
        known = self.name in state.readings
        return self.inner.propose(replace(state, quality=self.name) if known else state)


@dataclass(frozen=True)
class Restoring:
    """Lets another policy save cost, and restores quality in between.

    Knobs that restore are turned when a ``share`` of the way to the budget was walked since the last time, when the
    other policy has nothing left to propose, and once more when the budget reads as met. One turn is kept for that.
    Where ``by`` names a finer reading than quality, that fell by less than ``least`` since and quality not at all,
    nothing is restored.

    With ``early``, the first turn of the knob is one to take early: as soon as quality fell by the share ``fallen`` of
    what it was, since from readings near chance no move looks better than another. Where it never does, the end takes
    the second turn at once, which stands for the first and the third; else the third, whatever was lost since. With
    ``tries`` the first one is tried at the end in either case, so that ends can be compared as they will be once
    restored. Without ``when_stuck`` a policy that has nothing left to propose is left at that.
    """

    inner: Policy
    share: float = 0.5
    by: str | None = None
    least: float = 0.01
    early: bool = False
    fallen: float = FALLEN
    tries: bool = False
    when_stuck: bool = True

    def propose(self, state: State) -> Proposal | None:
        turn = self._turn(state, at_end=False)
        if turn is not None and turn[0].values.index(turn[1]) > 0:
            early = (turn[0].name, turn[0].values[-2])
            before_early = (
                self.early
                and state.setting[turn[0].name] == turn[0].dearest
                and not any(row.kind == "move" and (row.knob, row.value) == early for row in state.rows)
            )
            if self._walked(state) >= self.share or (before_early and self._fell(state) >= self.fallen):
                return Proposal(turn[0].name, turn[1])
        saving = tuple(knob for knob in state.knobs if not knob.restores)
        proposal = self.inner.propose(replace(state, knobs=saving))
        return self.finish(state) if proposal is None and self.when_stuck else proposal

    def finish(self, state: State) -> Proposal | None:
        turn = self._turn(state, at_end=True)
        if turn is None or self._walked(state) == 0.0:
            return None
        knob, value = turn
        early, here = knob.values[-2], state.setting[knob.name]
        came_early = self.early and here == early
        if not came_early and not self._lost(state):
            return None
        tried = any((row.knob, row.value) == (knob.name, early) for row in state.rows_here())
        if self.tries and not tried and (came_early or (self.early and here == knob.dearest)):
            return Proposal(knob.name, early, commit=False)
        return Proposal(knob.name, value)

    def _lost(self, state: State) -> bool:
        """Whether there is anything to restore."""
        if self.by is None or self.by not in state.readings:
            return True
        before = self._last_restored(state).readings
        lost = {name: before[name].value - state.readings[name].value for name in (self.by, state.quality)}
        return lost[self.by] >= self.least or lost[state.quality] > 0

    def _turn(self, state: State, *, at_end: bool) -> tuple[Knob, Value] | None:
        """The next turn of the first knob that restores and has one which was not rejected from here."""
        rejected = state.rejected_here()
        for knob in state.knobs:
            if knob.restores:
                place = knob.values.index(state.setting[knob.name])
                gone = len(knob.values) - 1 - place
                skips = self.early and (gone in (1, 2) or (gone == 0 and at_end))
                place -= 2 if skips else 1
                if place >= 0 and (knob.name, knob.values[place]) not in rejected:
                    return knob, knob.values[place]
        return None

    def _fell(self, state: State) -> float:
        """The share of quality that was lost since it was last restored."""
        before = self._last_restored(state).readings[state.quality].value
        return (before - state.readings[state.quality].value) / before if before > 0 else 0.0

    def _last_restored(self, state: State) -> Row:
        """The row after which quality was last restored, or the start."""
        restoring = {knob.name for knob in state.knobs if knob.restores}
        last = state.rows[0]
        for row in state.rows:
            if row.kind == "move" and row.accepted and row.knob in restoring:
                last = row
        return last

    def _walked(self, state: State) -> float:
        """The share of the excess at the start that was saved since quality was last restored."""
        start = state.budget.excess(state.rows[0].readings, state.z)
        last = self._last_restored(state)
        now = state.budget.excess(state.readings, state.z)
        return (state.budget.excess(last.readings, state.z) - now) / start if start else 0.0
