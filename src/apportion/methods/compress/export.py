"""Export: the model of a finished run as files for other programs, with the certificate of those it is about."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from apportion.core.folder import whole_folder
from apportion.core.progress import Progress, Silent
from apportion.device.answers import build
from apportion.device.build import model_files
from apportion.device.measure import Candidate, Shape
from apportion.device.probe import working_target
from apportion.device.runtimes.graph import Outputs
from apportion.errors import ApportionError, ModelError
from apportion.methods.compress.rundir import RunDir
from apportion.methods.compress.verify import certified_artefact, confirm_factory
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.safefile import file_digest, folder_digest

FORMATS = ("safetensors", "onnx", "openvino", "torch-export")
PROGRAM = "model.pt2"
CERTIFICATE = "certificate.json"
_TARGETS = {"onnx": "ort-cpu-1t", "openvino": "openvino-cpu-1t"}


def export(
    run: Path, kind: str, out: Path, model: str | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Writes the model in use of a run into a new folder, which appears whole or not at all.

    Where the files are byte for byte those that were measured, the run's certificate is written beside them. Other
    formats are exported anew: nothing was measured of them, and no certificate is written.

    Args:
        kind: one of ``FORMATS``.
        model: the original, where it came from a factory: code named in a file is run only when you name it, too.

    Returns:
        Format, folder, files with their digests, whether the certificate covers them, and the target that it is about.
    """
    progress = progress or Silent()
    if kind not in FORMATS:
        raise ApportionError(f"unknown format {kind!r}; possible are {', '.join(FORMATS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ApportionError(f"{out} exists and is not empty; choose another -o folder")
    rundir = RunDir(run)
    config, rung = rundir.config(), rundir.rung_in_use
    certificate = rung.certificate()
    if not rung.model.is_dir() or folder_digest(rung.model) != certificate.artefact:
        raise ApportionError(f"{rung.model} is not the model that was certified; fit it again")
    runtime = certificate.target.partition("-")[0]
    kept = certified_artefact(rung, certificate)
    shape = Shape(batch=config.batch, tokens=config.tokens, seed=config.seed, size=config.size)
    with progress.stage(f"export to {kind}"), whole_folder(out) as draft:
        if kind == "safetensors":
            shutil.copytree(rung.model, draft, dirs_exist_ok=True)
            covered = runtime in ("torch", "compile")
        elif kind == "torch-export":
            confirm_factory(config, model)
            _write_program(load(str(rung.model), factory=model, **vars(shape)), draft / PROGRAM)
            covered = False
        else:
            covered = kept is not None and _TARGETS[kind].startswith(f"{runtime}-")
            if not covered or kept is None:
                confirm_factory(config, model)
                candidate = Candidate(name="model", ref=str(rung.model), factory=model)
                kept = build(candidate, working_target(_TARGETS[kind]), shape)
            for path in model_files(kept):
                shutil.copyfile(path, draft / path.name)
        files = {
            path.relative_to(draft).as_posix(): file_digest(path) for path in sorted(draft.rglob("*")) if path.is_file()
        }
        if covered:
            (draft / CERTIFICATE).write_text(json.dumps(certificate.to_json(), indent=1) + "\n", encoding="utf-8")
    return {
        "format": kind,
        "path": str(out),
        "files": files,
        "certified": covered,
        "certified_files": sorted(certificate.files),
        "target": certificate.target,
    }


def _write_program(network: Network, path: Path) -> None:
    """A torch.export program: takes the inputs by position in the model's order, returns its float outputs."""
    try:
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            program = torch.export.export(Outputs(network).eval(), tuple(network.inputs.values()))
            torch.export.save(program, path)
    except Exception as error:  # the exporter raises many kinds for what it can't follow
        why = " ".join(str(error).split())[:200]
        raise ModelError(f"torch can't export this model ({why}); choose another format") from None
