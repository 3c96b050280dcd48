"""The best low-rank map: against the whitened and the plain singular value decomposition, and by trying to beat it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.numerics.lowrank import best_rank


def problem(seed, num_outputs, num_inputs, num_rows):
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(num_outputs, num_inputs, generator=generator, dtype=torch.float64)
    mix_II = torch.randn(num_inputs, num_inputs, generator=generator, dtype=torch.float64)
    x_RI = torch.randn(num_rows, num_inputs, generator=generator, dtype=torch.float64) @ mix_II
    return weight_OI, x_RI


def error(weight_OI, approximation_OI, x_RI):
    return ((weight_OI - approximation_OI) @ x_RI.T).square().sum().item() / len(x_RI)


def best(weight_OI, x_RI, rank):
    output_RO = x_RI @ weight_OI.T
    up_OR, down_RI = best_rank(weight_OI, output_RO.T @ output_RO / len(x_RI), rank)
    return up_OR @ down_RI


sizes = st.integers(2, 9)


@given(st.integers(0, 10**6), sizes, sizes, st.integers(1, 30), st.data())
def test_it_is_the_whitened_decomposition_and_beats_the_plain_one(seed, num_outputs, num_inputs, num_rows, data):
    rank = data.draw(st.integers(1, min(num_outputs, num_inputs)))
    weight_OI, x_RI = problem(seed, num_outputs, num_inputs, num_rows)
    found = error(weight_OI, best(weight_OI, x_RI, rank), x_RI)
    scale = error(weight_OI, torch.zeros_like(weight_OI), x_RI)
    # Eckart-Young on the whitened matrix: what is left is the sum of the squared singular values left out
    singular = torch.linalg.svdvals(weight_OI @ x_RI.T) / num_rows**0.5
    assert abs(found - singular[rank:].square().sum().item()) <= 1e-10 * scale
    u, s, v = torch.linalg.svd(weight_OI, full_matrices=False)
    assert found <= error(weight_OI, u[:, :rank] * s[:rank] @ v[:rank], x_RI) + 1e-10 * scale


def test_with_white_inputs_it_is_the_truncated_decomposition():
    weight_OI, _ = problem(0, 6, 8, 1)
    up_OR, down_RI = best_rank(weight_OI, weight_OI @ weight_OI.T, 3)
    u, s, v = torch.linalg.svd(weight_OI, full_matrices=False)
    torch.testing.assert_close(up_OR @ down_RI, u[:, :3] * s[:3] @ v[:3])
    torch.testing.assert_close(up_OR.T @ up_OR, torch.eye(3, dtype=torch.float64))


def test_no_descent_from_anywhere_gets_below_it():
    weight_OI, x_RI = problem(1, 5, 7, 40)
    least = error(weight_OI, best(weight_OI, x_RI, 2), x_RI)
    reached = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        up_OR = torch.randn(5, 2, generator=generator, dtype=torch.float64)
        for _ in range(300):  # each factor in turn by least squares, which can only lower the error
            down_RI = torch.linalg.lstsq(up_OR, weight_OI @ x_RI.T).solution @ torch.linalg.pinv(x_RI.T)
            up_OR = torch.linalg.lstsq((down_RI @ x_RI.T).T, (weight_OI @ x_RI.T).T).solution.T
        reached.append(error(weight_OI, up_OR @ down_RI, x_RI))
    assert min(reached) >= least * (1 - 1e-9)
    assert min(reached) <= least * (1 + 1e-3)  # the other way does get there


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_smaller_ranks_are_nested(seed, rank):
    weight_OI, x_RI = problem(seed, 8, 7, 20)
    moment_OO = weight_OI @ (x_RI.T @ x_RI) @ weight_OI.T
    up, down = best_rank(weight_OI, moment_OO, rank)
    fewer_up, fewer_down = best_rank(weight_OI, moment_OO, rank - 1)
    torch.testing.assert_close(up[:, :-1] @ down[:-1], fewer_up @ fewer_down)
