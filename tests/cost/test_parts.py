"""Parts and shares against operations counted on really sliced networks; drawn configurations; profiles on disk."""

from __future__ import annotations

import json
import random

import pytest
from tests.models import zoo

from apportion.core.meter import Reading
from apportion.cost.calibrate import CHEAPEST, anchor_sizes
from apportion.cost.draw import draw_many, draw_sizes
from apportion.cost.model import CostModel
from apportion.cost.parts import BLOCK, WRITTEN, Parts, View
from apportion.cost.predicted import PredictedLatency
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError, Sample
from apportion.device.measure import Shape
from apportion.device.meters import flops_by_part
from apportion.device.target import find_target
from apportion.methods.compress.lowrank import factor, lowrank_knobs, rank_at
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.network import Int8, forward
from apportion.models.partition import Partition
from apportion.models.quantise import QUANTISED
from apportion.tasks.batches import Examples


@pytest.fixture(scope="module", params=["small-cnn", "bert", "llama", "resnet-bottleneck", "mobilenetv2"])
def cut(request):
    network = load("tests.factories:small_cnn") if request.param == "small-cnn" else zoo.build(request.param)
    partition = Partition.of(network, multiple={"neurons": 4, "channels": 4})
    return network, partition, Parts.of(network, partition)


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_the_operations_left_in_a_really_sliced_network(cut, seed):
    network, partition, parts = cut
    keep = partition.keep(draw_sizes(parts, random.Random(seed)))
    counted = flops_by_part(slice_network(network, partition, keep))
    shares = parts.shares(keep)
    for part in parts.parts:
        if part.flops:
            left = counted.get(part.name.removesuffix(".heads"), 0)
            assert shares[part.name] == pytest.approx(left / part.flops, abs=1e-9), part.name


@pytest.mark.parametrize(("side", "view"), [("out", View(grid=10_000)), ("in", View(grid_in=10_000))])
def test_a_grid_is_about_the_channels_of_its_side(cut, side, view):
    """A multiple beyond every width makes whatever is cut on its side whole, and leaves the other side's shares."""
    _, partition, parts = cut
    module = next(m for m in partition if m.kind in ("channels", "neurons"))
    keep = partition.keep({module.name: module.sizes()[0]})
    sides: dict[str, set[str]] = {}
    for member in module.members:
        sides.setdefault(member.layer, set()).add(member.side)
    plain, seen = parts.shares(keep), parts.seen(view).shares(keep)
    one_sided = {name: sides[name] for name in plain if len(sides.get(name, ())) == 1}
    assert {next(iter(cut_on)) for cut_on in one_sided.values()} == {"in", "out"}
    for name, cut_on in one_sided.items():
        assert plain[name] < 1.0
        assert seen[name] == (1.0 if side in cut_on else plain[name])


def test_an_untouched_network_has_whole_shares(cut):
    _, _, parts = cut
    assert set(parts.shares({}).values()) == {1.0}


def test_a_skipped_block_takes_its_parts_with_it(cut):
    _, partition, parts = cut
    module = next(m for m in partition if m.kind == "blocks")
    gone = module.blocks[0][0]
    shares = parts.shares({module.name: tuple(range(1, module.num_units))})
    for name, share in shares.items():
        inside = name.startswith(f"{gone}.") or name == BLOCK + gone
        assert share == (0.0 if inside else 1.0)


def test_blocks_share_a_signature_where_they_are_alike_and_only_there(cut):
    network, partition, parts = cut
    counted = flops_by_part(network)
    blocks = [name for m in partition if m.kind == "blocks" for name, _ in m.blocks]
    alike = {(type(network.module.get_submodule(name)), counted[name]) for name in blocks}
    assert len({parts.signature_of[BLOCK + name] for name in blocks}) == len(alike)


def test_drawn_configurations_are_legal_distinct_and_repeat_for_a_seed(cut):
    _, partition, parts = cut
    drawn = draw_many(parts, 12, seed=3)
    assert drawn == draw_many(parts, 12, seed=3)
    assert drawn != draw_many(parts, 12, seed=4)
    for index, sizes in enumerate(drawn):
        assert sizes not in drawn[:index]
        assert all(sizes[module.name] in module.sizes() for module in partition)


def test_the_last_anchor_is_the_smallest_network(cut):
    _, partition, _ = cut
    anchors = anchor_sizes(partition)
    assert list(anchors)[-1] == CHEAPEST
    assert anchors[CHEAPEST] == {module.name: module.sizes()[0] for module in partition}


def linear_model(parts, scale=1.0):
    """Two milliseconds, and one per GFLOP of each part."""
    samples = []
    rng = random.Random(0)
    for _ in range(40):
        shares = {part.name: rng.random() for part in parts.parts}
        latency_ms = 2 + sum(1e-3 * part.flops * shares[part.name] for part in parts.parts)
        samples.append(Sample(shares, scale * latency_ms))
    return CostModel.fit(samples[:20], parts.signature_of, residual="off").bounded(samples[20:], alpha=0.1)


def test_a_predicted_latency_is_the_models(cut):
    network, partition, parts = cut
    cost = linear_model(parts)
    keep = partition.keep(draw_sizes(parts, random.Random(0)))
    sliced = slice_network(network, partition, keep)
    reading = PredictedLatency(cost, parts).read(sliced)
    assert reading.value == pytest.approx(cost.predict(parts.shares(keep)))
    assert PredictedLatency(cost, parts, upper=True).read(sliced).value >= reading.value


def test_mixed_precision_is_priced_between_int8_and_fp32_by_operations(cut):
    network, _, parts = cut
    meter = PredictedLatency(linear_model(parts), parts, int8=PredictedLatency(linear_model(parts, 0.5), parts))
    flops = flops_by_part(network)
    layers = {n: flops.get(n, 0) for n, layer in network.module.named_modules() if isinstance(layer, QUANTISED)}
    quantised = network.replace(calibration=(dict(network.inputs),))
    slow, quick = meter.read(network).value, meter.read(quantised).value
    assert quick == pytest.approx(slow / 2, rel=0.05)
    first = max(layers, key=lambda name: layers[name])
    mixed = meter.read(quantised.replace(int8=Int8(in_float=(first,)))).value
    assert mixed == pytest.approx(quick + layers[first] / sum(layers.values()) * (slow - quick))
    assert meter.read(quantised.replace(int8=Int8(in_float=tuple(layers)))).value == pytest.approx(slow)


def test_the_shares_of_a_factored_network_are_the_operations_left(cut):
    network, partition, parts = cut
    meter = PredictedLatency(linear_model(parts), parts)
    factored = network
    for knob in lowrank_knobs(network, shares=(0.5,)):
        layer = knob.name.removeprefix("lowrank.")
        factored = factor(factored, layer, rank_at(network.module.get_submodule(layer), 0.5), Examples((), "none"))
    assert factored.edits.ranks
    keep = partition.keep(draw_sizes(parts, random.Random(1)))
    for model in (factored, slice_network(factored, partition, keep)):
        counted, shares = flops_by_part(model), meter.shares(model)
        sliced = parts.shares(partition.kept_in(model))
        for part in parts.parts:
            if part.flops and part.name.endswith(".heads"):
                assert 0 <= shares[part.name] < 1
            elif part.flops:
                left = counted.get(part.name, 0) / part.flops
                # a pair that slicing made dearer than a layer counts as the layer
                assert shares[part.name] <= left + 1e-9
                assert shares[part.name] == pytest.approx(left) or left > sliced[part.name]
    assert meter.read(factored).value < meter.read(network).value


def test_a_slice_that_was_traced_anew_is_whole_to_its_own_parts(cut):
    network, partition, parts = cut
    first = slice_network(network, partition, partition.keep(draw_sizes(parts, random.Random(1))))
    again = Parts.of(first, Partition.of(first, multiple={"neurons": 4, "channels": 4}))
    assert set(again.shares(again.partition.kept_in(first)).values()) == {1.0}
    keep = again.partition.keep(draw_sizes(again, random.Random(2)))
    second = slice_network(first, again.partition, keep)
    assert again.shares(again.partition.kept_in(second)) == again.shares(keep)


def test_a_profile_comes_back_from_disk_as_it_was(cut, tmp_path):
    network, _, parts = cut
    profile = Profile(
        model=network.origin.ref,
        target=find_target("torch-cpu-1t"),
        shape=Shape(),
        baseline=Reading(value=3.0, unit="ms", stderr=0.1, count=20),
        floor_ms=1.0,
        view=View(16, 8, activations=True),
        cost=linear_model(parts),
        seed=0,
        seconds=1.5,
        machine={"cores": 2},
        failures={},
    )
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again.cost.to_json() == profile.cost.to_json()
    assert again.target == profile.target
    assert again.baseline == profile.baseline
    assert again.view == profile.view
    text = (tmp_path / "p.json").read_text()
    earlier = json.loads(text) | {"apportion_profile": 2, "grid": 16, "widths": False}
    del earlier["view"]
    for widths in (False, True):  # a price of every width is no more
        (tmp_path / "earlier.json").write_text(json.dumps(earlier | {"widths": widths}))
        if widths:
            with pytest.raises(CostError, match="calibrate again"):
                Profile.load(tmp_path / "earlier.json")
        else:
            assert Profile.load(tmp_path / "earlier.json").view == View(16, 16)
    for damaged in (text[:-40], text.replace('"apportion_profile": 3', '"apportion_profile": 9'), "[]", "null"):
        (tmp_path / "bad.json").write_text(damaged)
        with pytest.raises(CostError) as refused:
            Profile.load(tmp_path / "bad.json")
        assert "\n" not in str(refused.value)
    with pytest.raises(CostError, match="no profile"):
        Profile.load(tmp_path / "gone.json")


@pytest.mark.parametrize("seed", range(3))
def test_the_share_written_is_that_of_the_numbers_that_layers_really_write(cut, seed):
    network, partition, parts = cut
    parts = parts.seen(View(activations=True))
    keep = partition.keep(draw_sizes(parts, random.Random(seed)))

    def written(model):
        counted = dict.fromkeys(parts.written, 0)
        hooks = [
            model.module.get_submodule(name).register_forward_hook(
                lambda _, __, output, name=name: counted.update({name: output.numel()})
            )
            for name in counted
            if name in dict(model.module.named_modules())
        ]
        forward(model.module, model.inputs)
        for hook in hooks:
            hook.remove()
        return sum(counted.values())

    left = written(slice_network(network, partition, keep)) / written(network)
    assert parts.shares(keep)[WRITTEN] == pytest.approx(left, rel=1e-9)
