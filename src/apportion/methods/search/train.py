"""The training proxy: a short real training of a candidate on real images, the same wherever it runs.

Shape letters: N images, C channels, H and W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from apportion.errors import DataError
from apportion.methods.search.proxy import FULL, Request
from apportion.methods.search.spaces.blocks import BlockSpace


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a candidate is trained: AdamW with a cosine schedule; ``steps`` by fidelity. The same for all candidates."""

    steps: Mapping[str, int] = field(default_factory=lambda: {FULL: 100})
    batch: int = 32
    learning_rate: float = 1e-2
    weight_decay: float = 0.05
    shift: int = 1

    def __post_init__(self) -> None:
        if min(self.steps.values(), default=0) < 1 or self.batch < 2:
            raise DataError(f"a recipe has steps {dict(self.steps)} and batch {self.batch}; give at least 1 and 2")


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


@dataclass(frozen=True)
class Split:
    """Tensors of the three parts."""

    train: tuple[Any, Any]
    choose: tuple[Any, Any]
    report: tuple[Any, Any]
    classes: tuple[str, ...]


@lru_cache(maxsize=2)
def _load(images: Images) -> Split:
    import numpy as np
    import torch
    from torch.nn import functional

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
    pixels = [torch.from_numpy(np.array(domain.content[int(row)])).permute(2, 0, 1).float() / 255 for row in order]
    scaled = [
        functional.interpolate(
            one[None], (images.side, images.side), mode="bilinear", antialias=True, align_corners=False
        )
        for one in pixels
    ]
    x_NCHW = torch.cat(scaled)
    if images.channels == 1:
        x_NCHW = x_NCHW.mean(1, keepdim=True)
    x_NCHW = (x_NCHW - x_NCHW[: images.num_train].mean()) / x_NCHW[: images.num_train].std()
    label_N = torch.from_numpy(domain.label_N[order])
    first, second = images.num_train, wanted
    return Split(
        (x_NCHW[:first], label_N[:first]),
        (x_NCHW[first:second], label_N[first:second]),
        (x_NCHW[second:], label_N[second:]),
        domain.classes,
    )


@dataclass(frozen=True)
class TrainingProxy:
    """Accuracy in per cent on the images to choose by, after a short training from scratch.

    The seed of the run, the architecture and the repetition decide the weights and the order of the images, so an
    evaluation gives the same value in any process; one thread, because sums over several depend on their number.
    """

    space: BlockSpace
    images: Images
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0
    device: str = "cpu"

    def evaluate(self, request: Request) -> float:
        split = self.images.split()
        network = self.train(request, self.recipe.steps[request.fidelity])
        return accuracy(network.module, *split.choose)

    def train(self, request: Request, steps: int) -> Any:
        """The trained network of a request."""
        import torch

        text = f"{self.seed}|{sorted(request.arch.items())}|{request.fidelity}|{request.replicate}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            network = self.space.build(request.arch, seed)
            x_NCHW, label_N = (part.to(self.device) for part in self.images.split().train)
            _fit(network.module.to(self.device), x_NCHW, label_N, self.recipe, steps, seed)
        finally:
            torch.set_num_threads(threads)
        return network.replace(module=network.module.cpu())


def _fit(module: Any, x_NCHW: Any, label_N: Any, recipe: Recipe, steps: int, seed: int) -> None:
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(module.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.learning_rate, total_steps=steps)
    module.train()
    order_N = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order_N) < recipe.batch:
            order_N = torch.randperm(len(x_NCHW), generator=generator)
        rows, order_N = order_N[: recipe.batch].to(x_NCHW.device), order_N[recipe.batch :]
        batch = x_NCHW[rows]
        if recipe.shift:
            down, right = torch.randint(-recipe.shift, recipe.shift + 1, (2,), generator=generator).tolist()
            batch = batch.roll((down, right), (2, 3))
        loss = functional.cross_entropy(module(batch), label_N[rows], label_smoothing=0.05)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    module.eval()


def accuracy(module: Any, x_NCHW: Any, label_N: Any, batch: int = 512) -> float:
    """Share of images whose highest logit is right, in per cent."""
    import torch

    with torch.inference_mode():
        hits = [
            (module(x_NCHW[i : i + batch]).argmax(1) == label_N[i : i + batch]).sum().item()
            for i in range(0, len(x_NCHW), batch)
        ]
    return 100.0 * float(sum(hits)) / len(x_NCHW)
