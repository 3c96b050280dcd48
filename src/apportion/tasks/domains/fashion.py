"""Fashion-MNIST: the 10,000 test images from the data folder, or all 70,000 from the Debian package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apportion.errors import DataError
from apportion.tasks.archive import read_gzip
from apportion.tasks.cache import file_digest
from apportion.tasks.domain import Domain, find_file
from apportion.tasks.domains.entry import Entry
from apportion.tasks.pictures import Greys

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
_TEST = (
    "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
)
_PROVENANCE = "zalandoresearch/fashion-mnist, Debian package dataset-fashion-mnist"


def read_idx(path: Path) -> NDArray[np.uint8]:
    """A gzip'd array of bytes in the idx format, its sizes checked against its contents."""
    data = read_gzip(path)
    num_axes = data[3] if len(data) > 3 else 0
    shape = tuple(int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(num_axes))
    start = 4 + 4 * num_axes
    if data[:3] != b"\0\0\x08" or not shape or len(data) - start != int(np.prod(shape, dtype=object)):
        raise DataError(f"{path} is no idx array of bytes; fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def load_fashion() -> Domain:
    images = find_file("vision/fashion_mnist_t10k_images.gz", _TEST[0])
    labels = find_file("vision/fashion_mnist_t10k_labels.gz", _TEST[1])
    return _domain("fashion_mnist", [(images, labels)], ["test"])


def load_debian() -> Domain:
    """Training and test images of the Debian package; the test files are the ones of ``fashion_mnist``."""
    parts = {"train": "train", "test": "t10k"}
    pairs = [
        (DEBIAN_FOLDER / f"{name}-images-idx3-ubyte.gz", DEBIAN_FOLDER / f"{name}-labels-idx1-ubyte.gz")
        for name in parts.values()
    ]
    for path in (path for pair in pairs for path in pair):
        if not path.is_file():
            raise DataError(f"no file {path}; run: apt-get install dataset-fashion-mnist")
    if tuple(file_digest(path) for path in pairs[1]) != _TEST:
        raise DataError(f"{pairs[1][0]} is not the file published; run: apt-get install --reinstall")
    return _domain("fashion_mnist-debian", pairs, list(parts))


def _domain(name: str, pairs: list[tuple[Path, Path]], splits: list[str]) -> Domain:
    images = [read_idx(pair[0]) for pair in pairs]
    labels = [read_idx(pair[1]) for pair in pairs]
    return Domain(
        name=name,
        kind="image",
        classes=CLASSES,
        label_N=np.concatenate(labels).astype(np.int64),
        content=Greys(np.concatenate(images)),
        licence="MIT",
        provenance=_PROVENANCE,
        checksum="".join(file_digest(path) for pair in pairs for path in pair),
        split_N=np.repeat(splits, [len(part) for part in labels]),
    )


ENTRIES = {
    "fashion_mnist": Entry(
        kind="image", summary="10 kinds of clothes, the 10,000 test images", licence="MIT", load=load_fashion
    ),
    "fashion_mnist-debian": Entry(
        kind="image", summary="10 kinds of clothes, all 70,000 images", licence="MIT", load=load_debian
    ),
}
