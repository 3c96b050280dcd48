"""Heads on frozen features: prototypes, cosine, and a linear probe in closed form or by L-BFGS.

Shape letters: S support rows, Q query rows, D features, W classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from apportion.errors import DataError


class Head(Protocol):
    """Learns from a support set and scores queries; softmax of the scores are its probabilities."""

    def score(self, support_SD: Tensor, label_S: Tensor, query_QD: Tensor, ways: int) -> Tensor: ...

    def linear(self, support_SD: Tensor, label_S: Tensor, ways: int) -> tuple[Tensor, Tensor]:
        """The same as weights (D, W) and biases (W) on a query of unit length, up to a constant for each query."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prototype:
    r"""Nearest class mean: the score is minus the squared distance, times a scale (eq. T4).

    .. math:: s_{qw} = -\sigma \, \| f_q - \mu_w \|^2, \quad \mu_w = \frac{1}{n_w} \sum_{i : y_i = w} f_i
    """

    scale: float = 10.0

    def score(self, support_SD: Tensor, label_S: Tensor, query_QD: Tensor, ways: int) -> Tensor:
        mean_WD = class_means(support_SD, label_S, ways)
        return -self.scale * torch.cdist(query_QD[None], mean_WD[None])[0].square()

    def linear(self, support_SD: Tensor, label_S: Tensor, ways: int) -> tuple[Tensor, Tensor]:
        mean_WD = class_means(support_SD, label_S, ways)
        return 2 * self.scale * mean_WD.T, -self.scale * mean_WD.square().sum(-1)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Cosine between a query and the mean of a class's unit features, times a scale."""

    scale: float = 10.0

    def score(self, support_SD: Tensor, label_S: Tensor, query_QD: Tensor, ways: int) -> Tensor:
        mean_WD = class_means(functional.normalize(support_SD, dim=-1), label_S, ways)
        return self.scale * cosines(query_QD, mean_WD)

    def linear(self, support_SD: Tensor, label_S: Tensor, ways: int) -> tuple[Tensor, Tensor]:
        mean_WD = class_means(functional.normalize(support_SD, dim=-1), label_S, ways)
        return self.scale * functional.normalize(mean_WD, dim=-1).T, support_SD.new_zeros(ways)


@dataclass(frozen=True, kw_only=True)
class Ridge:
    r"""Linear probe in closed form: least squares on one-hot targets, bias not penalised (eq. T5).

    .. math:: W = \bar F^\top (\bar F \bar F^\top + \lambda I)^{-1} \bar Y

    F and Y are centred, so the bias is the mean target; the system solved has the size of the support, not of the
    features.
    """

    penalty: float = 0.1
    scale: float = 10.0

    def score(self, support_SD: Tensor, label_S: Tensor, query_QD: Tensor, ways: int) -> Tensor:
        weight_DW, bias_W = self.linear(support_SD, label_S, ways)
        return query_QD @ weight_DW + bias_W

    def linear(self, support_SD: Tensor, label_S: Tensor, ways: int) -> tuple[Tensor, Tensor]:
        weight_DW, bias_W = self.solve(support_SD, functional.one_hot(label_S, ways).to(support_SD.dtype))
        return self.scale * weight_DW, self.scale * bias_W

    def solve(self, support_SD: Tensor, target_SW: Tensor) -> tuple[Tensor, Tensor]:
        centre_D, mean_W = support_SD.mean(0), target_SW.mean(0)
        centred_SD = support_SD - centre_D
        gram_SS = centred_SD @ centred_SD.T
        gram_SS.diagonal().add_(self.penalty)
        dual_SW = torch.linalg.solve(gram_SS, target_SW - mean_W)
        weight_DW = centred_SD.T @ dual_SW
        return weight_DW, mean_W - centre_D @ weight_DW


@dataclass(frozen=True, kw_only=True)
class Logistic:
    r"""Linear probe by L-BFGS: the mean cross-entropy plus a penalty on the weights (eq. T6).

    .. math:: \min_{W, b} \frac{1}{S} \sum_i -\log \mathrm{softmax}(W^\top f_i + b)_{y_i} + \frac{\lambda}{2} \|W\|_F^2
    """

    penalty: float = 1e-4  # chosen on the validation splits of BANKING77 and CLINC150
    max_steps: int = 200

    def score(self, support_SD: Tensor, label_S: Tensor, query_QD: Tensor, ways: int) -> Tensor:
        weight_DW, bias_W = self.linear(support_SD, label_S, ways)
        return query_QD @ weight_DW + bias_W

    def linear(self, support_SD: Tensor, label_S: Tensor, ways: int) -> tuple[Tensor, Tensor]:
        # The best weights lie in the span of the centred support, so a few coordinates replace all features.
        centre_D = support_SD.mean(0)
        basis_KD = torch.linalg.svd(support_SD - centre_D, full_matrices=False).Vh
        small_SK = (support_SD - centre_D) @ basis_KD.T
        weight_KW = torch.zeros(small_SK.shape[1], ways, dtype=support_SD.dtype, requires_grad=True)
        bias_W = torch.zeros(ways, dtype=support_SD.dtype, requires_grad=True)
        optimiser = torch.optim.LBFGS(
            [weight_KW, bias_W],
            max_iter=self.max_steps,
            tolerance_grad=1e-6,
            tolerance_change=1e-10,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = functional.cross_entropy(small_SK @ weight_KW + bias_W, label_S)
            loss = loss + 0.5 * self.penalty * weight_KW.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(closure)
        weight_DW = (basis_KD.T @ weight_KW).detach()
        return weight_DW, bias_W.detach() - centre_D @ weight_DW


HEADS: Mapping[str, Head] = {
    "prototype": Prototype(),
    "cosine": Cosine(),
    "ridge": Ridge(),
    "logistic": Logistic(),
}


def class_means(support_SD: Tensor, label_S: Tensor, ways: int) -> Tensor:
    """Mean features of every class, shape (W, D), on the features' device and with their gradients."""
    count_W = torch.bincount(label_S, minlength=ways)
    if len(count_W) != ways or int(count_W.min()) == 0:
        raise DataError(f"the support has {int((count_W > 0).sum())} of {ways} classes; every class needs an example")
    one_SW = functional.one_hot(label_S, ways).to(support_SD)
    return one_SW.T @ support_SD / count_W.to(support_SD)[:, None]


def left_out_means(support_SD: Tensor, label_S: Tensor, ways: int) -> Tensor:
    """For every example the mean of its class without it, shape (S, D); an example alone in its class is its mean."""
    one_SW = functional.one_hot(label_S, ways).to(support_SD)
    others_S = one_SW.sum(0)[label_S][:, None] - 1
    sum_SD = (one_SW.T @ support_SD)[label_S] - support_SD
    return torch.where(others_S > 0, sum_SD / others_S.clamp_min(1), support_SD)


def cosines(query_QD: Tensor, mean_WD: Tensor) -> Tensor:
    """Cosine of every query with every class mean, shape (Q, W)."""
    return functional.normalize(query_QD, dim=-1) @ functional.normalize(mean_WD, dim=-1).T
