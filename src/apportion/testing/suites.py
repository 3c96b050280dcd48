"""Promises that every policy, rule and meter keeps, as test classes to inherit: one subclass, its fixtures, no more.

Example::

    class TestGreedy(PolicySuite):
        @pytest.fixture
        def make_policy(self):
            return Greedy
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from apportion.core.budget import Budget, Limit
from apportion.core.knob import Knob, Setting
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import Result, budgeted_loop
from apportion.core.meter import Meter, Reading
from apportion.core.policy import Policy, Proposal, State
from apportion.core.rule import Rule
from apportion.testing.toys import Toy, concave_toy, rough_toy

MAX_STEPS = 200


def check_proposition_1(
    rows: Sequence[Row], *, knobs: Sequence[Knob], budget: Budget, z: float = 0.0, max_steps: int
) -> None:
    """Raises ``AssertionError`` unless the rows are those of a run that keeps Proposition 1.

    Every accepted move lowers the cost strictly under the limits in force, every proposal changes one knob within its
    domain, and there are at most ``max_steps`` rows after the start. A failed check scales each limit it broke by
    reading over check; from there the cost of the same model is higher, and has to fall again.
    """
    domains = {knob.name: knob.values for knob in knobs}
    start, *rest = rows
    assert start.kind == "start" and start.accepted and start.setting == Setting.dearest(knobs)
    assert len(rest) <= max_steps
    here, limits, standing = start, budget, start.cost
    for row in rest:
        if row.kind == "check":
            assert row.setting == here.setting
            assert row.accepted == budget.met(row.readings, z)
            if not row.accepted:
                limits = _tightened(limits, budget, here.readings, row.readings, z)
                # the loop goes a rounding step further than this page, so that it surely stands above the limit
                standing = limits.excess(here.readings, z) * (1 + 1e-9) + 1e-12
            continue
        assert row.kind in ("trial", "move") and row.knob is not None and row.value is not None
        assert row.value in domains[row.knob]
        assert row.setting == here.setting.replace(row.knob, row.value)
        assert row.cost == pytest.approx(limits.excess(row.readings, z), rel=1e-9, abs=1e-12)
        if row.accepted:
            assert row.kind == "move"
            assert row.cost < standing
            here, standing = row, row.cost


def _tightened(
    limits: Budget, promised: Budget, readings: Mapping[str, Reading], measured: Mapping[str, Reading], z: float
) -> Budget:
    factors = {}
    for now, limit in zip(limits.limits, promised.limits, strict=True):
        found = measured[limit.key]
        over = found.value / limit.value if found.value > limit.value else found.upper(z) / limit.value
        if over > 1:
            factors[limit.key] = min(now.value, readings[limit.key].upper(z) / over) / now.value
    return limits.scaled(factors)


class _Recorder:
    """A policy that notes what another one was shown and what it proposed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seen: list[tuple[State, Proposal | None]] = []

    def propose(self, state: State) -> Proposal | None:
        proposal = self.policy.propose(state)
        self.seen.append((state, proposal))
        return proposal


class PolicySuite:
    """Inherit, and give the fixture ``make_policy``: a function that builds the policy afresh, with the same seed."""

    @pytest.fixture
    def make_policy(self) -> Callable[[], Policy]:
        raise NotImplementedError("a PolicySuite needs the fixture make_policy; return a function that builds one")

    @pytest.fixture(params=["concave-0", "concave-1", "rough-0", "rough-1", "one-knob", "one-value"])
    def toy(self, request: pytest.FixtureRequest) -> Toy:
        kinds: dict[str, Callable[[], Toy]] = {
            "concave-0": lambda: concave_toy(random.Random(0)),
            "concave-1": lambda: concave_toy(random.Random(1), num_knobs=4, num_values=3),
            "rough-0": lambda: rough_toy(random.Random(0)),
            "rough-1": lambda: rough_toy(random.Random(1), num_knobs=2, num_values=5),
            "one-knob": lambda: concave_toy(random.Random(2), num_knobs=1, num_values=6),
            "one-value": lambda: rough_toy(random.Random(3), num_values=1),
        }
        return kinds[request.param]()

    @pytest.fixture(params=[0.5, 0.01], ids=["half", "out-of-reach"])
    def budget(self, toy: Toy, request: pytest.FixtureRequest) -> Budget:
        baseline_ms = toy.meters["latency"].read(toy.start).value
        return Budget((Limit(quantity="latency", value=request.param * baseline_ms, unit="ms"),))

    def test_the_same_seed_and_ledger_give_the_same_proposals(
        self, make_policy: Callable[[], Policy], toy: Toy, budget: Budget
    ) -> None:
        recorder = _Recorder(make_policy())
        _run(toy, budget, recorder, Ledger())
        for state, proposal in recorder.seen:
            # built afresh, this policy has seen nothing but the one ledger it is shown
            assert make_policy().propose(state) == proposal

    def test_proposals_stay_in_the_domain(self, make_policy: Callable[[], Policy], toy: Toy, budget: Budget) -> None:
        recorder = _Recorder(make_policy())
        _run(toy, budget, recorder, Ledger())
        domains = {knob.name: knob.values for knob in toy.knobs}
        for state, proposal in recorder.seen:
            if proposal is not None:
                assert proposal.value in domains[proposal.knob]
                assert proposal.value != state.setting[proposal.knob]

    def test_a_run_keeps_proposition_1(self, make_policy: Callable[[], Policy], toy: Toy, budget: Budget) -> None:
        ledger = Ledger()
        result = _run(toy, budget, make_policy(), ledger)
        check_proposition_1(ledger, knobs=toy.knobs, budget=budget, max_steps=MAX_STEPS)
        assert result.met == budget.met(result.readings)

    def test_a_resumed_run_goes_on_as_the_undisturbed_one(
        self, make_policy: Callable[[], Policy], toy: Toy, budget: Budget
    ) -> None:
        undisturbed = Ledger()
        expected = _run(toy, budget, make_policy(), undisturbed)
        for num_rows in range(1, len(undisturbed) + 1):
            resumed = Ledger()
            for row in undisturbed[:num_rows]:
                resumed.append(row)
            assert _run(toy, budget, make_policy(), resumed) == expected
            assert list(resumed) == list(undisturbed)


def _run(toy: Toy, budget: Budget, policy: Policy, ledger: Ledger) -> Result[Setting]:
    return budgeted_loop(
        toy.start,
        knobs=toy.knobs,
        rules=toy.rules,
        meters=toy.meters,
        budget=budget,
        policy=policy,
        ledger=ledger,
        max_steps=MAX_STEPS,
    )


class _ModelSuite:
    """How to tell whether a model changed; override both where deep copies or ``==`` do not say."""

    def snapshot(self, model: Any) -> Any:
        """What to remember of a model in order to see later whether it changed."""
        return copy.deepcopy(model)

    def same(self, first: Any, second: Any) -> bool:
        """Whether two snapshots are of the same model."""
        return bool(first == second)


class RuleSuite(_ModelSuite):
    """Inherit, and give the fixtures ``rule``, ``knob`` (one the rule serves) and ``model`` (one it applies to)."""

    @pytest.fixture
    def rule(self) -> Rule[Any]:
        raise NotImplementedError("a RuleSuite needs the fixture rule; return the rule under test")

    @pytest.fixture
    def knob(self) -> Knob:
        raise NotImplementedError("a RuleSuite needs the fixture knob; return a knob that the rule serves")

    @pytest.fixture
    def model(self) -> Any:
        raise NotImplementedError("a RuleSuite needs the fixture model; return a model that the rule applies to")

    def test_the_model_given_is_left_as_it_was(self, rule: Rule[Any], knob: Knob, model: Any) -> None:
        before = self.snapshot(model)
        for value in knob.values:
            rule.apply(model, knob, value)
            assert self.same(self.snapshot(model), before)

    def test_the_same_value_gives_the_same_model(self, rule: Rule[Any], knob: Knob, model: Any) -> None:
        first = [self.snapshot(rule.apply(model, knob, value)) for value in knob.values]
        # backwards, so that nothing remembered from the call before can help
        again = [self.snapshot(rule.apply(model, knob, value)) for value in reversed(knob.values)][::-1]
        assert all(self.same(one, other) for one, other in zip(first, again, strict=True))

    def test_a_model_handed_out_is_not_changed_by_later_calls(self, rule: Rule[Any], knob: Knob, model: Any) -> None:
        handed_out = []
        for value in knob.values:
            result = rule.apply(model, knob, value)
            handed_out.append((result, self.snapshot(result)))
        for result, _ in list(handed_out):
            rule.apply(result, knob, knob.cheapest)
        assert all(self.same(self.snapshot(result), before) for result, before in handed_out)


class MeterSuite(_ModelSuite):
    """Inherit, and give the fixtures ``meter`` and ``model``; set ``deterministic = False`` on a meter with noise."""

    deterministic = True

    @pytest.fixture
    def meter(self) -> Meter[Any]:
        raise NotImplementedError("a MeterSuite needs the fixture meter; return the meter under test")

    @pytest.fixture
    def model(self) -> Any:
        raise NotImplementedError("a MeterSuite needs the fixture model; return a model that the meter reads")

    def test_a_reading_is_finite_and_in_the_unit_of_the_meter(self, meter: Meter[Any], model: Any) -> None:
        reading = meter.read(model)
        assert math.isfinite(reading.value)
        assert math.isfinite(reading.stderr) and reading.stderr >= 0
        assert reading.count >= 1
        assert reading.unit == meter.unit

    def test_two_reads_of_a_deterministic_meter_agree(self, meter: Meter[Any], model: Any) -> None:
        if not self.deterministic:
            pytest.skip("this meter is noisy")
        assert meter.read(model) == meter.read(model)

    def test_reading_leaves_the_model_as_it_was(self, meter: Meter[Any], model: Any) -> None:
        before = self.snapshot(model)
        meter.read(model)
        assert self.same(self.snapshot(model), before)
