"""The clock of one device as training sees it: latency of relaxed sizes with gradients, bounds of real ones without.

Shape letters: L modules, P priced parts with work of their own, F factors of a part's share, S sides that are written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apportion.cost.bound import num_needed
from apportion.cost.parts import WRITTEN, Part, Parts
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError

Sizes = Mapping[str, int]
BLOCKS_GIVE = 1 / 3  # of what is given in all, in the logarithm; widths give the rest


@dataclass(frozen=True)
class Factors:
    """Shares as products: of a line in the fraction of a module for each factor, and of the gate of a block.

    ``width_PF`` counts the channels of a factor, 0 where they come in no multiples, and ``grid_PF`` is their multiple.
    """

    module_PF: Tensor
    offset_PF: Tensor
    slope_PF: Tensor
    width_PF: Tensor
    grid_PF: Tensor
    block_P: Tensor

    @classmethod
    def of(cls, parts: Parts, wanted: Mapping[str, Part], sides: Collection[str]) -> Factors:
        """What makes the shares of these parts, by the sides named alone."""
        place = {module.name: index for index, module in enumerate(parts.partition)}
        rows: dict[str, list[tuple[int, float, float, int, int]]] = {name: [] for name in wanted}
        for module in parts.partition:
            if module.kind == "heads":
                if module.name in rows:
                    rows[module.name].append((place[module.name], 0.0, 1.0, 0, 1))
                continue
            for member in module.members:
                if member.layer in rows and member.side in sides:
                    share = sum(unit >= 0 for unit in member.units) / len(member.units)
                    grid = parts.view.grid if member.side == "out" else parts.view.grid_in
                    rows[member.layer].append((place[module.name], 1.0 - share, share, len(member.units), grid))
        most = max(map(len, rows.values()), default=0)
        padded = [row + [(0, 1.0, 0.0, 0, 1)] * (most - len(row)) for row in rows.values()]
        blocks = _block_units(parts)
        held = [part.blocks[-1] if part.blocks else None for part in wanted.values()]
        module_PF, offset_PF, slope_PF, width_PF, grid_PF = (
            torch.tensor([[one[column] for one in row] for row in padded]) for column in range(5)
        )
        block_P = torch.tensor([blocks.get(name, len(blocks)) if name else len(blocks) for name in held])
        return cls(module_PF, offset_PF, slope_PF, width_PF, grid_PF, block_P)

    def share(self, fraction_L: Tensor, gate_B: Tensor, *, on_grid: bool) -> Tensor:
        """The shares of fractions, shape (P,): relaxed ones with gradients, or on the grid, where channels count."""
        factor_PF = self.offset_PF + self.slope_PF * fraction_L[self.module_PF]
        if on_grid:
            kept_PF = (factor_PF * self.width_PF).round()
            rounded_PF = torch.minimum((kept_PF / self.grid_PF).ceil() * self.grid_PF, self.width_PF)
            factor_PF = torch.where(self.width_PF > 0, rounded_PF / self.width_PF.clamp_min(1), factor_PF)
        return factor_PF.prod(1) * gate_B[self.block_P]


@dataclass(frozen=True)
class Clock:
    """A profile over the parts it prices; budgets are shares ``rho`` of ``whole_ms``.

    ``worked`` says how sizes become the shares of parts, and ``written`` how they become the shares of its activations
    that every layer writes, where these have a price; ``weight_S`` is what each has of them all. ``scale`` takes the
    profile's milliseconds to those of this clock.
    """

    profile: Profile
    parts: Parts
    worked: Factors
    written: Factors | None
    weight_S: Tensor
    scale: float = 1.0

    @classmethod
    def of(cls, profile: Profile, parts: Parts) -> Clock:
        parts = parts.seen(profile.view)
        if parts.signature_of != dict(profile.cost.law.signature_of):
            raise CostError(f"the profile of {profile.model} prices other parts than this network has; calibrate again")
        worked = {part.name: part for part in parts.parts if part.name != WRITTEN}
        written = {name: part for name, part in worked.items() if name in parts.written}
        weight_S = torch.tensor([parts.written[name] for name in written])
        return cls(
            profile,
            parts,
            Factors.of(parts, worked, ("in", "out")),
            Factors.of(parts, written, ("out",)) if parts.view.activations else None,
            weight_S / weight_S.sum(),
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
        return self.scale * self.profile.baseline.value

    def beside(self, other: Clock, share: float) -> Clock:
        """The same in another clock's milliseconds, of whose whole network this one's takes a share, as measured.

        Two profiles are calibrated one after the other, and a machine may move in between.
        """
        return replace(self, scale=share * other.whole_ms / self.profile.baseline.value)

    def ratio(self, fraction_L: Tensor) -> Tensor:
        """Predicted latency of relaxed fractions as a share of the whole network's, with gradients."""
        names = [part.name for part in self.parts.parts]
        whole = self.profile.cost.predict(dict.fromkeys(names, 1.0))
        return self.profile.cost.predict_tensor(self.shares(fraction_L), names, ramp=0.05) / whole

    def shares(self, fraction_L: Tensor, *, on_grid: bool = False) -> Tensor:
        """The share of its work that fractions leave every part, shape (P,): relaxed ones, or real ones on the grid."""
        gate_B = self._block_gates(fraction_L)
        share_P = self.worked.share(fraction_L, gate_B, on_grid=on_grid)
        if self.written is None:
            return share_P
        share_S = self.written.share(fraction_L, gate_B, on_grid=on_grid)
        return torch.cat([share_P, (self.weight_S.to(share_S) @ share_S)[None]])  # activations are the last part

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
        shares = dict(zip(names, self.shares(fraction_L).clamp(0, 1).tolist(), strict=True))
        return self.scale * self.profile.cost.upper(shares)

    def upper_ms(self, sizes: Sizes) -> float:
        """What the clock will not exceed for real sizes, at the profile's confidence."""
        return self.scale * self.profile.cost.upper(self._exact(sizes))

    def predict_ms(self, sizes: Sizes) -> float:
        return self.scale * self.profile.cost.predict(self._exact(sizes))

    def _exact(self, sizes: Sizes) -> dict[str, float]:
        """``Parts.shares`` of sizes, from the tables here, since solvers ask often."""
        modules = self.parts.partition
        fraction_L = torch.tensor([sizes.get(m.name, m.num_units) / m.num_units for m in modules], dtype=torch.float64)
        share_P = self.shares(fraction_L, on_grid=True)
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
