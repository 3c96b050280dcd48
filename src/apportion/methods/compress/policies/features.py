"""What a learned policy knows of a move before it is read: where it stands, and what the run has seen so far."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.core.knob import Setting, Value
from apportion.core.ledger import Row
from apportion.methods.compress.history import Seen, seen

NAMES = (
    "removed",  # share of the knob's dearest value that is gone after the move
    "removed_squared",
    "step",  # share that the move itself takes
    "position",  # from the first (0) to the last (1) knob of its kind
    "from_middle",  # distance from the middle of the network
    "excess_left",  # share of the excess at the start that is still to be saved
    "known",  # whether this knob was read before in this run
    "last",  # its newest ratio
    "last_saved",  # share of what is still to be saved that its newest reading saved
    "since_last",  # share removed since that was read
    "kind_known",
    "kind_mean",  # mean of the newest ratios of the other knobs of its kind
)
CLIP = math.asinh(1e3)


def kind_of(knob: str) -> str:
    """A knob's name without its numbers, so that the layers of a network share a kind.

    Example:
        >>> kind_of("prune.encoder.layer.11.attention")
        'prune.encoder.layer.#.attention'
    """
    return re.sub(r"\d+", "#", knob)


@dataclass(frozen=True)
class View:
    """The rows of a run as far as they go, prepared for asking about its next moves."""

    start: Setting
    excess: float
    excess_left: float
    newest: Mapping[str, Seen]
    scale: float
    positions: Mapping[str, float]

    @classmethod
    def of(cls, rows: Sequence[Row], quality: str = "quality") -> View:
        everything = seen(rows, quality)
        sizes = [abs(one.ratio) for one in everything if math.isfinite(one.ratio) and one.ratio != 0.0]
        here = next(row for row in reversed(rows) if row.kind in ("start", "move") and row.accepted)
        return cls(
            start=rows[0].setting,
            excess=here.cost,
            excess_left=here.cost / rows[0].cost if rows[0].cost else 0.0,
            newest={one.knob: one for one in everything},
            scale=statistics.median(sizes) if sizes else 1.0,
            positions=_positions(rows[0].setting),
        )

    def target(self, ratio: float) -> float:
        """A ratio on a scale on which runs can be compared: that of the ratios this run has seen (eq. M5)."""
        return min(CLIP, max(-CLIP, math.asinh(ratio / self.scale)))

    def features(self, knob: str, old: Value, value: Value) -> list[float]:
        """The numbers of ``NAMES`` for a move of ``knob`` from ``old`` to ``value``."""
        removed, before = self._removed(knob, value), self._removed(knob, old)
        position = self.positions[knob]
        last = self.newest.get(knob)
        kind = kind_of(knob)
        others = [self.target(one.ratio) for name, one in self.newest.items() if name != knob and kind_of(name) == kind]
        return [
            removed,
            removed**2,
            removed - before,
            position,
            abs(position - 0.5),
            self.excess_left,
            0.0 if last is None else 1.0,
            0.0 if last is None else self.target(last.ratio),
            0.0 if last is None or not self.excess else min(1.0, max(0.0, last.saved / self.excess)),
            0.0 if last is None else removed - self._removed(knob, last.value),
            1.0 if others else 0.0,
            statistics.fmean(others) if others else 0.0,
        ]

    def _removed(self, knob: str, value: Value) -> float:
        dearest = self.start[knob]
        if value == dearest:
            return 0.0
        if isinstance(value, str) or isinstance(dearest, str) or dearest <= 0:
            return 1.0  # values that are no amounts: something was removed, nobody knows how much
        return 1.0 - value / dearest


def _positions(setting: Setting) -> dict[str, float]:
    """Where each knob stands among those of its kind, by the numbers in its name."""
    by_kind: dict[str, list[str]] = {}
    for name in setting:
        by_kind.setdefault(kind_of(name), []).append(name)
    positions = {}
    for names in by_kind.values():
        names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
        for rank, name in enumerate(names):
            positions[name] = rank / (len(names) - 1) if len(names) > 1 else 0.5
    return positions
