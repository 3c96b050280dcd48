"""The fit: known laws come back, the solver agrees with NNLS and linear programming, any data gives a monotone law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, nnls

from apportion.cost.curve import Curve
from apportion.cost.fit import FitOptions, choose_knots, fit_curve, fit_law, fit_sweeps, relative_weights, solve
from apportion.cost.law import AdditiveLaw
from apportion.cost.sample import CostError, Sample

SIGNATURE_OF = {"attn0": "attn", "attn1": "attn", "mlp0": "mlp", "mlp1": "mlp", "head": "head"}
LAW = AdditiveLaw(
    0.7,
    {
        "attn": Curve(0.2, (0.25, 0.5, 0.75, 1.0), (0.4, 0.4, 1.0, 1.0)),
        "mlp": Curve(0.1, (0.25, 0.5, 0.75, 1.0), (1.0, 1.0, 1.0, 2.0)),
        "head": Curve(0.3),
    },
    SIGNATURE_OF,
)
EXACT = FitOptions(ridge=0.0)


def draw_shares(rng):
    shares = {part: float(rng.integers(0, 9)) / 8 for part in SIGNATURE_OF}
    return {**shares, "head": float(rng.integers(0, 2))}


def draw_samples(rng, count, noise=0.0, law=LAW):
    rows = [draw_shares(rng) for _ in range(count)]
    return [Sample(row, law.predict(row) * (1 + noise * float(rng.standard_normal()))) for row in rows]


def test_a_known_law_is_recovered_exactly():
    law = fit_law(draw_samples(np.random.default_rng(0), 60), SIGNATURE_OF, EXACT)
    assert law.intercept_ms == pytest.approx(0.7, abs=1e-5)
    for signature, curve in LAW.curves.items():
        share = np.linspace(0.125, 1.0, 8)
        if signature == "head":
            share = share[-1:]
        np.testing.assert_allclose(law.curves[signature].values(share), curve.values(share), atol=1e-5)
    assert law.fixed == frozenset()


@pytest.mark.parametrize("loss", ["quantile", "envelope"])
def test_the_other_losses_recover_it_too_when_there_is_no_noise(loss):
    samples = draw_samples(np.random.default_rng(1), 60)
    law = fit_law(samples, SIGNATURE_OF, FitOptions(loss=loss, ridge=0.0))
    for sample in samples:
        assert law.predict(sample.shares) == pytest.approx(sample.latency_ms, rel=1e-6)


def random_problem(seed, num_rows=30, num_columns=6):
    rng = np.random.default_rng(seed)
    design = np.column_stack([np.ones(num_rows), rng.uniform(0, 2, (num_rows, num_columns - 1))])
    latency = design @ np.array([1.0, 0.0, 2.0, 0.5, 0.0, 1.0]) * rng.uniform(0.8, 1.25, num_rows)
    return design, latency, relative_weights(latency, rng.uniform(0, 0.1, num_rows), 0.02)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_ridge_towards_what_is_likely_agrees_with_nnls(seed):
    design, latency, weight = random_problem(seed)
    middle, size, ridge = np.median(latency), design.max(0), 0.3
    likely = np.random.default_rng(seed).uniform(0, 1, (design.shape[1], 2))
    pull = np.sqrt(ridge) * np.hstack([np.diag(size / middle), -likely])[1:]  # x and z side by side
    rows = np.vstack([np.hstack([design * weight[:, None], np.zeros((len(latency), 2))]), pull])
    expected, _ = nnls(rows, np.append(weight * latency, np.zeros(len(pull))))
    found = solve(design, latency, weight, ridge=ridge, likely_CK=likely)
    np.testing.assert_allclose(found, expected[:-2], atol=1e-4)


@pytest.mark.parametrize(("work", "ratio"), [(None, 1.0), ({"a": 6.0, "b": 2.0}, 3.0)])
def test_what_samples_leave_open_follows_the_operations_where_these_are_known(work, ratio):
    samples = [Sample({"a": share, "b": share}, 1.0 + 4.0 * share) for share in (0.25, 0.5, 0.75, 1.0)]
    law = fit_law(samples, {"a": "a", "b": "b"}, FitOptions(knots=(1.0,), ridge=1e-4, work=work))
    slopes = {name: law.curves[name].slopes_ms[0] for name in ("a", "b")}
    assert slopes["a"] / slopes["b"] == pytest.approx(ratio, rel=1e-3)
    for sample in samples:
        assert law.predict(sample.shares) == pytest.approx(sample.latency_ms, rel=1e-3)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_least_squares_agrees_with_nnls(seed, ridge):
    design, latency, weight = random_problem(seed)
    middle, size = np.median(latency), design.max(0)
    rows = np.sqrt(ridge) * np.diag(size / middle)[1:]
    expected, _ = nnls(np.vstack([design * weight[:, None], rows]), np.append(weight * latency, np.zeros(len(rows))))
    np.testing.assert_allclose(solve(design, latency, weight, ridge=ridge), expected, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pinball_and_envelope_agree_with_linear_programming(seed):
    design, latency, weight = random_problem(seed)
    rows, goal = design * weight[:, None], weight * latency
    count, columns = rows.shape
    eye = np.eye(count)
    program = linprog(
        np.r_[np.zeros(columns), np.full(count, 0.8), np.full(count, 0.2)],
        A_eq=np.hstack([rows, eye, -eye]),
        b_eq=goal,
    )
    x = solve(design, latency, weight, loss="quantile", tau=0.8, ridge=0.0)
    miss = goal - rows @ x
    assert np.maximum(0.8 * miss, -0.2 * miss).sum() == pytest.approx(program.fun, abs=1e-6)
    program = linprog(rows.sum(0), A_ub=-rows, b_ub=-goal)
    x = solve(design, latency, weight, loss="envelope", ridge=0.0)
    assert (rows @ x).sum() == pytest.approx(program.fun, rel=1e-6)
    assert (design @ x >= latency * (1 - 1e-12)).all()


latency = st.floats(0.1, 100.0)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(latency, min_size=3, max_size=8),
    st.integers(0, 1000),
    st.sampled_from(["least_squares", "quantile", "envelope"]),
)
def test_whatever_was_measured_more_work_never_costs_less(latencies, seed, loss):
    rng = np.random.default_rng(seed)
    samples = [Sample(draw_shares(rng), value) for value in latencies]
    law = fit_law(samples, SIGNATURE_OF, FitOptions(loss=loss))
    less = draw_shares(rng)
    more = {part: max(share, float(rng.uniform())) for part, share in less.items()}
    assert law.predict(less) <= law.predict(more) + 1e-9
    for curve in law.curves.values():  # convexity: the constructor refuses falling slopes
        assert curve.jump_ms >= 0
        assert list(curve.slopes_ms) == sorted(curve.slopes_ms)
    if loss == "envelope":
        assert all(law.predict(sample.shares) >= sample.latency_ms * (1 - 1e-12) for sample in samples)


def test_the_quantile_fit_leaves_its_share_above():
    samples = draw_samples(np.random.default_rng(3), 400, noise=0.05)
    law = fit_law(samples, SIGNATURE_OF, FitOptions(loss="quantile", tau=0.9))
    above = np.mean([sample.latency_ms > law.predict(sample.shares) for sample in samples])
    assert above == pytest.approx(0.1, abs=0.03)  # exact up to the number of coefficients over the number of samples


def test_noisy_readings_count_less():
    rows = [Sample({"a": s}, 1 + s) for s in (0.2, 0.4, 0.6, 0.8, 1.0)]
    wrong = 3.0
    sure = fit_law([*rows, Sample({"a": 1.0}, wrong)], {"a": "a"})
    doubtful = fit_law([*rows, Sample({"a": 1.0}, wrong, stderr_ms=5.0)], {"a": "a"})
    assert abs(doubtful.predict({"a": 1.0}) - 2.0) < 0.01 < 0.3 < abs(sure.predict({"a": 1.0}) - 2.0)


def test_parts_that_never_move_are_in_the_intercept_and_are_named():
    samples = [Sample({"a": s, "b": 1.0}, 2.0 + s) for s in (0.25, 0.5, 0.75, 1.0)]
    law = fit_law(samples, {"a": "a", "b": "b"})
    assert law.fixed == {"b"}
    assert law.curves["b"](1.0) == 0.0
    assert law.intercept_ms == pytest.approx(2.0, abs=1e-4)
    assert law.curves["a"].jump_ms == 0.0  # never switched off


def test_parts_only_on_or_off_are_priced_whole():
    samples = [Sample({"a": a, "b": b}, 1.0 + 2 * a + 3 * b) for a in (0.0, 1.0) for b in (0.0, 1.0)]
    law = fit_law(samples, {"a": "a", "b": "b"})
    assert law.curves["a"](0.01) == pytest.approx(2.0, abs=1e-4)
    assert law.curves["b"](0.01) == pytest.approx(3.0, abs=1e-4)


def test_knots_without_evidence_are_dropped():
    assert choose_knots([1.0, 1.0]) == ()
    assert choose_knots([0.5, 1.0]) == (1.0,)
    assert choose_knots([0.25, 0.5, 0.75, 1.0]) == (0.5, 0.75, 1.0)
    assert choose_knots([0.1, 0.2, 0.3]) == (0.25, 1.0)
    assert choose_knots([i / 8 for i in range(9)]) == (0.25, 0.5, 0.75, 1.0)


def test_one_sweep_gives_base_and_curve():
    shares = [0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0]
    curve = Curve(0.3, (0.25, 0.5, 0.75, 1.0), (1.0, 2.0, 2.0, 2.0))
    base, fitted = fit_curve(shares, [5.0 + curve(share) for share in shares], options=EXACT)
    assert base == pytest.approx(5.0, abs=1e-5)
    np.testing.assert_allclose(fitted.values(np.array(shares)), curve.values(np.array(shares)), atol=1e-5)


def test_sweeps_give_the_law_of_an_additive_network():
    full = dict.fromkeys(SIGNATURE_OF, 1.0)
    rows = [full, {**full, "head": 0.0}]
    rows += [{**full, part: i / 8} for part in ("attn0", "mlp1") for i in range(8)]
    law = fit_sweeps([Sample(row, LAW.predict(row)) for row in rows], SIGNATURE_OF, EXACT)
    for sample in draw_samples(np.random.default_rng(5), 20):
        assert law.predict(sample.shares) == pytest.approx(sample.latency_ms, rel=1e-4)


def test_a_sweep_that_moves_several_parts_fits_only_what_smaller_sweeps_left_open():
    law = AdditiveLaw(
        1.0,
        {"in": Curve(0.0, (1.0,), (2.0,)), "out": Curve(0.0, (1.0,), (3.0,)), "block": Curve(0.5)},
        {"in0": "in", "out0": "out", "block0": "block"},
    )
    full = dict.fromkeys(law.signature_of, 1.0)
    rows = [
        full,
        *({**full, "in0": s} for s in (0.25, 0.5)),
        *({**full, "in0": s, "out0": s} for s in (0.25, 0.5, 0.75)),
    ]
    rows.append(dict.fromkeys(full, 0.0))
    samples = [Sample(row, law.predict(row)) for row in rows]
    fitted = fit_sweeps(samples, law.signature_of, EXACT)
    for row in (*rows, {"in0": 0.3, "out0": 0.9, "block0": 1.0}):
        assert fitted.predict(row) == pytest.approx(law.predict(row), rel=1e-4)
    assert fitted.curves["block"](1.0) == pytest.approx(0.5, abs=1e-3)
    wrong = [*samples[:-1], Sample(samples[-1].shares, 2 * samples[-1].latency_ms)]  # bends nothing but the block
    assert fit_sweeps(wrong, law.signature_of, EXACT).curves["out"](1.0) == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([], "no samples"),
        ([Sample({"a": 1.0}, 1.0)], "lacks part"),
        ([Sample({"a": 1.0, "b": 1, "c": 1}, 1.0)], "unknown"),
    ],
)
def test_samples_that_do_not_fit_are_refused(samples, says):
    with pytest.raises(CostError, match=says):
        fit_law(samples, {"a": "a", "b": "b"})


def test_options_and_samples_check_themselves():
    with pytest.raises(CostError, match="least_squares, quantile or envelope"):
        FitOptions(loss="median")
    with pytest.raises(CostError, match="between 0"):
        Sample({"a": 1.5}, 1.0)
    with pytest.raises(CostError, match="above 0"):
        Sample({"a": 1.0}, 0.0)
    with pytest.raises(CostError, match="standard error"):
        Sample({"a": 1.0}, 1.0, float("inf"))
    sample = Sample({"a": 0.5}, 1.0, 0.1)
    assert Sample.from_json(sample.to_json()) == sample
