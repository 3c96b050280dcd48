"""Residual experts: masks keep their budget, groups of tasks are told apart, weights combine linearly."""

from __future__ import annotations

import pytest
import torch

from apportion.errors import DataError
from apportion.methods.compose.experts import Experts, fit_experts


def residuals():
    """Half the tasks edit module a, half module b, each with its own delta."""
    first = [{"a.weight": torch.full((2, 2), 1.0 + n), "a.bias": torch.ones(2)} for n in range(3)]
    second = [{"b.weight": torch.full((3,), 2.0 + n), "c.weight": torch.full((1,), 1e-3)} for n in range(3)]
    return [*first, *second]


def test_tasks_that_edit_other_modules_get_other_experts():
    experts = fit_experts(residuals(), 2, max_modules=1)
    assert set(experts.masks) == {frozenset({"a"}), frozenset({"b"})}
    torch.testing.assert_close(experts.delta["a.weight"], torch.full((2, 2), 2.0))


def test_edits_are_linear_in_the_weights_and_leave_other_modules_alone():
    experts = fit_experts(residuals(), 2, max_modules=1)
    place = experts.masks.index(frozenset({"a"}))
    weight_M = torch.zeros(2)
    weight_M[place] = 0.5
    edits = experts.edits(weight_M)
    assert set(edits) == {"a.weight", "a.bias"}
    torch.testing.assert_close(edits["a.weight"], 0.5 * experts.delta["a.weight"])
    both = experts.edits(torch.tensor([0.5, 0.5]))
    assert set(both) == {"a.weight", "a.bias", "b.weight"}


def test_too_few_tasks_or_weights_are_refused():
    with pytest.raises(DataError, match="as many tasks"):
        fit_experts([{}], 1, 1)
    with pytest.raises(DataError, match="one each"):
        Experts({}, (frozenset(),)).edits(torch.ones(2))
