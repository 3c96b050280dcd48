"""Recipes of int8: the choice among measured ones, and what each does to ONNX Runtime's graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.models import zoo

from apportion.core.meter import Reading
from apportion.device.runtimes.graph import nodes_in_float
from apportion.device.runtimes.ort import INT8, RUNTIME
from apportion.device.target import find_target
from apportion.errors import TargetError
from apportion.methods.compress.recipe import DYNAMIC, STANDS, Tried, quickest, recipes_for
from apportion.models.load import load
from apportion.models.network import Int8
from apportion.models.quantise import simulate

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
CNN = "tests.factories:small_cnn"


def tried(scope: str, ratio: float, quality: float) -> Tried:
    return Tried(Int8(scope=scope), Reading(value=ratio, unit="ratio"), Reading(value=quality, unit="ratio"))


def test_the_quickest_recipe_whose_quality_stands_is_taken():
    slow, quick = tried("layers", 0.6, 0.90), tried("graph", 0.5, 0.90 - STANDS / 2)
    assert quickest([slow, quick]) is quick
    wrong = tried("graph", 0.3, 0.90 - 2 * STANDS)
    assert quickest([slow, quick, wrong]) is quick
    exact_but_slow = tried("layers", 1.3, 0.95)
    assert quickest([slow, quick, exact_but_slow]) is quick  # what is of no use sets no standard
    doubtful = Tried(slow.int8, slow.ratio, Reading(value=0.93, unit="ratio", stderr=0.05))
    assert quickest([doubtful, quick]) is quick  # too few examples to tell them apart
    assert quickest([]) is None
    idle = tried("graph", 1.02, 0.90)
    assert quickest([idle]) is None
    assert quickest([idle], saves_time=False) is idle  # wanted for its size
    assert Tried.from_json(quick.to_json()) == quick


class Sum(torch.nn.Module):
    """A sum and a ReLU between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 3, 1), torch.nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.second(torch.relu(x + self.first(x)))


@pytest.mark.parametrize("activations", ["uint8", "int8"])
@pytest.mark.parametrize("scope", ["layers", "graph"])
def test_a_recipe_sets_signedness_and_scope_of_the_graph(activations, scope, generator, tmp_path):
    batch = {"0": torch.randn(1, 3, 4, 4, generator=generator)}
    network = load(CNN).replace(
        module=Sum().eval(), inputs=batch, calibration=(batch,), int8=Int8(activations=activations, scope=scope)
    )
    RUNTIME.build(network, tmp_path, find_target("ort-cpu-1t"))
    graph = onnx.load(tmp_path / INT8).graph
    readers = {
        name: [node.op_type for node in graph.node if name in node.input] for n in graph.node for name in n.output
    }
    (total,) = (node for node in graph.node if node.op_type == "Add")
    assert (readers[total.output[0]] == ["QuantizeLinear"]) == (scope == "graph")
    zeros = {t.name: t for t in graph.initializer if t.name.endswith("_zero_point")}
    kinds = {zeros[node.input[2]].data_type for node in graph.node if node.op_type == "QuantizeLinear"}
    wanted = onnx.TensorProto.UINT8 if activations == "uint8" else onnx.TensorProto.INT8
    assert kinds == {wanted}


def test_modules_that_no_node_is_named_after_can_not_stay_in_float():
    network = load(CNN).replace(int8=Int8(in_float=("stem",)))
    assert nodes_in_float(network, ["/module/stem/Conv", "/module/head/Gemm"]) == ["/module/stem/Conv"]
    with pytest.raises(TargetError, match="'stem'"):
        nodes_in_float(network, ["node_conv2d", "node_linear"])
    gone = load(CNN).replace(int8=Int8(in_float=("blocks.9",)))  # left out with its block
    assert nodes_in_float(gone, ["/module/head/Gemm"]) == []


def test_ranges_are_taken_anew_where_linear_layers_hold_most_of_the_weights():
    assert DYNAMIC in recipes_for(zoo.build("bert"), "ort")
    assert DYNAMIC not in recipes_for(zoo.build("bert"), "openvino")
    assert DYNAMIC not in recipes_for(load(CNN), "ort")


def test_dynamic_int8_answers_as_simulated(tmp_path):
    network = zoo.build("bert")
    network = network.replace(module=network.module.float(), calibration=(dict(network.inputs),), int8=DYNAMIC)
    target = find_target("ort-cpu-1t")
    RUNTIME.build(network, tmp_path, target)
    assert any(node.op_type == "MatMulInteger" for node in onnx.load(tmp_path / INT8).graph.node)
    (hidden, *_) = RUNTIME.open(tmp_path, target)()
    with torch.inference_mode():
        exact = network.module(**network.inputs).last_hidden_state
        wanted = simulate(network).module(**network.inputs).last_hidden_state
    error, loss = (torch.from_numpy(hidden) - wanted).norm(), (wanted - exact).norm()
    assert 0 < loss < 0.1 * exact.norm()
    assert error < 0.7 * loss  # nearer to the simulation than that is to the original


def test_dynamic_int8_is_of_all_linear_layers_or_of_none(tmp_path):
    part = replace(DYNAMIC, in_float=("encoder.layer.0",))
    network = zoo.build("bert")
    network = network.replace(module=network.module.float(), calibration=(dict(network.inputs),), int8=part)
    assert not part.mixes
    with pytest.raises(TargetError, match="can't stay in float"):
        RUNTIME.build(network, tmp_path, find_target("ort-cpu-1t"))
