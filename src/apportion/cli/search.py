"""``apportion search``: better micro-choices at equal measured cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from apportion.cli.fit import parse_share
from apportion.errors import Exit

HELP = """Search SPACE for better micro-choices at equal measured cost, with a stated confidence.

SPACE is mobile-cnn or small-encoder. The band is around the template's own cost, around --anchor, or ends at
--budget. Several --anchor make a front, one search each. Several --utility add the local Pareto set. --from RUN
begins at what another search found, on another target say, brought into the band of this one.

Example: apportion search mobile-cnn --target torch-cpu-1t --tolerance 5% --confidence 95% -o runs/search

Example: apportion search mobile-cnn --anchor 100% --anchor 150% --anchor 200% -o runs/front
"""


def command(
    space: Annotated[str, typer.Argument(help="mobile-cnn or small-encoder.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder; the same folder resumes.", metavar="RUN")],
    target: Annotated[
        list[str] | None, typer.Option(help="Where it will run; several must all be in the band. Default torch-cpu-1t.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Such as 1.5ms or 80% (of the template).")] = None,
    anchor: Annotated[
        list[str] | None,
        typer.Option(help="A cost (0.5ms, or 80% of the template's) or an architecture (JSON); several make a front."),
    ] = None,
    origin: Annotated[
        Path | None, typer.Option("--from", help="Begin at what this search found, brought into the band.")
    ] = None,
    utility: Annotated[
        list[str] | None,
        typer.Option(help="accuracy, robust or worst-class; the first is maximised. Default accuracy."),
    ] = None,
    tolerance: Annotated[str, typer.Option(help="How far from the anchor's cost counts as equal.")] = "5%",
    confidence: Annotated[str, typer.Option(help="Of the claim on the result.")] = "95%",
    epsilon: Annotated[float, typer.Option(help="Difference in accuracy, in points, that matters.")] = 2.0,
    sigma: Annotated[float | None, typer.Option(help="Noise of one evaluation, in points; default: estimated.")] = None,
    rule: Annotated[str, typer.Option(help="lucb, elimination or uniform.")] = "lucb",
    evaluations: Annotated[int, typer.Option(help="Short trainings at most, at every anchor.")] = 50,
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
    anchors = list(dict.fromkeys(anchor or []))
    if len(anchors) != len(anchor or []):
        raise ApportionError(f"anchors are {', '.join(anchor or [])}; give each once")
    from apportion.cli.show import Bars
    from apportion.methods.search.folder import SearchRunConfig, found_by
    from apportion.methods.search.front import Anchor, front

    places = [Anchor.parse(text) for text in anchors]
    config = SearchRunConfig(
        space=space,
        targets=tuple(target or ("torch-cpu-1t",)),
        budget=budget,
        start=None if origin is None else found_by(origin, space),
        utilities=tuple(utility or ("accuracy",)),
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
    bars = Bars(quiet=as_json)
    try:
        if len(places) > 1:
            result = front(config, places, out, bars, pool or Here())
        else:
            result = search(places[0].of(config) if places else config, out, bars, pool or Here())
    finally:
        if pool is not None:
            pool.close()
    if as_json:
        print(json.dumps(result))
    elif "points" in result:
        _print_front(result)
    else:
        _print(result)
    return Exit.MET if result["met"] else Exit.NOT_MET


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
        result["utilities"][0],
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
    if "pareto" in result:
        _print_pareto(result["pareto"], result["utilities"])
    _print_verdict(result)


def _print_pareto(pareto: dict[str, Any], utilities: list[str]) -> None:
    """The local Pareto set: utilities after the short training with their intervals, and after the long one."""
    from apportion.cli.show import new_table, print_table

    title = "not beaten in every utility by any neighbour" if pareto["settled"] else "not beaten by means; not settled"
    table = new_table("network", *utilities, title=title)
    for member in pareto["members"]:
        cells = []
        for name in utilities:
            short = member["short"][name]
            radius = "∞" if short["high"] is None else f"{short['high'] - short['mean']:.1f}"
            cells.append(f"{short['mean']:.1f} ± {radius}, long {member['long'][name]:.1f}")
        table.add_row(member["model"], *cells)
    print_table(table)


def _print_front(result: dict[str, Any]) -> None:
    from apportion.cli.show import new_table, print_table

    title = f"{result['space']} on {', '.join(result['targets'])}"
    utility = result["utilities"][0]
    table = new_table("", "anchor", "measured", f"{utility}, before", "after", "", title=title)
    for number, point in enumerate(result["points"], 1):
        costs = "\n".join(f"{one['value']:.4g}ms" for one in point["measured"].values())
        before, after = (
            f"{point[name]['value']:.2f}% ± {point[name]['stderr']:.2f}" for name in ("quality_before", "quality_after")
        )
        kept = "kept" if point["kept"] else "dominated"
        table.add_row(str(number), point["asked"], costs, before, after, kept if point["met"] else f"{kept}, not met")
    print_table(table)
    _print_verdict(result)


def _print_verdict(result: dict[str, Any]) -> None:
    from rich.console import Console

    verdict = "[bold green]met[/]" if result["met"] else "[bold red]not met[/]"
    Console().print(f"{verdict} run folder: {result['run']}", highlight=False, soft_wrap=True)


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


def print_verified_front(result: dict[str, Any], *, as_json: bool) -> None:
    """What every point of a front measures now."""
    if as_json:
        print(json.dumps(result))
        return
    for point in result["points"]:
        print_verified(point, as_json=False)
    typer.echo(f"{'met' if result['met'] else 'not met'}; run folder: {result['run']}")
