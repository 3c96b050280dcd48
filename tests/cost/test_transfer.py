"""Transfer to a new target: from few runs it beats refitting, from many it finds each kind's factor."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.cost.curve import Curve
from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.residual import Residual
from apportion.cost.sample import CostError, Sample
from apportion.cost.transfer import transfer

KINDS = {"attn": 1.6, "mlp": 2.4, "norm": 2.0}
SIGNATURE_OF = {f"{kind}{i}": f"{kind}/{i}" for kind in KINDS for i in range(4)}
KIND_OF = {signature: signature.split("/")[0] for signature in SIGNATURE_OF.values()}


def laws(rng):
    curves = {name: Curve(float(rng.uniform(0.1, 0.3)), (1.0,), (float(rng.uniform(0.5, 2)),)) for name in KIND_OF}
    source = AdditiveLaw(1.0, curves, SIGNATURE_OF)
    moved = {name: curve.scaled(KINDS[KIND_OF[name]]) for name, curve in curves.items()}
    return source, AdditiveLaw(2.0, moved, SIGNATURE_OF)


def draw(rng, law, count, noise=0.0):
    rows = [{part: float(rng.integers(0, 9)) / 8 for part in SIGNATURE_OF} for _ in range(count)]
    return [Sample(row, law.predict(row) * (1 + noise * float(rng.standard_normal()))) for row in rows]


def error(model, held):
    return np.mean([abs(model.predict(sample.shares) / sample.latency_ms - 1) for sample in held])


@pytest.mark.parametrize("seed", range(3))
def test_from_six_runs_it_beats_refitting_and_one_global_factor(seed):
    rng = np.random.default_rng(seed)
    source, target = laws(rng)
    few, held = draw(rng, target, 6, noise=0.01), draw(rng, target, 200)
    moved = transfer(CostModel(source), few, KIND_OF)
    refitted = CostModel.fit(few, SIGNATURE_OF)
    ratio = np.median([sample.latency_ms / source.predict(sample.shares) for sample in few])
    globally = transfer(CostModel(source), few, KIND_OF, spread=1e-4)
    assert error(moved, held) < 0.03
    assert error(moved, held) < error(refitted, held) / 2
    assert error(moved, held) < error(globally, held)
    assert globally.predict(few[0].shares) / source.predict(few[0].shares) == pytest.approx(ratio, rel=0.05)


def test_many_runs_find_the_factors():
    rng = np.random.default_rng(9)
    source, target = laws(rng)
    moved = transfer(CostModel(source), draw(rng, target, 100), KIND_OF, spread=10.0)
    for name, kind in KIND_OF.items():
        assert moved.law.curves[name](1.0) / source.curves[name](1.0) == pytest.approx(KINDS[kind], rel=1e-3)


def test_one_run_gives_one_factor_and_keeps_the_residual():
    rng = np.random.default_rng(3)
    source, _ = laws(rng)
    residual = Residual(20.0, {"attn/0": source.full_totals()["attn/0"]}, {("attn/0", "attn/0"): 0.01})
    model = CostModel(source, residual)
    full = dict.fromkeys(SIGNATURE_OF, 1.0)
    moved = transfer(model, [Sample(full, 3 * model.predict(full))])
    half = dict.fromkeys(SIGNATURE_OF, 0.5)
    assert moved.predict(half) == pytest.approx(3 * model.predict(half), rel=0.02)
    assert moved.residual is not None


def test_nothing_measured_or_no_kind_is_refused():
    source = CostModel(laws(np.random.default_rng(0))[0])
    with pytest.raises(CostError, match="no runs"):
        transfer(source, [])
    with pytest.raises(CostError, match="no kind"):
        transfer(source, [Sample(dict.fromkeys(SIGNATURE_OF, 1.0), 1.0)], {"attn/0": "attn"})
