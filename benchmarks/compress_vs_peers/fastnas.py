"""modelopt's FastNAS, run by ``others.py`` in an environment of its own: prunes to a share of the FLOPs.

    python benchmarks/compress_vs_peers/fastnas.py MODEL SHARE FILE

writes the pruned module's widths and weights as a plain state to FILE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import modelopt.torch.prune as mtp
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.cases import CASES


def main() -> None:
    name, share, out = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    case = CASES[name]
    module = case.network.module
    batches = [batch["pixel_values"] for batch in case.splits.calibration.batches]
    meter = case.meter.over(case.splits.selection)
    pruned, _ = mtp.prune(
        model=module,
        mode=[("fastnas", mtp.fastnas.FastNASConfig(**{"nn.Conv2d": {"*": {"channel_divisor": 4}}}).model_dump())]
        if hasattr(mtp, "fastnas") and len(sys.argv) > 4
        else "fastnas",
        constraints={"flops": f"{share:.0%}"},
        dummy_input=case.network.inputs["pixel_values"],
        config={
            "data_loader": batches,
            "collect_func": lambda batch: batch,
            "score_func": lambda model: meter.read(case.network.replace(module=model.eval())).value,
            "max_iter_data_loader": len(batches),
            "checkpoint": str(out.with_suffix(".search")),
        },
    )
    torch.save(pruned, out)


if __name__ == "__main__":
    main()
