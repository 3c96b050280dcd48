"""Precision per block: what a space leaves in fp32, int8 graphs leave in fp32."""

from __future__ import annotations

import pytest

from apportion.device.target import find_target
from apportion.methods.search.clock import counted
from apportion.methods.search.spaces.mobile_cnn import MobileCnn

SPACE = MobileCnn(widths=(16, 16), strides=(2, 1), image_size=8, precisions=("int8", "fp32"), align=16)
MIXED = SPACE.start().replace("b1.precision", "fp32")


def test_blocks_in_fp32_keep_float_weights_in_an_int8_graph(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from apportion.device.runtimes.ort import RUNTIME

    RUNTIME.build(SPACE.build(MIXED), tmp_path, find_target("ort-int8-cpu-1t"))
    graph = onnx.load(tmp_path / "int8.onnx").graph
    dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert {"blocks.1" in node.name for node in convolutions} == {True, False}
    for node in convolutions:
        assert (node.input[1] in dequantised) == ("blocks.1" not in node.name)


def test_blocks_in_fp32_keep_float_inputs_on_openvino(tmp_path):
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    from apportion.device.runtimes.openvino import IR, RUNTIME

    RUNTIME.build(SPACE.build(MIXED), tmp_path, find_target("openvino-int8-cpu-1t"))
    graph = openvino.Core().read_model(tmp_path / IR)
    kinds = {"Convolution", "GroupConvolution"}
    convolutions = [node for node in graph.get_ops() if node.get_type_name() in kinds]
    in_int8 = {
        "blocks.1" in node.get_friendly_name(): node.input_value(0).get_node().get_type_name() == "FakeQuantize"
        for node in convolutions
    }
    assert in_int8 == {True: False, False: True}
    for node in convolutions:
        quantised = node.input_value(0).get_node().get_type_name() == "FakeQuantize"
        assert quantised == ("blocks.1" not in node.get_friendly_name())


def test_the_estimate_prices_fp32_blocks_apart():
    plain, mixed = counted(SPACE, SPACE.start()), counted(SPACE, MIXED)
    assert not any(kind.endswith("in fp32") for kind in plain)
    assert any(kind.endswith("in fp32") for kind in mixed)
    assert sum(row[1] for row in plain.values()) == sum(row[1] for row in mixed.values())
