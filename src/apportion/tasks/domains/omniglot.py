"""Omniglot: 1,623 characters of 50 alphabets, and the class splits of Vinyals et al. with rotated classes."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.errors import DataError
from apportion.tasks.domain import Domain, find_file
from apportion.tasks.domains.entry import Entry

SIDE = 105
_DIGEST = "b38ad0c09f07b0f1d6abeec567870a1b1065ddfcc11f202ba1b083214ab7ffdb"
_SPLIT_DIGESTS = {
    "train": "984522c194c30fb678ce53304a160a42faf5403ad4f9a67010f32dd3a35738e0",
    "val": "11f99e54faee3e26f53d3231c1cceac5bf7b8730e9be31cb6dab256551dc0c1a",
    "trainval": "5276ae50c755596d0bff7f2284e85625695549a85ee6e36b6491ad1e5d1cc26a",
    "test": "845264cc5c156180828ccf17915668b17ee21424d0170df6e7d81676aa5d1204",
}
_LICENCE = "MIT"
_PROVENANCE = "brendenlake/omniglot, file of Goldesel23/Siamese-Networks-for-One-Shot-Learning"


class Strokes(Sequence[Any]):
    """Black ink on white, unpacked from bits when asked for; ``turns`` are quarter turns, counter-clockwise."""

    def __init__(self, bits_NB: NDArray[np.uint8], rows: NDArray[np.int64], turns: NDArray[np.int64]) -> None:
        self.bits_NB, self.rows, self.turns = bits_NB, rows, turns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        ink = np.unpackbits(self.bits_NB[self.rows[row]])[: SIDE * SIDE].reshape(SIDE, SIDE)
        grey = np.rot90(255 - 255 * ink, int(self.turns[row]))
        return np.repeat(grey[:, :, None], 3, axis=2)


@lru_cache(maxsize=1)
def _arrays() -> tuple[NDArray[np.uint8], NDArray[np.str_]]:
    path = find_file("vision/omniglot.npz", _DIGEST)
    try:
        with np.load(path, allow_pickle=False) as file:
            name_N = np.char.add(np.char.add(file["alphabet"], "/"), file["character"])
            return file["strokes"], name_N
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} can't be read ({error}); fetch it again") from None


def load_omniglot() -> Domain:
    """All characters upright; classes are ``alphabet/character``."""
    bits_NB, name_N = _arrays()
    classes, label_N = np.unique(name_N, return_inverse=True)
    rows = np.arange(len(name_N))
    return _domain("omniglot", tuple(map(str, classes)), label_N, Strokes(bits_NB, rows, np.zeros_like(rows)), _DIGEST)


def load_vinyals(split: str) -> Domain:
    """A published class split: every character in four rotations, each a class ``alphabet/character/rotNNN``."""
    digest = _SPLIT_DIGESTS[split]
    lines = find_file(f"vision/omniglot_vinyals_{split}.txt", digest).read_text(encoding="utf-8").split()
    bits_NB, name_N = _arrays()
    order = np.argsort(name_N, kind="stable")
    names, starts, counts = np.unique(name_N[order], return_index=True, return_counts=True)
    span = {str(name): (int(start), int(count)) for name, start, count in zip(names, starts, counts, strict=True)}
    rows, turns, labels = [], [], []
    for place, line in enumerate(lines):
        character, _, rotation = line.rpartition("/")
        start, count = span[character]
        rows.append(order[start : start + count])
        turns.append(np.full(count, int(rotation.removeprefix("rot")) // 90))
        labels.append(np.full(count, place))
    strokes = Strokes(bits_NB, np.concatenate(rows), np.concatenate(turns))
    return _domain(f"omniglot-vinyals-{split}", tuple(lines), np.concatenate(labels), strokes, _DIGEST + digest)


def _domain(name: str, classes: tuple[str, ...], label_N: NDArray[np.int64], content: Strokes, checksum: str) -> Domain:
    return Domain(
        name=name,
        kind="image",
        classes=classes,
        label_N=label_N.astype(np.int64),
        content=content,
        licence=_LICENCE,
        provenance=_PROVENANCE,
        checksum=checksum,
    )


ENTRIES = {
    "omniglot": Entry(
        kind="image", summary="1,623 handwritten characters of 50 alphabets", licence=_LICENCE, load=load_omniglot
    ),
    **{
        f"omniglot-vinyals-{split}": Entry(
            kind="image",
            summary=f"the published {split} classes of Omniglot, in four rotations",
            licence=_LICENCE,
            load=partial(load_vinyals, split),
        )
        for split in _SPLIT_DIGESTS
    },
}
