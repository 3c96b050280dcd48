"""The iso-cost band: which costs count as equal to the anchor's, on every device and quantity at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from apportion.core.budget import format_quantity
from apportion.core.meter import Reading
from apportion.errors import BudgetError
from apportion.numerics.propagate import Sides, safe_band, true_band

Costs: TypeAlias = Mapping[str, Reading]
Kind: TypeAlias = Literal["relative", "log"]


@dataclass(frozen=True, kw_only=True)
class Band:
    r"""Costs within a tolerance of the anchor, for every key (eq. I13).

    .. math:: \mathrm{LCB}(g_j') \ge (1 - \tau_j)\,\mathrm{UCB}(B_j), \qquad
        \mathrm{UCB}(g_j') \le (1 + \tau_j)\,\mathrm{LCB}(B_j)

    Bounds are ``z`` standard errors; readings without error give the plain band. A ``log`` band is
    :math:`|\log g_j' - \log B_j| \le \tau_j`. With ``eta`` the band is for estimates and shrinks (eq. I11), so that
    true costs keep to ``tolerance``. A ``one_sided`` band has no lower end.
    """

    anchor: Costs
    tolerance: Mapping[str, float]
    kind: Kind = "relative"
    z: float = 0.0
    eta: float = 0.0
    one_sided: bool = False

    def __post_init__(self) -> None:
        for key, reading in self.anchor.items():
            tau = self.tolerance.get(key, math.nan)
            if not 0.0 < tau < 1.0:
                raise BudgetError(f"the tolerance on {key} is {tau!r}; give a share above 0 and below 1, such as 3%")
            if reading.value <= 0.0:
                raise BudgetError(f"the anchor's {key} is {reading.value!r} {reading.unit}; it must be above 0")
            if self.eta and safe_band(tau, self.eta) is None:
                raise BudgetError(
                    f"costs are estimated within {self.eta:.1%}, wider than the tolerance of {tau:.1%} on {key}; "
                    "calibrate better, allow more, or measure every candidate"
                )

    @classmethod
    def around(cls, anchor: Costs, tolerance: float, **options: object) -> Band:
        """A band with one tolerance for all keys."""
        return cls(anchor=dict(anchor), tolerance=dict.fromkeys(anchor, tolerance), **options)  # type: ignore[arg-type]

    def sides(self, key: str) -> Sides:
        """How far below and above the anchor's value readings of a key may lie."""
        tau = self.tolerance[key]
        if self.kind == "log":
            return Sides(1.0 - math.exp(-tau), math.exp(tau) - 1.0)
        safe = safe_band(tau, self.eta)
        assert safe is not None  # checked when the band was made
        return safe

    def limits(self, key: str) -> tuple[float, float]:
        """The least and the largest cost of a key."""
        anchor, sides = self.anchor[key], self.sides(key)
        low = -math.inf if self.one_sided else (1.0 - sides.below) * anchor.upper(self.z)
        return low, (1.0 + sides.above) * anchor.lower(self.z)

    def position(self, costs: Costs) -> int:
        """0 inside, 1 where some cost is too high, -1 where some is too low, 2 where both happen."""
        high = low = False
        for key in self.anchor:
            least, most = self.limits(key)
            high |= costs[key].upper(self.z) > most
            low |= costs[key].lower(self.z) < least
        return 2 if high and low else int(high) - int(low)

    def holds(self, costs: Costs) -> bool:
        return self.position(costs) == 0

    def deviation(self, costs: Costs) -> float:
        """The largest relative distance from the anchor in units of its tolerance; the finite set is searched by it."""
        return max(abs(self._distance(key, costs)) / self.tolerance[key] for key in self.anchor)

    def excess(self, costs: Costs) -> float:
        """How far outside the band, relative to the anchor: zero exactly when it holds."""
        total = 0.0
        for key, anchor in self.anchor.items():
            least, most = self.limits(key)
            total += max(0.0, costs[key].upper(self.z) - most, least - costs[key].lower(self.z)) / anchor.value
        return total

    def explain(self, costs: Costs) -> str:
        """A line on which key misses the band and by how much."""
        for key in self.anchor:
            least, most = self.limits(key)
            reading = costs[key]
            if reading.upper(self.z) > most or reading.lower(self.z) < least:
                low = "" if self.one_sided else f"{format_quantity(least, reading.unit)} to "
                return (
                    f"{key} {format_quantity(reading.value, reading.unit)} is outside "
                    f"{low}{format_quantity(most, reading.unit)}"
                )
        return "inside"

    def true_sides(self, key: str, eta: float, *, anchor_measured: bool) -> Sides:
        """Where true costs of a key can lie when its estimates are right within ``eta`` (eq. I8)."""
        return true_band(self.sides(key).widest, eta, anchor_eta=0.0 if anchor_measured else None)

    def _distance(self, key: str, costs: Costs) -> float:
        ratio = costs[key].value / self.anchor[key].value
        if self.one_sided and ratio <= 1.0:
            return 0.0
        return math.log(ratio) if self.kind == "log" and ratio > 0.0 else ratio - 1.0
