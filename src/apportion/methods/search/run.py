"""A search end to end: anchor, calibrate, search at equal measured cost, train, measure afresh, certify."""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Mapping
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
from apportion.errors import BudgetError
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.costs import MeasuredIsoCost
from apportion.methods.search.evidence import known_sigma
from apportion.methods.search.folder import SearchFolder, SearchRunConfig
from apportion.methods.search.ground import Ground, block_space, prepare, training_proxy
from apportion.methods.search.loop import Found, Search, SearchConfig
from apportion.methods.search.pareto import LocalSet, local_set
from apportion.methods.search.proxy import FULL, Executor, Journal, Request, Sampler
from apportion.methods.search.train import TrainingProxy
from apportion.methods.search.utilities import UTILITIES
from apportion.models.safefile import folder_digest
from apportion.models.save import save

ANCHOR, FINAL = "anchor", "final"
MAX_CHECKS = 4
NUM_FINAL = 3


def search(
    config: SearchRunConfig,
    path: Path,
    progress: Progress | None = None,
    executor: Executor | None = None,
    *,
    store: Path | None = None,
) -> dict[str, Any]:
    """Runs a search and leaves everything in ``path``; started again with the same folder it goes on.

    ``store`` is where measurements are kept, in the folder unless it is given.

    Returns:
        The result as it stands in ``result.json``.

    Raises:
        InfeasibleError: no architecture of the space comes near the budget.
    """
    began = time.perf_counter()
    progress = progress or Silent()
    folder = SearchFolder(path)
    targets = usable(config, progress)
    run = folder.start(config)
    finished = folder.result()
    if finished is not None:
        return finished
    ground = prepare(config, targets, Store(store or folder.store), progress)
    proxy = training_proxy(config, ground.space)
    band, begin = ground.band, ground.begin
    near = MeasuredIsoCost(ground.space, band, ground.estimate, ground.clock.measure, span=ground.span)
    with Ledger(folder.ledger, run=run) as ledger:
        with progress.stage("search at equal cost") as update:
            sampler = Sampler(
                proxy, Journal(ledger), executor, max_evaluations=config.max_evaluations, unit="%", on_spend=update
            )
            found, sigma = _find(config, ground, near, sampler)
            several = _several(config, ground, near, sampler, found, sigma) if len(config.utilities) > 1 else None
        folder.write("trace.json", _trace(ledger))
    with progress.stage("train the result and the anchor") as update:
        quality, members = _train(config, folder, proxy, begin, found, several, update)
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
    report = _report(config, folder, found, ground, final, quality, sigma)
    if several is not None:
        report["pareto"] = {"settled": several.settled, "members": members}
    if certificate.met:
        folder.write("certificate.json", certificate.to_json())
    report |= {"met": certificate.met, "seconds": time.perf_counter() - began}
    folder.write("result.json", report)
    return report


def usable(config: SearchRunConfig, progress: Progress) -> list[Target]:
    """The targets, tried out; mistakes in the space, the data and the targets are told before any work is shown."""
    block_space(config, [find_target(name) for name in config.targets])
    with progress.stage("try the targets"):
        targets = [working_target(name) for name in config.targets]
    with progress.stage("load the images"):
        training_proxy(config, block_space(config, targets)).images.split()
    return targets


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
    return measure(candidates, target, Shape(), processes=4, seconds=3.0, tolerance=0.005).require()


def _find(
    config: SearchRunConfig, ground: Ground, near: MeasuredIsoCost, sampler: Sampler
) -> tuple[Found, dict[str, float]]:
    """Searches until a fresh measurement agrees that the result is in the band; and the noise of every utility."""
    band, begin, journal = ground.band, ground.begin, sampler.journal
    journal.note("start", begin, dict(near.costs(begin)), {"band": _limits(band)})
    whole = sampler.max_evaluations
    if whole is not None and len(config.utilities) > 1:
        sampler.max_evaluations = whole // 2  # the other half goes to the Pareto set
    sigma = _pilot(config, sampler, begin)
    made = Search(
        ground.space,
        sampler,
        known_sigma(sigma[config.utilities[0]]),
        SearchConfig(epsilon=config.epsilon, confidence=config.confidence, rule=config.rule),  # type: ignore[arg-type]
    )
    here = begin
    for _ in range(MAX_CHECKS):
        found = made.run(near, [here])
        if _checked(ground, near, sampler, found.arch):
            break
        here = found.path[-2] if len(found.path) > 1 else begin  # go on from where the search was before
    sampler.max_evaluations = whole
    return found, sigma


def _checked(ground: Ground, near: MeasuredIsoCost, sampler: Sampler, arch: Setting) -> bool:
    """Whether fresh processes agree that an architecture is in the band; where they don't, that is remembered."""
    band, checked = ground.band, ground.clock.check(arch)
    inside = all(band.limits(key)[0] <= one.value <= band.limits(key)[1] for key, one in checked.items())
    told = {"inside": inside, "excess": band.excess(checked)}
    sampler.journal.note("check", arch, checked, told, accepted=inside)
    if not inside:
        near.correct(arch, checked)
    return inside


def _several(
    config: SearchRunConfig,
    ground: Ground,
    near: MeasuredIsoCost,
    sampler: Sampler,
    found: Found,
    sigma: Mapping[str, float],
) -> LocalSet:
    """The result and those of its neighbours that it does not beat in every utility, all checked to be in the band."""
    around = near.around(found.arch, list(ground.space.layers)).archs
    made = local_set(
        [found.arch, *around],
        sampler,
        {name: known_sigma(sigma[name]) for name in config.utilities},
        epsilon=config.epsilon,
        confidence=config.confidence,
    )
    inside = [arch for arch in made.archs if arch == found.arch or _checked(ground, near, sampler, arch)]
    return LocalSet(tuple(inside), made.intervals, made.settled)


def _train(
    config: SearchRunConfig,
    folder: SearchFolder,
    proxy: TrainingProxy,
    begin: Setting,
    found: Found,
    several: LocalSet | None,
    update: Any,
) -> tuple[dict[str, Reading], list[dict[str, Any]]]:
    """Trains and saves the anchor, the result and the Pareto set; judged on images that nothing was chosen by."""
    archs = () if several is None else several.archs
    total, done = NUM_FINAL * 2 + len(archs), 0
    quality = {}
    for name, arch in ((ANCHOR, begin), (FINAL, found.arch)):
        values = []
        for replicate in range(NUM_FINAL):
            network = proxy.train(Request(arch, f"final-{name}", replicate), config.final_steps)
            values.append(UTILITIES[config.utilities[0]](network.module, proxy.images, "report"))
            if replicate == 0:
                save(network, folder.model if name == FINAL else folder.path / ANCHOR)
            done += 1
            update(done / total)
        spread = statistics.stdev(values) / len(values) ** 0.5
        quality[name] = Reading(value=statistics.fmean(values), unit="%", stderr=spread, count=len(values))
    members = []
    for number, arch in enumerate(archs, 1):
        network = proxy.train(Request(arch, f"final-{FINAL}", 0), config.final_steps)
        save(network, folder.path / "pareto" / str(number))
        assert several is not None
        members.append(
            {
                "arch": dict(arch),
                "short": {name: several.intervals[name][arch].to_json() for name in config.utilities},
                "long": {name: UTILITIES[name](network.module, proxy.images, "report") for name in config.utilities},
                "model": f"pareto/{number}",
            }
        )
        done += 1
        update(done / total)
    return quality, members


def _pilot(config: SearchRunConfig, sampler: Sampler, arch: Setting) -> dict[str, float]:
    """The noise of one evaluation: as given, or the upper 90 % limit of the deviation of a few runs of the start."""
    if config.sigma is not None:
        return dict.fromkeys(config.utilities, config.sigma)
    drawn: list[dict[str, float]] = []
    for _ in range(max(2, config.pilot)):
        drawn += sampler.draw_all([arch]) or []
    sampler.rewind()
    if len(drawn) < 2:
        raise BudgetError(
            f"{sampler.max_evaluations} evaluations don't hold the {config.pilot} that the noise is estimated from"
        )
    degrees = len(drawn) - 1
    made = {}
    for number, name in enumerate(config.utilities):
        variance = statistics.variance(one[FULL if number == 0 else name] for one in drawn)
        made[name] = max(1e-3, float((degrees * variance / chi2.ppf(0.1, degrees)) ** 0.5))
    return made


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
    ground: Ground,
    final: Mapping[str, Reading],
    quality: Mapping[str, Reading],
    sigma: Mapping[str, float],
) -> dict[str, Any]:
    band, clock = ground.band, ground.clock
    errors = {key: ground.estimate.error(key) for key in band.anchor}
    return {
        "space": config.space,
        "targets": list(config.targets),
        "utilities": list(config.utilities),
        "band": _limits(band),
        "anchor": {"arch": dict(ground.begin), "costs": {key: one.to_json() for key, one in band.anchor.items()}},
        "arch": dict(found.arch),
        "final": {key: one.to_json() for key, one in final.items()},
        "in_band": all(band.limits(key)[0] <= one.value <= band.limits(key)[1] for key, one in final.items()),
        "claim": found.claim.to_json(),
        "sigma": sigma[config.utilities[0]],
        "outcome": found.outcome,
        "num_evaluations": found.num_evaluations,
        "num_moves": found.num_moves,
        "num_measured": clock.num_measured,
        "align": clock.space.align,
        "estimate_error": {key: None if one is None else one.eta for key, one in errors.items()},
        "quality_before": quality[ANCHOR].to_json(),
        "quality_after": quality[FINAL].to_json(),
        "quality_of": f"{config.utilities[0]} on images of {config.data} that nothing was chosen by",
        "run": str(folder.path),
    }
