"""Latency as the loop reads it: predicted by a cost model from what a slice left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from apportion.core.meter import Reading
from apportion.cost.model import CostModel
from apportion.cost.parts import Parts
from apportion.device.meters import flops_by_part
from apportion.models.factored import dense_numbers, work_shares
from apportion.models.network import Network
from apportion.models.quantise import quantised_layers


@dataclass(frozen=True)
class PredictedLatency:
    """A meter that predicts; with ``upper`` it reads the bound instead of the middle.

    Two thin layers are priced as the share of the layer's work that they do; those of an attention module all alike, as
    shares of its projections. ``int8`` predicts for networks that will run quantised; where layers stay in float, the
    time lies between by their share of the operations.
    """

    cost: CostModel
    parts: Parts
    upper: bool = False
    int8: PredictedLatency | None = None
    unit: str = "ms"

    def read(self, model: Network) -> Reading:
        if self.int8 is not None and model.precision == "int8":
            quick = self.int8.read(model)
            share = _float_share(model)
            if not share:
                return quick
            plain = self.read(model.replace(calibration=()))
            return Reading(value=quick.value + share * (plain.value - quick.value), unit=self.unit)
        shares = self.shares(model)
        value_ms = self.cost.upper(shares) if self.upper else self.cost.predict(shares)
        return Reading(value=value_ms, unit=self.unit)

    def shares(self, model: Network) -> dict[str, float]:
        """The share of its work that slicing, factoring and merging tokens left every part."""
        entering = {block: left / of for block, (left, of) in model.edits.tokens.items()}
        shares = self.parts.shares(self.parts.partition.kept_in(model), entering)
        factored = work_shares(model.module)
        for name, layers in self._layers().items() if factored else ():
            whole = {layer: dense_numbers(part) for layer in layers if (part := _find(model.module, layer)) is not None}
            left = sum(numbers * min(1.0, factored.get(layer, 1.0)) for layer, numbers in whole.items())
            if whole:
                shares[name] *= left / sum(whole.values())
        return shares

    def _layers(self) -> dict[str, list[str]]:
        """The layers with a matrix of every priced part: of attention its projections, else the layer itself."""
        heads = {m.name: {member.layer for member in m.members} for m in self.parts.partition if m.kind == "heads"}
        return {part.name: sorted(heads.get(part.name, {part.name})) for part in self.parts.parts if part.flops}


def _float_share(model: Network) -> float:
    """The operations of layers that stay in float, as a share of those of all that int8 could have."""
    if not model.int8.in_float:
        return 0.0
    flops = flops_by_part(model)
    layers = quantised_layers(model.replace(int8=replace(model.int8, in_float=())))
    left = sum(flops.get(name, 0) for name in layers if not model.int8.covers(name))
    return left / max(1, sum(flops.get(name, 0) for name in layers))


def _find(module: nn.Module, name: str) -> nn.Module | None:
    """A layer, or None where it went with a block that was left out."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
