"""The published 5- and 10-shot splits of BANKING77 and CLINC150 under budgets, next to the published figures.

    .venv/bin/python benchmarks/adapt_text/published.py RUN       # minutes on two cores

One support set for all classes, as ``apportion specialize`` would take it, sizes for ONNX Runtime at every budget, and
the whole test set; class means by cosine and a linear head.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apportion.methods.adapt.adapt import Learned, read_learned
from apportion.methods.adapt.episodes import frozen_means
from apportion.methods.adapt.pool import Pool, read_pool
from apportion.methods.adapt.solve import solve
from apportion.models.network import Network
from apportion.tasks.fixed import FIXED, PUBLISHED, SHOTS, fixed_split
from apportion.tasks.heads import HEADS
from apportion.testing.summary import Summary

TARGET = "ort-cpu-1t"
BUDGETS = (0.15, 0.25, 0.5, 1.0)
SHOWN = ("cosine", "logistic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of apportion adapt, or what assemble.py made")
    run = parser.parse_args().run
    summary, learned = Summary(Path(__file__).parent), read_learned(run)
    heads = [f"{rho:.0%}" for rho in BUDGETS]
    print("| split, shots | head | frozen whole | " + " | ".join(heads) + " | published |\n" + "|---" * 8 + "|")
    rows = []
    for name in FIXED:
        for shots in SHOTS:
            rows += [found := judge(learned, name, shots)]
            peers = ", ".join(f"{peer} {value:.1f}" for peer, value in PUBLISHED[f"{name}_{shots}shot"].items())
            for head in SHOWN:
                cells = " | ".join(f"{100 * value:.1f}" for value in found[head])
                print(f"| {name}, {shots} | {head} | {cells} | {peers} |", flush=True)
    summary.write({}, name="published", packages=("torch", "transformers"), rows=rows)


def judge(learned: Learned, name: str, shots: int) -> dict:
    """Accuracy on the test rows by head: of the frozen network, then at every budget."""
    split, family = fixed_split(name, shots), learned.family
    episode, clock = split.episode, family.clocks[TARGET]
    pool = read_pool(family.network, split.domain).on(family.network, "cpu")
    support_S, query_Q = (torch.from_numpy(part.row_N) for part in (episode.support, episode.query))
    label_S, label_Q = (torch.from_numpy(part.label_N) for part in (episode.support, episode.query))
    found: dict = {"split": name, "shots": shots, **{head: [] for head in SHOWN}}
    for rho in (None, *BUDGETS):
        feature_NF = pool.feature_NF
        if rho is not None:
            with torch.no_grad():
                alpha_M = family.plan(frozen_means(pool, episode), rho, TARGET).alpha_M
            sizes = solve(family, alpha_M, rho * clock.whole_ms, clock, learned.values(rho), num_steps=0).sizes
            feature_NF = features_by(family.sliced(alpha_M, sizes if rho < 1 else {}), pool, support_S, query_Q)
        unit_NF = torch.nn.functional.normalize(feature_NF, dim=-1)
        for head in SHOWN:
            logit_QW = HEADS[head].score(unit_NF[support_S], label_S, unit_NF[query_Q], episode.ways)
            found[head].append(round(float((logit_QW.argmax(-1) == label_Q).float().mean()), 4))
    return found


def features_by(network: Network, pool: Pool, *rows: Tensor) -> Tensor:
    """Features of some rows by another network; the others' are left at zero."""
    wanted = np.unique(torch.cat(rows).numpy())
    some = Pool(
        pool.name,
        {name: tensor[wanted] for name, tensor in pool.inputs.items()},
        None if pool.length_N is None else pool.length_N[wanted],
    ).on(network, "cpu")
    feature_NF = torch.zeros(len(pool.feature_NF), some.feature_NF.shape[1])
    feature_NF[wanted] = some.feature_NF
    return feature_NF


if __name__ == "__main__":
    main()
