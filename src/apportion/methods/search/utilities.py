"""Utilities: what a trained candidate is judged by, in per cent, the more the better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from apportion.methods.search.images import Images, Part

Utility: TypeAlias = Callable[[Any, Images, Part], float]


def answers(module: Any, x_NCHW: Any, batch: int = 512) -> Any:
    """The class with the highest logit of every image, found on the module's device."""
    import torch

    device = next(module.parameters()).device
    with torch.inference_mode():
        parts = [module(part.to(device)).argmax(1).cpu() for part in x_NCHW.split(batch)]
    return torch.cat(parts)


def accuracy(module: Any, images: Images, part: Part) -> float:
    """Share of images whose class is found."""
    x_NCHW, label_N = getattr(images.split(), part)
    return 100.0 * float((answers(module, x_NCHW) == label_N).double().mean())


def robust(module: Any, images: Images, part: Part) -> float:
    """The same on corrupted images."""
    x_NCHW, label_N = images.corrupted(part)
    return 100.0 * float((answers(module, x_NCHW) == label_N).double().mean())


def worst_class(module: Any, images: Images, part: Part) -> float:
    """The accuracy on the class that it is worst at."""
    x_NCHW, label_N = getattr(images.split(), part)
    found_N = answers(module, x_NCHW) == label_N
    return 100.0 * min(float(found_N[label_N == label].double().mean()) for label in label_N.unique())


UTILITIES: Mapping[str, Utility] = {"accuracy": accuracy, "robust": robust, "worst-class": worst_class}
