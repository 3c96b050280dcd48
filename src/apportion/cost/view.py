"""Choosing how sizes are seen: the channels that kernels work on, whether activations have a price, and the law."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from apportion.cost.draw import Sizes
from apportion.cost.fit import KNOTS, FitOptions
from apportion.cost.launches import fit_launches
from apportion.cost.parts import Parts, View
from apportion.cost.sample import Sample

GRIDS = (8, 16, 32, 64)
VIEWS = tuple(
    View(grid, grid_in, activations)
    for activations in (False, True)
    for grid, grid_in in ((1, 1), *((grid, read) for grid in GRIDS for read in (1, grid)))
)
PLAIN_VIEWS = tuple(view for view in VIEWS if not view.activations)
RIDGES = (1e-6, 1e-4, 1e-3)
RIDGES_TO_WORK = (1e-3, 1e-2, 1e-1, 1.0)
NUM_FOLDS = 8
CLEARLY = 0.9  # a view or a floor stays under this share of the error without it
ABOUT = 0.97  # errors this close are taken for the same
_LINEAR_RIDGE = 1e-2

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Viewed:
    """The parts under the chosen view, and the cross-validated error of every view that was tried."""

    parts: Parts
    error_of: Mapping[View, float]


def resee(parts: Parts, sizes: Sequence[Sizes], samples: Sequence[Sample]) -> list[Sample]:
    """The same measurements with shares under the view of ``parts``."""
    return [
        Sample(parts.shares(parts.partition.keep(size)), sample.latency_ms, sample.stderr_ms)
        for size, sample in zip(sizes, samples, strict=True)
    ]


def choose_view(parts: Parts, sizes: Sequence[Sizes], samples: Sequence[Sample], *, activations: bool = True) -> Viewed:
    """The view whose linear law predicts left-out samples best; the plain one unless that is clearly better.

    Every view is judged by the root mean square over samples, outliers clipped, of the relative error that a
    non-negative least-squares fit to the other folds makes. The plain view stays unless the best one lowers that error
    by a tenth; of views about as good as the best one, the one that departs least from the plain one is taken. Without
    ``activations`` they get no price: a module moved alone moves what it writes and its layers' work alike, which tells
    no price of one from the other.
    """
    latency_N = np.array([sample.latency_ms for sample in samples])
    errors: dict[View, float] = {}
    for view in VIEWS if activations else PLAIN_VIEWS:
        seen = parts.seen(view)
        errors[view] = _cross_validate(_design(seen, resee(seen, sizes, samples)), latency_N)
    least = min(errors.values())
    if least >= CLEARLY * errors[VIEWS[0]]:
        best = VIEWS[0]
    else:
        best = min(
            (view for view in errors if ABOUT * errors[view] <= least), key=lambda view: (view.departures, errors[view])
        )
    return Viewed(parts.seen(best), errors)


def choose_options(
    samples: Sequence[Sample],
    signature_of: Mapping[str, str],
    *,
    launches: bool = False,
    work: Mapping[str, float] | None = None,
) -> FitOptions:
    """Straight lines or bent ones, and how much ridge, by cross-validation of the law itself.

    With ``launches`` a floor under the law is tried as well, and taken where it lowers the error by a tenth. With
    ``work``, the operations of a part of every signature, the ridge is towards these.
    """
    ridges = RIDGES if work is None else RIDGES_TO_WORK
    plain = [FitOptions(knots=knots, ridge=ridge, work=work) for knots, ridge in product(((1.0,), KNOTS), ridges)]
    best, error = _least(plain, samples, signature_of)
    if launches:
        floored = [replace(best, knots=knots, launches=True) for knots in ((1.0,), KNOTS)]
        other, lower = _least(floored, samples, signature_of)
        if lower < CLEARLY * error:
            return other
    return best


def left_out_error(
    samples: Sequence[Sample], signature_of: Mapping[str, str], options: FitOptions, num_folds: int = 5
) -> float:
    """The root mean square of the relative errors on samples that a fit to the other folds has not seen."""
    squares: list[float] = []
    for fold in range(num_folds):
        train = [sample for index, sample in enumerate(samples) if index % num_folds != fold]
        if not train:
            continue
        law, floor = fit_launches(train, signature_of, options)
        for sample in samples[fold::num_folds]:
            predicted = max(law.predict(sample.shares), 0.0 if floor is None else floor(sample.shares))
            squares.append((predicted / sample.latency_ms - 1.0) ** 2)
    return math.sqrt(math.fsum(squares) / max(1, len(squares)))


def _least(
    candidates: Sequence[FitOptions], samples: Sequence[Sample], signature_of: Mapping[str, str]
) -> tuple[FitOptions, float]:
    """The first of least error, and that error."""
    errors = [left_out_error(samples, signature_of, options) for options in candidates]
    place = errors.index(min(errors))
    return candidates[place], errors[place]


def _design(parts: Parts, samples: Sequence[Sample]) -> Array:
    """Columns: one, and for every signature the sum of its parts' shares and the number of its parts that are there."""
    signatures = sorted(set(parts.signature_of.values()))
    column = {signature: 1 + 2 * place for place, signature in enumerate(signatures)}
    design = np.zeros((len(samples), 1 + 2 * len(signatures)))
    design[:, 0] = 1.0
    for row, sample in enumerate(samples):
        for part, share in sample.shares.items():
            place = column[parts.signature_of[part]]
            design[row, place] += share
            design[row, place + 1] += share > 0.0
    moved = np.ptp(design, axis=0) > 0.0
    moved[0] = True
    return design[:, moved]


def _cross_validate(design_NC: Array, latency_N: Array) -> float:
    size_C = design_NC.max(axis=0)
    scaled_NC = design_NC / np.where(size_C > 0.0, size_C, 1.0)
    rows_NC = scaled_NC / latency_N[:, None] * np.median(latency_N)
    num_columns = rows_NC.shape[1]
    ridge_CC = _LINEAR_RIDGE * np.eye(num_columns)
    ridge_CC[0, 0] = 0.0
    error_N = np.zeros(len(latency_N))
    for fold in range(NUM_FOLDS):
        held_N = np.arange(len(latency_N)) % NUM_FOLDS == fold
        stacked = np.vstack([rows_NC[~held_N], ridge_CC])
        goal = np.concatenate([np.ones(int((~held_N).sum())), np.zeros(num_columns)])
        weight_C, _ = nnls(stacked, goal)
        error_N[held_N] = np.abs(rows_NC[held_N] @ weight_C - 1.0)
    return float(np.sqrt(np.mean(np.minimum(error_N, 3.0 * np.median(error_N)) ** 2)))
