"""The solver keeps the budget, uses it up, leans to what is cheap, and refuses what can't be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.adapt.conftest import profile_of

from apportion.cost.parts import View
from apportion.errors import InfeasibleError
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.solve import (
    along_path,
    ladder,
    left_out,
    objective,
    refine_mixture,
    reprice,
    round_to_budget,
    smallest,
    solve,
)

ALPHA = torch.full((4,), 0.25)


@settings(max_examples=25, deadline=None)
@given(rho=st.floats(0.2, 1.2), seed=st.integers(0, 1000), grid=st.sampled_from([1, 32, 48]))
def test_the_bound_keeps_the_budget_and_no_step_more_would(tiny, rho, seed, grid):
    clock = Clock.of(profile_of(tiny.parts, "ort-cpu-1t", view=View(grid, grid)), tiny.parts)
    value_L = torch.rand(len(tiny.partition), generator=torch.Generator().manual_seed(seed)) + 0.01
    budget_ms = max(rho * clock.whole_ms, clock.floor_ms())
    solved = solve(tiny.family(), ALPHA, budget_ms, clock, value_L)
    assert solved.upper_ms <= budget_ms
    assert solved.upper_ms == clock.upper_ms(solved.sizes)
    gone = left_out(clock, solved.sizes)
    for module in tiny.partition:
        larger = [size for size in module.sizes() if size > solved.sizes[module.name]]
        if larger and module.name not in gone:
            assert clock.upper_ms({**solved.sizes, module.name: larger[0]}) > budget_ms


def test_widths_that_a_kernel_rounds_up_are_stepped_over_and_filled(tiny):
    """Neurons come in 16s and are computed in 32s: 48 of the 64 cost what 64 cost, and 16 what 32 cost."""
    clock = Clock.of(profile_of(tiny.parts, "ort-cpu-1t", view=View(32, 32)), tiny.parts)
    modules = list(tiny.partition)
    wide = [place for place, module in enumerate(modules) if module.kind == "neurons"]
    held = [place for place in range(len(modules)) if place not in wide]
    ones_L = torch.ones(len(modules))
    few_L = ones_L.index_fill(0, torch.tensor(wide), 16 / 64)
    within_ms = clock.upper_ms({modules[place].name: 16 for place in wide})
    for start_L, budget_ms in ((ones_L, 0.0), (few_L, within_ms)):
        sizes = round_to_budget(clock, start_L, ones_L, budget_ms, held)
        assert {sizes[modules[place].name] for place in wide} == {32}  # the least cost, and all that it pays for


@settings(max_examples=20, deadline=None)
@given(rho=st.floats(0.2, 1.0), raised=st.floats(-1.0, 1.0), device=st.integers(0, 1))
def test_the_place_on_the_path_costs_the_budget_and_smaller_ones_lie_inside(tiny, rho, raised, device):
    """A policy that is off by much, either way, still says networks of the budget's cost, one inside the other."""
    family, clock = tiny.family(), tiny.clocks[device]
    budget_ms = rho * clock.whole_ms
    with torch.no_grad():
        family.policy.start_L += raised
        found_L = along_path(family, ALPHA, clock, budget_ms, clock.name)
        first_ms, last_ms = (
            clock.relaxed_upper_ms(family.plan_with(ALPHA, at, clock.name).fraction_L) for at in (family.floor, 1.0)
        )
        if first_ms <= budget_ms <= last_ms:
            assert clock.relaxed_upper_ms(found_L) == pytest.approx(budget_ms, rel=0.02)
        smaller_L = along_path(family, ALPHA, clock, 0.8 * budget_ms, clock.name)
    assert (smaller_L <= found_L + 1e-6).all()


@settings(max_examples=25, deadline=None)
@given(rho=st.floats(0.2, 0.99), depth=st.integers(1, 3))
def test_a_settled_depth_is_kept_where_the_budget_allows_it(tiny, rho, depth):
    family, clock = tiny.family(), tiny.clocks[0]
    blocks = next(module for module in tiny.partition if module.blocks)
    budget_ms = max(rho * clock.whole_ms, clock.floor_ms())
    family.depth_KJ.fill_(depth)
    solved = solve(family, ALPHA, budget_ms, clock)
    assert solved.upper_ms <= budget_ms
    least = {module.name: module.sizes()[0] for module in tiny.partition} | {blocks.name: depth}
    if clock.upper_ms(least) <= budget_ms:
        assert solved.sizes[blocks.name] == depth
    else:
        assert solved.sizes[blocks.name] < depth


def test_a_budget_takes_the_depth_of_the_nearest_knot(tiny):
    family = tiny.family()
    assert family.depth(0.5) is None
    family.depth_KJ[2] = 2
    assert family.depth(family.knots[2] * 1.02) == family.depth(family.knots[2] / 1.02) == (2,)
    assert family.depth(family.knots[1]) is family.depth(1.0) is family.depth(0.01) is None


def test_a_budget_under_the_floor_is_refused_with_the_floor(tiny):
    clock = tiny.clocks[0]
    with pytest.raises(InfeasibleError, match=f"{clock.floor_ms():.3g} ms"):
        solve(tiny.family(), ALPHA, 0.9 * clock.floor_ms(), clock)


def test_where_the_policy_is_optimal_repricing_leaves_it(tiny):
    clock = tiny.clocks[0]
    fraction_L = torch.full((len(tiny.partition),), 0.7, requires_grad=True)
    cost = clock.ratio(fraction_L)
    (slope_L,) = torch.autograd.grad(cost, fraction_L)
    again_L = reprice(clock, fraction_L.detach(), 2.0 * slope_L, float(cost.detach()), 20)
    torch.testing.assert_close(again_L, fraction_L.detach(), atol=5e-3, rtol=0)


def test_on_another_device_it_leans_to_what_is_cheap_there(tiny):
    plain, heavy = tiny.clocks
    fraction_L = torch.full((len(tiny.partition),), 0.7, requires_grad=True)
    cost = plain.ratio(fraction_L)
    (slope_L,) = torch.autograd.grad(cost, fraction_L)
    there_L = reprice(heavy, fraction_L.detach(), slope_L, float(cost.detach()), 20)
    heads = [place for place, module in enumerate(tiny.partition) if module.kind == "heads"]
    neurons = [place for place, module in enumerate(tiny.partition) if module.kind == "neurons"]
    assert there_L[heads].mean() < there_L[neurons].mean() - 0.05
    assert float(heavy.ratio(there_L)) == pytest.approx(float(cost.detach()), abs=0.05)


@settings(max_examples=15, deadline=None)
@given(rho=st.floats(0.25, 0.9), seed=st.integers(0, 1000), steps=st.integers(1, 12), depth=st.sampled_from([None, 2]))
def test_steps_on_sizes_keep_the_budget_and_never_lower_the_objective(tiny, rho, seed, steps, depth):
    family, clock = tiny.family(), tiny.clocks[1]
    if depth:
        family.depth_KJ.fill_(depth)
    value_L = torch.rand(len(tiny.partition), generator=torch.Generator().manual_seed(seed)) + 0.01
    budget_ms = max(rho * clock.whole_ms, clock.floor_ms())
    plain = solve(family, ALPHA, budget_ms, clock, value_L, num_steps=0)
    made = solve(family, ALPHA, budget_ms, clock, value_L, num_steps=steps, only_better=True)
    assert made.upper_ms <= budget_ms
    before, after = (objective(family, ALPHA, budget_ms, clock, value_L, one.sizes) for one in (plain, made))
    assert after >= before


def test_steps_on_sizes_raise_the_objective_where_values_are_uneven(tiny):
    family, clock, budget_ms = tiny.family(), tiny.clocks[0], 0.5 * tiny.clocks[0].whole_ms
    value_L = torch.tensor([5.0 if module.kind == "heads" else 0.1 for module in tiny.partition])
    plain = solve(family, ALPHA, budget_ms, clock, value_L, num_steps=0)
    made = solve(family, ALPHA, budget_ms, clock, value_L, num_steps=12, only_better=True)
    before, after = (objective(family, ALPHA, budget_ms, clock, value_L, one.sizes) for one in (plain, made))
    assert after > before


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), settled=st.booleans())
def test_networks_of_a_ladder_lie_inside_each_other(tiny, seed, settled):
    family, clock = tiny.family(), tiny.clocks[0]
    if settled:
        family.depth_KJ[:4], family.depth_KJ[4:-1] = 2, 3
    value_L = torch.rand(len(tiny.partition), generator=torch.Generator().manual_seed(seed)) + 0.01
    budgets_ms = [rho * clock.whole_ms for rho in (0.35, 0.9, 0.5, 0.7, 0.4, 0.45)]
    rungs = dict(sorted(zip(budgets_ms, ladder(family, ALPHA, budgets_ms, clock, value_L), strict=True)))
    smaller = smallest(ALPHA, clock)
    for budget_ms, rung in rungs.items():
        assert rung.upper_ms <= budget_ms
        assert all(smaller.sizes[name] <= size for name, size in rung.sizes.items())
        smaller = rung


def test_rounding_prefers_worth(tiny):
    clock = tiny.clocks[0]
    modules = list(tiny.partition)
    worth_L = torch.tensor([0.1 if module.kind == "neurons" else 10.0 for module in modules])
    sizes = round_to_budget(clock, torch.ones(len(modules)), worth_L, 0.7 * clock.whole_ms)
    kept = {kind: sum(sizes[m.name] for m in modules if m.kind == kind) for kind in ("heads", "neurons")}
    assert kept["heads"] == 12
    assert kept["neurons"] < 192


def test_a_mixture_moves_to_the_expert_that_lowers_the_loss():
    wanted_M = torch.tensor([0.0, 0.0, 1.0, 0.0])
    moved_M, asked = refine_mixture(lambda alpha_M: float((alpha_M - wanted_M).square().sum()), ALPHA)
    assert moved_M.argmax() == 2
    assert asked == 6
    torch.testing.assert_close(moved_M.sum(), torch.tensor(1.0))
    losses = []
    for num_steps in (0, 1, 3, 6):
        moved_M, asked = refine_mixture(
            lambda alpha_M: float((alpha_M - wanted_M).square().sum()), ALPHA, num_steps=num_steps
        )
        losses.append(float((moved_M - wanted_M).square().sum()))
        assert asked == 1 + 5 * num_steps
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[1]
    stayed_M, _ = refine_mixture(lambda alpha_M: float((alpha_M - ALPHA).square().sum()), ALPHA)
    torch.testing.assert_close(stayed_M, ALPHA)
