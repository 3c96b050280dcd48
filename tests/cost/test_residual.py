"""The residual: off for additive networks, on for interacting ones, monotone by constraint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cost.curve import Curve
from apportion.cost.fit import FitOptions, fit_law
from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.residual import Residual, choose_residual, fit_residual
from apportion.cost.sample import CostError, Sample

LAW = AdditiveLaw(1.0, {"a": Curve(0.0, (1.0,), (2.0,)), "b": Curve(0.0, (1.0,), (3.0,))}, {"p": "a", "q": "b"})


def draw(rng, count, interaction, noise):
    samples = []
    for _ in range(count):
        shares = {"p": float(rng.uniform(0.05, 1)), "q": float(rng.uniform(0.05, 1))}
        latency = LAW.predict(shares) + interaction * shares["p"] * shares["q"]
        samples.append(Sample(shares, latency * (1 + noise * float(rng.standard_normal()))))
    return samples


@pytest.mark.parametrize("seed", range(3))
def test_an_additive_network_gets_no_residual(seed):
    samples = draw(np.random.default_rng(seed), 50, interaction=0.0, noise=0.02)
    assert CostModel.fit(samples, LAW.signature_of).residual is None


@pytest.mark.parametrize("interaction", [4.0, -1.5])
def test_an_interaction_is_found_and_halves_the_error(interaction):
    rng = np.random.default_rng(0)
    train, held = draw(rng, 60, interaction, 0.005), draw(rng, 100, interaction, 0.0)
    plain = CostModel.fit(train, LAW.signature_of, residual="off")
    model = CostModel.fit(train, LAW.signature_of)
    assert model.residual is not None
    assert model.residual.gain > 0.5
    assert model.monotone

    def error(one):
        return np.mean([abs(one.predict(sample.shares) / sample.latency_ms - 1) for sample in held])

    assert error(model) < error(plain) / 2


def test_too_few_samples_get_none():
    samples = draw(np.random.default_rng(0), 8, 4.0, 0.0)
    assert choose_residual(fit_law(samples, LAW.signature_of), samples, FitOptions()) is None


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.1, 50.0), min_size=6, max_size=12), st.integers(0, 1000))
def test_a_fitted_residual_keeps_the_prediction_monotone_whatever_was_measured(latencies, seed):
    rng = np.random.default_rng(seed)
    samples = [Sample({"p": float(rng.uniform()), "q": float(rng.uniform())}, value) for value in latencies]
    residual = fit_residual(LAW, samples, strength=1e-3)
    assert residual.monotone
    model = CostModel(LAW, residual)
    less = {part: float(rng.uniform()) for part in LAW.signature_of}
    more = {part: float(rng.uniform(share, 1)) for part, share in less.items()}
    assert model.predict(less) <= model.predict(more) + 1e-9


weight = st.floats(-0.5, 0.5)


@settings(deadline=None)
@given(weight, weight, weight, weight)
def test_the_monotone_flag_is_exact(a, aa, ab, bb):
    weights = {(): -0.1, ("a",): a, ("a", "a"): aa, ("a", "b"): ab, ("b", "b"): bb}
    residual = Residual(6.0, {"a": 2.0, "b": 3.0}, weights)
    corners = [(u, v) for u in (0.0, 1.0) for v in (0.0, 1.0)]  # slopes are linear in (u, v): corners decide
    slopes_a = [2.0 + 6.0 * (a + 2 * aa * u + ab * v) for u, v in corners]
    slopes_b = [3.0 + 6.0 * (ab * u + 2 * bb * v) for u, v in corners]
    worst = min(slopes_a + slopes_b)
    if abs(worst) > 1e-6:
        assert residual.monotone == (worst > 0)


def test_a_residual_without_the_constraint_reports_what_it_is():
    model = CostModel(LAW, Residual(6.0, {"a": 2.0}, {("a", "a"): -1.0}))
    assert not model.monotone
    assert model.to_json()["residual"]["monotone"] is False
    with pytest.raises(CostError, match="unknown signature"):
        Residual(6.0, {"a": 2.0}, {("a", "c"): 1.0})
