"""modelopt's FastNAS, run by ``others.py`` in an environment of its own: prunes to a share of the FLOPs.

    python benchmarks/compress_vs_peers/fastnas.py MODEL FOLDER SHARE...

writes one pruned module per share into the folder, each exported as ONNX after the fine-tuning that every tool gets.
Candidates are scored on all selection examples, once for all shares; what feeds the head keeps its width, which the
tool does not prune.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path

import modelopt.torch.prune as mtp
import torch
from modelopt.torch.prune.fastnas import FastNASConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.cases import CASES

from apportion.device.runtimes.graph import export_onnx
from apportion.methods.compress.norms import renormalised
from apportion.methods.compress.repair import Distil, DistilOptions

DIVISOR = 4  # of channels, as in Torch-Pruning's rows; the default of 32 leaves these networks little to choose


def search_space() -> dict:
    """The tool's default choices of width, in steps of ``DIVISOR`` for convolutions and the norms that follow them."""
    config = FastNASConfig().model_dump()
    for rules in config.values():
        for rule in rules.values():
            rule.update({key: DIVISOR for key in rule if key.endswith("_divisor")})
    return config


def main() -> None:
    name, folder, shares = sys.argv[1], Path(sys.argv[2]), [float(share) for share in sys.argv[3:]]
    torch.set_num_threads(1)
    case = CASES[name]
    meter = case.meter.over(case.splits.selection)
    batches = [batch["pixel_values"] for batch in case.splits.calibration.batches]
    distil = Distil(case.network, case.splits.training, (), DistilOptions(steps=case.steps))
    folder.mkdir(parents=True, exist_ok=True)

    def score(module: torch.nn.Module) -> float:
        return meter.read(case.network.replace(module=module.eval())).value

    began = time.perf_counter()
    for share in shares:
        pruned, _ = mtp.prune(
            model=copy.deepcopy(case.network.module),
            mode=[("fastnas", search_space())],
            constraints={"flops": f"{share:.0%}"},
            dummy_input=case.network.inputs["pixel_values"],
            config={
                "data_loader": batches,
                "collect_func": lambda batch: batch,
                "score_func": score,
                "max_iter_data_loader": len(batches),
                "checkpoint": str(folder / "search.pth"),
            },
        )
        network = distil.train(renormalised(case.network.replace(module=pruned), case.splits.calibration))
        out = folder / f"{share:.2f}"
        out.mkdir(exist_ok=True)
        export_onnx(network, out)
        (out / "told.json").write_text(json.dumps({"share": share, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
