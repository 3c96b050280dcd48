"""Dirichlet laws: draws have the mean and precision asked for, and the fit finds the precision of its own draws."""

from __future__ import annotations

import pytest
import torch

from apportion.numerics.dirichlet import fit_precision, log_likelihood, sample, top_probability

MEAN = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)


def test_draws_have_the_mean_and_the_variance(generator):
    drawn = sample(MEAN, 20.0, 20_000, generator)
    torch.testing.assert_close(drawn.sum(-1), torch.ones(20_000, dtype=torch.float64))
    variance = MEAN * (1 - MEAN) / 21
    stderr = (variance / 20_000).sqrt()
    assert ((drawn.mean(0) - MEAN).abs() < 5 * stderr).all()
    torch.testing.assert_close(drawn.var(0), variance, rtol=0.1, atol=0)


def test_the_likelihood_is_torch_s(generator):
    drawn = sample(MEAN, 8.0, 50, generator)
    drawn = drawn.clamp_min(1e-3) / drawn.clamp_min(1e-3).sum(-1, keepdim=True)
    want = torch.distributions.Dirichlet(8.0 * MEAN).log_prob(drawn).mean()
    assert log_likelihood(drawn, MEAN.expand(50, -1), 8.0).item() == pytest.approx(
        want.item(), rel=1e-4
    )  # tiny weights are lifted once more


@pytest.mark.parametrize("precision", [3.0, 30.0, 300.0])
def test_the_precision_of_draws_is_found_again(precision, generator):
    drawn = sample(MEAN, precision, 4000, generator)
    assert fit_precision(drawn, MEAN.expand(4000, -1)) == pytest.approx(precision, rel=0.15)


def test_confidence_rises_with_precision_and_with_the_lead():
    assert top_probability(MEAN, 100.0) > top_probability(MEAN, 3.0)
    assert top_probability(torch.tensor([0.34, 0.33, 0.33]), 50.0) < 0.5 < top_probability(MEAN, 50.0)


def test_no_tasks_no_precision():
    with pytest.raises(ValueError, match="at least one"):
        fit_precision(torch.zeros(0, 3), torch.zeros(0, 3))
