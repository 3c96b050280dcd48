"""The page of a fit: every part and every move is on it, and the bound is told with its failures."""

from __future__ import annotations

from apportion.report.fit import bound_line, write_fit

PRICES = {
    "loss": "likeness",
    "unit": "ms",
    "parts": {"prune.head": {"price": 0.5, "value": 3}, "quantise": {"price": 0.1, "value": "int8"}},
    "steps": [
        {"knob": "quantise", "value": "int8", "predicted_loss": 0.1, "loss": 0.2},
        {"knob": "prune.head", "value": 3, "predicted_loss": 0.3, "loss": 0.1},
    ],
    "predicted_loss": 0.4,
    "lost": 0.3,
    "bound": {"upper": 0.45, "exceeded": False, "num_exceeded": 2, "num_left_out": 24},
}


def test_the_page_shows_parts_moves_and_bound(tmp_path):
    write_fit(PRICES, "model: 60%", tmp_path / "prices.html")
    page = (tmp_path / "prices.html").read_text()
    for part in ("prune.head", "quantise", "2 of 24 earlier runs", "bound 0.45 (kept"):
        assert part in page
    assert "fresh check" not in page
    assert "exceeded;" in bound_line({**PRICES, "bound": {**PRICES["bound"], "exceeded": True}})
    assert "bound" not in bound_line({**PRICES, "bound": None})


def test_costs_that_were_measured_stand_beside_those_that_were_read(tmp_path):
    check = {"after": 7, "knob": "prune.head", "value": 3, "predicted": 4.5, "measured": 5.25, "stderr": 0.125}
    write_fit({**PRICES, "cost": "latency@ort-cpu-1t", "checks": [check]}, "model: 60%", tmp_path / "prices.html")
    page = (tmp_path / "prices.html").read_text()
    for part in ("latency@ort-cpu-1t as read and as measured", "[4.5]", "[5.25]", "[0.125]"):
        assert part in page
