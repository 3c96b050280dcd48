"""Latency as the loop reads it: predicted by a cost model from what a slice left."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.core.meter import Reading
from apportion.cost.model import CostModel
from apportion.cost.parts import Parts
from apportion.models.channels import num_channels
from apportion.models.network import Network


@dataclass(frozen=True)
class PredictedLatency:
    """A meter that predicts; with ``upper`` it reads the bound instead of the middle.

    ``int8`` is the cost model for networks that will run quantised.
    """

    cost: CostModel
    parts: Parts
    upper: bool = False
    int8: CostModel | None = None
    unit: str = "ms"

    def read(self, model: Network) -> Reading:
        shares = self.parts.shares(self.parts.partition.kept_in(model))
        for name, rank in model.edits.ranks.items():  # two thin layers do this share of the layer's work
            if name in shares:
                layer = model.module.get_submodule(name)
                inner, outer = num_channels(layer, "in"), num_channels(layer, "out")
                shares[name] *= min(1.0, rank * (inner + outer) / (inner * outer))
        cost = self.int8 if self.int8 is not None and model.precision == "int8" else self.cost
        value_ms = cost.upper(shares) if self.upper else cost.predict(shares)
        return Reading(value=value_ms, unit=self.unit)
