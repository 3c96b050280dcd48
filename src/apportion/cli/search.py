"""``apportion search``: better micro-choices at equal measured cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from apportion.cli.fit import parse_share
from apportion.errors import Exit

HELP = """Search SPACE for better micro-choices at equal measured cost, with a stated confidence.

SPACE is mobile-cnn or small-encoder. The band is anchored at the template's own cost, at --anchor, or at --budget.

Example: apportion search mobile-cnn --target torch-cpu-1t --tolerance 5% --confidence 95% -o runs/search
"""


def command(
    space: Annotated[str, typer.Argument(help="mobile-cnn or small-encoder.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder; the same folder resumes.", metavar="RUN")],
    target: Annotated[
        list[str] | None, typer.Option(help="Where it will run; several must all be in the band. Default torch-cpu-1t.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Such as 1.5ms or 80% (of the template).")] = None,
    anchor: Annotated[Path | None, typer.Option(help="Architecture (JSON) whose cost is the anchor.")] = None,
    tolerance: Annotated[str, typer.Option(help="How far from the anchor's cost counts as equal.")] = "5%",
    confidence: Annotated[str, typer.Option(help="Of the claim on the result.")] = "95%",
    epsilon: Annotated[float, typer.Option(help="Difference in accuracy, in points, that matters.")] = 2.0,
    sigma: Annotated[float | None, typer.Option(help="Noise of one evaluation, in points; default: estimated.")] = None,
    rule: Annotated[str, typer.Option(help="lucb, elimination or uniform.")] = "lucb",
    evaluations: Annotated[int, typer.Option(help="Short trainings at most.")] = 100,
    steps: Annotated[int, typer.Option(help="Steps of one short training.")] = 100,
    final_steps: Annotated[int, typer.Option(help="Steps of the result's training.")] = 400,
    data: Annotated[str, typer.Option(help="Images: a domain of apportion tasks list, or a folder.")] = "digits",
    image_size: Annotated[int | None, typer.Option(help="Side of the images; default the space's.")] = None,
    align: Annotated[
        int | None, typer.Option(help="Widths are multiples of it; default: audited on the target.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Peak activation memory must stay in its band too.")] = False,
    workers: Annotated[int, typer.Option(help="Processes for trainings; results don't depend on it.")] = 1,
    seed: Annotated[int, typer.Option(help="Of data splits, trainings and calibration.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.errors import ApportionError

    if workers < 1:
        raise ApportionError(f"{workers} workers asked for; give at least 1")
    from apportion.cli.show import Bars
    from apportion.methods.search.folder import SearchRunConfig

    config = SearchRunConfig(
        space=space,
        targets=tuple(target or ("torch-cpu-1t",)),
        budget=budget,
        anchor=None if anchor is None else _read_arch(anchor),
        data=data,
        tolerance=parse_share(tolerance) or 0.0,
        confidence=parse_share(confidence) or 0.0,
        epsilon=epsilon,
        sigma=sigma,
        rule=rule,
        max_evaluations=evaluations,
        steps=steps,
        final_steps=final_steps,
        image_size=image_size,
        align=align,
        memory=memory,
        seed=seed,
    )
    from apportion.methods.search.proxy import Here, Processes
    from apportion.methods.search.run import search

    pool = Processes(workers) if workers > 1 else None
    try:
        result = search(config, out, Bars(quiet=as_json), pool or Here())
    finally:
        if pool is not None:
            pool.close()
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)
    return Exit.MET if result["met"] else Exit.NOT_MET


def _read_arch(path: Path) -> dict[str, Any]:
    from apportion.errors import ApportionError

    try:
        arch = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ApportionError(f"can't read an architecture from {path} ({error}); give a JSON object") from None
    arch = arch.get("arch", arch) if isinstance(arch, dict) else arch
    if not isinstance(arch, dict):
        raise ApportionError(f"{path} holds no architecture; give a JSON object of decisions")
    return arch


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console

    from apportion.cli.show import new_table, print_table

    table = new_table("", "anchor", "band", "found", title=f"{result['space']} on {', '.join(result['targets'])}")
    for key, reading in result["final"].items():
        low, high = result["band"][key]
        anchor = result["anchor"]["costs"][key]
        found = f"{reading['value']:.4g}ms ± {reading['stderr']:.2g}"
        table.add_row(key, f"{anchor['value']:.4g}ms", f"{low:.4g} to {high:.4g}ms", found)
    before, after = result["quality_before"], result["quality_after"]
    table.add_row(
        "accuracy",
        f"{before['value']:.2f}% ± {before['stderr']:.2f}",
        "",
        f"{after['value']:.2f}% ± {after['stderr']:.2f}",
    )
    print_table(table)
    console = Console(width=min(80, Console().width))
    changed = {k: v for k, v in result["arch"].items() if v != result["anchor"]["arch"][k]}
    console.print("changed: " + (", ".join(f"{k}={v}" for k, v in changed.items()) or "nothing"), highlight=False)
    claim = result["claim"]
    if claim["epsilon"] is None:
        text = f"no claim on its {claim['num_neighbours']} neighbours: trainings ran out before each was tried"
    else:
        text = (
            f"at {claim['confidence']:.0%} confidence none of its {claim['num_neighbours']} neighbours at equal cost "
            f"is better after the short training by more than {claim['epsilon']:.2f} points (asked: {claim['asked']:g})"
        )
    console.print(f"{text}; {result['num_evaluations']} trainings, {result['outcome']}", highlight=False)
    verdict = "[bold green]met[/]" if result["met"] else "[bold red]not met[/]"
    console.print(f"{verdict} run folder: {result['run']}", highlight=False, soft_wrap=True)


def print_verified(result: dict[str, Any], *, as_json: bool) -> None:
    """What a finished search measures now, against what its certificate promised."""
    if as_json:
        print(json.dumps(result))
        return
    from apportion.cli.show import new_table, print_table

    table = new_table("", "start", "limit", "measured", title=f"budget {result['budget']}")
    for key, reading in result["final"].items():
        start, limit = result["baseline"][key]["value"], result["limits"][key]
        table.add_row(key, f"{start:.4g}ms", f"{limit:.4g}ms", f"{reading['value']:.4g}ms ± {reading['stderr']:.2g}")
    print_table(table)
    typer.echo(f"{'met' if result['met'] else 'not met'}; run folder: {result['run']}")
