"""Built artefacts: exported once per model content, target and shape, and kept in a cache of bounded size."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from apportion.device.process import Failure, Limits, free_bytes, num_cores, run_child
from apportion.device.target import Target
from apportion.models.processor import int8_saturates
from apportion.models.registry import BUILT_IN, find_packaged
from apportion.models.safefile import folder_digest

WORKER_BYTES = 3 * 2**30  # that a building process may take, where there are many
MAX_CACHE_BYTES = 6 * 10**9
SCHEME = 2  # raised when another artefact is built of the same content
DRAFT, OLD_DRAFT_S = ".draft-", 86_400.0  # of what is being built, and when nobody can be at it any more
BUILT = "built"  # an empty file in an artefact's folder, written last
_VERSIONED = ("apportion", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "executorch")


def cache_folder() -> Path:
    """Where built artefacts and probe results are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apportion"


def needs_build(target: Target) -> bool:
    """Torch runs the saved network itself; graph runtimes run what was exported from it."""
    return target.runtime not in ("torch", "compile")


def model_files(artefact: Path) -> list[Path]:
    """The files of a built artefact that make up the model, without the inputs that it is timed on."""
    return sorted(path for path in artefact.iterdir() if path.suffix in (".onnx", ".data", ".bin", ".xml", ".pte"))


def build_all(
    candidates: Sequence[dict[str, Any]],
    target: Target,
    shape: dict[str, Any],
    limits: Limits,
    on_build: Callable[[], None],
) -> dict[str, Path | Failure]:
    """The folder of every candidate's artefact, or why it could not be built.

    Those not in the cache are shared out to a few child processes; a candidate that kills one is recorded, and a new
    child goes on with the rest.
    """
    folder = cache_folder() / "builds"
    folder.mkdir(parents=True, exist_ok=True)
    places = {candidate["name"]: folder / _key(candidate, target, shape) for candidate in candidates}
    done: dict[str, Path | Failure] = {}
    for name, place in places.items():
        if place.is_dir():
            os.utime(place)
            done[name] = place
    while wanted := [candidate for candidate in candidates if candidate["name"] not in done]:
        shares = _shares(wanted)
        with ThreadPoolExecutor(len(shares)) as pool:
            for found in pool.map(lambda share: _build_some(share, places, target, shape, limits, on_build), shares):
                done |= found
    _trim(folder, keep=set(places.values()))
    return done


def compile_all(candidates: Sequence[dict[str, Any]], target: Target, shape: dict[str, Any], limits: Limits) -> None:
    """Compiles candidates a few at a time, so that all processes that time them find the kernels in torch's cache.

    What becomes of one that can't be compiled is told where it is timed.
    """
    by_key = {_key(candidate, target, shape): candidate for candidate in candidates}
    wanted = {key: candidate for key, candidate in by_key.items() if key not in _compiled}
    if not wanted:
        return
    jobs = [
        {"action": "compile", "target": target.to_json(), "shape": shape, "candidates": share}
        for share in _shares(list(wanted.values()))
    ]
    alone = target.environment | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # torch would start a pool in every process
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: run_child(job, alone, limits), jobs))
    _compiled.update(wanted)


_compiled: set[str] = set()


def _shares(wanted: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    """Candidates shared out to as many processes as there are cores for and memory."""
    number = max(1, min(num_cores(), free_bytes() // WORKER_BYTES, len(wanted)))
    return [wanted[first::number] for first in range(number)]


def _build_some(
    wanted: Sequence[dict[str, Any]],
    places: Mapping[str, Path],
    target: Target,
    shape: dict[str, Any],
    limits: Limits,
    on_build: Callable[[], None],
) -> dict[str, Path | Failure]:
    """Builds candidates one after the other in one child process, up to the first that kills it."""
    done: dict[str, Path | Failure] = {}
    with tempfile.TemporaryDirectory(prefix=DRAFT, dir=next(iter(places.values())).parent) as scratch:
        drafts = {candidate["name"]: Path(scratch) / str(i) for i, candidate in enumerate(wanted)}
        job = {
            "action": "build",
            "target": target.to_json(),
            "shape": shape,
            "candidates": [c | {"folder": str(drafts[c["name"]])} for c in wanted],
        }
        ended = run_child(job, target.environment, limits)
        for name, draft in drafts.items():
            if (draft / BUILT).is_file():
                with contextlib.suppress(OSError):  # another process built the same meanwhile
                    draft.rename(places[name])
                done[name] = places[name]
                on_build()
        if ended.result is not None:
            done |= {name: Failure(**failure) for name, failure in ended.result["failures"].items()}
        elif ended.failure is not None:
            lost = [ended.culprit] if ended.culprit else list(drafts)
            done |= {name: ended.failure for name in lost if name not in done}
    return done


def _key(candidate: dict[str, Any], target: Target, shape: dict[str, Any]) -> str:
    ref = candidate["ref"]
    if ref in BUILT_IN:
        content = folder_digest(find_packaged(ref))
    elif Path(ref).is_dir():
        content = folder_digest(Path(ref))
    else:  # a factory: nothing says whether its code changed, so its builds are not shared between processes
        content = f"{ref}#{os.getpid()}"
    what = {
        "scheme": SCHEME,
        "content": content,
        "factory": candidate["factory"],
        "runtime": target.runtime,
        "precision": target.precision,
        "saturates": int8_saturates(),
        "shape": {name: value for name, value in shape.items() if value is not None},
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def versions() -> dict[str, str]:
    """Of the packages that an artefact depends on; empty for those that are not installed."""
    found = {}
    for package in _VERSIONED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def _trim(folder: Path, keep: set[Path]) -> None:
    """Removes the artefacts used longest ago until the cache fits its limit, and what killed processes left."""
    entries = []
    for path in folder.iterdir():
        if path.name.startswith(DRAFT) and path.stat().st_mtime < time.time() - OLD_DRAFT_S:
            shutil.rmtree(path, ignore_errors=True)
            continue
        if path.is_dir() and path not in keep and not path.name.startswith("."):
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            entries.append((path.stat().st_mtime, size_bytes, path))
    total = sum(size for _, size, _ in entries)
    for _, size_bytes, path in sorted(entries):
        if total <= MAX_CACHE_BYTES:
            break
        shutil.rmtree(path, ignore_errors=True)
        total -= size_bytes
