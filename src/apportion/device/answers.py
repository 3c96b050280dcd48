"""What a built artefact answers: its outputs on given inputs, computed by the runtime in a child process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from apportion.device.build import build_all
from apportion.device.measure import Candidate, Shape
from apportion.device.process import Failure, Limits, run_child
from apportion.device.target import Target
from apportion.errors import MeasureError


def build(candidate: Candidate, target: Target, shape: Shape, limits: Limits | None = None) -> Path:
    """The folder of a candidate's artefact on a graph runtime, from the cache or built now."""
    job = {**asdict(candidate), "artefact": None}
    built = build_all([job], target, asdict(shape), limits or Limits(), lambda: None)[candidate.name]
    if isinstance(built, Failure):
        raise MeasureError(f"{candidate.name} could not be built on {target.name}: {built.kind}: {built.message}")
    return built


def answers(
    artefact: Path, target: Target, batches: Sequence[Mapping[str, Tensor]], limits: Limits | None = None
) -> list[list[Tensor]]:
    """The artefact's outputs on every batch; batches have exactly the shapes it was built for."""
    with tempfile.TemporaryDirectory(prefix="apportion-answers-") as scratch:
        given, found = Path(scratch) / "given.safetensors", Path(scratch) / "found.safetensors"
        named = {f"{i}.{name}": tensor for i, batch in enumerate(batches) for name, tensor in batch.items()}
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, given)
        job = {
            "action": "answer",
            "target": target.to_json(),
            "artefact": str(artefact),
            "given": str(given),
            "found": str(found),
        }
        ended = run_child(job, target.environment, limits or Limits())
        if ended.failure is not None:
            raise MeasureError(f"the model could not be run on {target.name}: {ended.failure.message}")
        outputs: dict[int, dict[int, Tensor]] = {}
        for name, tensor in load_file(found).items():
            batch, _, place = name.partition(".")
            outputs.setdefault(int(batch), {})[int(place)] = tensor.to(torch.float32)
    return [[outputs[batch][place] for place in sorted(outputs[batch])] for batch in sorted(outputs)]
