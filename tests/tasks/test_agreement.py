"""Agreement with the original: one for itself, chance for noise; splits that don't overlap."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from apportion.errors import DataError
from apportion.models.load import load
from apportion.models.network import Network, Origin
from apportion.tasks.agreement import Agreement
from apportion.tasks.batches import Examples, load_splits


def network_of(module: nn.Module, readout: str) -> Network:
    return Network(module=module, inputs={"0": torch.zeros(1, 8)}, origin=Origin(ref="x"), readout=readout)


@pytest.fixture
def examples(generator):
    return Examples(tuple({"0": torch.randn(50, 8, generator=generator)} for _ in range(4)), "noise")


@pytest.mark.parametrize("readout", ["embedding", "logits"])
def test_a_model_agrees_with_itself(readout, examples):
    network = network_of(nn.Linear(8, 5), readout)
    reading = Agreement(network, examples).read(network)
    assert reading.value == 1.0
    assert reading.stderr == 0.0
    assert reading.count == 200


def test_unrelated_classifiers_agree_by_chance(examples):
    torch.manual_seed(0)
    one, other = (network_of(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)), "logits") for _ in "ab")
    reading = Agreement(one, examples).read(other)
    expected = (torch.bincount(_labels(one, examples)) / 200 * torch.bincount(_labels(other, examples)) / 200).sum()
    assert abs(reading.value - expected.item()) < 5 * reading.stderr


def _labels(network, examples):
    return torch.cat([network.module(batch["0"]) for batch in examples.batches]).argmax(-1)


def test_neighbours_ignore_rotations_but_not_lost_dimensions(examples):
    original = network_of(nn.Identity(), "embedding")
    turn = nn.Linear(8, 8, bias=False)
    nn.init.orthogonal_(turn.weight)
    agreement = Agreement(original, examples)
    assert agreement.read(network_of(turn, "embedding")).value > 0.99
    cut = nn.Linear(8, 8, bias=False)
    cut.weight.data = torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]))
    assert agreement.read(network_of(cut, "embedding")).value < 0.6


def tensors_file(path, count=60, side=16):
    save_file({"0": torch.arange(count).float().view(-1, 1, 1, 1).expand(-1, 3, side, side).contiguous()}, path)
    return str(path)


def test_splits_share_no_example_and_repeat_for_a_seed(tmp_path):
    network = load("tests.factories:small_cnn")
    data = tensors_file(tmp_path / "x.safetensors")

    def ids(seed):
        splits = load_splits(network, data, seed=seed)
        parts = (splits.calibration, splits.selection, splits.report)
        return [[int(v) for batch in part.batches for v in batch["0"][:, 0, 0, 0]] for part in parts]

    first = ids(3)
    flat = [value for part in first for value in part]
    assert len(flat) == len(set(flat))
    assert min(map(len, first)) >= 2
    assert ids(3) == first
    assert ids(4) != first


@pytest.mark.parametrize("count", [6, 60, 3000])
def test_a_guard_takes_its_own_from_training_and_has_what_is_chosen_with_only_where_that_is_too_little(tmp_path, count):
    network = load("tests.factories:small_cnn")
    data = tensors_file(tmp_path / "x.safetensors", count, side=16)

    def ids(guard):
        splits = load_splits(network, data, seed=3, guard=guard)
        return {
            part.name: [int(v) for batch in getattr(splits, part.name).batches for v in batch["0"][:, 0, 0, 0]]
            for part in fields(splits)
        }

    plain, guarded = ids(guard=False), ids(guard=True)
    enough = len(plain["training"]) // 4 >= len(plain["selection"])
    assert enough == (count == 3000)
    assert bool(set(guarded["guard"]) & set(guarded["selection"])) != enough
    told = load_splits(network, data, seed=3, guard=True).guard.description
    assert ("of them chosen with" in told) != enough
    for name in ("calibration", "selection", "report"):
        assert guarded[name] == plain[name]
    more = set(guarded["guard"]) - set(guarded["selection"])
    assert len(more) == min(1024, len(plain["training"]) // 4)
    assert set(plain["training"]) == more | set(guarded["training"])
    assert not more & set(guarded["training"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "give --data"),
        (lambda path: str(path / "gone.safetensors"), "does not exist"),
        (lambda path: tensors_file(path / "few.safetensors", count=3), "at least 6"),
        (lambda path: tensors_file(path / "small.safetensors", side=8), "shape"),
        (lambda path: str(path / "texts.txt"), "safetensors file of 0"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(tmp_path, make, message):
    from apportion.errors import ApportionError

    network = load("tests.factories:small_cnn")
    with pytest.raises(ApportionError, match=message):
        load_splits(network, make(tmp_path), seed=0)
    assert issubclass(DataError, ApportionError)


@pytest.mark.usefixtures("pillow")
def test_a_folder_of_images_is_data_for_an_image_model(tmp_path, pillow):
    for label in "ab":
        (tmp_path / "mine" / label).mkdir(parents=True)
        for place in range(10):
            pillow.new("RGB", (20, 20), (10 * place, 0, 100)).save(tmp_path / "mine" / label / f"{place}.png")
    network = load("tests.factories:small_cnn")
    splits = load_splits(network, str(tmp_path / "mine"), seed=0)
    assert splits.report.batches[0]["0"].shape[1:] == (3, 16, 16)
    assert len(splits.calibration) + len(splits.selection) + len(splits.report) <= 20
    assert Agreement(network, splits.report).read(network).value == 1.0


@pytest.mark.usefixtures("minilm_installed")
def test_a_domain_of_texts_is_data_for_a_text_model_only():
    network = load("minilm")
    assert "of chatterbot" in load_splits(network, "chatterbot", seed=0).report.description
    with pytest.raises(DataError, match="chatterbot holds texts, but the model takes images"):
        load_splits(load("tests.factories:small_cnn"), "chatterbot", seed=0)
