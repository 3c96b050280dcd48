"""Examples as batches of model inputs: tokenised texts, images, or tensors of a safetensors file, without labels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from apportion.errors import DataError
from apportion.models.network import Network
from apportion.models.safefile import read_header
from apportion.tasks.domain import Kind
from apportion.tasks.domains import BUILT_IN, load_domain
from apportion.tasks.features import image_inputs
from apportion.tasks.texts import demo_texts, load_texts

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Examples:
    """Batches of inputs, a number of examples in all; ``description`` says what they are."""

    batches: tuple[Batch, ...]
    description: str

    def __len__(self) -> int:
        return sum(len(next(iter(batch.values()))) for batch in self.batches)


@dataclass(frozen=True)
class Splits:
    """Disjoint examples: to score importance on, to choose on, and to report on."""

    calibration: Examples
    selection: Examples
    report: Examples


def load_splits(
    network: Network, data: str | None, *, seed: int, sizes: tuple[int, int, int] = (64, 96, 384)
) -> Splits:
    """Draws the three splits from the user's data, or from the demo's texts when the model reads text.

    Small data are shared out in the same proportions.
    """
    generator = torch.Generator().manual_seed(seed)
    if network.takes_text:
        if data in BUILT_IN:
            texts = _contents(data, "text")
        else:
            texts = load_texts(Path(data)) if data else demo_texts()
        return _from_texts(network, texts, data or "the demo's texts", generator, sizes)
    if data is None:
        wanted = ", ".join(name if not name.isdigit() else f"input {name}" for name in network.inputs)
        raise DataError(f"this model takes {wanted}; give --data FILE.safetensors with tensors of these names")
    if data in BUILT_IN or Path(data).is_dir() or Path(data).suffix == ".zip":
        return _from_images(network, data, generator, sizes)
    return _from_tensors(network, Path(data), generator, sizes)


def _from_texts(
    network: Network, texts: Sequence[str], name: str, generator: torch.Generator, sizes: tuple[int, int, int]
) -> Splits:
    folder = network.origin.folder
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(f"{folder} has no tokenizer that can be read ({str(error).splitlines()[0][:120]})") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    longest = getattr(network.module.config, "max_position_embeddings", None) or 512
    parts = []
    for rows in _shares(len(texts), generator, sizes):
        chosen = sorted((texts[row] for row in rows), key=len)
        batches = []
        for start in range(0, len(chosen), 32):
            encoded = tokenizer(
                chosen[start : start + 32],
                padding=True,
                truncation=True,
                max_length=min(128, longest),
                return_tensors="pt",
            )
            batches.append({key: encoded[key] for key in network.inputs if key in encoded})
        parts.append(Examples(tuple(batches), f"{len(chosen)} of {name}"))
    return Splits(*parts)


def _from_images(network: Network, data: str, generator: torch.Generator, sizes: tuple[int, int, int]) -> Splits:
    """Images of a domain or of a user's class folders; their labels are not used."""
    images = _contents(data, "image")
    parts = []
    for rows in _shares(len(images), generator, sizes):
        batches = tuple(
            image_inputs(network, [images[row] for row in rows[start : start + 32]])
            for start in range(0, len(rows), 32)
        )
        parts.append(Examples(batches, f"{len(rows)} of {data}"))
    return Splits(*parts)


def _contents(data: str, kind: Kind) -> Sequence[Any]:
    domain = load_domain(data)
    if domain.kind != kind:
        raise DataError(
            f"{data} holds {domain.kind}s, but the model takes {kind}s; choose another (apportion tasks list)"
        )
    return domain.content


def _from_tensors(network: Network, path: Path, generator: torch.Generator, sizes: tuple[int, int, int]) -> Splits:
    if path.suffix != ".safetensors":
        raise DataError(
            f"{path} holds no inputs for this model; give a .safetensors file of {', '.join(network.inputs)}"
        )
    header = read_header(path)
    for name, example in network.inputs.items():
        if name not in header:
            raise DataError(f"{path} has no tensor {name!r}; it has {', '.join(header) or 'none'}")
        if header[name].shape[1:] != tuple(example.shape[1:]):
            raise DataError(
                f"{path}: {name!r} has examples of shape {list(header[name].shape[1:])}, "
                f"the model takes {list(example.shape[1:])}"
            )
    counts = {header[name].shape[0] for name in network.inputs}
    if len(counts) != 1 or min(counts) < 6:
        raise DataError(f"{path} holds {sorted(counts)} examples; give the same number, at least 6, for every input")
    tensors = load_file(path)
    parts = []
    for rows in _shares(counts.pop(), generator, sizes):
        index = torch.tensor(rows)
        batches = tuple(
            {name: tensors[name][part].to(network.inputs[name].dtype) for name in network.inputs}
            for part in index.split(32)
        )
        parts.append(Examples(batches, f"{len(rows)} of {path.name}"))
    return Splits(*parts)


def _shares(count: int, generator: torch.Generator, sizes: tuple[int, int, int]) -> list[list[int]]:
    if count < 6:
        raise DataError(f"the data hold {count} examples; give at least 6")
    scale = min(1.0, count / sum(sizes))
    counts = [max(2, int(size * scale)) for size in sizes]
    order = torch.randperm(count, generator=generator).tolist()
    cuts = [0, counts[0], counts[0] + counts[1], min(count, sum(counts))]
    return [order[begin:end] for begin, end in itertools.pairwise(cuts)]
