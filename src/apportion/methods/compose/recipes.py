r"""Merging recipes, one equation each, computed block by block so that a few blocks are all the memory they need.

A recipe's ``plan`` may look at a whole tensor first (a threshold, an angle), block by block too; what it returns makes
the merged numbers ``start`` to ``stop`` and is called in rising order. It returns the same array every time, so that no
memory is asked for in the loop: fresh pages cost more than the arithmetic.

Sums run over the sources in the order given and products are rounded before they are added, so results are the same on
every machine and for every number of threads.

Symbols: :math:`\theta^{(r)}` a source, :math:`\theta_0` the base, :math:`\delta_r = \theta^{(r)} - \theta_0`.
Shape letters: N numbers of a block, S sources.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apportion.errors import ModelError
from apportion.methods.compose.checkpoint import Floats, blocks
from apportion.methods.compose.source import Stack
from apportion.numerics.topk import kth_magnitude

Combine: TypeAlias = Callable[[int, int], Floats]
_F32 = np.float32


class Scratch:
    """Arrays by name that are used again and again."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def get(self, name: str, size: int, dtype: type = np.float32) -> NDArray[Any]:
        if name not in self._arrays or len(self._arrays[name]) < size:
            self._arrays[name] = np.empty(size, dtype)
        return self._arrays[name][:size]

    def zeros(self, name: str, size: int) -> Floats:
        array_N = self.get(name, size)
        array_N.fill(0)
        return array_N


class Recipe(Protocol):
    """A way to merge; ``needs_base`` where it works on differences to a common base."""

    @property
    def needs_base(self) -> bool: ...

    def plan(self, stack: Stack) -> Combine: ...

    def weights(self, name: str) -> Sequence[float]: ...


@dataclass(frozen=True, kw_only=True)
class Linear:
    r"""Weighted mean of the sources (eq. C21); sources of weight zero are not read.

    .. math:: \theta = \frac{\sum_r w_r \theta^{(r)}}{\sum_r w_r}

    ``by_tensor`` gives single tensors weights of their own; ``edits`` are dense additions to single tensors.
    """

    weight_S: Sequence[float]
    normalise: bool = True
    by_tensor: Mapping[str, Sequence[float]] = field(default_factory=dict)
    edits: Mapping[str, Floats] = field(default_factory=dict)
    needs_base: bool = False

    def weights(self, name: str) -> Sequence[float]:
        return self.by_tensor.get(name, self.weight_S)

    def plan(self, stack: Stack) -> Combine:
        weights = [(place, _F32(weight)) for place, weight in enumerate(self.weights(stack.name)) if weight != 0]
        total = _total([weight for _, weight in weights])
        if self.normalise and not (math.isfinite(total) and total != 0):
            raise ModelError(f"the weights of {stack.name!r} sum to {total:g}; give weights with another sum")
        edit = self.edits.get(stack.name)
        scratch = Scratch()

        def combine(start: int, stop: int) -> Floats:
            buffer_N, sum_N = scratch.get("product", stop - start), scratch.zeros("sum", stop - start)
            for place, weight in weights:
                np.multiply(stack.read(place, start, stop), weight, out=buffer_N)
                sum_N += buffer_N
            if self.normalise and total != 1:
                sum_N /= total
            if edit is not None:
                sum_N += edit[start:stop]
            return sum_N

        return combine


@dataclass(frozen=True, kw_only=True)
class TaskArithmetic:
    r"""The base plus a weighted sum of differences (eq. C22).

    .. math:: \theta = \theta_0 + \lambda \sum_r w_r \delta_r
    """

    weight_S: Sequence[float]
    scale: float = 1.0
    needs_base: bool = True

    def weights(self, name: str) -> Sequence[float]:
        return self.weight_S

    def plan(self, stack: Stack) -> Combine:
        scratch = Scratch()

        def combine(start: int, stop: int) -> Floats:
            base_N = stack.read_base(start, stop)
            sum_N, delta_N = scratch.zeros("sum", stop - start), scratch.get("delta", stop - start)
            for place, weight in enumerate(self.weight_S):
                np.subtract(stack.read(place, start, stop), base_N, out=delta_N)
                delta_N *= _F32(weight)
                sum_N += delta_N
            if self.scale != 1:
                sum_N *= _F32(self.scale)
            sum_N += base_N
            return sum_N

        return combine


@dataclass(frozen=True, kw_only=True)
class Ties:
    r"""Trim, elect sign, and merge what agrees (eq. C23).

    .. math::
        \hat\delta_r = \delta_r \odot 1\{\delta_r \in \text{top } k\}, \quad
        s = \mathrm{sign} \sum_r w_r \hat\delta_r, \quad
        \theta = \theta_0 + \lambda \frac{\sum_r w_r \hat\delta_r 1\{\mathrm{sign}(w_r \hat\delta_r) = s\}}
                                         {\sum_r w_r 1\{\mathrm{sign}(w_r \hat\delta_r) = s\}}

    Each tensor of each source keeps the ``k = ⌊density · size⌋`` numbers of largest magnitude, at least one; of equal
    ones at the threshold the first. The positive and the negative part are summed side by side, so memory does not
    grow with the number of sources. A sum of exactly zero elects plus.
    """

    weight_S: Sequence[float]
    density: float = 0.2
    scale: float = 1.0
    normalise: bool = True
    needs_base: bool = True

    def __post_init__(self) -> None:
        _check_density(self.density)

    def weights(self, name: str) -> Sequence[float]:
        return self.weight_S

    def plan(self, stack: Stack) -> Combine:
        trims = [Trim.of(stack, place, self.density) for place in range(len(self.weight_S))]
        scratch = Scratch()

        def combine(start: int, stop: int) -> Floats:
            base_N = stack.read_base(start, stop)
            vote, delta_N = _Vote(scratch, stop - start), scratch.get("delta", stop - start)
            for place, weight in enumerate(self.weight_S):
                np.subtract(stack.read(place, start, stop), base_N, out=delta_N)
                vote.add(trims[place].apply(delta_N, scratch), weight)
            return _onto(base_N, vote.result(self.normalise), self.scale)

        return combine


@dataclass(frozen=True, kw_only=True)
class Dare:
    r"""Drop at random and rescale (eq. C24); with ``elect`` the signs are elected as in TIES.

    .. math:: \theta = \theta_0 + \lambda \sum_r w_r \frac{m_r \odot \delta_r}{p}, \quad m_r \sim \mathrm{Bernoulli}(p)

    Every block of every tensor of every source draws from its own generator, keyed by the seed, so the result does not
    depend on the number of threads. A draw has 16 bits: ``p`` is the density rounded to a multiple of 1/65536, and the
    rescaling uses that ``p``, so the expectation is exact.
    """

    weight_S: Sequence[float]
    density: float = 0.5
    scale: float = 1.0
    seed: int = 0
    elect: bool = False
    needs_base: bool = True

    def __post_init__(self) -> None:
        _check_density(self.density)

    def weights(self, name: str) -> Sequence[float]:
        return self.weight_S

    def plan(self, stack: Stack) -> Combine:
        keep = max(1, round(self.density * 65536))
        share = keep / 65536
        key = int.from_bytes(hashlib.sha256(stack.name.encode()).digest()[:8], "little")

        scratch = Scratch()

        def dropped(place: int, start: int, base_N: Floats, stop: int) -> Floats:
            delta_N = np.subtract(stack.read(place, start, stop), base_N, out=scratch.get("delta", len(base_N)))
            if keep < 65536:
                generator = np.random.SFC64(np.random.SeedSequence((self.seed, place, key, start)))
                draw_N = generator.random_raw(-(-len(delta_N) // 4)).view(np.uint16)[: len(delta_N)]
                delta_N *= np.less(draw_N, np.uint16(keep), out=scratch.get("keep", len(delta_N), np.bool_))
            return delta_N

        def combine(start: int, stop: int) -> Floats:
            base_N = stack.read_base(start, stop)
            vote, sum_N = _Vote(scratch, stop - start), scratch.zeros("sum", stop - start)
            for place, weight in enumerate(self.weight_S):
                delta_N = dropped(place, start, base_N, stop)
                if self.elect:
                    delta_N *= _F32(1 / share)
                    vote.add(delta_N, weight)
                else:
                    delta_N *= _F32(weight / share)
                    sum_N += delta_N
            return _onto(base_N, vote.result(normalise=True) if self.elect else sum_N, self.scale)

        return combine


@dataclass(frozen=True, kw_only=True)
class Slerp:
    r"""Two sources along the arc between them, tensor by tensor (eq. C25).

    .. math:: \theta = \frac{\sin((1 - t)\varphi)}{\sin\varphi} \theta^{(1)} +
              \frac{\sin(t\varphi)}{\sin\varphi} \theta^{(2)}, \quad
              \cos\varphi = \frac{\langle\theta^{(1)}, \theta^{(2)}\rangle}{\|\theta^{(1)}\| \|\theta^{(2)}\|}

    Tensors that point the same way to within ``cos φ > 0.9995``, or that are zero, are mixed along the straight line.
    """

    t: float = 0.5
    needs_base: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.t <= 1:
            raise ModelError(f"the position t {self.t:g} is not between the sources; give a number from 0 to 1")

    def weights(self, name: str) -> Sequence[float]:
        return (1 - self.t, self.t)

    def plan(self, stack: Stack) -> Combine:
        if len(stack.sources) != 2:
            raise ModelError(f"slerp takes two sources, not {len(stack.sources)}; merge pairs one after another")
        inner = first = second = 0.0
        for start, stop in blocks(stack.size):
            a_N, b_N = stack.read(0, start, stop).astype(np.float64), stack.read(1, start, stop).astype(np.float64)
            inner, first, second = inner + float(a_N @ b_N), first + float(a_N @ a_N), second + float(b_N @ b_N)
        norm = math.sqrt(first * second)
        cosine = inner / norm if norm > 0 else 1.0
        if abs(cosine) > 0.9995:
            return Linear(weight_S=(1 - self.t, self.t), normalise=False).plan(stack)
        angle = math.acos(cosine)
        shares = (math.sin((1 - self.t) * angle) / math.sin(angle), math.sin(self.t * angle) / math.sin(angle))
        return Linear(weight_S=shares, normalise=False).plan(stack)


class Trim:
    """Keeps the k numbers of largest magnitude of one source's difference to the base; asked in rising order."""

    def __init__(self, threshold: float, num_ties: int) -> None:
        self.threshold, self.ties_left = _F32(threshold), num_ties

    @classmethod
    def of(cls, stack: Stack, place: int, density: float) -> Trim:
        size = max(1, math.floor(density * stack.size))
        if size >= stack.size:
            return cls(0.0, stack.size)

        scratch = Scratch()

        def pieces() -> Iterator[Floats]:
            for start, stop in blocks(stack.size):
                delta_N = scratch.get("delta", stop - start)
                yield np.subtract(stack.read(place, start, stop), stack.read_base(start, stop), out=delta_N)

        return cls(*kth_magnitude(pieces, size))

    def apply(self, delta_N: Floats, scratch: Scratch) -> Floats:
        """Zeroes what is trimmed, in place."""
        magnitude_N = np.abs(delta_N, out=scratch.get("magnitude", len(delta_N)))
        tied_N = np.equal(magnitude_N, self.threshold, out=scratch.get("tied", len(delta_N), np.bool_))
        num_tied = int(np.count_nonzero(tied_N))
        keep_N = np.greater_equal(magnitude_N, self.threshold, out=scratch.get("keep", len(delta_N), np.bool_))
        if num_tied > self.ties_left:
            keep_N[np.flatnonzero(tied_N)[self.ties_left :]] = False
        self.ties_left -= min(num_tied, self.ties_left)
        delta_N *= keep_N
        return delta_N


class _Vote:
    """Sums of the positive and the negative parts, and of the weights behind each."""

    def __init__(self, scratch: Scratch, size: int) -> None:
        self.scratch, self.size = scratch, size
        self.positive_N, self.negative_N = scratch.zeros("positive", size), scratch.zeros("negative", size)
        self.for_N, self.against_N = scratch.zeros("for", size), scratch.zeros("against", size)

    def add(self, delta_N: Floats, weight: float) -> None:
        part_N, which_N = self.scratch.get("part", self.size), self.scratch.get("which", self.size, np.bool_)
        delta_N *= _F32(weight)
        self.positive_N += np.maximum(delta_N, _F32(0), out=part_N)
        self.negative_N += np.minimum(delta_N, _F32(0), out=part_N)
        self.for_N += np.multiply(np.greater(delta_N, 0, out=which_N), _F32(weight), out=part_N)
        self.against_N += np.multiply(np.less(delta_N, 0, out=which_N), _F32(weight), out=part_N)

    def result(self, normalise: bool) -> Floats:
        """Of every number the part that won: a sum of zero or more elects plus."""
        part_N, plus_N = self.scratch.get("part", self.size), self.scratch.get("which", self.size, np.bool_)
        np.greater_equal(np.add(self.positive_N, self.negative_N, out=part_N), 0, out=plus_N)
        for won_N, lost_N in ((self.positive_N, self.negative_N), (self.for_N, self.against_N)):
            won_N *= plus_N
            lost_N *= np.logical_not(plus_N, out=self.scratch.get("minus", self.size, np.bool_))
            won_N += lost_N
        if normalise:
            self.for_N += np.equal(self.for_N, 0, out=plus_N)
            self.positive_N /= self.for_N
        return self.positive_N


def _onto(base_N: Floats, sum_N: Floats, scale: float) -> Floats:
    if scale != 1:
        sum_N *= _F32(scale)
    sum_N += base_N
    return sum_N


def _total(weights: Sequence[np.float32]) -> np.float32:
    total = _F32(0)
    for weight in weights:
        total += weight
    return total


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ModelError(f"density {density:g} is not possible; give a share above 0 and at most 1, such as 0.2")
