"""Handwritten digits of 8 × 8 pixels that ship with scikit-learn, read as a file."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
from pathlib import Path

import numpy as np

from apportion.errors import DataError
from apportion.tasks.domain import Domain
from apportion.tasks.domains.entry import Entry
from apportion.tasks.domains.fashion import Greys

_DIGEST = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


def load_digits() -> Domain:
    try:
        distribution = importlib.metadata.distribution("scikit-learn")
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            "the digits come with scikit-learn, which is not installed; run: pip install scikit-learn"
        ) from None
    path = Path(str(distribution.locate_file("sklearn/datasets/data/digits.csv.gz")))
    if not path.is_file():
        raise DataError(f"{path} is missing; run: pip install --force-reinstall scikit-learn")
    with gzip.open(path, "rb") as file:
        data = file.read(10_000_000)
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != _DIGEST:
        raise DataError(f"{path} is not the file published; run: pip install --force-reinstall scikit-learn")
    table = np.loadtxt(data.decode().splitlines(), delimiter=",", dtype=np.int64)
    return Domain(
        name="digits",
        kind="image",
        classes=tuple("0123456789"),
        label_N=table[:, 64],
        content=Greys((table[:, :64] * 255 // 16).astype(np.uint8).reshape(-1, 8, 8)),
        licence="CC BY 4.0",
        provenance="UCI Optical Recognition of Handwritten Digits, file of scikit-learn",
        checksum=checksum,
    )


ENTRIES = {
    "digits": Entry(
        kind="image", summary="10 handwritten digits of 8 × 8 pixels", licence="CC BY 4.0", load=load_digits
    )
}
