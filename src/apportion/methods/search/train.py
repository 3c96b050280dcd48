"""The training proxy: a short real training of a candidate on real images, the same wherever it runs.

Shape letters: N images, C channels, H and W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apportion.errors import DataError
from apportion.methods.search.images import Images
from apportion.methods.search.proxy import FULL, Request
from apportion.methods.search.spaces.blocks import BlockSpace
from apportion.methods.search.utilities import UTILITIES


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
class TrainingProxy:
    """Utilities on the images to choose by, after a short training from scratch; the first is the one maximised.

    The seed of the run, the architecture and the repetition decide the weights and the order of the images, so an
    evaluation gives the same value in any process; one thread, because sums over several depend on their number.
    """

    space: BlockSpace
    images: Images
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0
    device: str = "cpu"
    utilities: Sequence[str] = ("accuracy",)

    def evaluate(self, request: Request) -> Mapping[str, float]:
        module = self._trained(request, self.recipe.steps[request.fidelity]).module
        first, *others = self.utilities
        values = {name: UTILITIES[name](module, self.images, "choose") for name in (first, *others)}
        return {request.fidelity: values[first]} | {name: values[name] for name in others}

    def train(self, request: Request, steps: int) -> Any:
        """The trained network of a request."""
        network = self._trained(request, steps)
        return network.replace(module=network.module.cpu())

    def _trained(self, request: Request, steps: int) -> Any:
        """The same, still on the device that it was trained on."""
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
        return network


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
        loss.backward()
        optimiser.step()
        schedule.step()
    module.eval()
