"""Make a run folder, as ``apportion adapt`` leaves it, out of what ``train.py`` and ``judge.py`` left for ours.

.venv/bin/python benchmarks/adapt_text/assemble.py --suite text --trained FOLDER -o runs/adapt-gpu
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file, save
from suite import PROFILES, SUITES, TARGETS, TWINS, shares_in_int8

from apportion.core.folder import write_whole
from apportion.cost.profile import Profile
from apportion.methods.adapt.folder import AdaptConfig, AdaptFolder
from apportion.models.load import load
from apportion.tasks.features import network_digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="text")
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    model = SUITES[args.suite][0]
    rows = map(json.loads, (args.trained / "results.jsonl").read_text().splitlines())
    ours = next(row for row in rows if row["method"] == "ours")
    folder = AdaptFolder(args.out)
    config = AdaptConfig(model=model, tasks=args.suite, targets=TARGETS, int8=True, steps=ours["steps"])
    folder.start(config, network_digest(load(model, tokens=config.tokens)))
    for target in (*TARGETS, *TWINS.values()):
        Profile.load(args.profiles / f"{model}-{target}.json").save(folder.profile(target))
    folder.write(folder.beside.name, shares_in_int8(args.profiles, model))
    tensors = load_file(args.trained / "ours.safetensors")
    write_whole(folder.tensors, save({name: tensor.float() for name, tensor in tensors.items()}))
    folder.write("orders.json", ours["orders"])
    folder.write(
        "training.json", {"steps": ours["steps"], "seconds": ours["seconds"]["train"], "prices": ours["state"]}
    )
    folder.write("result.json", {"model": model, "tasks": args.suite, "steps": ours["steps"], "device": ours["device"]})


if __name__ == "__main__":
    main()
