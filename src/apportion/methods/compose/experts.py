r"""Residual experts: one shared delta and a few masks over modules, combined by the router's weights (§ 6).

.. math:: \Delta = \sum_m \alpha_m (z_m \odot \theta_\delta) \quad \text{(eq. C43)}

Shape letters: T tasks, M experts, G modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from apportion.errors import DataError
from apportion.methods.compose.blend import module_groups


@dataclass(frozen=True)
class Experts:
    """A shared delta by tensor, and for every expert the modules that it may edit."""

    delta: Mapping[str, Tensor]
    masks: tuple[frozenset[str], ...]

    def edits(self, weight_M: Tensor) -> dict[str, Tensor]:
        """The residual of some weights over the experts; modules that no active expert masks are left alone."""
        if len(weight_M) != len(self.masks):
            raise DataError(f"{len(weight_M)} weights were given for {len(self.masks)} experts; give one each")
        share: dict[str, float] = {}
        for weight, mask in zip(weight_M.tolist(), self.masks, strict=True):
            for group in mask:
                share[group] = share.get(group, 0.0) + weight
        owner = {name: group for group, names in module_groups(list(self.delta)).items() for name in names}
        return {name: share[owner[name]] * d for name, d in self.delta.items() if share.get(owner[name], 0.0) != 0}


def fit_experts(
    residuals: Sequence[Mapping[str, Tensor]], num_experts: int, max_modules: int, seed: int = 0
) -> Experts:
    """Experts from the residuals of training tasks.

    Tasks are grouped by which modules they edit most; an expert's mask holds the modules that its group edits most, at
    most ``max_modules`` of them. The shared delta is the mean residual of the tasks that edit a tensor.
    """
    edited = [residual for residual in residuals if residual]
    if len(edited) < num_experts or num_experts < 1:
        raise DataError(f"{num_experts} experts need as many tasks with a residual, {len(edited)} were given")
    names = sorted({name for residual in edited for name in residual})
    groups = module_groups(names)
    profile_TG = torch.tensor(
        [
            [sum(float(residual[n].square().sum()) for n in members if n in residual) for members in groups.values()]
            for residual in edited
        ],
        dtype=torch.float64,
    ).sqrt()
    profile_TG = profile_TG / profile_TG.sum(-1, keepdim=True).clamp_min(1e-12)
    label_T = KMeans(num_experts, random_state=seed, n_init=4).fit_predict(profile_TG.numpy())
    listed = list(groups)
    masks = []
    for expert in range(num_experts):
        strength_G = profile_TG[torch.from_numpy(label_T == expert)].mean(0)
        order = strength_G.argsort(descending=True)[:max_modules].tolist()
        masks.append(frozenset(listed[place] for place in order if strength_G[place] > 0))
    delta = {}
    for name in names:
        found = [residual[name] for residual in edited if name in residual]
        delta[name] = torch.stack(found).mean(0)
    return Experts(delta, tuple(masks))
