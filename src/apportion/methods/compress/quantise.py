"""Post-training quantisation as a knob and a rule: int8 through the tools of the target's own runtime."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apportion.core.knob import Choice, Knob, Value
from apportion.core.meter import Meter, Reading
from apportion.device.probe import working_target
from apportion.device.target import Target
from apportion.errors import TargetError
from apportion.models.network import Network
from apportion.models.quantise import simulate
from apportion.tasks.batches import Examples

PREFIX = "quantise"
NUM_EXAMPLES = 32
_RUNTIMES = ("ort", "openvino")


def int8_twin(target: Target) -> Target | None:
    """The int8 target beside an fp32 one, where its runtime can quantise and it works here."""
    if target.runtime not in _RUNTIMES or target.precision != "fp32":
        return None
    try:
        return working_target(target.name.replace(target.runtime, f"{target.runtime}-int8", 1))
    except TargetError:
        return None


def quantise_knob() -> Knob:
    """The precision of the whole network."""
    return Choice(PREFIX, ("int8", "fp32"), granularity="global")


@dataclass(frozen=True)
class Quantise:
    """Gives a network the inputs that its int8 ranges are set by; the runtime quantises when it builds."""

    calibration: Examples

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        return model.replace(calibration=tuple(shaped(self.calibration, model)) if value == "int8" else ())


@dataclass(frozen=True)
class AsRun:
    """Reads quality of what will run: in simulated int8 where a network is to be quantised."""

    meter: Meter[Network]

    @property
    def unit(self) -> str:
        return self.meter.unit

    def read(self, model: Network) -> Reading:
        return self.meter.read(simulate(model) if model.calibration else model)


def shaped(examples: Examples, network: Network, count: int | None = NUM_EXAMPLES) -> list[dict[str, Tensor]]:
    """Examples in batches of exactly the shape of the network's inputs; texts are padded or cut to its length.

    A last batch that would not be full is filled up with copies of the last example.
    """
    size = len(next(iter(network.inputs.values())))
    batches: list[dict[str, Tensor]] = []
    rows = [row for batch in examples.batches for row in _rows(batch, network)][:count]
    while rows:
        chosen, rows = rows[:size], rows[size:]
        chosen += [chosen[-1]] * (size - len(chosen))
        batches.append({name: torch.stack([row[name] for row in chosen]) for name in network.inputs})
    return batches


def _rows(batch: dict[str, Tensor], network: Network) -> list[dict[str, Tensor]]:
    count = len(next(iter(batch.values())))
    return [
        {name: _fitted(batch[name][i], like[0]) if name in batch else like[0] for name, like in network.inputs.items()}
        for i in range(count)
    ]


def _fitted(row: Tensor, like: Tensor) -> Tensor:
    if row.dim() == 1 and not row.is_floating_point():
        row = row[: len(like)]
        return nn.functional.pad(row, (0, len(like) - len(row)))
    return row
