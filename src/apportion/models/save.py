"""Saving a network as plain safetensors, the original config, and a small file that repeats the slicing."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from apportion.core.folder import whole_folder
from apportion.errors import ModelError
from apportion.models.load import CALIBRATION_FILE, EDITS_FILE, FORMAT
from apportion.models.network import Network
from apportion.models.sparse import pack

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
    "1_Pooling/config.json",
)


def save(network: Network, folder: Path) -> None:
    """Writes a folder that ``models.load`` reads back bit for bit; the folder appears whole or not at all."""
    folder = Path(folder)
    if folder.exists() and not (folder / EDITS_FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} holds something else than a saved model; name a new folder")
    with whole_folder(folder) as draft:
        _write(network, draft)


def _write(network: Network, folder: Path) -> None:
    tensors, tied = _untied(network.module.state_dict())
    stored, packed = pack(tensors)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    if network.origin.factory is None:
        config = network.module.config.to_dict()  # type: ignore[operator, union-attr]
        config.pop("_name_or_path", None)  # where it lay is no part of the model
        config["architectures"] = [type(network.module).__name__]
        _write_json(folder / "config.json", config)
    for name in _COMPANIONS:
        source = network.origin.folder / name if network.origin.folder else None
        if source is not None and source.is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, folder / name)
    if network.calibration:
        named = {f"{i}.{name}": t for i, batch in enumerate(network.calibration) for name, t in batch.items()}
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / CALIBRATION_FILE)
    edits = network.edits
    _write_json(
        folder / EDITS_FILE,
        {
            "apportion_model": FORMAT,
            "origin": network.origin.ref,
            "factory": network.origin.factory,
            "readout": network.readout,
            "widths": {layer: dict(sides) for layer, sides in edits.widths.items()},
            "attributes": {owner: dict(values) for owner, values in edits.attributes.items()},
            "skips": dict(edits.skips),
            "keep": {name: list(units) for name, units in edits.keep.items()},
            "ranks": dict(edits.ranks),
            "tokens": [[name, *counts] for name, counts in edits.tokens.items()],
            "int8": asdict(network.int8),
            "tied": tied,
            "packed": packed,
        },
    )
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _untied(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the names that share one."""
    first: dict[object, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().contiguous()
    return tensors, tied


def _write_json(path: Path, fields: object) -> None:
    path.write_text(json.dumps(fields, indent=1, sort_keys=True, default=str) + "\n", encoding="utf-8")
