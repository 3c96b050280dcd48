"""Projections onto mixtures against their defining inequalities and exhaustive search."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.simplex import effective_number, entropy, project_simplex, project_sparse_simplex

vectors = st.lists(st.floats(-5, 5), min_size=1, max_size=7).map(lambda v: torch.tensor(v, dtype=torch.float64))


@settings(deadline=None)
@given(vectors)
def test_project_simplex_returns_the_nearest_mixture(weight_S):
    point_S = project_simplex(weight_S)
    assert point_S.min() >= 0
    assert math.isclose(point_S.sum().item(), 1.0, abs_tol=1e-12)
    # eq. C2 holds iff (w - p) . (v - p) <= 0 at every corner v of the simplex
    to_corner_SS = torch.eye(len(weight_S), dtype=torch.float64) - point_S
    assert (to_corner_SS @ (weight_S - point_S)).max() <= 1e-10


@settings(deadline=None)
@given(vectors, st.integers(1, 7))
def test_the_sparse_projection_is_the_best_of_all_supports(weight_S, num_active):
    point_S = project_sparse_simplex(weight_S, num_active)
    assert int((point_S > 0).sum()) <= num_active
    best = math.inf
    for size in range(1, min(num_active, len(weight_S)) + 1):
        for chosen in itertools.combinations(range(len(weight_S)), size):
            other_S = torch.zeros_like(weight_S)
            other_S[list(chosen)] = project_simplex(weight_S[list(chosen)])
            best = min(best, (other_S - weight_S).norm().item())
    assert (point_S - weight_S).norm().item() <= best + 1e-9


def test_rows_are_projected_one_by_one(generator):
    weight_LS = torch.randn(4, 5, generator=generator)
    torch.testing.assert_close(project_simplex(weight_LS), torch.stack([project_simplex(row) for row in weight_LS]))


def test_no_mixture_is_empty():
    with pytest.raises(ValueError, match="at least one"):
        project_sparse_simplex(torch.ones(3), 0)


def test_entropy_of_known_mixtures():
    assert entropy(torch.tensor([1.0, 0.0])).item() == 0
    assert effective_number(torch.full((8,), 1 / 8)).item() == pytest.approx(8)
