"""``apportion measure``: what a model costs on a target, now."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.options import ImageSize
from apportion.errors import Exit

if TYPE_CHECKING:
    from apportion.device.measure import Session
    from apportion.device.power import Power, PowerCurve
    from apportion.device.process import Failure

ENERGY_SECONDS = 1.0  # of reading the counter, in every process

HELP = """Measure MODEL on a target: latency in fresh processes, peak memory, energy, size, parameters, FLOPs.

The model is run in child processes only: one that dies, hangs, eats memory or computes numbers that are not finite is
told with the reason, and the readings that it allows are told all the same. Exits with 4 where there is no latency.

Example: apportion measure minilm --target ort-cpu-1t --json
Example: apportion measure minilm --target ort-cpu-1t --power minilm-ort.json
"""


def command(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, or module.path:factory.", show_default=False)],
    target: Annotated[str | None, typer.Option(help="Where to run; default torch-cpu-1t.")] = None,
    batch: Annotated[int, typer.Option(help="Examples per forward pass.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per example.")] = 64,
    size: ImageSize = None,
    power: Annotated[
        str | None, typer.Option(help="Watts, or a profile that holds them, to model energy by without a counter.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Fresh processes to measure in.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of timing per process, at most.")] = 3.0,
    time_limit: Annotated[float, typer.Option(help="Seconds that loading or one reading may take.", min=1)] = 300.0,
    memory_limit: Annotated[float, typer.Option(help="GiB that the model's process may hold.", min=0.1)] = 16.0,
    seed: Annotated[int, typer.Option(help="Of the example inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars, new_table, print_table
    from apportion.core.budget import format_quantity
    from apportion.device.conditions import explain
    from apportion.device.measure import Candidate, Session, Shape, measure
    from apportion.device.probe import working_target
    from apportion.device.process import Limits
    from apportion.device.read import read_all
    from apportion.device.target import find_target

    given = None
    if power is not None:
        from apportion.cost.power import parse_power

        given = parse_power(power, find_target(target))
    bars = Bars(quiet=as_json)
    limits = Limits(seconds=time_limit, memory_bytes=int(memory_limit * 2**30))
    with bars.stage("try the target"):
        where = working_target(target)
    shape = Shape(batch=batch, tokens=tokens, seed=seed, size=size)
    with bars.stage("load and count"):
        counted = read_all(Candidate(name=model, ref=model), where, shape, limits)
    if counted.failure is not None:  # there is nothing to time
        session = Session({}, {}, {model: counted.failure})
    else:
        artefact = None if counted.artefact is None else str(counted.artefact)
        with bars.stage(f"time in {processes} processes") as update:
            done = 0

            def on_step() -> None:
                nonlocal done
                done += 1
                update(min(1.0, done / (processes + 1)))

            session = measure(
                [Candidate(name=model, ref=model, artefact=artefact)],
                where,
                shape,
                processes=processes,
                seconds=seconds,
                energy_seconds=ENERGY_SECONDS,
                limits=limits,
                on_step=on_step,
            )
    told: dict[str, Any] = {
        "model": model,
        "target": where.to_json(),
        "shape": asdict(shape),
        "conditions": dict(session.conditions),
        "disturbance": explain(session.conditions),
        "failures": {name: asdict(failure) for name, failure in session.failures.items()},
        "readings": {**counted.by_name, "latency": _latency(session, model), "energy": _energy(session, model, given)},
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
            if reading.get("low") is not None:
                error += f" ({reading['low']:.4g} to {reading['high']:.4g})"
            table.add_row(name, text, error, reading["provenance"])
        print_table(table)
        if told["disturbance"]:
            typer.echo(told["disturbance"])
        for failure in session.failures.values():
            typer.echo(f"not measured: {failure.kind}: {failure.message}")
    return Exit.NOT_MET if session.failures else Exit.MET


def _latency(session: Session, model: str) -> dict[str, Any]:
    if model in session.failures:
        return _unavailable("ms", session.failures[model])
    timings = session.timings[model]
    low_ms, high_ms = session.interval(model) or (None, None)
    return session.latency(model).to_json() | {
        "provenance": "measured",
        "low": low_ms,
        "high": high_ms,
        "p95": max(timing.p95_ms for timing in timings),
        "mad": max(timing.mad_ms for timing in timings),
    }


def _energy(session: Session, model: str, given: Power | PowerCurve | None) -> dict[str, Any]:
    """By the counter where there is one; else modelled by the power that was given, if any was."""
    from apportion.device.power import modelled_energy

    if model in session.failures:
        return _unavailable("mJ", session.failures[model])
    told = session.conditions["energy"]
    if told["provenance"] == "unavailable" and given is not None:
        power = given.at(session.latency(model))
        return modelled_energy(session.latency(model), power).to_json() | {"provenance": f"modelled: {power.explain()}"}
    if told["provenance"] == "unavailable":
        return {"value": None, "unit": "mJ", "provenance": f"unavailable: {told['why']}"}
    unused = "" if given is None else "; --power is not used"
    return session.energy(model).to_json() | {"provenance": f"measured: {told['why']}{unused}"}


def _unavailable(unit: str, failure: Failure) -> dict[str, Any]:
    return {"value": None, "unit": unit, "provenance": f"unavailable: {failure.kind}: {failure.message}"}
