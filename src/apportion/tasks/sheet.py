"""A contact sheet: one row of small images per class of an episode, support left of a line, queries right of it."""

from __future__ import annotations

import io

import numpy as np

from apportion.errors import DataError
from apportion.tasks.domain import Domain
from apportion.tasks.episode import Episode
from apportion.tasks.pictures import pillow, resize

TILE = 64
GAP = 4


def render_sheet(domain: Domain, episode: Episode, *, max_columns: int = 10) -> bytes:
    """A PNG of the episode: per class at most ``max_columns`` support images, then as many queries."""
    if domain.kind != "image":
        raise DataError(f"{domain.name} holds texts, which have no contact sheet; leave out --sheet")
    parts = (episode.support, episode.query)
    widths = [min(max_columns, int(np.bincount(part.label_N).max())) for part in parts]
    cell = TILE + GAP
    sheet = np.full((episode.ways * cell + GAP, (sum(widths) + 1) * cell + GAP, 3), 255, dtype=np.uint8)
    line = widths[0] * cell + GAP + cell // 2
    sheet[:, line - 1 : line + 1] = 0
    for part, left in zip(parts, (0, widths[0] + 1), strict=True):
        for label in range(episode.ways):
            rows = part.row_N[part.label_N == label][:max_columns]
            for column, tile in enumerate(resize([domain.content[int(row)] for row in rows], TILE, TILE)):
                top, start = label * cell + GAP, (left + column) * cell + GAP
                sheet[top : top + TILE, start : start + TILE] = tile
    file = io.BytesIO()
    pillow().fromarray(sheet).save(file, format="PNG")
    return file.getvalue()
