"""One door to the convex solver: cvxpy is heavy to load and untyped, so it is loaded on first use, here only."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def modeller() -> Any:
    """The cvxpy module."""
    return import_module("cvxpy")


def minimise(objective: Any, constraints: list[Any], tolerance: float = 1e-8) -> str:
    """Solves with Clarabel, leaves the values in the variables and returns the status, ``optimal`` when all is well."""
    cp = modeller()
    problem = cp.Problem(cp.Minimize(objective), constraints)
    try:
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=tolerance, tol_gap_rel=tolerance, tol_feas=tolerance)
    except cp.SolverError:
        return "failed"
    return str(problem.status)
