"""The audit against hand-made models whose every figure is known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from apportion.cost.audit import audit
from apportion.cost.bound import UpperBound
from apportion.cost.curve import Curve
from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.sample import CostError, Sample

LAW = AdditiveLaw(1.0, {"a": Curve(0.0, (1.0,), (4.0,))}, {"p": "a", "q": "a"})
BOUND = UpperBound(0.05, (0.1,), (99,))


def draw(count, scale=lambda i: 1.0, stderr=0.0):
    rng = np.random.default_rng(0)
    rows = [{part: float(rng.uniform()) for part in LAW.signature_of} for _ in range(count)]
    return [Sample(row, LAW.predict(row) * scale(i), stderr) for i, row in enumerate(rows)]


def test_a_perfect_model_has_no_errors():
    result = audit(CostModel(LAW, bound=BOUND), draw(60))
    assert (result.median_rel_error, result.p95_rel_error, result.kappa) == pytest.approx((0.0, 0.0, 1.0))
    assert (result.coverage, result.looseness) == pytest.approx((1.0, 0.1))
    assert (result.spearman, result.kendall, result.band_spearman, result.band_kendall) == pytest.approx((1,) * 4)
    assert result.num_bands > 10
    assert result.num_violations == result.num_model_violations == 0
    assert result.num_ordered > 100
    assert result.coverage_lower == pytest.approx(1 - (1 - 0.05 ** (1 / 60)), abs=1e-6)


def test_known_errors_are_read_back():
    result = audit(CostModel(LAW, bound=BOUND), draw(40, scale=lambda i: 1.25 if i % 10 == 0 else 1.0))
    assert result.coverage == pytest.approx(0.9)
    assert result.max_rel_error == pytest.approx(0.2)
    assert result.median_rel_error == pytest.approx(0.0)
    assert result.kappa == pytest.approx(1.25)
    assert result.eta == pytest.approx(0.2)
    assert result.looseness == pytest.approx(0.9 * 0.1 + 0.1 * (1.1 / 1.25 - 1))


def test_a_clock_that_runs_backwards_is_counted_only_beyond_noise():
    shares = [{"p": i / 10, "q": 0.5} for i in range(11)]
    backwards = [Sample(row, 20.0 - i, 0.01) for i, row in enumerate(shares)]
    noisy = [Sample(row, 10.0 - 0.01 * i, 5.0) for i, row in enumerate(shares)]
    assert audit(CostModel(LAW), backwards).num_violations == 55
    assert audit(CostModel(LAW), noisy).num_violations == 0
    assert audit(CostModel(LAW), backwards).spearman == pytest.approx(-1.0)


def test_a_global_order_can_hide_a_disorder_inside_bands():
    rng = np.random.default_rng(4)
    result = audit(CostModel(LAW), draw(150, scale=lambda i: float(np.exp(0.05 * rng.standard_normal()))))
    assert result.spearman > 0.95
    assert result.band_spearman < 0.7


@pytest.mark.parametrize("bound", [None, BOUND, UpperBound(0.05, (float("inf"),), (3,))])
def test_the_table_fits_a_terminal_and_the_json_is_json(bound):
    result = audit(CostModel(LAW, bound=bound), draw(30))
    lines = result.table().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert ("no bound" in result.table()) == (bound is None)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["count"] == 30


def test_no_samples_is_an_error():
    with pytest.raises(CostError, match="no held-out samples"):
        audit(CostModel(LAW), [])


def test_a_bound_on_a_menu_is_judged_on_menus():
    samples = draw(20, scale=lambda i: 1.25 if i == 0 else 1.0)
    of_two = UpperBound(0.2, (0.1,), (99,), num_menu=2, method="exchangeable")
    assert audit(CostModel(LAW, bound=of_two), samples).coverage == pytest.approx(18 / 20)  # pairs without the one
    of_many = UpperBound(0.2, (0.1,), (99,), num_menu=21, method="exchangeable")
    assert audit(CostModel(LAW, bound=of_many), samples).coverage is None
