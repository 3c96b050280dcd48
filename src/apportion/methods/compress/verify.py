"""Verify: measure a finished run's model again, in fresh processes, against what its certificate promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from apportion.core.budget import Budget
from apportion.core.certificate import Certificate
from apportion.core.loop import OVER_BUDGET, UNDER_FLOOR
from apportion.core.progress import Progress, Silent
from apportion.device.build import model_files, needs_build
from apportion.device.probe import working_target
from apportion.device.target import find_target
from apportion.errors import ApportionError
from apportion.methods.compress.bench import Bench, contents_of, measured_limits, model_digest, read_artefact
from apportion.methods.compress.floor import FloorMeter
from apportion.methods.compress.judge import load_examples, meter_of, meter_over
from apportion.methods.compress.rundir import FitConfig, RunDir, Rung, identity
from apportion.models.load import is_factory, load
from apportion.models.safefile import file_digest, folder_digest


def confirm_factory(config: FitConfig, model: str | None) -> None:
    """Code named in a run's files is run only where the user names it, too."""
    named = config.factory or (config.model if is_factory(config.model) else None)
    if named is not None and model != named:
        raise ApportionError(f"the run's model comes from the factory {named!r}; confirm it with --model")


def certified_artefact(rung: Rung, certificate: Certificate) -> Path | None:
    """The files of a rung that its certificate is about; None where the target runs the model itself.

    Raises:
        ApportionError: they are not the ones that were certified.
    """
    if not needs_build(find_target(certificate.target)):
        return None  # its folder has a digest of its own
    artefact = rung.artefact
    if not artefact.is_dir():
        raise ApportionError(f"{artefact} is gone, which the certificate is about; fit it again")
    if {path.name: file_digest(path) for path in model_files(artefact)} != dict(certificate.files):
        raise ApportionError(f"{artefact} does not hold the files that were certified; fit it again")
    return artefact


def verify(folder: Path, model: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Measures the model in a run folder again; ``met`` in the result says whether it still keeps its promise.

    The promise is judged on the values measured now. Under a relative budget the original is measured again beside it.
    Where the run had a quality floor, it is read again as the run did, from the certified files where they are int8.

    Args:
        model: the original, where it came from a factory: code named in a file is run only when you name it, too.
    """
    progress = progress or Silent()
    rundir = RunDir(folder)
    config, rung = rundir.config(), rundir.rung_in_use
    certificate = rung.certificate()
    config_then, run = config, rundir.read(rundir.file).get("identity")
    if certificate.floor is not None:  # what was promised; certificates from before floors leave it to the config
        promised = certificate.floor
        config = replace(config, quality_floor=promised.asked, floor_confidence=promised.confidence)
    if not rung.model.is_dir() or folder_digest(rung.model) != certificate.artefact:
        raise ApportionError(f"{rung.model} is not the model that was certified; fit it again")
    confirm_factory(config, model)
    artefact = certified_artefact(rung, certificate)
    with progress.stage("load"):
        original = load(
            config.model,
            batch=config.batch,
            tokens=config.tokens,
            seed=config.seed,
            size=config.size,
            factory=config.factory,
        )
        if identity(config_then, model_digest(original), contents_of(config_then)) != run:
            raise ApportionError(
                f"{config.model} or the data are not those that {folder} was made from; put them back, or fit anew"
            )
        floored = config.quality_floor is not None
        splits = load_examples(original, config.data, config.quality, seed=config.seed, guard=floored)
        network = load(
            str(rung.model),
            batch=config.batch,
            tokens=config.tokens,
            seed=config.seed,
            size=config.size,
            factory=original.origin.factory,
        )
    asked = Budget.parse(certificate.asked)
    target = working_target(certificate.target).with_isa(certificate.conditions.get("isa"))
    bench = Bench(rundir, run, config, target, original)
    session = None
    if measured_limits(asked):
        with progress.stage("measure in fresh processes"):
            session = bench.measure(rung.model, artefact=artefact)
    opened = artefact or bench.artefact(network, rung.model)
    measured = read_artefact(network, rung.model, asked, target, certificate.baseline, session, opened)
    with progress.stage("judge on held-out examples"):
        quality = meter_of(original, splits, splits.report, config.quality)
        before = quality.read(original)
        after = bench.read_quality(quality, splits.report, network, rung.model, artefact)
    floor = None
    if config.quality_floor is not None:
        with progress.stage("judge against the quality floor"):
            guard = meter_over(quality, original, splits, splits.guard, config.quality)
            kept = FloorMeter(original, guard, splits.guard, bench)
            floor = kept.floor(kept.read(network, rung.model, artefact))
    within, above = certificate.budget.met(measured), floor is None or floor.met
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
        "quality_floor": config.quality_floor,
        "floor": None if floor is None else floor.to_json(certificate.confidence),
        "conditions": dict(session.conditions) if session else {},
        "outcome": "met" if within and above else UNDER_FLOOR if within else OVER_BUDGET,
        "met": within and above,
        "run": str(rundir.path),
    }
