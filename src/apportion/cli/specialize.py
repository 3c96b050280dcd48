"""``apportion specialize``: a model for one small task and one budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """Make a model for the task of a support set, within a budget, out of a RUN of apportion adapt.

Example: apportion specialize runs/adapt --support task.csv --budget 6ms --target ort-cpu-1t -o task-model
"""


def command(
    run: Annotated[Path, typer.Argument(help="Folder that adapt wrote.", metavar="RUN", show_default=False)],
    support: Annotated[str, typer.Option(help="Labelled examples: .csv .tsv .jsonl .parquet, class folders, a name.")],
    budget: Annotated[str, typer.Option(help="Latency, such as 6ms or 30%.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.", metavar="OUT")],
    target: Annotated[str | None, typer.Option(help="Where it will run; one that was trained for.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Of another target (apportion calibrate).")] = None,
    verify: Annotated[bool, typer.Option(help="Measure, and step down until it surely holds.")] = True,
    head: Annotated[str, typer.Option(help="cosine or prototype (class means), or linear (fitted).")] = "cosine",
    refine: Annotated[bool, typer.Option("--refine", help="One step on the mixture by the examples' losses.")] = False,
    depths: Annotated[bool, typer.Option("--depths", help="Examples choose among depths next to the usual.")] = False,
    risk: Annotated[float, typer.Option(help="Weight of their variance in that step; above 0 takes it.")] = 0.0,
    precision: Annotated[
        str, typer.Option(help="fp32, int8, or auto: int8 where adapt priced it and it pays.")
    ] = "auto",
    averse: Annotated[float, typer.Option(help="Weight of the loss's spread over mixtures the examples leave.")] = 0.0,
    steps: Annotated[
        int | None, typer.Option(help="Of the solver, on mixture and sizes.", show_default="as needed")
    ] = None,
    confidence: Annotated[float, typer.Option(help="With which the budget is kept, bounded and measured.")] = 0.95,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.core.budget import Budget

    Budget.parse(budget)  # a typing mistake is told before torch is loaded
    from apportion.cli.show import Bars
    from apportion.methods.adapt.specialise import specialise

    result = specialise(
        run,
        support,
        budget,
        out,
        target=target,
        profile=profile,
        verify=verify,
        head=head,
        refine=refine,
        depths=depths,
        risk=risk,
        precision=precision,
        averse=averse,
        steps=steps,
        confidence=confidence,
        progress=Bars(quiet=as_json),
    )
    if as_json:
        print(json.dumps(result))
    else:
        limit = result["limits"]["latency"]
        print(f"{len(result['classes'])} classes, {result['examples']} examples", end="")
        print(f", {result['target']}, {result['precision']}")
        print(f"budget {limit:.3g}ms of {result['whole_ms']:.3g}ms; bound {result['upper_ms']:.3g}ms", end="")
        print(f"; measured {result['measured_ms']:.3g}ms" if "measured_ms" in result else "; not measured")
        took = result["adaptation"]
        parts = ", ".join(f"{part} {took[part]:.2f}" for part in ("read", "encode", "solve", "refine", "slice"))
        print(f"adapted in {took['total']:.2f}s: {parts}")
        print(f"{'met' if result['met'] else 'NOT met'}: {result['run']}")
    return Exit.MET if result["met"] else Exit.NOT_MET
