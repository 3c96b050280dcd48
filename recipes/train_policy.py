"""Train the learned policy of ``apportion fit`` on the ledgers of earlier runs.

    python3 recipes/train_policy.py runs/a runs/b ... --out policy.json
    python3 recipes/train_policy.py recipes/ledgers --out src/apportion/methods/compress/policies/policy.json

Give run folders or their ``ledger.jsonl``; runs are only read. The second line makes the policy that ships, from the
ledgers that ship. Prints how many proposals were learned from and how well runs left out of the training were
explained; a share near or below 0 means that the policy knows no better than the mean, and that greedy is the better
choice.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from apportion.errors import ApportionError
from apportion.methods.compress.history import read_runs
from apportion.methods.compress.policies.learned import train


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders or ledger files")
    parser.add_argument("--out", type=Path, required=True, help="where to write the policy, as JSON")
    parser.add_argument("--quality", default="likeness", help="the reading that moves are weighed by, as in fit")
    args = parser.parse_args()
    try:
        ranker = train([rows for run in args.runs for rows in read_runs(run)], args.quality)
    except ApportionError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    ranker.save(args.out)
    explained = "one run only, nothing held out" if ranker.held_out_r2 is None else f"{ranker.held_out_r2:.0%}"
    print(f"{ranker.num_examples} proposals of {ranker.num_runs} runs; explained in runs left out: {explained}")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
