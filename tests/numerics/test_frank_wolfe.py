"""Frank-Wolfe against an exact convex solver, its certificate, its sparsity and its rates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.convex import minimise, modeller
from apportion.numerics.frank_wolfe import frank_wolfe

VARIANTS = ("vanilla", "away", "pairwise")


def quadratic(seed, size, rows=None, inside=False):
    """½ wᵀHw + cᵀw with its objective and curvature; ``inside`` puts the optimum into the interior."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(rows or size + 2, size, generator=generator, dtype=torch.float64)
    matrix = factor.T @ factor
    linear = torch.randn(size, generator=generator, dtype=torch.float64)
    if inside:
        linear = -matrix @ torch.full((size,), 1 / size, dtype=torch.float64)

    def objective(weight):
        product = matrix @ weight
        return 0.5 * float(weight @ product) + float(linear @ weight), product + linear

    return matrix, linear, objective, lambda direction: float(direction @ matrix @ direction)


def vertex(size):
    return torch.eye(size, dtype=torch.float64)[0]


def exact(matrix, linear):
    cp = modeller()
    weight = cp.Variable(len(linear), nonneg=True)
    objective = 0.5 * cp.quad_form(weight, cp.psd_wrap(matrix.numpy())) + linear.numpy() @ weight
    assert minimise(objective, [cp.sum(weight) == 1], tolerance=1e-10) == "optimal"
    return objective.value


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stepping", ["exact", "search"])
def test_it_finds_what_an_exact_solver_finds_and_certifies_it(variant, stepping):
    for seed in range(4):
        matrix, linear, objective, curvature = quadratic(seed, 6)
        found = frank_wolfe(
            objective,
            vertex(6),
            variant=variant,
            tolerance=1e-2 if variant == "vanilla" else 1e-9,
            max_steps=3000,
            curvature=curvature if stepping == "exact" else None,
        )
        best = exact(matrix, linear)
        assert -1e-7 <= found.value - best <= found.gap + 1e-7
        assert found.gap <= (1e-2 if variant == "vanilla" else 1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from(VARIANTS), st.integers(0, 12), st.booleans())
def test_along_the_way(seed, size, variant, steps, exactly):
    """Values fall, iterates stay on the simplex, t steps from a vertex activate at most t + 1 sources, gaps bound."""
    _, _, objective, curvature = quadratic(seed, size)
    found = frank_wolfe(
        objective, vertex(size), variant=variant, max_steps=steps, tolerance=0, curvature=curvature if exactly else None
    )
    assert found.num_active <= found.num_steps + 1
    assert all(later <= earlier + 1e-12 for earlier, later in zip(found.values, found.values[1:], strict=False))
    assert found.weight_S.min() >= 0
    assert math.isclose(found.weight_S.sum().item(), 1, abs_tol=1e-12)
    reference = frank_wolfe(objective, vertex(size), max_steps=20_000, tolerance=1e-10, curvature=curvature)
    assert found.value - reference.value <= found.gap + 1e-8


def test_the_gap_of_vanilla_steps_falls_like_one_over_t():
    """Theorem 3 of the paper: f(w_t) - f* = O(1/t), here with the constant 2 C_f of Jaggi (2013)."""
    matrix, _, objective, curvature = quadratic(3, 30, inside=True)
    found = frank_wolfe(objective, vertex(30), variant="vanilla", max_steps=400, tolerance=0, curvature=curvature)
    best = objective(torch.full((30,), 1 / 30, dtype=torch.float64))[0]
    # the curvature of a quadratic over the simplex is at most its largest value between two vertices
    diagonal = matrix.diagonal()
    constant = float((diagonal[:, None] + diagonal[None] - 2 * matrix).max())
    for step, value in enumerate(found.values):
        assert value - best <= 2 * constant / (step + 2) + 1e-9


def test_pairwise_steps_converge_linearly_where_vanilla_ones_do_not():
    """The optimum lies on a face, where vanilla steps zigzag."""
    target = torch.tensor([0.55, 0.35, 0.25, -0.4], dtype=torch.float64)

    def objective(weight):
        rest = weight - target
        return 0.5 * float(rest @ rest), rest

    gaps = {}
    for variant in VARIANTS:
        found = frank_wolfe(
            objective,
            vertex(4).flip(0),
            variant=variant,
            max_steps=60,
            tolerance=1e-12,
            curvature=lambda direction: float(direction @ direction),
        )
        gaps[variant] = found.gap
    assert gaps["pairwise"] <= 1e-12
    assert gaps["away"] <= 1e-12
    assert gaps["vanilla"] > 1e-6


def test_no_more_sources_than_allowed_are_active():
    _, _, objective, curvature = quadratic(1, 8, inside=True)
    free = frank_wolfe(objective, vertex(8), tolerance=1e-9, curvature=curvature)
    bound = frank_wolfe(objective, vertex(8), tolerance=1e-9, curvature=curvature, max_active=3)
    assert free.num_active == 8
    assert bound.num_active <= 3
    assert bound.value >= free.value
    assert bound.value - free.value <= bound.gap


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_have_mixtures_of_their_own(variant):
    """A separable objective is minimised as each block alone."""
    parts = [quadratic(seed, 5) for seed in range(3)]

    def objective(weight_LS):
        pairs = [part[2](row) for part, row in zip(parts, weight_LS, strict=True)]
        return sum(value for value, _ in pairs), torch.stack([gradient for _, gradient in pairs])

    found = frank_wolfe(
        objective,
        torch.stack([vertex(5)] * 3),
        variant=variant,
        tolerance=1e-2 if variant == "vanilla" else 1e-7,
        max_steps=3000,
    )
    alone = sum(exact(part[0], part[1]) for part in parts)
    assert found.value - alone <= found.gap + 1e-6
    assert found.gap <= (1e-2 if variant == "vanilla" else 1e-5)


def test_a_start_that_is_no_mixture_is_refused():
    with pytest.raises(ValueError, match="no mixture"):
        frank_wolfe(lambda weight: (0.0, weight), torch.tensor([0.5, 0.6]))
