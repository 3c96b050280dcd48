"""``apportion retarget``: switch a finished run to another budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """Switch RUN to the best of its rungs that meets another budget, without training or measuring again.

Example: apportion retarget runs/minilm --budget 85%
"""


def command(
    run: Annotated[Path, typer.Argument(help="Folder that fit wrote.", metavar="RUN", show_default=False)],
    budget: Annotated[str, typer.Option(help="Such as 8ms, 85%, 'latency<=8ms, size<=60MB'.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.core.budget import Budget, format_quantity

    Budget.parse(budget)
    from apportion.methods.compress.ladder import retarget

    told = retarget(run, budget)
    if as_json:
        print(json.dumps(told))
        return Exit.MET
    readings = ", ".join(
        f"{key.partition('@')[0]} {format_quantity(reading['value'], reading['unit'])}"
        for key, reading in told["measured"].items()
    )
    typer.echo(f"rung {told['rung']} of {told['of']} is in use: {readings}; quality {told['quality']['value']:.3f}")
    typer.echo(f"model: {told['model']} (measured on {told['target']} when it was fitted; verify measures it again)")
    return Exit.MET
