"""Importance of every unit of a partition: by the magnitude of its weights, or by what the loss would do without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from apportion.models.channels import input_weight, mixes_channels
from apportion.models.network import Network, read_out, traceable
from apportion.models.partition import Module, Partition
from apportion.models.skip import first_tensor
from apportion.tasks.batches import Examples

Criterion = Literal["magnitude", "taylor"]


def order_by_importance(network: Network, partition: Partition, criterion: Criterion, examples: Examples) -> Partition:
    """The partition with every module's units ordered from the most to the least important."""
    scores = magnitude(network, partition) if criterion == "magnitude" else taylor(network, partition, examples)
    return partition.ordered(
        {name: score_U.argsort(descending=True, stable=True).tolist() for name, score_U in scores.items()}
    )


def magnitude(network: Network, partition: Partition) -> dict[str, Tensor]:
    r"""Root mean square of the weights that read or write a unit (eq. P1); of all its weights for a block.

    .. math:: I_u = \sum_{m} \sqrt{\mathrm{mean}_{c \in u} \|W^{(m)}_c\|_2^2}
    """
    scores = {}
    for part in partition:
        score_U = torch.zeros(part.num_units)
        for unit, (name, _) in enumerate(part.blocks):
            parameters = list(network.module.get_submodule(name).parameters())
            score_U[unit] = torch.sqrt(
                sum((p.detach() ** 2).sum() for p in parameters) / sum(p.numel() for p in parameters)
            )
        for member in part.members:
            layer = network.module.get_submodule(member.layer)
            if not mixes_channels(layer):
                continue
            weight, dim = input_weight(layer)
            if member.side == "out":
                dim = 1 - dim
            square_C = weight.detach().transpose(0, dim).flatten(1).square().mean(1)
            score_U += _per_unit(square_C, member.units, part.num_units, "mean").sqrt()
        scores[part.name] = score_U
    return scores


def taylor(network: Network, partition: Partition, examples: Examples) -> dict[str, Tensor]:
    r"""Size of the first-order change of the loss when a unit's gate goes from one to zero (eq. P2).

    .. math:: I_u = \mathrm{mean}_b \Big| \frac{\partial L_b}{\partial g_u} \Big|_{g = 1}, \qquad
        \frac{\partial L}{\partial g_u} = \sum_{c \in u} x_c \, \frac{\partial L}{\partial x_c}

    ``x_c`` is the channel where consuming layers read it; for a block, :math:`x` is what the block adds to its input.
    The loss is the model's own: see ``self_loss``.
    """
    scores = {part.name: torch.zeros(part.num_units) for part in partition}
    for batch in examples.batches:
        gates: dict[str, Tensor] = {}
        handles: list[Any] = []
        for part in partition:
            gate_U = gates[part.name] = torch.ones(part.num_units, requires_grad=True)
            handles += _gate(network.module, part, gate_U)
        try:
            with traceable(network.module):
                loss = self_loss(network, batch)
                gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for name, gradient in zip(gates, gradients, strict=True):
            if gradient is not None:
                scores[name] += gradient.abs() / len(examples.batches)
    return scores


def self_loss(network: Network, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss that needs no labels but has a slope at the original model.

    Classifiers: cross entropy with their own prediction. Language models: with the token that comes next. Embeddings:
    of the softmax over the other examples of the batch (temperature 0.05) with each example's nearest neighbour.
    """
    output = read_out(network, batch)
    if network.readout == "embedding":
        similarity_NN = output @ output.T / 0.05
        itself_NN = torch.eye(len(output), dtype=torch.bool)
        similarity_NN = similarity_NN.masked_fill(itself_NN, -torch.inf)
        return nn.functional.cross_entropy(similarity_NN, similarity_NN.argmax(1))
    if network.readout == "logits":
        return nn.functional.cross_entropy(output, output.argmax(-1))
    token_NT = batch["input_ids"][:, 1:]
    if "attention_mask" in batch:
        token_NT = token_NT.masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), token_NT.flatten())


def _gate(module: nn.Module, part: Module, gate_U: Tensor) -> list[Any]:
    """Hooks that multiply each unit by its gate where it is read."""
    handles: list[Any] = []
    for unit, (name, _) in enumerate(part.blocks):
        handles.append(module.get_submodule(name).register_forward_hook(_gate_block(gate_U, unit), with_kwargs=True))
    for member in part.members:
        layer = module.get_submodule(member.layer)
        if member.side == "in" and mixes_channels(layer):
            last = isinstance(layer, nn.Linear) or not isinstance(layer, nn.modules.conv._ConvNd)
            index_C = torch.tensor(member.units)
            handles.append(layer.register_forward_pre_hook(_gate_input(gate_U, index_C, last)))
    return handles


def _gate_input(gate_U: Tensor, index_C: Tensor, last: bool) -> Any:
    def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gate_C = torch.where(index_C >= 0, gate_U[index_C.clamp_min(0)], torch.ones(()))
        x = args[0]
        return (x * (gate_C if last else gate_C.view(-1, *[1] * (x.dim() - 2))), *args[1:])

    return hook


def _gate_block(gate_U: Tensor, unit: int) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        stream = first_tensor(args, kwargs)
        main = output[0] if isinstance(output, tuple) else output
        gated = stream + gate_U[unit] * (main - stream)
        return (gated, *output[1:]) if isinstance(output, tuple) else gated

    return hook


def _per_unit(value_C: Tensor, units: tuple[int, ...], num_units: int, reduce: str) -> Tensor:
    index_C = torch.tensor(units)
    inside = index_C >= 0
    result = torch.zeros(num_units)
    return result.scatter_reduce(0, index_C[inside], value_C[inside], reduce=reduce, include_self=False)
