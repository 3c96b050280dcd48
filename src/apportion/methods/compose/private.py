"""Private routing: class means released with Gaussian noise, everything after that is post-processing.

Two tasks are neighbours when one example of a class is replaced by another; the number of examples of every class is
public. Features have unit length, so replacing one moves a class sum by at most two. The router's means and the final
classifier's means are two releases, and the accountant counts both. There is no residual: its fit would look at the
examples again. Shape letters: N examples, P features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from apportion.errors import DataError
from apportion.numerics.privacy import epsilon_of, multiplier_for

SENSITIVITY = 2.0


@dataclass
class PrivateMeans:
    """Releases class means and keeps account of what they cost.

    Args:
        epsilon, delta: what all releases together must keep.
        num_releases: how many are planned: two where the weights and the classifier both come from the support.
    """

    epsilon: float
    delta: float
    num_releases: int = 2
    seed: int | None = None
    multiplier: float = field(init=False)
    spent: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.epsilon <= 0 or not 0 < self.delta < 1 or self.num_releases < 1:
            raise DataError(
                f"privacy of epsilon {self.epsilon:g} and delta {self.delta:g} makes no sense; say 4 and 1e-5"
            )
        self.multiplier = multiplier_for(self.epsilon, self.delta, self.num_releases)
        self._generator = torch.Generator()
        if self.seed is None:
            self._generator.seed()  # noise that can be guessed protects nobody; a seed is for tests
        else:
            self._generator.manual_seed(self.seed)

    def release(self, feature_NP: Tensor, label_N: Tensor) -> Tensor:
        """Noisy class means of features, which are scaled to unit length first."""
        if len(self.spent) >= self.num_releases:
            raise DataError(f"all {self.num_releases} private releases are spent; plan for more at the start")
        self.spent.append(self.multiplier)
        unit_NP = functional.normalize(feature_NP.double(), dim=-1)
        onehot_NC = functional.one_hot(label_N).double()
        sum_CP = onehot_NC.T @ unit_NP
        noise_CP = torch.randn(sum_CP.shape, generator=self._generator, dtype=torch.float64)
        noisy_CP = sum_CP + SENSITIVITY * self.multiplier * noise_CP
        return (noisy_CP / onehot_NC.sum(0)[:, None].clamp_min(1)).to(feature_NP.dtype)

    def spent_epsilon(self) -> float:
        """The ε of what was released so far, at the δ given."""
        return epsilon_of(self.delta, self.spent) if self.spent else 0.0
