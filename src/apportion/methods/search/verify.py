"""Verify: measure a finished search's network again, in fresh processes, against its certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apportion.core.progress import Progress, Silent
from apportion.device.probe import working_target
from apportion.errors import ApportionError
from apportion.methods.search.folder import SearchFolder
from apportion.methods.search.run import measure_final
from apportion.models.safefile import folder_digest


def verify(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Measures the network and its anchor again; ``met`` says whether the ratio still keeps the promised limit."""
    progress = progress or Silent()
    folder = SearchFolder(path)
    config, certificate = folder.config(), folder.certificate()
    if not folder.model.is_dir() or folder_digest(folder.model) != certificate.artefact:
        raise ApportionError(f"{folder.model} is not the network that was certified; search again")
    with progress.stage("measure in fresh processes"):
        targets = [working_target(name) for name in config.targets]
        measured, conditions = measure_final(folder, targets, certificate.baseline)
    return {
        "budget": certificate.asked,
        "limits": {limit.key: limit.value for limit in certificate.budget.limits},
        "target": certificate.target,
        "baseline": {key: reading.to_json() for key, reading in certificate.baseline.items()},
        "final": {key: reading.to_json() for key, reading in measured.items()},
        "quality_before": certificate.quality["before"].to_json(),
        "quality_after": certificate.quality["after"].to_json(),
        "quality_of": "what the search reported; accuracy is not measured again",
        "conditions": conditions,
        "met": certificate.budget.met(measured),
        "run": str(folder.path),
    }
