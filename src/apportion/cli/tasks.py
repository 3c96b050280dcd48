"""``apportion tasks``: the domains there are, what one holds, and what one episode looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.errors import DataError, Exit

if TYPE_CHECKING:
    from apportion.tasks.domain import Domain
    from apportion.tasks.episode import Episode

HELP = """Domains and few-shot episodes.

Example: apportion tasks episode grocery --ways 5 --shots 5 --sheet sheet.png
"""
app = typer.Typer(no_args_is_help=True, help=HELP)

Ref = Annotated[
    str, typer.Argument(help="Built-in name, folder or .zip of class folders, or .csv .tsv .jsonl .parquet table.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Strict = Annotated[bool, typer.Option(help="Refuse unreadable images and repeated rows instead of counting them.")]
TextColumn = Annotated[str | None, typer.Option(help="Text column of a table.")]
LabelColumn = Annotated[str | None, typer.Option(help="Label column of a table.")]


@app.command("list")
def list_domains(as_json: Json = False) -> int:
    """Prints every built-in domain with its size, or why it is not here.

    Example: apportion tasks list
    """
    from apportion.tasks.domains import BUILT_IN

    rows = []
    for name, entry in BUILT_IN.items():
        row: dict[str, Any] = {"name": name, "kind": entry.kind, "about": entry.summary, "licence": entry.licence}
        try:
            domain = entry.load()
            row |= {"classes": len(domain.classes), "examples": len(domain)}
        except DataError as error:
            row["missing"] = str(error)
        rows.append(row)
    if as_json:
        print(json.dumps(rows))
        return Exit.MET
    print(f"{'domain':<28}{'kind':<7}{'classes':>8}{'examples':>10}  about")
    for row in rows:
        sizes = f"{row.get('classes', '-'):>8}{row.get('examples', '-'):>10}"
        print(f"{row['name']:<28}{row['kind']:<7}{sizes}  {row['about']}")
    for reason in dict.fromkeys(_reason(row["missing"]) for row in rows if "missing" in row):
        names = [row["name"] for row in rows if "missing" in row and _reason(row["missing"]) == reason]
        print(f"not here: {', '.join(names)}: {reason}")
    return Exit.MET


@app.command("show")
def show(
    ref: Ref,
    as_json: Json = False,
    strict: Strict = False,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
) -> int:
    """Prints what a domain holds: sizes, licence, origin, checksum, what was left out, and its classes.

    Example: apportion tasks show banking77
    """
    domain = _load(ref, strict, text_column, label_column)
    counts = {name: len(rows) for name, rows in zip(domain.classes, domain.rows_by_class, strict=True)}
    fields = {
        "name": domain.name,
        "kind": domain.kind,
        "examples": len(domain),
        "licence": domain.licence,
        "provenance": domain.provenance,
        "checksum": domain.checksum,
        "splits": _split_sizes(domain),
        "notes": list(domain.notes),
        "classes": counts,
    }
    if as_json:
        print(json.dumps(fields))
        return Exit.MET
    for name in ("name", "kind", "examples", "licence", "provenance", "checksum"):
        print(f"{name:<11} {fields[name]}")
    for note in domain.notes:
        print(f"{'note':<11} {note}")
    for split, size in _split_sizes(domain).items():
        print(f"{'split':<11} {split}: {size}")
    print(f"{'classes':<11} {len(counts)}, of {min(counts.values())} to {max(counts.values())} examples")
    for name in list(counts)[:20]:
        print(f"  {name}: {counts[name]}")
    if len(counts) > 20:
        print(f"  and {len(counts) - 20} more (--json prints all)")
    return Exit.MET


@app.command("episode")
def episode(
    ref: Ref,
    ways: Annotated[str, typer.Option(help="Classes: a number, or LOW-HIGH.")] = "5",
    shots: Annotated[str, typer.Option(help="Examples per class to learn from: a number, or LOW-HIGH.")] = "5",
    queries: Annotated[str, typer.Option(help="Examples per class to be judged on: a number, or LOW-HIGH.")] = "5",
    imbalance: Annotated[float, typer.Option(help="Ratio of the most to the fewest shots.")] = 1.0,
    number: Annotated[int, typer.Option(help="Number of the episode.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the sampler.", min=0)] = 0,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet of images to this PNG.")] = None,
    as_json: Json = False,
    strict: Strict = False,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
) -> int:
    """Prints one episode: its classes, its rows, sample texts or a contact sheet, and its fingerprint.

    Example: apportion tasks episode clinc150/travel --shots 1-5 --number 3
    """
    from apportion.tasks.episode import Sampler, Shape

    shape = Shape(ways=_count(ways), shots=_count(shots), queries=_count(queries), imbalance=imbalance)
    domain = _load(ref, strict, text_column, label_column)
    drawn = Sampler(domain, shape, seed=seed).episode(number)
    if sheet is not None:
        from apportion.core.folder import write_whole
        from apportion.tasks.sheet import render_sheet

        write_whole(sheet, render_sheet(domain, drawn))
    if as_json:
        print(json.dumps(_episode_fields(domain, drawn, sheet)))
        return Exit.MET
    print(
        f"{domain.name}: {drawn.ways} classes, {len(drawn.support)} support, {len(drawn.query)} queries, "
        f"fingerprint {drawn.digest()[:16]}"
    )
    for label, chosen in enumerate(drawn.class_W):
        support = drawn.support.row_N[drawn.support.label_N == label]
        query = drawn.query.row_N[drawn.query.label_N == label]
        print(f"\n{domain.classes[chosen]}: {len(support)} support, {len(query)} queries")
        if domain.kind == "text":
            for row in support[:3]:
                print(f"  {domain.content[int(row)][:100]}")
        else:
            print(f"  rows {', '.join(map(str, support[:8]))}")
    if sheet is not None:
        print(f"\ncontact sheet: {sheet}")
    return Exit.MET


def _load(ref: str, strict: bool, text_column: str | None, label_column: str | None) -> Domain:
    from apportion.tasks.domains import load_domain

    return load_domain(ref, strict=strict, text_column=text_column, label_column=label_column)


def _split_sizes(domain: Domain) -> dict[str, int]:
    splits = [] if domain.split_N is None else [str(split) for split in domain.split_N]
    return {split: splits.count(split) for split in dict.fromkeys(splits)}


def _episode_fields(domain: Domain, drawn: Episode, sheet: Path | None) -> dict[str, Any]:
    return {
        "domain": domain.name,
        "classes": [domain.classes[chosen] for chosen in drawn.class_W],
        "support": {"rows": drawn.support.row_N.tolist(), "labels": drawn.support.label_N.tolist()},
        "query": {"rows": drawn.query.row_N.tolist(), "labels": drawn.query.label_N.tolist()},
        "fingerprint": drawn.digest(),
        "sheet": None if sheet is None else str(sheet),
    }


def _count(text: str) -> int | tuple[int, int]:
    low, dash, high = text.partition("-")
    try:
        return (int(low), int(high)) if dash else int(low)
    except ValueError:
        raise DataError(f"{text!r} is no count; write it like 5 or 1-10") from None


def _reason(message: str) -> str:
    return "not under " + message.split(" under ", 1)[-1] if message.startswith("no data file") else message
