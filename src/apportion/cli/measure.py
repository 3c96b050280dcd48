"""``apportion measure``: what a model costs on a target, now."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from apportion.errors import Exit

HELP = """Measure MODEL on a target: latency in fresh processes, peak memory, energy, size, parameters, FLOPs.

Example: apportion measure minilm --target ort-cpu-1t --json
"""


def command(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, or module.path:factory.", show_default=False)],
    target: Annotated[str | None, typer.Option(help="Where to run; default torch-cpu-1t.")] = None,
    batch: Annotated[int, typer.Option(help="Examples per forward pass.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per example.")] = 64,
    processes: Annotated[int, typer.Option(help="Fresh processes to measure in.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of timing per process, at most.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of the example inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars, new_table, print_table
    from apportion.core.budget import format_quantity
    from apportion.device.measure import Candidate, Shape, measure
    from apportion.device.probe import working_target
    from apportion.device.read import read_all

    bars = Bars(quiet=as_json)
    with bars.stage("try the target"):
        where = working_target(target)
    with bars.stage("load and count"):
        counted = read_all(model, where, batch=batch, tokens=tokens, seed=seed)
    shape = Shape(batch=batch, tokens=tokens, seed=seed)
    with bars.stage(f"time in {processes} processes") as update:
        done = 0

        def on_step() -> None:
            nonlocal done
            done += 1
            update(min(1.0, done / (processes + 1)))

        session = measure(
            [Candidate(name=model, ref=model)], where, shape, processes=processes, seconds=seconds, on_step=on_step
        )
    told: dict[str, Any] = {
        "model": model,
        "target": where.to_json(),
        "shape": {"batch": batch, "tokens": tokens, "seed": seed},
        "conditions": dict(session.conditions),
        "failures": {name: {"kind": f.kind, "message": f.message} for name, f in session.failures.items()},
        "readings": dict(counted),
    }
    if not session.failures:
        latency = session.latency(model)
        timing = session.timings[model]
        told["readings"]["latency"] = latency.to_json() | {
            "provenance": "measured",
            "p95": max(t.p95_ms for t in timing),
            "mad": max(t.mad_ms for t in timing),
        }
    if as_json:
        print(json.dumps(told))
    else:
        table = new_table(f"{model} on {where.name}", "reading", "±", "provenance")
        for name in sorted(told["readings"]):
            reading = told["readings"][name]
            value = reading.get("value")
            text = "—" if value is None else format_quantity(value, reading["unit"])
            error = f"{reading['stderr']:.2g}" if reading.get("stderr") else ""
            table.add_row(name, text, error, reading["provenance"])
        print_table(table)
        if session.too_busy:
            typer.echo(session.too_busy)
        for failure in session.failures.values():
            typer.echo(f"not measured: {failure.kind}: {failure.message}")
    return Exit.NOT_MET if session.failures else Exit.MET
