"""Suite mix-in for rules on networks: a network's state is its tensors."""

from __future__ import annotations

import torch


class Networks:
    def snapshot(self, model):
        return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}

    def same(self, one, other):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
