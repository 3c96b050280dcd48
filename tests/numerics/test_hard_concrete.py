"""Gates: the probability of being open is what draws show, and the mean gate is what training ends with."""

from __future__ import annotations

import math

import pytest
import torch

from apportion.numerics.hard_concrete import mean_gates, open_probability, sample_gates


@pytest.mark.parametrize("logit", [-3.0, -0.5, 0.0, 2.0])
def test_the_share_of_open_gates_is_the_probability(logit, generator):
    count = 40_000
    gate_G = sample_gates(torch.full((count,), logit), generator)
    probability = open_probability(torch.tensor(logit)).item()
    stderr = math.sqrt(probability * (1 - probability) / count)
    assert abs((gate_G > 0).float().mean().item() - probability) < 5 * stderr
    assert 0 <= gate_G.min() <= gate_G.max() <= 1


def test_far_gates_are_exactly_shut_or_open():
    assert mean_gates(torch.tensor([-10.0, 10.0])).tolist() == [0, 1]


def test_gates_pass_gradients_to_their_logits(generator):
    logit_G = torch.zeros(100, requires_grad=True)
    sample_gates(logit_G, generator).sum().backward()
    assert logit_G.grad.abs().sum() > 0
