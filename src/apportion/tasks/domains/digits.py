"""Handwritten digits of 8 × 8 pixels that ship with scikit-learn, read as a file."""

from __future__ import annotations

import hashlib

import numpy as np

from apportion.tasks.archive import read_gzip
from apportion.tasks.domains.entry import Examples, entry, package_file
from apportion.tasks.pictures import Greys


def read() -> Examples:
    data = read_gzip(package_file("scikit-learn", "sklearn/datasets/data/digits.csv.gz"))
    table = np.loadtxt(data.decode().splitlines(), delimiter=",", dtype=np.int64)
    grey_NHW = (table[:, :64] * 255 // 16).astype(np.uint8).reshape(-1, 8, 8)
    return Examples(Greys(grey_NHW), [str(label) for label in table[:, 64]], hashlib.sha256(data).hexdigest())


ENTRIES = entry(
    "digits",
    read,
    kind="image",
    summary="10 handwritten digits of 8 × 8 pixels",
    licence="CC BY 4.0",
    provenance="UCI Optical Recognition of Handwritten Digits, file of scikit-learn",
    checksum="6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8",
)
