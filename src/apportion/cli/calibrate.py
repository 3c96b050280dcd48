"""``apportion calibrate``: fit a cost model of a network on a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """Measure slices of MODEL on a target and fit the cost model that predicts and bounds all others.

Example: apportion calibrate minilm --target ort-cpu-1t -o minilm-ort.json
"""


def command(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, or module.path:factory.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Profile to write (JSON).", metavar="FILE")],
    target: Annotated[str | None, typer.Option(help="Where to run; default torch-cpu-1t.")] = None,
    like: Annotated[Path | None, typer.Option(help="Profile on another target to carry over: 8 points do.")] = None,
    batch: Annotated[int, typer.Option(help="Examples per forward pass.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per example.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the configurations drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars, new_table, print_table
    from apportion.cost.calibrate import calibrate
    from apportion.cost.parts import Parts
    from apportion.cost.profile import Profile
    from apportion.device.conditions import explain
    from apportion.device.measure import Shape
    from apportion.device.probe import working_target
    from apportion.models.load import load
    from apportion.models.partition import Partition

    source = None if like is None else Profile.load(like)
    bars = Bars(quiet=as_json)
    with bars.stage("try the target"):
        where = working_target(target)
    with bars.stage("load and trace"):
        network = load(model, batch=batch, tokens=tokens, seed=seed)
        parts = Parts.of(network, Partition.of(network))
    with bars.stage("measure slices") as update:
        shape = Shape(batch=batch, tokens=tokens, seed=seed)
        profile = calibrate(network, parts, where, shape, seed=seed, like=source, on_share=update)
    profile.save(out)
    cost = profile.cost
    seen = parts.seen(grid=profile.grid, widths=profile.widths)
    prices = {part.name: cost.price(part.name, 1.0) for part in seen.parts}
    if as_json:
        told = {
            "profile": str(out),
            "model": model,
            "target": where.name,
            "baseline": profile.baseline.to_json(),
            "floor_ms": profile.floor_ms,
            "intercept_ms": cost.law.intercept_ms,
            "bound": cost.bound.to_json() if cost.bound else None,
            "grid": profile.grid,
            "widths": profile.widths,
            "prices_ms": prices,
            "seconds": profile.seconds,
            "failures": dict(profile.failures),
            "conditions": dict(profile.conditions),
        }
        print(json.dumps(told))
        return Exit.MET
    table = new_table("part", "price", "of all", title=f"{model} on {where.name}: the price of every part")
    total = profile.baseline.value
    for name, price_ms in sorted(prices.items(), key=lambda pair: -pair[1])[:20]:
        table.add_row(name, f"{price_ms:.3g}ms", f"{price_ms / total:.1%}")
    if len(prices) > 20:
        rest = sum(sorted(prices.values())[: len(prices) - 20])
        table.add_row(f"{len(prices) - 20} more parts", f"{rest:.3g}ms", f"{rest / total:.1%}")
    table.add_row("always there", f"{cost.law.intercept_ms:.3g}ms", f"{cost.law.intercept_ms / total:.1%}")
    print_table(table)
    bound = cost.bound.explain() if cost.bound else "no bound"
    typer.echo(f"whole network {total:.4g}ms, smallest {profile.floor_ms or float('nan'):.4g}ms; {bound}")
    if profile.grid > 1:
        typer.echo(f"its kernels work on {profile.grid} channels at a time: widths between multiples cost the next one")
    if profile.conditions.get("disturbed") == "busy":  # short timings are noisy by design, and the bound allows for it
        typer.echo(explain(profile.conditions))
    typer.echo(f"calibrated in {profile.seconds:.0f} s; profile: {out}")
    return Exit.MET
