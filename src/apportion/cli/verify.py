"""``apportion verify``: measure a finished run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """Measure the model of a finished RUN again, in fresh processes; exit 0 if it keeps its promise, else 4.

Example: apportion verify runs/minilm
"""


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", metavar="RUN", show_default=False)],
    model: Annotated[str | None, typer.Option(help="The original, where it came from a factory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars, print_result

    bars = Bars(quiet=as_json)
    if (run / "search.json").is_file():
        from apportion.cli.search import print_verified
        from apportion.methods.search.verify import verify as verify_search

        result = verify_search(run, bars)
        print_verified(result, as_json=as_json)
    elif (run / "front.json").is_file():
        from apportion.cli.search import print_verified_front
        from apportion.methods.search.front import verify_front

        result = verify_front(run, bars)
        print_verified_front(result, as_json=as_json)
    elif (run / "specialise.json").is_file():
        from apportion.cli.search import print_verified
        from apportion.methods.adapt.specialise import verify_specialised

        result = verify_specialised(run, bars)
        print_verified(result, as_json=as_json)
    else:
        from apportion.methods.compress.verify import verify

        result = verify(run, model, bars)
        print_result(result, as_json=as_json)
    return Exit.MET if result["met"] else Exit.NOT_MET
