"""The audit of a cost model: how right it was on configurations it has never seen, in one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau, spearmanr

from apportion.cost.distortion import Distortion, frontier, relative_error, smallest_kappa
from apportion.cost.model import CostModel
from apportion.cost.sample import CostError, Sample
from apportion.numerics.multiple import binomial_upper, holm, one_sided_p
from apportion.numerics.stats import quantile

_MIN_BAND = 4


@dataclass(frozen=True, kw_only=True)
class CostAudit:
    """What held-out samples say about a cost model; None where it can't be said.

    ``coverage`` is the share of samples at or below the upper bound and ``coverage_lower`` what it is at least, at 95 %
    confidence; of a bound on a menu, the share of all menus of its size in which none is above, without a confidence.
    ``looseness`` the mean of bound/latency - 1. ``band_spearman`` and ``band_kendall`` are means over the
    ``num_bands`` different sets of samples within ±``band`` of one sample's latency (eq. K26). Of the ``num_ordered``
    pairs in which one configuration does no more work anywhere than the other, ``num_violations`` were slower on the
    clock beyond noise, and ``num_model_violations`` are slower by prediction.
    """

    count: int
    median_rel_error: float
    p95_rel_error: float
    max_rel_error: float
    promised: float | None
    coverage: float | None
    coverage_lower: float | None
    looseness: float | None
    spearman: float | None
    kendall: float | None
    band: float
    num_bands: int
    band_spearman: float | None
    band_kendall: float | None
    num_ordered: int
    num_violations: int
    num_model_violations: int
    kappa: float
    eps_ms: float
    frontier: tuple[Distortion, ...]
    eta: float
    delta_upper: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """Plain text of at most 80 columns."""
        covered = "no bound" if self.promised is None else f"{_percent(self.coverage)} (promised {self.promised:.1%})"
        rows = [
            ("held-out configurations", str(self.count)),
            (
                "relative error: median, p95, max",
                _percents(self.median_rel_error, self.p95_rel_error, self.max_rel_error),
            ),
            ("upper bound held for", covered),
            ("  at least, at 95 % confidence", _percent(self.coverage_lower)),
            ("  looseness (bound/latency - 1)", _percent(self.looseness)),
            ("rank agreement: Spearman, Kendall", _ranks(self.spearman, self.kendall)),
            (f"  inside ±{self.band:.0%} cost bands ({self.num_bands})", _ranks(self.band_spearman, self.band_kendall)),
            ("less work yet slower, measured", f"{self.num_violations} of {self.num_ordered} pairs"),
            ("less work yet slower, predicted", f"{self.num_model_violations} of {self.num_ordered} pairs"),
            ("distortion kappa, eps", f"{self.kappa:.3f}, {self.eps_ms:.3g} ms"),
            ("  factor 1 at eps", f"{self.frontier[-1].eps_ms:.3g} ms"),
            ("95 % of errors below, share above", f"{self.eta:.1%}, at most {self.delta_upper:.1%} (95 % confidence)"),
        ]
        return "\n".join(f"{name:<34} {value}" for name, value in rows)


def audit(model: CostModel, samples: Sequence[Sample], *, band: float = 0.05, eps_ms: float = 0.0) -> CostAudit:
    """Audits a model on samples that neither its fit, its recalibration nor its bound has seen."""
    if not samples:
        raise CostError("no held-out samples to audit a cost model with; measure some configurations")
    predictions, latencies_ms = model.pairs(samples)
    errors = [abs(p / y - 1.0) for p, y in zip(predictions, latencies_ms, strict=True)]
    coverage = lower = looseness = None
    if model.bound is not None:
        uppers = [model.bound(predicted) for predicted in predictions]
        misses = sum(y > u for u, y in zip(uppers, latencies_ms, strict=True))
        menu = model.bound.num_menu
        if menu == 1:
            coverage, lower = 1.0 - misses / len(samples), 1.0 - binomial_upper(misses, len(samples), 0.95)
        elif menu <= len(samples):
            coverage = math.comb(len(samples) - misses, menu) / math.comb(len(samples), menu)
        if all(math.isfinite(upper) for upper in uppers):
            looseness = math.fsum(u / y - 1.0 for u, y in zip(uppers, latencies_ms, strict=True)) / len(samples)
    bands = _bands(np.array(latencies_ms), band)
    inside = [rank_agreement([predictions[i] for i in one], [latencies_ms[i] for i in one]) for one in bands]
    num_ordered, num_violations, num_model_violations = _violations(samples, predictions)
    spearman, kendall = rank_agreement(predictions, latencies_ms)
    bulk = relative_error(predictions, latencies_ms)
    return CostAudit(
        count=len(samples),
        median_rel_error=quantile(errors, 0.5),
        p95_rel_error=quantile(errors, 0.95),
        max_rel_error=max(errors),
        promised=None if model.bound is None else 1.0 - model.bound.alpha,
        coverage=coverage,
        coverage_lower=lower,
        looseness=looseness,
        spearman=spearman,
        kendall=kendall,
        band=band,
        num_bands=len(bands),
        band_spearman=_mean([pair[0] for pair in inside]),
        band_kendall=_mean([pair[1] for pair in inside]),
        num_ordered=num_ordered,
        num_violations=num_violations,
        num_model_violations=num_model_violations,
        kappa=smallest_kappa(predictions, latencies_ms, eps_ms),
        eps_ms=eps_ms,
        frontier=frontier(predictions, latencies_ms, num_points=5),
        eta=bulk.eta,
        delta_upper=bulk.delta_upper,
    )


def rank_agreement(predictions: Sequence[float], latencies_ms: Sequence[float]) -> tuple[float | None, float | None]:
    """Spearman's rho and Kendall's tau-b; None when either side is constant or there are fewer than two."""
    if len(set(predictions)) < 2 or len(set(latencies_ms)) < 2:
        return None, None
    return float(spearmanr(predictions, latencies_ms)[0]), float(kendalltau(predictions, latencies_ms)[0])


def _bands(latency_N: NDArray[np.float64], band: float) -> list[tuple[int, ...]]:
    near = np.abs(latency_N[None, :] / latency_N[:, None] - 1.0) <= band
    return sorted({tuple(np.flatnonzero(row).tolist()) for row in near if row.sum() >= _MIN_BAND})


def _violations(samples: Sequence[Sample], predictions: Sequence[float]) -> tuple[int, int, int]:
    parts = sorted(samples[0].shares)
    share_NP = np.array([[sample.shares[part] for part in parts] for sample in samples])
    p_values, ordered, by_model = [], 0, 0
    for i, less in enumerate(samples):
        above = np.all(share_NP[i] <= share_NP, axis=1) & np.any(share_NP[i] < share_NP, axis=1)
        for j in np.flatnonzero(above).tolist():
            more = samples[j]
            ordered += 1
            by_model += predictions[i] > predictions[j] * (1.0 + 1e-9)
            gap = less.latency_ms - 1.01 * more.latency_ms
            p_values.append(one_sided_p(gap, math.hypot(less.stderr_ms, 1.01 * more.stderr_ms)))
    return ordered, sum(holm(p_values, 0.05)), by_model


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _percents(*values: float) -> str:
    return ", ".join(f"{value:.1%}" for value in values)


def _ranks(*values: float | None) -> str:
    return ", ".join("-" if value is None else f"{value:.3f}" for value in values)
