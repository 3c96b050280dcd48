"""The clock of one device as training sees it: latency of relaxed sizes with gradients, bounds of real ones without.

Shape letters: L modules, P priced parts, F factors of a part's share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apportion.cost.bound import num_needed
from apportion.cost.parts import WIDTH, Parts
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError

Sizes = Mapping[str, int]
BLOCKS_GIVE = 1 / 3  # of what is given in all, in the logarithm; widths give the rest


@dataclass(frozen=True)
class Clock:
    """A profile over the parts it prices; budgets are shares ``rho`` of ``whole_ms``."""

    profile: Profile
    parts: Parts
    module_PF: Tensor
    offset_PF: Tensor
    slope_PF: Tensor
    width_PF: Tensor
    block_P: Tensor

    @classmethod
    def of(cls, profile: Profile, parts: Parts) -> Clock:
        parts = parts.seen(grid=profile.grid, widths=profile.widths)
        if parts.signature_of != dict(profile.cost.law.signature_of):
            raise CostError(f"the profile of {profile.model} prices other parts than this network has; calibrate again")
        place = {module.name: index for index, module in enumerate(parts.partition)}
        factors: dict[str, list[tuple[int, float, float, int]]] = {part.name: [] for part in parts.parts}
        for module in parts.partition:
            if module.kind == "heads":
                factors[module.name].append((place[module.name], 0.0, 1.0, 0))
                continue
            if f"{WIDTH}{module.name}" in factors:
                factors[f"{WIDTH}{module.name}"].append((place[module.name], 0.0, 1.0, 0))
            for member in module.members:
                if member.layer in factors:
                    share = sum(unit >= 0 for unit in member.units) / len(member.units)
                    factors[member.layer].append((place[module.name], 1.0 - share, share, len(member.units)))
        most = max(map(len, factors.values()))
        padded = [rows + [(0, 1.0, 0.0, 0)] * (most - len(rows)) for rows in factors.values()]
        blocks = _block_units(parts)
        held = [part.blocks[-1] if part.blocks else None for part in parts.parts]
        return cls(
            profile,
            parts,
            torch.tensor([[row[0] for row in rows] for rows in padded]),
            torch.tensor([[row[1] for row in rows] for rows in padded]),
            torch.tensor([[row[2] for row in rows] for rows in padded]),
            torch.tensor([[row[3] for row in rows] for rows in padded]),
            torch.tensor([blocks.get(name, len(blocks)) if name else len(blocks) for name in held]),
        )

    @property
    def confidence(self) -> float:
        """The share of networks like those it was calibrated on for which the bound holds."""
        return 1.0 if self.profile.cost.bound is None else 1.0 - self.profile.cost.bound.alpha

    def at(self, confidence: float) -> Clock:
        """The same clock with a bound for another confidence, at most that of its calibration.

        Calibration keeps one quantile of its scores, which holds for every lower confidence, too; the allowance for
        drift is taken at the confidence asked for.

        Raises:
            CostError: more than what was calibrated for.
        """
        bound = self.profile.cost.bound
        if bound is None or math.isclose(confidence, self.confidence):
            return self
        if confidence > self.confidence:
            needed = num_needed(1 - confidence, bound.num_menu, bound.method)
            raise CostError(
                f"the bound of {self.name} was calibrated for a confidence of {self.confidence:g} on "
                f"{min(bound.counts)} scores and says nothing about {confidence:g}, which takes {needed}; ask for "
                "less, or measure (--verify)"
            )
        cost = replace(self.profile.cost, bound=replace(bound, alpha=1 - confidence))
        return replace(self, profile=replace(self.profile, cost=cost))

    @property
    def name(self) -> str:
        return self.profile.target.name

    @property
    def whole_ms(self) -> float:
        return self.profile.baseline.value

    def ratio(self, fraction_L: Tensor) -> Tensor:
        """Predicted latency of relaxed fractions as a share of the whole network's, with gradients."""
        names = [part.name for part in self.parts.parts]
        whole = self.profile.cost.predict(dict.fromkeys(names, 1.0))
        return self.profile.cost.predict_tensor(self.shares(fraction_L), names, ramp=0.05) / whole

    def shares(self, fraction_L: Tensor) -> Tensor:
        """The share of its work that relaxed fractions leave every part, shape (P,)."""
        factor_PF = self.offset_PF + self.slope_PF * fraction_L[self.module_PF]
        return factor_PF.prod(1) * self._block_gates(fraction_L)[self.block_P]

    def _block_gates(self, fraction_L: Tensor) -> Tensor:
        """The keep gate of every block, and a one for parts outside of blocks."""
        gates = [torch.ones(1)]
        for index, module in reversed(list(enumerate(self.parts.partition))):
            if module.blocks:
                rank = torch.tensor([module.order.index(unit) for unit in range(module.num_units)])
                gates.insert(0, (fraction_L[index] * module.num_units - rank).clamp(0, 1))
        return torch.cat(gates)

    def relaxed_upper_ms(self, fraction_L: Tensor) -> float:
        """The bound of what relaxed fractions are predicted to take."""
        names = [part.name for part in self.parts.parts]
        return self.profile.cost.upper(dict(zip(names, self.shares(fraction_L).clamp(0, 1).tolist(), strict=True)))

    def upper_ms(self, sizes: Sizes) -> float:
        """What the clock will not exceed for real sizes, at the profile's confidence."""
        return self.profile.cost.upper(self._exact(sizes))

    def predict_ms(self, sizes: Sizes) -> float:
        return self.profile.cost.predict(self._exact(sizes))

    def _exact(self, sizes: Sizes) -> dict[str, float]:
        """``Parts.shares`` of sizes, from the tables here, since solvers ask often."""
        modules = self.parts.partition
        fraction_L = torch.tensor([sizes.get(m.name, m.num_units) / m.num_units for m in modules], dtype=torch.float64)
        factor_PF = self.offset_PF + self.slope_PF * fraction_L[self.module_PF]
        if self.parts.grid > 1:
            kept_PF = (factor_PF * self.width_PF).round()
            rounded_PF = torch.minimum((kept_PF / self.parts.grid).ceil() * self.parts.grid, self.width_PF)
            factor_PF = torch.where(self.width_PF > 0, rounded_PF / self.width_PF.clamp_min(1), factor_PF)
        share_P = factor_PF.prod(1) * self._block_gates(fraction_L)[self.block_P]
        names = (part.name for part in self.parts.parts)
        return dict(zip(names, share_P.clamp(0, 1).tolist(), strict=True))

    def prices(self) -> Tensor:
        """The share of the whole latency that goes when a module alone goes to its least, shape (L,)."""
        modules = list(self.parts.partition)
        whole = self.predict_ms({})
        saved = [whole - self.predict_ms({module.name: module.sizes()[0]}) for module in modules]
        return torch.tensor([max(value, 0.0) for value in saved]) / whole

    def features(self) -> Tensor:
        """What the router sees of a device: the shares of heads, neurons or channels, and blocks, and of the rest."""
        price_L = self.prices()
        kinds = [module.kind for module in self.parts.partition]
        of = {
            name: sum(float(p) for p, kind in zip(price_L, kinds, strict=True) if kind in some)
            for name, some in (("heads", ("heads",)), ("wide", ("neurons", "channels")), ("blocks", ("blocks",)))
        }
        return torch.tensor([of["heads"], of["wide"], of["blocks"], 1.0 - of["heads"] - of["wide"]])

    def floor_ms(self) -> float:
        """The bound of the smallest network."""
        return self.upper_ms({module.name: module.sizes()[0] for module in self.parts.partition})


def spread_start(clocks: Sequence[Clock], knots: Sequence[float]) -> Tensor:
    r"""Fractions at every knot that cost it on average over the devices, spread evenly over the modules (eq. A13).

    .. math:: b_\ell = \gamma^{2/3} \text{ for widths}, \qquad b_\ell = \gamma^{1/3} \text{ for blocks}

    Widths are of two kinds, heads and neurons, and blocks are one: each of the three dimensions gives as much.
    """
    blocks_L = torch.tensor([bool(module.blocks) for module in clocks[0].parts.partition])
    power_L = torch.where(blocks_L, BLOCKS_GIVE, 1 - BLOCKS_GIVE)
    rows = []
    for rho in knots:
        low, high = 1e-6, 1.0
        for _ in range(18):
            gamma = 0.5 * (low + high)
            cost = sum(float(clock.ratio(gamma**power_L)) for clock in clocks) / len(clocks)
            low, high = (gamma, high) if cost < rho else (low, gamma)
        rows.append(low**power_L if rho < 1 else torch.ones(len(blocks_L)))
    return torch.stack(rows)


def _block_units(parts: Parts) -> dict[str, int]:
    names = [name for module in parts.partition for name, _ in module.blocks]
    return {name: number for number, name in enumerate(names)}
