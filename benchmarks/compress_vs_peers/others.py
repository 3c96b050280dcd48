"""Peers that need environments of their own: modelopt's FastNAS, and Olive. Where one can't run, the table says why."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import openvino
from benchmarks.compress_vs_peers.cases import WORK
from benchmarks.compress_vs_peers.points import Point
from benchmarks.compress_vs_peers.tools import MAX_DROP

REASONS = Path(__file__).parent / "results" / "not_run.json"
ROOT = Path(__file__).parents[2]
SHARES = ("0.6", "0.4", "0.25", "0.15")
PACKAGES = {
    "FastNAS": (
        *("nvidia-modelopt", "torchprofile<0.1", "pulp", "omegaconf", "antlr4-python3-runtime==4.9.3", "nvidia-ml-py"),
        *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "ninja", "tqdm"),
        *("requests", "urllib3", "idna", "certifi", "charset-normalizer"),
    ),
    "Olive": (  # later versions can't write down a metric of one's own
        *("olive-ai==0.11.0", "optuna", "torchmetrics", "lightning-utilities"),
        *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    ),
}


class NotRun(Exception):
    """A peer does not take this model, or has nothing of its own for this target."""


def environment(name: str) -> Path:
    """The Python of a peer's environment, made once; what this one has (torch above all) is shared, not installed."""
    folder = WORK / "envs" / name
    python = folder / "bin" / "python"
    if not (folder / "made").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        paths = f"{site.getsitepackages()[0]}\n{ROOT / 'src'}\n{ROOT}\n"
        next(folder.glob("lib/python*/site-packages")).joinpath("shared.pth").write_text(paths)
        command = [str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES[name]]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        (folder / "made").touch()
    return python.absolute()


def run(pair) -> None:
    """Adds the points of every peer that can be installed and run, and notes why where one can't."""
    for name, add_points in (("FastNAS", _fastnas), ("Olive", _olive)):
        if pair.has(name) or _key(pair.case.name, pair.target.name, name) in _reasons():
            continue
        try:
            add_points(pair)
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").strip().splitlines() if line.strip()]
            _note(pair, name, lines[-1][:160] if lines else f"exit {error.returncode}")
        except (subprocess.TimeoutExpired, NotRun) as error:
            _note(pair, name, str(error)[:160])


def _fastnas(pair) -> None:
    if pair.case.network.takes_text:
        raise NotRun("it is for convolutional networks")
    folder = _made("FastNAS", "fastnas.py", pair.case.name, *SHARES)
    for found in sorted(folder.glob("0.*")):
        told = json.loads((found / "told.json").read_text())
        artefact = found
        if pair.target.runtime == "openvino":
            artefact = found / "openvino"
            artefact.mkdir(exist_ok=True)
            openvino.save_model(openvino.Core().read_model(found / "model.onnx"), artefact / "model.xml", False)
            shutil.copy(found / "inputs.safetensors", artefact)
        promise = {"promised": told["share"], "steps": pair.case.steps}
        pair.add("FastNAS", f"FLOPs {told['share']:.0%}", told["seconds"], artefact, **promise)


def _olive(pair) -> None:
    if pair.target.runtime != "ort":
        raise NotRun("its quantisation there is NNCF's")
    folder = _made("Olive", "olive_search.py", pair.case.name, str(MAX_DROP))
    for found in sorted(folder.glob("[0-9]*")):
        told = json.loads((found / "told.json").read_text())
        pair.add("Olive", f"choice {found.name}", told["seconds"], found)


def _made(name: str, script: str, model: str, *arguments: str) -> Path:
    """The folder of what a peer's script made of a model, run in the peer's environment where that was not done yet."""
    folder = WORK / model / name.lower()
    if not (folder / "done").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        command = [str(environment(name)), str(Path(__file__).with_name(script)), model, str(folder), *arguments]
        settings = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600, env=settings)
        (folder / "done").touch()
    return folder


def _key(model: str, target: str, name: str) -> str:
    return f"{model} {target} {name}"


def _reasons() -> dict[str, str]:
    return json.loads(REASONS.read_text()) if REASONS.is_file() else {}


def _note(pair, name: str, reason: str) -> None:
    key = _key(pair.case.name, pair.target.name, name)
    print(f"  {key} not run: {reason}", file=sys.stderr, flush=True)
    REASONS.parent.mkdir(exist_ok=True)
    REASONS.write_text(json.dumps(_reasons() | {key: reason}, indent=1) + "\n")


def not_run(model: str, target: str, points: Sequence[Point]) -> dict[str, str]:
    """Why peers have no points for a model on a target."""
    known = _reasons()
    told = {point.tool for point in points}
    return {name: known.get(_key(model, target, name), "not tried") for name in PACKAGES if name not in told}
