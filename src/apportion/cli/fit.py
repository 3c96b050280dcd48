"""``apportion fit``: shrink a model to a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.options import ImageSize
from apportion.errors import Exit

HELP = """Shrink MODEL until its measured cost meets the budget.

MODEL is a built-in name (minilm), a folder with config.json and safetensors, or module.path:factory.

Example: apportion fit minilm --budget "latency<=70%, size<=80MB" -o runs/minilm
"""


def command(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, or module.path:factory.", show_default=False)],
    budget: Annotated[str, typer.Option(help="Such as 8ms, 60%, 5mJ, 'latency<=8ms@torch-cpu-1t, size<=20MB'.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder; the same folder resumes.", metavar="RUN")],
    data: Annotated[str | None, typer.Option(help="A file of texts, images or inputs, a folder, or a domain.")] = None,
    factory: Annotated[str | None, typer.Option(help="module.path:factory that a saved model came from.")] = None,
    target: Annotated[str | None, typer.Option(help="Where it will run; default torch-cpu-1t.")] = None,
    profile: Annotated[str | None, typer.Option(help="Plan with what calibrate wrote, without anchors.")] = None,
    policy: Annotated[
        str, typer.Option(help="greedy, scheduled, priced, exact, backtracking, learned or learned:FILE.")
    ] = "greedy",
    importance: Annotated[str, typer.Option(help="taylor, magnitude, fisher, activation or hessian.")] = "taylor",
    quality: Annotated[str, typer.Option(help="agreement, accuracy, retrieval, likelihood, r2, or auto.")] = "auto",
    quality_floor: Annotated[str | None, typer.Option(help="Share of the original's quality to keep: 98%.")] = None,
    floor_confidence: Annotated[
        str, typer.Option(help="How sure the floor has to hold: 50% judges the value, 95% a lower bound.")
    ] = "50%",
    rules: Annotated[
        str,
        typer.Option(
            help="Among prune or prune-all, quantise, mixed, lowrank, sparse or sparse-N:M, tokens, depth, repair or "
            "adapters, finetune."
        ),
    ] = "prune,quantise,repair",
    rungs: Annotated[int, typer.Option(help="Models to leave on the way down to the budget, itself included.")] = 2,
    repair_steps: Annotated[int, typer.Option(help="Steps of training for every rung; 0 for none.")] = 150,
    batch: Annotated[int, typer.Option(help="Examples per forward pass that latency is about.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per example that latency is about.")] = 64,
    size: ImageSize = None,
    seed: Annotated[int, typer.Option(help="Of data splits and example inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.core.budget import Budget

    Budget.parse(budget)  # a typing mistake is told before torch is loaded
    from apportion.cli.show import Bars, print_result
    from apportion.methods.compress.fit import fit
    from apportion.methods.compress.rundir import FitConfig
    from apportion.report.fit import write_fit

    config = FitConfig(
        model=model,
        budget=budget,
        factory=factory,
        data=data,
        target=target,
        profile=profile,
        policy=policy,
        importance=importance,
        quality=quality,
        quality_floor=None if quality_floor is None else parse_share(quality_floor),
        floor_confidence=parse_share(floor_confidence),
        rules=rules,
        rungs=rungs,
        repair_steps=repair_steps,
        seed=seed,
        batch=batch,
        tokens=tokens,
        size=size,
    )
    result = fit(config, out, Bars(quiet=as_json))
    if "prices" in result:  # runs from before there were prices have none
        write_fit(result["prices"], f"{model}: {budget}", out / "prices.html")
    print_result(result, as_json=as_json)
    if result["met"]:
        return Exit.MET
    stuck = result["outcome"] in ("early break", "quality collapse")
    return Exit.INFEASIBLE if stuck else Exit.NOT_MET


def parse_share(text: str) -> float:
    """A share of one: ``98%`` or ``0.98``."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no share; write it like 98% or 0.98") from None
