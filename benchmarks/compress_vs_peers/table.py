"""Tables and figures of the comparison, from its points."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence

import moocore
import numpy as np
from benchmarks.compress_vs_peers import others
from benchmarks.compress_vs_peers.points import ORIGINAL, Point
from benchmarks.compress_vs_peers.tools import MAX_DROP

OURS = "apportion"
REFERENCE = (1.0, 0.5)  # latency as a share of the original's, and error: what hypervolume is counted from
MACS_TOOLS = ("TP uniform", "TP global", "FastNAS")
ACCURACY_TOOLS = ("NNCF controlled", "Olive")


def best_within(points: Sequence[Point], tool: str, budget: float) -> Point | None:
    """The most accurate point of a tool within a budget; of a tool that quantises after pruning, int8 alone counts."""
    named = {tool, "NNCF"} if tool.endswith("+ NNCF") else {tool}
    within = [p for p in points if p.tool in named and p.ratio is not None and p.ratio <= budget]
    return max(within, key=lambda point: point.accuracy, default=None)


def verdict(ours: Point | None, peer: Point | None) -> str:
    """``win``, ``tie`` or ``loss`` by the paired difference on the same examples, at two standard errors."""
    if ours is None or peer is None:
        return "tie" if ours is None and peer is None else "win" if peer is None else "loss"
    mean, half = gap(ours, peer)
    return "tie" if abs(mean) <= half else "win" if mean > 0 else "loss"


def gap(ours: Point, peer: Point) -> tuple[float, float]:
    """How far ours is ahead on the same examples, and half of the 95 % interval."""
    gap_N = ours.right_N - peer.right_N
    return float(gap_N.mean()), 1.96 * float(gap_N.std()) / len(gap_N) ** 0.5


def volume(points: Sequence[Point], tool: str) -> float:
    named = {tool, "NNCF"} if tool.endswith("+ NNCF") else {tool}
    front = [(p.ratio, 1 - p.accuracy) for p in points if p.tool in named and p.ratio is not None]
    return float(moocore.hypervolume(np.array(front), ref=REFERENCE)) if front else 0.0


def promises(points: Sequence[Point], tool: str, wanted: Sequence[float]) -> tuple[int, int]:
    """How many of a tool's own promises were kept, of how many.

    Ours: the rung certified for a budget; a budget without a rung was refused, which promises nothing. A tool that
    counts operations: its first point whose share of MACs is within the budget. NNCF with accuracy control, and Olive
    with its goal: the accuracy that it says it keeps.
    """
    own = [point for point in points if point.tool == tool]
    if tool in ACCURACY_TOOLS:
        original = next(point for point in points if point.tool == ORIGINAL)
        return sum(original.accuracy - point.accuracy <= MAX_DROP for point in own), len(own)
    if tool == OURS:
        return sum(p.ratio <= p.promised for p in own), len(own)
    if tool not in MACS_TOOLS:
        return 0, 0
    chosen = [(b, max((p for p in own if p.promised <= b), key=lambda p: p.promised, default=None)) for b in wanted]
    made = [(budget, point) for budget, point in chosen if point is not None]
    return sum(point.ratio <= budget for budget, point in made), len(made)


def show(results: Mapping[tuple[str, str], Sequence[Point]], budgets: Mapping[str, Sequence[float]]) -> dict:
    verdicts, volumes, times = [], [], []
    kept: dict[str, list[int]] = {}
    for (model, target), points in results.items():
        wanted = budgets[model]
        names = sorted({point.tool for point in points} - {ORIGINAL, OURS})
        original = next(point for point in points if point.tool == ORIGINAL)
        print(f"\n### {model} on {target}: accuracy {original.accuracy:.1%} at the start, {original.count} examples\n")
        heads = ["tool", *(f"≤ {b:.0%}" for b in wanted), "hypervolume", "promises kept", "steps", "seconds"]
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for tool in (OURS, *names):
            cells = [best_within(points, tool, budget) for budget in wanted]
            own = promises(points, tool, wanted)
            kept.setdefault(tool, [0, 0])
            kept[tool] = [kept[tool][0] + own[0], kept[tool][1] + own[1]]
            told = [f"{cell.accuracy:.1%}" if cell else "–" for cell in cells]
            seconds = max(point.seconds for point in points if point.tool == tool)
            said = f"{own[0]} of {own[1]}" if own[1] else "none made"
            steps = max((point.steps for point in points if point.tool == tool and point.steps), default="")
            print(f"| {tool} | {' | '.join(told)} | {volume(points, tool):.3f} | {said} | {steps} | {seconds:.0f} |")
        for name, reason in others.not_run(model, target, points).items():
            print(f"| {name} |" + " |" * len(wanted) + f" | not run: {reason} | |")
        found, losses = [], []
        for budget in wanted:
            peers = [best_within(points, name, budget) for name in names]
            best = max((p for p in peers if p), key=lambda point: point.accuracy, default=None)
            ours = best_within(points, OURS, budget)
            found.append(verdict(ours, best))
            if found[-1] == "loss" and ours is not None and best is not None:
                mean, half = gap(ours, best)
                losses.append(f"{best.tool} at {budget:.0%}: {100 * mean:.2f} ± {100 * half:.2f} points")
        print("\nagainst the best peer at each budget: " + "; ".join([", ".join(found), *losses]))
        verdicts += found
        leader = max(names, key=lambda name: volume(points, name))
        volumes.append(volume(points, OURS) / volume(points, leader))
        spent = {tool: max(p.seconds for p in points if p.tool == tool) for tool in (OURS, leader)}
        times.append(spent[OURS] / spent[leader])
    shares = {tool: good / made for tool, (good, made) in kept.items() if made}
    figures = {
        "points": len(verdicts),
        "win_or_tie_share": round(sum(v != "loss" for v in verdicts) / len(verdicts), 4),
        "win_share": round(verdicts.count("win") / len(verdicts), 4),
        "promises_kept": round(shares[OURS], 4),
        "peer_promises_kept": round(max(share for tool, share in shares.items() if tool != OURS), 4),
        "hypervolume_ratio_best_peer": round(statistics.geometric_mean(volumes), 4),
        "optimise_time_ratio_best_peer": round(statistics.geometric_mean(times), 4),
    }
    print(f"\n{json.dumps(figures, indent=1)}")
    return figures
