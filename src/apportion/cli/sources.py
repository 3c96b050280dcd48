"""``apportion sources``: the checkpoints there are to compose from, kept whole or as differences to a base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from apportion.errors import Exit, ModelError

HELP = """Checkpoints to compose from.

Example: apportion sources add minilm-sre --name sre --base minilm --kind sparse --density 0.1
"""
app = typer.Typer(no_args_is_help=True, help=HELP)

StoreFolder = Annotated[
    Path | None,
    typer.Option("--store", help="Folder of the store; default $APPORTION_STORE or the user's data folder."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("add")
def add(
    ref: Annotated[str, typer.Argument(help="Folder with config.json and safetensors, or a built-in name.")],
    name: Annotated[str | None, typer.Option(help="Name in the store; default the folder's.")] = None,
    base: Annotated[str | None, typer.Option(help="Whole source in the store to take differences to.")] = None,
    kind: Annotated[str | None, typer.Option(help="whole, dense, sparse, low-rank or int8; default whole.")] = None,
    density: Annotated[float, typer.Option(help="Share of numbers kept by sparse.")] = 0.05,
    rank: Annotated[int, typer.Option(help="Directions kept by low-rank.")] = 16,
    store: StoreFolder = None,
    as_json: Json = False,
) -> int:
    """Keeps a checkpoint in the store, whole or as its difference to a base.

    Example: apportion sources add ./banking --base minilm --kind int8
    """
    from apportion.cli.show import Bars
    from apportion.methods.compose.source import open_source
    from apportion.methods.compose.store import Store, default_store

    source = open_source(ref)
    added = Store(store or default_store()).add(
        name or source.name,
        source,
        base=base,
        kind=kind or ("whole" if base is None else "dense"),
        density=density,
        rank=rank,
        progress=Bars(quiet=as_json),
    )
    if as_json:
        print(json.dumps(added.__dict__))
        return Exit.MET
    share = added.new_bytes / max(1, added.whole_bytes)
    print(
        f"{added.name}: {added.new_bytes / 1e6:.1f} MB new on disk, {share:.1%} of the checkpoint; "
        f"relative error {added.error_ratio:.2g}"
    )
    return Exit.MET


@app.command("list")
def list_sources(store: StoreFolder = None, as_json: Json = False) -> int:
    """Prints the sources in the store: how each is kept, its base and what that loses.

    Example: apportion sources list
    """
    from apportion.methods.compose.store import Store, default_store, each

    folder = store or default_store()
    rows: list[dict[str, Any]] = [
        {key: record.get(key) for key in ("name", "kind", "base", "origin", "whole_bytes", "error_ratio")}
        for _, record in each(Store(folder))
    ]
    if as_json:
        print(json.dumps(rows))
        return Exit.MET
    if not rows:
        print(f"no sources in {folder}; add one with: apportion sources add FOLDER")
        return Exit.MET
    print(f"{'source':<24}{'kept':<10}{'base':<20}{'MB whole':>10}{'error':>10}")
    for row in rows:
        size, error = f"{row['whole_bytes'] / 1e6:.1f}", f"{row['error_ratio']:.2g}"
        print(f"{row['name']:<24}{row['kind']:<10}{row['base'] or '-':<20}{size:>10}{error:>10}")
    return Exit.MET


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="Name in the store.")], store: StoreFolder = None, as_json: Json = False
) -> int:
    """Removes a source and the blocks that no other source needs.

    Example: apportion sources remove banking
    """
    from apportion.methods.compose.store import Store, default_store

    freed = Store(store or default_store()).remove(name)
    print(json.dumps({"name": name, "freed_bytes": freed}) if as_json else f"{name}: {freed / 1e6:.1f} MB freed")
    return Exit.MET


@app.command("check")
def check(
    refs: Annotated[
        list[str] | None, typer.Argument(help="Sources that are to be merged; all in the store if none.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Base that they are to be merged on.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Pattern of tensors that are not merged.")] = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> int:
    """Checks that checkpoints fit one another, or that every block in the store is what it was.

    Example: apportion sources check ./banking ./travel --base minilm
    """
    from apportion.methods.compose.compat import check_sources, kinship
    from apportion.methods.compose.source import open_source
    from apportion.methods.compose.store import Store, default_store

    folder = store or default_store()
    if not refs:
        found = Store(folder)
        wrong = [problem for name in found.names() for problem in found.check(name)]
        if wrong:
            raise ModelError(wrong[0] if len(wrong) == 1 else f"{wrong[0]} (and {len(wrong) - 1} more)")
        print(json.dumps({"checked": found.names()}) if as_json else f"{len(found.names())} sources are as stored")
        return Exit.MET
    sources = [open_source(ref, store=folder) for ref in refs]
    parent = None if base is None else open_source(base, store=folder)
    remarks = check_sources(sources, parent, skip=skip or ())
    first = parent or sources[0]
    apart = {source.name: round(kinship(first, source), 4) for source in sources if source is not first}
    if as_json:
        print(json.dumps({"fit": True, "remarks": remarks, "distance": apart, "to": first.name}))
        return Exit.MET
    for remark in remarks:
        print(f"note: {remark}")
    for name, distance in apart.items():
        print(f"{name}: {distance:.4f} of its size away from {first.name}")
    print(f"{len(sources)} sources fit one another")
    return Exit.MET


@app.command("align")
def align_source(
    reference: Annotated[
        str, typer.Argument(help="Checkpoint to align to: folder, built-in name or name in the store.")
    ],
    other: Annotated[str, typer.Argument(help="Checkpoint whose heads and neurons are reordered.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write the reordered copy to.", metavar="OUT")],
    data: Annotated[
        str | None, typer.Option(help="Inputs to match activations on; by weights where left out. As in apportion fit.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of inputs.")] = 0,
    as_json: Json = False,
) -> int:
    """Reorders heads, neurons and channels of a checkpoint to match another, so that both can be mixed.

    Example: apportion sources align ./one ./other -o other-aligned
    """
    from apportion.methods.compose.align import align_folders

    result = align_folders(reference, other, out, data=data, seed=seed)
    if as_json:
        print(json.dumps(result))
        return Exit.MET
    print(
        f"{result['moved']} of {result['units']} units moved; distance to {reference} "
        f"{result['distance_before']:.4f} before, {result['distance_after']:.4f} after: {out}"
    )
    return Exit.MET
