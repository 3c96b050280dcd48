"""A search end to end: anchor, calibrate, search at equal measured cost, train, measure afresh, certify."""

from __future__ import annotations

import datetime
import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import chi2

from apportion.core.budget import Budget, Limit
from apportion.core.certificate import Certificate
from apportion.core.knob import Setting
from apportion.core.ledger import Ledger
from apportion.core.meter import Reading
from apportion.core.progress import Progress, Silent
from apportion.device.measure import Candidate, Session, Shape, measure
from apportion.device.probe import working_target
from apportion.device.store import Store
from apportion.device.target import Target, find_target, machine
from apportion.errors import BudgetError, InfeasibleError
from apportion.methods.search.anchors import recompensate
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.clock import Clock, Work, audit_widths
from apportion.methods.search.costs import MeasuredIsoCost, Recalibrated
from apportion.methods.search.evidence import known_sigma
from apportion.methods.search.folder import SearchFolder, SearchRunConfig
from apportion.methods.search.loop import Found, Search, SearchConfig
from apportion.methods.search.mutate import Neighbour
from apportion.methods.search.proxy import FULL, Executor, Journal, Request, Sampler
from apportion.methods.search.space import SpaceError
from apportion.methods.search.spaces import find_space
from apportion.methods.search.spaces.blocks import BlockSpace
from apportion.methods.search.train import Images, Recipe, TrainingProxy, accuracy
from apportion.models.safefile import folder_digest
from apportion.models.save import save
from apportion.numerics.stats import normal_quantile
from apportion.tasks.domains import load_domain

INT8_ALIGN, FP32_ALIGN = 16, 8
ANCHOR, FINAL = "anchor", "final"
MAX_CHECKS = 4


def search(
    config: SearchRunConfig, path: Path, progress: Progress | None = None, executor: Executor | None = None
) -> dict[str, Any]:
    """Runs a search and leaves everything in ``path``; started again with the same folder it goes on.

    Returns:
        The result as it stands in ``result.json``.

    Raises:
        InfeasibleError: no architecture of the space comes near the budget.
    """
    began = time.perf_counter()
    progress = progress or Silent()
    folder = SearchFolder(path)
    block_space(config, [find_target(name) for name in config.targets])  # mistakes are told before work is shown
    with progress.stage("try the targets"):
        targets = [working_target(name) for name in config.targets]
    space = block_space(config, targets)
    with progress.stage("load the images"):
        training_proxy(config, space).images.split()
    run = folder.start(config)
    finished = folder.result()
    if finished is not None:
        return finished
    with progress.stage("audit the grid of widths"):
        space, span = _on_grid(config, space, targets, Store(folder.store))
    proxy = training_proxy(config, space)
    anchor = _anchor_of(config, space)
    clock = Clock(space, targets, anchor, Store(folder.store), memory=config.memory)
    with progress.stage("measure the anchor"):
        base = clock.base()
    with progress.stage("calibrate the clock") as update:
        clock.on_step = lambda number: update(number / (config.calibration + 1))
        estimate = Recalibrated(_calibrated(config, space, clock), base)
        clock.on_step = None
    band, begin = _band(config, space, clock, estimate, base, anchor)
    near = MeasuredIsoCost(space, band, estimate, clock.measure, span=span)
    with Ledger(folder.ledger, run=run) as ledger:
        journal = Journal(ledger)
        with progress.stage("search at equal cost") as update:
            sampler = Sampler(
                proxy, journal, executor, max_evaluations=config.max_evaluations, unit="%", on_spend=update
            )
            journal.note("start", begin, dict(near.costs(begin)), {"band": _limits(band)})
            sigma = config.sigma or _pilot(sampler, begin, config.pilot)
            made = Search(
                space,
                sampler,
                known_sigma(sigma),
                SearchConfig(epsilon=config.epsilon, confidence=config.confidence, rule=config.rule),  # type: ignore[arg-type]
            )
            here = begin
            for _ in range(MAX_CHECKS):
                found = made.run(near, [here])
                checked = clock.check(found.arch)
                inside = all(band.limits(key)[0] <= one.value <= band.limits(key)[1] for key, one in checked.items())
                told = {"inside": inside, "excess": band.excess(checked)}
                journal.note("check", found.arch, checked, told, accepted=inside)
                if inside:
                    break
                near.correct(found.arch, checked)  # the clock disagrees: go on from where the search was before
                here = found.path[-2] if len(found.path) > 1 else begin
        folder.write("trace.json", _trace(ledger))
    with progress.stage("train the result and the anchor"):
        split = proxy.images.split()
        quality = {}
        for name, arch in ((ANCHOR, begin), (FINAL, found.arch)):
            values = []
            for replicate in range(3):
                network = proxy.train(Request(arch, f"final-{name}", replicate), config.final_steps)
                values.append(accuracy(network.module, *split.report))
                if replicate == 0:
                    save(network, folder.model if name == FINAL else folder.path / ANCHOR)
            spread = statistics.stdev(values) / len(values) ** 0.5
            quality[name] = Reading(value=statistics.fmean(values), unit="%", stderr=spread, count=len(values))
    with progress.stage("measure in fresh processes"):
        baseline = {f"latency@{t.name}": near.costs(begin)[f"latency@{t.name}"] for t in targets}
        final, conditions = measure_final(folder, targets, baseline)
    budget = Budget(
        tuple(
            Limit(quantity="latency", value=band.limits(f"latency@{t.name}")[1], unit="ms", target=t.name)
            for t in targets
        )
    )
    certificate = Certificate(
        asked=str(budget),
        budget=budget,
        baseline=baseline,
        measured=final,
        quality={"before": quality[ANCHOR], "after": quality[FINAL]},
        artefact=folder_digest(folder.model),
        target=", ".join(config.targets),
        conditions={"machine": machine(), **conditions, "band": _limits(band)},
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        confidence=config.confidence,
        z=0.0,
    )
    report = _report(config, folder, found, begin, band, final, quality, sigma, estimate, clock)
    if certificate.met:
        folder.write("certificate.json", certificate.to_json())
    report |= {"met": certificate.met, "seconds": time.perf_counter() - began}
    folder.write("result.json", report)
    return report


def block_space(config: SearchRunConfig, targets: list[Target]) -> BlockSpace:
    """The space at the size of the images and on the targets' grid, with int8 where every target runs it."""
    space = find_space(config.space)
    if not isinstance(space, BlockSpace):
        raise SpaceError(
            f"{config.space} is read from tables and can't be built; benchmarks/iso_cost_tables searches it, choose "
            "mobile-cnn or small-encoder"
        )
    int8 = all(target.precision == "int8" for target in targets)
    return replace(
        space,
        align=config.align or (INT8_ALIGN if any(target.precision == "int8" for target in targets) else FP32_ALIGN),
        precisions=("int8", "fp32") if int8 else ("fp32",),
        image_size=config.image_size or space.image_size,
        num_classes=len(load_domain(config.data).classes),
    )


def _on_grid(config: SearchRunConfig, space: BlockSpace, targets: list[Target], store: Store) -> tuple[BlockSpace, int]:
    """The space on the grid that every target likes, and how far apart costs may be out of order on it (K24, K25)."""
    if config.align is not None:
        return space, 0
    audits = [audit_widths(space, target, store) for target in targets]
    align = max([space.align, *(audit.step or 0 for audit in audits)])
    spans = [row.span for audit in audits for row in audit.rows if row.step == align]
    return replace(space, align=align), max(spans, default=0)


def training_proxy(config: SearchRunConfig, space: BlockSpace) -> TrainingProxy:
    num_images = len(load_domain(config.data))
    train = config.num_train or min(4000, num_images // 2)
    images = Images(config.data, space.image_size, space.num_channels, train, min(2000, num_images // 4), config.seed)
    return TrainingProxy(space, images, Recipe(steps={FULL: config.steps}), config.seed, config.train_on)


def measure_final(
    folder: SearchFolder, targets: list[Target], baseline: Costs
) -> tuple[dict[str, Reading], dict[str, Any]]:
    """The saved network beside the saved start in three fresh processes, on every target: ratio times the start's."""
    measured: dict[str, Reading] = {}
    conditions: dict[str, Any] = {}
    for target in targets:
        session, key = final_session(folder, target), f"latency@{target.name}"
        ratio, start = session.ratio(FINAL, ANCHOR), baseline[key].value
        measured[key] = Reading(value=ratio.value * start, unit="ms", stderr=ratio.stderr * start, count=ratio.count)
        conditions[target.name] = dict(session.conditions)
    return measured, conditions


def final_session(folder: SearchFolder, target: Target) -> Session:
    candidates = [
        Candidate(name=ANCHOR, ref=str(folder.path / ANCHOR)),
        Candidate(name=FINAL, ref=str(folder.model)),
    ]
    return measure(candidates, target, Shape(), processes=3, seconds=3.0, tolerance=0.005).require()


def _anchor_of(config: SearchRunConfig, space: BlockSpace) -> Setting:
    if config.anchor is None:
        return space.start()
    arch = Setting(config.anchor)
    space.check(arch)
    return arch


def _calibrated(config: SearchRunConfig, space: BlockSpace, clock: Clock) -> Work:
    """Prices of work fitted to random architectures of about the anchor's size, measured beside it."""
    rng = random.Random(config.seed)
    drawn = list(dict.fromkeys([clock.anchor, *(space.random(rng) for _ in range(config.calibration))]))
    return Work.fit(space, clock.measure(drawn), memory=config.memory)


def _band(
    config: SearchRunConfig, space: BlockSpace, clock: Clock, estimate: Recalibrated, base: Costs, anchor: Setting
) -> tuple[Band, Setting]:
    """The band and where to start: at the anchor, or at the template scaled to a budget."""
    z = normal_quantile(config.confidence)
    if config.budget is None:
        exact = {key: Reading(value=one.value, unit=one.unit, count=one.count) for key, one in base.items()}
        return Band.around(exact, config.tolerance, z=z), anchor
    asked = Budget.parse(config.budget)
    centre: dict[str, Reading] = {}
    for limit in asked.limits:
        keys = [key for key in base if key.partition("@")[0] == limit.quantity]
        keys = [key for key in keys if limit.target is None or key == limit.key]
        if not keys:
            raise BudgetError(f"budget {limit} limits what this search does not measure; it measures {', '.join(base)}")
        for key in keys:
            value = limit.value * base[key].value / 100 if limit.relative else limit.value
            centre[key] = Reading(value=value / (1 + config.tolerance), unit=base[key].unit)
    for key in base:
        if key not in centre:
            raise BudgetError(f"budget {config.budget!r} says nothing of {key}; limit it too, or leave it out")
    band = Band.around(centre, config.tolerance, z=z)
    wide = Band.around(centre, min(0.9, 3 * config.tolerance))
    for _ in range(4):  # estimate, measure, learn, estimate again
        made = recompensate(space, anchor, wide, estimate)
        if not isinstance(made, Neighbour):
            break
        measured = clock.measure([made.arch])
        if made.arch in measured:
            estimate.update(made.arch, measured[made.arch])
            if band.holds(measured[made.arch]):
                return band, made.arch
            wide = Band.around(centre, max(config.tolerance, wide.tolerance[next(iter(centre))] / 1.7))
    floor = clock.measure([space.scaled(anchor, 0.01)])
    told = ", ".join(f"{key} {one.value:.4g}{one.unit}" for costs in floor.values() for key, one in costs.items())
    raise InfeasibleError(
        f"no width brings {space.name} to budget {config.budget!r} within {config.tolerance:.0%}; its narrowest "
        f"measures {told}: choose another budget or a wider tolerance"
    )


def _pilot(sampler: Sampler, arch: Setting, num: int) -> float:
    """The noise of one evaluation: the upper 90 % limit of the deviation of a few runs of the start."""
    values: list[float] = []
    for _ in range(max(2, num)):
        drawn = sampler.draw([arch])
        if drawn is None:
            break
        values += drawn
    sampler.rewind()
    if len(values) < 2:
        raise BudgetError(
            f"{sampler.max_evaluations} evaluations don't hold the {num} that the noise is estimated from"
        )
    degrees = len(values) - 1
    variance = statistics.variance(values)
    return max(1e-3, float((degrees * variance / chi2.ppf(0.1, degrees)) ** 0.5))


def _limits(band: Band) -> dict[str, list[float]]:
    return {key: list(band.limits(key)) for key in band.anchor}


def _trace(ledger: Ledger) -> list[dict[str, Any]]:
    """Every decision with its evidence."""
    return [
        {"step": row.step, "accepted": row.accepted, "costs": {k: r.to_json() for k, r in row.readings.items()}}
        | json.loads(row.note)
        for row in ledger
        if row.kind == "move"
    ]


def _report(
    config: SearchRunConfig,
    folder: SearchFolder,
    found: Found,
    start: Setting,
    band: Band,
    final: Mapping[str, Reading],
    quality: Mapping[str, Reading],
    sigma: float,
    estimate: Recalibrated,
    clock: Clock,
) -> dict[str, Any]:
    errors = {key: estimate.error(key) for key in band.anchor}
    return {
        "space": config.space,
        "targets": list(config.targets),
        "band": _limits(band),
        "anchor": {"arch": dict(start), "costs": {key: one.to_json() for key, one in band.anchor.items()}},
        "arch": dict(found.arch),
        "final": {key: one.to_json() for key, one in final.items()},
        "in_band": all(band.limits(key)[0] <= one.value <= band.limits(key)[1] for key, one in final.items()),
        "claim": found.claim.to_json(),
        "sigma": sigma,
        "outcome": found.outcome,
        "num_evaluations": found.num_evaluations,
        "num_moves": found.num_moves,
        "num_measured": clock.num_measured,
        "align": clock.space.align,
        "estimate_error": {key: None if one is None else one.eta for key, one in errors.items()},
        "quality_before": quality[ANCHOR].to_json(),
        "quality_after": quality[FINAL].to_json(),
        "quality_of": f"accuracy on images of {config.data} that nothing was chosen by",
        "run": str(folder.path),
    }
