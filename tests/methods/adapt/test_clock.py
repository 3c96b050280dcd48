"""The relaxed clock agrees with the real one wherever sizes are real."""

import random
from dataclasses import replace

import pytest
import torch
from tests.methods.adapt.conftest import profile_of

from apportion.cost.launches import Launches
from apportion.cost.parts import View
from apportion.cost.sample import CostError
from apportion.methods.adapt.clock import Clock, spread_start


def some_sizes(tiny, seed):
    rng = random.Random(seed)
    return {module.name: rng.choice(module.sizes()) for module in tiny.partition}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("view", [View(), View(16), View(32, 16), View(activations=True), View(16, 16, True)])
def test_shares_of_real_sizes_are_those_of_the_parts(tiny, seed, view):
    profile = profile_of(tiny.parts, "ort-cpu-1t", view=view)
    clock = Clock.of(profile, tiny.parts)
    sizes = some_sizes(tiny, seed)
    parts = tiny.parts.seen(view)
    expected = parts.shares(tiny.partition.keep(sizes))
    found = profile.cost.predict(expected)
    assert clock.predict_ms(sizes) == pytest.approx(found, rel=1e-6)
    fraction_L = torch.tensor([sizes[m.name] / m.num_units for m in tiny.partition], dtype=torch.float64)
    for on_grid in (True, False) if view.grid == view.grid_in == 1 else (True,):
        share_P = clock.shares(fraction_L, on_grid=on_grid)
        assert dict(zip((p.name for p in parts.parts), share_P.tolist(), strict=True)) == pytest.approx(expected)


def test_the_bound_is_above_the_prediction_by_its_margin(tiny):
    sizes = some_sizes(tiny, 3)
    clock = tiny.clocks[0]
    assert clock.upper_ms(sizes) == pytest.approx(1.05 * clock.predict_ms(sizes))


def test_a_clock_beside_another_tells_time_as_that_one_does(tiny):
    """Calibrated when the machine was a quarter slower than for the other, of whose whole network it takes half."""
    other, slower = (
        Clock.of(profile_of(tiny.parts, "ort-cpu-1t"), tiny.parts),
        profile_of(tiny.parts, "ort-int8-cpu-1t", all_ms=5.0),
    )
    alone = Clock.of(slower, tiny.parts)
    clock, sizes = alone.beside(other, 0.5), some_sizes(tiny, 3)
    assert clock.whole_ms == pytest.approx(0.5 * other.whole_ms)
    scale = clock.whole_ms / alone.whole_ms
    for name in ("predict_ms", "upper_ms"):
        assert getattr(clock, name)(sizes) == pytest.approx(scale * getattr(alone, name)(sizes))
    fraction_L = torch.full((len(list(tiny.partition)),), 0.7)
    assert clock.relaxed_upper_ms(fraction_L) == pytest.approx(scale * alone.relaxed_upper_ms(fraction_L))
    assert clock.floor_ms() == pytest.approx(scale * alone.floor_ms())
    assert clock.prices().tolist() == pytest.approx(alone.prices().tolist())
    assert clock.at(0.9).whole_ms == clock.whole_ms


def test_a_spread_start_costs_what_it_should(tiny):
    knots = (0.3, 0.6, 1.0)
    start_KL = spread_start(tiny.clocks[:1], knots)
    for rho, fraction_L in zip(knots, start_KL, strict=True):
        assert float(tiny.clocks[0].ratio(fraction_L)) == pytest.approx(rho, abs=0.01)
    assert (start_KL.diff(dim=0) >= -1e-6).all()


def test_prices_follow_the_device(tiny):
    plain, heavy = (clock.features() for clock in tiny.clocks)
    assert heavy[0] > plain[0]  # attention costs four times as much on the second


def test_a_profile_of_another_network_is_refused(tiny):
    law = tiny.clocks[0].profile.cost.law
    other = replace(law, signature_of={**law.signature_of, "more": next(iter(law.curves))})
    profile = tiny.clocks[0].profile
    with pytest.raises(CostError, match="other parts"):
        Clock.of(replace(profile, cost=replace(profile.cost, law=other)), tiny.parts)


def test_a_bound_holds_for_less_confidence_and_is_refused_for_more(tiny):
    clock = tiny.clocks[0]
    assert clock.at(0.95) is clock
    with pytest.raises(CostError, match=r"says nothing about 0\.99, which takes 99"):
        clock.at(0.99)
    cost = clock.profile.cost
    drifting = replace(clock, profile=replace(clock.profile, cost=replace(cost, bound=replace(cost.bound, drift=0.02))))
    lower = drifting.at(0.8)
    assert lower.confidence == pytest.approx(0.8)
    assert clock.floor_ms() < lower.floor_ms() < drifting.floor_ms()  # the quantile stays, the allowance is less


def test_under_a_floor_of_launches_the_relaxed_clock_agrees_with_the_real_one(tiny):
    profile = profile_of(tiny.parts, "ort-cpu-1t")
    floored = replace(profile.cost, launches=Launches(0.1 * profile.baseline.value, 0.02 * profile.baseline.value))
    clock = Clock.of(replace(profile, cost=floored), tiny.parts)
    least = {module.name: module.sizes()[0] for module in tiny.partition}
    fraction_L = torch.tensor([least[m.name] / m.num_units for m in tiny.partition], requires_grad=True)
    whole_ms = clock.predict_ms({})
    assert clock.predict_ms(least) > tiny.clocks[0].predict_ms(least)  # the floor holds
    assert clock.predict_ms(least) <= clock.upper_ms(least)
    ratio = clock.ratio(fraction_L)
    assert float(ratio.detach()) <= clock.predict_ms(least) / whole_ms * (1 + 1e-6)  # the ramp is under the jump
    assert float(clock.ratio(torch.ones(len(least)))) == pytest.approx(1.0)
    ratio.backward()
    assert torch.isfinite(fraction_L.grad).all()
    assert (fraction_L.grad >= 0).all()
    assert (clock.prices() >= 0).all()
