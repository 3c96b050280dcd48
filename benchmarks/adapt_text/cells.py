"""What was judged and measured, by method, target, budget and side; methods compared on the same episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from frontier import Array, Curve, meet
from numpy.typing import NDArray

OURS, FLOAT = "ours", "ours-float"
INT8 = "int8"  # stands before the sizes of slices in int8, and ends the names of methods that take such
ROUNDED_BASELINE = "pruned-int8"  # the frozen network in int8; others are baselines with the int8 of ours
WHOLE = 1.0
Pair = tuple[float, float]  # how far ahead, and half of the 95 % interval


@dataclass(frozen=True, eq=False)
class Row:
    """The episodes of a method on a target at a budget; a latency that was not measured is not a number.

    ``error_N`` is the standard error of a latency, ``most_N`` that of the whole network in the precision that was
    chosen: more of a budget can't be used.
    """

    accuracy_N: Array
    latency_N: Array
    error_N: Array
    most_N: Array
    side_N: NDArray[np.str_]
    domain_N: NDArray[np.str_]

    def of(self, side: str) -> Row:
        return Row(*(part[self.side_N == side] for part in vars(self).values()))

    def first(self, side: str, count: int) -> list[NDArray]:
        """All columns of the first so many episodes of a side."""
        return [part[:count] for part in vars(self.of(side)).values()]

    @property
    def latency(self) -> float:
        """The middle latency of the episodes that were measured."""
        some = self.latency_N[~np.isnan(self.latency_N)]
        return float(np.exp(np.log(some).mean())) if len(some) else float("nan")


@dataclass(frozen=True, eq=False)
class Cells:
    """Rows by method, target and budget. ``table`` are the methods, ``variants`` ours with one thing changed."""

    rows: Mapping[tuple[str, str, float], Row]
    targets: tuple[str, ...]
    budgets: tuple[float, ...]  # those under the whole
    sides: tuple[str, ...]
    table: tuple[str, ...]
    variants: tuple[str, ...]

    @classmethod
    def of(cls, methods: Mapping[str, dict], measured: Mapping[str, dict]) -> Cells:
        first = methods[OURS]["rows"]
        targets = tuple(dict.fromkeys(row["target"] for row in first))
        table = tuple(name for name in methods if ":" not in name)
        rows = {
            (name, row["target"], row["rho"]): read_row(row, measured.get(row["target"], {}))
            for name, method in methods.items()
            for row in method["rows"]
        }
        sides = tuple(dict.fromkeys(side for row in first for side in row["side"]))
        least = {  # the episodes that all have judged which were judged on that side
            (target, side): min(
                filter(None, (int((rows[name, target, WHOLE].side_N == side).sum()) for name in table)), default=0
            )
            for target in targets
            for side in sides
        }
        rows = {
            key: Row(*map(np.concatenate, zip(*(row.first(s, least[key[1], s]) for s in sides), strict=True)))
            for key, row in rows.items()
        }
        return cls(
            rows,
            targets,
            tuple(dict.fromkeys(row["rho"] for row in first if row["rho"] < WHOLE)),
            sides,
            table,
            tuple(name for name in methods if ":" in name),
        )

    @property
    def main(self) -> tuple[str, ...]:
        """The sides that figures are about: known domains and others."""
        return self.sides[:2]

    @property
    def baselines(self) -> tuple[str, ...]:
        """All methods that are not ours, a relative of it, or a baseline with the int8 of ours."""
        return tuple(
            name
            for name in self.table
            if name != OURS
            and not name.startswith(f"{OURS}-")
            and (name == ROUNDED_BASELINE or not name.endswith(f"-{INT8}"))
        )

    @property
    def rounded(self) -> tuple[str, ...]:
        """All methods in int8 but ours."""
        return tuple(name for name in self.table if name != OURS and name.endswith(f"-{INT8}"))

    def judged(self, side: str) -> tuple[str, ...]:
        """The methods that were judged on a side."""
        return tuple(name for name in self.table if len(self.all(name, WHOLE, side)))

    def each(self, name: str, rho: float, side: str) -> list[Row]:
        """The rows of a side, one for each target; every episode was judged for one target, in turn."""
        return [self.rows[name, target, rho].of(side) for target in self.targets]

    def all(self, name: str, rho: float, side: str, count: int | None = None) -> Array:
        """Accuracy of all episodes of a budget and side, or of the first so many."""
        most = None if count is None else count // len(self.targets)
        return np.concatenate([row.accuracy_N[:most] for row in self.each(name, rho, side)])

    @cache  # noqa: B019  (cells live as long as the script)
    def curve(self, name: str, target: str, side: str) -> Curve:
        """A method's frontier on a target, as measured, up to the whole network."""
        some = [self.rows[name, target, rho].of(side) for rho in (*self.budgets, WHOLE)]
        known = [row for row in some if not np.isnan(row.latency)]
        return Curve.of([row.latency for row in known], [row.accuracy_N for row in known])

    def ahead_at_budget(self, name: str, other: str, rho: float, *sides: str) -> Pair:
        """How far a method is ahead of another at an equal budget on the same episodes, mean of sides."""
        found = []
        for side in sides:
            pairs = zip(self.each(name, rho, side), self.each(other, rho, side), strict=True)
            found.append(difference((a.accuracy_N, b.accuracy_N) for a, b in pairs))
        return paired(found)

    def ahead(self, name: str, other: str, rho: float, *sides: str) -> Pair | None:
        """The same at an equal measured latency: that of the method at the budget; None where the other has no point.

        Where the other's smallest latency is a bit more than that, both are read there (see ``frontier.meet``).
        """
        found = []
        for side in sides:
            pairs = []
            for target in self.targets:
                latency = self.rows[name, target, rho].of(side).latency
                met = None
                if not np.isnan(latency):
                    met = meet(self.curve(name, target, side), self.curve(other, target, side), latency)
                pairs += [] if met is None else [met]
            if not pairs:
                return None
            found.append(difference(pairs))
        return paired(found)

    def cannot(self, name: str, rho: float) -> bool:
        """Whether a method has been measured at its tightest budget on every target and is above another there."""
        least = [self.rows[name, target, self.budgets[0]].latency for target in self.targets]
        return all(latency > rho for latency in least)


def read_row(row: Mapping, known: Mapping[str, Sequence[float]]) -> Row:
    """A row as judged, with what was measured of its sizes on its target."""
    chosen, missing = row["chosen"], [np.nan, np.nan]
    count = len(row["accuracy"])
    latency, error, most = np.ones(count), np.zeros(count), np.ones(count)
    if row["rho"] < WHOLE:
        found = [known.get(" ".join(map(str, sizes)), missing) for sizes in row["sizes"]]
        wholes = [whole_in_int8(known) if sizes[0] == INT8 else WHOLE for sizes in row["sizes"]]
        latency, error = np.array([found[place] for place in chosen]).T
        most = np.array([wholes[place] for place in chosen])
    return Row(np.array(row["accuracy"]), latency, error, most, np.array(row["side"]), np.array(row["domain"]))


def whole_in_int8(known: Mapping[str, Sequence[float]]) -> float:
    """The latency of the largest network in int8 that was measured, which is the whole one where that was chosen."""
    return max((ratio for sizes, (ratio, _) in known.items() if sizes.startswith(INT8)), default=WHOLE)


def difference(pairs: Iterable[tuple[Array, Array]]) -> Array:
    return np.concatenate([a[: len(b)] - b[: len(a)] for a, b in pairs])


def paired(sides: list[Array]) -> Pair:
    """Mean over sides of the mean differences, and half of its 95 % interval."""
    mean = float(np.mean([side_N.mean() for side_N in sides]))
    return mean, 1.96 * sum(side_N.var(ddof=1) / len(side_N) for side_N in sides) ** 0.5 / len(sides)


def interval(value_N: Array) -> Pair:
    """A mean and half of its 95 % interval."""
    return paired([value_N])
