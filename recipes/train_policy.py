"""Train the learned policy of ``apportion fit`` on the ledgers of earlier runs.

    python3 recipes/train_policy.py runs/a runs/b ... --out policy.json
    python3 recipes/train_policy.py recipes/ledgers --out src/apportion/methods/compress/policies/policy.json \\
        --bound src/apportion/methods/compress/bound.json

Give run folders or their ``ledger.jsonl``; runs are only read. The second line makes the policy that ships, from the
ledgers that ship. Prints how many proposals were learned from and how well runs left out of the training were
explained; a share near or below 0 means that the policy knows no better than the mean, and that greedy is the better
choice. ``--bound`` also fits the bound on what composed moves lose (see docs/policies.md) and says how often it failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from apportion.core.ledger import Row
from apportion.errors import ApportionError
from apportion.methods.compress.bound import LossBound, composition, fit_bound
from apportion.methods.compress.history import read_runs
from apportion.methods.compress.policies.learned import train
from apportion.methods.compress.prices import write_bound


def bound_of(runs: Sequence[Sequence[Row]], quality: str) -> LossBound:
    """The bound of the runs that made a move, in the cost that each was about: its latency, or else its first."""
    compositions = []
    for rows in runs:
        keys = [key for key in rows[0].readings if key not in ("quality", "likeness")] if rows else []
        cost = next((key for key in keys if key.startswith("latency")), keys[0] if keys else "")
        moves = composition(rows, cost, quality)
        if moves.steps:
            compositions.append(moves)
    return fit_bound(compositions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders or ledger files")
    parser.add_argument("--out", type=Path, required=True, help="where to write the policy, as JSON")
    parser.add_argument("--bound", type=Path, help="where to write the bound on composed losses, as JSON")
    parser.add_argument("--quality", default="likeness", help="the reading that moves are weighed by, as in fit")
    args = parser.parse_args()
    try:
        runs = [rows for run in args.runs for rows in read_runs(run)]
        ranker = train(runs, args.quality)
        bound = bound_of(runs, args.quality) if args.bound else None
    except ApportionError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    ranker.save(args.out)
    explained = "one run only, nothing held out" if ranker.held_out_r2 is None else f"{ranker.held_out_r2:.0%}"
    print(f"{ranker.num_examples} proposals of {ranker.num_runs} runs; explained in runs left out: {explained}")
    print(f"wrote {args.out}")
    if bound is not None:
        write_bound(bound, args.quality, args.bound)
        print(
            f"bound: the sum plus {bound.margin:.2f} of its size; {bound.num_exceeded} of {bound.num_left_out} runs "
            f"left out exceeded theirs (at most {bound.violation_rate_upper:.0%} at 95 %), "
            f"{bound.num_over_additive} lost more than the plain sum"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
