"""Repair by low-rank adapters through PEFT: few numbers are trained, and merged into the weights afterwards."""

from __future__ import annotations

import importlib.util
import warnings

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from apportion.errors import ApportionError
from apportion.methods.compress.repair import MANY_ZEROS, Distil, zeros

RANK, SCALE, RATE = 8, 16, 3e-3


def require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ApportionError("the rule adapters needs PEFT: pip install 'apportion[peft]', or use repair")


class Adapters(Distil):
    """Distillation that changes each layer by a product of two thin matrices alone (LoRA).

    Adapters sit beside linear layers and ungrouped convolutions, but for those with many zeros, which must stay. They
    are merged when training ends: the network has the shape and the cost that it had. All other weights stay as they
    are, so there is less to store beside the original, and less to move it away from it.
    """

    kind, rate, keeps_zeros = "adapters", RATE, False  # adapters start at zero

    def _open(self, module: nn.Module) -> list[nn.Parameter]:
        from peft import LoraConfig, LoraModel

        for parameter in module.parameters():
            parameter.requires_grad_(False)
        names = [name for name, layer in module.named_modules() if name and _takes(layer)]
        if not names:
            raise ApportionError("no layer of the model takes an adapter; use the rule repair instead")
        config = LoraConfig(r=RANK, lora_alpha=SCALE, target_modules=names)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(self.options.seed)
            self._model = LoraModel(module, config, "default")
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def _close(self, module: nn.Module) -> None:
        self._model.merge_and_unload()
        del self._model


def _takes(layer: nn.Module) -> bool:
    plain = type(layer) in (nn.Linear, Conv1D) or (type(layer) is nn.Conv2d and layer.groups == 1)
    return plain and zeros(layer.weight) <= MANY_ZEROS  # type: ignore[arg-type]
