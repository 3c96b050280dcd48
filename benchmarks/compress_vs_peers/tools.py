"""The peers in their own words: Torch-Pruning, NNCF, ONNX Runtime's quantiser; each leaves an artefact of a target."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import nncf
import numpy as np
import onnx
import onnxruntime
import openvino
import torch
import torch_pruning as tp
from benchmarks.compress_vs_peers.cases import Case
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from apportion.device.runtimes import runtime_of
from apportion.device.runtimes.graph import export_onnx
from apportion.device.runtimes.ort import INT8, MODEL
from apportion.device.target import Target
from apportion.methods.compress.repair import Distil, DistilOptions
from apportion.models.network import Network, float_outputs, forward, read_output
from apportion.tasks.shaped import shaped

STAGES, ROUND_TO = 6, 4
MAX_DROP = 0.01


def prune_in_stages(case: Case, *, everywhere: bool) -> Iterator[tuple[Network, float]]:
    """Torch-Pruning step by step, each followed by the fine-tuning that every tool gets; yields the share of MACs left.

    ``everywhere`` ranks all groups together (its global pruning), else each layer loses the same share (its default).
    """
    module = copy.deepcopy(case.network.module).eval()
    inputs = dict(case.network.inputs)
    with torch.enable_grad():
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        pruner = tp.pruner.BasePruner(
            module,
            inputs,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            global_pruning=everywhere,
            pruning_ratio=case.deepest,
            max_pruning_ratio=0.9,
            iterative_steps=STAGES,
            round_to=ROUND_TO,
            forward_fn=forward,
            output_transform=lambda output: sum(tensor.sum() for tensor in float_outputs(output)),
            **_encoder_options(module, case.deepest),
        )
        if not everywhere:
            pruner.per_step_head_pruning_ratio = _shares_of_the_rest(pruner.per_step_head_pruning_ratio)
        whole, _ = tp.utils.count_ops_and_params(module, inputs)
        for _ in range(STAGES):
            pruner.step()
            _note_heads(module, pruner)
            left, _ = tp.utils.count_ops_and_params(module, inputs)
            repaired = fine_tune(case, case.network.replace(module=copy.deepcopy(module)))
            module.load_state_dict(repaired.module.state_dict())
            yield repaired, left / whole


def _encoder_options(module: torch.nn.Module, deepest: float) -> dict:
    """As in Torch-Pruning's example for BERT: whole heads; the stream between blocks keeps its width."""
    if not hasattr(module, "config"):
        return {"ignored_layers": [module.head]}
    heads = {}
    kept = []
    for name, layer in module.named_modules():
        if name.endswith(("self.query", "self.key", "self.value")):
            heads[layer] = module.config.num_attention_heads
        if name.endswith("output.dense"):
            kept.append(layer)
    return {
        "ignored_layers": kept,
        "num_heads": heads,
        "prune_num_heads": True,
        "prune_head_dims": False,
        "head_pruning_ratio": deepest,
    }


def _shares_of_the_rest(ratios: list[float]) -> list[float]:
    """The same stages as shares of what is left: within a layer Torch-Pruning takes heads from those, not from all.

    As it stands its fifth stage of six leaves an attention without heads. A little less, since it rounds heads up.
    """
    pairs = zip([0.0, *ratios], ratios, strict=False)
    return [max(0.0, (now - before) / (1.0 - before) - 0.05) for before, now in pairs]


def _note_heads(module: torch.nn.Module, pruner: tp.pruner.BasePruner) -> None:
    for part in module.modules():
        if hasattr(part, "num_attention_heads") and hasattr(part, "query"):
            part.num_attention_heads = pruner.num_heads[part.query]
            part.attention_head_size = part.query.out_features // part.num_attention_heads
            part.all_head_size = part.query.out_features


def fine_tune(case: Case, network: Network) -> Network:
    """The steps of training that every tool may take at a stage: distillation from the original."""
    return Distil(case.network, case.splits.training, (), DistilOptions(steps=case.steps)).train(network)


def build_fp32(network: Network, folder: Path, target: Target) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runtime_of(target).build(network, folder, target)


def build_nncf(case: Case, network: Network, folder: Path, target: Target, *, control: bool = False) -> None:
    """NNCF on the target's own format; with accuracy control it may lose at most ``MAX_DROP`` on the selection."""
    folder.mkdir(parents=True, exist_ok=True)
    export_onnx(network, folder)
    onnx_path = folder / MODEL
    model = onnx.load(onnx_path) if target.runtime == "ort" else openvino.Core().read_model(onnx_path)
    names = _names(model)
    rows = [_as_numpy(batch, names) for batch in shaped(case.splits.calibration, network)]
    data = nncf.Dataset(rows)
    kind = nncf.ModelType.TRANSFORMER if network.takes_text else None
    with quiet():
        if control:
            selection = shaped(case.splits.selection, network, count=None)
            size = len(case.splits.selection) // len(selection)
            label_NB = case.splits.selection.label_N[: size * len(selection)].view(-1, size)

            def judge(compiled, places):  # NNCF asks for all examples, and for single ones
                run, right = _opened(compiled), []
                for place in places:
                    output = torch.from_numpy(np.asarray(run(_as_numpy(selection[place], names))))
                    right.append(case.right(read_output(network, (output,), selection[place]), label_NB[place]))
                return float(torch.cat(right).float().mean()), None

            checked = nncf.Dataset(range(len(selection)), lambda place: _as_numpy(selection[place], names))
            model = nncf.quantize_with_accuracy_control(
                model, data, checked, judge, model_type=kind, max_drop=MAX_DROP, subset_size=len(rows)
            )
        else:
            model = nncf.quantize(model, data, model_type=kind, subset_size=len(rows))
    if target.runtime == "ort":
        onnx.save(model, folder / INT8)
    else:
        openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
    onnx_path.unlink()


def build_ort_static(case: Case, network: Network, folder: Path) -> None:
    """ONNX Runtime's static quantisation as its documentation has it: all operators, weights per channel."""
    folder.mkdir(parents=True, exist_ok=True)
    export_onnx(network, folder)
    prepared = folder / "prepared.onnx"
    quant_pre_process(folder / MODEL, prepared, skip_symbolic_shape=True)
    names = _names(onnx.load(prepared))

    class Reader(CalibrationDataReader):
        rows = iter([_as_numpy(batch, names) for batch in shaped(case.splits.calibration, network)])

        def get_next(self):
            return next(self.rows, None)

    quantize_static(prepared, folder / INT8, Reader(), per_channel=True, weight_type=QuantType.QInt8)
    prepared.unlink()
    (folder / MODEL).unlink()


def _opened(model):
    """The first output of what NNCF hands to its judge: an ONNX graph, or a compiled OpenVINO model."""
    if not hasattr(model, "SerializeToString"):
        return lambda row: next(iter(model(row).values()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda row: session.run(None, row)[0]


def _names(model) -> list[str]:
    given = model.graph.input if hasattr(model, "graph") else model.inputs
    return [one.name if hasattr(one, "name") else one.any_name for one in given]


def _as_numpy(batch, names: list[str]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in batch.items() if name in names}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
