"""One episode under a family: the loss of its queries, and the order of importance that losses give.

Shape letters: S support rows, Q query rows, W classes, F features, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apportion.methods.adapt.family import Family
from apportion.methods.adapt.groups import Groups, bundles
from apportion.methods.adapt.masked import PLAIN, Pass, masked_features
from apportion.methods.adapt.pool import Pool
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.episode import Episode
from apportion.tasks.heads import class_means, cosines


def episode_features(
    family: Family, pool: Pool, episode: Episode, gate_G: Tensor, keep_G: Tensor, how: Pass = PLAIN
) -> Tensor:
    """Features of the support and then of the queries by the task's own network, shape (S + Q, F), unit length."""
    rows = np.concatenate([episode.support.row_N, episode.query.row_N])
    return family.embed(pool.at(rows), gate_G, keep_G, how).float()


def logits(family: Family, episode: Episode, feature_NF: Tensor) -> Tensor:
    """Scores of the queries against the prototypes of the support, shape (Q, W)."""
    num_support = len(episode.support)
    mean_WF = class_means(feature_NF[:num_support], torch.from_numpy(episode.support.label_N), episode.ways)
    return family.log_scale.exp().to(feature_NF.device) * cosines(feature_NF[num_support:], mean_WF)


def frozen_means(pool: Pool, episode: Episode) -> Tensor:
    """Class means of the support under the frozen network: what the router sees."""
    return class_means(
        pool.feature_NF[torch.from_numpy(episode.support.row_N)],
        torch.from_numpy(episode.support.label_N),
        episode.ways,
    )


def order_units(partition: Partition, scores: Mapping[str, Tensor]) -> Partition:
    """The partition with every module's units ordered by their scores, the largest first."""
    orders = {name: score_U.argsort(descending=True, stable=True).tolist() for name, score_U in scores.items()}
    return partition.ordered(orders)


def unit_scores(
    network: Network, partition: Partition, pools: Mapping[str, Pool], episodes: Sequence[Episode]
) -> dict[str, Tensor]:
    r"""How much the queries' losses depend on the gate of every unit, by module (eq. A6).

    .. math:: I_u = \sum_T \big(\partial \mathcal L_T / \partial r_u\big)^2 \Big|_{r = 1}, \qquad
        I_{block} = \sum_T \mathcal L_T \big|_{r_{block} = 0}
    """
    groups = Groups(partition, fine=True)
    device = next(network.module.parameters()).device
    stacks = bundles(network, groups).to(device)
    stacks.requires_grad_(False)
    blocks = groups.blocks()
    gate_G = torch.ones(groups.count, device=device)

    def loss(episode: Episode, keep_G: Tensor) -> Tensor:
        pool = pools[episode.domain]
        inputs = pool.at(np.concatenate([episode.support.row_N, episode.query.row_N]))
        feature_NF = masked_features(network, stacks, blocks, inputs, gate_G, keep_G).float()
        num_support = len(episode.support)
        mean_WF = class_means(feature_NF[:num_support], torch.from_numpy(episode.support.label_N), episode.ways)
        label_Q = torch.from_numpy(episode.query.label_N).to(device)
        return functional.cross_entropy(10.0 * cosines(feature_NF[num_support:], mean_WF), label_Q)

    score_G = torch.zeros(groups.count)
    for episode in episodes:
        keep_G = torch.ones(groups.count, device=device, requires_grad=True)
        (slope_G,) = torch.autograd.grad(loss(episode, keep_G), keep_G)
        score_G += slope_G.square().cpu()
    with torch.no_grad():
        for group, _ in blocks.values():
            keep_G = torch.ones(groups.count, device=device)
            keep_G[group] = 0
            score_G[group] = sum(float(loss(episode, keep_G)) for episode in episodes)
    return {module.name: score_G[torch.tensor(groups.of_units(module))] for module in partition}
