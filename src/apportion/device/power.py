"""Power: watts that were given, or read once elsewhere, to model energy by where there is no counter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from apportion.core.meter import Reading


@dataclass(frozen=True, kw_only=True)
class Power:
    """Watts with their standard error, and in words where they come from."""

    watts: float
    source: str
    stderr_watts: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.watts < math.inf and 0 <= self.stderr_watts < math.inf):
            raise ValueError(f"{self.watts!r} ± {self.stderr_watts!r} W is no power; give a number above 0")

    def at(self, latency: Reading) -> Power:
        """The same, whatever runs."""
        return self

    def explain(self) -> str:
        """In words, with where it comes from."""
        error = f" ± {self.stderr_watts:.2g}" if self.stderr_watts else ""
        return f"{self.watts:.3g}{error} W {self.source}"


def modelled_energy(latency: Reading, power: Power) -> Reading:
    r"""Millijoules of a pass that takes so many milliseconds at so many watts (eq. K30).

    .. math:: \hat e = P t, \qquad \sigma_e^2 = (t\, \sigma_P)^2 + (P\, \sigma_t)^2

    ``latency`` is :math:`t` and ``power`` is :math:`P`, whose errors are taken to be independent.
    """
    assert latency.unit == "ms", latency.unit
    stderr_mj = math.hypot(latency.value * power.stderr_watts, power.watts * latency.stderr)
    return Reading(value=latency.value * power.watts, unit="mJ", stderr=stderr_mj, count=latency.count)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What one network drew: watts by its energy over its latency."""

    latency_ms: float
    watts: float
    stderr_watts: float

    def __post_init__(self) -> None:
        if not (0 < self.latency_ms < math.inf and 0 < self.watts < math.inf and 0 <= self.stderr_watts < math.inf):
            raise ValueError(f"{self.watts!r} ± {self.stderr_watts!r} W over {self.latency_ms!r} ms is no power")

    @classmethod
    def of(cls, energy: Reading, latency: Reading) -> Drawn:
        watts = energy.value / latency.value
        relative = math.hypot(energy.stderr / energy.value, latency.stderr / latency.value)
        return cls(latency_ms=latency.value, watts=watts, stderr_watts=watts * relative)


@dataclass(frozen=True, kw_only=True)
class PowerCurve:
    """The power of a whole network and of its cheapest slice on a target; ``source`` is the counter it was read by."""

    whole: Drawn
    cheapest: Drawn
    source: str

    def at(self, latency: Reading) -> Power:
        r"""Watts at a latency: linear between the two, and that of the nearer one outside (eq. K31).

        .. math:: P(t) = P_0 + \frac{t - t_0}{t_1 - t_0} (P_1 - P_0), \qquad \sigma_P = \max(\sigma_0, \sigma_1)

        :math:`t_0 \le t_1` are the latencies of the two. Outside, half of :math:`|P_1 - P_0|` is added to the error.
        """
        low, high = sorted((self.cheapest, self.whole), key=lambda drawn: drawn.latency_ms)
        span_ms = high.latency_ms - low.latency_ms
        share = (latency.value - low.latency_ms) / span_ms if span_ms else 0.5
        stderr_watts = max(low.stderr_watts, high.stderr_watts)
        if not low.latency_ms <= latency.value <= high.latency_ms:
            stderr_watts += abs(high.watts - low.watts) / 2
        watts = low.watts + min(1.0, max(0.0, share)) * (high.watts - low.watts)
        return Power(watts=watts, stderr_watts=stderr_watts, source=self.source)

    def explain(self) -> str:
        """In words."""
        whole, cheapest = self.whole, self.cheapest
        return (
            f"draws {whole.watts:.3g} ± {whole.stderr_watts:.2g} W, "
            f"the smallest {cheapest.watts:.3g} ± {cheapest.stderr_watts:.2g} W, by {self.source}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PowerCurve:
        whole, cheapest = (
            Drawn(**{key: float(value) for key, value in fields[name].items()}) for name in ("whole", "cheapest")
        )
        return cls(whole=whole, cheapest=cheapest, source=str(fields["source"]))
