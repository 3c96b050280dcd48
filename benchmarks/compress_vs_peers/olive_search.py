"""Olive's search over ONNX Runtime's quantisation, run by ``others.py`` in an environment of its own.

    python benchmarks/compress_vs_peers/olive_search.py MODEL FOLDER MAX_DROP

writes the models on Olive's front into the folder: of ``NUM_SAMPLES`` settings of its pass (static or dynamic, format,
type, ranges, per channel or not) those that lose at most ``MAX_DROP`` on the selection examples and that no other beats
in both accuracy and latency, as Olive reads them. It is not called ``olive.py``, which would hide the package.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import torch
from olive.data.registry import Registry
from olive.workflows import run

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.cases import CASES

from apportion.device.runtimes.graph import MODEL, export_onnx
from apportion.device.runtimes.inputs import INPUTS
from apportion.models.network import read_output
from apportion.tasks.shaped import shaped

NUM_SAMPLES = 32
ONE_THREAD = {"onnx": {"session_options": {"intra_op_num_threads": 1, "inter_op_num_threads": 1}}}


@Registry.register_dataset()
def calibration_examples(model: str) -> list[dict[str, torch.Tensor]]:
    """What Olive sets ranges by: the examples that every tool gets."""
    case = CASES[model]
    return shaped(case.splits.calibration, case.network)


def selection_accuracy(handler, _device, execution_providers, model: str) -> float:
    """What Olive judges a candidate by: the accuracy on the selection examples."""
    case = CASES[model]
    session = handler.prepare_session(ONE_THREAD["onnx"], execution_providers=execution_providers)
    names = [given.name for given in session.get_inputs()]
    answers = []
    for batch in shaped(case.splits.selection, case.network, count=None):
        outputs = session.run(None, {name: batch[name].numpy() for name in names})
        answers.append(read_output(case.network, tuple(torch.from_numpy(out) for out in outputs), batch))
    return case.meter.over(case.splits.selection).score(torch.cat(answers), case.network.readout).value


def workflow(model: str, folder: Path, max_drop: float) -> dict:
    """Olive's configuration: the quickest on one thread, among those that lose no more than the goal says."""
    quality = {"evaluate_func": "selection_accuracy", "evaluate_func_kwargs": {"model": model}}
    latency = {"name": "p50", "priority": 1, "metric_config": {"warmup_num": 20, "repeat_test_num": 100}}
    goal = {"type": "max-degradation", "value": max_drop}
    return {
        "input_model": {"type": "ONNXModel", "config": {"model_path": str(folder / MODEL)}},
        "data_configs": [
            {
                "name": "calibration",
                "user_script": __file__,
                "load_dataset_config": {"type": "calibration_examples", "params": {"model": model}},
                "dataloader_config": {"type": "no_auto_batch_dataloader"},
            }
        ],
        "evaluators": {
            "both": {
                "metrics": [
                    {
                        "name": "latency",
                        "type": "latency",
                        "sub_types": [latency],
                        "user_config": {"inference_settings": ONE_THREAD},
                    },
                    {
                        "name": "quality",
                        "type": "custom",
                        "sub_types": [{"name": "accuracy", "priority": 2, "higher_is_better": True, "goal": goal}],
                        "user_config": {"user_script": __file__, **quality},
                    },
                ]
            }
        },
        "passes": {"quantise": {"type": "OnnxQuantization", "data_config": "calibration", "quant_preprocess": True}},
        "engine": {
            "search_strategy": {"execution_order": "joint", "sampler": "tpe", "max_samples": NUM_SAMPLES, "seed": 0},
            "evaluator": "both",
            "cache_dir": str(folder / "cache"),
            "output_dir": str(folder / "best"),
            "log_severity_level": 2,
        },
    }


def main() -> None:
    model, folder, max_drop = sys.argv[1], Path(sys.argv[2]).absolute(), float(sys.argv[3])
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    export_onnx(CASES[model].network, folder)
    found = run(workflow(model, folder, max_drop)).get_output_models()
    if not found:
        raise SystemExit(f"none of {NUM_SAMPLES} settings loses at most {max_drop:.0%}")
    seconds = time.perf_counter() - began
    for place, output in enumerate(found, start=1):
        out = folder / str(place)
        out.mkdir(exist_ok=True)
        shutil.copy(output.model_path, out / MODEL)
        shutil.copy(folder / INPUTS, out)
        (out / "told.json").write_text(json.dumps({"seconds": seconds, "metrics": output.metrics_value}))
    shutil.rmtree(folder / "cache")


if __name__ == "__main__":
    main()
