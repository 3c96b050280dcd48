"""Transfer: a cost model for a new target from a source's model and a few runs, by rescaling the price of each kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.residual import Residual
from apportion.cost.sample import CostError, Sample
from apportion.numerics.convex import minimise, modeller

_ALWAYS = "always on"


def transfer(
    source: CostModel,
    samples: Sequence[Sample],
    kind_of: Mapping[str, str] | None = None,
    *,
    noise: float = 0.02,
    spread: float = 0.3,
) -> CostModel:
    r"""The source's curves with one factor per kind, shrunk to one factor for all (eq. K22).

    .. math:: \min_{\rho, g \ge 0} \sum_i \Big(\frac{\rho_0 \beta_0 + \sum_k \rho_k t_k(s_i) + g\, r(s_i)}{y_i}
        - 1\Big)^2 + \Big(\frac{\nu}{\sigma g_0}\Big)^2 \sum_k (\rho_k - g)^2

    On the source's floor of launches :math:`g f(s_i)` stands for the sum, and the floor moves with :math:`g`.
    :math:`t_k` are the source's milliseconds of kind ``k`` and :math:`r` its residual; ``kind_of`` maps signatures to
    kinds (each its own when None); ``noise`` is :math:`\nu`, the relative error of one run, ``spread`` is
    :math:`\sigma`, how far kinds are expected to differ from one another, and :math:`g_0` the median ratio of latency
    to the source's prediction. Recalibration and bound of the source are dropped; bound the result anew.
    """
    if not samples:
        raise CostError("no runs on the new target; measure a few configurations there")
    if not (noise > 0.0 and spread > 0.0):
        raise CostError(f"noise is {noise!r} and spread {spread!r}; give both above 0")
    plain = replace(source, recalibration=None, bound=None)
    law = plain.law
    kind_of = kind_of or {signature: signature for signature in law.curves}
    missing = sorted(law.curves.keys() - kind_of.keys())
    if missing:
        raise CostError(f"no kind for signature {missing[0]!r}; name a kind for each of {len(law.curves)} signatures")
    kinds = [_ALWAYS, *sorted({kind_of[signature] for signature in law.curves})]
    work = np.zeros((len(samples), len(kinds)))
    extra_N = np.zeros(len(samples))
    for row, sample in enumerate(samples):
        totals = law.totals(sample.shares)
        predicted = plain.predict(sample.shares)
        if plain.launches is not None and predicted <= plain.launches(sample.shares):
            extra_N[row] = predicted
            continue
        work[row, 0] = law.intercept_ms
        for signature, total in totals.items():
            work[row, kinds.index(kind_of[signature])] += total
        extra_N[row] = plain.residual(totals) if plain.residual is not None else 0.0
    latency_N = np.array([sample.latency_ms for sample in samples])
    start = float(np.median(latency_N / np.maximum(work.sum(1) + extra_N, 1e-12)))
    cp = modeller()
    rho, common = cp.Variable(len(kinds), nonneg=True), cp.Variable(nonneg=True)  # both in units of the start
    rows, extra = work * (start / latency_N)[:, None], extra_N * start / latency_N
    misfit = cp.sum_squares(rows @ rho + extra * common - 1.0)
    status = minimise(misfit + (noise / spread) ** 2 * cp.sum_squares(rho - common), [], tolerance=1e-10)
    if rho.value is None or common.value is None:
        raise CostError(f"the transfer from {len(samples)} runs ended {status}; check them for extreme values")
    factor = {kind: start * max(0.0, float(value)) for kind, value in zip(kinds, rho.value, strict=True)}
    scale_of = {signature: factor[kind_of[signature]] for signature in law.curves}
    curves = {signature: curve.scaled(scale_of[signature]) for signature, curve in law.curves.items()}
    moved = AdditiveLaw(factor[_ALWAYS] * law.intercept_ms, curves, law.signature_of, law.fixed)
    residual = _moved_residual(plain.residual, start * float(common.value), scale_of)
    if residual is not None and plain.monotone and not residual.monotone:
        residual = None  # better plain than falling
    launches = None if plain.launches is None else plain.launches.scaled(start * max(0.0, float(common.value)))
    return CostModel(moved, residual, loss=source.loss, num_samples=len(samples), launches=launches)


def _moved_residual(residual: Residual | None, common: float, scale_of: Mapping[str, float]) -> Residual | None:
    if residual is None:
        return None
    totals_ms = {name: total * scale_of[name] for name, total in residual.totals_ms.items()}
    if common <= 0.0 or not all(total > 0.0 and math.isfinite(total) for total in totals_ms.values()):
        return None
    return Residual(common * residual.full_ms, totals_ms, residual.weights, residual.gain)
