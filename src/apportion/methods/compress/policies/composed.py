"""Backtracking: a composition that does not break where one method's next step would be rejected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from apportion.core.knob import Value
from apportion.core.ledger import Row
from apportion.core.policy import Policy, Proposal, State
from apportion.errors import KnobError


@dataclass(frozen=True)
class Backtracking:
    """Tries every move before it commits to it, and turns to another value, knob or method where it would be rejected.

    A run can't undo a move, so the turning back happens before the commit: a move whose trial saves nothing or falls
    under the quality floor is shown to the policy as rejected, and it proposes another. When a policy has nothing
    left, the knobs that it gave up on are tried at other values: deeper where a step saved nothing (a plateau of the
    clock), finer where it fell under the floor.

    ``policies`` are the methods in order of preference, such as ``Scheduled(("prune.*",))`` before
    ``Scheduled(("quantise.*",))``. Their next acceptable moves are compared: an earlier method is left for a later one
    when it loses more than ``patience`` times as much quality per cost saved. With a patience of 1 the least loss
    wins, so that the first method can't use up the whole quality floor; with infinite patience the order is kept as
    long as it goes on, and later methods are not even tried before.

    ``quality_floor`` must be the loop's, which policies don't see. No move is ever rejected then, so the loop may as
    well break at the first rejected move, as the paper's algorithm is written.
    """

    policies: tuple[Policy, ...]
    quality_floor: float | None = None
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not self.policies:
            raise KnobError("backtracking has no policies to choose among; give one per method")
        if not self.patience >= 1:
            raise KnobError(f"patience is {self.patience!r}; give 1 to take the least loss, or more to keep the order")

    def propose(self, state: State) -> Proposal | None:
        view = self._marked(state)
        heads: list[tuple[float, Proposal]] = []
        for policy in self.policies:
            proposal = policy.propose(view)
            if proposal is None:
                continue
            ratio = self._ratio(state, proposal)
            if ratio is None or not proposal.commit:
                return replace(proposal, commit=False)
            heads.append((ratio, proposal))
            if self.patience == math.inf:
                break
        for knob, value in () if heads else self._other_values(state):
            ratio = self._ratio(state, Proposal(knob, value))
            return Proposal(knob, value, commit=ratio is not None)
        best = min((ratio for ratio, _ in heads), default=math.inf)
        return next((proposal for ratio, proposal in heads if self._good(ratio, best)), None)

    def _good(self, ratio: float, best: float) -> bool:
        """Whether a ratio is near enough to the best one; one that is not positive costs nothing, however much less."""
        return ratio <= best or 0 <= ratio <= self.patience * best

    def _marked(self, state: State) -> State:
        """The state with every trial from here that would be rejected shown as a rejected move."""
        num_before = len(state.rows) - len(state.rows_here())
        rows = [
            replace(row, kind="move") if row.kind == "trial" and self._reason(state, row) else row
            for row in state.rows_here()
        ]
        return replace(state, rows=(*state.rows[:num_before], *rows))

    def _reason(self, state: State, row: Row) -> str:
        """Why the loop rejected or would reject what a row from here has read; empty where it would not."""
        if row.kind == "move":
            return row.note or "no progress"
        if not state.budget.excess(row.readings, state.z) < state.budget.excess(state.readings, state.z):
            return "no progress"
        if self.quality_floor is not None and row.readings[state.quality].value < self.quality_floor:
            return "quality floor"
        return ""

    def _ratio(self, state: State, proposal: Proposal) -> float | None:
        """Quality lost per cost saved of a move as read from here; None if it has not been read."""
        for row in state.rows_here():
            if (row.knob, row.value) == (proposal.knob, proposal.value):
                lost = state.readings[state.quality].value - row.readings[state.quality].value
                now = state.budget.excess(state.readings, state.z)
                saved = now - state.budget.excess(row.readings, state.z)
                return lost / saved if saved > 0 else math.inf
        return None

    def _other_values(self, state: State) -> Iterator[tuple[str, Value]]:
        """Other values of the knobs that were given up here: not read yet, or read and acceptable.

        Deeper than the deepest that saved nothing, but finer than the finest that fell under the floor.
        """
        rows = [row for row in state.rows_here() if row.knob is not None]
        read = {(row.knob, row.value): self._reason(state, row) for row in rows}
        for knob in state.knobs:
            if knob.name not in {row.knob for row in rows}:
                continue
            for value in reversed(knob.values[: knob.values.index(state.setting[knob.name])]):
                reason = read.get((knob.name, value), "")
                if reason == "quality floor":
                    break
                if not reason:
                    yield knob.name, value
                    break
