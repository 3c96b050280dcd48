"""The law over mixtures is as wide as the support set leaves it, and an averse choice avoids what may go wrong."""

import pytest
import torch

from apportion.methods.adapt.posterior import MOST, NUM_DRAWS, Posterior, averse_choice, mixture_posterior


def route(mean_WF):
    """A router that reads the mean over classes."""
    return mean_WF.mean(0).softmax(-1)


def support(shots, generator):
    label_S = torch.arange(4).repeat_interleave(shots)
    return torch.randn(len(label_S), 3, generator=generator), label_S


def test_more_examples_leave_a_narrower_law(generator):
    precisions = [mixture_posterior(route, *support(shots, generator)).precision for shots in (1, 4, 16, 64)]
    assert precisions == sorted(precisions)
    assert precisions[-1] > 8 * precisions[0]


def test_the_width_is_that_of_mixtures_over_support_sets(generator):
    """Sixteen examples of a class: the law's standard deviation against that over fresh draws of all of them."""
    routed_DM = torch.stack([route(support(16, generator)[0].reshape(4, 16, 3).mean(1)) for _ in range(400)])
    told = [mixture_posterior(route, *support(16, generator)).std_M.square().sum().sqrt() for _ in range(40)]
    assert float(torch.stack(told).mean()) == pytest.approx(float(routed_DM.var(0).sum().sqrt()), rel=0.2)


def test_the_order_of_classes_does_not_count_and_draws_are_mixtures(generator):
    feature_SF, label_S = support(2, generator)
    law = mixture_posterior(route, feature_SF, label_S)
    assert mixture_posterior(route, feature_SF, 3 - label_S).precision == pytest.approx(law.precision, rel=1e-4)
    draw_DM = law.around(law.mean_M)
    assert draw_DM.shape == (NUM_DRAWS, 3)
    torch.testing.assert_close(draw_DM.sum(-1), torch.ones(NUM_DRAWS))
    assert torch.equal(draw_DM, law.around(law.mean_M))


def test_a_router_that_does_not_look_is_sure(generator):
    law = mixture_posterior(lambda _: torch.tensor([0.7, 0.3]), *support(3, generator))
    assert law.precision == MOST
    assert law.std_M.max() < 1e-3


def test_aversion_moves_away_from_a_mixture_whose_loss_may_be_large():
    """Near the corner the loss is least, and a cliff is beside it."""
    alpha_M = torch.tensor([0.9, 0.1])
    law = Posterior(alpha_M, precision=30.0)

    def loss(mixture_M):
        return 0.0 if mixture_M[0] > 0.85 else 1.0 if mixture_M[0] > 0.8 else 0.45

    bold_M, asked = averse_choice(loss, law, alpha_M, 0.0)
    shy_M, _ = averse_choice(loss, law, alpha_M, 10.0)
    assert asked == 3 * NUM_DRAWS
    assert torch.equal(bold_M, alpha_M)
    assert not torch.equal(shy_M, alpha_M)


def test_where_the_loss_is_flat_the_mixture_stays():
    alpha_M = torch.tensor([0.9, 0.1])
    chosen_M, _ = averse_choice(lambda _: 1.0, Posterior(alpha_M, 5.0), alpha_M, 1.0)
    assert torch.equal(chosen_M, alpha_M)
    assert averse_choice(lambda _: 1.0, Posterior(torch.ones(1), 5.0), torch.ones(1), 1.0)[1] == 0
