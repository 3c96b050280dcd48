"""Ways to keep a tensor: whole, or as its difference to a base (dense, sparse, int8, low rank); each reads in part.

A way to keep turns the numbers of one chunk into bytes, and any range of the chunk back. Shape letters: N numbers of a
chunk, K numbers kept, G groups, M rows and D columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from apportion.methods.compose.checkpoint import Floats, from_float32, item_bytes, read_window, to_float32

GROUP = 1024  # numbers that share a scale in int8


class Coding(Protocol):
    """Bytes of a chunk, and back for the numbers ``start`` to ``stop`` of it."""

    def encode(self, value_N: Floats) -> bytes: ...

    def decode(self, path: Path, size: int, start: int, stop: int) -> Floats: ...

    def fits(self, num_bytes: int, size: int) -> bool:
        """Whether a file of that many bytes can hold a chunk of that many numbers."""
        ...


class Dense:
    """Every number, in a floating-point type."""

    def __init__(self, dtype: str = "F32") -> None:
        self.dtype = dtype

    def encode(self, value_N: Floats) -> bytes:
        return from_float32(value_N, self.dtype).tobytes()

    def decode(self, path: Path, size: int, start: int, stop: int) -> Floats:
        kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.dtype]
        return to_float32(read_window(path, kind, 0, start, stop), self.dtype)

    def fits(self, num_bytes: int, size: int) -> bool:
        return num_bytes == size * item_bytes(self.dtype)


class Sparse:
    """Places and values of the numbers that are not zero: four bytes each."""

    def encode(self, value_N: Floats) -> bytes:
        place_K = np.flatnonzero(value_N).astype("<u4")
        return place_K.tobytes() + value_N[place_K].astype("<f4").tobytes()

    def decode(self, path: Path, size: int, start: int, stop: int) -> Floats:
        kept = path.stat().st_size // 8
        place_K = read_window(path, "<u4", 0, 0, kept)
        first, last = np.searchsorted(place_K, (start, stop))
        value_N = np.zeros(stop - start, np.float32)
        value_N[place_K[first:last].astype(np.int64) - start] = read_window(path, "<f4", 4 * kept, first, last)
        return value_N

    def fits(self, num_bytes: int, size: int) -> bool:
        return num_bytes % 8 == 0 and num_bytes <= 8 * size


class Int8:
    r"""One byte a number and one scale per group: :math:`x \approx s_g q`, :math:`s_g = \max_g |x| / 127` (eq. C26)."""

    def encode(self, value_N: Floats) -> bytes:
        padded = np.zeros(-(-len(value_N) // GROUP) * GROUP, np.float32)
        padded[: len(value_N)] = value_N
        group_GN = padded.reshape(-1, GROUP)
        scale_G = (np.abs(group_GN).max(1) / np.float32(127)).astype("<f4")
        safe_G = np.where(scale_G > 0, scale_G, np.float32(1))
        code_GN = np.rint(group_GN / safe_G[:, None]).astype(np.int8)
        return scale_G.tobytes() + code_GN.reshape(-1)[: len(value_N)].tobytes()

    def decode(self, path: Path, size: int, start: int, stop: int) -> Floats:
        groups = -(-size // GROUP)
        first, last = start // GROUP, -(-stop // GROUP)
        scale_G = read_window(path, "<f4", 0, first, last)
        value_N = read_window(path, "i1", 4 * groups, start, stop).astype(np.float32)
        value_N *= np.repeat(scale_G, GROUP)[start - first * GROUP : stop - first * GROUP]
        return value_N

    def fits(self, num_bytes: int, size: int) -> bool:
        return num_bytes == size + 4 * -(-size // GROUP)


CODINGS: Mapping[str, Coding] = {"dense": Dense(), "sparse": Sparse(), "int8": Int8()}


def low_rank(matrix_MD: Floats, rank: int, *, seed: int = 0) -> tuple[Floats, Floats]:
    r"""Factors of the best approximation of a rank, :math:`X \approx U V`, by a randomised range finder (eq. C27).

    Two power iterations and eight directions more than asked for; the error is within a few percent of the optimal one
    (it is reported when a source is added).
    """
    generator = np.random.default_rng(seed)
    width = min(rank + 8, *matrix_MD.shape)
    basis_MK = matrix_MD @ generator.standard_normal((matrix_MD.shape[1], width), dtype=np.float32)
    for _ in range(2):
        basis_MK = np.linalg.qr(basis_MK)[0]
        basis_MK = matrix_MD @ np.linalg.qr(matrix_MD.T @ basis_MK)[0]
    basis_MK = np.linalg.qr(basis_MK)[0]
    left_KK, value_K, right_KD = np.linalg.svd(basis_MK.T @ matrix_MD, full_matrices=False)
    left_MR = (basis_MK @ left_KK[:, :rank]) * value_K[:rank]
    return np.ascontiguousarray(left_MR, np.float32), np.ascontiguousarray(right_KD[:rank], np.float32)


def read_low_rank(left: Path, right: Path, rank: int, columns: int, start: int, stop: int) -> Floats:
    """Numbers ``start`` to ``stop`` of a product of factors, in row-major order."""
    first, last = start // columns, -(-stop // columns)
    left_MR = read_window(left, "<f4", 0, first * rank, last * rank).reshape(-1, rank)
    right_RD = read_window(right, "<f4", 0, 0, rank * columns).reshape(rank, columns)
    return (left_MR @ right_RD).reshape(-1)[start - first * columns : stop - first * columns]
