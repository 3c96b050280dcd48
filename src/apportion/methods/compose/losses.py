"""Support losses of a linear predictor on frozen features: the convex surrogate that the theory is about.

A loss is a function of the parameters; a mixture of sources plus a residual makes parameters. The sufficient statistics
of a task are computed once, and steps over the weights then cost the same whatever the number of examples (squared
loss) or of features (generalised linear models). Shape letters: N examples, D parameters, S sources, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from apportion.errors import DataError

Objective: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]


@dataclass(frozen=True)
class Mixing:
    """The loss as a function of the weights alone, and its curvature along a direction where it is quadratic."""

    objective: Objective
    curvature: Callable[[Tensor], float] | None = None


class Loss(Protocol):
    """A smooth function of the parameters, with a fast way to see it as a function of the weights."""

    def evaluate(self, theta_D: Tensor) -> tuple[float, Tensor]: ...

    def mixing(self, source_SD: Tensor, delta_D: Tensor) -> Mixing: ...

    def minimise_on(self, theta_D: Tensor, free_D: Tensor) -> Tensor:
        """The parameters with the free coordinates moved to where the loss is least."""
        ...


class Squared:
    r"""Half the mean squared error plus a ridge, from sufficient statistics (eq. C14).

    .. math::
        g(\theta) = \tfrac12 \theta^\top A \theta - b^\top \theta + c, \quad
        A = \tfrac1n X^\top X + \rho I, \quad b = \tfrac1n X^\top y

    As a function of the weights it is a quadratic with the S × S matrix :math:`\Theta A \Theta^\top`.
    """

    def __init__(self, feature_ND: Tensor, target_N: Tensor, ridge: float = 0.0) -> None:
        if not len(feature_ND):
            raise DataError("the support is empty; give at least one example")
        count = len(feature_ND)
        self.matrix_DD = feature_ND.T @ feature_ND / count
        self.matrix_DD.diagonal().add_(ridge)
        self.linear_D = feature_ND.T @ target_N / count
        self.constant = 0.5 * float(target_N @ target_N) / count

    def evaluate(self, theta_D: Tensor) -> tuple[float, Tensor]:
        product_D = self.matrix_DD @ theta_D
        value = 0.5 * float(theta_D @ product_D) - float(self.linear_D @ theta_D) + self.constant
        return value, product_D - self.linear_D

    def mixing(self, source_SD: Tensor, delta_D: Tensor) -> Mixing:
        value, slope_D = self.evaluate(delta_D)
        quadratic_SS = source_SD @ self.matrix_DD @ source_SD.T
        linear_S = source_SD @ slope_D

        def objective(weight_S: Tensor) -> tuple[float, Tensor]:
            product_S = quadratic_SS @ weight_S
            return value + 0.5 * float(weight_S @ product_S) + float(linear_S @ weight_S), product_S + linear_S

        return Mixing(objective, lambda direction_S: float(direction_S @ quadratic_SS @ direction_S))

    def minimise_on(self, theta_D: Tensor, free_D: Tensor) -> Tensor:
        place = free_D.nonzero()[:, 0]
        _, gradient_D = self.evaluate(theta_D)
        matrix = self.matrix_DD[place][:, place]
        step = torch.linalg.lstsq(matrix, gradient_D[place, None], driver="gelsd").solution[:, 0]
        moved_D = theta_D.clone()
        moved_D[place] -= step
        return moved_D


class CrossEntropy:
    r"""Mean cross-entropy of a softmax (or, with two classes, logistic) model plus a ridge (eq. C15).

    .. math:: g(\theta) = -\tfrac1n \sum_i \log \mathrm{softmax}(\Theta_C^\top x_i)_{y_i} + \tfrac\rho2 \|\theta\|^2

    ``theta_D`` is the D/C × C matrix of coefficients in row-major order. As a function of the weights only the scores
    of every source are needed, so a step costs N · C · S, not N · D.
    """

    def __init__(self, feature_ND: Tensor, label_N: Tensor, num_classes: int, ridge: float = 0.0) -> None:
        if not len(feature_ND):
            raise DataError("the support is empty; give at least one example")
        self.feature_ND, self.label_N, self.num_classes, self.ridge = feature_ND, label_N, num_classes, ridge

    def evaluate(self, theta_D: Tensor) -> tuple[float, Tensor]:
        score_NC = self.feature_ND @ theta_D.reshape(-1, self.num_classes)
        value, slope_NC = self._of_scores(score_NC)
        gradient_D = (self.feature_ND.T @ slope_NC).reshape(-1) + self.ridge * theta_D
        return value + 0.5 * self.ridge * float(theta_D @ theta_D), gradient_D

    def mixing(self, source_SD: Tensor, delta_D: Tensor) -> Mixing:
        matrix_SDC = source_SD.reshape(len(source_SD), -1, self.num_classes)
        score_SNC = self.feature_ND @ matrix_SDC
        fixed_NC = self.feature_ND @ delta_D.reshape(-1, self.num_classes)
        gram_SS, inner_S, size = source_SD @ source_SD.T, source_SD @ delta_D, float(delta_D @ delta_D)

        def objective(weight_S: Tensor) -> tuple[float, Tensor]:
            value, slope_NC = self._of_scores(torch.einsum("s,snc->nc", weight_S, score_SNC) + fixed_NC)
            norm = float(weight_S @ gram_SS @ weight_S + 2 * inner_S @ weight_S) + size
            gradient_S = torch.einsum("nc,snc->s", slope_NC, score_SNC) + self.ridge * (gram_SS @ weight_S + inner_S)
            return value + 0.5 * self.ridge * norm, gradient_S

        return Mixing(objective)

    def minimise_on(self, theta_D: Tensor, free_D: Tensor) -> Tensor:
        place = free_D.nonzero()[:, 0]
        free = theta_D[place].clone().requires_grad_(True)
        optimiser = torch.optim.LBFGS(
            [free], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-15, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            full_D = theta_D.index_put((place,), free.detach())
            value, gradient_D = self.evaluate(full_D)
            free.grad = gradient_D[place]
            return torch.tensor(value, dtype=torch.float64)

        optimiser.step(closure)
        return theta_D.index_put((place,), free.detach())

    def _of_scores(self, score_NC: Tensor) -> tuple[float, Tensor]:
        slope_NC = score_NC.softmax(-1)
        slope_NC[torch.arange(len(score_NC)), self.label_N] -= 1
        return float(functional.cross_entropy(score_NC, self.label_N)), slope_NC / len(score_NC)
