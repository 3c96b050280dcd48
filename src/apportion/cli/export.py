"""``apportion export``: the model of a finished run as files for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from apportion.errors import Exit

HELP = """Write the model of RUN as safetensors, ONNX, OpenVINO IR or a torch.export program.

The certificate comes along where these very files were measured; of other formats nothing was.

Example: apportion export runs/minilm --format onnx -o minilm-onnx
"""


def command(
    run: Annotated[Path, typer.Argument(help="Folder that fit wrote.", metavar="RUN", show_default=False)],
    kind: Annotated[str, typer.Option("--format", help="safetensors, onnx, openvino or torch-export.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A new folder.", metavar="PATH")],
    model: Annotated[str | None, typer.Option(help="The original, where it came from a factory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    from apportion.cli.show import Bars
    from apportion.methods.compress.export import export

    told = export(run, kind, out, model, Bars(quiet=as_json))
    if as_json:
        print(json.dumps(told))
        return Exit.MET
    typer.echo(f"wrote {', '.join(told['files'])} to {told['path']}")
    about = f"{', '.join(told['certified_files']) or 'the saved model'} on {told['target']}"
    if told["certified"]:
        typer.echo(f"certified: the certificate is about {about}, and these are the same bytes")
    else:
        typer.echo(f"not certified: the run's certificate is about {about}; nothing was measured of these files")
    return Exit.MET
