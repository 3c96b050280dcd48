"""Mixtures of task distributions: episodes from ID, and from OOD with a chance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.errors import DataError
from apportion.tasks.domain import Domain
from apportion.tasks.episode import Episode, Sampler


class Mixture:
    r"""Episodes of two samplers (eq. T8), each a function of the seed and its number alone.

    .. math:: P = (1 - \gamma) P_{\mathrm{ID}} + \gamma P_{\mathrm{OOD}}
    """

    def __init__(self, inside: Sampler, outside: Sampler, *, gamma: float, seed: int = 0) -> None:
        if not 0 <= gamma <= 1:
            raise DataError(f"gamma {gamma:g} is no share; give a number from 0 (all ID) to 1 (all OOD)")
        self.inside, self.outside, self.gamma, self.seed = inside, outside, gamma, seed

    def is_outside(self, number: int) -> bool:
        """Whether the episode of a number is OOD; a larger gamma only ever turns more of them."""
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 3, number]))
        return bool(rng.random() < self.gamma)

    def episode(self, number: int) -> Episode:
        return (self.outside if self.is_outside(number) else self.inside).episode(number)

    def episodes(self, count: int, *, start: int = 0) -> Iterator[Episode]:
        return (self.episode(number) for number in range(start, start + count))

    @property
    def domains(self) -> tuple[Domain, ...]:
        return (*self.inside.domains, *self.outside.domains)
