"""Merged tokens: what goes where, padding for nothing, and the same function however it is cut, saved or exported."""

from __future__ import annotations

import pytest
import torch
from tests.models import zoo

from apportion.core.knob import Choice
from apportion.device.meters import flops_by_part
from apportion.device.runtimes.ort import RUNTIME
from apportion.device.target import find_target
from apportion.errors import ModelError
from apportion.methods.compress.tokens import DEPTH, Depth, Tokens, depth_knobs, tokens_knob
from apportion.models.cut import mask, slice_network
from apportion.models.load import load
from apportion.models.network import float_outputs, forward
from apportion.models.partition import Partition
from apportion.models.save import save
from apportion.models.tokens import Stream, merge_once

NUM_TOKENS = 12


def encoder(name="bert", num_real=NUM_TOKENS):
    network = zoo.build(name)
    ids = torch.arange(1, 2 * NUM_TOKENS + 1).reshape(2, NUM_TOKENS)
    seen = (torch.arange(NUM_TOKENS) < num_real).long().expand(2, -1)
    inputs = {"input_ids": ids, "attention_mask": seen} if network.takes_text else network.inputs
    return network.replace(inputs=inputs)


def answer(network):
    with torch.inference_mode():
        return float_outputs(forward(network.module, network.inputs))[0]


def test_every_token_goes_to_one_place_the_first_to_the_first_and_twins_to_one(generator):
    x_NSD = torch.randn(3, 9, 5, generator=generator)
    x_NSD[:, 5] = 2 * x_NSD[:, 2]  # alike but for their length
    to_NSR = merge_once(x_NSD, torch.ones(3, 9), 8)
    assert torch.equal(to_NSR.sum(-1), torch.ones(3, 9))
    assert torch.equal(to_NSR[:, 0, 0], torch.ones(3))
    assert torch.equal(to_NSR[:, 2], to_NSR[:, 5])
    assert torch.equal(to_NSR.sum(1).amax(-1), torch.full((3,), 2.0))
    alone = merge_once(x_NSD, torch.ones(3, 9), 5)
    assert torch.equal(alone[:, :, 0].sum(1), torch.ones(3))  # nothing is merged into the first


def test_sums_are_kept_and_put_back(generator):
    x_NSD, stream = torch.randn(2, 10, 4, generator=generator, dtype=torch.float64), Stream()
    stream.start(x_NSD, None)
    left_NRD = stream.reduce(x_NSD, 3)
    assert left_NRD.shape[1] == 3
    torch.testing.assert_close((left_NRD * stream.weight_NS[..., None]).sum(1), x_NSD.sum(1))
    assert stream.put_back(left_NRD).shape == x_NSD.shape
    torch.testing.assert_close(stream.put_back(left_NRD).sum(1), x_NSD.sum(1))


def test_merging_padding_changes_nothing_and_short_texts_are_left_alone():
    network = encoder(num_real=4)
    partition = Partition.of(network)
    merged = Tokens(partition, NUM_TOKENS).merged(network, 8)
    torch.testing.assert_close(answer(merged)[:, :4], answer(network)[:, :4])
    whole = encoder()
    short = Tokens(partition, 100).merged(whole, 50)
    assert torch.equal(answer(short), answer(whole))
    assert not torch.allclose(answer(Tokens(partition, NUM_TOKENS).merged(whole, 4)), answer(whole))


@pytest.mark.parametrize("name", ["bert", "distilbert", "vit"])
def test_fewer_tokens_are_less_work_and_cutting_commutes(name, tmp_path):
    network = encoder(name)
    partition = Partition.of(network)
    knob = tokens_knob(network, partition)
    rule = Tokens(partition, knob.dearest)
    before = answer(network)
    merged = rule.apply(network, knob, knob.cheapest)
    assert torch.equal(answer(network), before)  # the rule is pure
    assert answer(merged).shape == before.shape
    blocks = next(module for module in partition if module.kind == "blocks")
    work, less = flops_by_part(network), flops_by_part(merged)
    last, first = blocks.blocks[-1][0], blocks.blocks[0][0]
    assert less[first] == work[first]
    assert less[last] < 0.5 * work[last]
    keep = partition.keep({module.name: module.sizes()[0] for module in partition if module.kind != "blocks"})
    cut = slice_network(merged, partition, keep)
    torch.testing.assert_close(answer(cut), answer(mask(merged, partition, keep)))
    without_last = slice_network(merged, partition, {blocks.name: tuple(range(blocks.num_units - 1))})
    assert answer(without_last).shape == before.shape
    torch.testing.assert_close(answer(rule.apply(merged, knob, knob.dearest)), before)


def test_a_merged_network_is_saved_loaded_and_exported(tmp_path):
    zoo.save_pretrained("bert", tmp_path / "whole")
    network = load(str(tmp_path / "whole"), tokens=16)
    merged = Tokens(Partition.of(network), 16).merged(network, 6)
    save(merged, tmp_path / "merged")
    again = load(str(tmp_path / "merged"), tokens=16)
    assert dict(again.edits.tokens) == dict(merged.edits.tokens)
    assert torch.equal(answer(again), answer(merged))
    (tmp_path / "built").mkdir()
    target = find_target("ort-cpu-1t")
    RUNTIME.build(again, tmp_path / "built", target)
    found = torch.from_numpy(RUNTIME.open(tmp_path / "built", target)()[0])
    torch.testing.assert_close(found, answer(merged), rtol=1e-3, atol=1e-3)
    path = tmp_path / "merged" / "apportion.json"
    path.write_text(path.read_text().replace('"tokens": [', '"tokens": [["nowhere", 3, 16], ', 1))
    with pytest.raises(ModelError, match="nowhere"):
        load(str(tmp_path / "merged"), tokens=16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet-basic"])
def test_merging_is_not_offered_where_it_would_be_wrong(name):
    network = zoo.build(name)
    assert tokens_knob(network, Partition.of(network)) is None


def test_depth_keeps_the_first_blocks():
    network = encoder()
    partition = Partition.of(network)
    (knob,) = depth_knobs(partition)
    blocks = partition[knob.name.removeprefix(f"{DEPTH}.")]
    cut = Depth(partition).apply(network, knob, 1)
    assert partition.kept_in(cut)[blocks.name] == (0,)
    torch.testing.assert_close(answer(cut), answer(mask(network, partition, {blocks.name: (0,)})))
    pruned = slice_network(network, partition, {blocks.name: tuple(range(1, blocks.num_units))})
    assert partition.kept_in(Depth(partition).apply(pruned, knob, 1))[blocks.name] == (1,)
    with pytest.raises(ValueError, match="takes one of"):
        Depth(partition).apply(network, Choice(knob.name, knob.values), blocks.num_units + 1)
