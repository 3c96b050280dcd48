"""R²: scikit-learn's value, the bootstrap's error, the original's head, and tables whose label is a number."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from sklearn.metrics import r2_score
from torch import nn

from apportion.errors import ApportionError, DataError
from apportion.methods.compress.fit import fit
from apportion.methods.compress.judge import load_examples, meter_of
from apportion.methods.compress.rundir import FitConfig
from apportion.methods.compress.verify import verify
from apportion.models.network import Network, Origin
from apportion.tasks.batches import Examples, Splits
from apportion.tasks.regression import R2, with_numbers

REGRESSOR = "tests.factories:small_regressor"


def network_of(module, readout="logits"):
    return Network(module=module, inputs={"0": torch.zeros(1, 4)}, origin=Origin(ref="x"), readout=readout)


def linear(weight):
    layer = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([weight]))
    return layer


def examples_of(generator, count=200, noise=0.5):
    x_ND = torch.randn(count, 4, generator=generator)
    y_N = x_ND @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + noise * torch.randn(count, generator=generator)
    return Examples(tuple({"0": part} for part in x_ND.split(32)), "points", y_N)


def test_it_is_scikit_learns_and_its_error_is_the_bootstraps(generator):
    examples = examples_of(generator)
    network = network_of(linear([1.0, -2.0, 0.0, 0.0]))
    meter = R2(network, examples, examples)
    x_ND = torch.cat([batch["0"] for batch in examples.batches])
    said_N = network.module(x_ND)[:, 0].detach()
    reading = meter.read(network)
    assert reading.value == pytest.approx(r2_score(examples.label_N, said_N))
    assert meter.rmse(said_N[:, None]) == pytest.approx((examples.label_N - said_N).square().mean().sqrt().item())
    draws = torch.randint(200, (400, 200), generator=generator)
    values = torch.tensor([r2_score(examples.label_N[rows], said_N[rows]) for rows in draws])
    assert reading.stderr == pytest.approx(values.std().item(), rel=0.25)
    assert meter.score(said_N[:, None], "logits") == reading


def test_features_are_read_by_the_originals_head(generator):
    training, examples = examples_of(generator), examples_of(generator)
    original = network_of(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        original.module.weight.copy_(torch.eye(4))
    meter = R2(original, training, examples)
    assert meter.read(original).value > 0.9
    swapped = network_of(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        swapped.module.weight.copy_(torch.eye(4)[[1, 0, 2, 3]])
    assert meter.read(swapped).value < 0
    assert meter.over(training).read(original).value > 0.9


def test_without_targets_a_regressor_is_compared_with_the_original(generator):
    examples = Examples(examples_of(generator).batches, "points")
    original, other = network_of(linear([1.0, 1.0, 0.0, 0.0])), network_of(linear([1.0, 0.0, 0.0, 0.0]))
    splits = Splits(*[examples] * 5)
    for kind in ("auto", "agreement", "r2"):
        meter = meter_of(original, splits, examples, kind)
        assert meter.read(original).value == 1.0
        assert meter.read(other).value == pytest.approx(0.5, abs=0.15)
    with pytest.raises(DataError, match="no numeric target"):
        R2(network_of(nn.Linear(4, 3)), examples, examples)
    with pytest.raises(DataError, match="does not vary"):
        R2(network_of(linear([0.0] * 4)), examples, examples)


def test_labels_of_a_table_are_read_as_numbers(tmp_path):
    table = tmp_path / "scores.csv"
    table.write_text("text,label\n" + "".join(f"text {row},{row / 4}\n" for row in (3, 1, 2)))
    ids = Examples(({"0": torch.zeros(3, 4)},), "rows", torch.tensor([2, 0, 1]))
    numbers = with_numbers(Splits(*[ids] * 5), str(table)).report.label_N
    assert numbers.tolist() == [0.5, 0.75, 0.25]
    table.write_text("text,label\na,1\nb,good\nc,3\n")
    with pytest.raises(DataError, match="'good'"):
        with_numbers(Splits(*[ids] * 5), str(table))


def test_targets_of_a_file_of_tensors(tmp_path, generator):
    network = network_of(linear([1.0, 0.0, 0.0, 0.0]))
    x_ND = torch.randn(60, 4, generator=generator)
    path = str(tmp_path / "points.safetensors")
    save_file({"0": x_ND, "target": 3 * x_ND[:, :1]}, path)
    splits = load_examples(network, path, "auto", seed=0)
    for part in (splits.training, splits.report, splits.guard):
        x_PD = torch.cat([batch["0"] for batch in part.batches])
        torch.testing.assert_close(part.label_N, 3 * x_PD[:, 0])  # each its own
    meter = meter_of(network, splits, splits.report, "auto")
    assert isinstance(meter, R2)
    assert meter.read(network_of(linear([3.0, 0.0, 0.0, 0.0]))).value == pytest.approx(1.0)
    features = network_of(nn.Identity())
    assert meter_of(features, splits, splits.report, "auto").read(features).value > 0.99
    assert load_examples(network, path, "agreement", seed=0).report.label_N is None
    with pytest.raises(DataError, match="numbers as targets; use r2"):
        meter_of(features, splits, splits.report, "accuracy")


def test_whole_targets_are_classes_unless_read_as_numbers(tmp_path, generator):
    network = network_of(nn.Linear(4, 3))
    path = str(tmp_path / "points.safetensors")
    save_file({"0": torch.randn(60, 4, generator=generator), "target": torch.arange(60) % 3}, path)
    splits = load_examples(network, path, "auto", seed=0)
    assert splits.training.label_N.dtype == torch.long
    assert type(meter_of(network, splits, splits.report, "auto")).__name__ == "Accuracy"
    assert load_examples(network, path, "r2", seed=0).training.label_N.is_floating_point()


def test_inputs_that_are_not_finite_are_refused(tmp_path):
    inputs = torch.zeros(60, 4)
    inputs[7, 2] = torch.inf
    save_file({"0": inputs}, tmp_path / "points.safetensors")
    with pytest.raises(DataError, match="'0' holds numbers that are not finite"):
        load_examples(network_of(nn.Linear(4, 3)), str(tmp_path / "points.safetensors"), "auto", seed=0)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (torch.zeros(59), "60 examples"),
        (torch.zeros(60, 2), "60 examples"),
        (torch.full((60,), torch.nan), "not finite"),
        (torch.arange(60) - 1, "from 0"),
    ],
)
def test_targets_that_make_no_sense_are_refused(tmp_path, target, told):
    save_file({"0": torch.zeros(60, 4), "target": target}, tmp_path / "points.safetensors")
    with pytest.raises(DataError, match=told):
        load_examples(network_of(nn.Linear(4, 3)), str(tmp_path / "points.safetensors"), "auto", seed=0)


def test_a_regressor_is_fitted_and_verified(tmp_path, generator):
    save_file({"0": torch.randn(500, 3, 16, 16, generator=generator)}, tmp_path / "images.safetensors")
    options = {"data": str(tmp_path / "images.safetensors"), "rungs": 1, "num_steps": 4, "quality_floor": 0.3}
    config = FitConfig(model=REGRESSOR, budget="params<=75%", repair_steps=150, **options)
    result = fit(config, tmp_path / "run")
    assert result["quality"] == "r2"
    assert result["quality_before"]["value"] == 1.0
    assert result["met"]
    assert 0.0 < result["quality_after"]["value"] < 1.0
    again = verify(tmp_path / "run", REGRESSOR)
    assert again["quality_after"] == result["quality_after"]
    with pytest.raises(ApportionError, match="r2"):
        FitConfig(model=REGRESSOR, budget="60%", quality="mse")


def test_classes_are_left_alone(tmp_path, generator):
    save_file({"0": torch.randn(30, 3, 16, 16, generator=generator)}, tmp_path / "images.safetensors")
    from apportion.models.load import load

    splits = load_examples(load("tests.factories:small_cnn"), str(tmp_path / "images.safetensors"), "auto", seed=0)
    assert splits.report.label_N is None
