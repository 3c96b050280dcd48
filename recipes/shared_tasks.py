"""Serve several specialised tasks from one resident backbone, within a latency budget.

    python3 recipes/shared_tasks.py runs/adapt tasks/banking tasks/travel --budget-ms 30

Give a run of ``apportion adapt`` and folders that ``apportion specialize`` wrote from it. The first start measures what
side branches cost here (a minute or two) and keeps that in the run's folder. Prints what the budget opens, what the
tasks take in memory, and how well each is told apart on its own examples. Without a budget every group is open.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from apportion.cost.profile import Profile
from apportion.device.measure import Shape
from apportion.device.target import find_target
from apportion.errors import ApportionError
from apportion.methods.adapt.folder import AdaptFolder, SpecialFolder
from apportion.methods.adapt.pool import read_pool
from apportion.methods.adapt.shared_clock import SharedClock
from apportion.methods.adapt.shared_folders import load_tasks
from apportion.methods.adapt.shared_sweep import calibrate_shared
from apportion.tasks.support import read_support

TARGET = "torch-cpu-1t"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of apportion adapt")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of apportion specialize")
    parser.add_argument("--budget-ms", type=float, help="of one batch of the shape that the run was trained at")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        profile = args.run / "profiles" / f"shared-{TARGET}.json"
        if args.budget_ms is not None and not profile.is_file():
            with load_tasks(args.run, args.folders) as shared:
                config = AdaptFolder(args.run).config()
                shape = Shape(batch=config.batch, tokens=config.tokens, seed=config.seed)
                calibrate_shared(shared.network, shared.groups, find_target(TARGET), shape).save(profile)
        wanted = {} if args.budget_ms is None else {"budget_ms": args.budget_ms, "profile": profile}
        with load_tasks(args.run, args.folders, **wanted) as shared:
            if wanted:
                clock = SharedClock.of(Profile.load(profile), shared.network, shared.groups)
                run_G = shared.running(shared.names)
                print(f"{int(run_G.sum())} of {len(run_G)} groups run, at most {clock.upper_ms(run_G):.1f} ms a batch")
            megabytes = {name: round(size / 1e6, 1) for name, size in shared.size_bytes().items()}
            print(f"megabytes: {megabytes}")
            for folder in args.folders:
                asked = SpecialFolder(folder).read(SpecialFolder.file)["config"]
                domain = read_support(asked["support"])
                said = shared.classify(read_pool(shared.network, domain).at(np.arange(len(domain))), folder.name)
                right = np.mean(
                    [domain.classes[label] == name for label, name in zip(domain.label_N, said, strict=True)]
                )
                print(f"{folder.name}: {right:.0%} of its own {len(domain)} examples")
    except ApportionError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
