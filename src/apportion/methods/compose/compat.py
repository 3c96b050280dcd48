"""Do these checkpoints fit one another? Everything is compared from headers and configs, before a weight is read."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apportion.errors import ModelError
from apportion.methods.compose.source import Source
from apportion.models.safefile import read_json

# Config fields that change what the weights mean; the rest (dropout, names, versions) may differ.
_MEANING = (
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "hidden_act",
    "position_embedding_type",
    "layer_norm_eps",
    "rms_norm_eps",
    "rope_theta",
    "num_key_value_heads",
    "tie_word_embeddings",
    "vocab_size",
    "image_size",
    "patch_size",
)
_SAMPLE = 1 << 14  # numbers of a tensor that are compared where a sample is enough


def check_sources(sources: Sequence[Source], base: Source | None = None, *, skip: Sequence[str] = ()) -> list[str]:
    """Raises where the sources can't be merged, naming the tensor; returns remarks on what differs harmlessly.

    Args:
        skip: patterns of tensors that are not merged and may differ (a classifier, say); taken from the first.

    Raises:
        ModelError: too few or twice the same source, another architecture, tokenizer, tensor or shape.
    """
    everyone = [base, *sources] if base is not None else list(sources)
    if not sources:
        raise ModelError("no sources were given; name at least one checkpoint")
    _refuse_duplicates(sources)
    first = everyone[0]
    remarks = []
    for other in everyone[1:]:
        remarks += _check_pair(first, other, skip)
    return list(dict.fromkeys(remarks))


def skipped(source: Source, patterns: Sequence[str]) -> list[str]:
    """The tensors that patterns name; a pattern that names none is a mistake."""
    found: list[str] = []
    for pattern in patterns:
        names = fnmatch.filter(source.tensors, pattern)
        if not names:
            raise ModelError(f"no tensor of {source.ref!r} is called {pattern!r}; it has {_some(source.tensors)}")
        found += names
    return found


def _check_pair(first: Source, other: Source, skip: Sequence[str]) -> list[str]:
    def kept(names: Mapping[str, Any]) -> list[str]:
        return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in skip)]

    _check_config(first, other)
    _check_tokenizer(first, other)
    remarks = []
    for name in kept(first.tensors):
        if name not in other.tensors:
            if not first.tensors[name].mixable:
                remarks.append(f"{name!r} of integers is not in every source; it is taken from {first.name!r}")
                continue
            raise ModelError(
                f"{other.ref!r} lacks the tensor {name!r} that {first.ref!r} has; check that both are of one "
                "architecture, or leave it out with --skip"
            )
        mine, theirs = first.tensors[name], other.tensors[name]
        if mine.shape != theirs.shape:
            raise ModelError(
                f"tensor {name!r} is {_shape(mine.shape)} in {first.ref!r} but {_shape(theirs.shape)} in "
                f"{other.ref!r}; merge models of one shape, or leave it out with --skip"
            )
        if mine.mixable != theirs.mixable:
            raise ModelError(
                f"tensor {name!r} is {mine.dtype} in {first.ref!r} but {theirs.dtype} without scales in {other.ref!r}; "
                "convert one of them"
            )
        if not mine.mixable and first.body.read_bytes(name) != other.body.read_bytes(name):
            raise ModelError(
                f"tensor {name!r} of integers differs between {first.ref!r} and {other.ref!r}; it can't be averaged: "
                "leave it out with --skip"
            )
    extra = [name for name in kept(other.tensors) if name not in first.tensors and other.tensors[name].mixable]
    if extra:
        raise ModelError(
            f"{other.ref!r} has the tensor {extra[0]!r} that {first.ref!r} lacks; check that both are of one "
            "architecture, or leave it out with --skip"
        )
    kinds = sorted({stored.dtype for source in (first, other) for stored in source.tensors.values() if stored.mixable})
    if len(kinds) > 1:
        remarks.append(f"number types differ: {', '.join(kinds)}; all are read as F32")
    return remarks


def _check_config(first: Source, other: Source) -> None:
    mine, theirs = first.body.config, other.body.config
    if not mine or not theirs:
        return
    if (mine.get("architectures") or theirs.get("architectures")) != (
        theirs.get("architectures") or mine.get("architectures")
    ):
        raise ModelError(
            f"{first.ref!r} is a {_name(mine)} but {other.ref!r} is a {_name(theirs)}; merge models of one architecture"
        )
    for field in _MEANING:
        if field in mine and field in theirs and mine[field] != theirs[field]:
            raise ModelError(
                f"{field} is {mine[field]!r} in {first.ref!r} but {theirs[field]!r} in {other.ref!r}; "
                "merge models of one architecture"
            )


def _check_tokenizer(first: Source, other: Source) -> None:
    paths = [source.body.files().get("tokenizer.json") for source in (first, other)]
    if None in paths:
        return
    vocabs = [_vocabulary(path) for path in paths if path is not None]
    if vocabs[0] != vocabs[1]:
        token = next(iter(sorted(set(vocabs[0].items()) ^ set(vocabs[1].items()))))[0]
        raise ModelError(
            f"the tokenizers of {first.ref!r} and {other.ref!r} differ, such as in token {token!r}; merge models that "
            "share a vocabulary"
        )


def _vocabulary(path: Path) -> dict[str, int]:
    fields: Any = read_json(path)
    try:
        vocab = fields["model"].get("vocab", {})
        if isinstance(vocab, list):  # a unigram model lists its pieces with their scores
            vocab = {str(piece[0]): place for place, piece in enumerate(vocab)}
        return {**vocab, **{added["content"]: added["id"] for added in fields.get("added_tokens") or []}}
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{path} can't be read as a tokenizer; fetch it again") from None


def fingerprint(source: Source) -> str:
    """A quick mark of a source: names, shapes and the first numbers of every tensor (not a digest of all of it)."""
    total = hashlib.sha256()
    for name, stored in sorted(source.tensors.items()):
        total.update(json.dumps([name, stored.dtype, stored.shape]).encode())
        if stored.mixable:
            total.update(np.ascontiguousarray(source.read(name, 0, min(stored.size, 256))).tobytes())
    return total.hexdigest()


def _refuse_duplicates(sources: Sequence[Source]) -> None:
    seen: dict[str, Source] = {}
    for source in sources:
        mark = fingerprint(source)
        if mark in seen and _same_weights(seen[mark], source):
            raise ModelError(
                f"{seen[mark].ref!r} and {source.ref!r} are the same source; name each once and weigh it with --weights"
            )
        seen[mark] = source


def _same_weights(first: Source, other: Source) -> bool:
    from apportion.methods.compose.checkpoint import blocks

    return all(
        np.array_equal(first.read(name, start, stop), other.read(name, start, stop))
        for name, stored in first.tensors.items()
        if stored.mixable
        for start, stop in blocks(stored.size)
    )


def kinship(first: Source, other: Source) -> float:
    r"""How far two sources lie apart, :math:`\|\theta - \theta'\| / \|\theta\|`, over samples of the weight matrices.

    Fine-tunes of one base lie within a fraction of one; networks trained apart lie near the square root of two, and
    averaging them as they are destroys both.
    """
    apart = size = 0.0
    for name, stored in first.tensors.items():
        if stored.mixable and len(stored.shape) > 1 and name in other.tensors:
            middle = max(0, stored.size // 2 - _SAMPLE // 2)
            a_N = first.read(name, middle, min(stored.size, middle + _SAMPLE)).astype(np.float64)
            b_N = other.read(name, middle, min(stored.size, middle + _SAMPLE)).astype(np.float64)
            apart += float(np.square(a_N - b_N).sum())
            size += float(np.square(a_N).sum())
    return float(np.sqrt(apart / size)) if size else 0.0


def _name(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type"))


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a number"


def _some(names: Mapping[str, Any]) -> str:
    listed = list(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")
