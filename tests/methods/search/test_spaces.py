"""Spaces: every proposal and rung builds a network that runs, saves and loads; widths keep to the target's grid."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.errors import ApportionError, ModelError
from apportion.methods.search.band import Band
from apportion.methods.search.clock import Work, counted
from apportion.methods.search.mutate import mutate
from apportion.methods.search.space import Proposal, SpaceError
from apportion.methods.search.spaces import find_space
from apportion.methods.search.spaces.mobile_cnn import MobileCnn
from apportion.methods.search.spaces.small_encoder import SmallEncoder
from apportion.models.load import load
from apportion.models.save import save

SPACES = [MobileCnn(image_size=16), SmallEncoder()]


def logits(network):
    with torch.inference_mode():
        return network.module(network.inputs["pixel_values"])


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_random_architectures_run_save_and_load_bit_for_bit(space, tmp_path):
    rng = random.Random(0)
    for number in range(4):
        arch = space.random(rng)
        space.check(arch)
        network = space.build(arch, seed=number)
        folder = tmp_path / str(number)
        save(network, folder)
        assert torch.equal(logits(network), logits(load(str(folder)).replace(inputs=network.inputs)))
        assert logits(network).shape == (1, space.num_classes)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_every_proposal_changes_one_decision_of_its_layer_and_builds(space):
    start = space.start()
    for layer in space.layers[:2]:
        for proposal in space.proposals(start, layer):
            changed = proposal.apply(start)
            space.check(changed)
            assert [name for name in start if start[name] != changed[name]] == list(proposal.edits)
            assert next(iter(proposal.edits)).startswith(f"{layer}.")
            assert counted(space, changed)  # runs on the meta device


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_ladders_keep_the_change_rise_in_width_and_have_no_drift_at_the_present_width(space):
    start = space.start()
    for ladder in space.ladders(start, "b1"):
        widths = [sum(v for k, v in rung.arch.items() if k.endswith(".width")) for rung in ladder.rungs]
        assert widths == sorted(widths)
        assert ladder.rungs[ladder.nearest].drift == 0.0
        assert ladder.rungs[ladder.nearest].arch == start
        for rung in ladder.rungs:
            assert all(rung.arch[k] == start[k] for k in start if not k.endswith((".width", ".precision")))


def test_precision_is_offered_where_the_target_runs_it():
    space = MobileCnn(precisions=("int8", "fp32"))
    labels = {ladder.label.split()[1] for ladder in space.ladders(space.start(), "b0")}
    assert labels == {"int8", "fp32"}
    mixed = space.start().replace("b1.precision", "fp32")
    assert space.build(mixed).module.fp32_parts == ["blocks.1"]
    with pytest.raises(SpaceError, match="the target runs fp32"):
        MobileCnn().check(space.start())


def flops_per_width(arch):
    """Parameters of a linear chain: rises by little with every unit of width, so that any width can be the nearest."""
    return {"params": Reading(value=float(sum(v for k, v in arch.items() if k.endswith(".width"))), unit="params")}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from((8, 16, 32)))
def test_no_width_off_the_grid_is_ever_returned_though_counting_parameters_would_pick_one(seed, align):
    rng = random.Random(seed)
    on, off = MobileCnn(align=align, min_width=align), MobileCnn(align=1)
    start = on.random(rng)
    layer = rng.choice(on.layers)
    value = flops_per_width(start)["params"].value
    target = Band.around({"params": Reading(value=value + 3.0, unit="params")}, 1.0 / value)
    for space in (on, off):
        made = mutate(space, start, Proposal(layer, {}), target, flops_per_width)
        if space is on:
            assert not isinstance(made, list)  # nothing on the grid is that near
        elif isinstance(made, list):
            assert made[0].arch[f"{layer}.width"] % align or any(
                made[0].arch[f"{other}.width"] % align for other in on.layers
            )
    wide = Band.around({"params": Reading(value=value * 1.2, unit="params")}, 0.15)
    made = mutate(on, start, Proposal(layer, {}), wide, flops_per_width, num=5)
    if isinstance(made, list):
        for one in made:
            on.check(one.arch)
            assert all(one.arch[f"{other}.width"] % align == 0 for other in on.layers)


def test_architectures_outside_the_space_are_refused_in_one_line():
    space = MobileCnn()
    with pytest.raises(SpaceError, match="multiples of 8"):
        space.check(space.start().replace("b0.width", 769))
    with pytest.raises(SpaceError, match="possible are"):
        space.check(space.start().replace("b0.kernel", 11))
    with pytest.raises(SpaceError, match="has the decisions"):
        space.check(Setting({"b0.kernel": 3}))
    with pytest.raises(SpaceError, match="no layer"):
        space.proposals(space.start(), "b99")
    with pytest.raises(SpaceError, match="mobile-cnn, small-encoder, nasbench201"):
        find_space("resnet")
    with pytest.raises(ApportionError, match="possible are fp32 and int8"):
        MobileCnn(precisions=("fp16",))
    encoder = SmallEncoder()
    with pytest.raises(ModelError, match="does not divide"):
        encoder.build(encoder.start().replace("b0.pool", 1).replace("b1.pool", 1).replace("b2.window", 4))


def test_windows_see_only_their_own_tokens():
    space = SmallEncoder(num_encoder_blocks=1)
    start = space.start()
    image = torch.randn(1, 1, 32, 32)
    moved = image.clone()
    moved[..., 16:, 16:] += 1.0  # the last quarter, which is the last window of four
    for window, same in ((4, True), (0, False)):
        block = space.build(start.replace("b0.window", window), seed=1).module
        tokens = [block.embed(one).flatten(2).transpose(1, 2) for one in (image, moved)]
        out = [block.blocks[0](one, 8).unflatten(1, (8, 8))[:, :4, :4] for one in tokens]
        assert torch.allclose(*out, atol=1e-6) == same


def test_fused_and_separate_projections_compute_the_same():
    space = SmallEncoder(num_encoder_blocks=1)
    start = space.start()
    fused, apart = (space.build(start.replace("b0.fused", flag)).module.blocks[0].attention for flag in (1, 0))
    weights, biases = fused.qkv.weight.chunk(3), fused.qkv.bias.chunk(3)
    for layer, weight, bias in zip((apart.query, apart.key, apart.value), weights, biases, strict=True):
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
    apart.out.load_state_dict(fused.out.state_dict())
    x = torch.randn(2, 64, 64)
    torch.testing.assert_close(fused(x, 8), apart(x, 8))


def test_prices_of_work_are_recovered_from_latencies_that_are_made_of_them():
    space = MobileCnn(image_size=16)
    rng = random.Random(0)
    archs = [space.random(rng) for _ in range(30)]
    price = {"point": 2e-9, "dense": 1e-9, "depthwise3": 5e-9, "depthwise5": 5e-9, "depthwise7": 5e-9}

    def latency(arch):
        work = counted(space, arch)
        return 0.1 + sum(price.get(kind, 0.0) * flops for kind, (_, flops, _) in work.items())

    measured = {arch: {"latency@t": Reading(value=latency(arch), unit="ms")} for arch in archs[:20]}
    fitted = Work.fit(space, measured)
    errors = [abs(fitted(arch)["latency@t"].value / latency(arch) - 1) for arch in archs[20:]]
    assert np.median(errors) < 0.05
    assert min(fitted.prices["latency@t"]) >= 0.0
