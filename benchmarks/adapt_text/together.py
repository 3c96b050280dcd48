"""One episode under many networks of a family, run together: on a GPU small networks one by one leave it idle."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from rounded import int8_features
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from apportion.methods.adapt.episodes import logits
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.make import left_out_losses
from apportion.methods.adapt.pool import Pool
from apportion.tasks.episode import Episode

AT_ONCE = 12  # networks
Wanted = tuple[Tensor, Tensor, bool]  # a mixture, keep gates, and whether in int8


class Together:
    """The features of an episode's support and queries by mixture, keep gates and precision; each is run once."""

    def __init__(self, family: Family, pool: Pool, episode: Episode) -> None:
        self.family, self.episode = family, episode
        self.inputs = pool.at(np.concatenate([episode.support.row_N, episode.query.row_N]))
        self.known: dict[tuple, Tensor] = {}

    def run(self, wanted: Iterable[Wanted]) -> None:
        """Runs those that were not run yet, several at once."""
        missing = {key(*one): one for one in wanted}
        missing = {name: one for name, one in missing.items() if name not in self.known}
        for int8 in (False, True):
            some = {name: one for name, one in missing.items() if one[2] is int8}
            names = list(some)
            for start in range(0, len(names), AT_ONCE):
                chunk = names[start : start + AT_ONCE]
                features = self._features([some[name] for name in chunk], int8=int8)
                self.known |= dict(zip(chunk, features, strict=True))

    @torch.no_grad()
    def _features(self, some: list[Wanted], *, int8: bool) -> tuple[Tensor, ...]:
        device = next(iter(self.inputs.values())).device
        gate_PG = torch.stack([self.family.gates(alpha_M) for alpha_M, _, _ in some]).to(device)
        keep_PG = torch.stack([keep_G for _, keep_G, _ in some]).to(device)

        def one(gate_G: Tensor, keep_G: Tensor) -> Tensor:
            if int8:
                return int8_features(self.family, self.inputs, len(self.episode.support), gate_G, keep_G)
            return self.family.embed(self.inputs, gate_G, keep_G)

        with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for several networks, or not on every device
            return torch.vmap(one)(gate_PG, keep_PG).float().cpu().unbind(0)

    def features(self, alpha_M: Tensor, keep_G: Tensor, int8: bool = False) -> Tensor:
        """Shape (S + Q, F)."""
        self.run([(alpha_M, keep_G, int8)])
        return self.known[key(alpha_M, keep_G, int8)]

    def support_losses(self, alpha_M: Tensor, keep_G: Tensor) -> Tensor:
        """The left-out loss of every support example, in float, as ``specialize`` has it."""
        support = self.episode.support
        feature_SF, label_S = self.features(alpha_M, keep_G)[: len(support)], torch.from_numpy(support.label_N)
        return left_out_losses(feature_SF, label_S, self.episode.ways, float(self.family.log_scale.detach().exp()))

    def accuracy(self, alpha_M: Tensor, keep_G: Tensor, int8: bool) -> float:
        """The share of the queries that are nearest to their class mean."""
        logit_QW = logits(self.family, self.episode, self.features(alpha_M, keep_G, int8)).detach()
        right_Q = logit_QW.argmax(-1) == torch.from_numpy(self.episode.query.label_N)
        return round(float(right_Q.float().mean()), 4)


def key(alpha_M: Tensor, keep_G: Tensor, int8: bool) -> tuple:
    return (int8, *alpha_M.tolist(), *keep_G.tolist())
