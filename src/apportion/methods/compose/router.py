r"""The router: from the class means of a support set to weights over sources, in one forward pass (the paper's § 6).

A source is scored by an embedding of its own, not by a row of a matrix. Every class asks for the sources that it lies
near; where it is near none, for all alike. What training adds to that is used for the sources it was trained with, so
a source that was added later is scored by likeness alone, without retraining. Shape letters: C classes, P features, S
sources, L blocks, M experts, H hidden.

.. math:: m_s = \frac{1}{C} \sum_c g_c \, \mathrm{softmax}_s(\beta \cos_{cs}) + \frac{1 - g_c}{S}, \quad
          g_c = \sigma\big(\kappa (\max_s \cos_{cs} - r)\big)

.. math:: \rho_{\ell s} = \log m_s + \mathbb{1}[s \text{ known}] \, \langle q_\ell(u), k(e_s) \rangle / \sqrt{H}, \quad
          w_\ell = \mathrm{softmax}(\rho_\ell) \quad \text{(eq. C36)}

:math:`\cos_{cs}` is that of class mean and source embedding, both seen from the middle of all tasks trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional

from apportion.core.folder import write_whole
from apportion.errors import DataError, ModelError
from apportion.models.safefile import read_header
from apportion.numerics.simplex import entropy


class Router(nn.Module):
    """Prototypes to a summary by pooling over classes, and the summary to weights by matching source embeddings."""

    middle_P: Tensor
    known_SP: Tensor

    def __init__(
        self, num_features: int, *, hidden: int = 64, num_blocks: int = 1, num_experts: int = 0, num_known: int = 0
    ) -> None:
        super().__init__()
        self.num_features, self.num_blocks, self.num_experts = num_features, num_blocks, num_experts
        self.per_class = nn.Sequential(nn.Linear(num_features, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.summary = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.GELU())
        self.query = nn.Linear(hidden, num_blocks * hidden)
        self.key = nn.Sequential(nn.Linear(num_features, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.expert = nn.Linear(hidden, num_experts) if num_experts else None
        self.log_sharpness = nn.Parameter(torch.tensor(2.0))
        self.log_fall = nn.Parameter(torch.tensor(2.3))
        self.reach = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("middle_P", torch.zeros(num_features))
        self.register_buffer("known_SP", torch.zeros(num_known, num_features))
        nn.init.zeros_(self.query.weight)  # starts as plain likeness of prototypes and source embeddings
        nn.init.zeros_(self.query.bias)

    def pool(self, prototype_CP: Tensor) -> Tensor:
        """A summary that does not depend on the order of the classes: mean, largest and spread of what each says."""
        each_CH = self.per_class(prototype_CP)
        spread_H = each_CH.std(0, correction=0)
        return self.summary(torch.cat([each_CH.mean(0), each_CH.amax(0), spread_H]))

    def likeness(self, prototype_CP: Tensor, source_SP: Tensor) -> Tensor:
        """Weights over the sources by where the classes lie, shape (S,)."""
        toward_CP = functional.normalize(prototype_CP - self.middle_P, dim=-1)
        cosine_CS = toward_CP @ functional.normalize(source_SP - self.middle_P, dim=-1).T
        near_CS = (self.log_sharpness.exp() * cosine_CS).softmax(-1)
        near_C1 = torch.sigmoid(self.log_fall.exp() * (cosine_CS.amax(-1, keepdim=True) - self.reach))
        return (near_C1 * near_CS + (1 - near_C1) / len(source_SP)).mean(0)

    def knows(self, source_SP: Tensor) -> Tensor:
        """Which of the sources training has seen, shape (S,)."""
        if not len(self.known_SP):
            return torch.zeros(len(source_SP), dtype=torch.bool)
        return (source_SP[:, None] - self.known_SP).abs().amax(-1).amin(-1) < 1e-5

    def logits(self, prototype_CP: Tensor, source_SP: Tensor, known_S: Tensor | None = None) -> Tensor:
        """Scores of every source for every block, shape (L, S)."""
        if source_SP.shape[-1] != self.num_features or prototype_CP.shape[-1] != self.num_features:
            raise DataError(
                f"the router takes {self.num_features} features, got {prototype_CP.shape[-1]} of prototypes and "
                f"{source_SP.shape[-1]} of sources; embed both with its encoder"
            )
        known_S = self.knows(source_SP) if known_S is None else known_S
        query_LH = self.query(self.pool(prototype_CP)).reshape(self.num_blocks, -1)
        learned_LS = query_LH @ self.key(source_SP).T / query_LH.shape[-1] ** 0.5
        return self.likeness(prototype_CP, source_SP).clamp_min(1e-6).log() + learned_LS * known_S

    def forward(self, prototype_CP: Tensor, source_SP: Tensor) -> Tensor:
        """Weights over the sources for every block, shape (L, S)."""
        return self.logits(prototype_CP, source_SP).softmax(-1)

    def expert_weights(self, prototype_CP: Tensor) -> Tensor:
        """Weights over the residual experts, shape (M,)."""
        if self.expert is None:
            raise DataError("this router has no residual experts; build it with num_experts")
        return self.expert(self.pool(prototype_CP)).softmax(-1)


@dataclass(frozen=True, eq=False)
class Lesson:
    """One task to learn from: its class means and the oracle's weights; ``expert_M`` where there are experts."""

    prototype_CP: Tensor
    teacher_LS: Tensor
    expert_M: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the router is trained.

    ``temperature`` softens the teacher, the penalties favour few sources. In every step each source is away with
    probability ``away`` and scored as if it were new with probability ``new``.
    """

    epochs: int = 40
    rate: float = 3e-3
    temperature: float = 1.0
    entropy_penalty: float = 0.0
    sparsity_penalty: float = 0.0
    away: float = 0.5
    new: float = 0.5
    weight_decay: float = 1e-3
    seed: int = 0


def distillation(student_LS: Tensor, teacher_LS: Tensor, temperature: float) -> Tensor:
    r"""Divergence of the student's logits from the teacher's weights, softened (eq. C37).

    .. math:: \tau^2\, \mathrm{KL}\big(\mathrm{softmax}(\hat\rho / \tau) \,\|\, \mathrm{softmax}(\rho / \tau)\big)

    The teacher gives weights, so :math:`\hat\rho` is their logarithm; weights of zero are lifted a little.
    """
    target_LS = (teacher_LS.clamp_min(1e-3).log() / temperature).softmax(-1)
    return temperature**2 * functional.kl_div(
        (student_LS / temperature).log_softmax(-1), target_LS, reduction="batchmean"
    )


def train(
    router: Router, lessons: Sequence[Lesson], source_SP: Tensor, config: TrainConfig | None = None
) -> list[float]:
    """Trains on the oracle's weights; returns the mean loss of every epoch.

    The weight of sources that are away is spread over the others: what a task should get whose source is not there.
    """
    config = config or TrainConfig()
    if not lessons:
        raise DataError("the router needs at least one task to learn from")
    generator = torch.Generator().manual_seed(config.seed)
    router.middle_P = torch.cat([lesson.prototype_CP for lesson in lessons]).mean(0)
    router.known_SP = source_SP.clone()
    optimiser = torch.optim.AdamW(router.parameters(), lr=config.rate, weight_decay=config.weight_decay)
    history = []
    for _ in range(config.epochs):
        total = 0.0
        for place in torch.randperm(len(lessons), generator=generator).tolist():
            lesson = lessons[place]
            here_S = _at_least_two(torch.rand(len(source_SP), generator=generator) >= config.away)
            known_S = torch.rand(int(here_S.sum()), generator=generator) >= config.new
            teacher_LS = lesson.teacher_LS[:, here_S]
            teacher_LS = teacher_LS + (1 - teacher_LS.sum(-1, keepdim=True)) / teacher_LS.shape[-1]
            logit_LS = router.logits(lesson.prototype_CP, source_SP[here_S], known_S)
            weight_LS = logit_LS.softmax(-1)
            loss = distillation(logit_LS, teacher_LS, config.temperature)
            loss = loss + config.entropy_penalty * entropy(weight_LS).mean()
            loss = loss + config.sparsity_penalty * (1 - weight_LS.square().sum(-1)).mean()
            if lesson.expert_M is not None:
                weight_M = router.expert_weights(lesson.prototype_CP)
                loss = loss + functional.kl_div(weight_M.log(), lesson.expert_M, reduction="sum")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += float(loss.detach())
        history.append(total / len(lessons))
    return history


def source_embedding(base_NP: Tensor, tuned_NP: Tensor) -> Tensor:
    r"""Where a source differs from its base: the mean of the base's features, weighted by how far each moved (C38).

    .. math:: e_s = \frac{\sum_i \|f_s(x_i) - f_0(x_i)\|^2 f_0(x_i)}{\sum_i \|f_s(x_i) - f_0(x_i)\|^2}

    ``x_i`` are probe inputs without labels. Fine-tuning moves the inputs of its own domain most, so the embedding lies
    where that domain does in the base's feature space, which is where the router's prototypes are too.
    """
    moved_N = (tuned_NP - base_NP).square().sum(-1)
    centred_N = (moved_N - moved_N.mean()).clamp_min(0)  # only what moved more than the average says something
    if float(centred_N.sum()) == 0:
        return base_NP.mean(0)
    return (centred_N[:, None] * base_NP).sum(0) / centred_N.sum()


def _at_least_two(here_S: Tensor) -> Tensor:
    return here_S if int(here_S.sum()) >= 2 else torch.ones_like(here_S)


def save_router(path: Path, router: Router, embeddings: Mapping[str, Tensor]) -> None:
    """Writes a router and the embeddings of the sources it knows as one safetensors file."""
    tensors = {f"router/{name}": tensor.detach().contiguous() for name, tensor in router.state_dict().items()}
    tensors |= {f"source/{name}": tensor.float().contiguous() for name, tensor in embeddings.items()}
    shape = {"num_features": router.num_features, "num_blocks": router.num_blocks, "num_experts": router.num_experts}
    shape["hidden"] = router.per_class[0].out_features  # type: ignore[assignment]
    shape["num_known"] = len(router.known_SP)
    write_whole(path, save(tensors, metadata={"apportion_router": json.dumps(shape)}))


def load_router(path: Path) -> tuple[Router, dict[str, Tensor]]:
    """Reads a router and its source embeddings.

    Raises:
        ModelError: not a router, or weights that do not fit what it says of itself.
    """
    header = read_header(path)
    try:
        with safe_open(path, framework="np") as file:
            shape = json.loads((file.metadata() or {})["apportion_router"])
        sizes = {
            name: int(shape[name]) for name in ("num_features", "hidden", "num_blocks", "num_experts", "num_known")
        }
        if not all(0 <= size <= 10**5 for size in sizes.values()):
            raise ValueError
        with torch.device("meta"):
            plan = Router(sizes.pop("num_features"), **sizes).state_dict()
        if {f"router/{name}": tuple(tensor.shape) for name, tensor in plan.items()} != {
            name: info.shape for name, info in header.items() if name.startswith("router/")
        }:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} is no router of this version; train it again") from None
    state = load_file(path)
    router = Router(int(shape["num_features"]), **sizes)
    router.load_state_dict({name: state[f"router/{name}"] for name in plan})
    names = [name for name in state if name.startswith("source/")]
    return router.eval(), {name.removeprefix("source/"): state[name] for name in names}
