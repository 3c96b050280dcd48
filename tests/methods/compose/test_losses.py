"""Losses: gradients by finite differences, and the fast path over the weights against the plain one."""

from __future__ import annotations

import pytest
import torch

from apportion.errors import DataError
from apportion.methods.compose.losses import CrossEntropy, Squared


def make(kind, seed=0, rows=20, size=6):
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    if kind == "squared":
        return Squared(feature, torch.randn(rows, generator=generator, dtype=torch.float64), ridge=0.3), size
    return CrossEntropy(feature, torch.randint(0, 3, (rows,), generator=generator), 3, ridge=0.3), size * 3


@pytest.mark.parametrize("kind", ["squared", "cross-entropy"])
def test_the_gradient_is_that_of_the_value(kind, generator):
    loss, size = make(kind)
    theta_D = torch.randn(size, generator=generator, dtype=torch.float64)
    _, gradient_D = loss.evaluate(theta_D)
    for place in range(size):
        step = torch.zeros_like(theta_D)
        step[place] = 1e-5
        slope = (loss.evaluate(theta_D + step)[0] - loss.evaluate(theta_D - step)[0]) / 2e-5
        assert gradient_D[place].item() == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("kind", ["squared", "cross-entropy"])
def test_the_fast_path_over_the_weights_is_the_plain_one(kind, generator):
    loss, size = make(kind)
    source_SD = torch.randn(4, size, generator=generator, dtype=torch.float64)
    delta_D = torch.randn(size, generator=generator, dtype=torch.float64)
    weight_S = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    value, gradient_S = loss.mixing(source_SD, delta_D).objective(weight_S)
    plain, gradient_D = loss.evaluate(weight_S @ source_SD + delta_D)
    assert value == pytest.approx(plain)
    torch.testing.assert_close(gradient_S, source_SD @ gradient_D)  # the paper's eq. 5


def test_the_curvature_is_the_second_difference(generator):
    loss, size = make("squared")
    mixing = loss.mixing(torch.randn(4, size, generator=generator, dtype=torch.float64), torch.zeros(size).double())
    weight_S, direction_S = torch.full((4,), 0.25).double(), torch.tensor([1.0, -1, 0, 0]).double()
    values = [mixing.objective(weight_S + step * direction_S)[0] for step in (-1, 0, 1)]
    assert mixing.curvature(direction_S) == pytest.approx(values[0] - 2 * values[1] + values[2])


@pytest.mark.parametrize("kind", ["squared", "cross-entropy"])
def test_minimising_on_free_coordinates_leaves_no_slope_there(kind, generator):
    loss, size = make(kind)
    theta_D = torch.randn(size, generator=generator, dtype=torch.float64)
    free_D = torch.arange(size) < size // 2
    best_D = loss.minimise_on(theta_D, free_D)
    assert loss.evaluate(best_D)[1][free_D].abs().max() < 1e-5
    assert torch.equal(best_D[~free_D], theta_D[~free_D])


@pytest.mark.parametrize("make_empty", [lambda x: Squared(x, x[:, 0]), lambda x: CrossEntropy(x, x[:, 0].long(), 2)])
def test_an_empty_support_is_refused(make_empty):
    with pytest.raises(DataError, match="support is empty"):
        make_empty(torch.zeros(0, 3))
