"""The k-th largest magnitude of a long vector that is only ever seen in pieces: exact, in two passes.

Shape letter: N numbers of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

_HALF = 1 << 16


def kth_magnitude(pieces: Callable[[], Iterable[NDArray[np.float32]]], k: int) -> tuple[float, int]:
    r"""The k-th largest :math:`|x_i|`, and how many of those equal to it belong to the k (eq. C20).

    Magnitudes of float32 are ordered as their bit patterns are. A first pass counts the upper sixteen bits and finds
    the bin that holds the k-th; a second counts the lower sixteen inside that bin. Memory is two tables of 65,536
    counts whatever the length; a full sort needs all numbers at once.

    Args:
        pieces: yields the vector piece by piece, the same each time it is called; called at most twice.
        k: at least one and at most the length.

    Returns:
        The threshold :math:`\tau` and the number of entries with :math:`|x_i| = \tau` that are among the k largest.

    Example:
        >>> kth_magnitude(lambda: [np.float32([3, -1]), np.float32([-2, 2])], 2)
        (2.0, 1)
    """
    upper, lower = np.zeros(_HALF, np.int64), np.zeros(_HALF, np.int64)
    split = _Split()
    for piece_N in pieces():
        upper += np.bincount(split.upper_bits(piece_N)[1], minlength=_HALF)
    if not 1 <= k <= int(upper.sum()):
        raise ValueError(f"k {k} is not possible for {int(upper.sum())} numbers")
    chosen, above = _bin(upper, k)
    for piece_N in pieces():
        bits_N, upper_N = split.upper_bits(piece_N)
        lower += np.bincount(bits_N[upper_N == chosen] & np.uint32(_HALF - 1), minlength=_HALF)
    last, before = _bin(lower, k - above)
    threshold = np.uint32(chosen * _HALF + last).view(np.float32)
    return float(threshold), k - above - before


class _Split:
    """Bit patterns of magnitudes, and their upper halves as bincount takes them; its arrays are used again."""

    def __init__(self) -> None:
        self.magnitude_N, self.upper_N = np.empty(0, np.float32), np.empty(0, np.intp)

    def upper_bits(self, piece_N: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
        size = len(piece_N)
        if len(self.upper_N) < size:
            self.magnitude_N, self.upper_N = np.empty(size, np.float32), np.empty(size, np.intp)
        bits_N = np.abs(piece_N, out=self.magnitude_N[:size]).view(np.uint32)
        np.right_shift(bits_N, np.uint32(16), out=self.upper_N[:size])
        return bits_N, self.upper_N[:size]


def _bin(count: NDArray[np.int64], k: int) -> tuple[int, int]:
    """The bin, counted from the top, that holds the k-th entry, and how many entries lie above it."""
    from_top = np.cumsum(count[::-1])
    place = int(np.searchsorted(from_top, k))
    return _HALF - 1 - place, int(from_top[place] - count[_HALF - 1 - place])
