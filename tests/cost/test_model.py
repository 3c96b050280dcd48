"""The cost model as a whole: prices add up, tensors agree, files come back or are refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from apportion.cost.curve import Curve
from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.recalibrate import Affine, Isotonic, Margin
from apportion.cost.residual import Residual
from apportion.cost.sample import CostError, Sample

SIGNATURE_OF = {"attn0": "attn", "attn1": "attn", "mlp0": "mlp"}
LAW = AdditiveLaw(1.0, {"attn": Curve(0.2, (0.5, 1.0), (1.0, 3.0)), "mlp": Curve(0.1, (1.0,), (2.0,))}, SIGNATURE_OF)
RESIDUAL = Residual(7.5, {"attn": 4.4, "mlp": 2.1}, {(): 0.01, ("mlp",): -0.02, ("attn", "mlp"): 0.05})


def draw(rng, count, noise=0.02, law=LAW):
    rows = [{part: float(rng.integers(0, 9)) / 8 for part in SIGNATURE_OF} for _ in range(count)]
    return [Sample(row, law.predict(row) * float(np.exp(noise * rng.standard_normal())), 0.01) for row in rows]


def whole_model():
    rng = np.random.default_rng(0)
    model = CostModel(LAW, RESIDUAL).recalibrated(draw(rng, 12), "isotonic")
    return model.bounded(draw(rng, 40), alpha=0.1, edges_ms=(3.0,))


def test_fit_recalibrate_bound_and_audit_work_together():
    rng = np.random.default_rng(1)
    model = CostModel.fit(draw(rng, 60), SIGNATURE_OF)
    slow = AdditiveLaw(1.2, {name: curve.scaled(1.2) for name, curve in LAW.curves.items()}, SIGNATURE_OF)
    model = model.recalibrated(draw(rng, 10, law=slow)).bounded(draw(rng, 100, law=slow))
    held = draw(rng, 400, law=slow)
    assert np.median([abs(model.predict(s.shares) / s.latency_ms - 1) for s in held]) < 0.03
    covered = np.mean([s.latency_ms <= model.upper(s.shares) for s in held])
    # the bound's own draw moves its coverage by sqrt(0.05 * 0.95 / 101), the held-out draw by less
    assert abs(covered - 0.95) <= 5 * np.sqrt(0.05 * 0.95 * (1 / 101 + 1 / 400))


def test_prices_add_up_to_the_prediction():
    shares = {"attn0": 0.75, "attn1": 0.0, "mlp0": 0.5}
    model = CostModel(LAW)
    assert model.predict(shares) == pytest.approx(1.0 + sum(model.price(part, s) for part, s in shares.items()))
    assert model.price("attn1", 0.0) == 0.0
    assert model.marginal("attn0", 0.75) == 3.0
    assert model.marginal("attn0", 0.5) == 1.0
    assert model.saving(shares, "attn0", 0.0) == pytest.approx(model.price("attn0", 0.75))
    dearer = CostModel(LAW, recalibration=Affine(0.5, 2.0))
    assert dearer.price("mlp0", 1.0) == pytest.approx(4.2)
    assert dearer.saving(shares, "attn0", 0.0) == pytest.approx(dearer.price("attn0", 0.75))


@pytest.mark.parametrize("recalibration", [None, Affine(0.3, 1.2), Margin(1.1), Isotonic((2.0, 5.0), (3.0, 5.5))])
def test_tensors_predict_what_numbers_predict(recalibration):
    model = CostModel(LAW, RESIDUAL, recalibration)
    parts = ["mlp0", "attn0", "attn1"]
    share = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    predicted = model.predict_tensor(share, parts)
    assert predicted.shape == (2, 5)
    for row, value in zip(share.reshape(-1, 3).tolist(), predicted.flatten().tolist(), strict=True):
        assert model.predict(dict(zip(parts, row, strict=True))) == pytest.approx(value, rel=1e-9)
    predicted.sum().backward()
    assert (share.grad >= 0).all()


def test_gradients_equal_finite_differences():
    model = whole_model()
    parts = list(SIGNATURE_OF)
    share = torch.tensor([0.3, 0.8, 0.6], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: model.predict_tensor(s, parts), (share,), eps=1e-6)


def test_a_file_brings_back_the_same_model(tmp_path):
    model = whole_model()
    model.save(tmp_path / "cost.json")
    loaded = CostModel.load(tmp_path / "cost.json")
    assert loaded == model
    shares = {"attn0": 0.3, "attn1": 1.0, "mlp0": 0.0}
    assert (loaded.predict(shares), loaded.upper(shares)) == (model.predict(shares), model.upper(shares))


def change(fields, path, value):
    *way, last = path
    place = fields
    for key in way:
        place = place[key]
    place[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["apportion_cost"], 99),
        (["law"], None),
        (["law", "intercept_ms"], -1.0),
        (["law", "intercept_ms"], "1"),
        (["law", "curves", "attn", "slopes_ms"], [3.0, 1.0]),
        (["law", "curves", "attn", "slopes_ms"], [3.0]),
        (["law", "curves", "attn", "jump_ms"], float("nan")),
        (["law", "curves"], {}),
        (["law", "signature_of"], {}),
        (["law", "signature_of", "attn0"], "conv"),
        (["residual", "weights"], [[["conv"], 1.0]]),
        (["residual", "totals_ms"], {"conv": 1.0}),
        (["recalibration", "kind"], "cubic"),
        (["recalibration", "outputs_ms"], [1.0]),
        (["bound", "quantiles"], []),
        (["bound", "alpha"], 2.0),
        (["bound", "method"], "magic"),
        (["num_samples"], []),
    ],
)
def test_a_spoilt_file_is_refused_in_one_line(path, value, tmp_path):
    fields = whole_model().to_json()
    change(fields, path, value)
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(CostError) as caught:
        CostModel.load(file)
    assert "\n" not in str(caught.value)


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    with pytest.raises(CostError, match="can't read"):
        CostModel.load(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(CostError, match="not a saved cost model"):
        CostModel.load(tmp_path / "list.json")


def test_wrong_questions_are_answered_in_one_line():
    model = CostModel(LAW)
    with pytest.raises(CostError, match="no upper bound"):
        model.upper(dict.fromkeys(SIGNATURE_OF, 1.0))
    with pytest.raises(CostError, match="lacks part 'mlp0'"):
        model.predict({"attn0": 1.0, "attn1": 1.0})
    with pytest.raises(CostError, match="no part 'conv'"):
        model.price("conv", 1.0)
    with pytest.raises(CostError, match="between 0"):
        model.price("attn0", 2.0)
    with pytest.raises(CostError, match="2 shares for 3 parts"):
        model.predict_tensor(torch.ones(2), list(SIGNATURE_OF))


def test_a_new_recalibration_drops_the_bound():
    rng = np.random.default_rng(0)
    assert whole_model().recalibrated(draw(rng, 5)).bound is None


def test_predicting_needs_neither_torch_nor_the_solver():
    code = "import sys; import apportion.cost.model; print('torch' in sys.modules, 'cvxpy' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["False", "False"]
