"""Power against closed forms: energy is watts times milliseconds, and watts are a line between two networks."""

from __future__ import annotations

import math

import pytest

from apportion.core.meter import Reading
from apportion.device.power import Drawn, Power, PowerCurve, modelled_energy

CURVE = PowerCurve(
    whole=Drawn(latency_ms=9.0, watts=12.0, stderr_watts=0.3),
    cheapest=Drawn(latency_ms=1.0, watts=8.0, stderr_watts=0.2),
    source="a counter",
)


def ms(value, stderr=0.0):
    return Reading(value=value, unit="ms", stderr=stderr, count=7)


def test_energy_is_watts_times_milliseconds_and_both_errors_count():
    found = modelled_energy(ms(4.0, 0.1), Power(watts=10.0, stderr_watts=0.5, source="as given"))
    assert (found.value, found.unit, found.count) == (40.0, "mJ", 7)
    assert found.stderr == pytest.approx(math.sqrt((4.0 * 0.5) ** 2 + (10.0 * 0.1) ** 2))
    assert modelled_energy(ms(4.0, 0.1), Power(watts=10.0, source="as given")).stderr == pytest.approx(1.0)


def test_what_a_network_drew_is_its_energy_over_its_latency():
    drawn = Drawn.of(Reading(value=40.0, unit="mJ", stderr=4.0), ms(4.0, 0.2))
    assert (drawn.latency_ms, drawn.watts) == (4.0, 10.0)
    assert drawn.stderr_watts == pytest.approx(10.0 * math.hypot(0.1, 0.05))


@pytest.mark.parametrize(
    ("latency_ms", "watts", "stderr_watts"),
    [
        (1.0, 8.0, 0.3),
        (5.0, 10.0, 0.3),
        (9.0, 12.0, 0.3),
        (0.5, 8.0, 0.3 + 2.0),
        (90.0, 12.0, 0.3 + 2.0),
    ],
)
def test_watts_are_a_line_between_two_networks_and_less_sure_outside(latency_ms, watts, stderr_watts):
    power = CURVE.at(ms(latency_ms))
    assert power.watts == pytest.approx(watts)
    assert power.stderr_watts == pytest.approx(stderr_watts)
    assert power.source == "a counter"


def test_a_cheapest_network_that_is_no_quicker_leaves_a_line_all_the_same():
    assert PowerCurve(whole=CURVE.cheapest, cheapest=CURVE.whole, source="").at(ms(5.0)).watts == pytest.approx(10.0)
    level = PowerCurve(whole=CURVE.whole, cheapest=Drawn(latency_ms=9.0, watts=8.0, stderr_watts=0.0), source="")
    assert level.at(ms(9.0)).watts == pytest.approx(10.0)


def test_what_is_told_is_where_the_watts_come_from_and_how_sure_they_are():
    assert Power(watts=15.0, source="as given").explain() == "15 W as given"
    assert Power(watts=9.12, stderr_watts=0.4, source="from a.json").explain() == "9.12 ± 0.4 W from a.json"
    assert PowerCurve.from_json(CURVE.to_json()) == CURVE


@pytest.mark.parametrize("watts", [0.0, -3.0, math.nan, math.inf])
def test_what_is_no_power_is_refused(watts):
    with pytest.raises(ValueError, match="no power"):
        Power(watts=watts, source="as given")
    with pytest.raises(ValueError, match="no power"):
        Drawn(latency_ms=1.0, watts=watts, stderr_watts=0.0)
