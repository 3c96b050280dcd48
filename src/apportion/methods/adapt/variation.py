"""Variations of an episode: all its images changed in one way, so that training meets more kinds than its domains have.

What tells the classes apart stays, since every image of the episode is changed alike; what tells domains apart (light
strokes or dark ones, colours, sharpness, which side is up) does not. Shape letters: N images, C channels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apportion.methods.adapt.pool import Pool
from apportion.models.network import Network, read_out
from apportion.tasks.episode import Episode


def varied(network: Network, pool: Pool, episode: Episode, generator: torch.Generator) -> tuple[Pool, Episode]:
    """The episode with its images changed, in a pool of its own; texts stay as they are."""
    rows = np.concatenate([episode.support.row_N, episode.query.row_N])
    inputs = pool.at(rows)
    images = {name: vary(tensor, generator) for name, tensor in inputs.items() if tensor.dim() == 4}
    if not images:
        return pool, episode
    inputs |= images
    with torch.no_grad():
        feature_NF = read_out(network, inputs).float().cpu()
    num_support, place_N = len(episode.support), np.arange(len(rows))
    moved = replace(
        episode,
        support=replace(episode.support, row_N=place_N[:num_support]),
        query=replace(episode.query, row_N=place_N[num_support:]),
    )
    return Pool(pool.name, inputs, None, feature_NF), moved


def vary(image_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Images turned, inverted, grey, with colours exchanged or made coarse: each at random, for all of them alike."""
    turns, inverted, grey, coarse = (int(torch.randint(4, (), generator=generator)) for _ in range(4))
    order_C = torch.randperm(image_NCHW.shape[1], generator=generator)
    found = image_NCHW.rot90(turns, (2, 3)) if image_NCHW.shape[2] == image_NCHW.shape[3] else image_NCHW
    found = found[:, order_C.to(found.device)]
    if inverted < 2:
        found = found.amax((0, 2, 3), keepdim=True) + found.amin((0, 2, 3), keepdim=True) - found
    if grey < 2:
        found = found.mean(1, keepdim=True).expand_as(found)
    if coarse < 2:
        size = found.shape[2:]
        found = functional.interpolate(found, scale_factor=1 / (2 + coarse), mode="area")
        found = functional.interpolate(found, size=size, mode="bilinear", align_corners=False)
    return found.contiguous()
