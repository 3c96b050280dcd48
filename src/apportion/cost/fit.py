"""Fitting the additive law: one convex program over the intercept and all jumps and slopes, in three losses.

Shape letters: ``N`` samples, ``C`` columns of the design (column 0 is the intercept).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apportion.cost.curve import Curve, check_knots
from apportion.cost.law import AdditiveLaw
from apportion.cost.sample import CostError, Sample
from apportion.numerics.convex import minimise, modeller
from apportion.numerics.hinge import hinge_basis, slopes_of

Array = NDArray[np.float64]
Loss = Literal["least_squares", "quantile", "envelope"]
Knots = Sequence[float] | Mapping[str, Sequence[float]]
KNOTS = (0.25, 0.5, 0.75, 1.0)
RIDGE = 1e-6
MODEL_NOISE = 0.02


@dataclass(frozen=True)
class FitOptions:
    """How to fit: the loss, its quantile ``tau``, the knots (one list, or one per signature) and the ridge.

    With ``launches`` the law gets a floor under it (``launches.py``), by least squares alone. ``work`` are the
    operations of a part of every signature: what the samples leave open follows these then (eq. K32).
    """

    loss: Loss = "least_squares"
    tau: float = 0.9
    knots: Knots = KNOTS
    ridge: float = RIDGE
    model_noise: float = MODEL_NOISE
    launches: bool = False
    work: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.loss not in ("least_squares", "quantile", "envelope"):
            raise CostError(f"loss is {self.loss!r}; choose least_squares, quantile or envelope")
        if not 0.0 < self.tau < 1.0:
            raise CostError(f"tau is {self.tau!r}; give a quantile strictly between 0 and 1")
        if not (self.ridge >= 0.0 and self.model_noise > 0.0):
            raise CostError(f"ridge is {self.ridge!r}, model_noise {self.model_noise!r}; give >= 0 and > 0")
        if self.launches and self.loss != "least_squares":
            raise CostError(f"a floor of launches is fitted by least squares, not {self.loss}; leave out one of them")
        for knots in self.knots.values() if isinstance(self.knots, Mapping) else (self.knots,):
            check_knots(tuple(knots))

    def knots_of(self, signature: str) -> tuple[float, ...]:
        return tuple(self.knots.get(signature, KNOTS) if isinstance(self.knots, Mapping) else self.knots)


def relative_weights(latency_N: Array, stderr_N: Array, model_noise: float) -> Array:
    r"""Weights under which relative errors count, less where the clock was noisy (eq. K3).

    .. math:: w_i = 1 / \sqrt{y_i^2 + (\sigma_i / \tau_m)^2}

    ``latency_N`` is :math:`y`, ``stderr_N`` :math:`\sigma` (0 where unknown), ``model_noise`` the relative error
    :math:`\tau_m` that the law would make without noise. Tends to ``1/y`` and to a multiple of ``1/sigma``.
    """
    weight_N: Array = 1.0 / np.sqrt(latency_N**2 + (stderr_N / model_noise) ** 2)
    return weight_N


def choose_knots(shares: Sequence[float], knots: Sequence[float] = KNOTS) -> tuple[float, ...]:
    """The knots that the shares can tell apart; none for parts that are only ever on or off.

    A piece is kept if a measured share lies in it, the first one if two do: they tell its slope from the jump and from
    what is always there. Shares below the smallest one measured lie on the line of the first piece.

    Example:
        >>> choose_knots([0.1, 0.2, 0.6, 1.0]), choose_knots([0.5, 1.0]), choose_knots([0.0, 1.0])
        ((0.25, 0.75, 1.0), (1.0,), ())
    """
    seen = sorted({share for share in shares if share > 0.0})
    if all(share == 1.0 for share in seen):
        return ()
    kept: list[float] = []
    for knot in knots:
        rest = [share for share in seen if share > (kept[-1] if kept else 0.0)]
        inside = sum(share <= knot for share in rest)
        if inside >= (1 if kept else 2) and inside < len(rest):
            kept.append(knot)
    return (*kept, 1.0)


def solve(
    design_NC: Array,
    latency_N: Array,
    weight_N: Array,
    *,
    loss: Loss = "least_squares",
    tau: float = 0.9,
    ridge: float = RIDGE,
    likely_CK: Array | None = None,
) -> Array:
    r"""Non-negative coefficients of the law, by one convex program (eq. K4, K5, K6).

    .. math:: \min_{x \ge 0} \; \sum_i \ell\big(w_i (y_i - a_i^\top x)\big) + \rho \sum_{j \ge 1} (x_j u_j / \bar y)^2

    ``design_NC`` holds the rows :math:`a_i`, ``weight_N`` :math:`w`, ``ridge`` :math:`\rho`; :math:`u_j` is the
    largest entry of column ``j`` and :math:`\bar y` the median latency. The loss is the square (K4), the pinball
    :math:`\ell(r) = \max(\tau r, (\tau - 1) r)` (K5), or :math:`-r` under :math:`r \le 0`, the upper envelope (K6).

    With ``likely_CK``, whose columns say what the coefficients are likely to be in proportion to, the ridge pulls them
    there instead of to nothing; how much of each column is fitted along (K32):

    .. math:: \rho \sum_{j \ge 1} \big((x_j u_j / \bar y) - (L z)_j\big)^2, \qquad z \ge 0
    """
    cp = modeller()
    middle = float(np.median(latency_N))
    size_C = np.where((peak_C := np.abs(design_NC).max(0)) > 0.0, peak_C, 1.0)
    scaled_NC = (design_NC / size_C) * (weight_N * middle)[:, None]
    goal_N = weight_N * latency_N
    x_C = cp.Variable(design_NC.shape[1], nonneg=True)
    miss_N = goal_N - scaled_NC @ x_C
    penalty = 0.0
    if ridge > 0.0 and design_NC.shape[1] > 1:
        open_C = x_C[1:]
        if likely_CK is not None:
            open_C = open_C - likely_CK[1:] @ cp.Variable(likely_CK.shape[1], nonneg=True)
        penalty = ridge * cp.sum_squares(open_C)
    constraints = [miss_N <= 0] if loss == "envelope" else []
    if loss == "least_squares":
        objective = cp.sum_squares(miss_N)
    elif loss == "quantile":
        objective = cp.sum(cp.maximum(tau * miss_N, (tau - 1.0) * miss_N))
    else:
        objective = -cp.sum(miss_N)
    # a program with corners is solved to fewer digits
    status = minimise(objective + penalty, constraints, tolerance=1e-11 if loss == "least_squares" else 1e-8)
    if x_C.value is None:
        raise CostError(f"the {loss} fit to {len(latency_N)} samples ended {status}; check them for extreme values")
    result_C: Array = np.maximum(np.asarray(x_C.value, dtype=np.float64), 0.0) * middle / size_C
    if loss == "envelope":  # the solver's last digits must not leave a sample above the envelope
        result_C[0] += max(0.0, float(np.max(latency_N - design_NC @ result_C)))
    return result_C


@dataclass(frozen=True)
class Design:
    """What the law is fitted to: a row for every sample, a column for the intercept and every jump and slope.

    A column that no sample moves stays out of the program (``moved_C``) and its cost in the intercept: parts never
    switched off get no jump, parts only ever on or off get no slope.
    """

    design_NC: Array
    latency_N: Array
    weight_N: Array
    moved_C: NDArray[np.bool_]
    knots_of: Mapping[str, tuple[float, ...]]
    signature_of: Mapping[str, str]
    likely_CK: Array | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], signature_of: Mapping[str, str], options: FitOptions) -> Design:
        if not samples:
            raise CostError("no samples to fit a cost model to; measure at least one configuration")
        parts_of: dict[str, list[str]] = {}
        for part, signature in signature_of.items():
            parts_of.setdefault(signature, []).append(part)
        blank = AdditiveLaw(0.0, {name: Curve(0.0) for name in parts_of}, signature_of)
        for sample in samples:
            blank.check(sample.shares)
        latency_N = np.array([sample.latency_ms for sample in samples])
        stderr_N = np.array([sample.stderr_ms for sample in samples])
        blocks, knots_of, likely = [np.ones((len(samples), 1))], {}, [np.zeros((1, 2))]
        for signature, parts in parts_of.items():
            share_NP = np.array([[sample.shares[part] for part in parts] for sample in samples])
            knots = choose_knots(share_NP.ravel().tolist(), options.knots_of(signature))
            hinge_NPK = hinge_basis(share_NP.ravel(), knots or (1.0,)).reshape(*share_NP.shape, -1)
            blocks.append(np.column_stack([(share_NP > 0.0).sum(1), hinge_NPK.sum(1) * bool(knots)]))
            knots_of[signature] = knots or (1.0,)
            work = 0.0 if options.work is None else options.work[signature]
            rows = np.zeros((1 + len(knots_of[signature]), 2))  # a jump, and slopes of which the first holds throughout
            rows[0, 0], rows[1, 1] = len(parts), len(parts) * work
            likely.append(rows)
        design_NC = np.hstack(blocks)
        moved_C = np.ptp(design_NC, axis=0) > 0.0
        moved_C[0] = True
        weight_N = relative_weights(latency_N, stderr_N, options.model_noise)
        likely_CK = np.vstack(likely)
        likely_CK /= np.where((total_K := likely_CK.sum(0)) > 0.0, total_K, 1.0)
        known_CK = None if options.work is None else likely_CK[moved_C]
        return cls(design_NC, latency_N, weight_N, moved_C, knots_of, dict(signature_of), known_CK)

    @property
    def moved_NC(self) -> Array:
        """The columns that are fitted."""
        moved_NC: Array = self.design_NC[:, self.moved_C]
        return moved_NC

    def law(self, moved_x: Array) -> AdditiveLaw:
        """The law of these coefficients of the columns that are fitted; the others are 0."""
        x_C = np.zeros(self.design_NC.shape[1])
        x_C[self.moved_C] = moved_x
        curves, fixed, first = {}, set(), 1
        for signature, knots in self.knots_of.items():
            last = first + 1 + len(knots)
            curves[signature] = Curve(float(x_C[first]), knots, slopes_of(x_C[first + 1 : last].tolist()))
            if not self.moved_C[first:last].any():
                fixed.add(signature)
            first = last
        return AdditiveLaw(float(x_C[0]), curves, self.signature_of, frozenset(fixed))


def fit_law(
    samples: Sequence[Sample], signature_of: Mapping[str, str], options: FitOptions | None = None
) -> AdditiveLaw:
    """Fits intercept and curves of all signatures jointly to whole-network samples (eq. K1 to K6).

    Signatures whose parts never move are listed in ``fixed``.
    """
    options = options or FitOptions()
    design = Design.of(samples, signature_of, options)
    return design.law(
        solve(
            design.moved_NC,
            design.latency_N,
            design.weight_N,
            loss=options.loss,
            tau=options.tau,
            ridge=options.ridge,
            likely_CK=design.likely_CK,
        )
    )


def fit_curve(
    shares: Sequence[float],
    latencies_ms: Sequence[float],
    stderrs_ms: Sequence[float] | None = None,
    options: FitOptions | None = None,
) -> tuple[float, Curve]:
    """One part's sweep: what stays when the part is gone, and the part's curve (eq. K7)."""
    if len(shares) != len(latencies_ms):
        raise CostError(f"a sweep has {len(shares)} shares and {len(latencies_ms)} latencies; give one of each")
    stderrs = stderrs_ms or [0.0] * len(shares)
    samples = [Sample({"part": s}, y, e) for s, y, e in zip(shares, latencies_ms, stderrs, strict=True)]
    options = options or FitOptions()
    law = fit_law(samples, {"part": "part"}, options)
    return law.intercept_ms, law.curves["part"]


def fit_sweeps(
    samples: Sequence[Sample], signature_of: Mapping[str, str], options: FitOptions | None = None
) -> AdditiveLaw:
    r"""Curves from module sweeps: a sample moves one module, and so one or a few parts, away from the first (eq. K7).

    .. math:: y_i + \sum_{p \in K} \big(c_{\sigma(p)}(1) - c_{\sigma(p)}(s_{i,p})\big)
        = b + \sum_{p \notin K} c_{\sigma(p)}(s_{i,p}), \qquad
        \beta_0 = \max\Big(0, \mathrm{med}_i \big(y_i - \sum_p c_{\sigma(p)}(s_{i,p})\big)\Big)

    Samples that move the fewest signatures come first; :math:`K` are the parts whose curves are known by then, and what
    they saved is added back, so that a sweep fits only the curves that are new in it. Curves that always move together
    are fitted together. One bad sweep can't bend the curves of smaller ones; unlike in the joint fit, nothing ties the
    curves to sum to the whole network. Parts of one signature pool their sweeps.
    """
    options = options or FitOptions()
    if not samples:
        raise CostError("no samples to fit a cost model to; measure at least one configuration")
    reference = samples[0]
    moved_N = [
        frozenset(signature_of[part] for part, share in sample.shares.items() if share != reference.shares.get(part))
        for sample in samples
    ]
    curves = {signature: Curve(0.0) for signature in signature_of.values()}
    known: set[str] = set()
    for family in sorted(set(moved_N), key=lambda signatures: (len(signatures), sorted(signatures))):
        fresh = family - known
        if not fresh:
            continue
        own = {part: name for part, name in signature_of.items() if name in fresh}
        law = AdditiveLaw(0.0, curves, dict(signature_of))
        full = law.totals(reference.shares)
        kept = [Sample({part: reference.shares[part] for part in own}, reference.latency_ms, reference.stderr_ms)]
        for sample, moved in zip(samples, moved_N, strict=True):
            if moved - known == fresh:
                totals = law.totals(sample.shares)
                saved_ms = math.fsum(full[name] - totals[name] for name in known)
                shares = {part: sample.shares[part] for part in own}
                kept.append(Sample(shares, sample.latency_ms + saved_ms, sample.stderr_ms))
        curves |= fit_law(kept, own, options).curves
        known |= fresh
    partial = AdditiveLaw(0.0, curves, dict(signature_of), frozenset(curves.keys() - known))
    left = [sample.latency_ms - math.fsum(partial.totals(sample.shares).values()) for sample in samples]
    return AdditiveLaw(max(0.0, float(np.median(left))), curves, partial.signature_of, partial.fixed)
