"""Refinement never loses; abstention falls back; robust weights beat others in the worst case; privacy is accounted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import DataError, KnobError, ModelError
from apportion.methods.compose.hedge import coverage, decide, robust_weights, worst_case
from apportion.methods.compose.private import SENSITIVITY, PrivateMeans
from apportion.methods.compose.refine import MODES, refine, truncate
from apportion.numerics.frank_wolfe import frank_wolfe


def bowl(seed, size=4):
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size + 3, size, generator=generator, dtype=torch.float64)
    target = torch.randn(size + 3, generator=generator, dtype=torch.float64)

    def objective(weight):
        rest = factor @ weight - target
        return 0.5 * float(rest @ rest), factor.T @ rest

    return objective


def by_rows(objective):
    return (
        lambda weight_LS: objective(weight_LS[0])[0],
        lambda weight_LS: (objective(weight_LS[0])[0], objective(weight_LS[0])[1][None]),
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(MODES), st.integers(1, 6), st.floats(0, 5))
def test_refinement_never_loses_and_stays_on_the_simplex(seed, mode, steps, stay):
    objective = bowl(seed)
    value, gradient = by_rows(objective)
    start_LS = torch.full((1, 4), 0.25, dtype=torch.float64)
    found_LS = refine(mode, start_LS, value, gradient, steps=steps, stay=stay)
    assert value(found_LS) <= value(start_LS) + 1e-9
    assert found_LS.min() >= 0
    assert found_LS.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("mode", ["gradient-free", "gradient"])
def test_refinement_closes_most_of_the_gap(mode):
    shares = []
    for seed in range(8):
        objective = bowl(seed)
        value, gradient = by_rows(objective)
        start_LS = torch.full((1, 4), 0.25, dtype=torch.float64)
        best = frank_wolfe(objective, start_LS[0], tolerance=1e-8).value
        found = value(refine(mode, start_LS, value, gradient, steps=12))
        shares.append((found - best) / max(value(start_LS) - best, 1e-9))
    assert sum(shares) / len(shares) < 0.2


@pytest.mark.parametrize("mode", ["gradient-free", "gradient"])
def test_leaving_the_start_has_a_price(mode):
    value, gradient = by_rows(bowl(3))
    start_LS = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    moved = [
        (refine(mode, start_LS, value, gradient, steps=12, stay=stay) - start_LS).abs().sum().item()
        for stay in (0.0, 1.0, 1e3)
    ]
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 0.02


def test_the_anchored_optimum_is_the_one_of_its_formula():
    """With a linear loss it is known: the start times exp(-L slope / price), scaled to sum to one in every row."""
    slope_LS = torch.tensor([[0.15, -0.1, 0.05, 0.25], [-0.1, 0.1, 0.0, 0.0]], dtype=torch.float64)
    start_LS = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.2, 0.3, 0.0]], dtype=torch.float64)

    def objective(weight_LS):
        return float((weight_LS * slope_LS).sum()), slope_LS

    found_LS = refine("gradient", start_LS, lambda w: objective(w)[0], objective, steps=100, stay=0.5)
    wanted_LS = (start_LS.clamp_min(1e-6).log() - 2 * slope_LS / 0.5).softmax(-1)
    torch.testing.assert_close(found_LS, wanted_LS, atol=1e-3, rtol=0)


def test_refinement_keeps_to_the_number_of_sources():
    objective = bowl(1)
    value, gradient = by_rows(objective)
    start_LS = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    found_LS = refine("gradient-free", start_LS, value, gradient, steps=10, max_active=2)
    assert int((found_LS > 0).sum()) <= 2
    with pytest.raises(KnobError, match="possible are"):
        refine("magic", start_LS, value, gradient)


def test_truncation_keeps_the_largest():
    torch.testing.assert_close(truncate(torch.tensor([[0.5, 0.3, 0.2]]), 2), torch.tensor([[0.625, 0.375, 0.0]]))


def test_unsure_weights_fall_back_to_the_safe_source():
    names = ("a", "b", "safe")
    sure = decide(torch.tensor([0.9, 0.05, 0.05]), 100.0, names, safe="safe")
    unsure = decide(torch.tensor([0.34, 0.33, 0.33]), 5.0, names, safe="safe")
    assert not sure.abstained
    assert unsure.abstained
    assert unsure.weight_S.tolist() == [0, 0, 1]
    assert unsure.entropy_ratio > 0.99 > sure.entropy_ratio
    with pytest.raises(ModelError, match="no source 'nobody'"):
        decide(torch.tensor([0.5, 0.5, 0.0]), 1.0, names, safe="nobody")


def test_coverage_counts_what_was_answered():
    assert coverage([0.9, 0.8, 0.3], [True, False, False], 0.5) == (pytest.approx(2 / 3), 0.5)
    assert coverage([0.1], [True], 0.5) == (0.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_worst_case_is_no_less_than_any_mixture_within_reach(seed):
    objective = bowl(seed)
    generator = torch.Generator().manual_seed(seed)
    weight_S = torch.rand(4, generator=generator, dtype=torch.float64) + 0.3
    weight_S /= weight_S.sum()
    radius = 0.2
    worst = worst_case(objective, weight_S, radius)
    for _ in range(300):
        shift_S = torch.randn(4, generator=generator, dtype=torch.float64)
        shift_S -= shift_S.mean()
        shift_S *= radius / shift_S.abs().sum()
        if (weight_S + shift_S).min() >= 0:
            assert objective(weight_S + shift_S)[0] <= worst + 1e-9


def test_robust_weights_have_the_better_worst_case():
    """A narrow valley beside a wide one: the minimum lies in the narrow one, robust weights do not."""
    gains = []
    for seed in range(6):
        objective = bowl(seed)
        start_S = torch.full((4,), 0.25, dtype=torch.float64)
        plain = frank_wolfe(objective, start_S, tolerance=1e-8).weight_S
        robust = robust_weights(objective, start_S, 0.3).weight_S

        def worst(weight_S, objective=objective):
            shifts = [
                0.15 * (torch.eye(4, dtype=torch.float64)[i] - torch.eye(4, dtype=torch.float64)[j])
                for i in range(4)
                for j in range(4)
            ]
            return max(objective(weight_S + shift)[0] for shift in shifts)

        assert objective(robust)[0] >= objective(plain)[0] - 1e-6
        gains.append(worst(plain) - worst(robust))
    assert min(gains) > -0.02
    assert max(gains) > 0


def test_private_means_cost_what_the_accountant_says(generator):
    feature_NP, label_N = torch.randn(40, 6, generator=generator), torch.arange(40) % 4
    means = PrivateMeans(epsilon=2.0, delta=1e-5, seed=0)
    assert means.spent_epsilon() == 0
    means.release(feature_NP, label_N)
    assert 0 < means.spent_epsilon() < 2.0
    means.release(feature_NP, label_N)
    assert means.spent_epsilon() == pytest.approx(2.0, abs=1e-3)
    with pytest.raises(DataError, match="spent"):
        means.release(feature_NP, label_N)


def test_the_noise_has_the_size_that_hides_one_example():
    """Over many releases: the spread of a class mean is sensitivity times multiplier over the class size."""
    feature_NP, label_N = torch.ones(20, 3), torch.zeros(20, dtype=torch.long)
    means = PrivateMeans(epsilon=1.0, delta=1e-5, num_releases=2000, seed=0)
    drawn = torch.stack([means.release(feature_NP, label_N)[0] for _ in range(2000)])
    want = SENSITIVITY * means.multiplier / 20
    assert drawn.std().item() == pytest.approx(want, rel=0.05)
    worst = torch.nn.functional.normalize(torch.ones(3), dim=0) * 2  # one example turned around
    assert worst.norm().item() <= SENSITIVITY + 1e-6


@pytest.mark.parametrize("kwargs", [{"epsilon": 0.0, "delta": 0.1}, {"epsilon": 1.0, "delta": 0.0}])
def test_senseless_privacy_is_refused(kwargs):
    with pytest.raises(DataError, match="makes no sense"):
        PrivateMeans(**kwargs)
