"""Heads against closed forms, first-order conditions and independent solvers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import DataError
from apportion.tasks.heads import HEADS, Cosine, Logistic, Prototype, Ridge, class_means, left_out_means

seeds = st.integers(0, 2**31 - 1)


def problem(seed, ways=4, shots=5, dim=12, noise=0.5, num_queries=60):
    generator = torch.Generator().manual_seed(seed)
    centre_WD = torch.randn(ways, dim, generator=generator, dtype=torch.float64)
    label_S = torch.arange(ways).repeat_interleave(shots)
    label_Q = torch.randint(ways, (num_queries,), generator=generator)
    support_SD = centre_WD[label_S] + noise * torch.randn(len(label_S), dim, generator=generator, dtype=torch.float64)
    query_QD = centre_WD[label_Q] + noise * torch.randn(num_queries, dim, generator=generator, dtype=torch.float64)
    return support_SD, label_S, query_QD, label_Q, ways


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from(sorted(HEADS)))
def test_renaming_the_classes_renames_the_answers(seed, name):
    support_SD, label_S, query_QD, _, ways = problem(seed)
    order = torch.randperm(ways, generator=torch.Generator().manual_seed(seed))
    plain_QW = HEADS[name].score(support_SD, label_S, query_QD, ways)
    renamed_QW = HEADS[name].score(support_SD, order[label_S], query_QD, ways)
    assert plain_QW.shape == (len(query_QD), ways)
    torch.testing.assert_close(renamed_QW[:, order].softmax(-1), plain_QW.softmax(-1), atol=1e-4, rtol=0)


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from(["prototype", "ridge", "logistic"]))
def test_moving_all_features_changes_nothing(seed, name):
    support_SD, label_S, query_QD, _, ways = problem(seed)
    shift_D = torch.randn(support_SD.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plain_QW = HEADS[name].score(support_SD, label_S, query_QD, ways)
    moved_QW = HEADS[name].score(support_SD + shift_D, label_S, query_QD + shift_D, ways)
    torch.testing.assert_close(moved_QW.softmax(-1), plain_QW.softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_well_separated_classes_are_told_apart(name):
    support_SD, label_S, query_QD, label_Q, ways = problem(0, noise=0.1)
    answers_Q = HEADS[name].score(support_SD, label_S, query_QD, ways).argmax(-1)
    assert torch.equal(answers_Q, label_Q)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_one_shot_queries_equal_to_the_support_are_right(name):
    support_SD, label_S, _, _, ways = problem(1, shots=1)
    assert torch.equal(HEADS[name].score(support_SD, label_S, support_SD, ways).argmax(-1), label_S)


def test_prototypes_are_the_posterior_of_equal_round_gaussians():
    support_SD, label_S, query_QD, _, ways = problem(2)
    mean_WD = class_means(support_SD, label_S, ways)
    # softmax of -s d^2 is Bayes' rule for variance 1 / (2 s)
    law = torch.distributions.MultivariateNormal(torch.zeros(12).double(), torch.eye(12).double() / (2 * 3.0))
    log_QW = torch.stack([law.log_prob(query_QD - mean_D) for mean_D in mean_WD], dim=1)
    scored_QW = Prototype(scale=3.0).score(support_SD, label_S, query_QD, ways)
    torch.testing.assert_close(scored_QW.softmax(-1), log_QW.softmax(-1))


@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.01, 100))
def test_cosine_ignores_the_length_of_features(seed, factor):
    support_SD, label_S, query_QD, _, ways = problem(seed)
    plain_QW = Cosine().score(support_SD, label_S, query_QD, ways)
    torch.testing.assert_close(Cosine().score(factor * support_SD, label_S, factor * query_QD, ways), plain_QW)
    assert plain_QW.abs().max() <= 10 + 1e-9


@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.01, 10))
def test_ridge_solves_the_normal_equations(seed, penalty):
    support_SD, label_S, _, _, ways = problem(seed)
    target_SW = torch.nn.functional.one_hot(label_S, ways).double()
    weight_DW, bias_W = Ridge(penalty=penalty).solve(support_SD, target_SW)
    residual_SW = support_SD @ weight_DW + bias_W - target_SW
    # first-order conditions of |F W + 1 b - Y|^2 + penalty |W|^2
    assert (support_SD.T @ residual_SW + penalty * weight_DW).abs().max() < 1e-8
    assert residual_SW.sum(0).abs().max() < 1e-8


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_as_weights_and_biases_says_the_same_of_unit_features(head):
    support_SD, label_S, query_QD, _, ways = problem(5)
    query_QD = torch.nn.functional.normalize(query_QD, dim=-1)
    weight_DW, bias_W = head.linear(support_SD, label_S, ways)
    wanted_QW = head.score(support_SD, label_S, query_QD, ways).softmax(-1)
    torch.testing.assert_close((query_QD @ weight_DW + bias_W).softmax(-1), wanted_QW)


@pytest.mark.parametrize("penalty", [1e-3, 1e-1])
def test_logistic_agrees_with_an_independent_solver(penalty):
    linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    support_SD, label_S, query_QD, _, ways = problem(3)
    theirs = linear_model.LogisticRegression(C=1 / (penalty * len(label_S)), tol=1e-8, max_iter=10_000)
    theirs.fit(support_SD.numpy(), label_S.numpy())
    ours_QW = Logistic(penalty=penalty, max_steps=2000).score(support_SD, label_S, query_QD, ways).softmax(-1)
    np.testing.assert_allclose(ours_QW.numpy(), theirs.predict_proba(query_QD.numpy()), atol=2e-3)


def test_a_class_without_support_is_refused():
    with pytest.raises(DataError, match="2 of 3 classes"):
        class_means(torch.zeros(4, 2), torch.tensor([0, 0, 2, 2]), 3)


def test_left_out_means_are_those_of_the_others(generator):
    support_SD = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    label_S = torch.tensor([0, 0, 1, 0, 1, 2])
    found_SD = left_out_means(support_SD, label_S, 3)
    for row in range(5):
        others = [n for n in range(6) if n != row and label_S[n] == label_S[row]]
        torch.testing.assert_close(found_SD[row], support_SD[others].mean(0))
    torch.testing.assert_close(found_SD[5], support_SD[5])  # alone in its class
