"""Corruptions of images in five severities: blur, noise, compression, contrast."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from apportion.tasks.pictures import pillow

Image = NDArray[np.uint8]
Corruption = Callable[[Image, int, np.random.Generator], Image]

_BLUR_RATIO = (0.008, 0.014, 0.022, 0.032, 0.05)  # of the shorter side
_NOISE_RATIO = (0.04, 0.08, 0.12, 0.18, 0.26)  # standard deviation, of full brightness
_QUALITY = (30, 20, 14, 9, 5)
_CONTRAST_RATIO = (0.75, 0.5, 0.35, 0.22, 0.12)


def blur(image: Image, severity: int, rng: np.random.Generator) -> Image:
    """Gaussian blur."""
    radius = _BLUR_RATIO[severity - 1] * min(image.shape[:2])
    image_filter = importlib.import_module("PIL.ImageFilter").GaussianBlur(radius)
    return np.asarray(pillow().fromarray(image).filter(image_filter))


def noise(image: Image, severity: int, rng: np.random.Generator) -> Image:
    """Gaussian noise on every channel."""
    added = image + 255 * _NOISE_RATIO[severity - 1] * rng.standard_normal(image.shape, dtype=np.float32)
    return np.clip(np.rint(added), 0, 255).astype(np.uint8)


def compression(image: Image, severity: int, rng: np.random.Generator) -> Image:
    """JPEG of low quality."""
    file = io.BytesIO()
    pillow().fromarray(image).save(file, format="JPEG", quality=_QUALITY[severity - 1])
    return np.asarray(pillow().open(file).convert("RGB"))


def contrast(image: Image, severity: int, rng: np.random.Generator) -> Image:
    """Brightness pulled towards the image's mean."""
    mean = image.mean((0, 1), dtype=np.float32)
    return np.clip(np.rint(mean + _CONTRAST_RATIO[severity - 1] * (image - mean)), 0, 255).astype(np.uint8)


PIXEL_CORRUPTIONS: Mapping[str, Corruption] = {
    "blur": blur,
    "noise": noise,
    "compression": compression,
    "contrast": contrast,
}
