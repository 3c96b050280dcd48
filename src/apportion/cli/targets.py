"""``apportion targets``: which targets work on this machine, and why the others don't."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """List the targets that work here, and for the others the reason in one line.

Every target is tried in a process of its own; answers are remembered until a runtime's version changes.

Example: apportion targets --json
"""


def command(
    refresh: Annotated[bool, typer.Option("--refresh", help="Try again instead of remembering.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars, new_table, print_table
    from apportion.device.energy import find_source
    from apportion.device.probe import probe_all
    from apportion.device.target import FAMILIES, find_target, machine, target_names

    names = target_names()
    with Bars(quiet=as_json).stage("try every target") as update:
        done = 0

        def on_probe(_found: object) -> None:
            nonlocal done
            done += 1
            update(done / len(names))

        found = probe_all(names, refresh=refresh, on_probe=on_probe)
    energy = {device: find_source(device) for device in ("cpu", "cuda")}
    if as_json:
        told = {
            "machine": machine(),
            "targets": [
                asdict(probed)
                | {k: v for k, v in find_target(probed.name).to_json().items() if k not in ("name", "isa")}
                for probed in found
            ],
            "energy": {device: {"provenance": s.provenance, "why": s.why} for device, s in energy.items()},
        }
        print(json.dumps(told))
        return Exit.MET
    table = new_table("target", "", "what it is, or why not")
    for probed in found:
        family = probed.name.partition("-cpu")[0].partition("-cuda")[0]
        about = FAMILIES[family].about + (f" ({probed.why})" if probed.isa else "")
        table.add_row(
            probed.name,
            "[green]yes[/]" if probed.available else "[red]no[/]",
            about if probed.available else probed.why,
        )
    print_table(table)
    for device, source in energy.items():
        typer.echo(f"energy on {device}: {source.provenance} ({source.why})")
    return Exit.MET
