"""Importance by activation: how much of what the next layers compute comes from a unit."""

from __future__ import annotations

import torch
from torch import Tensor

from apportion.methods.compress.importance.gates import per_unit, readers
from apportion.methods.compress.rows import observe
from apportion.models.channels import side_weight
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples


def activation(network: Network, partition: Partition, examples: Examples) -> dict[str, Tensor]:
    r"""Root mean square of a unit's activation times the norm of the weights that read it (eq. P4).

    .. math:: I_u = \sum_m \sqrt{\sum_{c \in u} \mathrm{mean}(x_c^2) \, \|W^{(m)}_{\cdot c}\|_2^2}, \qquad
        I_{block} = \frac{\mathrm{rms}(f(x) - x)}{\mathrm{rms}(x)}

    The sum runs over the layers :math:`m` that read the unit. Where channels are uncorrelated it is the root mean
    square of what removing the unit changes in their outputs. A block goes by what it adds to its stream, relative to
    the stream. Padding does not count. Needs no gradient.
    """
    layers = {member.layer for part in partition for member, _ in readers(network.module, part)}
    blocks = {name for part in partition for name, _ in part.blocks}
    square: dict[str, Tensor] = {}
    added: dict[str, float] = {}
    num_rows: dict[str, int] = {}

    def see(name: str, x_RC: Tensor, y_RC: Tensor) -> None:
        square[name] = square.get(name, 0) + x_RC.double().square().sum(0)
        num_rows[name] = num_rows.get(name, 0) + len(x_RC)
        if name in blocks:
            added[name] = added.get(name, 0.0) + (y_RC - x_RC).double().square().sum().item()

    observe(network, examples, sorted(layers | blocks), see)
    scores = {}
    for part in partition:
        score_U = torch.zeros(part.num_units, dtype=torch.float64)
        for unit, (name, _) in enumerate(part.blocks):
            stream = square[name].sum().item() if name in square else 0.0
            score_U[unit] = (added[name] / stream) ** 0.5 if stream else 0.0
        for member, layer in readers(network.module, part):
            if member.layer in square:  # else it never ran
                weight, dim = side_weight(layer, "in")
                norm_C = weight.detach().double().transpose(0, dim).flatten(1).square().sum(1)
                power_C = square[member.layer] / num_rows[member.layer] * norm_C
                score_U += per_unit(power_C, member.units, part.num_units, "sum").sqrt()
        scores[part.name] = score_U.float()
    return scores
