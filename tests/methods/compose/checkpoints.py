"""Small checkpoints on disk: a tiny BERT as transformers saves it, and plain tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SHAPES = {"layer.weight": (40, 30), "layer.bias": (40,), "scalar": (), "long": (3, 200_000)}


def tensors(seed: int, shapes=SHAPES, scale: float = 1.0, base=None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: drawn[name] + (base[name] if base else 0) for name in shapes}


def write(folder: Path, state: dict[str, torch.Tensor], config: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "plain"}))
    return folder


def family(folder: Path, count: int = 3, scale: float = 0.1) -> tuple[Path, list[Path]]:
    """A base and some fine-tunes of it."""
    base = tensors(0)
    write(folder / "base", base)
    return folder / "base", [write(folder / f"s{n}", tensors(n + 1, scale=scale, base=base)) for n in range(count)]


def tiny_bert(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder
