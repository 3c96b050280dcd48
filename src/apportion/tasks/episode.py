"""Episodes: small tasks of N classes with K examples each to learn from, and queries to be judged on.

Shape letters: N rows of a domain, S support rows, Q query rows, W classes of an episode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from apportion.errors import DataError
from apportion.tasks.domain import Domain, Rows

Count: TypeAlias = int | tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Rows of a domain and their classes, numbered within the episode."""

    row_N: Rows
    label_N: Rows

    def __len__(self) -> int:
        return len(self.row_N)


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One small task: which domain and classes, what to learn from and what to be judged on."""

    domain: str
    class_W: Rows
    support: Part
    query: Part

    @property
    def ways(self) -> int:
        return len(self.class_W)

    def digest(self) -> str:
        """A fingerprint that is the same in every process for the same episode."""
        total = hashlib.sha256(self.domain.encode())
        for part in (self.class_W, self.support.row_N, self.support.label_N, self.query.row_N, self.query.label_N):
            total.update(part.astype("<i8").tobytes() + b"|")
        return total.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What episodes look like; a pair ``(low, high)`` is drawn anew for every episode, both ends included.

    ``shots`` are examples per class to learn from; with ``imbalance`` ρ > 1 they fall geometrically over the classes,
    from ``shots`` to ``shots / ρ``, never under one. ``queries`` are per class. ``max_support`` bounds the support as a
    whole, at least one example per class.
    """

    ways: Count = 5
    shots: Count = 5
    queries: Count = 15
    imbalance: float = 1.0
    max_support: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("ways", 2), ("shots", 1), ("queries", 1)):
            low, high = bounds(getattr(self, name))
            if not least <= low <= high:
                raise DataError(f"{name} {getattr(self, name)} is not possible; give {least} or more, low before high")
        if self.imbalance < 1:
            raise DataError(f"imbalance {self.imbalance:g} is not possible; 1 is balanced, 10 gives ten times as many")
        if self.max_support is not None and self.max_support < bounds(self.ways)[1]:
            raise DataError(f"max_support {self.max_support} leaves some of {bounds(self.ways)[1]} classes without one")


class Sampler:
    """Draws episodes of a shape from one or several domains, each a function of the seed and its number alone.

    Several domains are visited equally often: in every block of as many episodes as domains, each once.
    """

    def __init__(self, domains: Domain | Sequence[Domain], shape: Shape, *, seed: int = 0) -> None:
        self.domains = (domains,) if isinstance(domains, Domain) else tuple(domains)
        self.shape, self.seed = shape, seed
        if not self.domains or seed < 0:
            raise DataError("give at least one domain and a seed of 0 or more")
        need = bounds(shape.shots)[0] + bounds(shape.queries)[0]
        self._pools: list[tuple[Rows, ...]] = []
        self.left_out: dict[str, tuple[str, ...]] = {}
        self._usable: list[Rows] = []
        for domain in self.domains:
            counts = np.array([len(rows) for rows in domain.rows_by_class])
            usable = np.flatnonzero(counts >= need)
            self.left_out[domain.name] = tuple(domain.classes[i] for i in np.flatnonzero(counts < need))
            if len(usable) < bounds(shape.ways)[0]:
                poorest = int(counts.argmin())
                raise DataError(
                    f"{domain.name} has {len(usable)} classes of at least {need} examples, {bounds(shape.ways)[0]} are "
                    f"needed (class {domain.classes[poorest]!r} has {counts[poorest]}); ask for fewer ways, shots or "
                    "queries"
                )
            self._usable.append(usable)
            self._pools.append(domain.rows_by_class)

    def episode(self, number: int) -> Episode:
        """The episode of a number, whatever was drawn before."""
        place = self._domain_of(number)
        domain, pools, usable = self.domains[place], self._pools[place], self._usable[place]
        rng = _generator(self.seed, 1, number)
        ways = min(_draw(rng, self.shape.ways), len(usable))
        class_W = usable[rng.permutation(len(usable))[:ways]] if ways < len(usable) else rng.permutation(usable)
        shots_W, queries = self._counts(rng, [len(pools[c]) for c in class_W])
        support, query = [], []
        for chosen, shots in zip(class_W, shots_W, strict=True):
            pool = pools[chosen]
            rows = pool[_some(rng, len(pool), shots + queries)]
            support.append(rows[:shots])
            query.append(rows[shots:])
        number_W = np.arange(ways)
        return Episode(
            domain=domain.name,
            class_W=class_W,
            support=Part(row_N=np.concatenate(support), label_N=np.repeat(number_W, shots_W)),
            query=Part(row_N=np.concatenate(query), label_N=np.repeat(number_W, queries)),
        )

    def episodes(self, count: int, *, start: int = 0) -> Iterator[Episode]:
        """Episodes ``start`` to ``start + count - 1``."""
        return (self.episode(number) for number in range(start, start + count))

    def domain(self, episode: Episode) -> Domain:
        return next(domain for domain in self.domains if domain.name == episode.domain)

    def _domain_of(self, number: int) -> int:
        num_domains = len(self.domains)
        if num_domains == 1:
            return 0
        block, place = divmod(number, num_domains)
        return int(_generator(self.seed, 0, block).permutation(num_domains)[place])

    def _counts(self, rng: np.random.Generator, sizes: Sequence[int]) -> tuple[Rows, int]:
        """Shots of every class and queries of each; the drawn numbers, lowered to what the classes hold."""
        shots, queries = _draw(rng, self.shape.shots), _draw(rng, self.shape.queries)
        smallest = min(sizes)
        queries = min(queries, smallest - min(bounds(self.shape.shots)[0], shots))
        shots = min(shots, smallest - queries)
        ways = len(sizes)
        fall_W = self.shape.imbalance ** (-np.arange(ways) / max(ways - 1, 1))
        shots_W = np.maximum(1, np.rint(shots * fall_W)).astype(np.int64)
        if self.shape.max_support is not None:
            while shots_W.sum() > self.shape.max_support:
                shots_W[shots_W.argmax()] -= 1
        return shots_W, queries


def bounds(count: Count) -> tuple[int, int]:
    return (count, count) if isinstance(count, int) else count


def _draw(rng: np.random.Generator, count: Count) -> int:
    low, high = bounds(count)
    return low if low == high else int(rng.integers(low, high + 1))


def _some(rng: np.random.Generator, total: int, count: int) -> NDArray[np.int64]:
    """``count`` different numbers below ``total``, in random order."""
    if total <= 200:
        return rng.permutation(total)[:count]
    return rng.choice(total, count, replace=False)


def _generator(seed: int, stream: int, number: int) -> np.random.Generator:
    """A generator of its own for every number: Philox counts in blocks, so streams never meet."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, stream, number]))
