r"""The router: from a support set's class means and a budget to a mixture over experts (eq. A4; the paper's eq. 13).

.. math:: \alpha = \mathrm{softmax}\big(h_\zeta(\mathrm{pool}_w\, p_w,\; \rho,\; d)\big)

Pooling does not depend on the order of classes or examples, so any number of both will do. Shape letters: W classes, F
features, M experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_DEVICE_FEATURES = 4


class Router(nn.Module):
    """Class means are pooled by their mean, spread and largest value; budget and device join them."""

    def __init__(self, num_features: int, num_experts: int, hidden: int = 64) -> None:
        super().__init__()
        self.per_class = nn.Sequential(nn.Linear(num_features, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        last = nn.Linear(hidden, num_experts)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(3 * hidden + 2 + NUM_DEVICE_FEATURES, hidden), nn.GELU(), last)

    def forward(self, mean_WF: Tensor, rho: float, device_F: Tensor) -> Tensor:
        """Logits over the experts; their softmax is the mixture."""
        each_WH = self.per_class(mean_WF)
        pooled = torch.cat([each_WH.mean(0), each_WH.std(0, correction=0), each_WH.amax(0)])
        budget = torch.tensor([rho, rho * rho], dtype=pooled.dtype, device=pooled.device)
        return self.head(torch.cat([pooled, budget, device_F]))
