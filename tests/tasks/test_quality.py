"""Quality meters against answers that are known: separable classes, a uniform language model, chosen kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apportion.errors import DataError
from apportion.methods.compress.quantise import shaped
from apportion.models.network import Network, Origin, read_out
from apportion.tasks.agreement import Agreement
from apportion.tasks.batches import Examples, load_splits
from apportion.tasks.quality import Accuracy, Likelihood, quality_meter


def network_of(module, readout):
    return Network(module=module, inputs={"0": torch.zeros(1, 8)}, origin=Origin(ref="x"), readout=readout)


def labelled(generator, count=90, num_classes=3):
    """Points around far corners, one corner for each class."""
    label_N = torch.arange(count) % num_classes
    point_ND = 10 * torch.eye(8)[label_N] + torch.randn(count, 8, generator=generator)
    return Examples(tuple({"0": part} for part in point_ND.split(32)), "corners", label_N)


@pytest.mark.parametrize("readout", ["embedding", "logits"])
def test_features_are_judged_by_the_originals_class_means(generator, readout):
    training, examples = labelled(generator), labelled(generator)
    original = network_of(nn.Identity(), readout)
    meter = Accuracy(original, training, examples)
    assert meter.read(original).value == 1.0
    swapped = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        swapped.weight.copy_(torch.eye(8)[[1, 0, 2, 3, 4, 5, 6, 7]])  # the first two classes change places
    assert meter.read(network_of(swapped, readout)).value == pytest.approx(1 / 3)


def test_the_head_is_kept_for_other_examples(generator):
    training, examples, others = (labelled(generator) for _ in range(3))
    original = network_of(nn.Identity(), "embedding")
    meter = Accuracy(original, training, examples)
    assert meter.over(others).read(original) == Accuracy(original, training, others).read(original)
    assert meter.examples is examples


def test_a_classifier_of_the_datas_classes_answers_itself(generator):
    training, examples = labelled(generator), labelled(generator)
    head = nn.Linear(8, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(-torch.eye(3, 8))  # always wrong, which class means would hide
    assert Accuracy(network_of(head, "logits"), training, examples).read(network_of(head, "logits")).value == 0.0


def test_scores_of_answers_are_the_readings(generator):
    training, examples = labelled(generator), labelled(generator)
    original = network_of(nn.Identity(), "embedding")
    answer_ND = nn.functional.normalize(torch.cat([batch["0"] for batch in examples.batches]), dim=-1)
    for meter in (Accuracy(original, training, examples), Agreement(original, examples)):
        assert meter.score(answer_ND, "embedding") == meter.read(original)


def test_a_uniform_language_model_has_one_over_its_vocabulary():
    class Uniform(nn.Module):
        def forward(self, input_ids, attention_mask):
            return torch.zeros(*input_ids.shape, 50)

    ids = torch.arange(24).reshape(2, 12)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    network = Network(module=Uniform(), inputs=inputs, origin=Origin(ref="x"), readout="token-logits")
    reading = Likelihood(network, Examples((inputs,), "numbers")).read(network)
    assert reading.value == pytest.approx(1 / 50)
    assert reading.count == 22


class Random(nn.Module):
    """Logits that depend on the token and the one before, as a causal model's may."""

    def __init__(self, seed=0):
        super().__init__()
        self.table = torch.randn(50, 50, 50, generator=torch.Generator().manual_seed(seed))

    def forward(self, input_ids, attention_mask):
        return self.table[input_ids, nn.functional.pad(input_ids, (1, 0))[:, :-1]]


def texts(generator, num_tokens=6):
    """Batches of padded texts, some longer than the network's inputs."""
    batches = []
    for longest in (5, 9):
        ids = torch.randint(0, 50, (4, longest), generator=generator)
        mask = (torch.arange(longest) < torch.tensor([longest, 3, 2, longest - 1])[:, None]).long()
        batches.append({"input_ids": ids, "attention_mask": mask})
    inputs = {name: torch.zeros(3, num_tokens, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    return Examples(tuple(batches), "texts"), inputs


@pytest.mark.parametrize("kind", [Likelihood, Agreement])
def test_tokens_are_scored_alike_whoever_answers_and_however_padded(kind, generator):
    examples, inputs = texts(generator)
    network = Network(module=Random(), inputs=inputs, origin=Origin(ref="x"), readout="token-logits")
    other = network.replace(module=Random(1))
    meter = kind(network, examples)
    for model in (network, other):
        shapes = shaped(examples, model, count=None)  # of the inputs' shape: cut, padded, filled up to threes
        assert {tuple(batch["input_ids"].shape) for batch in shapes} == {(3, 6)}
        assert meter.sample_tokens(read_out(model, batch) for batch in shapes).reading() == meter.read(model)
    assert meter.read(other) != meter.read(network)
    count = meter.read(network).count
    assert count == (5 + 3 + 2 + 4) + (6 + 3 + 2 + 6) - (8 if kind is Likelihood else 0)


def test_the_kind_follows_the_data(generator):
    examples = labelled(generator)
    bare = Examples(examples.batches, "no labels")
    network = network_of(nn.Identity(), "embedding")
    assert isinstance(quality_meter(network, examples, examples), Accuracy)
    assert isinstance(quality_meter(network, bare, bare), Agreement)
    assert isinstance(quality_meter(network, examples, examples, "agreement"), Agreement)
    with pytest.raises(DataError, match="needs labels"):
        quality_meter(network, bare, bare, "accuracy")
    with pytest.raises(DataError, match="language models"):
        quality_meter(network, bare, bare, "likelihood")


@pytest.mark.usefixtures("minilm_installed")
def test_a_table_with_labels_gives_labelled_splits(tmp_path):
    from apportion.models.load import load

    rows = [f"{word} number {i},{label}" for label, word in enumerate(("red", "green", "blue")) for i in range(40)]
    (tmp_path / "mine.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    splits = load_splits(load("minilm"), str(tmp_path / "mine.csv"), seed=0)
    parts = (splits.calibration, splits.selection, splits.report, splits.training)
    assert sum(len(part) for part in parts) == 120
    assert len(splits.training) >= 40
    assert all(part.label_N is not None and len(part.label_N) == len(part) for part in parts)
    (tmp_path / "plain.csv").write_text("text\n" + "\n".join(row.split(",")[0] for row in rows) + "\n")
    assert load_splits(load("minilm"), str(tmp_path / "plain.csv"), seed=0).report.label_N is None
