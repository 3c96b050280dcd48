"""``apportion audit``: try a profile on configurations it has not seen, measured now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """Judge a PROFILE on configurations it has not seen, measured now: error, coverage of its bound, ranking.

Example: apportion audit minilm-ort.json --plot audit.html
Example: apportion audit minilm-ort.json --recalibrate affine -o minilm-ort-today.json
"""


def command(
    profile: Annotated[Path, typer.Argument(help="File that calibrate wrote.", metavar="PROFILE", show_default=False)],
    count: Annotated[int, typer.Option(help="Configurations to measure.")] = 24,
    model: Annotated[str | None, typer.Option(help="The network, where it came from a factory.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of predicted against measured (HTML).")] = None,
    recalibrate: Annotated[
        str | None, typer.Option(help="Correct the profile first: affine, isotonic or margin, by half of the samples.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where the corrected profile goes.")] = None,
    seed: Annotated[int, typer.Option(help="Of the configurations drawn; not the one calibrated with.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars
    from apportion.cost.audit import audit
    from apportion.cost.held_out import measure_held_out
    from apportion.cost.profile import Profile
    from apportion.cost.recalibrate import HOWS
    from apportion.cost.sample import CostError
    from apportion.device.conditions import explain

    known = Profile.load(profile)
    if recalibrate is not None and (recalibrate not in HOWS or out is None):
        raise CostError(f"--recalibrate {recalibrate} needs one of {', '.join(HOWS)}, and -o FILE to write to")
    bars = Bars(quiet=as_json)
    with bars.stage("measure unseen slices") as update:
        samples, conditions = measure_held_out(known, count=count, seed=seed, confirmed=model, on_share=update)
    if recalibrate is not None and out is not None:
        half = len(samples) // 2
        known = replace(known, cost=known.cost.recalibrated(samples[:half], recalibrate))  # type: ignore[arg-type]
        samples = samples[half:]
        known.save(out)
    found = audit(known.cost, samples)
    if plot is not None:
        from apportion.report.scatter import write_scatter

        write_scatter(known, samples, plot)
    if as_json:
        told = {"profile": str(profile), "model": known.model, "target": known.target.name, "plot": plot and str(plot)}
        print(json.dumps({**told, **found.to_json(), "conditions": dict(conditions)}))
        return Exit.MET
    typer.echo(f"{known.model} on {known.target.name}")
    typer.echo(found.table())
    if conditions.get("disturbed") == "busy":  # short timings are noisy by design, and the bound allows for it
        typer.echo(explain(conditions))
    if plot is not None:
        typer.echo(f"plot: {plot}")
    if out is not None and recalibrate is not None:
        typer.echo(f"corrected profile ({recalibrate}, judged above on samples it has not seen): {out}")
    return Exit.MET
