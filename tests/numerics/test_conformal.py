"""Conformal ranks against counting every order of the scores, and the promise of adaptive conformal on any stream."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.conformal import (
    adapt_alpha,
    conformal_quantile,
    conformal_rank,
    simultaneous_coverage,
    simultaneous_rank,
)


@pytest.mark.parametrize(("num_scores", "num_menu"), [(3, 1), (4, 2), (3, 3), (5, 2)])
def test_simultaneous_coverage_counts_the_orders_in_which_all_new_scores_stay_below(num_scores, num_menu):
    total = num_scores + num_menu
    new_sets = list(itertools.combinations(range(total), num_menu))  # which ranks of all scores are new
    for rank in range(1, num_scores + 1):
        held = 0
        for new in new_sets:
            old = [place for place in range(total) if place not in new]
            held += max(new) < old[rank - 1]
        assert simultaneous_coverage(num_scores, num_menu, rank) == pytest.approx(held / len(new_sets))


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0.01, 0.5))
def test_a_menu_of_one_is_the_plain_rank(num_scores, alpha):
    plain = min(conformal_rank(num_scores, alpha), num_scores + 1)
    assert simultaneous_rank(num_scores, 1, alpha) == plain


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 20), st.floats(0.02, 0.3))
def test_the_exact_rank_is_never_looser_than_the_union_bound(num_scores, num_menu, alpha):
    union = min(conformal_rank(num_scores, alpha / num_menu), num_scores + 1)
    assert simultaneous_rank(num_scores, num_menu, alpha) <= union


def test_usual_levels_hit_the_integer_rank_exactly():
    assert [conformal_rank(n, 0.1) for n in (8, 9, 19, 99, 999)] == [9, 9, 18, 90, 900]
    assert conformal_quantile(list(range(18)), 0.05) == math.inf
    assert conformal_quantile(list(range(19)), 0.05) == 18


@settings(deadline=None)
@given(
    st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=200),
    st.floats(0.02, 0.5),
    st.floats(0.005, 0.2),
)
def test_adaptive_levels_keep_the_long_run_rate_on_any_stream(stream, alpha, gamma):
    level, misses = alpha, 0
    for value in stream:  # any rule that covers at level <= 0 and misses at level >= 1
        missed = level >= 1.0 or (level > 0.0 and value > 1.0 - level)
        misses += missed
        level = adapt_alpha(level, alpha, missed, gamma)
    limit = (max(alpha, 1 - alpha) + gamma) / (len(stream) * gamma)
    assert abs(misses / len(stream) - alpha) <= limit + 1e-9


def test_the_conformal_quantile_covers_a_new_score_at_its_rate():
    rng = np.random.default_rng(0)
    scores = np.exp(rng.standard_normal((4000, 25)))  # 24 to calibrate, one new
    held = [row[-1] <= conformal_quantile(row[:-1].tolist(), 0.1) for row in scores]
    rate = 23 / 25  # ceil(25 * 0.9) / 25, exact for distinct scores
    assert abs(np.mean(held) - rate) <= 5 * math.sqrt(rate * (1 - rate) / len(held))
