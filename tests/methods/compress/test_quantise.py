"""Quantisation as a rule: shapes for the runtime, quality as run, and artefacts that really are in int8."""

from __future__ import annotations

import pytest
import torch

from apportion.core.meter import Reading
from apportion.device.answers import answers, build
from apportion.device.measure import Candidate, Shape
from apportion.device.probe import int8_twin, working_target
from apportion.device.target import find_target
from apportion.errors import TargetError
from apportion.methods.compress.quantise import AsRun, Quantise, by_sensitivity, quantise_knob
from apportion.models.load import load
from apportion.models.network import Int8, read_out, read_output
from apportion.models.quantise import simulate
from apportion.models.save import save
from apportion.tasks.batches import Examples
from apportion.tasks.shaped import shaped

CNN = "tests.factories:small_cnn"


def images(generator, count=40):
    return Examples(tuple({"0": torch.randn(20, 3, 16, 16, generator=generator)} for _ in range(count // 20)), "noise")


def test_int8_is_offered_where_the_runtime_can_quantise():
    assert int8_twin(find_target("torch-cpu-1t")) is None
    assert int8_twin(find_target("ort-int8-cpu-1t")) is None
    twin = int8_twin(find_target("ort-cpu-1t"))
    assert twin is None or twin.name == "ort-int8-cpu-1t"


def test_examples_take_the_shape_of_the_inputs(generator):
    network = load(CNN)
    batches = shaped(images(generator), network, count=6)
    assert [batch["0"].shape for batch in batches] == [network.inputs["0"].shape] * 6
    wide = network.replace(inputs={"0": torch.zeros(4, 3, 16, 16)})
    assert [len(batch["0"]) for batch in shaped(images(generator), wide, count=6)] == [4, 4]


def test_texts_are_padded_and_cut():
    like = {"input_ids": torch.zeros(1, 6, dtype=torch.long)}
    network = load(CNN).replace(inputs=like)
    ids = torch.arange(1, 9).reshape(1, 8)
    (cut,) = shaped(Examples(({"input_ids": ids},), "long"), network)
    (padded,) = shaped(Examples(({"input_ids": ids[:, :4]},), "short"), network)
    assert cut["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert padded["input_ids"].tolist() == [[1, 2, 3, 4, 0, 0]]


def test_quality_is_read_of_what_will_run(generator):
    seen = []

    class Watching:
        unit = "ratio"

        def read(self, model):
            seen.append(model)
            return Reading(value=1.0, unit="ratio")

    network = load(CNN)
    rule = Quantise(images(generator))
    small = rule.apply(network, quantise_knob(), "int8")
    assert network.precision == "fp32"  # the rule is pure
    assert small.precision == "int8"
    AsRun(Watching()).read(network)
    AsRun(Watching()).read(small)
    assert seen[0] is network
    assert not torch.equal(seen[1].module.stem.weight, network.module.stem.weight)
    assert rule.apply(small, quantise_knob(), "fp32").precision == "fp32"


@pytest.mark.parametrize(("runtime", "activations"), [("ort", "uint8"), ("ort", "int8"), ("openvino", "uint8")])
def test_the_artefact_is_in_int8_and_answers_as_simulated(runtime, activations, generator, tmp_path):
    try:
        target = working_target(f"{runtime}-cpu-1t")
        twin = working_target(f"{runtime}-int8-cpu-1t")
    except TargetError as error:
        pytest.skip(str(error))
    network = load(CNN)
    small = Quantise(images(generator), Int8(activations=activations)).apply(network, quantise_knob(), "int8")
    save(small, tmp_path / "small")
    save(network, tmp_path / "plain")
    shape, target = Shape(), target.with_isa(twin.isa)
    built = {
        name: build(Candidate(name=name, ref=str(tmp_path / name), factory=CNN), target, shape)
        for name in ("small", "plain")
    }
    size = {
        name: sum(p.stat().st_size for p in folder.iterdir() if p.suffix in (".onnx", ".bin"))
        for name, folder in built.items()
    }
    assert size["small"] < 0.5 * size["plain"]
    batches = shaped(images(generator), small, count=None)
    found = answers(built["small"], target, batches)
    answer_ND = torch.cat([read_output(small, tuple(f), b) for f, b in zip(found, batches, strict=True)])
    batch = {"0": torch.cat([b["0"] for b in batches])}
    with torch.inference_mode():
        exact, simulated = read_out(network, batch), read_out(simulate(small), batch)
    assert (answer_ND - exact).norm() / exact.norm() < 0.25
    assert (answer_ND - simulated).norm() / exact.norm() < 0.25
    assert not torch.allclose(answer_ND, exact, atol=1e-6)


def test_states_of_the_knob_leave_ever_more_layers_in_float(generator):
    assert quantise_knob().values == ("int8", "fp32")
    knob = quantise_knob(9)
    assert knob.values == ("int8", "int8 but 1", "int8 but 2", "int8 but 4", "fp32")
    rule = Quantise(images(generator), Int8(scope="graph"), ("head", "stem", "blocks.0.first", "blocks.0.second"))
    network = load(CNN)
    left = [rule.apply(network, knob, value).int8 for value in knob.values[:-1]]
    assert [len(int8.in_float) for int8 in left] == [0, 1, 2, 4]
    assert all(int8.in_float == rule.order[: len(int8.in_float)] for int8 in left)
    assert {int8.scope for int8 in left} == {"graph"}
    assert rule.apply(network, knob, "fp32").precision == "fp32"


def test_the_layer_that_rounding_hurts_most_is_left_in_float_first(generator):
    network = load(CNN)
    with torch.no_grad():  # one large weight in every channel leaves few steps for all others
        weight = network.module.blocks[1].first.weight
        weight[:, 0, 0, 0] = 60 * weight.abs().max()
        network.module.blocks[1].second.weight[:, :, 0, 0] = 0.05
    order = by_sensitivity(network, images(generator))
    assert order[0] == "blocks.1.first"
    assert sorted(order) == sorted(n for n, m in network.module.named_modules() if hasattr(m, "weight") and n != "norm")
    assert by_sensitivity(network, images(torch.Generator().manual_seed(1))) == by_sensitivity(
        network, images(torch.Generator().manual_seed(1))
    )


@pytest.mark.parametrize("runtime", ["ort", "openvino"])
def test_layers_left_in_float_keep_float_weights_in_the_artefact(runtime, generator, tmp_path):
    try:
        target = working_target(f"{runtime}-cpu-1t").with_isa(working_target(f"{runtime}-int8-cpu-1t").isa)
    except TargetError as error:
        pytest.skip(str(error))
    network = load(CNN)
    rule = Quantise(images(generator), Int8(), ("blocks.1",))
    sizes = []
    for count in (0, 1):
        folder = tmp_path / str(count)
        save(rule.quantised(network, count), folder)
        assert load(str(folder), factory=CNN).int8.in_float == ("blocks.1",)[:count]
        built = build(Candidate(name="small", ref=str(folder), factory=CNN), target, Shape())
        sizes.append(sum(p.stat().st_size for p in built.iterdir() if p.suffix in (".onnx", ".bin")))
    weights = sum(p.numel() for p in network.module.blocks[1].parameters() if p.dim() > 1)
    assert sizes[1] - sizes[0] == pytest.approx(3 * weights, rel=0.1)  # four bytes each instead of one
