"""``apportion calibrate``: fit a cost model of a network on a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.options import ImageSize
from apportion.errors import Exit

HELP = """Measure slices of MODEL on a target and fit the cost model that predicts and bounds all others.

Stopped and started again with the same -o, it goes on where it was.

Example: apportion calibrate minilm --target ort-cpu-1t -o minilm-ort.json
Example: apportion calibrate minilm --target ort-cpu-1t --loss quantile --tau 0.95 -o minilm-high.json
"""
LOSSES = ("least-squares", "quantile", "envelope")


def command(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, or module.path:factory.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Profile to write (JSON).", metavar="FILE")],
    target: Annotated[str | None, typer.Option(help="Where to run; default torch-cpu-1t.")] = None,
    like: Annotated[Path | None, typer.Option(help="Profile on another target to carry over: 8 points do.")] = None,
    batch: Annotated[int, typer.Option(help="Examples per forward pass.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per example.")] = 64,
    size: ImageSize = None,
    loss: Annotated[str, typer.Option(help="What is fitted: least-squares, quantile or envelope.")] = "least-squares",
    tau: Annotated[float, typer.Option(help="The quantile of --loss quantile.")] = 0.9,
    sweeps: Annotated[bool, typer.Option("--sweeps", help="Fit to sweeps of one module at a time.")] = False,
    menu: Annotated[int, typer.Option(help="Bound so many configurations at once; takes 19 measurements each.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the configurations drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars, new_table, print_table
    from apportion.cost.calibrate import calibrate
    from apportion.cost.parts import Parts
    from apportion.cost.profile import Profile
    from apportion.cost.sample import CostError
    from apportion.device.conditions import explain
    from apportion.device.measure import Shape
    from apportion.device.probe import working_target
    from apportion.device.store import Store
    from apportion.models.load import load
    from apportion.models.partition import Partition

    if loss not in LOSSES or not 0.0 < tau < 1.0 or menu < 1:
        possible = f"{', '.join(LOSSES)}, a tau between 0 and 1, a menu of at least 1"
        raise CostError(f"--loss {loss} --tau {tau:g} --menu {menu}; choose one of {possible}")
    source = None if like is None else Profile.load(like)
    bars = Bars(quiet=as_json)
    with bars.stage("try the target"):
        where = working_target(target)
    with bars.stage("load and trace"):
        network = load(model, batch=batch, tokens=tokens, seed=seed, size=size)
        parts = Parts.of(network, Partition.of(network))
    with bars.stage("measure slices") as update:
        shape = Shape(batch=batch, tokens=tokens, seed=seed, size=size)
        kept = out.with_name(f".{out.name}.part")  # what a stopped calibration had measured
        profile = calibrate(
            network,
            parts,
            where,
            shape,
            seed=seed,
            num_menu=menu,
            like=source,
            loss=loss.replace("-", "_"),  # type: ignore[arg-type]
            tau=tau,
            sweeps=sweeps,
            store=Store(kept),
            on_share=update,
        )
    profile.save(out)
    kept.unlink()
    cost = profile.cost
    seen = parts.seen(profile.view)
    prices = {part.name: cost.price(part.name, 1.0) for part in seen.parts}
    if as_json:
        told = {
            "profile": str(out),
            "model": model,
            "target": where.name,
            "baseline": profile.baseline.to_json(),
            "floor_ms": profile.floor_ms,
            "intercept_ms": cost.law.intercept_ms,
            "launches": cost.launches.to_json() if cost.launches else None,
            "bound": cost.bound.to_json() if cost.bound else None,
            "loss": cost.loss,
            "fidelity": profile.fidelity.to_json() if profile.fidelity else None,
            "power": profile.power.to_json() if profile.power else None,
            "view": profile.view.to_json(),
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
    if profile.fidelity is not None:
        error, last = profile.fidelity.error, profile.fidelity.frontier[-1]
        typer.echo(
            f"on {error.count} slices it was not fitted to: within a factor {profile.fidelity.kappa:.3f} "
            f"or {last.eps_ms:.3g}ms, 95 % within {error.eta:.1%}"
        )
    if cost.launches is not None:
        typer.echo(
            f"bound by launches where little work is left: no less than {cost.launches.always_ms:.3g}ms "
            f"and {cost.launches.each_ms:.3g}ms for every part that is there"
        )
    if profile.power is not None:
        typer.echo(f"the whole network {profile.power.explain()}")
    if (grid := profile.view.grid) > 1:
        typer.echo(f"its kernels work on {grid} channels at a time: widths between multiples cost the next one")
    if profile.conditions.get("disturbed") == "busy":  # short timings are noisy by design, and the bound allows for it
        typer.echo(explain(profile.conditions))
    typer.echo(f"calibrated in {profile.seconds:.0f} s; profile: {out}")
    return Exit.MET
