"""Importance by the size of the weights; needs no data."""

from __future__ import annotations

import torch
from torch import Tensor

from apportion.methods.compress.importance.gates import per_unit
from apportion.models.channels import mixes_channels, side_weight
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.models.skip import Skip


def magnitude(network: Network, partition: Partition) -> dict[str, Tensor]:
    r"""Root mean square of the weights that read or write a unit (eq. P1); of all its weights for a block.

    .. math:: I_u = \sum_{m} \sqrt{\mathrm{mean}_{c \in u} \|W^{(m)}_c\|_2^2}
    """
    scores = {}
    for part in partition:
        score_U = torch.zeros(part.num_units)
        for unit, (name, _) in enumerate(part.blocks):
            block = network.module.get_submodule(name)
            parameters = [] if isinstance(block, Skip) else list(block.parameters())
            if parameters:
                total = sum(p.detach().square().sum().item() for p in parameters)
                score_U[unit] = (total / sum(p.numel() for p in parameters)) ** 0.5
        for member in part.members:
            layer = network.module.get_submodule(member.layer)
            if not mixes_channels(layer):
                continue
            weight, dim = side_weight(layer, member.side)
            square_C = weight.detach().float().transpose(0, dim).flatten(1).square().mean(1)
            score_U += per_unit(square_C, member.units, part.num_units, "mean").sqrt()
        scores[part.name] = score_U
    return scores
