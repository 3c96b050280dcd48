"""Quality of retrieval: how near examples of a class come to each other, with the standard error of shared examples.

Shape letters: ``N`` examples, ``K`` places in a list of neighbours, ``D`` features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from apportion.core.meter import Reading
from apportion.errors import DataError
from apportion.models.network import Network, read_out
from apportion.tasks.batches import Examples


class Retrieval:
    r"""Mean average precision (eq. Q3): every example asks for the others, and those of its class are relevant.

    .. math:: \frac{1}{N} \sum_n \frac{1}{R_n} \sum_{k : \text{relevant}} \frac{h_{nk}}{k}

    :math:`h_{nk}` counts the relevant among the :math:`k` nearest by cosine, :math:`R_n` all of them; an example alone
    in its class asks nothing. An example stands in the lists of all others, so readings of examples are not
    independent: the standard error is the jackknife's, which takes an example out of all lists.
    """

    unit = "ratio"

    def __init__(self, original: Network, examples: Examples) -> None:
        if original.readout == "token-logits":
            raise DataError("retrieval compares one vector per example; use likelihood for a language model")
        assert examples.label_N is not None
        self.examples, self.label_N = examples, examples.label_N
        if not len(self.label_N.unique()) < len(self.label_N):
            raise DataError(f"no class has two of {examples.description}, so nothing can be retrieved; give more data")

    def read(self, model: Network) -> Reading:
        with torch.inference_mode():
            answer_ND = torch.cat([read_out(model, batch) for batch in self.examples.batches])
        return self.score(answer_ND, model.readout)

    def score(self, answer_ND: Tensor, readout: str) -> Reading:
        """The reading of answers computed elsewhere, in the order of the examples."""
        near_NK = neighbours(answer_ND)
        relevant_NK = self.label_N[near_NK] == self.label_N[:, None]
        precision_N, without_NK = average_precisions(relevant_NK)
        count = len(precision_N)
        # entry [n, j]: what example n reads when j is gone, NaN where it asks nothing any more
        left_NN = torch.full((count, count), torch.nan, dtype=torch.float64).scatter(1, near_NK, without_NK)
        left_N = left_NN.nanmean(0)  # NaN where nobody asks any more
        left_N = left_N[~left_N.isnan()]
        spread = (left_N - left_N.mean()).square().mean().item() if len(left_N) > 1 else 0.0
        return Reading(
            value=precision_N.nanmean().item(),
            unit=self.unit,
            stderr=math.sqrt(max(0, len(left_N) - 1) * spread),
            count=int((~precision_N.isnan()).sum()),
        )


def neighbours(answer_ND: Tensor) -> Tensor:
    """For every example all others, the nearest by cosine first, shape ``(N, N - 1)``; of equals the first."""
    feature_ND = nn.functional.normalize(answer_ND.double(), dim=-1)
    likeness_NN = (feature_ND @ feature_ND.T).fill_diagonal_(-torch.inf)
    return likeness_NN.argsort(dim=1, descending=True, stable=True)[:, :-1]


def average_precisions(relevant_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The average precision of every list, and of the list with each of its places taken out; NaN with none relevant.

    Taking out place :math:`k` moves those behind it one place up, and where it was relevant they have one hit less.
    """
    hit_NK = relevant_NK.double()
    count_NK = hit_NK.cumsum(1)
    place_K = torch.arange(1, relevant_NK.shape[1] + 1, dtype=torch.float64)
    total_N = hit_NK.sum(1)
    term_NK = hit_NK * count_NK / place_K
    sum_N = term_NK.sum(1)
    before_NK = term_NK.cumsum(1) - term_NK
    up_K = (place_K - 1).clamp_min(1)

    def behind(moved_NK: Tensor) -> Tensor:
        return moved_NK.flip(1).cumsum(1).flip(1) - moved_NK

    after_miss_NK, after_hit_NK = behind(hit_NK * count_NK / up_K), behind(hit_NK * (count_NK - 1) / up_K)
    without_NK = before_NK + torch.where(relevant_NK, after_hit_NK, after_miss_NK)
    return sum_N / total_N, without_NK / (total_N[:, None] - hit_NK)
