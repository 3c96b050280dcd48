"""Backbones from registry packages in other formats: converted once to a Hugging Face style folder, and kept."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file

from apportion.errors import ModelError
from apportion.models.backbones.keras_weights import read_mobilenet_v2
from apportion.models.backbones.lite_weights import read_lite0
from apportion.models.backbones.onnx_weights import read_vit_s14
from apportion.models.safefile import file_digest, read_header

VERSION = 2  # raised when a conversion changes, so that old folders are not used


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a file becomes a model folder: how to read it, and how its images are scaled."""

    read: Callable[[Path], Any]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float = 1 / 255
    extra: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


_IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_SIGNED: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_CLS = {"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}

RECIPES: Mapping[str, Recipe] = {
    "efficientnet-lite0": Recipe(read=read_lite0, rescale=1.0, mean=(127.0,) * 3, std=(128.0,) * 3),
    "mobilenetv2-224": Recipe(read=partial(read_mobilenet_v2, image_size=224), **_SIGNED),
    "mobilenetv2-160": Recipe(read=partial(read_mobilenet_v2, image_size=160), **_SIGNED),
    "vit-s14": Recipe(read=read_vit_s14, extra=_CLS, **_IMAGENET),
}


def converted(name: str, source: Path, digest: str) -> Path:
    """The folder of a converted backbone, made from ``source`` if it isn't there.

    Args:
        digest: SHA-256 that the source must have; it is checked before the file is read.
    """
    folder = cache_root() / "backbones" / f"{name}-{digest[:12]}-v{VERSION}"
    if _is_whole(folder):
        return folder
    if file_digest(source) != digest:
        raise ModelError(f"{source} is not the file published; install its package again")
    recipe = RECIPES[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _write(draft, recipe)(recipe.read(source))
        if not _is_whole(folder):  # another process may have been first; its folder is the same
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rename(draft, folder)
        if not _is_whole(folder):
            raise ModelError(f"{folder} can't be written; set XDG_CACHE_HOME to a folder that can")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/apportion``, or ``~/.cache/apportion`` (as in ``tasks.cache``, which lies above)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "apportion"


def _is_whole(folder: Path) -> bool:
    try:
        read_header(folder / "model.safetensors")
        return (folder / "config.json").is_file()
    except ModelError:
        return False


def _write(folder: Path, recipe: Recipe) -> Callable[[transformers.PreTrainedModel], None]:
    def write(model: transformers.PreTrainedModel) -> None:
        state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        size = model.config.image_size
        files: dict[str, Mapping[str, object]] = {
            "config.json": {**model.config.to_dict(), "architectures": [type(model).__name__]},
            "preprocessor_config.json": {
                "size": {"height": size, "width": size},
                "do_rescale": True,
                "rescale_factor": recipe.rescale,
                "do_normalize": True,
                "image_mean": list(recipe.mean),
                "image_std": list(recipe.std),
            },
            **recipe.extra,
        }
        for name, fields in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(fields, indent=1, sort_keys=True, default=str) + "\n", encoding="utf-8")

    return write
