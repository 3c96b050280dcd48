"""What the commands print: progress bars on standard error, the result as a table or as JSON on standard output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from apportion.core.budget import format_quantity
from apportion.core.progress import Update


class Bars:
    """Draws every stage as a line with a bar and its time, on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self._open: Progress | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<32}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
        )
        if self._open is not None:  # a stage inside a stage
            with self._task(self._open, f"  {name}") as update:
                yield update
            return
        with Progress(*columns, console=self.console) as bars:
            self._open = bars
            try:
                with self._task(bars, name) as update:
                    yield update
            finally:
                self._open = None

    @contextmanager
    def _task(self, bars: Progress, name: str) -> Iterator[Update]:
        task = bars.add_task(name, total=None)
        try:
            # full only when the stage ends, whatever it was told
            yield lambda share: bars.update(task, total=1.0, completed=min(share, 0.99))
        except BaseException:
            bars.update(task, visible=False)  # the error is the one line to read
            raise
        bars.update(task, total=1.0, completed=1.0)


def new_table(*headings: str, title: str | None = None) -> Table:
    """A table whose first column is left, the others as they come."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Prints a table within 80 columns."""
    Console(width=min(80, Console().width)).print(table)


def print_result(result: Mapping[str, Any], *, as_json: bool) -> None:
    """One JSON object, or a table that fits 80 columns."""
    if as_json:
        print(json.dumps(result))
        return
    console = Console(width=min(80, Console().width))
    table = Table(title=f"budget {result['budget']} on {result['target']}", title_justify="left", expand=False)
    for heading in ("", "before", "limit", "measured", "of before"):
        table.add_column(heading, justify="left" if not heading else "right")
    for key in sorted(result["final"], key=lambda name: (name not in result["limits"], name)):
        before, after = result["baseline"][key], result["final"][key]
        limit = result["limits"].get(key)
        table.add_row(
            key.partition("@")[0],
            format_quantity(before["value"], before["unit"]),
            "" if limit is None else format_quantity(limit, before["unit"]),
            _with_error(after),
            f"{after['value'] / before['value']:.1%}",
        )
    quality, original = result["quality_after"], result["quality_before"]
    kept = f"{quality['value'] / original['value']:.1%}" if original["value"] else ""
    found = f"{quality['value']:.3f} ± {quality['stderr']:.3f}"
    table.add_row("held out", f"{original['value']:.3f}", "", found, kept)
    floor = result.get("floor")  # results from before floors were certified have none
    if floor is not None:
        table.add_row("quality floor", *_floor_cells(floor))
    console.print(table)
    judged = "agreement with the original" if result["quality"] == "agreement" else result["quality"]
    console.print(f"held out: {judged} on {result['quality_of']}, none used to choose or train", style="dim")
    if floor is not None:
        console.print(_floor_line(floor), style="dim", highlight=False)
    elif result.get("quality_floor") is not None:
        console.print(f"quality floor {result['quality_floor']:.4g}: nothing got far enough to be judged", style="dim")
    for line in result.get("left_out", ()):
        console.print(line, style="dim", highlight=False)
    if result["met"]:
        console.print("[bold green]met[/]", end=" ")
    else:
        console.print(f"[bold red]not met[/] ({result.get('outcome', 'measured over budget')})", end=" ")
    console.print(f"run folder: {result['run']}", highlight=False, soft_wrap=True)
    if not result["met"] and "remedy" in result:
        console.print(result["remedy"])


def _floor_cells(floor: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Before, limit, measured and share of before, on the examples that the floor is judged on."""
    before, after, kept = floor["before"], floor["after"], floor["kept"]
    limit = f"{floor['asked'] * before['value']:.3f}"
    return (
        f"{before['value']:.3f}",
        f"{limit} ({floor['asked'] * 100:.4g}%)",
        f"{after['value']:.3f} ± {after['stderr']:.3f}",
        f"{kept['value']:.1%} ± {kept['stderr'] * 100:.1f}",
    )


def _floor_line(floor: Mapping[str, Any]) -> str:
    """On what the floor was judged, how, and how sure that is."""
    rule = "by its value" if floor["confidence"] == 0.5 else f"at {floor['confidence'] * 100:.4g}% confidence"
    bound = floor["at_least"]
    return (
        f"quality floor: judged {rule} on {floor['examples']}, none trained on; at least {bound['value']:.1%} is kept "
        f"at {bound['confidence']:.0%} confidence, one just at the floor reads as well {floor['doubt']:.0%} of times"
    )


def _with_error(reading: Mapping[str, Any]) -> str:
    text = format_quantity(reading["value"], reading["unit"])
    return f"{text} ± {reading['stderr']:.2g}" if reading["stderr"] else text
