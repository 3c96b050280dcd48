"""The images of a search: three parts that share none, small and normalised, and the same parts corrupted.

Shape letters: N images, C channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from apportion.errors import DataError

Part: TypeAlias = Literal["train", "choose", "report"]
SEVERITY = 3


@dataclass(frozen=True)
class Images:
    """Images of a data set in three parts: to train on, to choose by, and to report on, none of them shared."""

    data: str
    side: int
    channels: int
    num_train: int = 4000
    num_choose: int = 2000
    seed: int = 0

    def split(self) -> Split:
        return _load(self)

    def corrupted(self, part: Part) -> tuple[Any, Any]:
        """A part under blur, noise, compression and contrast of severity 3 in turn, one corruption an image."""
        return _corrupt(self, part)


@dataclass(frozen=True)
class Split:
    """Tensors of the three parts, which rows of the data they are, and what they were normalised by."""

    train: tuple[Any, Any]
    choose: tuple[Any, Any]
    report: tuple[Any, Any]
    rows: dict[str, Any]
    mean: float
    std: float


@lru_cache(maxsize=2)
def _load(images: Images) -> Split:
    import numpy as np
    import torch

    from apportion.tasks.domains import load_domain

    domain = load_domain(images.data)
    if domain.kind != "image":
        raise DataError(f"{images.data} holds {domain.kind}s; a search over vision templates needs images")
    wanted = images.num_train + images.num_choose
    if len(domain) < wanted + 100:
        raise DataError(
            f"{images.data} has {len(domain)} images; {images.num_train} to train on and {images.num_choose} to choose "
            "by leave too few to report on"
        )
    order = np.random.default_rng(images.seed).permutation(len(domain))[: 2 * wanted + 2000]
    rows = {"train": order[: images.num_train], "choose": order[images.num_train : wanted], "report": order[wanted:]}
    x = {part: _scaled(images, (domain.content[int(row)] for row in which)) for part, which in rows.items()}
    mean, std = float(x["train"].mean()), float(x["train"].std())
    made = {part: ((x_NCHW - mean) / std, torch.from_numpy(domain.label_N[rows[part]])) for part, x_NCHW in x.items()}
    return Split(made["train"], made["choose"], made["report"], rows, mean, std)


@lru_cache(maxsize=4)
def _corrupt(images: Images, part: Part) -> tuple[Any, Any]:
    from apportion.tasks.domains import load_domain
    from apportion.tasks.shifts.corrupt import corrupt, corruptions

    split, domain = images.split(), load_domain(images.data)
    changed = [corrupt(domain, name, SEVERITY, seed=images.seed).content for name in corruptions("image")]
    pictures = (changed[number % len(changed)][int(row)] for number, row in enumerate(split.rows[part]))
    return (_scaled(images, pictures) - split.mean) / split.std, getattr(split, part)[1]


def _scaled(images: Images, pictures: Iterable[Any]) -> Any:
    """Pictures at the side of the images, from 0 to 1, one channel where one is asked for."""
    import numpy as np
    import torch
    from torch.nn import functional

    size = (images.side, images.side)
    x_NCHW = torch.cat(
        [
            functional.interpolate(
                torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()[None] / 255,
                size,
                mode="bilinear",
                antialias=True,
                align_corners=False,
            )
            for picture in pictures
        ]
    )
    return x_NCHW.mean(1, keepdim=True) if images.channels == 1 else x_NCHW
