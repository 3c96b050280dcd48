"""The budget language, and what it means for readings to meet a budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apportion.core.budget import _FACTOR, CANONICAL_UNIT, Budget, Limit, format_quantity
from apportion.core.meter import Reading
from apportion.errors import ApportionError, BudgetError, Exit, InfeasibleError


def reading(value, quantity="latency", stderr=0.0):
    return Reading(value=value, unit=CANONICAL_UNIT[quantity], stderr=stderr)


def limit_of(text):
    (limit,) = Budget.parse(text).limits
    return limit


# The language


@pytest.mark.parametrize(
    ("unit", "quantity", "factor"),
    [
        ("us", "latency", 1e-3),
        ("µs", "latency", 1e-3),
        ("\u03bcs", "latency", 1e-3),
        ("ms", "latency", 1.0),
        ("s", "latency", 1e3),
        ("B", "size", 1.0),
        ("KB", "size", 1e3),
        ("kB", "size", 1e3),
        ("MB", "size", 1e6),
        ("GB", "size", 1e9),
        ("TB", "size", 1e12),
        ("KiB", "size", 1024.0),
        ("MiB", "size", 1024.0**2),
        ("GiB", "size", 1024.0**3),
        ("mJ", "energy", 1.0),
        ("J", "energy", 1e3),
        ("params", "params", 1.0),
        ("Kparams", "params", 1e3),
        ("Mparams", "params", 1e6),
        ("Gparams", "params", 1e9),
        ("Tparams", "params", 1e12),
        ("FLOPs", "flops", 1.0),
        ("KFLOPs", "flops", 1e3),
        ("MFLOPs", "flops", 1e6),
        ("GFLOPs", "flops", 1e9),
        ("TFLOPs", "flops", 1e12),
    ],
)
def test_a_unit_names_its_quantity_and_scales_to_the_canonical_unit(unit, quantity, factor):
    expected = Limit(quantity=quantity, value=2.5 * factor, unit=CANONICAL_UNIT[quantity])
    assert limit_of(f"2.5{unit}") == expected
    assert limit_of(f"{quantity} <= 2.5 {unit}") == expected


def test_every_unit_of_the_language_is_tested_above():
    (marker,) = test_a_unit_names_its_quantity_and_scales_to_the_canonical_unit.pytestmark
    assert {unit for unit, _, _ in marker.args[1]} == set(_FACTOR)


def test_bytes_limit_memory_only_by_name():
    assert limit_of("20MB").quantity == "size"
    assert limit_of("memory<=20MB") == Limit(quantity="memory", value=20e6, unit="B")


@pytest.mark.parametrize("relation", ["<=", "≤", "<", "="])
def test_every_way_to_write_an_upper_limit_is_the_same_limit(relation):
    assert limit_of(f"latency{relation}8ms") == limit_of("8ms")


@pytest.mark.parametrize("number", ["8", "8.", "8.0", "+8", "0.8e1", "80E-1", ".8e+1"])
def test_every_way_to_write_a_number_is_the_same_number(number):
    assert limit_of(f"{number}ms").value == pytest.approx(8.0, rel=1e-15)


@pytest.mark.parametrize("quantity", ["params", "flops"])
@pytest.mark.parametrize(("suffix", "factor"), [("", 1.0), ("K", 1e3), ("k", 1e3), ("M", 1e6), ("G", 1e9)])
def test_counts_need_no_unit_beyond_a_scale(quantity, suffix, factor):
    assert limit_of(f"{quantity}<=10{suffix}") == Limit(
        quantity=quantity, value=10 * factor, unit=CANONICAL_UNIT[quantity]
    )


def test_names_of_quantities_are_read_in_any_case():
    assert limit_of("Latency<=8ms") == limit_of("LATENCY <= 8 ms") == limit_of("8ms")


def test_a_bare_percentage_is_of_the_latency():
    assert limit_of("60%") == Limit(quantity="latency", value=60.0, unit="%")
    assert limit_of("size<=12.5 %") == Limit(quantity="size", value=12.5, unit="%")
    assert limit_of("100%").value == 100.0


def test_a_target_becomes_part_of_the_key():
    limit = limit_of("latency<=8ms@torch-cpu-1t")
    assert (limit.target, limit.key) == ("torch-cpu-1t", "latency@torch-cpu-1t")
    assert limit_of("8ms @ ort-cpu-1t") == limit_of("8ms@ort-cpu-1t")
    assert limit_of("60%@ort-cpu-1t").key == "latency@ort-cpu-1t"
    assert limit_of("8ms").key == "latency"


def test_a_vector_keeps_its_limits_in_the_order_written():
    budget = Budget.parse("8ms@ort-cpu-1t , 9ms@torch-cpu-1t,20MB,  memory<=1GiB")
    assert budget.keys == ("latency@ort-cpu-1t", "latency@torch-cpu-1t", "size", "memory")
    assert str(budget) == "latency<=8ms@ort-cpu-1t, latency<=9ms@torch-cpu-1t, size<=20MB, memory<=1.074GB"


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ("", "can't read"),
        ("   ", "can't read"),
        (",", "can't read"),
        ("8ms,", "can't read"),
        (",8ms", "can't read"),
        ("8", "no unit"),
        ("latency<=8", "no unit"),
        ("size<=8", "no unit"),
        ("8parsecs", "unknown unit"),
        ("8MS", "unknown unit"),
        ("8mb", "unknown unit"),
        ("params<=8X", "unknown unit"),
        ("-8ms", "not positive"),
        ("-60%", "not positive"),
        ("0ms", "not positive"),
        ("-0ms", "not positive"),
        ("1e-400ms", "not positive"),
        ("0%", "not positive"),
        ("1e400ms", "not finite"),
        ("1e308s", "not finite"),
        ("100.1%", "at most 100%"),
        ("size<=200%", "at most 100%"),
        ("inf ms", "can't read"),
        ("not finite", "can't read"),
        ("nanms", "can't read"),
        ("latency<=8MB", "latency in 'MB'"),
        ("size<=8ms", "size in 'ms'"),
        ("energy<=8ms", "energy in 'ms'"),
        ("params<=8FLOPs", "params in 'FLOPs'"),
        ("latency<=8M", "unknown unit"),
        ("weight<=8ms", "names the quantity 'weight'"),
        ("8ms, latency<=9ms", "'latency' twice"),
        ("60%, 8ms", "'latency' twice"),
        ("8ms@a, 9ms@a", "'latency@a' twice"),
        ("20MB, size<=30MB", "'size' twice"),
        ("latency>=8ms", "upper limit"),
        ("latency>8ms", "upper limit"),
        ("latency<=>8ms", "can't read"),
        ("latency==8ms", "can't read"),
        ("<=8ms", "can't read"),
        ("latency 8ms", "can't read"),
        ("latency<=", "can't read"),
        ("ms", "can't read"),
        ("8ms 20MB", "can't read"),
        ("8ms;20MB", "can't read"),
        ("8ms@", "can't read"),
        ("8ms@a@b", "can't read"),
        ("8ms@a b", "can't read"),
        ("8,5ms", "no unit"),
        ("8_000ms", "can't read"),
        ("0x8ms", "can't read"),
        ("8ms\n20MB", "can't read"),
        ("8\x00ms", "can't read"),
        ("fast", "can't read"),
        ("🐢", "can't read"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_in_one_line(text, saying):
    with pytest.raises(BudgetError) as refused:
        Budget.parse(text)
    assert saying in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_budget_errors_are_bad_input_and_infeasible_ones_have_their_own_exit_code():
    assert BudgetError.exit_code == Exit.BAD_INPUT == 2
    assert InfeasibleError.exit_code == Exit.INFEASIBLE == 3
    assert issubclass(BudgetError, ApportionError)
    assert issubclass(BudgetError, ValueError)


ALMOST_BUDGETS = st.lists(
    st.sampled_from(["latency", "size", "<=", ">=", "=", "8", "1e9", "-", ".", "ms", "MB", "%", "@", "a", ",", " "]),
    max_size=12,
).map("".join)


@settings(deadline=None, max_examples=400)
@given(st.text() | ALMOST_BUDGETS)
@example("9" * 5000 + "ms")
@example("٣ms")  # a digit to Python, hence three milliseconds
def test_any_text_either_parses_or_is_refused_in_one_line(text):
    try:
        budget = Budget.parse(text)
    except BudgetError as error:
        said = str(error)
    else:
        said = str(budget)
        assert all(0 < limit.value < math.inf for limit in budget.limits)
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_limit_refuses_values_that_are_not_positive_and_finite(value):
    with pytest.raises(BudgetError):
        Limit(quantity="latency", value=value, unit="ms")


@pytest.mark.parametrize(("quantity", "unit"), [("latency", "B"), ("latency", "s"), ("size", "MB"), ("speed", "ms")])
def test_a_limit_is_on_a_known_quantity_in_its_canonical_unit(quantity, unit):
    with pytest.raises(BudgetError):
        Limit(quantity=quantity, value=1.0, unit=unit)


def test_a_budget_without_limits_is_refused():
    with pytest.raises(BudgetError, match="empty"):
        Budget(())


# Writing a budget down


@st.composite
def limits(draw, largest=9.99e11):
    quantity = draw(st.sampled_from(list(CANONICAL_UNIT)))
    target = draw(st.none() | st.from_regex(r"[a-z0-9][a-z0-9.:/_-]{0,12}", fullmatch=True))
    if draw(st.booleans()):
        return Limit(quantity=quantity, value=draw(st.floats(1e-3, 100.0)), unit="%", target=target)
    value = draw(st.floats(1e-6, largest))
    return Limit(quantity=quantity, value=value, unit=CANONICAL_UNIT[quantity], target=target)


budgets = st.lists(limits(), min_size=1, max_size=4, unique_by=lambda limit: limit.key).map(
    lambda drawn: Budget(tuple(drawn))
)


@settings(deadline=None, max_examples=300)
@given(budgets)
def test_a_budget_written_down_reads_back_to_its_four_digits(budget):
    again = Budget.parse(str(budget))
    for limit, read in zip(budget.limits, again.limits, strict=True):
        assert (read.quantity, read.unit, read.target) == (limit.quantity, limit.unit, limit.target)
        # four significant digits are written: half a unit of the last is at most 5e-4 of the value
        assert read.value == pytest.approx(limit.value, rel=5.001e-4)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9999), st.integers(-4, 6), st.sampled_from(list(CANONICAL_UNIT)))
def test_a_limit_of_four_digits_reads_back_as_it_was(digits, exponent, quantity):
    limit = Limit(quantity=quantity, value=digits * 10.0**exponent, unit=CANONICAL_UNIT[quantity])
    # scaling by a power of ten rounds once on the way out and once on the way in
    assert limit_of(str(limit)).value == pytest.approx(limit.value, rel=1e-15)


@pytest.mark.parametrize("text", ["2000GB", "params<=2000Gparams"])
def test_a_limit_above_a_tera_reads_back(text):
    assert Budget.parse(str(Budget.parse(text))) == Budget.parse(text)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (20_000_000, "B", "20MB"),
        (999, "B", "999B"),
        (1000, "B", "1KB"),
        (7.5, "ms", "7.5ms"),
        (1500, "ms", "1500ms"),
        (2.5e9, "params", "2.5Gparams"),
        (3e12, "FLOPs", "3TFLOPs"),
        (60, "%", "60%"),
    ],
)
def test_quantities_are_written_at_a_readable_size(value, unit, text):
    assert format_quantity(value, unit) == text


# Relative budgets


def test_a_relative_budget_resolves_to_that_share_of_the_baseline():
    baseline = {"latency@a": reading(20.0), "size": reading(4e6, "size")}
    resolved = Budget.parse("60%@a, size<=25%, memory<=1MB").resolve(baseline)
    assert resolved == Budget.parse("12ms@a, 1MB, memory<=1MB")
    assert not resolved.relative


@settings(deadline=None)
@given(st.floats(0.01, 100.0), st.floats(1e-3, 1e9))
@example(100.0, 3.3)
def test_a_share_of_the_baseline_is_met_by_the_baseline_only_when_it_is_the_whole(percent, baseline_ms):
    baseline = {"latency": reading(baseline_ms)}
    resolved = Budget((Limit(quantity="latency", value=percent, unit="%"),)).resolve(baseline)
    assert resolved.limits[0].value == pytest.approx(percent * baseline_ms / 100, rel=1e-15)
    if percent == 100 or percent < 100 * (1 - 1e-14):  # between the two, rounding decides
        assert resolved.met(baseline) == (percent == 100)


def test_a_whole_share_of_a_whole_count_is_exact():
    for percent in range(1, 101):
        resolved = Budget.parse(f"params<={percent}%").resolve({"params": reading(100.0, "params")})
        assert resolved.met({"params": reading(float(percent), "params")})


def test_a_relative_budget_is_not_judged_before_it_is_resolved():
    budget = Budget.parse("60%, 20MB")
    readings = {"latency": reading(1.0), "size": reading(1.0, "size")}
    for judge in (budget.slack, budget.met, budget.excess):
        with pytest.raises(BudgetError, match="relative"):
            judge(readings)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(BudgetError, match="not positive"):
        Budget.parse("60%").resolve({"latency": reading(0.0)})


# Meeting a budget


@st.composite
def judged(draw):
    """A budget of one to three limits, readings that often lie on or next to them, and a z."""
    budget_limits, readings = [], {}
    for quantity in draw(st.lists(st.sampled_from(list(CANONICAL_UNIT)), min_size=1, max_size=3, unique=True)):
        value = draw(st.floats(1e-9, 1e12))
        budget_limits.append(Limit(quantity=quantity, value=value, unit=CANONICAL_UNIT[quantity]))
        near = [value, math.nextafter(value, 0.0), math.nextafter(value, math.inf), value / 2, value * 2]
        readings[quantity] = reading(
            draw(st.sampled_from(near) | st.floats(-1e12, 1e12)), quantity, draw(st.just(0.0) | st.floats(0.0, 1e6))
        )
    return Budget(tuple(budget_limits)), readings, draw(st.sampled_from([0.0, 1.0, 1.645]))


@settings(deadline=None, max_examples=500)
@given(judged())
def test_the_excess_is_zero_exactly_when_the_budget_is_met(case):
    budget, readings, z = case
    excess = budget.excess(readings, z)
    assert excess >= 0
    assert (excess == 0) == budget.met(readings, z)


@settings(deadline=None, max_examples=300)
@given(judged())
def test_the_budget_is_met_exactly_when_no_slack_is_negative(case):
    budget, readings, z = case
    slack = budget.slack(readings, z)
    assert set(slack) == set(budget.keys)
    assert budget.met(readings, z) == (min(slack.values()) >= 0)
    for limit in budget.limits:
        assert slack[limit.key] == limit.value - (readings[limit.key].value + z * readings[limit.key].stderr)


@settings(deadline=None)
@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.floats(0.1, 1e6))
def test_the_excess_over_one_limit_orders_models_as_their_cost_does(limit_ms, first_ms, second_ms):
    budget = Budget((Limit(quantity="latency", value=limit_ms, unit="ms"),))
    cheaper, dearer = sorted((first_ms, second_ms))
    assert budget.excess({"latency": reading(cheaper)}) <= budget.excess({"latency": reading(dearer)})


def test_the_excess_adds_up_the_shares_over_each_limit():
    budget = Budget.parse("10ms, 100B")
    readings = {"latency": reading(15.0), "size": reading(125.0, "size")}
    assert budget.excess(readings) == pytest.approx(0.5 + 0.25)
    readings["size"] = reading(1.0, "size")  # far under one limit does not make up for the other
    assert budget.excess(readings) == pytest.approx(0.5)


def test_doubt_counts_against_the_budget():
    budget, readings = Budget.parse("10ms"), {"latency": reading(9.0, stderr=1.0)}
    assert budget.met(readings)
    assert budget.met(readings, z=1.0)
    assert not budget.met(readings, z=1.645)


@settings(deadline=None)
@given(judged(), st.floats(0.1, 1.0))
def test_tightening_scales_the_named_limits_and_never_makes_a_budget_easier(case, factor):
    budget, readings, z = case
    key = budget.keys[0]
    tighter = budget.scaled({key: factor})
    assert tighter.limits[0].value == budget.limits[0].value * factor
    assert tighter.limits[1:] == budget.limits[1:]
    assert budget.met(readings, z) or not tighter.met(readings, z)


def test_a_reading_in_another_unit_is_not_compared_with_the_limit():
    with pytest.raises(BudgetError):
        Budget.parse("8ms").met({"latency": Reading(value=7.0, unit="s")})


# Readings


@pytest.mark.parametrize(
    "fields",
    [
        {"value": math.nan},
        {"value": math.inf},
        {"value": 1.0, "stderr": -1.0},
        {"value": 1.0, "stderr": math.nan},
        {"value": 1.0, "stderr": math.inf},
        {"value": 1.0, "count": 0},
    ],
)
def test_a_reading_that_says_nothing_is_refused(fields):
    with pytest.raises(ValueError, match="reading must be finite"):
        Reading(unit="ms", **fields)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.integers(1, 10**6), st.floats(0, 5))
def test_a_reading_survives_json_and_its_bounds_enclose_it(value, stderr, count, z):
    original = Reading(value=value, unit="ms", stderr=stderr, count=count)
    assert Reading.from_json(original.to_json()) == original
    assert original.lower(z) <= original.value <= original.upper(z)
