"""ONNX Runtime on the CPU: fp32, static int8 (quantise-dequantise pairs) and dynamic int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apportion.device.runtimes import Step
from apportion.device.target import Target
from apportion.errors import TargetError
from apportion.models.processor import int8_saturates

MODEL = "model.onnx"
INT8 = "int8.onnx"


class OnnxRuntime:
    """Exports to ONNX, quantises with ONNX Runtime's own tools, runs with the target's threads."""

    def build(self, network: Any, folder: Path, target: Target) -> None:
        from apportion.device.runtimes.graph import export_onnx, precision_of

        export_onnx(network, folder)
        if precision_of(network, target) == "fp32":
            return
        from onnxruntime.quantization.shape_inference import quant_pre_process

        prepared = folder / "prepared.onnx"
        quant_pre_process(folder / MODEL, prepared, skip_symbolic_shape=True)
        if precision_of(network, target) == "int8dyn" or network.int8.scope == "dynamic":
            self._quantise_dynamic(folder, prepared, network)
        else:
            self._quantise_static(folder, prepared, network)
        prepared.unlink()
        (folder / MODEL).unlink()

    def open(self, folder: Path, target: Target) -> Step:
        import onnxruntime

        from apportion.device.runtimes.inputs import read_inputs

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = target.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        path = folder / (INT8 if (folder / INT8).is_file() else MODEL)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [given.name for given in session.get_inputs()]
        inputs = read_inputs(folder, names)
        return lambda given=None: session.run(None, {name: given[name] for name in names} if given else inputs)

    def _quantise_dynamic(self, folder: Path, prepared: Path, network: Any) -> None:
        """Products with weights in int8, with ranges taken anew from every input."""
        from onnxruntime.quantization import QuantType, quantize_dynamic

        if network.int8.in_float:
            raise TargetError(f"{network.int8.in_float[0]} can't stay in float in dynamic int8; quantise all or none")
        ops = ["MatMul", "Gemm"]
        quantize_dynamic(
            prepared,
            folder / INT8,
            op_types_to_quantize=ops,
            per_channel=True,
            reduce_range=int8_saturates(),
            weight_type=QuantType.QInt8,
        )

    def _quantise_static(self, folder: Path, prepared: Path, network: Any) -> None:
        """Layers with weights in int8, or the graph as a whole, as the network says; products of activations never.

        Between the layers of a convolutional network int8 saves a tenth to a third of the time; it costs an encoder
        half its accuracy, and saves less.
        """
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

        from apportion.device.runtimes.graph import nodes_in_float
        from apportion.device.runtimes.inputs import calibration_inputs

        class Reader(CalibrationDataReader):
            def __init__(self, names: set[str]) -> None:
                batches = calibration_inputs(folder)
                self.batches = iter([{k: v for k, v in batch.items() if k in names} for batch in batches])

            def get_next(self) -> Any:
                return next(self.batches, None)

        import onnx

        names = {given.name for given in onnx.load(folder / MODEL, load_external_data=False).graph.input}
        graph = onnx.load(prepared, load_external_data=False).graph
        held = {tensor.name for tensor in graph.initializer}
        left = nodes_in_float(network, [node.name for node in graph.node])
        left += [n.name for n in graph.node if n.op_type == "MatMul" and not held.intersection(n.input)]  # attention's
        quantize_static(
            prepared,
            folder / INT8,
            Reader(names),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8 if network.int8.activations == "uint8" else QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=int8_saturates(),
            op_types_to_quantize=["Conv", "Gemm", "MatMul"] if network.int8.scope == "layers" else None,
            nodes_to_exclude=left,
        )


RUNTIME = OnnxRuntime()
