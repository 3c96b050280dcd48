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
        str | None, typer.Option(help="Correct the profile first, by up to 8 of the samples: affine, isotonic, margin.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where the corrected profile goes.")] = None,
    seed: Annotated[int, typer.Option(help="Of the configurations drawn; not the one calibrated with.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars
    from apportion.cost.audit import audit
    from apportion.cost.held_out import correct, measure_held_out
    from apportion.cost.profile import Profile
    from apportion.cost.recalibrate import HOWS
    from apportion.cost.sample import CostError
    from apportion.device.conditions import explain

    known = Profile.load(profile)
    if recalibrate is not None and (recalibrate not in HOWS or out is None):
        raise CostError(f"--recalibrate {recalibrate} needs one of {', '.join(HOWS)}, and -o FILE to write to")
    if elsewhere := known.elsewhere():
        typer.echo(f"warning: {elsewhere}", err=True)
    bars = Bars(quiet=as_json)
    with bars.stage("measure unseen slices") as update:
        held_out = measure_held_out(known, count=count, seed=seed, confirmed=model, on_share=update)
    then, unseen, bound_note = known.baseline, held_out.samples, None
    if recalibrate is not None and out is not None:
        corrected = correct(known, held_out, recalibrate)  # type: ignore[arg-type]
        known, unseen, bound_note = corrected.profile, corrected.unseen, corrected.explain()
        known.save(out)
    scaled = replace(held_out, samples=unseen).as_of(known.baseline)
    found, absolute = audit(known.cost, scaled), audit(known.cost, unseen)
    if plot is not None:
        from apportion.report.scatter import write_scatter

        write_scatter(known, scaled, plot)
    ratio = held_out.baseline.value / then.value
    if as_json:
        told = {"profile": str(profile), "model": known.model, "target": known.target.name, "plot": plot and str(plot)}
        clock = {
            "baseline_now": held_out.baseline.to_json(),
            "baseline_then": then.to_json(),
            "baseline_ratio": ratio,
            "machine_differs": elsewhere,
            "absolute": absolute.to_json(),
            "correction": bound_note,
        }
        print(json.dumps({**told, **clock, **found.to_json(), "conditions": dict(held_out.conditions)}))
        return Exit.MET
    typer.echo(f"{known.model} on {known.target.name}")
    typer.echo(f"whole network {held_out.baseline.value:.4g}ms now, {then.value:.4g}ms then ({ratio - 1:+.1%})")
    typer.echo("relative to the whole network:")
    typer.echo(found.table())
    held = "no bound" if absolute.coverage is None else f"bound held for {absolute.coverage:.1%}"
    errors = f"median error {absolute.median_rel_error:.1%}, p95 {absolute.p95_rel_error:.1%}"
    typer.echo(f"in milliseconds of the clock now: {held}, {errors}")
    if held_out.conditions.get("disturbed") == "busy":  # short timings are noisy by design, and the bound allows for it
        typer.echo(explain(held_out.conditions))
    if plot is not None:
        typer.echo(f"plot: {plot}")
    if bound_note is not None:
        typer.echo(f"corrected profile ({recalibrate}, judged above on samples it has not seen): {out}; {bound_note}")
    return Exit.MET
