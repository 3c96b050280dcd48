"""Precision per block: what a space leaves in fp32, ONNX Runtime's int8 graph leaves in fp32."""

from __future__ import annotations

import pytest

from apportion.device.runtimes.ort import RUNTIME
from apportion.device.target import find_target
from apportion.methods.search.spaces.mobile_cnn import MobileCnn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def test_blocks_in_fp32_keep_float_weights_in_an_int8_graph(tmp_path):
    space = MobileCnn(widths=(16, 16), strides=(2, 1), image_size=8, precisions=("int8", "fp32"), align=16)
    mixed = space.start().replace("b1.precision", "fp32")
    RUNTIME.build(space.build(mixed), tmp_path, find_target("ort-int8-cpu-1t"))
    graph = onnx.load(tmp_path / "int8.onnx").graph
    dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert {"blocks.1" in node.name for node in convolutions} == {True, False}
    for node in convolutions:
        assert (node.input[1] in dequantised) == ("blocks.1" not in node.name)
