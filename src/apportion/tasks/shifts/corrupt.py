"""A domain seen through a corruption: the same rows and labels, every example changed when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apportion.errors import DataError
from apportion.tasks.domain import Domain, Kind
from apportion.tasks.shifts.pixels import PIXEL_CORRUPTIONS
from apportion.tasks.shifts.wording import WORD_CORRUPTIONS

SEVERITIES = (1, 2, 3, 4, 5)


def corruptions(kind: Kind) -> tuple[str, ...]:
    """Names of the corruptions of texts or of images."""
    return tuple(WORD_CORRUPTIONS if kind == "text" else PIXEL_CORRUPTIONS)


def corrupt(domain: Domain, name: str, severity: int, *, seed: int = 0) -> Domain:
    """The domain under a corruption of severity 1 to 5; the same row is changed in the same way every time."""
    if name not in corruptions(domain.kind):
        raise DataError(f"no corruption {name!r} of {domain.kind}s; there are {', '.join(corruptions(domain.kind))}")
    if severity not in SEVERITIES:
        raise DataError(f"severity {severity} is not possible; give 1 to 5")
    change = WORD_CORRUPTIONS[name] if domain.kind == "text" else PIXEL_CORRUPTIONS[name]
    return replace(
        domain,
        content=Changed(domain.content, change, severity, seed),
        checksum=f"{domain.checksum}/{name}-{severity}-{seed}",
        notes=(*domain.notes, f"corrupted: {name}, severity {severity}"),
    )


class Changed(Sequence[Any]):
    """Examples changed when they are read, each with a generator of its own."""

    def __init__(self, base: Sequence[Any], change: Callable[..., Any], severity: int, seed: int) -> None:
        self.base, self.change, self.severity, self.seed = base, change, severity, seed

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, row: Any) -> Any:
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 2, int(row)]))
        return self.change(self.base[row], self.severity, rng)
