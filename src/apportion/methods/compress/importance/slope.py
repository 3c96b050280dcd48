"""Importance by the slope of the loss in the gates: over batches (Taylor) or example by example (Fisher)."""

from __future__ import annotations

import torch
from torch import Tensor

from apportion.methods.compress.importance.gates import gated
from apportion.methods.compress.importance.loss import self_loss
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples


def taylor(network: Network, partition: Partition, examples: Examples) -> dict[str, Tensor]:
    r"""Size of the first-order change of the loss when a unit's gate goes from one to zero (eq. P2).

    .. math:: I_u = \mathrm{mean}_b \Big| \frac{\partial L_b}{\partial g_u} \Big|_{g = 1}, \qquad
        \frac{\partial L}{\partial g_u} = \sum_{c \in u} x_c \, \frac{\partial L}{\partial x_c}

    ``x_c`` is the channel where consuming layers read it; for a block, :math:`x` is what the block adds to its input.
    The loss is the model's own: see ``self_loss``.
    """
    scores = {part.name: torch.zeros(part.num_units) for part in partition}
    for batch in examples.batches:
        with gated(network, partition) as gates:
            loss = self_loss(network, batch)
            gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True)
        for name, gradient in zip(gates, gradients, strict=True):
            if gradient is not None:
                scores[name] += gradient.abs() / len(examples.batches)
    return scores


def fisher(network: Network, partition: Partition, examples: Examples) -> dict[str, Tensor]:
    r"""Empirical Fisher information of a unit's gate: the mean square of every example's own slope (eq. P3).

    .. math:: I_u = \mathrm{mean}_n \Big( \frac{\partial L_n}{\partial g_{nu}} \Big)^2_{g = 1}

    Slopes that cancel between the examples of a batch count here, and do not in P2. :math:`L_n` is an example's share
    of the loss, such that the loss of a batch is their mean; where the loss compares examples with each other
    (embeddings), :math:`g_{nu}` moves the example in all of its comparisons.
    """
    scores = {part.name: torch.zeros(part.num_units) for part in partition}
    for batch in examples.batches:
        num_examples = len(next(iter(batch.values())))
        with gated(network, partition, num_examples) as gates:
            loss = num_examples * self_loss(network, batch)
            gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True)
        for name, gradient_NU in zip(gates, gradients, strict=True):
            if gradient_NU is not None:
                scores[name] += gradient_NU.square().sum(0) / len(examples)
    return scores
