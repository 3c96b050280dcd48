"""Budgets: a vector of limits, written as ``latency<=8ms@torch-cpu-1t, size<=20MB`` or relative, as ``60%``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from apportion.core.meter import Reading
from apportion.errors import BudgetError

CANONICAL_UNIT = {
    "latency": "ms",
    "size": "B",
    "memory": "B",
    "energy": "mJ",
    "params": "params",
    "flops": "FLOPs",
}
"""Each quantity and the unit its readings are in. A bare unit names the first quantity listed with that unit."""

_FACTOR = {  # unit as written -> (canonical unit, factor)
    "us": ("ms", 1e-3),
    "µs": ("ms", 1e-3),  # micro sign
    "μs": ("ms", 1e-3),  # Greek mu
    "ms": ("ms", 1.0),
    "s": ("ms", 1e3),
    "B": ("B", 1.0),
    "KB": ("B", 1e3),
    "kB": ("B", 1e3),
    "MB": ("B", 1e6),
    "GB": ("B", 1e9),
    "TB": ("B", 1e12),
    "KiB": ("B", 2.0**10),
    "MiB": ("B", 2.0**20),
    "GiB": ("B", 2.0**30),
    "mJ": ("mJ", 1.0),
    "J": ("mJ", 1e3),
    **{f"{si}params": ("params", by) for si, by in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{si}FLOPs": ("FLOPs", by) for si, by in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
}
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_LIMIT = re.compile(
    rf"(?:(?P<quantity>[A-Za-z_]+)\s*(?P<relation><=|≤|<|>=|>|=)\s*)?(?P<number>{_NUMBER})\s*"
    rf"(?P<unit>[A-Za-zµμ]+|%)?\s*(?:@\s*(?P<target>[^\s@,]+))?"
)
GRAMMAR = "write it like '8ms', '60%', 'size<=20MB' or 'latency<=8ms@torch-cpu-1t, params<=10Mparams'"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One upper limit: on which quantity, how much, in which unit, on which target.

    A relative limit has the unit ``%`` and a value in (0, 100]; ``Budget.resolve`` turns it into an absolute one.
    """

    quantity: str
    value: float
    unit: str
    target: str | None = None

    def __post_init__(self) -> None:
        if self.quantity not in CANONICAL_UNIT:
            raise BudgetError(
                f"budget names the quantity {self.quantity!r}; possible are {', '.join(CANONICAL_UNIT)}; {GRAMMAR}"
            )
        if not math.isfinite(self.value) or self.value <= 0:
            fault = "not finite" if self.value > 0 else "not positive"
            raise BudgetError(f"budget {self.quantity}<={self.value:g} in {self.unit!r} is {fault}; {GRAMMAR}")
        if self.relative and self.value > 100:
            raise BudgetError(
                f"budget {self.quantity}<={self.value:g}% is above what the model costs now; give at most 100%"
            )
        if not self.relative and self.unit != CANONICAL_UNIT[self.quantity]:
            raise BudgetError(
                f"budget limits {self.quantity!r} in {self.unit!r}, but it is read in "
                f"{CANONICAL_UNIT[self.quantity]!r}; {GRAMMAR}"
            )

    @property
    def relative(self) -> bool:
        return self.unit == "%"

    @property
    def key(self) -> str:
        """The name its readings go by: the quantity, at the target where one is named."""
        return f"{self.quantity}@{self.target}" if self.target else self.quantity

    def __str__(self) -> str:
        target = f"@{self.target}" if self.target else ""
        return f"{self.quantity}<={format_quantity(self.value, self.unit)}{target}"


@dataclass(frozen=True)
class Budget:
    """A vector of limits, all of which must hold."""

    limits: tuple[Limit, ...]

    def __post_init__(self) -> None:
        if not self.limits:
            raise BudgetError(f"the budget is empty; {GRAMMAR}")
        for key in self.keys:
            if sum(limit.key == key for limit in self.limits) > 1:
                raise BudgetError(f"the budget limits {key!r} twice; give each quantity one limit")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Reads the budget language.

        Example:
            >>> str(Budget.parse("8ms@ort-cpu-1t, 20MB"))
            'latency<=8ms@ort-cpu-1t, size<=20MB'
        """
        return cls(tuple(_parse_limit(part.strip()) for part in text.split(",")))

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the readings it is judged on."""
        return tuple(dict.fromkeys(limit.key for limit in self.limits))

    @property
    def relative(self) -> bool:
        return any(limit.relative for limit in self.limits)

    def resolve(self, baseline: Mapping[str, Reading]) -> Budget:
        """The same budget with every relative limit taken of the baseline's reading."""
        return Budget(
            tuple(
                replace(
                    limit,
                    value=limit.value * baseline[limit.key].value / 100,
                    unit=CANONICAL_UNIT[limit.quantity],
                )
                if limit.relative
                else limit
                for limit in self.limits
            )
        )

    def scaled(self, factor: Mapping[str, float]) -> Budget:
        """The same budget with the limits named by key multiplied by a factor."""
        return Budget(tuple(replace(lim, value=lim.value * factor.get(lim.key, 1.0)) for lim in self.limits))

    def slack(self, readings: Mapping[str, Reading], z: float = 0.0) -> dict[str, float]:
        """Limit minus reading (plus ``z`` standard errors) for every limit; all non-negative when the budget is met."""
        return {limit.key: limit.value - self._reading(limit, readings).upper(z) for limit in self.limits}

    def met(self, readings: Mapping[str, Reading], z: float = 0.0) -> bool:
        return all(slack >= 0 for slack in self.slack(readings, z).values())

    def excess(self, readings: Mapping[str, Reading], z: float = 0.0) -> float:
        """How far over the budget the readings are: zero exactly when it is met.

        .. math:: E = \\sum_i \\max(0, (c_i + z\\,\\sigma_i) / B_i - 1)

        For one limit it orders models as their cost does; for several it is the cost the loop drives down.
        """
        return math.fsum(max(0.0, self._reading(limit, readings).upper(z) / limit.value - 1.0) for limit in self.limits)

    def _reading(self, limit: Limit, readings: Mapping[str, Reading]) -> Reading:
        if limit.relative:
            raise BudgetError(f"budget '{self}' is relative; resolve it against a baseline first")
        reading = readings[limit.key]
        if reading.unit != limit.unit:
            raise BudgetError(f"{limit.key} was read in {reading.unit!r}, but the budget limits it in {limit.unit!r}")
        return reading

    def __str__(self) -> str:
        return ", ".join(str(limit) for limit in self.limits)


def _parse_limit(text: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise BudgetError(f"can't read the budget {text!r}; {GRAMMAR}")
    quantity, relation, unit = match["quantity"], match["relation"], match["unit"]
    if relation in (">", ">="):
        raise BudgetError(f"budget {text!r} asks for at least, but a budget is an upper limit; use '<='")
    if quantity is not None:
        quantity = quantity.lower()
        if quantity not in CANONICAL_UNIT:
            raise BudgetError(
                f"budget {text!r} names the quantity {quantity!r}; possible are {', '.join(CANONICAL_UNIT)}"
            )
    value = float(match["number"])
    if unit is None:
        if quantity not in ("params", "flops"):
            raise BudgetError(f"budget {text!r} has no unit; {GRAMMAR}")
        unit = CANONICAL_UNIT[quantity]
    if unit == "%":
        return Limit(quantity=quantity or "latency", value=value, unit="%", target=match["target"])
    if quantity in ("params", "flops") and unit in ("K", "k", "M", "G", "T"):
        unit = unit.upper() + CANONICAL_UNIT[quantity]
    if unit not in _FACTOR:
        raise BudgetError(f"budget {text!r} has the unknown unit {unit!r}; possible are {', '.join(_FACTOR)}, %")
    canonical, factor = _FACTOR[unit]
    if quantity is None:
        quantity = next(name for name, name_unit in CANONICAL_UNIT.items() if name_unit == canonical)
    elif CANONICAL_UNIT[quantity] != canonical:
        fitting = [name for name, (base, _) in _FACTOR.items() if base == CANONICAL_UNIT[quantity]]
        raise BudgetError(f"budget {text!r} limits {quantity} in {unit!r}; its units are {', '.join(fitting)}, %")
    return Limit(quantity=quantity, value=value * factor, unit=canonical, target=match["target"])


def format_quantity(value: float, unit: str) -> str:
    """A value with its unit, scaled to a readable size.

    Example:
        >>> format_quantity(20_000_000, "B"), format_quantity(7.5, "ms")
        ('20MB', '7.5ms')
    """
    if unit in ("B", "params", "FLOPs"):
        for prefix, by in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
            if abs(value) >= by:
                return f"{value / by:.4g}{prefix}{unit}"
        return f"{value:.4g}{unit}"
    return f"{value:.4g}{unit}"
