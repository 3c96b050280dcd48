"""Every piece of a cost model on the same saved sweeps: fits that lean upwards, bounds, corrections and transfer.

A piece that is a bound by itself (a quantile, an envelope, a margin) is judged as one: its coverage is the share of
held-out latencies at or below its prediction. The others carry the conformal bound of the samples set aside for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.cost_model.fitted import Fitted

from apportion.cost.calibrate import ALPHA
from apportion.cost.model import CostModel
from apportion.cost.sample import Sample
from apportion.cost.transfer import transfer
from apportion.cost.view import choose_options
from apportion.numerics.stats import quantile

TAU = 0.9
NUM_POINTS = 8  # runs on the other target
NUM_MENU, MENU_ALPHA = 4, 0.2  # 22 scores bound a menu of 4 at 80 %; at 95 % they bound no menu


@dataclass(frozen=True)
class Judged:
    """One piece on one pair: errors of its predictions, and how its bound did."""

    piece: str
    pair: str
    median: float
    p95: float
    coverage: float
    looseness: float
    count: int

    def to_json(self) -> dict[str, object]:
        fields = {name: round(getattr(self, name), 4) for name in ("median", "p95", "coverage", "looseness")}
        return {"piece": self.piece, "pair": self.pair, **fields, "count": self.count}


def judge_pieces(fitted: Sequence[Fitted]) -> list[Judged]:
    """All pieces on all pairs that they can be tried on; transfers between all targets of a network."""
    found = []
    for one in fitted:
        found += own_pieces(one)
    for source in fitted:
        for goal in fitted:
            if source.saved.network == goal.saved.network and source is not goal:
                found += carried_pieces(source, goal)
    return found


def own_pieces(one: Fitted) -> list[Judged]:
    """Fits and bounds of a pair's own samples."""
    parts, model = one.calibrated.parts, one.calibrated.cost
    to_fit, to_bound, unseen = one.to_fit(parts), one.to_bound(parts), one.held_out(parts)
    options = choose_options(to_fit, parts.signature_of)
    shape = {"knots": options.knots, "ridge": options.ridge}
    leaning = CostModel.fit(to_fit, parts.signature_of, loss="quantile", tau=TAU, **shape)
    envelope = CostModel.fit(to_fit, parts.signature_of, loss="envelope", **shape)
    menu = model.bounded(to_bound, MENU_ALPHA, num_menu=NUM_MENU, drift=one.saved.swept.drift)
    single = model.bounded(to_bound, MENU_ALPHA, drift=one.saved.swept.drift)
    return [
        _judge("least squares, bound of one at 95 %", one.name, model, unseen),
        _judge(f"quantile fit ({100 * TAU:g} %)", one.name, leaning, unseen),
        _judge("upper envelope", one.name, envelope, unseen),
        _judge(f"bound of a menu of {NUM_MENU} at {100 - 100 * MENU_ALPHA:g} %", one.name, menu, unseen, NUM_MENU),
        _judge(f"bound of one at {100 - 100 * MENU_ALPHA:g} %, on menus", one.name, single, unseen, NUM_MENU),
    ]


def carried_pieces(source: Fitted, goal: Fitted) -> list[Judged]:
    """The model of one target, corrected by a few runs on another, bounded and judged by that one's samples."""
    parts, plain = source.calibrated.parts, source.calibrated.cost
    points = goal.to_fit(parts)[-NUM_POINTS:]  # drawn ones; anchors come first
    to_bound, unseen = goal.to_bound(parts), goal.held_out(parts)
    kinds = {signature: signature.split()[0] for signature in plain.law.curves}
    models = {
        "affine": plain.recalibrated(points, "affine"),
        "isotonic": plain.recalibrated(points, "isotonic"),
        "transfer": transfer(plain, points, kinds),
    }
    pair = f"{source.name} to {goal.saved.target}"
    label = f"other target, {NUM_POINTS} points:"
    found = [
        _judge(f"{label} {name}", pair, model.bounded(to_bound, ALPHA, drift=goal.saved.swept.drift), unseen)
        for name, model in models.items()
    ]
    return [
        _judge("other target, uncorrected", pair, plain, unseen),
        *found,
        _judge(f"{label} margin", pair, plain.recalibrated(points, "margin"), unseen),
    ]


def _judge(piece: str, pair: str, model: CostModel, unseen: Sequence[Sample], num_menu: int = 1) -> Judged:
    """Coverage is of single configurations, or of all menus of a size: those without a miss among all there are."""
    predictions, latencies_ms = model.pairs(unseen)
    uppers = predictions if model.bound is None else [model.bound(predicted) for predicted in predictions]
    errors = [abs(p / y - 1.0) for p, y in zip(predictions, latencies_ms, strict=True)]
    held = sum(y <= u for u, y in zip(uppers, latencies_ms, strict=True))
    coverage = math.comb(held, num_menu) / math.comb(len(unseen), num_menu)
    looseness = float(np.mean([u / y - 1.0 for u, y in zip(uppers, latencies_ms, strict=True)]))
    return Judged(piece, pair, quantile(errors, 0.5), quantile(errors, 0.95), coverage, looseness, len(unseen))


def print_pieces(judged: Sequence[Judged]) -> None:
    """One row for every piece: medians over its pairs, coverage over all that was held out."""
    print("\n| piece | pairs | median error | p95 | worst p95 | held | looseness |")
    print("|---" * 7 + "|")
    for piece in dict.fromkeys(one.piece for one in judged):
        own = [one for one in judged if one.piece == piece]
        held = sum(one.coverage * one.count for one in own) / sum(one.count for one in own)
        middle = {name: quantile([getattr(one, name) for one in own], 0.5) for name in ("median", "p95", "looseness")}
        print(
            f"| {piece} | {len(own)} | {middle['median']:.1%} | {middle['p95']:.1%} | {max(o.p95 for o in own):.1%} | "
            f"{held:.1%} | {middle['looseness']:.1%} |"
        )
