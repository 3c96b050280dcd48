"""Examples as batches of model inputs: tokenised texts, images, or tensors of a file, with their labels if any."""

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
from apportion.tasks.domain import Domain
from apportion.tasks.domains import BUILT_IN, load_domain
from apportion.tasks.domains.folder import is_unlabelled, load_unlabelled
from apportion.tasks.domains.table import has_labels
from apportion.tasks.features import image_inputs
from apportion.tasks.texts import demo_texts, load_texts

Batch = dict[str, Tensor]
TARGET = "target"  # the tensor of a file that is no input


@dataclass(frozen=True)
class Examples:
    """Batches of inputs, a number of examples in all; ``description`` says what they are.

    ``label_N`` numbers the class of every example, in the order of the batches, where the data have labels; where they
    have numbers to predict, it holds these, as floats.
    """

    batches: tuple[Batch, ...]
    description: str
    label_N: Tensor | None = None

    def __len__(self) -> int:
        return sum(len(next(iter(batch.values()))) for batch in self.batches)


@dataclass(frozen=True)
class Splits:
    """Disjoint examples: to score importance and set ranges on, to choose on, to report on, and to train on.

    ``guard`` are others to judge a finished model on; where those are fewer than the ones to choose on, with these.
    """

    calibration: Examples
    selection: Examples
    report: Examples
    training: Examples
    guard: Examples


SIZES = (64, 96, 384)
SMALL_SIZES, SMALL_SIDE = (64, 288, 192), 64  # of small images, where reading is cheap: more of them to choose on
MAX_GUARD = 1024  # taken from training
MAX_TRAINING_TEXTS, MAX_TRAINING_IMAGES = 4096, 16_384
MAX_TRAINING_PIXELS = 512 * 224 * 224  # of all images together, which are held in memory as numbers


def load_splits(
    network: Network,
    data: str | None,
    *,
    seed: int,
    sizes: tuple[int, int, int] | None = None,
    guard: bool = False,
) -> Splits:
    """Draws the splits from the user's data, or from the demo's texts when the model reads text.

    What is left after the first three is there to train on, and with ``guard`` a part of it to judge on. Small data are
    shared out in fixed proportions.
    """
    generator = torch.Generator().manual_seed(seed)
    unlabelled = data is not None and data not in BUILT_IN and is_unlabelled(Path(data))
    domain = load_unlabelled(Path(str(data))) if unlabelled else _labelled(data)
    wanted = (*(sizes or _sizes(network)), MAX_GUARD if guard else 0)
    if domain is not None and (domain.kind == "text") != network.takes_text:
        kind = "texts" if network.takes_text else "images"
        raise DataError(
            f"{data} holds {domain.kind}s, but the model takes {kind}; choose another (apportion tasks list)"
        )
    if network.takes_text:
        if domain is not None:
            return _from_texts(network, domain.content, domain.label_N, str(data), generator, wanted)
        texts = load_texts(Path(data)) if data else demo_texts()
        return _from_texts(network, texts, None, data or "the demo's texts", generator, wanted)
    if domain is not None:
        label_N = None if unlabelled else domain.label_N
        return _from_images(network, domain.content, label_N, str(data), generator, wanted)
    if data is None:
        names = ", ".join(name if not name.isdigit() else f"input {name}" for name in network.inputs)
        raise DataError(f"this model takes {names}; give --data FILE.safetensors with tensors of these names")
    return _from_tensors(network, Path(data), generator, wanted)


def _sizes(network: Network) -> tuple[int, int, int]:
    sides = [max(tensor.shape[-2:]) for tensor in network.inputs.values() if tensor.dim() == 4]
    return SMALL_SIZES if sides and max(sides) <= SMALL_SIDE else SIZES


def _labelled(data: str | None) -> Domain | None:
    """The data as a domain, where they have labels: a built-in name, class folders, or a table with a label column."""
    if data is None:
        return None
    if data in BUILT_IN or Path(data).is_dir() or Path(data).suffix == ".zip":
        return load_domain(data)
    if Path(data).is_file() and has_labels(Path(data)):
        return load_domain(data)
    return None


def _from_texts(
    network: Network,
    texts: Sequence[str],
    label_N: Any,
    name: str,
    generator: torch.Generator,
    sizes: tuple[int, int, int, int],
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
    for rows, note in _shares(len(texts), generator, sizes, MAX_TRAINING_TEXTS):
        chosen = sorted(rows, key=lambda row: len(texts[row]))
        batches = []
        for start in range(0, len(chosen), 32):
            encoded = tokenizer(
                [texts[row] for row in chosen[start : start + 32]],
                padding=True,
                truncation=True,
                max_length=min(128, longest),
                return_tensors="pt",
            )
            batches.append({key: encoded[key] for key in network.inputs if key in encoded})
        parts.append(Examples(tuple(batches), f"{len(chosen)} of {name}{note}", _labels(label_N, chosen)))
    return Splits(*parts)


def _from_images(
    network: Network,
    images: Sequence[Any],
    label_N: Any,
    name: str,
    generator: torch.Generator,
    sizes: tuple[int, int, int, int],
) -> Splits:
    height, width = next(iter(network.inputs.values())).shape[-2:]
    max_training = min(MAX_TRAINING_IMAGES, max(1, MAX_TRAINING_PIXELS // (height * width)))
    parts = []
    for rows, note in _shares(len(images), generator, sizes, max_training):
        batches = tuple(
            image_inputs(network, [images[row] for row in rows[start : start + 32]])
            for start in range(0, len(rows), 32)
        )
        parts.append(Examples(batches, f"{len(rows)} of {name}{note}", _labels(label_N, rows)))
    return Splits(*parts)


def _labels(label_N: Any, rows: Sequence[int]) -> Tensor | None:
    return None if label_N is None else torch.as_tensor(label_N)[torch.tensor(rows, dtype=torch.long)]


def _from_tensors(network: Network, path: Path, generator: torch.Generator, sizes: tuple[int, int, int, int]) -> Splits:
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
    for name in network.inputs:
        if not tensors[name].isfinite().all():
            raise DataError(f"{path}: {name!r} holds numbers that are not finite; leave these examples out")
    (count,) = counts
    target_N = None if TARGET in network.inputs else _target(path, tensors.get(TARGET), count)
    parts = []
    for rows, note in _shares(count, generator, sizes, MAX_TRAINING_TEXTS):
        index = torch.tensor(rows)
        batches = tuple(
            {name: tensors[name][part].to(network.inputs[name].dtype) for name in network.inputs}
            for part in index.split(32)
        )
        parts.append(Examples(batches, f"{len(rows)} of {path.name}{note}", _labels(target_N, rows)))
    return Splits(*parts)


def _target(path: Path, target: Tensor | None, count: int) -> Tensor | None:
    """The targets in a file of tensors: whole numbers are classes, floats are numbers to predict."""
    if target is None:
        return None
    if target.numel() != count or len(target) != count:
        raise DataError(
            f"{path}: {TARGET!r} has shape {list(target.shape)}, but there are {count} examples; give one each"
        )
    target_N = target.reshape(count)
    if target_N.is_floating_point():
        if not target_N.isfinite().all():
            raise DataError(f"{path}: {TARGET!r} holds numbers that are not finite; leave these examples out")
        return target_N.float()
    if target_N.min() < 0:
        raise DataError(f"{path}: {TARGET!r} holds the class {int(target_N.min())}; number classes from 0")
    return target_N.long()


def _shares(
    count: int, generator: torch.Generator, sizes: tuple[int, int, int, int], max_training: int
) -> list[tuple[list[int], str]]:
    """Rows of the splits: the sizes asked for, and the rest for training, of which small data keep a third.

    The last size is what the guard has of its own: at most a quarter of that rest. Where it is less than there is to
    choose on, the guard has that as well, and a note says so.
    """
    if count < 6:
        raise DataError(f"the data hold {count} examples; give at least 6")
    *firsts, num_guard = sizes
    scale = min(1.0, 2 * count / (3 * sum(firsts)))
    counts = [max(1, int(size * scale)) for size in firsts]
    num_left = count - sum(counts)
    num_guard = min(num_guard, num_left // 4, max_training // 4)
    order = torch.randperm(count, generator=generator).tolist()
    cuts = [0, *itertools.accumulate([*counts, min(num_left - num_guard, max_training), num_guard])]
    calibration, selection, report, training, more = (order[begin:end] for begin, end in itertools.pairwise(cuts))
    guard, note = more, ""
    if len(more) < len(selection):
        guard, note = selection + more, f" ({len(selection)} of them chosen with)"
    return [(rows, "") for rows in (calibration, selection, report, training)] + [(guard, note)]
