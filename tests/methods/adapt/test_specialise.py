"""The support loss leaves every example out of its own class mean."""

import pytest
import torch
from torch.nn import functional

from apportion.device.measure import Session, Timing
from apportion.methods.adapt.make import left_out_losses, risked
from apportion.methods.adapt.specialise import MADE, WHOLE, z_of


@pytest.mark.parametrize("risk", [0.0, 0.5])
def test_left_out_loss_agrees_with_leaving_out(risk, generator):
    feature_SF = functional.normalize(torch.randn(7, 5, generator=generator, dtype=torch.float64), dim=-1)
    label_S = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    losses = []
    for row in range(7):
        rest = [other for other in range(7) if other != row]
        means = torch.stack([feature_SF[[o for o in rest if label_S[o] == w]].mean(0) for w in range(3)])
        score_W = 4.0 * functional.normalize(means, dim=-1) @ feature_SF[row]
        losses.append(functional.cross_entropy(score_W, label_S[row]))
    expected = torch.stack(losses)
    found = risked(left_out_losses(feature_SF, label_S, 3, 4.0), risk)
    assert found == pytest.approx(float(expected.mean() + risk * expected.var(correction=0)), rel=1e-6)


def test_a_single_example_of_a_class_counts_itself():
    feature_SF = functional.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), dim=-1)
    expected = functional.cross_entropy(torch.tensor([[10.0, 0.0]]), torch.tensor([0]))
    assert float(left_out_losses(feature_SF, torch.tensor([0, 1]), 2, 10.0).mean()) == pytest.approx(float(expected))


@pytest.mark.parametrize(("confidence", "t"), [(0.9, 1.638), (0.95, 2.353), (0.99, 4.541)])
def test_few_processes_need_more_standard_errors_the_surer_it_must_be(confidence, t):
    timing = Timing(median_ms=1.0, stderr_ms=0.0, mad_ms=0.0, p95_ms=1.0, count=12)
    session = Session({WHOLE: (timing,) * 4, MADE: (timing,) * 4}, {})
    # what stands in the session is widened by t/z at 95 % for three degrees of freedom
    assert z_of(confidence, session) * (2.353 / 1.6449) == pytest.approx(t, rel=1e-3)
