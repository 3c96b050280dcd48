"""A support set as a loss: how well a network tells the classes of a few labelled examples apart.

Shape letters: N examples, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apportion.errors import DataError
from apportion.models.network import Network, read_out
from apportion.tasks.domain import Domain
from apportion.tasks.features import image_inputs, text_inputs, tokenise
from apportion.tasks.heads import left_out_means

_SCALE = 10.0
_AT_ONCE = 128
"""Examples that go through the network at a time, so that memory does not grow with the support."""


@dataclass(frozen=True, eq=False)
class Support:
    """Labelled examples as inputs of a network; ``label_N`` numbers the classes."""

    inputs: dict[str, Tensor]
    label_N: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.label_N)

    def at(self, rows: Sequence[int]) -> Support:
        """Some of the examples, with the classes numbered as before."""
        place = torch.as_tensor(rows, dtype=torch.long)
        return Support({key: value[place] for key, value in self.inputs.items()}, self.label_N[place], self.classes)

    def parts(self) -> list[Support]:
        """The examples in their order, as many in each part as go through a network at a time."""
        if len(self) <= _AT_ONCE:
            return [self]
        return [self.at(range(len(self))[start : start + _AT_ONCE]) for start in range(0, len(self), _AT_ONCE)]

    def folds(self, count: int, seed: int) -> list[tuple[Support, Support]]:
        """Pairs of a part to fit on and a part held out; every class of at least two examples is in both."""
        generator = torch.Generator().manual_seed(seed)
        fold_N, label_N = torch.empty(len(self), dtype=torch.long), self.label_N.cpu()
        for label in range(len(self.classes)):
            rows = (label_N == label).nonzero()[:, 0]
            rows = rows[torch.randperm(len(rows), generator=generator)]
            fold_N[rows] = torch.arange(len(rows)) % count if len(rows) > 1 else -1
        pairs = []
        for fold in range(count):
            held = (fold_N == fold).nonzero()[:, 0].tolist()
            if held:
                pairs.append((self.at((fold_N != fold).nonzero()[:, 0].tolist()), self.at(held)))
        return pairs


def encode(network: Network, domain: Domain, rows: Sequence[int] | None = None, labels: Any = None) -> Support:
    """The examples of a domain as inputs of a network."""
    chosen = np.arange(len(domain)) if rows is None else np.asarray(rows)
    label_N = torch.as_tensor(domain.label_N[chosen] if labels is None else labels)
    classes = domain.classes if labels is None else tuple(map(str, range(int(label_N.max()) + 1)))
    if network.readout == "token-logits":
        raise DataError("these models predict tokens; give encoders or classifiers, or merge without --support")
    if network.takes_text != (domain.kind == "text"):
        raise DataError(f"{domain.name} holds {domain.kind}s, which these models do not take; give another support")
    if domain.kind == "image":
        return Support(image_inputs(network, [domain.content[int(row)] for row in chosen]), label_N, classes)
    return Support(text_inputs(tokenise(network, domain), chosen), label_N, classes)


def support_scores(feature_ND: Tensor, label_N: Tensor) -> Tensor:
    r"""Scores of every example against every class, from class means that leave the example itself out (eq. C28).

    .. math:: s_{ic} = -\sigma \| f_i - \mu_c^{(-i)} \|^2

    A class of one example keeps its mean, so it can only be pushed away from the others.
    """
    num_classes = int(label_N.max()) + 1
    onehot_NC = functional.one_hot(label_N, num_classes).to(feature_ND.dtype)
    count_C = onehot_NC.sum(0)
    mean_CD = (onehot_NC.T @ feature_ND) / count_C.clamp_min(1)[:, None]
    score_NC = -torch.cdist(feature_ND[None], mean_CD[None])[0].square()
    own_N = -(feature_ND - left_out_means(feature_ND, label_N, num_classes)).square().sum(-1)
    score_NC = score_NC.scatter(1, label_N[:, None], own_N[:, None])
    score_NC = score_NC.masked_fill(count_C == 0, -torch.inf)
    return _SCALE * score_NC


def outputs(network: Network, support: Support) -> Tensor:
    """What a network says of every example, without gradients."""
    with torch.no_grad():
        return torch.cat([read_out(network, part.inputs) for part in support.parts()])


def output_loss(network: Network, support: Support, output: Tensor) -> Tensor:
    """Cross-entropy of what a network says of a support set.

    An embedding is judged by the class means of the support itself, each example left out of its own; a classifier
    whose labels are the support's by its logits.
    """
    if network.readout == "logits":
        return functional.cross_entropy(output, _class_numbers(network, support))
    return functional.cross_entropy(support_scores(output, support.label_N), support.label_N)


def support_loss(network: Network, support: Support) -> float:
    """The same of a network as it is."""
    return float(output_loss(network, support, outputs(network, support)))


def loss_and_gradient(network: Network, support: Support, parameters: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
    """Support loss and its gradient in some parameters; zeros for those that it does not depend on.

    A support of several parts goes through the network twice: for the loss and its slope in every output, then part by
    part to pull that slope back. The result is that of one pass; only one part's activations are held.
    """
    parts = support.parts()
    if len(parts) == 1:
        loss = output_loss(network, support, read_out(network, support.inputs))
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), list(found)
    output = outputs(network, support).requires_grad_(True)
    loss = output_loss(network, support, output)
    (slope,) = torch.autograd.grad(loss, output)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for part, pull in zip(parts, slope.split([len(part) for part in parts]), strict=True):
        answer = read_out(network, part.inputs)
        found = torch.autograd.grad(answer, parameters, pull, allow_unused=True, materialize_grads=True)
        for sum_, gradient in zip(total, found, strict=True):
            sum_ += gradient
    return float(loss.detach()), total


def support_accuracy(network: Network, support: Support) -> float:
    """Share of the support that is classified rightly, each embedding judged without itself."""
    output = outputs(network, support)
    if network.readout == "logits":
        return float((output.argmax(-1) == _class_numbers(network, support)).double().mean())
    return float((support_scores(output, support.label_N).argmax(-1) == support.label_N).double().mean())


def held_out_losses(network: Network, fitted: Support, held: Support) -> Tensor:
    """Cross-entropy of every example held out, by the class means of those fitted on."""
    query = outputs(network, held)
    if network.readout == "logits":
        return functional.cross_entropy(query, _class_numbers(network, held), reduction="none")
    feature = outputs(network, fitted)
    onehot = functional.one_hot(fitted.label_N, len(fitted.classes)).to(feature.dtype)
    mean = (onehot.T @ feature) / onehot.sum(0).clamp_min(1)[:, None]
    score = -_SCALE * torch.cdist(query[None], mean[None])[0].square()
    score = score.masked_fill(onehot.sum(0) == 0, -1e4)
    return functional.cross_entropy(score, held.label_N, reduction="none")


def _class_numbers(network: Network, support: Support) -> Tensor:
    known = getattr(getattr(network.module, "config", None), "label2id", None) or {}
    missing = [name for name in support.classes if name not in known]
    if missing:
        raise DataError(
            f"the sources classify {', '.join(list(known)[:6])}, not {missing[0]!r}; give sources without a classifier "
            "(embeddings), or a support with their labels"
        )
    return torch.tensor([int(known[name]) for name in support.classes])[support.label_N]
