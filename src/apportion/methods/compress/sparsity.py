"""Sparsity as knobs and a rule: zeros inside weights, anywhere or N of every M kept.

What it changes: the saved file, which leaves zeros out (``models.sparse``), and so a budget on ``size``. What it does
not: parameters and operations as counted, and latency, as every target here runs dense kernels. So knobs are offered
only for budgets on size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from apportion.core.budget import Budget
from apportion.core.knob import Choice, Knob, Value
from apportion.errors import KnobError
from apportion.methods.compress.layers import find_layer, plain_layers
from apportion.methods.compress.rows import observe
from apportion.methods.compress.rulenames import parse_pattern
from apportion.models.factored import Factored, matrix
from apportion.models.network import Network
from apportion.tasks.batches import Examples

PREFIX = "sparse"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.3)
Score = Literal["wanda", "magnitude"]


def sparse_knobs(
    network: Network, budget: Budget, *, shares: Sequence[float] = SHARES, patterns: Sequence[str] = ()
) -> list[Knob]:
    """One knob per layer, none unless the budget limits the size.

    Args:
        shares: of zeros; 0 is the layer as it is.
        patterns: such as ``("2:4",)`` instead of shares: of every four weights in a row at most two are not zero. The
            dearest value keeps all of them, ``"4:4"``.
    """
    if not any(limit.quantity == "size" for limit in budget.limits):
        return []
    values: tuple[Value, ...]
    if patterns:
        by_share = sorted((parse_pattern(pattern)[0] / parse_pattern(pattern)[1], pattern) for pattern in patterns)
        most = max(parse_pattern(pattern)[1] for pattern in patterns)
        values = (*(pattern for share, pattern in by_share if share < 1), f"{most}:{most}")
    else:
        if not all(0 < share < 1 for share in shares):
            raise KnobError(f"shares of zeros must lie between 0 and 1, got {list(shares)}")
        values = (*sorted(shares, reverse=True), 0.0)
    return [Choice(f"{PREFIX}.{name}", values) for name in plain_layers(network)]


@dataclass(frozen=True)
class Sparsify:
    r"""Sets the weights of a layer to zero that matter least (eq. P8).

    .. math:: s_{ij} = |W_{ij}| \cdot \|x_j\|_2 \quad\text{(wanda)}, \qquad s_{ij} = |W_{ij}| \quad\text{(magnitude)}

    :math:`x_j` is what the layer reads on the examples, of the model as it stands; a kernel's places share their
    channel's norm. By ``wanda`` the share of zeros holds in every row, by ``magnitude`` in the layer as a whole; a
    pattern N:M holds in every M weights in a row (eq. P9). What is zero stays zero, so larger shares are nested. In a
    factored layer both factors get it.
    """

    examples: Examples
    score: Score = "wanda"

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        knob.check(value)
        name = knob.name.removeprefix(f"{PREFIX}.")
        layer = find_layer(model.module, name)
        if layer is None or value == knob.dearest:
            return model
        parts = [f"{name}.down", f"{name}.up"] if isinstance(layer, Factored) else [name]
        norms = self._norms(model, parts)
        module = copy.deepcopy(model.module)
        for part in parts:
            holder = module.get_submodule(part)
            score_OI = matrix(holder).abs()
            if part in norms:
                score_OI = score_OI * norms[part].repeat_interleave(score_OI.shape[1] // len(norms[part]))
            if isinstance(value, str):
                keep_OI = keep_pattern(score_OI, *parse_pattern(value))
            else:
                keep_OI = keep_largest(score_OI if self.score == "wanda" else score_OI.reshape(1, -1), float(value))
            _set_zero(holder, keep_OI.reshape(score_OI.shape))
        return model.replace(module=module)

    def _norms(self, model: Network, parts: Sequence[str]) -> dict[str, Tensor]:
        """The norm of every input channel of the layers named; none where the score does not need them."""
        if self.score == "magnitude":
            return {}
        square: dict[str, Tensor] = {}

        def see(name: str, x_RC: Tensor, _y: Tensor) -> None:
            square[name] = square.get(name, 0) + x_RC.double().square().sum(0)

        observe(model, self.examples, parts, see)
        return {
            name: square_C.sqrt().to(model.module.get_parameter(f"{name}.weight").dtype)
            for name, square_C in square.items()
        }


def keep_largest(score_GI: Tensor, zero_share: float) -> Tensor:
    """Of every row of scores, all places but the share that scores least; of equal ones the first stays."""
    num_zeros = round(zero_share * score_GI.shape[1])
    last_GI = score_GI.argsort(dim=1, descending=True, stable=True)[:, score_GI.shape[1] - num_zeros :]
    return torch.ones_like(score_GI, dtype=torch.bool).scatter(1, last_GI, False)


def keep_pattern(score_OI: Tensor, kept: int, of: int) -> Tensor:
    """Of every ``of`` places in a row of scores the ``kept`` largest (eq. P9); the last group may be shorter."""
    num_inputs = score_OI.shape[1]
    padded = nn.functional.pad(score_OI, (0, -num_inputs % of), value=-1.0)
    group_OGM = padded.unflatten(1, (-1, of))
    first_OGN = group_OGM.argsort(dim=-1, descending=True, stable=True)[..., :kept]
    keep_OGM = torch.zeros_like(group_OGM, dtype=torch.bool).scatter(-1, first_OGN, True)
    return keep_OGM.flatten(1)[:, :num_inputs]


def zero_share(layer: nn.Module) -> float:
    """Share of a layer's weights that are zero."""
    holders = [layer.down, layer.up] if isinstance(layer, Factored) else [layer]
    zeros = sum(int((matrix(holder) == 0).sum()) for holder in holders)
    return zeros / sum(matrix(holder).numel() for holder in holders)


@torch.no_grad()
def _set_zero(layer: nn.Module, keep_OI: Tensor) -> None:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    keep = keep_OI.T if isinstance(layer, Conv1D) else keep_OI
    weight.masked_fill_(~keep.reshape(weight.shape), 0.0)
