"""Leakage: the same example, or nearly the same text, on both sides of a split."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.errors import DataError
from apportion.tasks.domain import Domain

NEAR = 0.8
_SHINGLE = 4
_NOT_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Leak:
    """A row of a training domain and a judged row (of the domain ``other``) that are the same, or alike by a share."""

    row: int
    other: str
    other_row: int
    likeness_ratio: float


class Judged:
    """What is judged, ready to be asked which examples of a training domain it also holds.

    Images are compared by their pixels, texts by their shingles (eq. T1).
    """

    def __init__(self, domains: Sequence[Domain], *, near: float = NEAR) -> None:
        self.rows = [(domain.name, row) for domain in domains if domain.kind == "text" for row in range(len(domain))]
        self.texts = Texts([text for domain in domains if domain.kind == "text" for text in domain.content], near=near)
        self.pixels: dict[str, tuple[str, int]] = {}
        for domain in domains:
            if domain.kind == "image":
                for row in range(len(domain)):
                    self.pixels.setdefault(fingerprint(domain.content[row]), (domain.name, row))

    def leaks(self, domain: Domain) -> list[Leak]:
        """Every example of a domain that is judged too, with the one most like it."""
        if domain.kind == "text":
            found = ((row, self.texts.nearest(text)) for row, text in enumerate(domain.content))
            return [Leak(row, *self.rows[near[0]], near[1]) for row, near in found if near is not None]
        same = ((row, self.pixels.get(fingerprint(domain.content[row]))) for row in range(len(domain)))
        return [Leak(row, *where, 1.0) for row, where in same if where is not None]

    def refuse(self, domain: Domain) -> None:
        """Raises when an example of the domain is judged."""
        leaks = self.leaks(domain)
        if leaks:
            shown = f", such as {str(domain.content[leaks[0].row])[:60]!r}" if domain.kind == "text" else ""
            raise DataError(
                f"{len(leaks)} examples of {domain.name} are also judged (in {leaks[0].other}){shown}; leave them out "
                "of training"
            )

    def without(self, domain: Domain) -> tuple[Domain, int]:
        """The domain without what is judged, and how many rows that took."""
        leaked = {leak.row for leak in self.leaks(domain)}
        if not leaked:
            return domain, 0
        keep = np.array([row for row in range(len(domain)) if row not in leaked], dtype=np.int64)
        return domain.select(rows=keep), len(leaked)


class Texts:
    r"""Texts that can be asked for the one most like another, if alike enough (eq. T1).

    .. math:: J(a, b) = \frac{|A \cap B|}{|A \cup B|} \ge t

    A and B are the sets of character shingles of the texts in lower case without punctuation; ``near`` is t. Exact: two
    sets with J ≥ t share a shingle among the rarest ``|A| - ceil(t |A|) + 1`` of each (prefix filter), so only texts
    that share such a shingle are compared.
    """

    def __init__(self, texts: Sequence[str], *, near: float = NEAR) -> None:
        if not 0 < near <= 1:
            raise DataError(f"near {near:g} is no share; give a number above 0, at most 1")
        self.near = near
        self.sets = [shingles(text) for text in texts]
        self.frequency = Counter(shingle for one in self.sets for shingle in one)
        self.holders: defaultdict[str, list[int]] = defaultdict(list)
        for place, shingle_set in enumerate(self.sets):
            for shingle in self._rarest(shingle_set):
                self.holders[shingle].append(place)

    def nearest(self, text: str) -> tuple[int, float] | None:
        """The place of the text most like this one (the first of several) and their likeness, or None."""
        wanted = shingles(text)
        candidates = {place for shingle in self._rarest(wanted) for place in self.holders.get(shingle, ())}
        longest, shortest = len(wanted) / self.near, len(wanted) * self.near
        best = max(
            (
                (jaccard(wanted, self.sets[place]), -place)
                for place in candidates
                if shortest - 1e-9 <= len(self.sets[place]) <= longest + 1e-9
            ),
            default=(0.0, 0),
        )
        return (-best[1], best[0]) if best[0] >= self.near else None

    def _rarest(self, shingle_set: frozenset[str]) -> list[str]:
        ordered = sorted(shingle_set, key=lambda shingle: (self.frequency[shingle], shingle))
        return ordered[: len(ordered) - math.ceil(self.near * len(ordered) - 1e-9) + 1]


def shingles(text: str) -> frozenset[str]:
    """Runs of four characters of a text in lower case, its punctuation and spaces made one space each."""
    plain = f" {_NOT_WORDS.sub(' ', text.casefold()).strip()} "
    return frozenset(plain[start : start + _SHINGLE] for start in range(max(1, len(plain) - _SHINGLE + 1)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


def fingerprint(content: Any) -> str:
    """SHA-256 of an image's size and pixels, or of a text."""
    if isinstance(content, str):
        return hashlib.sha256(content.encode()).hexdigest()
    return hashlib.sha256(str(content.shape).encode() + np.ascontiguousarray(content).tobytes()).hexdigest()
