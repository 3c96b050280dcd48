"""Verify: measure a finished run's model again, in fresh processes, against what its certificate promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apportion.core.budget import Budget
from apportion.core.progress import Progress, Silent
from apportion.device.probe import working_target
from apportion.errors import ApportionError
from apportion.methods.compress.bench import Bench, latency_limit, model_digest, read_artefact
from apportion.methods.compress.rundir import RunDir, identity
from apportion.models.load import is_factory, load
from apportion.models.safefile import folder_digest
from apportion.tasks.batches import load_splits
from apportion.tasks.quality import quality_meter


def verify(folder: Path, model: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Measures the model in a run folder again; ``met`` in the result says whether it still keeps its promise.

    The promise is judged on the values measured now. Under a relative budget the original is measured again beside it.

    Args:
        model: the original, where it came from a factory: code named in a file is run only when you name it, too.
    """
    progress = progress or Silent()
    rundir = RunDir(folder)
    config, certificate = rundir.config(), rundir.certificate()
    if not rundir.model.is_dir() or folder_digest(rundir.model) != certificate.artefact:
        raise ApportionError(f"{rundir.model} is not the model that was certified; fit it again")
    named = config.factory or (config.model if is_factory(config.model) else None)
    if named is not None and model != named:
        raise ApportionError(f"the run's model comes from the factory {named!r}; confirm it with --model")
    with progress.stage("load"):
        original = load(
            config.model, batch=config.batch, tokens=config.tokens, seed=config.seed, factory=config.factory
        )
        splits = load_splits(original, config.data, seed=config.seed)
        network = load(
            str(rundir.model),
            batch=config.batch,
            tokens=config.tokens,
            seed=config.seed,
            factory=original.origin.factory,
        )
    asked = Budget.parse(certificate.asked)
    latency = latency_limit(asked)
    target = working_target(certificate.target).with_isa(certificate.conditions.get("isa"))
    bench = Bench(rundir, identity(config, model_digest(original)), config, target, original)
    session = None
    if latency is not None:
        with progress.stage("measure in fresh processes"):
            session = bench.measure(rundir.model)
    artefact = bench.artefact(network, rundir.model)
    measured = read_artefact(network, rundir.model, latency, certificate.baseline, session, artefact)
    with progress.stage("judge on held-out examples"):
        quality = quality_meter(original, splits.training, splits.report, config.quality)
        before = quality.read(original)
        after = bench.read_quality(quality, splits.report, network, rundir.model)
    return {
        "budget": certificate.asked,
        "limits": {limit.key: limit.value for limit in certificate.budget.limits},
        "target": certificate.target,
        "baseline": {key: reading.to_json() for key, reading in certificate.baseline.items()},
        "final": {key: reading.to_json() for key, reading in measured.items()},
        "quality_before": before.to_json(),
        "quality_after": after.to_json(),
        "quality": type(quality).__name__.lower(),
        "quality_of": splits.report.description,
        "conditions": dict(session.conditions) if session else {},
        "met": certificate.budget.met(measured),
        "run": str(rundir.path),
    }
