"""The tables of an adapt benchmark, printed from accuracies, chosen sizes and measured latencies."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cells import FLOAT, OURS, WHOLE, Cells, Pair, difference, interval, paired
from figures import (
    adjusted,
    all_figures,
    areas,
    best_baseline,
    clearly_broken,
    domination,
    held_and_used,
    tail,
    tail_mean,
)

from apportion.tasks.fixed import PUBLISHED

FROZEN = "pruned"  # trains nothing: the frozen network where it is whole
CHARACTERS = "20-way 1-shot"
NUM_BEST = 3  # baselines in the table of tails


def print_tables(
    methods: Mapping[str, dict],
    measured: Mapping[str, dict],
    int8: Mapping[str, dict],
    promises: list[dict],
) -> dict[str, float | int | None]:
    """Prints all that is there; returns the figures."""
    cells = Cells.of(methods, measured)
    for side in cells.sides:
        accuracy_table(cells, side)
    if CHARACTERS in cells.sides:
        published_table(cells)
    ahead_tables(cells)
    method_table(cells)
    tail_table(cells)
    domain_table(cells)
    variant_table(cells)
    int8_table(cells, int8)
    share_table(cells, OURS, cells.targets)
    left_out = {
        name: tuple(target for target in cells.targets if target not in methods[name]["targets"])
        for name in cells.table
        if name.startswith(OURS)
    }
    left_out = {name: targets for name, targets in left_out.items() if targets}
    for name, targets in left_out.items():
        tell(f"{name}: trained without {', '.join(targets)}; sizes chosen there by a profile of a few points")
        share_table(cells, name, targets)
    carried = [held_and_used(cells, name, targets)[0] for name, targets in left_out.items()]
    promise_table(promises)
    return all_figures(cells, float(np.mean(carried)) if carried else float("nan"), promises)


def tell(text: str) -> None:
    print("\n" + textwrap.fill(text, 110))


def show(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def points(pair: Pair | None, sign: str = "") -> str:
    return "–" if pair is None else f"{100 * pair[0]:{sign}.1f}±{100 * pair[1]:.1f}"


def number(value: float, form: str) -> str:
    return "–" if np.isnan(value) else f"{value:{form}}"


def shares(budgets: Sequence[float]) -> list[str]:
    return [f"{rho:g}" for rho in budgets]


def accuracy_table(cells: Cells, side: str) -> None:
    count = len(cells.all(OURS, cells.budgets[0], side))
    tell(
        f"{side}, {count} episodes over {len(cells.targets)} targets, % ± half of the 95 % interval; budgets are "
        "shares of the whole's latency"
    )
    budgets = (*cells.budgets, WHOLE)
    show(
        ["method", *shares(budgets)],
        [[name, *(points(interval(cells.all(name, rho, side))) for rho in budgets)] for name in cells.judged(side)],
    )


def three(cells: Cells) -> tuple[float, float, float]:
    """A tight budget, a middle one and the whole."""
    return cells.budgets[0], cells.budgets[len(cells.budgets) // 2], WHOLE


def published_table(cells: Cells) -> None:
    """Characters in 20 ways beside published networks, which were made for just this."""
    tell(
        "Omniglot's test characters in 20 ways with 1 shot beside published figures, %. They are not of one kind: the "
        "published are small networks trained from nothing on Omniglot in such episodes; here a network pretrained on "
        "the training characters and on photographs learns from four domains in 5 to 10 ways, under budgets"
    )
    budgets, judged = three(cells), cells.judged(CHARACTERS)
    some = [name for name in judged if name not in cells.baselines]
    rows = [[n, *(points(interval(cells.all(n, rho, CHARACTERS))) for rho in budgets)] for n in some]
    if FROZEN in judged:
        rows.append(["frozen", "", "", points(interval(cells.all(FROZEN, WHOLE, CHARACTERS)))])
    rows += [[f"{name}, published", "", "", f"{value:.1f}"] for name, value in PUBLISHED["omniglot_20way1shot"].items()]
    show(["method", *shares(budgets)], rows)


def ahead_tables(cells: Cells) -> None:
    tell(
        "how far ours is ahead of each at an equal measured latency, that of ours at each budget: points on the same "
        "episodes, mean of both sides, ± half of the 95 % interval. Between its points a method's episodes are lines "
        "over the logarithm of latency, on each target; where it begins just above ours both are read there, and where "
        "it begins only past ours' next point it has none (–)"
    )
    others = (*cells.baselines, *(name for name in cells.rounded if name not in cells.baselines))
    lead_table(cells, cells.ahead, OURS, others)
    if FLOAT in cells.table:
        tell(f"the same of {FLOAT}, whose slices are in float as those of its baselines are")
        lead_table(cells, cells.ahead, FLOAT, [name for name in others if name not in cells.rounded])
    tell("ours at equal budgets, of which methods use different shares")
    own = [FLOAT] if FLOAT in cells.table else []
    lead_table(cells, cells.ahead_at_budget, OURS, [*own, *others])


def lead_table(cells: Cells, ahead: Callable[..., Pair | None], name: str, others: Sequence[str]) -> None:
    rows = [[other, *(points(ahead(name, other, rho, *cells.main), "+") for rho in cells.budgets)] for other in others]
    show(["method", *shares(cells.budgets)], rows)


def method_table(cells: Cells) -> None:
    tell(
        "every method over all budgets and targets. Held: choices that keep their budget on the clock; clearly over: "
        "those that break it by more than 1.96 standard errors of the clock; gap: predicted "
        "to hold (all of them: sizes are rounded until their bound does) less held; used: mean share taken of the "
        "budget, or of the whole network in the precision chosen where that is less; adjusted: accuracy with zero "
        "where the budget is broken; area: mean accuracy over the logarithm of measured latency, from where it and "
        "ours both begin, and ours' there; then of the budgets of ID and OOD, how many where ours is clearly ahead at "
        "equal latency, level, clearly behind, or has nothing to compare with"
    )
    rows = []
    for name in cells.table:
        held, used, _ = held_and_used(cells, name)
        ours, area = areas(cells, name)
        told = [number(held, ".1%"), number(clearly_broken(cells, name), ".1%")]
        told += [number(100 * (1 - held), ".1f"), number(used, ".0%")]
        told += [number(100 * adjusted(cells, name), ".1f"), number(100 * area, ".2f"), number(100 * ours, ".2f")]
        told += ["", "", "", ""] if name == OURS else list(map(str, domination(cells, name)))
        rows.append([name, *told])
    heads = ["held", "clearly over", "gap", "used", "adjusted", "area", "ours' area", "ahead", "level", "behind", "–"]
    show(["method", *heads], rows)


def tail_table(cells: Cells) -> None:
    own = [name for name in cells.table if name not in cells.baselines]
    best = sorted(cells.baselines, key=lambda name: -tail_mean(cells, name))[:NUM_BEST]
    tell(
        "mean accuracy of the worst tenth of the episodes by budget, %: ours, its relatives, and the "
        f"{len(best)} baselines that have the most of it"
    )
    rows = [
        [side, name, *(f"{100 * tail(cells, name, rho, side):.1f}" for rho in (*cells.budgets, WHOLE))]
        for side in cells.main
        for name in (*own, *best)
    ]
    show(["side", "method", *shares((*cells.budgets, WHOLE))], rows)


def domain_table(cells: Cells) -> None:
    best = best_baseline(cells)
    columns = [(name, rho) for rho in three(cells) for name in (OURS, best)]
    heads = [f"{name} {rho:g}" for name, rho in columns]
    if FROZEN in cells.table and best != FROZEN:
        columns.append((FROZEN, WHOLE))
        heads.append("frozen")
    tell(f"accuracy by domain, %; {best} is the baseline with the largest area, frozen is the whole network untrained")
    rows = []
    for side in cells.main:
        domain_N = np.concatenate([row.domain_N for row in cells.each(OURS, WHOLE, side)])
        for domain in sorted(set(domain_N)):
            some = domain_N == domain
            told = [points(interval(cells.all(name, rho, side)[some])) for name, rho in columns]
            rows.append([f"{side}: {domain}", str(some.sum()), *told])
    show(["domain", "episodes", *heads], rows)


def variant_table(cells: Cells) -> None:
    if not cells.variants:
        return
    bases = dict.fromkeys(name.partition(":")[0] for name in cells.variants)
    tell(f"{', '.join(bases)} with one thing changed, points against it on the same episodes at equal budgets")
    chosen = [
        rho
        for rho in (*cells.budgets, WHOLE)
        if all((name, target, rho) in cells.rows for name in cells.variants for target in cells.targets)
    ]
    rows = [
        [
            name.partition(":")[2],
            *(
                points(cells.ahead_at_budget(name, name.partition(":")[0], rho, side), "+")
                for side in cells.main
                for rho in chosen
            ),
        ]
        for name in cells.variants
    ]
    show(["changed", *(f"{side} {rho:g}" for side in cells.main for rho in chosen)], rows)


def int8_table(cells: Cells, int8: Mapping[str, dict]) -> None:
    if not int8:
        return
    count = len(next(iter(int8.values()))[cells.main[0]])
    tell(f"the whole frozen network in int8, and ours at its latency, first {count} episodes, %")
    rows = []
    for target, row in int8.items():
        told = []
        for side in cells.main:
            each = len(row[side]) // len(cells.targets)
            curves = [cells.curve(OURS, name, side).at(row["ratio"]) for name in cells.targets]
            ours = [accuracy_N[:each] for accuracy_N in curves if accuracy_N is not None]
            if len(ours) < len(cells.targets):
                told += [f"{100 * np.mean(row[side]):.1f}", "–", "–"]
                continue
            # episodes visit the targets in turn, and int8 was judged on all of them
            other = [np.array(row[side][place :: len(cells.targets)][:each]) for place in range(len(cells.targets))]
            ahead = paired([difference(zip(ours, other, strict=True))])
            told += [
                f"{100 * np.mean(row[side]):.1f}",
                f"{100 * np.mean(np.concatenate(ours)):.1f}",
                points(ahead, "+"),
            ]
        rows.append([target, f"{row['ratio']:.2f}", *told])
    show(
        ["target", "latency", *(f"{what} {side}" for side in cells.main for what in ("int8", "ours", "ahead"))],
        rows,
    )


def beside_table(by_profiles: Mapping[str, float], side_by_side: Mapping[str, float]) -> None:
    """How far apart two profiles are that were calibrated one after the other."""
    if not side_by_side:
        return
    tell(
        "the whole network in int8 as a share of the latency in float: by the two profiles that sizes were chosen by, "
        "and measured in the same processes"
    )
    rows = []
    for name, share in side_by_side.items():
        rows.append([name, f"{by_profiles[name]:.1%}", f"{share:.1%}", f"{share / by_profiles[name] - 1:+.1%}"])
    show(["target", "by profiles", "side by side", "apart"], rows)


def share_table(cells: Cells, name: str, targets: Sequence[str]) -> None:
    tell(f"share of each budget that {name} takes, as measured; over 100 % breaks it; most: of any episode")
    rows = []
    for target in targets:
        taken = [cells.rows[name, target, rho].latency / rho for rho in cells.budgets]
        every = np.concatenate([cells.rows[name, target, rho].latency_N / rho for rho in cells.budgets])
        most = max(every[~np.isnan(every)], default=float("nan"))
        held, *_ = held_and_used(cells, name, (target,))
        rows.append([target, *(number(share, ".0%") for share in taken), number(most, ".1%"), number(held, ".0%")])
    show(["target", *shares(cells.budgets), "most", "held"], rows)


def promise_table(promises: list[dict]) -> None:
    if not promises:
        return
    tell("specialised at random budgets by the command, then verified in fresh processes")
    rows = []
    for row in promises:
        start = [f"{row['side']}: {row['domain']}", row["target"], row["budget"]]
        if row["refused"]:
            rows.append([*start, "", "refused", "", ""])
            continue
        yes = ["yes" if row[key] else "no" for key in ("met", "verified")]
        rows.append([*start, f"{row['utilisation']:.0%}", *yes, f"{row['forward_passes']:.1f}"])
    show(["task", "target", "budget", "used", "met", "verified", "support passes"], rows)
