r"""How sure the router is of a mixture, and a choice that a wrong mixture harms little.

.. math:: \alpha \sim \mathrm{Dir}(\kappa \hat\alpha), \qquad
    \kappa + 1 = \frac{\sum_m \hat\alpha_m (1 - \hat\alpha_m)}{\sum_m \hat\sigma_m^2}, \qquad
    \hat\sigma_m^2 = \frac{P - 1}{P} \sum_p \big(\hat\alpha_m^{(-p)} - \bar\alpha_m\big)^2 \quad \text{(eq. A18)}

:math:`\hat\alpha^{(-p)}` is the router's mixture without a part of the support set: the jackknife's variance, which
falls as examples are added, sets the width of the law. Shape letters: S support rows, P parts, M experts, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.numerics.dirichlet import sample
from apportion.tasks.heads import class_means

MAX_PARTS = 32
NUM_DRAWS = 8
LEAST, MOST = 1.0, 1e6  # of the precision


@dataclass(frozen=True, eq=False)
class Posterior:
    """A Dirichlet law over mixtures: its mean and its precision."""

    mean_M: Tensor
    precision: float

    @property
    def std_M(self) -> Tensor:
        return (self.mean_M * (1 - self.mean_M) / (self.precision + 1)).sqrt()

    def around(self, alpha_M: Tensor, seed: int = 0) -> Tensor:
        """Draws of the same width around a mixture, shape (draws, M)."""
        return sample(alpha_M, self.precision, NUM_DRAWS, torch.Generator().manual_seed(seed)).float()


def mixture_posterior(route: Callable[[Tensor], Tensor], feature_SF: Tensor, label_S: Tensor) -> Posterior:
    """The law of the mixture that a support set leaves (eq. A18); no pass of the network, only of the router.

    A class whose examples are all in the part left out is left out with them. One example says nothing: the widest law.

    Args:
        route: from class means to a mixture.
    """
    whole_M = route(_means(feature_SF, label_S))
    if len(label_S) < 2:
        return Posterior(whole_M, LEAST)
    num_parts = min(len(label_S), MAX_PARTS)
    part_S = torch.arange(len(label_S)) % num_parts
    without_PM = torch.stack([route(_means(feature_SF[part_S != p], label_S[part_S != p])) for p in range(num_parts)])
    variance = float((num_parts - 1) / num_parts * (without_PM - without_PM.mean(0)).square().sum())
    within = float((whole_M * (1 - whole_M)).sum())
    return Posterior(whole_M, min(max(within / max(variance, 1e-12) - 1, LEAST), MOST))


def averse_choice(
    loss: Callable[[Tensor], float], posterior: Posterior, alpha_M: Tensor, weight: float
) -> tuple[Tensor, int]:
    r"""Of a mixture, the even one and their middle that which loses least where the mixture is not sure (eq. A19).

    .. math:: \arg\min_c \; \mathbb E_{\alpha \sim \mathrm{Dir}(\kappa c)} \, \ell(\alpha) +
        \lambda \, \mathrm{std}_{\alpha \sim \mathrm{Dir}(\kappa c)} \, \ell(\alpha)

    ``weight`` is :math:`\lambda`; every mixture is judged on as many draws, and of equals the first is taken.

    Returns:
        The mixture, and how many times the loss was asked for.
    """
    if len(alpha_M) == 1:
        return alpha_M, 0
    even_M = torch.full_like(alpha_M, 1 / len(alpha_M))
    options = [alpha_M, 0.5 * (alpha_M + even_M), even_M]
    scores = []
    for option_M in options:
        loss_D = torch.tensor([loss(draw_M) for draw_M in posterior.around(option_M)])
        scores.append(float(loss_D.mean() + weight * loss_D.std()))
    return options[scores.index(min(scores))], NUM_DRAWS * len(options)


def _means(feature_SF: Tensor, label_S: Tensor) -> Tensor:
    """Means of the classes that have an example."""
    present, place_S = label_S.unique(return_inverse=True)
    return class_means(feature_SF, place_S, len(present))
