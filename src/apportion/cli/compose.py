"""``apportion compose``: one model out of several checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """Compose one model out of SOURCES and write it as a folder that transformers loads.

SOURCES are folders with config.json and safetensors, built-in names, or names in the store (apportion sources list).

With --support FILE the weights are chosen by its labelled examples; without, by --weights or equally.

Example: apportion compose ./banking ./travel ./home --support task.csv --max-sources 2 -o task-model

Example: apportion compose ./banking ./travel --method ties --base minilm --density 0.2 -o merged
"""


def command(
    sources: Annotated[list[str], typer.Argument(help="Checkpoints to compose from.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.", metavar="OUT")],
    method: Annotated[
        str | None,
        typer.Option(
            help="oracle, router, greedy-soup, best-single (by the support); soup, task-arithmetic, ties, dare, "
            "dare-ties, slerp (without). Default oracle with a support, soup without."
        ),
    ] = None,
    support: Annotated[
        str | None, typer.Option(help="Labelled examples: .csv .tsv .jsonl .parquet, folder of class folders, or name.")
    ] = None,
    block_weights: Annotated[bool, typer.Option(help="Weights of their own for every layer.")] = False,
    residual: Annotated[
        str | None,
        typer.Option(help="Modules that may be edited, such as '8 blocks'; edits must help held-out examples."),
    ] = None,
    max_sources: Annotated[int | None, typer.Option(help="Most sources to mix.")] = None,
    router: Annotated[
        str | None, typer.Option(help="File of a trained router; needs --base. Implies method router.")
    ] = None,
    mode: Annotated[str, typer.Option(help="Of the router: no-adapt, gradient-free or gradient.")] = "gradient-free",
    budget: Annotated[str | None, typer.Option(help="Time that forming the model may take here, such as 40ms.")] = None,
    base: Annotated[str | None, typer.Option(help="Common ancestor of the sources.")] = None,
    weights: Annotated[str | None, typer.Option(help="One number per source, such as 0.7,0.3.")] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of every difference kept by ties (0.2), dare (0.5).")
    ] = None,
    scale: Annotated[float, typer.Option(help="What the merged difference is multiplied by.")] = 1.0,
    position: Annotated[float, typer.Option(help="Between the two sources of slerp, from 0 to 1.")] = 0.5,
    skip: Annotated[list[str] | None, typer.Option(help="Pattern of tensors to take from the first alone.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type to write: F32, F16 or BF16; default as stored.")] = None,
    threads: Annotated[int | None, typer.Option(help="Tensors worked on at once.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    store: Annotated[Path | None, typer.Option(help="Folder of the store of sources.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars
    from apportion.methods.compose.compose import BLIND, ComposeConfig, compose
    from apportion.methods.compose.store import default_store

    config = ComposeConfig(
        sources=tuple(sources),
        method=method or ("soup" if support is None else "router" if router else "oracle"),
        base=base,
        weights=parse_weights(weights),
        density=density,
        scale=scale,
        position=position,
        skip=tuple(skip or ()),
        dtype=dtype,
        seed=seed,
        threads=threads,
    )
    folder, bars = store or default_store(), Bars(quiet=as_json)
    if support is None:
        if block_weights or residual or max_sources or budget or router:
            raise typer.BadParameter(
                "--block-weights, --residual, --max-sources, --budget and --router need --support FILE"
            )
        result = compose(config, out, store=folder, progress=bars)
    else:
        if config.method in BLIND:
            raise typer.BadParameter(f"{config.method} does not look at a support set; leave out --support or --method")
        from apportion.methods.compose.fewshot import TaskConfig, compose_for

        task = TaskConfig(
            support=support,
            block_weights=block_weights,
            residual_blocks=parse_blocks(residual),
            max_sources=max_sources,
            budget=budget,
            router=router,
            mode=mode,
        )
        result = compose_for(config, task, out, store=folder, progress=bars)
    if as_json:
        print(json.dumps(result))
        return Exit.MET
    for source in result["sources"]:
        print(f"{source['weight']:>9.4f}  {source['name']}")
    for remark in result["remarks"]:
        print(f"note: {remark}")
    if result.get("residual"):
        print(f"edited: {', '.join(result['residual'])}")
    print(f"{result['method']}: {result['out']}")
    return Exit.MET


def parse_weights(text: str | None) -> tuple[float, ...] | None:
    """Numbers between commas."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} are no weights; write them like 0.7,0.3") from None


def parse_blocks(text: str | None) -> int:
    """A number of modules: ``8`` or ``8 blocks``."""
    if text is None:
        return 0
    number = text.removesuffix("blocks").removesuffix("block").strip()
    if not number.isdigit():
        raise typer.BadParameter(f"{text!r} is no number of blocks; write it like '8 blocks'")
    return int(number)
