"""Grid audits of made-up devices: stairs, penalties off a grid, smooth devices and noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cost.grid import audit_grid, find_inversions
from apportion.cost.sample import CostError

FINE = [*range(512, 1025, 64), *range(520, 1025, 8), *range(513, 1024, 37)]
WIDTHS = sorted(set(FINE))


def readings(rng, cost, noise):
    latency = np.array([cost(width) for width in WIDTHS]) / 100
    return WIDTHS, (latency * (1 + noise * rng.standard_normal(len(WIDTHS)))).tolist(), (noise * latency).tolist()


def test_int8_widths_off_the_grid_cost_more_than_the_next_multiple():
    rng = np.random.default_rng(0)
    result = audit_grid(*readings(rng, lambda w: w * (1.0 if w % 64 == 0 else 1.16), noise=0.003))
    assert result.step == 64
    by_step = {row.step: row for row in result.rows}
    assert by_step[64].num_inversions == 0
    assert by_step[64].premium_ratio == pytest.approx(0.16, abs=0.01)
    assert by_step[8].num_inversions > 0
    assert by_step[8].span >= 1
    assert "multiples of 64" in result.reason


def test_a_staircase_is_used_at_its_tread():
    rng = np.random.default_rng(1)
    result = audit_grid(*readings(rng, lambda w: -(-w // 32) * 32, noise=0.002))
    assert result.step == 32


def test_a_smooth_device_needs_no_grid():
    rng = np.random.default_rng(2)
    result = audit_grid(*readings(rng, lambda w: w**1.5, noise=0.002), tolerance=0.001)
    assert result.step == 1
    assert all(row.num_inversions == 0 for row in result.rows)


def test_noise_alone_is_rarely_called_an_inversion():
    rng = np.random.default_rng(3)
    false = 0
    for _ in range(200):
        latency = 1.0 + 0.05 * rng.standard_normal(12)
        false += bool(find_inversions(list(range(1, 13)), latency.tolist(), [0.05] * 12, tolerance=0.0))
    assert false / 200 <= 0.05 + 5 * np.sqrt(0.05 * 0.95 / 200)


def test_a_device_without_order_gets_no_grid_and_its_span():
    widths = list(range(64, 64 * 9, 64))
    result = audit_grid(widths, [float(9 - i) for i in range(8)], steps=(64, 128))
    assert result.step is None
    assert result.rows[0].span == 7
    assert "measure each width" in result.reason


@settings(deadline=None)
@given(st.lists(st.floats(1.0, 2.0), min_size=3, max_size=8))
def test_exact_readings_count_every_pair_out_of_order(latencies):
    found = find_inversions(list(range(len(latencies))), latencies, [0.0] * len(latencies), tolerance=0.0)
    expected = {(i, j) for i, a in enumerate(latencies) for j, b in enumerate(latencies) if i < j and a > b}
    assert {(one.width, one.larger) for one in found} == expected
    assert max((one.span for one in found), default=0) == max((j - i for i, j in expected), default=0)


def test_steps_finer_than_the_widths_read_are_not_judged():
    result = audit_grid([64, 128, 192, 256], [1.0, 2.0, 3.0, 4.0])
    assert min(row.step for row in result.rows) == 64
    assert result.step == 64


def test_the_table_fits_a_terminal_and_the_json_holds_the_answer():
    result = audit_grid(*readings(np.random.default_rng(0), lambda w: w * (1.0 if w % 64 == 0 else 1.16), 0.003))
    assert max(len(line) for line in result.table().splitlines()) <= 80
    assert "<- use" in result.table()
    assert result.to_json()["step"] == 64


def test_readings_that_do_not_pair_up_are_refused():
    with pytest.raises(CostError, match="2 widths"):
        audit_grid([8, 16], [1.0, 2.0])
    with pytest.raises(CostError, match="each width once"):
        audit_grid([8, 8, 16, 24], [1.0, 2.0, 3.0, 4.0])
