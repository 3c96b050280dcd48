"""``apportion adapt``: learn few-shot adaptation for any budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import DataError, Exit

HELP = """Learn how BACKBONE adapts to small tasks within any latency budget; apportion specialize uses the result.

TASKS are a protocol (text, image, vision), a .toml file of one, or domains between commas (apportion tasks list).

Example: apportion adapt minilm --tasks text --targets ort-cpu-1t,openvino-cpu-1t -o runs/adapt
"""


def command(
    backbone: Annotated[str, typer.Argument(help="Built-in name or folder of an encoder.", show_default=False)],
    tasks: Annotated[str, typer.Option(help="Protocol, .toml file, or domains between commas.")],
    targets: Annotated[str, typer.Option(help="Where it will run, between commas.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder; the same folder resumes.", metavar="RUN")],
    profile: Annotated[list[Path] | None, typer.Option(help="What calibrate wrote; else measured.")] = None,
    steps: Annotated[int, typer.Option(help="Of training.")] = 300,
    episodes: Annotated[int, typer.Option(help="In every step.")] = 4,
    ways: Annotated[int, typer.Option(help="Classes of a training episode.")] = 5,
    shots: Annotated[int, typer.Option(help="Examples per class to learn from.")] = 5,
    queries: Annotated[int, typer.Option(help="Examples per class to be judged on.")] = 5,
    experts: Annotated[int, typer.Option(help="Masks over the shared delta.")] = 4,
    allocation: Annotated[
        str, typer.Option(help="learned, or as a baseline: uniform, template, unconditional, fixed.")
    ] = "learned",
    masks: Annotated[
        str, typer.Option(help="What experts gate of the delta: groups, or as an ablation weights.")
    ] = "groups",
    objective: Annotated[str, typer.Option(help="mean, cvar, group or kl.")] = "mean",
    beta: Annotated[float, typer.Option(help="Of cvar: share not counted; of kl: radius.")] = 0.7,
    tightest: Annotated[float, typer.Option(help="Least budget trained for, as a share of the whole.")] = 0.15,
    batch: Annotated[int, typer.Option(help="Examples per forward pass that latency is about.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per example that latency is about.")] = 32,
    int8: Annotated[bool, typer.Option("--int8", help="Price slices in int8, too, where a runtime has it.")] = False,
    gains: Annotated[str, typer.Option(help="Proportional and integral, of the prices.", metavar="KP,KI")] = "0,1",
    window: Annotated[int, typer.Option(help="Steps with slack after which a price is damped; 0: never.")] = 0,
    damping: Annotated[float, typer.Option(help="What is left of a price then; 0 starts it anew.")] = 0.5,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 for the network's products.")] = "fp32",
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Less memory, more time.")] = False,
    near: Annotated[float, typer.Option(help="Share of slices one block off, for specialize --depths.")] = 0.0,
    search: Annotated[int, typer.Option(help="Widths to try for every budget once depths are settled.")] = 0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars, new_table, print_table
    from apportion.methods.adapt.adapt import adapt
    from apportion.methods.adapt.folder import AdaptConfig
    from apportion.report.prices import write_prices

    config = AdaptConfig(
        model=backbone,
        tasks=tasks,
        targets=tuple(name.strip() for name in targets.split(",") if name.strip()),
        profiles=tuple(str(path) for path in profile or ()),
        steps=steps,
        episodes=episodes,
        ways=ways,
        shots=shots,
        queries=queries,
        experts=experts,
        allocation=allocation,
        masks=masks,
        objective=objective,
        beta=beta,
        tightest=tightest,
        batch=batch,
        tokens=tokens,
        int8=int8,
        gains=_gains(gains),
        window=window,
        damping=damping,
        precision=precision,
        checkpoint=checkpoint,
        near=near,
        search=search,
        seed=seed,
    )
    result = adapt(config, out, Bars(quiet=as_json))
    write_prices(result["prices"], f"{backbone} on {tasks}: what is worth its time", out / "prices.html")
    if as_json:
        print(json.dumps(result))
        return Exit.MET
    table = new_table("target", "whole", "floor", title=f"{backbone} adapted on {tasks}")
    for name, row in result["targets"].items():
        table.add_row(name, f"{row['whole_ms']:.3g}ms", f"{row['floor_ms']:.3g}ms")
    print_table(table)
    last = result["last"]
    typer.echo(
        f"{result['steps']} steps; the last tenth: {last['accuracy']:.1%} of queries at budgets drawn, "
        f"loss {last['loss']:.3f} (whole network {last['whole_loss']:.3f})"
    )
    typer.echo(f"prices of time and of every module: {out / 'prices.html'}")
    typer.echo(f"next: apportion specialize {out} --support FILE --budget 30% --target {config.targets[0]} -o MODEL")
    return Exit.MET


def _gains(text: str) -> tuple[float, float]:
    try:
        proportional, integral = (float(part) for part in text.split(","))
    except ValueError:
        raise DataError(f"gains {text!r} are not two numbers; write them like 0.5,1") from None
    return proportional, integral
