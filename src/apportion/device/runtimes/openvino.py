"""OpenVINO on the CPU: f32 kernels, or int8 after post-training quantisation with NNCF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apportion.device.runtimes import Step
from apportion.device.target import Target
from apportion.models.processor import int8_saturates

MODEL = "model.onnx"
IR = "model.xml"


class OpenVino:
    """Exports to ONNX and converts to OpenVINO's own format; asks for the precision, which it would choose itself."""

    def build(self, network: Any, folder: Path, target: Target) -> None:
        import openvino

        from apportion.device.runtimes.graph import export_onnx, nodes_in_float, precision_of
        from apportion.device.runtimes.inputs import calibration_inputs

        export_onnx(network, folder)
        model = openvino.Core().read_model(folder / MODEL)
        if precision_of(network, target) == "int8":
            import nncf
            from nncf.quantization.advanced_parameters import OverflowFix

            names = {given.any_name for given in model.inputs}
            batches = [{k: v for k, v in batch.items() if k in names} for batch in calibration_inputs(folder, count=4)]
            left = nodes_in_float(network, [node.get_friendly_name() for node in model.get_ops()])
            model = nncf.quantize(
                model,
                nncf.Dataset(batches),
                model_type=nncf.ModelType.TRANSFORMER if network.takes_text else None,
                subset_size=len(batches),
                ignored_scope=nncf.IgnoredScope(names=left, validate=False) if left else None,
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    overflow_fix=OverflowFix.ENABLE if int8_saturates() else OverflowFix.FIRST_LAYER,
                    disable_bias_correction=not network.calibration,  # made-up inputs only price: it changes no time
                ),
            )
        openvino.save_model(model, folder / IR, compress_to_fp16=False)
        for path in folder.glob(f"{MODEL}*"):
            path.unlink()

    def open(self, folder: Path, target: Target) -> Step:
        import openvino

        from apportion.device.runtimes.inputs import read_inputs

        config = {
            "INFERENCE_NUM_THREADS": target.threads,
            "INFERENCE_PRECISION_HINT": "f32",  # otherwise bf16 is chosen where the processor offers it
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
        }
        compiled = openvino.Core().compile_model(folder / IR, "CPU", config)
        request = compiled.create_infer_request()
        names = [given.any_name for given in compiled.inputs]
        inputs = read_inputs(folder, names)

        def step(given: Any = None) -> list[Any]:
            fed = {name: given[name] for name in names} if given else inputs
            return list(request.infer(fed, share_inputs=True).values())

        return step


RUNTIME = OpenVino()
