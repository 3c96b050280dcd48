"""The ways from one rung to the next: on in the precision of the last one, or back in float."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from apportion.core.knob import Knob
from apportion.core.ledger import Row
from apportion.core.loop import Result
from apportion.core.policy import FALLEN
from apportion.methods.compress.quantise import PREFIX
from apportion.methods.compress.repair import PREFIX as REPAIR
from apportion.models.network import Network


@dataclass(frozen=True)
class Way:
    """Where a way starts, what it may turn, and the ledger of its steps with the run that these belong to."""

    start: Network
    knobs: tuple[Knob, ...]
    ledger: Path
    run: str
    name: str


@dataclass(frozen=True)
class Walked:
    """Where a way led, its rows, the steps that were trained for it, and the reading that ways are compared by."""

    result: Result[Network]
    rows: tuple[Row, ...]
    repair_steps: int
    by: str

    @property
    def num_repairs(self) -> int:
        return sum(row.kind == "move" and row.accepted and row.knob == REPAIR for row in self.rows)

    @property
    def stands(self) -> bool:
        """Whether quality has not collapsed on the way; from where it has, repair tells what a reading does not."""
        return self.result.readings["quality"].value >= (1 - FALLEN) * self.rows[0].readings["quality"].value

    @property
    def rank(self) -> tuple[bool, float]:
        """Ways that come to the budget go first, then those that read better, after an early repair if tried."""
        readings = self.result.readings
        for row in reversed(self.rows):
            if row.kind in ("start", "move") and row.accepted:
                break
            if row.kind == "trial" and row.knob == REPAIR:
                readings = row.readings
        return self.result.met, readings[self.by].value


def is_precision(knob: Knob) -> bool:
    return knob.name == PREFIX or knob.name.startswith(f"{PREFIX}.")


def in_float(network: Network) -> Network:
    """The same weights, which are kept in float, without what quantises them."""
    return network.replace(calibration=())
