"""What every value of every knob loses and saves alone: the table that priced and exact plan with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.core.knob import Knob, Setting, Value
from apportion.core.ledger import Row
from apportion.core.meter import Reading


@dataclass(frozen=True)
class Table:
    r"""Additive sensitivities: readings of each value alone, against the start (eq. M1).

    .. math:: \Delta Q_{kv} = Q(M_0) - Q(T(M_0, k, v)), \quad \Delta C_{kv} = C(T(M_0, k, v)) - C(M_0)

    ``start`` holds the readings of :math:`M_0`, ``alone`` those of :math:`T(M_0, k, v)` by knob name and value. It is
    read off the ledger, so a resumed run reads nothing twice. Knobs that restore quality instead of saving cost have no
    place in it.
    """

    knobs: tuple[Knob, ...]
    quality: str
    start: Mapping[str, Reading]
    alone: Mapping[tuple[str, Value], Mapping[str, Reading]]

    @classmethod
    def of(cls, knobs: Sequence[Knob], rows: Sequence[Row], quality: str) -> Table:
        """The table as far as a ledger holds it: every row proposed before the run left its start."""
        alone: dict[tuple[str, Value], Mapping[str, Reading]] = {}
        for row in rows[1:]:
            if row.knob is not None and row.value is not None:
                alone.setdefault((row.knob, row.value), row.readings)
            if row.kind == "move" and row.accepted:
                break
        saving = tuple(knob for knob in knobs if not knob.restores)
        return cls(saving, quality, rows[0].readings, alone)

    def missing(self) -> list[tuple[Knob, Value]]:
        """What has still to be read, knob by knob, each from its dearest value down."""
        return [
            (knob, value)
            for knob in self.knobs
            for value in reversed(knob.values[:-1])
            if (knob.name, value) not in self.alone
        ]

    def knows(self, knob: Knob, value: Value) -> bool:
        return value == knob.dearest or (knob.name, value) in self.alone

    def loss(self, knob: Knob, value: Value) -> float:
        """Quality lost by this value alone; negative where it gains."""
        return self.start[self.quality].value - self._reading(knob, value, self.quality).value

    def cost(self, knob: Knob, value: Value, key: str, z: float = 0.0) -> float:
        """Change of a cost by this value alone, judged at ``z`` standard errors; negative where it saves."""
        return self._reading(knob, value, key).upper(z) - self.start[key].upper(z)

    def predict_loss(self, setting: Setting) -> float:
        """Quality lost by a whole setting, if losses add up (eq. M2)."""
        return sum(self.loss(knob, setting[knob.name]) for knob in self.knobs)

    def predict_cost(self, setting: Setting, key: str, z: float = 0.0) -> float:
        """What a whole setting costs, if changes add up (eq. M2)."""
        return self.start[key].upper(z) + sum(self.cost(knob, setting[knob.name], key, z) for knob in self.knobs)

    def _reading(self, knob: Knob, value: Value, key: str) -> Reading:
        readings = self.start if value == knob.dearest else self.alone[knob.name, value]
        return readings[key]
