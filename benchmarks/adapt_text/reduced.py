"""The reduced setting: learning to adapt and specialising on two cores, by the commands.

    .venv/bin/python benchmarks/adapt_text/reduced.py [--steps 30] [--out build/adapt_reduced]

Calibrates MiniLM on one target, in float and in int8, trains a little, makes models of six tasks at two budgets, at the
tighter one in both precisions, and verifies each in fresh processes. Beside their accuracy on queries that of the
frozen network, whole, by class means of the same examples. The run in ``--out`` goes on where it was stopped, and is
what ``apportion specialize`` takes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from judge import SHAPE
from promises import apportion, write_support

from apportion.methods.adapt.pool import Pool, read_pool
from apportion.methods.adapt.specialise import Specialised
from apportion.models.load import load
from apportion.models.network import Network, read_out
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Episode, Sampler
from apportion.tasks.heads import class_means, cosines
from apportion.tasks.protocol import PROTOCOLS, load_protocol
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
TARGET = "ort-cpu-1t"
MADE = (("25%", "fp32"), ("25%", "int8"), ("50%", "fp32"))
NUM_TASKS = 3  # of ID and of OOD each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "build" / "adapt_reduced")
    args = parser.parse_args()
    summary, began = Summary(HERE), time.perf_counter()
    apportion(
        *("adapt", "minilm", "--tasks", "text", "--targets", TARGET, "--int8"),
        *("--steps", str(args.steps), "-o", str(args.out)),
    )
    trained_s = time.perf_counter() - began
    print(f"apportion adapt: {trained_s:.0f} s with {args.steps} steps", flush=True)
    rows = judge(args.out)
    names = [" ".join(how) for how in MADE]
    print("\n| task | frozen, whole | " + " | ".join(names) + " | used | verified |")
    print("|---" * (4 + len(names)) + "|")
    for row in rows:
        made = row["made"]
        cells = [f"{100 * row['frozen']:.0f} %", *(f"{100 * made[name]['accuracy']:.0f} %" for name in names)]
        cells.append(", ".join(f"{100 * made[name]['used']:.0f} %" for name in names))
        cells.append(", ".join("yes" if made[name]["verified"] else "no" for name in names))
        print(f"| {row['side']}: {row['domain']} | {' | '.join(cells)} |")
    all_made = [made for row in rows for made in row["made"].values()]
    figures = {
        "steps": args.steps,
        "adapt_seconds": round(trained_s, 1),
        "seconds": round(time.perf_counter() - began, 1),
        "verified": sum(made["verified"] for made in all_made),
        "models": len(all_made),
    }
    print("\n" + json.dumps(figures, indent=1))
    told = {"figures": figures, **summary.conditions(("torch", "onnxruntime")), "rows": rows}
    (HERE / "results" / "reduced.json").write_text(json.dumps(told, indent=1) + "\n")


def judge(run: Path) -> list[dict]:
    """Accuracy of the models of some tasks, whether they were verified, and how much of their time they use."""
    network, loaded = load("minilm", tokens=32), load_protocol(PROTOCOLS["text"], load_domain)
    rows = []
    for side in ("id", "ood"):
        domains = {domain.name: domain for domain in getattr(loaded, side)}
        sampler = Sampler(tuple(domains.values()), SHAPE, seed=5)
        for number in range(NUM_TASKS):
            episode = sampler.episode(number)
            domain = domains[episode.domain]
            pool = read_pool(network, domain)
            made = {}
            for budget, precision in MADE:
                with tempfile.TemporaryDirectory() as scratch:
                    support, out = write_support(domain, episode, Path(scratch)), Path(scratch) / "made"
                    where = ["--support", str(support), "--budget", budget, "--target", TARGET, "-o", str(out)]
                    if apportion("specialize", str(run), *where, "--precision", precision) is None:
                        raise SystemExit(f"a budget of {budget} was refused; train with a lower --tightest")
                    again = apportion("verify", str(out))
                    assert again is not None
                    used = again["measured_ms"] / next(iter(again["limits"].values()))
                    made[f"{budget} {precision}"] = {
                        "accuracy": accuracy(Specialised(out), pool, episode, domain.classes),
                        "verified": bool(again["met"]),
                        "used": round(used, 4),
                    }
            rows.append({"side": side, "domain": domain.name, "frozen": frozen(network, pool, episode), "made": made})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def accuracy(model: Specialised, pool: Pool, episode: Episode, classes: tuple[str, ...]) -> float:
    wanted = [classes[int(episode.class_W[label])] for label in episode.query.label_N]
    found = model.probabilities(pool.at(episode.query.row_N)).argmax(-1).tolist()
    return sum(model.classes[place] == name for place, name in zip(found, wanted, strict=True)) / len(wanted)


@torch.inference_mode()
def frozen(network: Network, pool: Pool, episode: Episode) -> float:
    feature_SF = read_out(network, pool.at(episode.support.row_N)).float()
    feature_QF = read_out(network, pool.at(episode.query.row_N)).float()
    mean_WF = class_means(feature_SF, torch.from_numpy(episode.support.label_N), episode.ways)
    found_Q = cosines(feature_QF, mean_WF).argmax(-1)
    return float((found_Q == torch.from_numpy(episode.query.label_N)).float().mean())


if __name__ == "__main__":
    main()
