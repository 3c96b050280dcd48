"""A peer that needs an environment of its own: modelopt's FastNAS. Where it can't run, the table says why.

Olive is left out: its static quantisation is ONNX Runtime's, which has a row of its own.
"""

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

REASONS = Path(__file__).parent / "results" / "not_run.json"
ROOT = Path(__file__).parents[2]
SHARES = ("0.6", "0.4", "0.25", "0.15")
PACKAGES = {
    "FastNAS": (
        *("nvidia-modelopt", "torchprofile<0.1", "pulp", "omegaconf", "antlr4-python3-runtime==4.9.3", "nvidia-ml-py"),
        *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "ninja", "tqdm"),
        *("requests", "urllib3", "idna", "certifi", "charset-normalizer"),
    ),
}


class NotRun(Exception):
    """A peer does not take this model."""


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
    """Adds the points of the peer where it can be installed and run, and notes why where it can't."""
    name = "FastNAS"
    if pair.has(name) or _reasons().get(f"{pair.case.name} {name}"):
        return
    try:
        _fastnas(pair)
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").strip().splitlines() if line.strip()]
        _note(pair.case.name, name, lines[-1][:160] if lines else f"exit {error.returncode}")
    except (subprocess.TimeoutExpired, NotRun) as error:
        _note(pair.case.name, name, str(error)[:160])


def _fastnas(pair) -> None:
    if pair.case.network.takes_text:
        raise NotRun("it is for convolutional networks")
    folder = WORK / pair.case.name / "fastnas"
    if not (folder / "done").is_file():
        command = [str(environment("FastNAS")), str(Path(__file__).with_name("fastnas.py")), pair.case.name]
        settings = os.environ | {"OMP_NUM_THREADS": "1"}
        arguments = [*command, str(folder), *SHARES]
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=1200, env=settings)
        (folder / "done").touch()
    for found in sorted(folder.glob("0.*")):
        told = json.loads((found / "told.json").read_text())
        artefact = found
        if pair.target.runtime == "openvino":
            artefact = found / "openvino"
            artefact.mkdir(exist_ok=True)
            openvino.save_model(openvino.Core().read_model(found / "model.onnx"), artefact / "model.xml", False)
            shutil.copy(found / "inputs.safetensors", artefact)
        pair.add("FastNAS", f"FLOPs {told['share']:.0%}", told["seconds"], artefact, promised=told["share"])


def _reasons() -> dict[str, str]:
    return json.loads(REASONS.read_text()) if REASONS.is_file() else {}


def _note(model: str, name: str, reason: str) -> None:
    print(f"  {model}: {name} not run: {reason}", file=sys.stderr, flush=True)
    REASONS.parent.mkdir(exist_ok=True)
    REASONS.write_text(json.dumps(_reasons() | {f"{model} {name}": reason}, indent=1) + "\n")


def not_run(model: str, points: Sequence[Point]) -> dict[str, str]:
    """Why peers have no points for a model."""
    known = _reasons()
    told = {point.tool for point in points}
    return {name: known.get(f"{model} {name}", "not tried") for name in PACKAGES if name not in told}
