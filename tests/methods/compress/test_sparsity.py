"""Sparsity: which weights go, what it changes (the file) and what it does not."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.methods.compress.networks import Networks
from tests.models import zoo
from torch import nn

from apportion.core.budget import Budget
from apportion.core.knob import Choice
from apportion.core.ledger import Ledger
from apportion.core.loop import budgeted_loop
from apportion.core.policy import Greedy
from apportion.device.meters import FlopCount, ParameterCount, SizeOnDisk
from apportion.errors import KnobError
from apportion.methods.compress.lowrank import factor
from apportion.methods.compress.rows import observe
from apportion.methods.compress.rulenames import parse_pattern
from apportion.methods.compress.sparsity import (
    Sparsify,
    keep_largest,
    keep_pattern,
    sparse_knobs,
    zero_share,
)
from apportion.models import load, save, slice_network
from apportion.models.factored import matrix
from apportion.tasks.agreement import Agreement
from apportion.tasks.batches import Examples
from apportion.testing.suites import RuleSuite

DENSE = "encoder.layer.1.output.dense"
SIZE = Budget.parse("size<=50%")


def examples_of(network, *, dtype=torch.float64):
    return Examples((zoo.inputs_for(network.origin.ref, seed=5, dtype=dtype),), "noise")


def weight_of(network, name=DENSE):
    return matrix(network.module.get_submodule(name))


# ---------------------------------------------------------------- which weights go

scores = st.tuples(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 23))


def draw(problem):
    seed, num_rows, num_columns = problem
    return torch.rand(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).mul(8).round()  # with ties


@given(scores, st.floats(0, 1), st.floats(0, 1))
def test_the_least_of_every_row_go_and_larger_shares_are_nested(problem, one, other):
    score_GI = draw(problem)
    kept = {share: keep_largest(score_GI, share) for share in (one, other)}
    for share, keep_GI in kept.items():
        assert ((~keep_GI).sum(1) == round(share * score_GI.shape[1])).all()
        least = score_GI.masked_fill(~keep_GI, torch.inf).amin(1)
        most = score_GI.masked_fill(keep_GI, -torch.inf).amax(1)
        assert (least >= most).all()
    assert (kept[max(one, other)] <= kept[min(one, other)]).all()


@given(scores, st.sampled_from(["1:2", "2:4", "1:4", "3:8", "4:4"]))
def test_a_pattern_keeps_the_heaviest_choice_of_every_group(problem, pattern):
    score_OI, (num_kept, of) = draw(problem), parse_pattern(pattern)
    keep_OI = keep_pattern(score_OI, num_kept, of)
    for row, keep in zip(score_OI, keep_OI, strict=True):
        for start in range(0, len(row), of):
            group, chosen = row[start : start + of], keep[start : start + of]
            size = min(num_kept, len(group))
            assert int(chosen.sum()) == size
            # brute force over all choices that the pattern allows
            best = max(sum(group[i].item() for i in pick) for pick in itertools.combinations(range(len(group)), size))
            assert group[chosen].sum().item() == best


def test_wanda_takes_in_every_row_what_changes_its_output_least_one_by_one():
    network = zoo.network("bert")
    examples = examples_of(network)
    changed = Sparsify(examples).apply(network, Choice(f"sparse.{DENSE}", (0.5, 0.0)), 0.5)
    seen = []
    observe(network, examples, [DENSE], lambda _name, x, _y: seen.append(x))
    x_RI = torch.cat(seen)
    weight_OI = weight_of(network)
    loss_OI = torch.stack([(x_RI * row).square().sum(0) for row in weight_OI])  # of setting one weight to zero
    gone_OI = weight_of(changed) == 0
    assert (gone_OI.sum(1) == 24).all()
    assert (loss_OI.masked_fill(~gone_OI, -1).amax(1) <= loss_OI.masked_fill(gone_OI, torch.inf).amin(1)).all()
    assert torch.equal(weight_of(changed)[~gone_OI], weight_OI[~gone_OI])


def test_magnitude_takes_the_smallest_of_the_whole_layer():
    network = zoo.network("bert")
    rule = Sparsify(examples_of(network), score="magnitude")
    changed = rule.apply(network, Choice(f"sparse.{DENSE}", (0.25, 0.0)), 0.25)
    gone_OI, size_OI = weight_of(changed) == 0, weight_of(network).abs()
    assert zero_share(changed.module.get_submodule(DENSE)) == 0.25
    assert size_OI[gone_OI].max() <= size_OI[~gone_OI].min()


@pytest.mark.parametrize(
    ("name", "layer"),
    [("gpt2", "transformer.h.0.attn.c_proj"), ("resnet-basic", "resnet.encoder.stages.0.layers.0.layer.1.convolution")],
)
def test_square_and_convolution_weights_lose_along_their_inputs(name, layer):
    network = zoo.network(name)
    changed = Sparsify(examples_of(network)).apply(network, Choice(f"sparse.{layer}", ("2:4", "4:4")), "2:4")
    kept_OI = weight_of(changed, layer) != 0
    assert (kept_OI.unflatten(1, (-1, 4)).sum(-1) == 2).all()
    assert kept_OI.unflatten(0, (-1, 4)).sum(1).max() > 2  # not along its outputs


def test_both_factors_of_a_factored_layer_get_it():
    network = zoo.network("bert")
    pair = factor(network, DENSE, 8, examples_of(network))
    changed = Sparsify(examples_of(network)).apply(pair, Choice(f"sparse.{DENSE}", (0.5, 0.0)), 0.5)
    for part in ("down", "up"):
        assert zero_share(changed.module.get_submodule(f"{DENSE}.{part}")) == 0.5
    assert zero_share(changed.module.get_submodule(DENSE)) == 0.5


def test_a_layer_that_went_with_its_block_is_left():
    network = slice_network(zoo.network("bert"), zoo.partition("bert"), {"encoder.layer.blocks": (0, 2)})
    assert Sparsify(examples_of(network)).apply(network, Choice(f"sparse.{DENSE}", (0.5, 0.0)), 0.5) is network


# ---------------------------------------------------------------- what it changes


def test_knobs_are_offered_only_where_the_budget_is_about_size():
    network = zoo.network("bert")
    for budget in ("latency<=60%", "params<=50%", "flops<=50%"):
        assert sparse_knobs(network, Budget.parse(budget)) == []
    knobs = sparse_knobs(network, Budget.parse("latency<=60%, size<=20MB"), shares=(0.5, 0.8))
    assert {knob.name for knob in knobs} == {
        f"sparse.{name}" for name, layer in network.module.named_modules() if type(layer) is nn.Linear
    }
    assert {knob.values for knob in knobs} == {(0.8, 0.5, 0.0)}
    assert {knob.values for knob in sparse_knobs(network, SIZE, patterns=("2:4", "1:4"))} == {("1:4", "2:4", "4:4")}


def test_it_changes_the_size_as_stored_and_neither_parameters_nor_operations(tmp_path):
    network = zoo.build("bert", dtype=torch.float32)
    changed = network
    for knob in sparse_knobs(network, SIZE, shares=(0.9,)):
        changed = Sparsify(examples_of(network)).apply(changed, knob, 0.9)
    for meter in (ParameterCount(), FlopCount()):
        assert meter.read(changed) == meter.read(network)
    sizes = []
    for name, each in (("whole", network), ("sparse", changed)):
        save(each, tmp_path / name)
        sizes.append((tmp_path / name / "model.safetensors").stat().st_size)
        assert sizes[-1] <= SizeOnDisk().read(each).value
    assert SizeOnDisk().read(changed).value < sizes[0]
    assert sizes[1] < 0.6 * sizes[0]  # embeddings and norms stay whole
    loaded = load(str(tmp_path / "sparse"), tokens=zoo.TOKENS)
    for a, b in zip(zoo.outputs(loaded, changed.inputs), zoo.outputs(changed), strict=True):
        assert torch.equal(a, b)


def test_the_loop_meets_a_budget_on_size_with_it(tmp_path):
    network = zoo.build("bert", dtype=torch.float32)
    examples = examples_of(network)
    budget = SIZE.resolve({"size": SizeOnDisk().read(network)})
    with Ledger(tmp_path / "ledger.jsonl", run="test") as ledger:
        result = budgeted_loop(
            network,
            knobs=sparse_knobs(network, budget, shares=(0.9, 0.6)),
            rules={"sparse": Sparsify(examples)},
            meters={"size": SizeOnDisk(), "quality": Agreement(network, examples)},
            budget=budget,
            policy=Greedy(),
            ledger=ledger,
        )
    assert result.met
    save(result.model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size <= budget.limits[0].value


def test_what_makes_no_sense_is_refused():
    network = zoo.network("bert")
    for pattern in ("3", "4:2", "0:4", "2:4:8", "two:4", "2:128", ""):
        with zoo.refused(f"{pattern!r}", "'2:4'", error=KnobError):
            parse_pattern(pattern)
    with zoo.refused("between 0 and 1", error=KnobError):
        sparse_knobs(network, SIZE, shares=(0.5, 1.0))


class TestSparsify(Networks, RuleSuite):
    @pytest.fixture
    def model(self):
        return zoo.network("bert")

    @pytest.fixture
    def rule(self, model):
        return Sparsify(examples_of(model))

    @pytest.fixture(params=[(0.8, 0.5, 0.0), ("1:4", "2:4", "4:4")], ids=["shares", "patterns"])
    def knob(self, request):
        return Choice(f"sparse.{DENSE}", request.param)
