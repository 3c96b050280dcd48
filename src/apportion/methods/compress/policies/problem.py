"""The choice that priced and exact make: one value per knob, least loss, within every limit; and how it is followed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from apportion.core.budget import Budget
from apportion.core.knob import Setting, Value
from apportion.core.meter import Reading
from apportion.core.policy import Proposal, State
from apportion.methods.compress.policies.sensitivity import Table

Choice: TypeAlias = tuple[int, ...]
"""The number of the option taken for each knob; option 0 leaves the knob where it stands."""
ROUNDING = 1e-12  # of a limit; a prediction that exceeds it by no more than this meets it


@dataclass(frozen=True)
class Option:
    """One value of a knob: the quality it loses and the share of each limit it costs, against staying."""

    knob: str
    value: Value
    loss: float
    costs: tuple[float, ...]


@dataclass(frozen=True)
class Problem:
    r"""A multiple-choice knapsack (eq. M3).

    .. math:: \min_x \sum_{kv} \ell_{kv} x_{kv} \quad \text{s.t.} \quad \sum_v x_{kv} = 1, \;
              \sum_{kv} c_{ikv} x_{kv} \le r_i, \; x \in \{0, 1\}

    ``options`` hold :math:`\ell` and :math:`c`, ``room`` is :math:`r`: one minus the reading over the limit, so it is
    negative for a limit that is exceeded now. A knob offers its present value and cheaper ones only, because a run
    can't undo a move; a value that saves on no limit is left out, because the loop would not accept it.
    """

    keys: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    room: tuple[float, ...]

    @classmethod
    def of(
        cls, table: Table, setting: Setting, readings: Mapping[str, Reading], budget: Budget, z: float = 0.0
    ) -> Problem:
        """What is left to choose at a setting whose readings are known; the table predicts only what comes after."""
        per_knob = []
        for knob in table.knobs:
            now = setting[knob.name]
            options = [Option(knob.name, now, 0.0, (0.0,) * len(budget.limits))]
            for value in reversed(knob.values[: knob.values.index(now)]):
                if not (table.knows(knob, value) and table.knows(knob, now)):
                    continue
                costs = tuple(
                    (table.cost(knob, value, limit.key, z) - table.cost(knob, now, limit.key, z)) / limit.value
                    for limit in budget.limits
                )
                if min(costs) < 0:
                    options.append(Option(knob.name, value, table.loss(knob, value) - table.loss(knob, now), costs))
            per_knob.append(tuple(options))
        room = tuple(1.0 - readings[limit.key].upper(z) / limit.value for limit in budget.limits)
        return cls(tuple(limit.key for limit in budget.limits), tuple(per_knob), room)

    @property
    def stay(self) -> Choice:
        return (0,) * len(self.options)

    def without(self, moves: set[tuple[str, Value]]) -> Problem:
        """The same problem without some values; staying remains possible."""
        kept = tuple(
            (options[0], *(option for option in options[1:] if (option.knob, option.value) not in moves))
            for options in self.options
        )
        return replace(self, options=kept)

    def loss(self, choice: Choice) -> float:
        return math.fsum(options[taken].loss for options, taken in zip(self.options, choice, strict=True))

    def excess(self, choice: Choice) -> float:
        """How far over the budget a choice is predicted to be (eq. L1); zero when it meets every limit."""
        taken = [options[number].costs for options, number in zip(self.options, choice, strict=True)]
        over = (math.fsum((*(costs[i] for costs in taken), -room)) for i, room in enumerate(self.room))
        return math.fsum(share for share in over if share > ROUNDING)

    def moves(self, choice: Choice) -> list[Option]:
        """The options a choice takes beyond staying, least loss per excess saved first.

        A loop stops as soon as the budget is met, so what gains quality or loses none has to come early.
        """
        now = self.excess(self.stay)

        def ratio(option: Option) -> float:
            saved = now - math.fsum(max(0.0, cost - room) for cost, room in zip(option.costs, self.room, strict=True))
            return option.loss / saved if saved > 0 else math.inf

        taken = [options[number] for options, number in zip(self.options, choice, strict=True) if number]
        return sorted(taken, key=ratio)


def follow(state: State, solve: Callable[[Problem], Choice | None]) -> Proposal | None:
    """Reads the table from the start, then moves towards the solution of what is left to choose.

    The problem is posed anew at every step, at the readings and limits of that step: where costs do not add up, or a
    check tightened a limit, the plan follows, without reading the table again. A move rejected here is left out once
    no other move of the plan remains; when the table sees no way on, each knob's next value is tried before giving up.
    """
    table = Table.of(state.knobs, state.rows, state.quality)
    if all(state.setting[knob.name] == knob.dearest for knob in state.knobs):  # whatever repair was done
        for knob, value in table.missing():
            return Proposal(knob.name, value, commit=False)
    problem = Problem.of(table, state.setting, state.readings, state.budget, state.z)
    rejected = {
        (row.knob, row.value)
        for row in state.rows_here()
        if row.kind == "move" and row.knob is not None and row.value is not None
    }
    for posed in (problem, problem.without(rejected)) if rejected else (problem,):
        choice = solve(posed)
        for option in () if choice is None else posed.moves(choice):
            if (option.knob, option.value) not in rejected:
                return Proposal(option.knob, option.value)
    return next((Proposal(knob.name, value) for knob, value in state.next_moves()), None)
