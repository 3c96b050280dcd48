"""The floor of launches: a made-up one comes back, more work never costs less, a clock without one is left plain."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cost.curve import Curve
from apportion.cost.fit import FitOptions
from apportion.cost.launches import Launches, fit_launches
from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.sample import CostError, Sample
from apportion.cost.transfer import transfer
from apportion.cost.view import choose_options, left_out_error

PARTS = [f"{kind}{place}" for place in range(4) for kind in ("attn", "mlp", "block")]
SIGNATURE_OF = {part: part.rstrip("0123") for part in PARTS}
CURVES = {"attn": Curve(0.05, (1.0,), (1.0,)), "mlp": Curve(0.05, (1.0,), (2.0,)), "block": Curve(0.1)}
LAW = AdditiveLaw(0.2, CURVES, SIGNATURE_OF)
LAUNCHES = Launches(0.6, 0.5)
TRUTH = CostModel(LAW, launches=LAUNCHES)
ASKED = FitOptions(knots=(1.0,), ridge=0.0, launches=True)


def draw_shares(rng):
    """Blocks are there or not as a whole; the widths of those that are there are drawn together, as budgets do."""
    width = rng.uniform(0.05, 1.0)
    shares = {}
    for place in range(4):
        there = float(place == 0 or rng.uniform() < 0.7)
        for kind in ("attn", "mlp"):
            shares[f"{kind}{place}"] = there * float(np.clip(width * rng.uniform(0.6, 1.4), 0.05, 1.0))
        shares[f"block{place}"] = there
    return shares


def draw(rng, count, model=TRUTH, noise=0.0, stderr=0.0):
    rows = [draw_shares(rng) for _ in range(count)]
    latencies = [model.predict(row) * float(np.exp(noise * rng.standard_normal())) for row in rows]
    return [Sample(row, latency, stderr * latency) for row, latency in zip(rows, latencies, strict=True)]


def on_floor(model, sample):
    return model.launches(sample.shares) > model.law.predict(sample.shares)


def test_a_made_up_floor_comes_back_exactly():
    samples = draw(np.random.default_rng(0), 60)
    bound = [on_floor(TRUTH, sample) for sample in samples]
    assert 10 < sum(bound) < 50, "both have to show"
    law, launches = fit_launches(samples, SIGNATURE_OF, ASKED)
    assert launches.always_ms == pytest.approx(LAUNCHES.always_ms, abs=1e-4)
    assert launches.each_ms == pytest.approx(LAUNCHES.each_ms, abs=1e-4)
    fitted = CostModel(law, launches=launches)
    for sample in draw(np.random.default_rng(1), 40):
        assert fitted.predict(sample.shares) == pytest.approx(sample.latency_ms, rel=1e-4)


def test_noise_that_all_launches_share_does_not_hide_the_floor():
    samples = [
        Sample(s.shares, s.latency_ms, 0.15 * s.latency_ms if on_floor(TRUTH, s) else 0.0)
        for s in draw(np.random.default_rng(2), 60)
    ]
    law, launches = fit_launches(samples, SIGNATURE_OF, ASKED)
    assert all(max(law.predict(s.shares), launches(s.shares)) == pytest.approx(s.latency_ms, rel=1e-3) for s in samples)


def test_a_floor_is_chosen_where_there_is_one():
    samples = draw(np.random.default_rng(3), 40, noise=0.01)
    options = choose_options(samples, SIGNATURE_OF, launches=True)
    assert options.launches
    assert not choose_options(samples, SIGNATURE_OF).launches
    plain = FitOptions(knots=options.knots, ridge=options.ridge)
    assert left_out_error(samples, SIGNATURE_OF, options) < 0.5 * left_out_error(samples, SIGNATURE_OF, plain)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_clock_without_a_floor_keeps_the_plain_law(seed):
    samples = draw(np.random.default_rng(seed), 40, CostModel(LAW), noise=0.01)
    assert not choose_options(samples, SIGNATURE_OF, launches=True).launches


def test_a_fit_that_is_not_asked_for_a_floor_has_none():
    samples = draw(np.random.default_rng(4), 30)
    assert CostModel.fit(samples, SIGNATURE_OF, residual="off").launches is None
    with_floor = CostModel.fit(samples, SIGNATURE_OF, launches=True)
    assert with_floor.launches is not None
    assert with_floor.monotone


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.1, 100.0), min_size=6, max_size=12), st.integers(0, 1000))
def test_whatever_was_measured_more_work_never_costs_less(latencies, seed):
    rng = np.random.default_rng(seed)
    samples = [Sample(draw_shares(rng), value) for value in latencies]
    model = CostModel.fit(samples, SIGNATURE_OF, launches=True, residual="off", knots=(1.0,))
    less = draw_shares(rng)
    more = {part: max(share, float(rng.uniform())) for part, share in less.items()}
    assert model.predict(less) <= model.predict(more) * (1 + 1e-9)


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_it_is_convex_while_the_same_parts_are_there(seed, weight):
    rng = np.random.default_rng(seed)
    one, other = ({part: float(rng.uniform(0.01, 1.0)) for part in PARTS} for _ in range(2))
    between = {part: weight * one[part] + (1 - weight) * other[part] for part in PARTS}
    assert TRUTH.predict(between) <= weight * TRUTH.predict(one) + (1 - weight) * TRUTH.predict(other) + 1e-9


def test_tensors_predict_what_numbers_predict_with_gradients():
    rows = [draw_shares(np.random.default_rng(seed)) for seed in range(40)]
    share_NP = torch.tensor([[row[part] for part in PARTS] for row in rows], dtype=torch.float64, requires_grad=True)
    predicted_N = TRUTH.predict_tensor(share_NP, PARTS)
    assert predicted_N.tolist() == pytest.approx([TRUTH.predict(row) for row in rows])
    predicted_N.sum().backward()
    floor_N = np.array([on_floor(TRUTH, Sample(row, 1.0)) for row in rows])
    assert 0 < floor_N.sum() < len(rows)
    assert (share_NP.grad.numpy()[floor_N] == 0).all()
    assert (share_NP.grad.numpy()[~floor_N].sum(1) > 0).all()


@pytest.mark.parametrize(("width", "ramp"), [(0.9, 0.0), (0.05, 0.0), (0.05, 0.1)])
def test_gradients_equal_finite_differences(width, ramp):
    share_P = torch.full((len(PARTS),), width, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: TRUTH.predict_tensor(s, PARTS, ramp), (share_P,), eps=1e-6)


def test_on_the_floor_only_parts_that_go_save_time():
    thin = {part: 1.0 if part.startswith("block") else 0.2 for part in PARTS}
    assert TRUTH.saving(thin, "mlp0", 0.1) == 0.0
    assert TRUTH.saving(thin, "block0", 0.0) == pytest.approx(LAUNCHES.each_ms)
    assert TRUTH.price("mlp0", 0.2) == pytest.approx(0.45)  # the law's, floor or not


def test_a_file_brings_the_floor_back_and_old_files_have_none(tmp_path):
    TRUTH.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == TRUTH
    fields = json.loads((tmp_path / "cost.json").read_text())
    spoilt = fields | {"launches": {"always_ms": -1.0, "each_ms": 0.1}}
    with pytest.raises(CostError, match="at least 0"):
        CostModel.from_json(spoilt)
    del fields["launches"]
    with pytest.raises(CostError, match="launches"):
        CostModel.from_json(fields)
    assert CostModel.from_json(fields | {"apportion_cost": 1}) == CostModel(LAW)


def test_a_slower_target_has_a_slower_floor():
    slower = CostModel(
        AdditiveLaw(2.5 * LAW.intercept_ms, {name: curve.scaled(2.5) for name, curve in CURVES.items()}, SIGNATURE_OF),
        launches=LAUNCHES.scaled(2.5),
    )
    moved = transfer(TRUTH, draw(np.random.default_rng(5), 8, slower))
    for sample in draw(np.random.default_rng(6), 20, slower):
        assert moved.predict(sample.shares) == pytest.approx(sample.latency_ms, rel=1e-3)


def test_wrong_floors_and_fits_are_refused():
    with pytest.raises(CostError, match="at least 0"):
        Launches(0.1, float("nan"))
    with pytest.raises(CostError, match="least squares, not envelope"):
        FitOptions(loss="envelope", launches=True)
    with pytest.raises(CostError, match="either sweeps or a floor"):
        CostModel.fit(draw(np.random.default_rng(0), 3), SIGNATURE_OF, sweeps=True, launches=True)
