"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from apportion.models.size import read_size

ImageSize = Annotated[
    Any,
    typer.Option(
        parser=read_size, metavar="SIZE", help="Pixels of an image's side, or HEIGHTxWIDTH; default the model's own."
    ),
]
