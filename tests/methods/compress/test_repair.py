"""Repair: distillation brings a cut network back towards the original, the same each time, and never trains twice."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from tests.models import zoo

from apportion.errors import DataError
from apportion.methods.compress.repair import (
    Distil,
    DistilOptions,
    answer_loss,
    label_loss,
    repair_knob,
    require_labels,
)
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.network import read_out
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples, Splits

OPTIONS = DistilOptions(steps=40, learning_rate=1e-3, batch=16)


def examples_of(network, generator, count=96):
    batches = []
    for _ in range(count // 16):
        batch = {}
        for name, like in network.inputs.items():
            shape = (16, *like.shape[1:])
            if like.is_floating_point():
                batch[name] = torch.randn(shape, generator=generator)
            elif name == "attention_mask":
                batch[name] = torch.ones(shape, dtype=torch.long)
            else:
                batch[name] = torch.randint(0, 50, shape, generator=generator)
        batches.append(batch)
    return Examples(tuple(batches), "noise")


@pytest.fixture(scope="module", params=["small-cnn", "bert", "gpt2"])
def cut(request):
    torch.manual_seed(0)
    network = load("tests.factories:small_cnn") if request.param == "small-cnn" else zoo.build(request.param)
    partition = Partition.of(network, multiple={"neurons": 4, "channels": 4})
    half = {m.name: min(m.sizes(), key=lambda size: abs(size - m.num_units / 2)) for m in partition}
    half = {name: size for name, size in half.items() if partition[name].kind != "blocks"}
    return network, partition, slice_network(network, partition, partition.keep(half))


def loss(teacher, student, examples):
    with torch.inference_mode():
        return sum(
            answer_loss(read_out(student, b), read_out(teacher, b), teacher.readout, b.get("attention_mask")).item()
            for b in examples.batches
        )


def test_distillation_brings_answers_back_on_examples_it_has_not_seen(cut, generator):
    network, partition, small = cut
    blocks = [name for module in partition for name, _ in module.blocks]
    rule = Distil(network, examples_of(network, generator), blocks, OPTIONS)
    unseen = examples_of(network, generator)
    before = {name: p.clone() for name, p in small.module.named_parameters()}
    repaired = rule.apply(small, repair_knob(1), 0)
    assert loss(network, repaired, unseen) < 0.8 * loss(network, small, unseen)
    assert repaired.edits == small.edits
    assert not repaired.module.training
    for name, parameter in small.module.named_parameters():
        assert torch.equal(parameter, before[name])  # the rule is pure
    assert all(not p.requires_grad for p in repaired.module.parameters())


def test_the_same_again_and_from_the_folder(cut, generator, tmp_path):
    network, _, small = cut
    training = examples_of(network, generator)
    first = Distil(network, training, (), OPTIONS, tmp_path).apply(small, repair_knob(1), 0)
    again = Distil(network, training, (), OPTIONS).apply(small, repair_knob(1), 0)
    kept = Distil(network, training, (), OPTIONS, tmp_path)
    kept.train = None  # must not be called
    from_folder = kept.apply(small, repair_knob(1), 0)
    for one, two, three in zip(*(n.module.parameters() for n in (first, again, from_folder)), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


@pytest.mark.parametrize(
    ("spare", "early", "asked"), [(0, 0, [5, 5]), (30, 0, [35, 5]), (0, 3, [3, 8, 5, 5]), (30, 3, [3, 38, 35, 5])]
)
def test_turns_train_early_steps_or_those_that_are_spare_too(cut, generator, monkeypatch, spare, early, asked):
    network, _, small = cut
    trained = []
    monkeypatch.setattr(Distil, "train", lambda self, model, update, steps: trained.append(steps) or model)
    rule = Distil(
        network, examples_of(network, generator), (), DistilOptions(steps=5), spare_steps=spare, early_steps=early
    )
    knob = repair_knob(2, early=early > 0)
    for value in reversed(knob.values[:-1]):
        rule.apply(small, knob, value)
    assert trained == asked == [rule.steps(knob, value) for value in reversed(knob.values[:-1])]


def test_a_network_that_agrees_already_has_nothing_to_learn(generator):
    network = zoo.build("bert")
    training = examples_of(network, generator)
    repaired = Distil(network, training, (), DistilOptions(steps=5, batch=16)).apply(network, repair_knob(1), 0)
    assert loss(network, repaired, training) < 1e-3 * len(training.batches)


@pytest.mark.parametrize("readout", ["embedding", "logits", "token-logits"])
def test_the_loss_is_zero_at_the_teachers_answers_and_above_elsewhere(readout, generator):
    shape = (6, 4, 9) if readout == "token-logits" else (6, 9)
    target = torch.randn(shape, generator=generator)
    if readout == "embedding":
        target = torch.nn.functional.normalize(target, dim=-1)
    assert answer_loss(target, target, readout).item() == pytest.approx(0, abs=1e-6)
    other = torch.nn.functional.normalize(target + torch.randn(shape, generator=generator), dim=-1)
    assert answer_loss(other, target, readout).item() > 0.01


def test_zeros_stay_zero(generator):
    network = load("tests.factories:small_cnn")
    module = copy.deepcopy(network.module)
    with torch.no_grad():
        module.stem.weight[:, :, 0] = 0  # a third
    training = examples_of(network, generator)
    options = DistilOptions(steps=3, batch=16)
    repaired = Distil(network, training, (), options).apply(network.replace(module=module), repair_knob(1), 0)
    assert (repaired.module.stem.weight[:, :, 0] == 0).all()
    assert not torch.equal(repaired.module.stem.weight[:, :, 1], module.stem.weight[:, :, 1])


def labelled(network, generator, numbers=False):
    """Examples whose label is not what the network says, but can be learnt.

    Classes say whether an image is bright on the left; numbers are the network's own answers and some deviations more.
    """
    examples = examples_of(network, generator)
    if numbers:
        with torch.inference_mode():
            answer_N = torch.cat([read_out(network, batch) for batch in examples.batches])[:, 0]
        return replace(examples, label_N=answer_N + 5 * answer_N.std())
    image = torch.cat([batch["0"] for batch in examples.batches])
    return replace(examples, label_N=(image[..., :8].mean((1, 2, 3)) > 0).long() * 9)


def finetuned(network, training, towards, seed=0):
    options = DistilOptions(towards=towards, steps=30, batch=12, seed=seed)
    return Distil(network, training, (), options).apply(network, repair_knob(1), 0)


@pytest.mark.parametrize("numbers", [False, True], ids=["classes", "numbers"])
def test_labels_are_learnt(numbers, generator):
    network = load("tests.factories:small_regressor" if numbers else "tests.factories:small_cnn")
    training = labelled(network, generator, numbers)
    spread = training.label_N.var(correction=0).item() if numbers else 1.0

    def error(model):
        with torch.inference_mode():
            answer = torch.cat([read_out(model, batch) for batch in training.batches])
        return label_loss(answer, training.label_N, spread).item()

    taught, tuned, both = (finetuned(network, training, towards) for towards in ("teacher", "labels", "both"))
    assert max(error(tuned), error(both)) < 0.9 * min(error(network), error(taught))


def test_finetuning_is_a_function_of_labels_and_seed(generator):
    network = load("tests.factories:small_cnn")
    training = labelled(network, generator)
    other = replace(training, label_N=9 - training.label_N)
    weights = [
        finetuned(network, examples, "labels", seed).module.state_dict()
        for examples, seed in ((training, 0), (training, 0), (other, 0), (training, 1))
    ]
    same = [all(torch.equal(tensor, again[name]) for name, tensor in weights[0].items()) for again in weights]
    assert same == [True, True, False, False]


def test_every_batch_carries_its_own_labels():
    batches = tuple({"0": torch.arange(start, start + 7.0)[:, None]} for start in (0, 7, 14))
    training = Examples(batches, "numbers", torch.arange(21.0))
    rule = Distil(load("tests.factories:small_cnn"), training, (), DistilOptions(towards="labels", batch=3))
    assert len(rule.batches) == 9
    assert all(torch.equal(batch["0"][:, 0], label_B) for batch, label_B in rule.batches)


def test_the_label_loss_is_what_it_says():
    assert label_loss(torch.zeros(4, 10), torch.arange(4)).item() == pytest.approx(math.log(10))
    assert label_loss(torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 4.0]), 2.0).item() == 1.0


def test_labels_that_the_network_does_not_answer_are_refused_in_one_line(generator):
    network = load("tests.factories:small_cnn")
    training = labelled(network, generator)
    require_labels(network, Splits(*[training] * 5))
    cases = {
        "come without": replace(training, label_N=None),
        "7 classes": replace(training, label_N=training.label_N.clamp_max(6)),
        "labels are numbers": replace(training, label_N=training.label_N.float()),
    }
    for told, wrong in cases.items():
        with pytest.raises(DataError, match=told) as refused:
            require_labels(network, Splits(*[wrong] * 5))
        assert "use repair" in str(refused.value)
        assert "\n" not in str(refused.value)
    embedding = network.replace(readout="embedding")
    with pytest.raises(DataError, match="embedding"):
        require_labels(embedding, Splits(*[training] * 5))
