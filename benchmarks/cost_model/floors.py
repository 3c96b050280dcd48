"""Does a floor of launches help? The law alone and the larger of law and floor, on left-out and on held-out samples.

Left-out samples are among those fitted to, a fifth at a time; they alone decide. Held-out ones only judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.cost_model.fitted import Fitted

from apportion.cost.audit import audit
from apportion.cost.calibrate import ALPHA
from apportion.cost.fit import KNOTS, FitOptions
from apportion.cost.model import CostModel
from apportion.cost.view import choose_options, left_out_error


def judge_floor(one: Fitted) -> dict[str, Any]:
    """Both laws on one pair, each with the knots that suit it best, and which of them was taken."""
    parts = one.calibrated.parts
    to_fit = one.to_fit(parts)
    law = choose_options(to_fit, parts.signature_of)
    tried = [replace(law, knots=knots, launches=True) for knots in ((1.0,), KNOTS)]
    floor = min(tried, key=lambda options: left_out_error(to_fit, parts.signature_of, options))
    taken = one.calibrated.cost.launches is not None
    return {"taken": taken, "law": _judge(one, law), "floor": _judge(one, floor)}


def _judge(one: Fitted, options: FitOptions) -> dict[str, float | None]:
    parts = one.calibrated.parts
    to_fit = one.to_fit(parts)
    plain = CostModel.fit(
        to_fit, parts.signature_of, knots=options.knots, ridge=options.ridge, launches=options.launches
    )
    found = audit(plain.bounded(one.to_bound(parts), ALPHA, drift=one.saved.swept.drift), one.held_out(parts))
    figures = {
        "left_out": left_out_error(to_fit, parts.signature_of, options),
        "median": found.median_rel_error,
        "p95": found.p95_rel_error,
        "coverage": found.coverage,
        "looseness": found.looseness,
    }
    return {name: None if value is None else round(value, 4) for name, value in figures.items()}


def print_floors(rows: Mapping[str, Mapping[str, Any]]) -> None:
    names = ("left out", "median", "p95", "held", "looseness")
    print(f"\n| network, target | {' | '.join(names)} | {' | '.join(f'{name}, floor' for name in names)} | taken |")
    print("|---" * 12 + "|")
    for pair, row in rows.items():
        cells = [_cell(value) for law in ("law", "floor") for value in row["launches"][law].values()]
        print(f"| {pair} | {' | '.join(cells)} | {'yes' if row['launches']['taken'] else 'no'} |")


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
