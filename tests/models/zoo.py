"""Tiny networks with random but lively weights: real transformers architectures, and plain modules written here.

Everything is in double precision unless asked otherwise, so that a masked and a sliced copy can be told apart by far
less than any single unit contributes. Networks are cached and shared between tests: treat them as immutable.
"""

from __future__ import annotations

import functools
import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from apportion.errors import ModelError
from apportion.models import Network, Partition
from apportion.models.network import Origin, float_outputs, forward

torch.set_num_threads(1)  # handing work this small to a second thread costs more than the work

VOCAB = 100
TOKENS = 7
IMAGE = 32


# ---------------------------------------------------------------- plain modules


class FusedAttention(nn.Module):
    """Attention with one projection for queries, keys and values; subclasses say how its outputs are laid out."""

    def __init__(self, width: int = 24, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.split(self.qkv(x)))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class ByPart(FusedAttention):
    """Laid out as [q | k | v], each holding all heads."""

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (part.unflatten(-1, (self.num_heads, self.head_dim)) for part in fused.chunk(3, dim=-1))
        return query, key, value


class ByHead(FusedAttention):
    """Laid out as [q0 k0 v0 | q1 k1 v1 | ...], with the softmax written out."""

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = fused.unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(3)
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.split(self.qkv(x)))
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_dim)
        return self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """``down(silu(gate) * up)`` with gate and up in one projection."""

    def __init__(self, width: int = 24, hidden: int = 40) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int = 24) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), attention
        self.norm2, self.mlp = nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """An embedding, a list of blocks, a norm and a head."""

    def __init__(self, blocks: list[nn.Module], width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_mlp(width: int = 24) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))


class Vgg(nn.Module):
    """Convolutions whose channels are flattened into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 12, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(12 * 4 * 4, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm1(self.conv1(x))), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 4)
        return self.fc2(functional.relu(self.fc1(torch.flatten(x, 1))))


class MixedStream(nn.Module):
    """``wide``'s channels pass a LayerNorm, which mixes them, so only ``inner``'s can go."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(6, 24), nn.LayerNorm(24)
        self.inner, self.out = nn.Linear(24, 40), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.relu(self.inner(self.norm(self.wide(x)))))


class Grouped(nn.Module):
    """``before`` feeds a grouped convolution, so only ``after``'s channels can go."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.grouped = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=4)
        self.after, self.head = nn.Conv2d(16, 16, 3), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.grouped(functional.relu(self.before(x))))
        return self.head(functional.relu(self.after(x)).mean((2, 3)))


class Unet(nn.Module):
    """Down, up by a transposed convolution, and a concatenated skip: two modules share one side of ``last``."""

    def __init__(self, *, skip_first: bool = False) -> None:
        super().__init__()
        self.skip_first = skip_first
        self.first, self.act1 = nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(16)
        self.down, self.norm = nn.Conv2d(16, 24, 2, stride=2), nn.BatchNorm2d(24)
        self.up = nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.act1(self.first(x))
        deep = self.up(functional.relu(self.norm(self.down(skip))))
        return self.last(torch.cat([skip, deep] if self.skip_first else [deep, skip], 1))


def mlp_factory() -> tuple[nn.Module, Tensor]:
    """A factory as a user would write one, for ``module.path:factory``; not seeded, so only saved weights can agree."""
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)), torch.ones(2, 6)


# ---------------------------------------------------------------- architectures


def _bert() -> nn.Module:
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=32,
        )
    )


def _distilbert() -> nn.Module:
    return transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=VOCAB, dim=32, n_layers=3, n_heads=4, hidden_dim=48, max_position_embeddings=32
        )
    )


def _vit() -> nn.Module:
    return transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=IMAGE,
            patch_size=8,
        )
    )


def _resnet(layer_type: str) -> nn.Module:
    sizes = [16, 32] if layer_type == "basic" else [32, 64]
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=sizes, depths=[2, 3], layer_type=layer_type, num_labels=5
        )
    )


def _mobilenet() -> nn.Module:
    return transformers.MobileNetV2ForImageClassification(
        transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=IMAGE, num_labels=5)
    )


def _convnext() -> nn.Module:
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, num_labels=5, image_size=IMAGE)
    )


def _efficientnet() -> nn.Module:
    return transformers.EfficientNetForImageClassification(
        transformers.EfficientNetConfig(
            width_coefficient=0.25, depth_coefficient=0.5, image_size=IMAGE, num_labels=5, hidden_dim=320
        )
    )


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
        )
    )


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            intermediate_size=48,
            max_position_embeddings=32,
        )
    )


TRANSFORMERS: Mapping[str, Callable[[], nn.Module]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "vit": _vit,
    "resnet-basic": lambda: _resnet("basic"),
    "resnet-bottleneck": lambda: _resnet("bottleneck"),
    "mobilenetv2": _mobilenet,
    "convnext": _convnext,
    "efficientnet": _efficientnet,
    "gpt2": _gpt2,
    "llama": _llama,
}
PLAIN: Mapping[str, Callable[[], nn.Module]] = {
    "fused-by-part": lambda: Stack([Block(ByPart(), plain_mlp()) for _ in range(3)]),
    "fused-by-head": lambda: Stack([Block(ByHead(), plain_mlp()) for _ in range(3)]),
    "gated": lambda: Stack([Block(ByPart(), GatedMlp()) for _ in range(2)]),
    "vgg": Vgg,
    "mixed-stream": MixedStream,
    "grouped": Grouped,
    "unet": Unet,
    "unet-skip-first": lambda: Unet(skip_first=True),
}
ARCHITECTURES = (*TRANSFORMERS, *PLAIN)


def inputs_for(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name in ("bert", "distilbert", "gpt2", "llama"):
        ids = torch.randint(5, VOCAB, (2, TOKENS), generator=generator)
        seen = torch.ones_like(ids)
        if name in ("bert", "distilbert"):
            seen[1, -2:] = 0  # padding must not matter
        return {"input_ids": ids, "attention_mask": seen}
    if name in TRANSFORMERS:
        return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=generator, dtype=dtype)}
    if name in ("vgg", "grouped", "unet", "unet-skip-first"):
        return {"0": torch.randn(2, 3, IMAGE, IMAGE, generator=generator, dtype=dtype)}
    return {"0": torch.randn(2, TOKENS, 6, generator=generator, dtype=dtype)}


@torch.no_grad()
def enliven(module: nn.Module, *, seed: int) -> nn.Module:
    """Random weights under which every part matters: unit gain, biases and norm statistics away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor, mean: float, deviation: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * deviation + mean)

    for parameter in module.parameters():  # class tokens, layer scales, position embeddings, biases
        fill(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else 1.0)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd | Conv1D):
            fan_in = layer.nx if isinstance(layer, Conv1D) else layer.weight[0].numel()
            fill(layer.weight, 0.0, 1.4 / math.sqrt(fan_in))
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            fill(layer.running_mean, 0.0, 0.3)
            layer.running_var.copy_(torch.rand(layer.running_var.shape, generator=generator) + 0.5)
        if isinstance(getattr(layer, "bias", None), Tensor):
            fill(layer.bias, 0.0, 0.2)
    if getattr(module, "config", None) is not None and hasattr(module, "tie_weights"):
        module.tie_weights()
    return module


def build(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Network:
    """A fresh network of one of the ``ARCHITECTURES``."""
    module = {**TRANSFORMERS, **PLAIN}[name]()
    module = enliven(module, seed=seed).to(dtype).eval()
    return wrap(module, inputs_for(name, dtype=dtype), ref=name)


def wrap(module: nn.Module, inputs: Mapping[str, Tensor], ref: str = "test") -> Network:
    return Network(module=module, inputs=inputs, origin=Origin(ref=ref), readout="embedding")


@functools.cache
def network(name: str) -> Network:
    return build(name)


@functools.cache
def partition(name: str) -> Partition:
    return Partition.of(network(name))


# ---------------------------------------------------------------- looking at networks


@torch.no_grad()
def outputs(of: Network, inputs: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    return float_outputs(forward(of.module, of.inputs if inputs is None else inputs))


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference between two lists of outputs, relative to the largest value of that output."""
    assert [tensor.shape for tensor in first] == [tensor.shape for tensor in second]
    assert all(tensor.isfinite().all() for tensor in (*first, *second))
    return max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in zip(first, second, strict=True)
    )


def num_parameters(of: Network) -> int:
    return sum(parameter.numel() for parameter in of.module.parameters())


def tolerance(name: str) -> float:
    """How far two ways to compute one output may lie apart, relative to the largest value of it.

    Sums of at most a few thousand terms through some fifty layers in doubles (eps 2e-16) stay below 1e-11. Llama's
    norms compute in single precision (eps 6e-8), seven times in a row.
    """
    return 1e-5 if name == "llama" else 1e-10


def random_keep(of: Partition, *, seed: int) -> dict[str, tuple[int, ...]]:
    """A random subset of the units of every module, at least one of them dropped."""
    generator = torch.Generator().manual_seed(seed)
    keep = {}
    for module in of:
        size = int(torch.randint(module.minimum, module.num_units, (1,), generator=generator))
        order = torch.randperm(module.num_units, generator=generator)
        keep[module.name] = tuple(sorted(order[:size].tolist()))
    return keep


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Fails rather than hangs: a graph walk or an absurd config may never end."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"still running after {seconds} s")  # a BaseException, so nothing on the way takes it for its own

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Allocations(TorchDispatchMode):
    """Fails as soon as a tensor larger than ``most_bytes`` is made in memory (the meta device makes none)."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.most_bytes = most_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "cpu":
            size_bytes = result.untyped_storage().nbytes()
            if size_bytes > self.most_bytes:
                pytest.fail(f"{func} made a tensor of {size_bytes} bytes")
        return result


@contextmanager
def refused(*words: str, error: type[Exception] = ModelError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects an error of one line that contains the words."""
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    assert text.strip()
    assert "\n" not in text
    for word in words:
        assert word in text


def save_pretrained(name: str, folder: Path, **options: Any) -> Network:
    """Writes one of the ``TRANSFORMERS`` as its own library does, in single precision; returns what was written."""
    network = build(name, dtype=torch.float32)
    transformers.logging.disable_progress_bar()
    network.module.save_pretrained(folder, **options)
    return network


def change_json(path: Path, **fields: Any) -> None:
    """Sets fields of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
