"""Wrong clocks: do budgets hold when the profile is off by a factor or on some parts, and do a few runs mend it?

    .venv/bin/python benchmarks/adapt_text/distort.py RUN [--suite text]

Sizes are chosen with a profile that was made wrong on purpose, as it is and after a correction from twenty runs (half
of them correct, half bound), and measured on the real clock beside the whole network. The runs are drawn from
``results/measured.json``; budgets are milliseconds, shares of what the whole network really takes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from run import FOLDERS, measure_sizes

from apportion.cost.law import AdditiveLaw
from apportion.cost.sample import Sample
from apportion.errors import InfeasibleError
from apportion.methods.adapt.adapt import Learned, read_learned
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.solve import solve
from apportion.testing.summary import Summary

BUDGETS = (0.2, 0.3, 0.5, 0.8)
NUM_RUNS = 20
REPAIRS = ("none", "margin", "affine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of apportion adapt, or what assemble.py made")
    parser.add_argument("--suite", choices=FOLDERS, default="text")
    args = parser.parse_args()
    folder = Path(__file__).parents[1] / FOLDERS[args.suite]
    summary = Summary(folder)
    learned = read_learned(args.run)
    known = json.loads((folder / "results" / "measured.json").read_text())
    chosen = {
        (name, wrong, repair): choose(learned, clock, wrong, repair, known[name])
        for name, clock in learned.family.clocks.items()
        for wrong in ("right", *DISTORTIONS)
        for repair in (REPAIRS if wrong != "right" else REPAIRS[:1])
    }
    for name in learned.family.clocks:
        wanted = {sizes for (target, *_), found in chosen.items() if target == name for sizes in found if sizes}
        missing = [sizes for sizes in wanted if key_of(sizes) not in known[name]]
        known[name] |= measure_sizes(learned.family.network, learned.family.partition, missing, name)
    rows = []
    for (name, wrong, repair), found in chosen.items():
        shares = [known[name][key_of(sizes)][0] / rho for sizes, rho in zip(found, BUDGETS, strict=True) if sizes]
        rows.append({"target": name, "clock": wrong, "repair": repair, "shares": shares, "refused": found.count(None)})
    show(rows)
    summary.write({}, name="distorted", packages=("torch", "onnxruntime", "openvino"), rows=rows)


def scaled(law: AdditiveLaw, factor: float, where: Callable[[str], bool] = lambda _: True) -> AdditiveLaw:
    """The law with the curves of some signatures, or all of it, multiplied."""
    curves = {name: curve.scaled(factor) if where(name) else curve for name, curve in law.curves.items()}
    everything = all(map(where, law.curves))
    return replace(law, curves=curves, intercept_ms=law.intercept_ms * (factor if everything else 1.0))


def of_kind(clock: Clock, *kinds: str) -> set[str]:
    """The signatures of the parts that modules of some kinds make up."""
    wanted = {m.name for m in clock.parts.partition if m.kind in kinds}
    layers = {member.layer for m in clock.parts.partition if m.name in wanted for member in m.members}
    return {s for part, s in clock.profile.cost.law.signature_of.items() if part in wanted | layers}


DISTORTIONS: Mapping[str, Callable[[Clock], AdditiveLaw]] = {
    "a fifth too fast": lambda clock: scaled(clock.profile.cost.law, 0.8),
    "a fifth too slow": lambda clock: scaled(clock.profile.cost.law, 1.2),
    "a tenth of the whole missing": lambda clock: replace(
        clock.profile.cost.law,
        intercept_ms=max(0.0, clock.profile.cost.law.intercept_ms - 0.1 * clock.whole_ms),
    ),
    "heads at half price": lambda clock: scaled(clock.profile.cost.law, 0.5, of_kind(clock, "heads").__contains__),
}


def choose(
    learned: Learned, clock: Clock, wrong: str, repair: str, measured: Mapping[str, list[float]]
) -> list[tuple[int, ...] | None]:
    """The sizes at every budget under a wrong clock, mended or not; None where it refuses."""
    cost = clock.profile.cost
    if wrong != "right":
        cost = replace(cost, law=DISTORTIONS[wrong](clock))
    if repair != "none":
        runs = samples(clock, measured)
        cost = cost.recalibrated(runs[::2], repair).bounded(runs[1::2], alpha=0.1)  # type: ignore[arg-type]
    at = Clock.of(replace(clock.profile, cost=cost), clock.parts)
    alpha_M = torch.full((learned.family.config.num_experts,), 1 / learned.family.config.num_experts)
    found: list[tuple[int, ...] | None] = []
    for rho in BUDGETS:
        try:
            solved = solve(learned.family, alpha_M, rho * clock.whole_ms, at, learned.values(rho), num_steps=0)
            found.append(tuple(solved.sizes.values()))
        except InfeasibleError:
            found.append(None)
    return found


def samples(clock: Clock, measured: Mapping[str, list[float]]) -> list[Sample]:
    """Twenty measured configurations, the same for every way to be wrong."""
    names = [module.name for module in clock.parts.partition]
    drawn = random.Random(0).sample(sorted(measured), NUM_RUNS)
    each = [dict(zip(names, map(int, key.split()), strict=True)) for key in drawn]
    return [
        Sample(
            shares=clock.parts.shares(clock.parts.partition.keep(sizes)), latency_ms=measured[key][0] * clock.whole_ms
        )
        for key, sizes in zip(drawn, each, strict=True)
    ]


def key_of(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


def show(rows: list[dict]) -> None:
    targets = dict.fromkeys(row["target"] for row in rows)
    print("\nbudgets under a wrong clock: held / refused / used of those held, mean over targets and budgets\n")
    print("| the profile says | correction | " + " | ".join(targets) + " | all |\n" + "|---" * (3 + len(targets)) + "|")
    for wrong in dict.fromkeys(row["clock"] for row in rows):
        for repair in REPAIRS:
            some = [row for row in rows if (row["clock"], row["repair"]) == (wrong, repair)]
            if some:
                print(
                    f"| {wrong} | {repair} | " + " | ".join(map(told, [[row] for row in some])) + f" | {told(some)} |"
                )


def told(rows: list[dict]) -> str:
    shares = [share for row in rows for share in row["shares"]]
    held, refused = sum(share <= 1 for share in shares), sum(row["refused"] for row in rows)
    used = f", {np.mean([share for share in shares if share <= 1]):.0%}" if held else ""
    return f"{held} of {len(shares)}" + (f" ({refused} refused)" if refused else "") + used


if __name__ == "__main__":
    main()
