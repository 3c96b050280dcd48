"""Calibrating a cost model: anchors for a quick one, a drawn sweep for one with an upper bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from apportion.core.meter import Reading
from apportion.cost.bound import num_needed
from apportion.cost.distortion import Fidelity
from apportion.cost.draw import Sizes, draw_many
from apportion.cost.fit import Loss
from apportion.cost.model import CostModel
from apportion.cost.parts import Parts
from apportion.cost.power import read_power
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError, Sample
from apportion.cost.sweep import Swept, sweep
from apportion.cost.transfer import transfer
from apportion.cost.view import choose_options, choose_view, resee
from apportion.device.measure import Shape
from apportion.device.store import Store
from apportion.device.target import Target, machine
from apportion.errors import MeasureError
from apportion.models.network import Network
from apportion.models.partition import Module, Partition

CHEAPEST = "cheapest"
MIN_FIT, MAX_FIT, PER_CURVE = 16, 48, 4
NUM_CARRIED = 8
PER_SWEEP = 5  # configurations of a module's sweep
NUM_DRAWN = 10  # configurations of a quick calibration beside its anchors, and at least one for every curve
ALPHA = 0.05


@dataclass(frozen=True)
class Anchored:
    """A quick calibration: a model through a few anchors and draws, without a bound, and the measured floor."""

    cost: CostModel
    parts: Parts
    baseline: Reading
    floor: Reading


def quick_sizes(parts: Parts) -> dict[str, Sizes]:
    """What a quick calibration measures: the anchors, and a few configurations drawn at random."""
    curves = len(set(parts.signature_of.values()))
    count = min(MAX_FIT, max(NUM_DRAWN, curves))
    drawn = {f"drawn {i}": sizes for i, sizes in enumerate(draw_many(parts, count, seed=0), start=1)}
    return {**anchor_sizes(parts.partition), **drawn}


def anchor_sizes(partition: Partition) -> dict[str, dict[str, int]]:
    """How many units each module keeps in every anchor: each kind at half, all at half, and all at their least."""
    half = {module.name: _half(module) for module in partition}
    kinds = sorted({module.kind for module in partition})
    anchors = {
        f"half {kind}": {module.name: half[module.name] for module in partition if module.kind == kind}
        for kind in kinds
    }
    if len(kinds) > 1:
        anchors["half"] = half
    anchors[CHEAPEST] = {module.name: module.sizes()[0] for module in partition}
    return anchors


def calibrate_quickly(parts: Parts, measured: Swept) -> Anchored:
    """The model through what ``quick_sizes`` lists, measured in that order, and the whole network."""
    asked = quick_sizes(parts)
    names, sizes = list(asked), list(asked.values())
    for index, failure in measured.failures.items():
        if index < len(anchor_sizes(parts.partition)):
            raise MeasureError(f"the anchor {names[index]!r} could not be measured: {failure.kind}: {failure.message}")
    seen = choose_view(parts, [{}, *(sizes[i] for i in measured.samples)], _with_whole(parts, measured)).parts
    samples = resee(seen, [{}, *(sizes[i] for i in measured.samples)], _with_whole(parts, measured))
    work = {part.signature: part.flops for part in seen.parts}  # a few samples leave much open
    options = choose_options(samples, seen.signature_of, work=work)
    cost = CostModel.fit(
        samples, seen.signature_of, knots=options.knots, ridge=options.ridge, residual="off", work=work
    )
    least = measured.samples[names.index(CHEAPEST)]
    floor = Reading(value=least.latency_ms, unit="ms", stderr=least.stderr_ms)
    return Anchored(cost, seen, measured.baseline, floor)


def _with_whole(parts: Parts, measured: Swept) -> list[Sample]:
    return [whole_sample(parts, measured), *measured.samples.values()]


def num_to_fit(parts: Parts) -> int:
    """Configurations that a law of these parts is fitted to: some for every curve, since curves are what is fitted."""
    return min(MAX_FIT, max(MIN_FIT, PER_CURVE * len(set(parts.signature_of.values()))))


def calibrate(
    network: Network,
    parts: Parts,
    target: Target,
    shape: Shape,
    *,
    seed: int = 0,
    num_fit: int | None = None,
    num_bound: int | None = None,
    num_menu: int = 1,
    like: Profile | None = None,
    loss: Loss = "least_squares",
    tau: float = 0.9,
    sweeps: bool = False,
    store: Store | None = None,
    on_share: Callable[[float], None] | None = None,
) -> Profile:
    """Measures drawn configurations, fits the cost model to some of them and bounds it with the others.

    Where the device has an energy counter, the power of the whole network and of the cheapest is read once at the end.

    Args:
        num_fit: configurations to fit to, besides the anchors; by default as many as the law's curves need,
            or a handful with ``like``.
        num_bound: configurations to calibrate the bound on; by default as few as 95 % needs, and a fifth more.
        num_menu: the bound shall hold for so many configurations at once.
        like: a profile of the same network on another target, whose curves are carried over.
        loss: least squares, the quantile ``tau``, or an envelope above all that is fitted to.
        sweeps: fit each curve to configurations that move its own module alone, instead of drawn ones.
        store: keeps what is measured, so that a calibration that was stopped goes on.
        on_share: told the share of the work done.
    """
    began = time.perf_counter()
    if like is not None and (sweeps or loss != "least_squares"):
        raise CostError("a profile carried over keeps the curves of another target; leave out either it or how to fit")
    alone = sweep_sizes(parts) if sweeps else []
    if num_fit is None or sweeps:
        num_fit = len(alone) if sweeps else num_to_fit(parts) if like is None else NUM_CARRIED
    if num_bound is None:
        num_bound = num_needed(ALPHA, num_menu, "single" if num_menu == 1 else "exchangeable") * 6 // 5
    anchors = list(anchor_sizes(parts.partition).values())
    bounding = bounding_among(len(anchors), num_fit, num_bound)
    at_random = draw_many(parts, num_bound if sweeps else num_fit + num_bound, seed)
    drawn: list[Sizes] = [*anchors, *at_random]
    for place in range(len(anchors), len(anchors) + num_fit + num_bound) if sweeps else ():
        if place not in bounding:
            drawn.insert(place, alone.pop(0))
    swept = sweep(network, parts, drawn, target, shape, store=store, on_chunk=on_share)
    if like is None:
        calibrated = fit_samples(parts, drawn, swept, bounding, loss=loss, tau=tau, sweeps=sweeps, num_menu=num_menu)
    else:
        calibrated = carry_over(like, parts, drawn, swept, bounding, num_menu=num_menu)
    least = swept.samples.get(len(anchors) - 1)
    power = None if least is None else read_power(network, parts.partition, anchors[-1], target, shape)
    return Profile(
        model=network.origin.ref,
        target=target,
        shape=shape,
        baseline=swept.baseline,
        floor_ms=None if least is None else least.latency_ms,
        cost=calibrated.cost,
        fidelity=calibrated.fidelity,
        power=power,
        view=calibrated.parts.view,
        seed=seed,
        seconds=time.perf_counter() - began,
        machine=machine(),
        failures={str(i): f"{failure.kind}: {failure.message}" for i, failure in swept.failures.items()},
        conditions=swept.conditions,
    )


@dataclass(frozen=True)
class Calibrated:
    """A fitted and bounded cost model, and the parts under the view it was fitted in.

    ``fidelity`` comes from the samples that the bound is calibrated on, which the fit has not seen.
    """

    cost: CostModel
    parts: Parts
    fidelity: Fidelity


def bounding_among(num_anchors: int, num_fit: int, num_bound: int) -> frozenset[int]:
    """Which configurations calibrate the bound: spread evenly over those drawn, which come after the anchors.

    What is measured together moves together. Were the last chunk all of the bound, its luck would be taken for an error
    of the fit, and a lucky chunk for a bound with no room.
    """
    count = num_fit + num_bound
    return frozenset(
        num_anchors + place for place in range(count) if (place + 1) * num_bound // count > place * num_bound // count
    )


def sweep_sizes(parts: Parts, per_module: int = PER_SWEEP) -> list[Sizes]:
    """Configurations that each move one module, at a few sizes; of modules that move the same kinds, the first."""
    chosen: list[Sizes] = []
    known: set[frozenset[str]] = set()
    for module in parts.partition:
        smaller = [size for size in module.sizes() if size < module.num_units]
        if not smaller:
            continue
        shares = parts.shares(parts.partition.keep({module.name: smaller[0]}))
        moved = frozenset(parts.signature_of[name] for name, share in shares.items() if share < 1.0)
        if moved in known:
            continue
        known.add(moved)
        num = min(per_module, len(smaller))
        chosen += [{module.name: smaller[place * (len(smaller) - 1) // max(1, num - 1)]} for place in range(num)]
    return chosen


def fit_samples(
    parts: Parts,
    drawn: Sequence[Sizes],
    swept: Swept,
    bounding: Collection[int],
    *,
    loss: Loss = "least_squares",
    tau: float = 0.9,
    sweeps: bool = False,
    num_menu: int = 1,
) -> Calibrated:
    """Chooses the view and the options, bounds with the samples ``bounding`` names and fits to the others."""
    sizes, measured = _chosen(drawn, swept, set(swept.samples) - set(bounding))
    sizes, measured = [{}, *sizes], [whole_sample(parts, swept), *measured]
    parts = choose_view(parts, sizes, measured, activations=not sweeps).parts
    to_fit = resee(parts, sizes, measured)
    to_bound = resee(parts, *_chosen(drawn, swept, bounding))
    options = choose_options(to_fit, parts.signature_of, launches=loss == "least_squares" and not sweeps)
    cost = CostModel.fit(
        to_fit,
        parts.signature_of,
        loss=loss,
        tau=tau,
        knots=options.knots,
        ridge=options.ridge,
        sweeps=sweeps,
        launches=options.launches,
    )
    return _bounded(cost, parts, to_bound, swept.drift, num_menu)


def _bounded(cost: CostModel, parts: Parts, to_bound: Sequence[Sample], drift: float, num_menu: int) -> Calibrated:
    bounded = cost.bounded(to_bound, ALPHA, num_menu=num_menu, drift=drift)
    return Calibrated(bounded, parts, Fidelity.of(*cost.pairs(to_bound)))


def carry_over(
    like: Profile,
    parts: Parts,
    drawn: Sequence[Sizes],
    swept: Swept,
    bounding: Collection[int],
    *,
    num_menu: int = 1,
) -> Calibrated:
    """The curves of another target's profile, bounded with the samples ``bounding`` names, rescaled by the others.

    Raises:
        CostError: the profile is of a network with other parts.
    """
    parts = parts.seen(like.view)
    if parts.signature_of != dict(like.cost.law.signature_of):
        raise CostError(f"the profile is of {like.model}, whose parts are not this network's; calibrate without it")
    sizes, measured = _chosen(drawn, swept, set(swept.samples) - set(bounding))
    to_fit = resee(parts, [{}, *sizes], [whole_sample(parts, swept), *measured])
    to_bound = resee(parts, *_chosen(drawn, swept, bounding))
    kinds = {signature: signature.split()[0] for signature in like.cost.law.curves}
    cost = transfer(like.cost, to_fit, kinds)
    return _bounded(cost, parts, to_bound, swept.drift, num_menu)


def _chosen(drawn: Sequence[Sizes], swept: Swept, wanted: Collection[int]) -> tuple[list[Sizes], list[Sample]]:
    """The configurations of these numbers that were measured, and their samples."""
    places = [i for i in swept.samples if i in wanted]
    return [drawn[i] for i in places], [swept.samples[i] for i in places]


def whole_sample(parts: Parts, swept: Swept) -> Sample:
    """The untouched network as a sample."""
    shares = dict.fromkeys(parts.signature_of, 1.0)
    return Sample(shares=shares, latency_ms=swept.baseline.value, stderr_ms=swept.baseline.stderr)


def _half(module: Module) -> int:
    return min(module.sizes(), key=lambda size: abs(size - module.num_units / 2))
