"""Batch norms of a network that changed: their statistics are those of the old one until they are taken anew."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from apportion.models.network import Network, forward
from apportion.tasks.batches import Examples


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The batch norms that keep running statistics."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]


def renormalised(network: Network, examples: Examples) -> Network:
    """A copy whose batch norms hold the statistics of the examples; a network without any is returned as it is.

    Without that a pruned network with batch norms reads as chance whatever was cut, so that no cut looks better than
    another.
    """
    if not batch_norms(network.module):
        return network
    module = copy.deepcopy(network.module).eval()
    norms = batch_norms(module)
    momentum = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over the batches
        norm.train()
    with torch.no_grad():
        for batch in examples.batches:
            forward(module, batch)
    for norm, was in zip(norms, momentum, strict=True):
        norm.momentum = was
    return network.replace(module=module.eval())
