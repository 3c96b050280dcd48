"""What is known of a built-in domain before it is read, and what reading it gives."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apportion.errors import ApportionError, DataError
from apportion.tasks.domain import Domain, Kind, text_domain


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A built-in domain: its kind, what it is in a few words, its licence, and how to read it."""

    kind: Kind
    summary: str
    licence: str
    load: Callable[[], Domain]

    def missing(self) -> str | None:
        """Why the domain can't be read here, or None when it can."""
        try:
            self.load()
        except ApportionError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Examples:
    """Texts, or images as ``uint8`` arrays (height, width, 3), the label of each, and the SHA-256 of their files."""

    content: Sequence[Any]
    labels: Sequence[str]
    checksum: str


def entry(
    name: str,
    read: Callable[[], Examples],
    *,
    kind: Kind,
    summary: str,
    licence: str,
    provenance: str,
    checksum: str | None = None,
) -> dict[str, Entry]:
    """The entry of a domain that is read by ``read``; with a ``checksum``, other files than those are refused."""

    def load() -> Domain:
        found = read()
        if checksum is not None and found.checksum != checksum:
            raise DataError(f"the files of {name} are not the ones published (their SHA-256 differs); fetch them again")
        said: dict[str, Any] = {"name": name, "licence": licence, "provenance": provenance, "checksum": found.checksum}
        if kind == "text":
            return text_domain(texts=found.content, labels=found.labels, **said)
        classes, label_N = np.unique(np.array(found.labels, dtype=str), return_inverse=True)
        return Domain(kind=kind, classes=tuple(map(str, classes)), label_N=label_N, content=found.content, **said)

    return {name: Entry(kind=kind, summary=summary, licence=licence, load=load)}


def package_file(package: str, file: str) -> Path:
    """A file or folder of an installed package, whose code is not run."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"the package {package} is not installed; run: pip install {package}") from None
    if not path.exists():
        raise DataError(f"{path} is missing; run: pip install --force-reinstall {package}")
    return path
