"""What a search stands on: the space on the targets' grid, the proxy, the clock and its estimate, band and start."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from apportion.core.budget import Budget
from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.core.progress import Progress
from apportion.device.store import Store
from apportion.device.target import Target
from apportion.errors import BudgetError, InfeasibleError
from apportion.methods.search.anchors import recompensate
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.clock import Clock, Work, audit_widths
from apportion.methods.search.costs import Recalibrated
from apportion.methods.search.folder import SearchRunConfig, percent_of
from apportion.methods.search.images import Images
from apportion.methods.search.mutate import Neighbour
from apportion.methods.search.proxy import FULL
from apportion.methods.search.space import SpaceError
from apportion.methods.search.spaces import find_space
from apportion.methods.search.spaces.blocks import BlockSpace
from apportion.methods.search.train import Recipe, TrainingProxy
from apportion.numerics.stats import normal_quantile
from apportion.tasks.domains import load_domain

INT8_ALIGN, FP32_ALIGN = 16, 8


@dataclass(frozen=True)
class Ground:
    """Everything that was measured before the first training; a function of the config and the stored measurements.

    ``span`` is how far apart costs were found out of order on the grid; ``begin`` is the start, ``band`` around what.
    """

    space: BlockSpace
    span: int
    clock: Clock
    estimate: Recalibrated
    band: Band
    begin: Setting


def prepare(config: SearchRunConfig, targets: list[Target], store: Store, progress: Progress) -> Ground:
    """Audits the grid, measures the anchor, calibrates the estimate and finds a start in the band.

    Raises:
        InfeasibleError: no architecture of the space comes near what was asked for.
    """
    with progress.stage("audit the grid of widths"):
        space, span = _on_grid(config, block_space(config, targets), targets, store)
    anchor = space.start() if config.anchor is None else Setting(config.anchor)
    space.check(anchor)
    clock = Clock(space, targets, anchor, store, memory=config.memory)
    with progress.stage("measure the anchor"):
        base = clock.base()
    with progress.stage("calibrate the clock") as update:
        clock.on_step = lambda number: update(number / (config.calibration + 1))
        estimate = Recalibrated(_calibrated(config, space, clock), base)
        clock.on_step = None
        band = _band(config, base)
        begin = _begin(config, space, band, clock, estimate, anchor)
    return Ground(space, span, clock, estimate, band, begin)


def block_space(config: SearchRunConfig, targets: list[Target]) -> BlockSpace:
    """The space at the size of the images and on the targets' grid, with int8 where every target runs it."""
    space = find_space(config.space)
    if not isinstance(space, BlockSpace):
        raise SpaceError(
            f"{config.space} is read from tables and can't be built; benchmarks/iso_cost_tables searches it, choose "
            "mobile-cnn or small-encoder"
        )
    int8 = all(target.precision == "int8" for target in targets)
    made = replace(
        space,
        align=config.align or (INT8_ALIGN if any(target.precision == "int8" for target in targets) else FP32_ALIGN),
        precisions=("int8", "fp32") if int8 else ("fp32",),
        image_size=config.image_size or space.image_size,
        num_classes=len(load_domain(config.data).classes),
    )
    try:
        made.random(random.Random(0))
    except SpaceError:
        raise SpaceError(
            f"{config.space} has no architecture for images of {made.image_size} pixels a side; its usual size is "
            f"{space.image_size}, choose another --image-size"
        ) from None
    return made


def training_proxy(config: SearchRunConfig, space: BlockSpace) -> TrainingProxy:
    num_images = len(load_domain(config.data))
    train = config.num_train or min(4000, num_images // 2)
    images = Images(config.data, space.image_size, space.num_channels, train, min(2000, num_images // 4), config.seed)
    recipe = Recipe(steps={FULL: config.steps})
    return TrainingProxy(space, images, recipe, config.seed, config.train_on, config.utilities)


def _on_grid(config: SearchRunConfig, space: BlockSpace, targets: list[Target], store: Store) -> tuple[BlockSpace, int]:
    """The space on the grid that every target likes, and how far apart costs may be out of order on it (K24, K25)."""
    if config.align is not None:
        return space, 0
    audits = [audit_widths(space, target, store) for target in targets]
    align = max([space.align, *(audit.step or 0 for audit in audits)])
    spans = [row.span for audit in audits for row in audit.rows if row.step == align]
    return replace(space, align=align), max(spans, default=0)


def _calibrated(config: SearchRunConfig, space: BlockSpace, clock: Clock) -> Work:
    """Prices of work fitted to random architectures of about the anchor's size, measured beside it."""
    rng = random.Random(config.seed)
    drawn = list(dict.fromkeys([clock.anchor, *(space.random(rng) for _ in range(config.calibration))]))
    return Work.fit(space, clock.measure(drawn), memory=config.memory)


def _band(config: SearchRunConfig, base: Costs) -> Band:
    """The band around the anchor's own cost, around the cost asked for, or up to it."""
    z = normal_quantile(config.confidence)
    asked = config.budget or config.anchor_cost
    if asked is None:
        exact = {key: Reading(value=one.value, unit=one.unit, count=one.count) for key, one in base.items()}
        return Band.around(exact, config.tolerance, z=z)
    centre = _centre(asked, base)
    if config.budget is not None:  # the band ends at a budget, and lies on both sides of an anchor
        centre = {key: Reading(value=one.value / (1 + config.tolerance), unit=one.unit) for key, one in centre.items()}
    return Band.around(centre, config.tolerance, z=z)


def _begin(
    config: SearchRunConfig, space: BlockSpace, band: Band, clock: Clock, estimate: Recalibrated, anchor: Setting
) -> Setting:
    """Where to start in the band: at the anchor, at the anchor scaled to a cost, or at another run's architecture."""
    asked = config.budget or config.anchor_cost
    if config.start is None:
        if asked is None:
            return anchor
        return _scaled_into(space, anchor, band, clock, estimate, f"{asked!r} within {config.tolerance:.0%}")
    here = space.start()
    shared = {name: value for name, value in config.start.items() if name in here and not name.endswith(".precision")}
    arch = space.scaled(Setting({**here, **shared}), 1.0)
    space.check(arch)
    made = recompensate(space, arch, band, estimate)
    if isinstance(made, Neighbour):
        known = clock.measure([made.arch]).get(made.arch)
        if known is not None:
            estimate.update(made.arch, known)
            if band.holds(known):
                return made.arch
    return _scaled_into(space, arch, band, clock, estimate, "the band with another run's choices")


def _scaled_into(
    space: BlockSpace, arch: Setting, band: Band, clock: Clock, estimate: Recalibrated, where: str
) -> Setting:
    """The architecture at other widths, measured inside the band."""
    found, known = _reach(space, arch, band, clock)
    for one, costs in known.items():
        estimate.update(one, costs)
    if found is not None:
        return found
    by_width = sorted(known, key=lambda one: _total_width(space, one))
    told = [
        ", ".join(f"{key} {one.value:.4g}{one.unit}" for key, one in known[by_width[end]].items()) for end in (0, -1)
    ]
    raise InfeasibleError(
        f"no width brings {space.name} to {where}; its narrowest and widest measure {' and '.join(told)}: choose "
        "another cost or a wider tolerance"
    )


def _reach(space: BlockSpace, anchor: Setting, band: Band, clock: Clock) -> tuple[Setting | None, dict[Setting, Costs]]:
    """The anchor at other widths that measures inside the band, or None, and all that was measured.

    A ladder of widths from an eighth to eight times is measured, then what lies between the two rungs on either side.
    """
    known: dict[Setting, Costs] = {}
    rungs = [space.scaled(anchor, 2.0 ** (0.75 * step)) for step in range(-4, 5)]
    for _ in range(3):
        known |= clock.measure([arch for arch in dict.fromkeys(rungs) if arch not in known])
        rungs = sorted((arch for arch in set(rungs) if arch in known), key=lambda arch: _total_width(space, arch))
        inside = [arch for arch in rungs if band.holds(known[arch])]
        if inside:
            return min(inside, key=lambda arch: band.deviation(known[arch])), known
        around = [pair for pair in pairwise(rungs) if [band.position(known[arch]) for arch in pair] == [-1, 1]]
        if not around:
            break
        rungs = [*around[0], *_between(space, *around[0])]
    return None, known


def _between(space: BlockSpace, narrow: Setting, wide: Setting) -> list[Setting]:
    """Architectures between two: at widths between theirs, and with the first blocks of the wider one."""
    made = []
    for share in (0.2, 0.4, 0.6, 0.8):
        widths = {
            f"{layer}.width": space.on_grid(_width(narrow, layer) ** (1 - share) * _width(wide, layer) ** share)
            for layer in space.layers
        }
        made.append(Setting({**narrow, **widths}))
    for num in range(1, len(space.layers)):
        widths = {f"{layer}.width": _width(wide, layer) for layer in space.layers[:num]}
        made.append(Setting({**narrow, **widths}))
    return made


def _width(arch: Setting, layer: str) -> int:
    width = arch[f"{layer}.width"]
    assert isinstance(width, int)
    return width


def _total_width(space: BlockSpace, arch: Setting) -> int:
    return sum(_width(arch, layer) for layer in space.layers)


def _centre(asked: str, base: Costs) -> dict[str, Reading]:
    """The cost asked for of every quantity that is measured; a bare percentage is of all of them."""
    percent = percent_of(asked)
    if percent is not None:
        return {key: Reading(value=percent * one.value / 100, unit=one.unit) for key, one in base.items()}
    centre: dict[str, Reading] = {}
    for limit in Budget.parse(asked).limits:
        keys = [key for key in base if key.partition("@")[0] == limit.quantity]
        keys = [key for key in keys if limit.target is None or key == limit.key]
        if not keys:
            raise BudgetError(f"{limit} is about what this search does not measure; it measures {', '.join(base)}")
        for key in keys:
            value = limit.value * base[key].value / 100 if limit.relative else limit.value
            centre[key] = Reading(value=value, unit=base[key].unit)
    for key in base:
        if key not in centre:
            raise BudgetError(f"{asked!r} says nothing of {key}; give it a cost too, or leave it out")
    return centre
