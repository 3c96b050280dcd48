"""Making a model for a support set and a budget: mixture, sizes, slice and head, without measuring it.

Shape letters: S support rows, W classes, F features, M experts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apportion.errors import DataError
from apportion.methods.adapt.adapt import Learned
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.depth import near_sizes, surely_least
from apportion.methods.adapt.pool import read_pool
from apportion.methods.adapt.posterior import Posterior, averse_choice, mixture_posterior
from apportion.methods.adapt.solve import NUM_STEPS, Solved, refine_mixture, smallest, solve
from apportion.models.network import Network, read_out
from apportion.models.quantise import simulate
from apportion.tasks.batches import Examples
from apportion.tasks.domain import Domain
from apportion.tasks.heads import Cosine, Head, Logistic, Prototype, class_means, cosines, left_out_means
from apportion.tasks.shaped import shaped

CONFIDENCE = 0.95
PRECISIONS = ("auto", "fp32", "int8")
HEADS: Mapping[str, Callable[[float], Head]] = {
    "cosine": lambda scale: Cosine(scale=scale),
    "prototype": lambda scale: Prototype(scale=scale),
    "linear": lambda scale: Logistic(),
}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How a model is to be made; see ``specialise``."""

    head: str = "cosine"
    refine: bool = False
    depths: bool = False
    risk: float = 0.0
    averse: float = 0.0
    steps: int | None = None
    confidence: float = CONFIDENCE
    precision: str = "auto"

    def __post_init__(self) -> None:
        for name in ("risk", "averse"):
            if not 0 <= getattr(self, name) < math.inf:
                raise DataError(f"{name} {getattr(self, name):g} is not possible; give 0 or more")
        if self.head not in HEADS:
            raise DataError(f"head {self.head!r} is not known; possible are {', '.join(HEADS)}")
        if self.precision not in PRECISIONS:
            raise DataError(f"precision {self.precision!r} is not known; possible are {', '.join(PRECISIONS)}")
        if self.steps is not None and self.steps < 0:
            raise DataError(f"{self.steps} steps are not possible; give 0 or more, or none for the usual")
        if not 0.5 <= self.confidence < 1:
            raise DataError(f"confidence {self.confidence:g} is not possible; give one from 0.5 to less than 1")

    @property
    def mixture_steps(self) -> int:
        return max(self.steps or 0, int(self.refine or self.risk > 0))


@dataclass(frozen=True, eq=False, kw_only=True)
class Made:
    """A specialised network with its head, and what making it took."""

    network: Network
    weight_FW: Tensor
    bias_W: Tensor
    classes: tuple[str, ...]
    num_examples: int
    sizes: dict[str, int]
    alpha: list[float]
    posterior: Posterior
    predicted_ms: float
    upper_ms: float
    accuracy: float
    seconds: dict[str, float]


def make(
    learned: Learned,
    clock: Clock,
    domain: Domain,
    budget_ms: float,
    wish: Wish,
    *,
    least: bool = False,
    int8: bool = False,
) -> Made:
    """The network for a budget, or with ``least`` the smallest; ``int8`` has its ranges set by the support."""
    family, began = learned.family, time.perf_counter()
    rho = min(1.0, max(budget_ms, clock.floor_ms()) / clock.whole_ms)
    pool = read_pool(family.network, domain)
    rows = np.arange(len(domain))
    inputs, label_S = pool.at(rows), torch.from_numpy(domain.label_N)
    ways, read = len(domain.classes), time.perf_counter()
    with torch.no_grad():
        frozen_SF = read_out(family.network, inputs).float()
        encoded = time.perf_counter()
        known = family.known(clock)
        posterior = mixture_posterior(lambda mean_WF: family.plan(mean_WF, rho, known).alpha_M, frozen_SF, label_S)
        value_L = learned.values(rho)
    # on a device that was trained for the policy's fractions stand; another one prices them anew
    usual = 0 if clock.name in family.clocks else NUM_STEPS
    num_steps = usual if wish.steps is None else wish.steps

    def sized(mixture_M: Tensor) -> Solved:
        if least:
            return smallest(mixture_M, clock)
        better = wish.steps is not None
        return solve(family, mixture_M, budget_ms, clock, value_L, num_steps=num_steps, only_better=better)

    scale = float(family.log_scale.detach().exp())

    def losses(mixture_M: Tensor, sizes: Mapping[str, int]) -> Tensor:
        with torch.no_grad():
            feature_SF = family.embed(inputs, family.gates(mixture_M), family.keep_of(sizes)).float()
            return left_out_losses(feature_SF, label_S, ways, scale)

    def loss(mixture_M: Tensor, sizes: Mapping[str, int]) -> float:
        return risked(losses(mixture_M, sizes), wish.risk)

    solved = sized(posterior.mean_M)
    begun = time.perf_counter()
    alpha_M, solved, num_passes = _settle(loss, sized, solved, posterior, wish)
    if wish.depths and not least:
        near = near_sizes(family, alpha_M, rho, clock, value_L, num_steps=num_steps)
        choices = [solved.sizes, *near]
        num_passes += len(choices) if near else 0
        sizes = choices[surely_least([losses(alpha_M, one) for one in choices]) if near else 0]
        solved = Solved(alpha_M, sizes, clock.predict_ms(sizes), clock.upper_ms(sizes))
    refined = time.perf_counter()
    network = family.sliced(alpha_M, solved.sizes)
    if int8:
        network = network.replace(calibration=tuple(shaped(Examples((inputs,), domain.name), network)))
    sliced = time.perf_counter()
    with torch.no_grad():
        feature_SF = functional.normalize(read_out(as_run(network), inputs).float(), dim=-1)
        weight_FW, bias_W = HEADS[wish.head](scale).linear(feature_SF, label_S, ways)
    return Made(
        network=network,
        weight_FW=weight_FW,
        bias_W=bias_W,
        classes=domain.classes,
        num_examples=len(domain),
        sizes=solved.sizes,
        alpha=[round(float(a), 4) for a in alpha_M],
        posterior=posterior,
        predicted_ms=solved.predicted_ms,
        upper_ms=solved.upper_ms,
        accuracy=float(((feature_SF @ weight_FW + bias_W).argmax(-1) == label_S).float().mean()),
        seconds={
            "read": read - began,
            "encode": encoded - read,
            "solve": begun - encoded,
            "refine": refined - begun,
            "slice": sliced - refined,
            "total": time.perf_counter() - began,
            "passes": float(num_passes + 2),
        },
    )


def _settle(
    loss: Callable[[Tensor, Mapping[str, int]], float],
    sized: Callable[[Tensor], Solved],
    solved: Solved,
    posterior: Posterior,
    wish: Wish,
) -> tuple[Tensor, Solved, int]:
    """The mixture after the steps and the choice that were asked for, its sizes, and how many passes it took."""
    alpha_M, num_passes, sizes = solved.alpha_M, 0, solved.sizes
    if wish.mixture_steps:
        alpha_M, num_passes = refine_mixture(lambda a_M: loss(a_M, sizes), alpha_M, num_steps=wish.mixture_steps)
    if wish.averse:
        alpha_M, asked = averse_choice(lambda a_M: loss(a_M, sizes), posterior, alpha_M, wish.averse)
        num_passes += asked
    if wish.steps and not torch.equal(alpha_M, solved.alpha_M):
        again = sized(alpha_M)  # other experts lean to other modules
        if again.sizes != sizes:
            num_passes += 2
            solved = again if loss(alpha_M, again.sizes) <= loss(alpha_M, sizes) else solved
    return alpha_M, solved, num_passes


def as_run(network: Network) -> Network:
    """What the runtime computes: int8 is simulated."""
    return simulate(network) if network.precision == "int8" else network


def left_out_losses(feature_SF: Tensor, label_S: Tensor, ways: int, scale: float) -> Tensor:
    """Loss of every example against class means without it; a class of one example keeps it in its mean."""
    cosine_SW = cosines(feature_SF, class_means(feature_SF, label_S, ways))
    own_S = functional.cosine_similarity(feature_SF, left_out_means(feature_SF, label_S, ways), dim=-1)
    cosine_SW = cosine_SW.scatter(1, label_S[:, None], own_S[:, None])
    return functional.cross_entropy(scale * cosine_SW, label_S, reduction="none")


def risked(loss_S: Tensor, risk: float) -> float:
    r"""Mean of the examples' losses plus their variance times a risk weight (eq. A14).

    .. math:: \hat\ell = \mathrm{mean}_i\, \ell_i + \rho\, \mathrm{var}_i\, \ell_i
    """
    return float(loss_S.mean() + risk * loss_S.var(correction=0))
