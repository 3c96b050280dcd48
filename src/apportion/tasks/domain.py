"""A domain: the labelled texts or images of one source, with its licence, origin and checksum."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from apportion.errors import DataError
from apportion.tasks.cache import file_digest

Kind = Literal["text", "image"]
Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Domain:
    """Labelled examples of one source; row ``i`` is ``content[i]``, of class ``classes[label_N[i]]``.

    Contents are texts, or images as ``uint8`` arrays of shape (height, width, 3). ``split_N`` names the published split
    of every row where there is one; ``notes`` say what was left out on reading, and how often.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    label_N: Rows
    content: Sequence[Any]
    licence: str
    provenance: str
    checksum: str
    split_N: NDArray[np.str_] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.label_N) != len(self.content):
            raise DataError(f"{self.name} has {len(self.content)} examples but {len(self.label_N)} labels")
        if not len(self.label_N):
            raise DataError(f"{self.name} holds no examples; check its classes and splits with: apportion tasks show")

    def __len__(self) -> int:
        return len(self.label_N)

    def examples(self, name: str) -> Rows:
        """The rows of a class."""
        if name not in self.classes:
            raise DataError(f"{self.name} has no class {name!r}; it has {_some(self.classes)}")
        return self.rows_by_class[self.classes.index(name)]

    @cached_property
    def rows_by_class(self) -> tuple[Rows, ...]:
        order = np.argsort(self.label_N, kind="stable")
        counts = np.bincount(self.label_N, minlength=len(self.classes))
        return tuple(np.split(order, np.cumsum(counts)[:-1]))

    def select(
        self,
        *,
        classes: Iterable[str] | None = None,
        splits: Iterable[str] | None = None,
        rows: Rows | None = None,
        name: str | None = None,
    ) -> Domain:
        """The part with the classes (names or patterns such as ``Greek/*``), splits and rows given."""
        keep_N = np.ones(len(self), dtype=bool)
        if splits is not None:
            known = () if self.split_N is None else tuple(np.unique(self.split_N))
            for split in splits:
                if split not in known:
                    raise DataError(f"{self.name} has no split {split!r}; it has {', '.join(known) or 'none'}")
            keep_N &= np.isin(np.asarray(self.split_N), list(splits))
        if rows is not None:
            keep_N &= np.isin(np.arange(len(self)), rows)
        chosen = self.classes if classes is None else self._matching(classes)
        position = {self.classes.index(chosen_name): place for place, chosen_name in enumerate(chosen)}
        keep_N &= np.isin(self.label_N, list(position))
        kept = np.flatnonzero(keep_N)
        return replace(
            self,
            name=name or self.name,
            classes=chosen,
            label_N=np.array([position[int(label)] for label in self.label_N[kept]], dtype=np.int64),
            content=View(self.content, kept),
            split_N=None if self.split_N is None else self.split_N[kept],
            checksum=hashlib.sha256(f"{self.checksum}\0".encode() + kept.tobytes()).hexdigest(),
        )

    def _matching(self, patterns: Iterable[str]) -> tuple[str, ...]:
        known = set(self.classes)
        chosen: dict[str, None] = {}
        for pattern in patterns:
            found = [pattern] if pattern in known else fnmatch.filter(self.classes, pattern)
            if not found:
                raise DataError(f"{self.name} has no class {pattern!r}; it has {_some(self.classes)}")
            chosen.update(dict.fromkeys(found))
        return tuple(chosen)


class View(Sequence[Any]):
    """Some rows of a sequence, read when asked for; a view of a view reads from the original."""

    def __init__(self, base: Sequence[Any], rows: Rows) -> None:
        self.base: Sequence[Any] = base.base if isinstance(base, View) else base
        self.rows: Rows = base.rows[rows] if isinstance(base, View) else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        return self.base[int(self.rows[row])]


def text_domain(
    *,
    name: str,
    texts: Sequence[str],
    labels: Sequence[str],
    licence: str,
    provenance: str,
    checksum: str,
    splits: Sequence[str] | None = None,
    strict: bool = False,
) -> Domain:
    """A domain of texts, each once: repeated rows and texts under two labels are left out and counted.

    Raises:
        DataError: ``strict`` and something would have been left out.
    """
    first: dict[str, int] = {}
    conflicting: set[str] = set()
    num_repeated = 0
    for row, text in enumerate(texts):
        if text in first:
            num_repeated += 1
            if labels[first[text]] != labels[row]:
                conflicting.add(text)
        else:
            first[text] = row
    if strict and (num_repeated or conflicting):
        worst = sorted(conflicting)[0] if conflicting else next(t for r, t in enumerate(texts) if first[t] != r)
        raise DataError(
            f"{name} repeats {num_repeated} of its {len(texts)} rows, {len(conflicting)} texts under two labels, such "
            f"as {worst[:60]!r}; clean it or leave out --strict"
        )
    kept = [row for text, row in first.items() if text not in conflicting and text.strip()]
    classes = tuple(dict.fromkeys(labels[row] for row in kept))
    index = {label: place for place, label in enumerate(classes)}
    notes = []
    if num_repeated:
        notes.append(f"{num_repeated} repeated rows left out")
    if conflicting:
        notes.append(f"{len(conflicting)} texts under two labels left out")
    return Domain(
        name=name,
        kind="text",
        classes=classes,
        label_N=np.array([index[labels[row]] for row in kept], dtype=np.int64),
        content=tuple(texts[row] for row in kept),
        licence=licence,
        provenance=provenance,
        checksum=checksum,
        split_N=None if splits is None else np.array([splits[row] for row in kept]),
        notes=tuple(notes),
    )


def data_root() -> Path:
    """The folder of the data files: ``APPORTION_DATA``, or ``../shared/data`` beside the repository."""
    given = os.environ.get("APPORTION_DATA")
    return Path(given) if given else Path(__file__).parents[4] / "shared" / "data"


def find_file(relative: str, digest: str) -> Path:
    """A data file, after checking that it is the one published.

    Raises:
        DataError: it is not there, or its SHA-256 is another.
    """
    path = data_root() / relative
    if not path.is_file():
        raise DataError(f"no data file {relative} under {data_root()}; set APPORTION_DATA to the folder that holds it")
    if file_digest(path) != digest:
        raise DataError(f"{path} is not the file published (its SHA-256 differs); fetch it again")
    return path


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
