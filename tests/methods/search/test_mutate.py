"""The mutation operator against brute force: every compensation, monotone or not, scalar or vector costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.methods.search.toy import Toy, cost

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.errors import ApportionError, BudgetError
from apportion.methods.search.band import Band
from apportion.methods.search.mutate import Infeasible, mutate
from apportion.methods.search.space import Ladder, Proposal, Rung

X = Setting({"op": 0, "rung": -1, "p": 0})
CHANGE = Proposal("op", {"op": 1})


class Line:
    """A space whose only compensation is a place on given ladders of costs, one per precision."""

    name, layers = "line", ("op",)

    def __init__(self, ladders, nearest, ordered=True):
        self.costs, self.nearest, self.is_ordered = ladders, nearest, ordered

    def ladders(self, arch, layer):
        return [
            Ladder(
                tuple(
                    Rung(Setting({**arch, "rung": i, "p": p}), abs(i - self.nearest) / 10) for i in range(len(costs))
                ),
                ordered=self.is_ordered,
            )
            for p, costs in enumerate(self.costs)
        ]

    def predict(self, arch):
        values = self.costs[arch["p"]][arch["rung"]] if arch["rung"] >= 0 else 1.0
        values = values if isinstance(values, tuple) else (values,)
        return {f"c{j}": Reading(value=value, unit="ms") for j, value in enumerate(values)}


def band(tau=0.05, keys=1, **options):
    return Band.around({f"c{j}": Reading(value=1.0, unit="ms") for j in range(keys)}, tau, **options)


def brute(space, band, by):
    """The best rung inside the band over all ladders."""
    rungs = [rung for ladder in space.ladders(CHANGE.apply(X), "op") for rung in ladder.rungs]
    inside = [rung for rung in rungs if band.holds(space.predict(rung.arch))]

    def deviation(rung):
        return band.deviation(space.predict(rung.arch))

    key = (lambda r: (r.drift, deviation(r))) if by == "drift" else (lambda r: (deviation(r), r.drift))
    return min(inside, key=key).arch if inside else None


def result(space, band, method, span=0):
    made = mutate(space, X, CHANGE, band, space.predict, method=method, span=span)
    return None if isinstance(made, Infeasible) else made[0].arch


ladder_costs = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60)


@given(st.lists(ladder_costs, min_size=1, max_size=3), st.integers(0, 59), st.floats(0.01, 0.3))
def test_bisection_and_directed_search_find_what_brute_force_finds_on_monotone_costs(ladders, nearest, tau):
    ladders = [sorted(costs) for costs in ladders]
    space = Line(ladders, nearest % min(map(len, ladders)))
    for method in ("auto", "bisect", "directed", "bracket"):
        assert result(space, band(tau), method) == brute(space, band(tau), "drift")


@given(st.lists(ladder_costs, min_size=1, max_size=3), st.integers(0, 59), st.floats(0.01, 0.3), st.booleans())
def test_the_finite_set_finds_the_nearest_cost_whatever_the_order(ladders, nearest, tau, ordered):
    space = Line(ladders, nearest, ordered)
    assert result(space, band(tau), "finite") == brute(space, band(tau), "cost")


@given(ladder_costs, st.integers(0, 5), st.integers(0, 59), st.floats(0.01, 0.3), st.randoms())
def test_bracketing_is_exact_on_costs_out_of_order_by_at_most_a_span(costs, span, nearest, tau, rng):
    costs = sorted(costs)
    for begin in range(0, len(costs), span + 1):  # shuffled inside blocks, so pairs out of order are near each other
        block = costs[begin : begin + span + 1]
        rng.shuffle(block)
        costs[begin : begin + span + 1] = block
    space = Line([costs], nearest % len(costs))
    for method in ("bracket", "auto"):
        assert result(space, band(tau), method, span) == brute(space, band(tau), "drift")


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=1, max_size=40), st.floats(0.05, 0.4))
def test_vector_costs_must_all_be_in_the_band(pairs, tau):
    first, second = sorted(pair[0] for pair in pairs), sorted(pair[1] for pair in pairs)
    space = Line([list(zip(first, second, strict=True))], 0)
    for method in ("bisect", "directed", "bracket"):
        assert result(space, band(tau, keys=2), method) == brute(space, band(tau, keys=2), "drift")


def test_bracketing_asks_for_few_costs_on_a_long_ladder():
    space = Line([[0.5 + i / 1000 for i in range(1000)]], 900)
    made = mutate(space, X, CHANGE, band(0.002), space.predict, method="bracket", span=2)
    assert made[0].num_queries <= 40  # two searches of log2(1000) and a window of a few rungs, not 1000


def test_ties_between_precisions_go_to_the_width_closest_to_one():
    space = Toy(precisions=("fp32", "int8"))
    start = space.start()
    limits = Band.around(cost(start), 0.05)
    made = mutate(space, start, Proposal("a", {"a": 2}), limits, cost)
    assert made[0].arch["precision"] == "fp32"
    assert made[0].arch["width"] == 48  # 3 * 64 / 4 exactly
    both = mutate(space, start, Proposal("a", {"a": 2}), limits, cost, num=2)
    assert [one.arch["precision"] for one in both] == ["fp32", "int8"]


@given(st.sampled_from(Toy.layers), st.sampled_from((1, 2)), st.floats(0.01, 0.2), st.sampled_from((4, 8, 16)))
def test_a_result_keeps_the_change_the_grid_and_the_band(layer, op, tau, step):
    space = Toy(step=step)
    start = space.start()
    limits = Band.around(cost(start), tau)
    made = mutate(space, start, Proposal(layer, {layer: op}), limits, cost)
    if isinstance(made, Infeasible):
        assert "latency" in made.reason
        return
    for one in made:
        assert one.arch[layer] == op
        assert (one.arch["width"] - 8) % step == 0
        assert abs(cost(one.arch)["latency"].value / cost(start)["latency"].value - 1) <= tau + 1e-12


def test_a_proposal_that_cannot_be_paid_for_is_infeasible_with_its_nearest_cost():
    space = Line([[1.4, 1.6]], 0)
    made = mutate(space, X, CHANGE, band(0.05), space.predict)
    assert isinstance(made, Infeasible)
    assert made.reason == "at best c0 1.4ms is outside 0.95ms to 1.05ms"
    empty = Line([[]], 0)
    assert mutate(empty, X, CHANGE, band(), empty.predict).reason == "the space offers no compensation"


def test_an_unknown_compensation_is_refused():
    with pytest.raises(ApportionError, match="possible are auto, bisect, directed, bracket, finite"):
        mutate(Toy(), Toy().start(), Proposal("a", {"a": 1}), Band.around(cost(Toy().start()), 0.1), cost, method="x")


# The band


@given(st.floats(0.5, 2.0), st.floats(0.0, 0.2), st.floats(0.0, 0.1), st.floats(0.02, 0.5), st.floats(0.0, 3.0))
def test_a_band_with_noise_is_the_papers_two_inequalities(value, stderr, anchor_stderr, tau, z):
    anchor = Reading(value=1.0, unit="ms", stderr=anchor_stderr)
    reading = Reading(value=value, unit="ms", stderr=stderr)
    limits = Band.around({"c": anchor}, tau, z=z)
    low = reading.lower(z) >= (1 - tau) * anchor.upper(z)
    high = reading.upper(z) <= (1 + tau) * anchor.lower(z)
    edge = min(abs(reading.lower(z) - (1 - tau) * anchor.upper(z)), abs(reading.upper(z) - (1 + tau) * anchor.lower(z)))
    assume(edge > 1e-9)
    assert limits.holds({"c": reading}) == (low and high)
    assert (limits.excess({"c": reading}) == 0) == limits.holds({"c": reading})


@given(st.floats(0.3, 3.0), st.floats(0.01, 0.9))
def test_a_log_band_is_symmetric_in_ratios(ratio, tau):
    assume(abs(abs(math.log(ratio)) - tau) > 1e-9)
    limits = Band.around({"c": Reading(value=2.0, unit="ms")}, tau, kind="log")
    inside = abs(math.log(ratio)) <= tau
    assert limits.holds({"c": Reading(value=2.0 * ratio, unit="ms")}) == inside
    assert limits.holds({"c": Reading(value=2.0 / ratio, unit="ms")}) == inside


@given(st.floats(0.02, 0.3), st.floats(0.0, 0.02), st.floats(-1, 1), st.floats(-1, 1))
def test_a_band_shrunk_by_the_model_error_keeps_true_costs_within_the_tolerance(tau, eta, place, error):
    limits = Band.around({"c": Reading(value=1.0, unit="ms")}, tau, eta=eta)
    low, high = limits.limits("c")
    estimate = (low + high) / 2 + place * (high - low) / 2
    assert abs(estimate / (1 + eta * error) - 1) <= tau + 1e-9


def test_a_band_narrower_than_the_model_error_is_refused():
    with pytest.raises(BudgetError, match="wider than the tolerance"):
        Band.around({"c": Reading(value=1.0, unit="ms")}, 0.02, eta=0.05)
    with pytest.raises(BudgetError, match="give a share above 0"):
        Band.around({"c": Reading(value=1.0, unit="ms")}, 0.0)


def test_a_one_sided_band_has_no_lower_end():
    limits = Band.around({"c": Reading(value=1.0, unit="ms")}, 0.05, one_sided=True)
    assert limits.holds({"c": Reading(value=0.1, unit="ms")})
    assert not limits.holds({"c": Reading(value=1.06, unit="ms")})
