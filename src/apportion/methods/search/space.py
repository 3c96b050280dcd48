"""A search space: which layers can change, what may be proposed at each, and how a change can be paid for.

An architecture is a ``Setting``: one value for every decision. Adding a space is one small file with these methods.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from apportion.core.knob import Setting, Value
from apportion.errors import ApportionError


class SpaceError(ApportionError, ValueError):
    """A space or architecture that does not exist or does not fit."""


@dataclass(frozen=True)
class Proposal:
    """A micro-change at one layer: new values for some of its decisions."""

    layer: str
    edits: Mapping[str, Value]

    def apply(self, arch: Setting) -> Setting:
        """The tentative architecture, before compensation."""
        return Setting({**arch, **self.edits})

    def __str__(self) -> str:
        return f"{self.layer}: " + ", ".join(f"{name}={value}" for name, value in self.edits.items())


@dataclass(frozen=True)
class Rung:
    """One compensated version of a tentative architecture.

    ``drift`` says how far the compensation strays from none: the logarithm of the width factor in absolute value, or
    the number of edits elsewhere; 0 is no compensation.
    """

    arch: Setting
    drift: float


@dataclass(frozen=True)
class Ladder:
    """Ways to pay for a change. An ``ordered`` one goes from the cheapest to the dearest, with ``drift`` falling to its
    smallest and rising again; the others are sets. One ladder per precision where precision pays too."""

    rungs: tuple[Rung, ...]
    ordered: bool
    label: str = ""

    @property
    def nearest(self) -> int:
        """The index of the rung with the least drift, the first of equals."""
        return min(range(len(self.rungs)), key=lambda index: self.rungs[index].drift)


class Space(Protocol):
    """What the search needs to know of a family of architectures."""

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> Sequence[str]:
        """The mutable layers, in the order in which a sweep visits them."""
        ...

    def start(self) -> Setting:
        """The baseline architecture of the template."""
        ...

    def check(self, arch: Setting) -> None:
        """Raises ``SpaceError`` unless the architecture belongs to the space."""
        ...

    def proposals(self, arch: Setting, layer: str) -> Sequence[Proposal]:
        """The micro-changes allowed at a layer, none of them the present choice."""
        ...

    def ladders(self, arch: Setting, layer: str) -> Sequence[Ladder]:
        """Compensated versions of a tentative architecture whose layer was just changed; the change itself stays."""
        ...

    def random(self, rng: random.Random) -> Setting:
        """An architecture drawn at random."""
        ...


def micro_choices(tentative: Setting, compensated: Setting) -> frozenset[str]:
    """The decisions in which two architectures differ."""
    return frozenset(name for name in tentative if tentative[name] != compensated[name])
