"""A network: a module with what is needed to run, cut and save it; rules take one and return another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Readout = Literal["embedding", "logits", "token-logits"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a network came from: the reference as given, and the folder or factory that it names."""

    ref: str
    folder: Path | None = None
    factory: str | None = None


@dataclass(frozen=True, kw_only=True)
class Edits:
    """What slicing and factoring did to the architecture, enough to repeat it on a freshly built one.

    ``widths`` maps a layer and a side (``out`` or ``in``) to its new number of channels, ``attributes`` a module and
    attribute to the new value, ``skips`` names the blocks left out and their number of outputs; ``keep`` says which
    units of each module are left; ``ranks`` the layers that two of a lower rank stand for; ``tokens`` the blocks that
    merge tokens, with how many at most enter of how many.
    """

    widths: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    skips: Mapping[str, int] = field(default_factory=dict)
    keep: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Int8:
    """How a runtime quantises a network: a recipe, and what stays in float all the same.

    ``activations`` are unsigned or signed; ``scope`` is the layers with weights alone, or what lies between them, too
    (sums, activations, pooling), so that numbers stay in int8 from layer to layer, or ``dynamic``: linear layers, with
    ranges taken anew from every input, signed where torch runs them and unsigned in ONNX Runtime; ``in_float`` names
    modules that are left out with all that is in them. OpenVINO's tool has its own mind on the first two.
    """

    activations: Literal["uint8", "int8"] = "uint8"
    scope: Literal["layers", "graph", "dynamic"] = "layers"
    in_float: tuple[str, ...] = ()

    @property
    def by_torch(self) -> bool:
        """Whether torch itself runs it, by torchao."""
        return self.scope == "dynamic" and self.activations == "int8"

    @property
    def mixes(self) -> bool:
        """Whether single layers can stay in float; ONNX Runtime can't open a half-dynamic attention."""
        return self.scope != "dynamic" or self.by_torch

    def covers(self, layer: str) -> bool:
        """Whether a layer is quantised."""
        return not any(layer == part or layer.startswith(f"{part}.") for part in self.in_float)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A module, inputs of the shape it is priced at, and its origin; treated as immutable.

    Where ``calibration`` holds inputs of that shape, the network is run in int8, with ranges set by them; ``int8`` says
    how.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]
    origin: Origin
    readout: Readout
    pooling: Literal["mean", "cls"] = "mean"
    edits: Edits = field(default_factory=Edits)
    calibration: tuple[Mapping[str, Tensor], ...] = ()
    int8: Int8 = field(default_factory=Int8)

    @property
    def precision(self) -> Literal["fp32", "int8"]:
        return "int8" if self.calibration else "fp32"

    @property
    def takes_text(self) -> bool:
        return "input_ids" in self.inputs

    def replace(self, **changes: Any) -> Network:
        return replace(self, **changes)


def forward(module: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Runs a module on named inputs; inputs named ``0``, ``1``, … are passed by position."""
    positional = [inputs[key] for key in sorted((key for key in inputs if key.isdigit()), key=int)]
    named: dict[str, Any] = {key: value for key, value in inputs.items() if not key.isdigit()}
    if "use_cache" in getattr(getattr(module, "config", None), "__dict__", {}):
        named["use_cache"] = False
    return module(*positional, **named)


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Makes every forward pass leave an autograd graph, in evaluation mode; puts all back afterwards."""
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point()]
    was_training = [part for part in module.modules() if part.training]
    module.eval()
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for part in was_training:
            part.training = True


def float_outputs(output: Any) -> list[Tensor]:
    """All floating-point tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [tensor for value in values for tensor in float_outputs(value)]


def read_out(network: Network, inputs: Mapping[str, Tensor]) -> Tensor:
    """What quality is judged on, one row per example: a unit embedding, class logits, or logits at every token.

    Shapes: ``(N, D)`` for embeddings and logits, ``(N, T, V)`` for token logits.
    """
    return read_output(network, forward(network.module, inputs), inputs)


def read_output(network: Network, output: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The same from an output computed elsewhere."""
    if network.readout in ("logits", "token-logits"):
        if isinstance(output, tuple):
            return output[0]
        return output if isinstance(output, Tensor) else output.logits
    hidden = output if isinstance(output, Tensor) else float_outputs(output)[0]
    if hidden.dim() == 4:  # feature maps (N, C, H, W)
        hidden = hidden.mean((2, 3))
    elif hidden.dim() == 3:
        if network.pooling == "cls":
            hidden = hidden[:, 0]
        elif "attention_mask" in inputs:
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            hidden = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        else:
            hidden = hidden.mean(1)
    return torch.nn.functional.normalize(hidden, dim=-1)
