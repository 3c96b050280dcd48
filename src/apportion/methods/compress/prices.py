"""What a run learned about its parts: the price of each, the price of the limits, and how far losses add up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apportion.core.ledger import Row
from apportion.errors import DataError
from apportion.methods.compress.bound import LossBound, composition

SHIPPED = Path(__file__).with_name("bound.json")


def tell_prices(rows: Sequence[Row], cost: str, quality: str, unit: str) -> dict[str, Any]:
    """The prices and the composition of a run, as JSON.

    Args:
        rows: the ledger of a run.
        cost: the key of the cost, such as ``latency@ort-cpu-1t``.
        quality: the reading that moves were weighed by.
        unit: of the cost.
    """
    moves = composition(rows, cost, quality)
    told: dict[str, Any] = {
        "loss": quality,
        "cost": cost,
        "unit": unit,
        "parts": part_prices(rows, cost, quality),
        "limit": limit_price(rows, cost, quality),
        "steps": [asdict(step) for step in moves.steps],
        "checks": told_checks(rows, cost),
        "predicted_loss": moves.predicted_loss,
        "lost": moves.loss,
        "bound": None,
    }
    bound, about = read_bound(SHIPPED)
    if moves.steps and about == quality:
        told["bound"] = {
            **asdict(bound),
            "upper": bound.upper(moves),
            "exceeded": bound.exceeded_by(moves),
            "violation_rate": bound.violation_rate,
            "violation_rate_upper": bound.violation_rate_upper,
        }
    return told


def part_prices(rows: Sequence[Row], cost: str, quality: str) -> dict[str, dict[str, Any]]:
    """For every knob that was read, what its newest move lost for each unit of cost saved, the dearest part first.

    A part is dear where taking from it loses much; parts whose newest move saved nothing have no price.
    """
    found: dict[str, dict[str, Any]] = {}
    here = rows[0] if rows else None
    for row in rows[1:]:
        if row.kind == "check" or row.knob is None:
            continue
        assert here is not None
        lost, saved = _fall(here, row, quality), _fall(here, row, cost)
        if saved > 0:
            found[row.knob] = {
                "price": lost / saved,
                "value": row.value,
                "lost": lost,
                "saved": saved,
                "step": row.step,
            }
        if row.accepted:
            here = row
    return dict(sorted(found.items(), key=lambda item: -item[1]["price"]))


def limit_price(rows: Sequence[Row], cost: str, quality: str) -> float | None:
    """What the last unit of cost cost in quality: the price of the last move that saved; None where none did."""
    price, here = None, rows[0] if rows else None
    for row in rows[1:]:
        if row.kind == "move" and row.accepted:
            assert here is not None
            saved = _fall(here, row, cost)
            price = _fall(here, row, quality) / saved if saved > 0 else price
            here = row
    return price


def told_checks(rows: Sequence[Row], cost: str) -> list[dict[str, Any]]:
    """Every fresh check of a run: the cost as the loop read it there beside the cost as measured.

    ``after`` is the step of the move that was checked. ``saved`` is what was saved since the check before, as read and
    as measured; None at the first, before which nothing was measured. Checks after a repair save nothing.
    """
    checks: list[dict[str, Any]] = []
    here = rows[0] if rows else None
    for row in rows[1:]:
        if row.kind == "move" and row.accepted:
            here = row
        if row.kind != "check" or cost not in row.readings:
            continue
        assert here is not None
        found = row.readings[cost]
        now = {"predicted": here.readings[cost].value, "measured": found.value}
        saved = {name: checks[-1][name] - value for name, value in now.items()} if checks else None
        told = {"step": row.step, "after": here.step, "knob": here.knob, "value": here.value}
        checks.append({**told, **now, "stderr": found.stderr, "accepted": row.accepted, "saved": saved})
    return checks


def _fall(before: Row, after: Row, name: str) -> float:
    return before.readings[name].value - after.readings[name].value


def write_bound(bound: LossBound, quality: str, path: Path) -> None:
    path.write_text(json.dumps({"apportion_bound": 1, "quality": quality, **asdict(bound)}, indent=1) + "\n")


def read_bound(path: Path) -> tuple[LossBound, str]:
    """A saved bound, and the reading that it is about."""
    try:
        fields = json.loads(path.read_text())
        if fields.pop("apportion_bound") != 1:
            raise ValueError
        quality = str(fields.pop("quality"))
        bound = LossBound(**fields)
        if not (math.isfinite(bound.margin) and 0 < bound.alpha < 1 and bound.num_runs > 0):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is no bound on composed losses; make one with recipes/train_policy.py") from None
    return bound, quality
