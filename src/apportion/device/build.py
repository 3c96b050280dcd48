"""Built artefacts: exported once per model content, target and shape, and kept in a cache of bounded size."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from apportion.device.process import Ended, Limits, run_child
from apportion.device.target import Target
from apportion.models.registry import BUILT_IN, find_packaged
from apportion.models.safefile import folder_digest

MAX_CACHE_BYTES = 6 * 10**9
_VERSIONED = ("apportion", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "executorch")


def cache_folder() -> Path:
    """Where built artefacts and probe results are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apportion"


def needs_build(target: Target) -> bool:
    """Torch runs the saved network itself; graph runtimes run what was exported from it."""
    return target.runtime not in ("torch", "compile")


def build(candidate: dict[str, Any], target: Target, shape: dict[str, Any], limits: Limits) -> Path | Ended:
    """The folder of a candidate's artefact, built in a child process unless it is in the cache; or how that failed."""
    folder = cache_folder() / "builds" / _key(candidate, target, shape)
    if folder.is_dir():
        os.utime(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        job = {
            "action": "build",
            "target": target.to_json(),
            "candidate": candidate,
            "shape": shape,
            "folder": str(draft),
        }
        ended = run_child(job, target.environment, limits)
        if ended.result is None:
            return ended
        try:
            draft.rename(folder)
        except OSError:  # another process built the same meanwhile
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _trim(folder.parent, keep=folder)
    return folder


def _key(candidate: dict[str, Any], target: Target, shape: dict[str, Any]) -> str:
    ref = candidate["ref"]
    if ref in BUILT_IN:
        content = folder_digest(find_packaged(ref))
    elif Path(ref).is_dir():
        content = folder_digest(Path(ref))
    else:  # a factory: nothing says whether its code changed, so its builds are not shared between processes
        content = f"{ref}#{os.getpid()}"
    versions = {}
    for package in _VERSIONED:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    what = {
        "content": content,
        "factory": candidate["factory"],
        "runtime": target.runtime,
        "precision": target.precision,
        "shape": shape,
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _trim(folder: Path, keep: Path) -> None:
    """Removes the artefacts used longest ago until the cache fits its limit."""
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and path != keep and not path.name.startswith("."):
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            entries.append((path.stat().st_mtime, size_bytes, path))
    total = sum(size for _, size, _ in entries)
    for _, size_bytes, path in sorted(entries):
        if total <= MAX_CACHE_BYTES:
            break
        shutil.rmtree(path, ignore_errors=True)
        total -= size_bytes

