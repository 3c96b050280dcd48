"""Decoded images: one flat array of pixels, cut into images of their own sizes, and cached on disk."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.errors import DataError
from apportion.tasks.cache import Arrays

MAX_PIXELS = 100_000_000
DECODER = 1  # raised when decoding changes, so that old caches are not used
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")  # by content; others, such as EPS, can start programs
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif")
Image = NDArray[np.uint8]


class Pictures(Sequence[Image]):
    """Images of shape (height, width, 3) in one flat array."""

    def __init__(self, arrays: Arrays) -> None:
        self.flat, self.size_N2 = arrays["flat"], arrays["size"]
        ends = np.cumsum(self.size_N2[:, 0] * self.size_N2[:, 1] * 3)
        self.ends = ends
        self.starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.size_N2)

    def __getitem__(self, row: Any) -> Any:
        height, width = (int(side) for side in self.size_N2[row])
        return self.flat[self.starts[row] : self.ends[row]].reshape(height, width, 3)

    @staticmethod
    def pack(images: Sequence[Image]) -> Arrays:
        size_N2 = np.array([image.shape[:2] for image in images], dtype=np.int64).reshape(-1, 2)
        flat = np.concatenate([image.reshape(-1) for image in images]) if images else np.zeros(0, np.uint8)
        return {"flat": flat, "size": size_N2}


class Greys(Sequence[Image]):
    """Grey images (N, height, width) read as RGB."""

    def __init__(self, grey_NHW: NDArray[np.uint8]) -> None:
        self.grey_NHW = grey_NHW

    def __len__(self) -> int:
        return len(self.grey_NHW)

    def __getitem__(self, row: Any) -> Any:
        return np.repeat(self.grey_NHW[row][:, :, None], 3, axis=2)


def decode(data: bytes, *, max_side: int | None = None) -> Image:
    """Pixels of an encoded image as RGB, scaled down so that no side is longer than ``max_side``.

    Raises:
        DataError: not an image, cut short, or more than ``MAX_PIXELS`` pixels.
    """
    library = pillow()
    try:
        with library.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{image.width} × {image.height} pixels are more than {MAX_PIXELS}")
            if max_side is not None:
                image.draft("RGB", (max_side, max_side))  # lets JPEG decode at a lower size
            image = image.convert("RGB")
            if max_side is not None and max(image.size) > max_side:
                image.thumbnail((max_side, max_side))
            return np.asarray(image)
    except DataError:
        raise
    except Exception as error:  # pillow raises many kinds for a broken file
        raise DataError(str(error).splitlines()[0][:80] if str(error) else type(error).__name__) from None


def pillow() -> Any:
    """The module ``PIL.Image``, or one line that says what to install."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise DataError("images need pillow; run: pip install 'apportion[tasks]'") from None


def resize(images: Iterable[Image], height: int, width: int) -> NDArray[np.uint8]:
    """Copies of one size (N, height, width, 3), stretched by bilinear interpolation with antialiasing."""
    library = pillow()
    return np.stack(
        [np.asarray(library.fromarray(image).resize((width, height), library.Resampling.BILINEAR)) for image in images]
    )
