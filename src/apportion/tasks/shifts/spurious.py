"""Spurious correlation: a cue that goes with the class in the support and not among the queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apportion.errors import DataError
from apportion.tasks.domain import Domain, Rows
from apportion.tasks.episode import Episode, Part

COLOURS = ((230, 25, 75), (60, 180, 75), (0, 130, 200), (255, 225, 25), (145, 30, 180), (70, 240, 240), (245, 130, 48))
WORDS = ("honestly", "basically", "actually", "anyway", "frankly", "listen", "well")


def with_cues(domain: Domain, num_cues: int) -> Domain:
    """Every example with each of some cues: row ``r * num_cues + c`` is row ``r`` with cue ``c``.

    A cue is a coloured square in the corner of an image, or a filler word before a text.
    """
    if not 2 <= num_cues <= len(WORDS):
        raise DataError(f"{num_cues} cues are not possible; give 2 to {len(WORDS)}")
    return replace(
        domain,
        name=f"{domain.name}+cues",
        label_N=np.repeat(domain.label_N, num_cues),
        content=Cued(domain.content, num_cues),
        split_N=None if domain.split_N is None else np.repeat(domain.split_N, num_cues),
        checksum=f"{domain.checksum}/cues-{num_cues}",
    )


def cue_episode(
    episode: Episode, rng: np.random.Generator, *, num_cues: int, support_ratio: float = 1.0, query_ratio: float = 0.0
) -> Episode:
    """The episode on ``with_cues``: shares of support and queries carry the cue of their class, the rest another one.

    With the defaults every support example has its class's cue and no query has, so a head that reads the cue is wrong.
    """
    for ratio in (support_ratio, query_ratio):
        if not 0 <= ratio <= 1:
            raise DataError(f"cue ratio {ratio:g} is no share; give a number from 0 to 1")
    return replace(
        episode,
        domain=f"{episode.domain}+cues",
        support=_cued(episode.support, rng, num_cues, support_ratio),
        query=_cued(episode.query, rng, num_cues, query_ratio),
    )


def cues_of(rows: Rows, num_cues: int) -> Rows:
    """The cues of rows of ``with_cues``."""
    return rows % num_cues


def _cued(part: Part, rng: np.random.Generator, num_cues: int, ratio: float) -> Part:
    own_N = part.label_N % num_cues
    other_N = (own_N + rng.integers(1, num_cues, len(part))) % num_cues
    has_own_N = np.zeros(len(part), dtype=bool)
    has_own_N[rng.permutation(len(part))[: round(ratio * len(part))]] = True
    cue_N = np.where(has_own_N, own_N, other_N)
    return Part(row_N=part.row_N * num_cues + cue_N, label_N=part.label_N)


class Cued(Sequence[Any]):
    """Examples with a cue added when they are read."""

    def __init__(self, base: Sequence[Any], num_cues: int) -> None:
        self.base, self.num_cues = base, num_cues

    def __len__(self) -> int:
        return len(self.base) * self.num_cues

    def __getitem__(self, row: Any) -> Any:
        original, cue = divmod(int(row), self.num_cues)
        content = self.base[original]
        if isinstance(content, str):
            return f"{WORDS[cue]}, {content}"
        side = max(1, min(content.shape[:2]) // 5)
        marked = content.copy()
        marked[:side, :side] = COLOURS[cue]
        return marked
