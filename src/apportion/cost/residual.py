"""The residual: a small correction for what does not add up, kept only where cross-validation says that it helps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from apportion.cost.fit import FitOptions
from apportion.cost.launches import Launches, fit_launches
from apportion.cost.law import AdditiveLaw
from apportion.cost.sample import CostError, Sample, number
from apportion.numerics.convex import minimise, modeller

STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


Term = tuple[str, ...]


@dataclass(frozen=True)
class Residual:
    r"""A polynomial of degree two in the totals of a few signatures (eq. K8).

    .. math:: r(s) = F \Big(\beta_0 + \sum_a \beta_a u_a + \sum_{a \le b} \beta_{ab}\, u_a u_b\Big), \qquad
        u_a = t_a(s) / T_a

    ``full_ms`` is :math:`F`, the law's latency of the untouched network; ``totals_ms`` maps a signature to :math:`T_a`,
    its cost there; :math:`t_a(s)` is its cost now; ``weights`` maps no, one or two signatures to :math:`\beta`, of
    either sign. Law plus residual never falls when work is added if and only if, for every :math:`a`,

    .. math:: -\beta_a + \sum_b (1 + [a = b]) \max(0, -\beta_{ab}) \le T_a / F.

    ``gain`` is the share of the cross-validated squared relative error that it removed.
    """

    full_ms: float
    totals_ms: Mapping[str, float]
    weights: Mapping[Term, float]
    gain: float = 0.0

    def __post_init__(self) -> None:
        scales = (self.full_ms, *self.totals_ms.values())
        if not all(math.isfinite(value) and value > 0.0 for value in scales):
            raise CostError(f"a residual has totals {scales!r} ms; all must be finite and above 0, fit it again")
        named = {signature for term in self.weights for signature in term}
        if not named <= self.totals_ms.keys() or not all(math.isfinite(weight) for weight in self.weights.values()):
            raise CostError("a residual has a weight that is not finite or names an unknown signature; fit it again")

    @property
    def monotone(self) -> bool:
        """Whether law plus residual never falls when work is added."""
        return all(
            self.full_ms * math.fsum(_fall(term, signature, weight) for term, weight in self.weights.items())
            <= total * (1.0 + 1e-9)
            for signature, total in self.totals_ms.items()
        )

    def __call__(self, totals: Mapping[str, Any]) -> Any:
        """The correction in milliseconds, from the totals by signature (numbers or tensors)."""
        used = {name: totals[name] * (1.0 / total) for name, total in self.totals_ms.items()}
        return self.full_ms * sum(weight * math.prod(used[a] for a in term) for term, weight in self.weights.items())

    def to_json(self) -> dict[str, Any]:
        return {
            "full_ms": self.full_ms,
            "totals_ms": dict(self.totals_ms),
            "weights": [[list(term), weight] for term, weight in self.weights.items()],
            "gain": self.gain,
            "monotone": self.monotone,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Residual:
        return cls(
            number(fields["full_ms"], "full_ms"),
            {str(name): number(total, "totals_ms") for name, total in fields["totals_ms"].items()},
            {tuple(str(name) for name in term): number(weight, "weights") for term, weight in fields["weights"]},
            number(fields["gain"], "gain"),
        )


def _fall(term: Term, signature: str, weight: float) -> float:
    """The most that a term can lower the slope along a signature, as a share of the full latency."""
    return term.count(signature) * (-weight if len(term) == 1 else max(0.0, -weight))


def fit_residual(
    law: AdditiveLaw, samples: Sequence[Sample], strength: float, num_kinds: int = 3, monotone: bool = True
) -> Residual | None:
    r"""Ridge regression of the law's relative errors on its dearest signatures and their pairs (eq. K8).

    .. math:: \min_\beta \sum_i \big((\hat c(s_i) + r_\beta(s_i) - y_i) / y_i\big)^2 + \rho\, n \|\beta\|^2
        \quad \text{with } \beta_0 \ge -0.9\, \hat c(0) / F

    ``strength`` is :math:`\rho`. With ``monotone`` the condition of :class:`Residual` is a constraint of the program.
    None when the law has no signature with a price.
    """
    cp = modeller()
    totals_ms = {name: total for name, total in law.full_totals().items() if total > 0.0}
    names = sorted(sorted(totals_ms, key=lambda name: -totals_ms[name])[:num_kinds])
    if not names:
        return None
    full_ms = law.intercept_ms + math.fsum(law.full_totals().values())
    terms = [term for degree in range(3) for term in combinations_with_replacement(names, degree)]
    totals = [law.totals(sample.shares) for sample in samples]
    latency_N = np.array([sample.latency_ms for sample in samples])
    products = np.array([[math.prod(t[name] / totals_ms[name] for name in term) for term in terms] for t in totals])
    base_N = law.intercept_ms + np.array([math.fsum(t.values()) for t in totals])
    beta = cp.Variable(len(terms))
    misfit = cp.sum_squares(full_ms * products / latency_N[:, None] @ beta - (1.0 - base_N / latency_N))
    constraints = [beta[0] >= -0.9 * law.intercept_ms / full_ms]
    if monotone:
        single = np.array([[term == (name,) for term in terms] for name in names], dtype=np.float64)
        double = np.array([[term.count(name) * (len(term) == 2) for term in terms] for name in names], dtype=np.float64)
        limit = np.array([totals_ms[name] / full_ms for name in names])
        constraints.append(double @ cp.neg(beta) - single @ beta <= limit * (1.0 - 1e-6))
    minimise(misfit + strength * len(samples) * cp.sum_squares(beta), constraints)
    if beta.value is None:
        return None
    weights = {term: float(weight) for term, weight in zip(terms, beta.value, strict=True)}
    return Residual(full_ms, {name: totals_ms[name] for name in names}, weights)


def choose_residual(
    law: AdditiveLaw,
    samples: Sequence[Sample],
    options: FitOptions,
    launches: Launches | None = None,
    num_folds: int = 5,
    num_kinds: int = 3,
) -> Residual | None:
    """A residual where cross-validation says that it helps, else None.

    Where ``launches`` is the floor under the law, a residual is fitted to the samples above it.

    Law and residual are refitted without each fold (every ``num_folds``-th sample). The residual stays only if the
    mean fall of the squared relative error is above one standard error of that mean and above a tenth of the error.
    """
    num_terms = (num_kinds + 1) * (num_kinds + 2) // 2
    if len(samples) < 2 * max(num_terms, num_folds):
        return None
    plain: list[float] = []
    corrected: dict[float, list[float]] = {strength: [] for strength in STRENGTHS}
    for fold in range(num_folds):
        train = [sample for index, sample in enumerate(samples) if index % num_folds != fold]
        held = samples[fold::num_folds]
        fold_law, floor = fit_launches(train, law.signature_of, options)
        plain += [_squared(fold_law, None, floor, sample) for sample in held]
        for strength in STRENGTHS:
            residual = fit_residual(fold_law, _above(fold_law, floor, train), strength, num_kinds)
            corrected[strength] += [_squared(fold_law, residual, floor, sample) for sample in held]
    best = min(STRENGTHS, key=lambda strength: math.fsum(corrected[strength]))
    fall_N = np.array(plain) - np.array(corrected[best])
    gain = float(fall_N.mean() / max(float(np.mean(plain)), 1e-300))
    if fall_N.mean() <= fall_N.std(ddof=1) / math.sqrt(len(fall_N)) or gain <= 0.1 or np.mean(plain) < 1e-10:
        return None
    fitted = fit_residual(law, _above(law, launches, samples), best, num_kinds)
    return None if fitted is None else Residual(fitted.full_ms, fitted.totals_ms, fitted.weights, gain)


def _above(law: AdditiveLaw, launches: Launches | None, samples: Sequence[Sample]) -> Sequence[Sample]:
    if launches is None:
        return samples
    return [sample for sample in samples if law.predict(sample.shares) >= launches(sample.shares)]


def _squared(law: AdditiveLaw, residual: Residual | None, launches: Launches | None, sample: Sample) -> float:
    totals = law.totals(sample.shares)
    predicted = law.intercept_ms + math.fsum(totals.values())
    if residual is not None:
        predicted += residual(totals)
    if launches is not None:
        predicted = max(predicted, launches(sample.shares))
    return float(predicted / sample.latency_ms - 1.0) ** 2
