"""Views: the grids and the activations that made the clock are found again, and a plain clock is left plain."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from apportion.core.meter import Reading
from apportion.cost.calibrate import (
    MAX_FIT,
    MIN_FIT,
    NUM_DRAWN,
    anchor_sizes,
    bounding_among,
    calibrate_quickly,
    carry_over,
    fit_samples,
    num_to_fit,
    quick_sizes,
    sweep_sizes,
)
from apportion.cost.draw import draw_many
from apportion.cost.fit import FitOptions
from apportion.cost.parts import WRITTEN, Parts, View
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError, Sample
from apportion.cost.sweep import MAX_CHUNK, Swept, chunk_size
from apportion.cost.view import choose_options, choose_view, resee
from apportion.device.measure import Shape
from apportion.device.target import find_target
from apportion.models.load import load
from apportion.models.partition import Partition


@pytest.fixture(scope="module")
def parts():
    network = load("tests.factories:small_cnn")
    return Parts.of(network, Partition.of(network, multiple={"channels": 1}))


PLAIN = View()


def clock(parts, *, view=PLAIN, written_ms=2.0, noise=0.003, seed=0):
    """Latencies that are linear in the work as a kernel of this view does it, and in what is written."""
    rng = random.Random(seed)
    truth = parts.seen(view)
    sizes = [{}, *draw_many(parts, 60, seed)]
    price = {part.name: 1e-6 * part.flops for part in truth.parts}
    price[WRITTEN] = written_ms
    samples = []
    for size in sizes:
        shares = truth.shares(parts.partition.keep(size))
        exact = 0.3 + sum(price[name] * share for name, share in shares.items())
        samples.append(Sample(parts.shares(parts.partition.keep(size)), exact * rng.lognormvariate(0, noise)))
    return sizes, samples


def test_a_quick_calibration_measures_at_least_a_network_for_every_kind_of_part(parts):
    """Layers that do equal work may take very different times; each kind gets its price however many there are."""
    network = load("benchmarks.compress_vs_peers.networks:mobilenetv2")
    many = Parts.of(network, Partition.of(network))
    kinds = set(many.signature_of.values())
    assert len(kinds) > NUM_DRAWN > len(set(parts.signature_of.values()))
    asked, few = quick_sizes(many), quick_sizes(parts)
    assert len(asked) - len(anchor_sizes(many.partition)) == len(kinds)
    assert len(few) - len(anchor_sizes(parts.partition)) == NUM_DRAWN
    rng = random.Random(0)
    slower = {kind: rng.lognormvariate(0, 1) for kind in sorted(kinds)}
    price = {part.name: 1e-7 * part.flops * slower[part.signature] for part in many.parts}

    def clocked(sizes):
        shares = many.shares(many.partition.keep(sizes))
        return Sample(shares, 0.3 + sum(price[name] * share for name, share in shares.items()))

    whole = Reading(value=clocked({}).latency_ms, unit="ms")
    quick = calibrate_quickly(many, Swept(dict(enumerate(map(clocked, asked.values()))), {}, whole))
    errors = []
    for sizes in draw_many(many, 20, seed=9):
        sample = clocked(sizes)
        errors.append(abs(quick.cost.predict(sample.shares) / sample.latency_ms - 1))
    assert sorted(errors)[10] < 0.05


@pytest.mark.parametrize(
    "view", [View(), View(8, 1), View(8, 8), View(16, 1), View(16, 16), View(activations=True), View(8, 1, True)]
)
def test_the_view_that_made_the_clock_is_found(parts, view):
    viewed = choose_view(parts, *clock(parts, view=view))
    assert viewed.parts.view == view
    assert viewed.error_of[view] <= 1.01 * min(viewed.error_of.values())


def test_activations_get_no_price_where_none_can_be_told(parts):
    sizes, samples = clock(parts, view=View(activations=True))
    assert not choose_view(parts, sizes, samples, activations=False).parts.view.activations


def test_more_curves_are_fitted_to_more_configurations(parts):
    def with_curves(count):
        some = [dataclasses.replace(parts.parts[0], name=f"p{i}", signature=f"s{i % count}") for i in range(60)]
        return dataclasses.replace(parts, parts=tuple(some))

    wanted = [num_to_fit(with_curves(count)) for count in (1, 4, 8, 10, 60)]
    assert wanted == sorted(wanted)
    assert wanted[0] == MIN_FIT < wanted[2] < wanted[3] < wanted[4] == MAX_FIT


def test_seen_again_is_seen_the_same(parts):
    view = View(8, 8, activations=True)
    seen = parts.seen(view)
    assert WRITTEN in seen.signature_of
    assert seen.seen(view).signature_of == seen.signature_of
    assert seen.seen(PLAIN).signature_of == parts.signature_of
    assert set(seen.shares({}).values()) == {1.0}


def test_a_grid_only_rounds_up(parts):
    for size in draw_many(parts, 20, seed=3):
        keep = parts.partition.keep(size)
        plain, coarse = parts.shares(keep), parts.seen(View(16, 16)).shares(keep)
        assert all(coarse[name] >= plain[name] for name in plain)


def test_straight_lines_are_kept_where_the_clock_is_straight(parts):
    sizes, samples = clock(parts)
    options = choose_options(resee(parts, sizes, samples), parts.signature_of)
    assert isinstance(options, FitOptions)
    assert options.knots == (1.0,)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (40, 40), (41, 21), (58, 29)])
def test_chunks_are_even_and_bounded(count, expected):
    network = load("tests.factories:small_cnn")
    assert chunk_size(network, count) == expected <= MAX_CHUNK


def profile_of(parts):
    sizes, samples = clock(parts)
    swept = Swept(dict(enumerate(samples[1:])), {}, Reading(value=samples[0].latency_ms, unit="ms"))
    calibrated = fit_samples(parts, sizes[1:], swept, range(36, len(sizes)))
    return (
        sizes[1:],
        swept,
        Profile(
            model="small",
            target=find_target("torch-cpu-1t"),
            shape=Shape(),
            baseline=swept.baseline,
            floor_ms=None,
            cost=calibrated.cost,
            view=calibrated.parts.view,
            seed=0,
            seconds=0.0,
            machine={},
            failures={},
        ),
    )


def test_a_profile_is_carried_over_to_a_target_of_another_speed(parts):
    sizes, swept, profile = profile_of(parts)
    slower = Swept(
        {i: Sample(s.shares, 2.5 * s.latency_ms) for i, s in swept.samples.items()},
        {},
        Reading(value=2.5 * swept.baseline.value, unit="ms"),
    )
    few = Swept({i: s for i, s in slower.samples.items() if i < 6 or i >= 36}, {}, slower.baseline)
    carried = carry_over(profile, parts, sizes, few, range(36, len(sizes)))
    unseen = [i for i in slower.samples if 6 <= i < 36]
    for sample in resee(carried.parts, [sizes[i] for i in unseen], [slower.samples[i] for i in unseen]):
        assert carried.cost.predict(sample.shares) == pytest.approx(sample.latency_ms, rel=0.03)
    assert carried.cost.bound is not None


@pytest.mark.parametrize("loss", ["least_squares", "quantile", "envelope"])
def test_every_loss_is_fitted_bounded_and_kept_with_its_fidelity(parts, loss, tmp_path):
    sizes, swept, profile = profile_of(parts)
    calibrated = fit_samples(parts, sizes, swept, range(36, len(sizes)), loss=loss, tau=0.8)
    assert calibrated.cost.loss == loss
    assert calibrated.cost.bound.finite
    assert 1.0 <= calibrated.fidelity.kappa < 1.1
    dataclasses.replace(profile, cost=calibrated.cost, fidelity=calibrated.fidelity).save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").fidelity == calibrated.fidelity
    old = json.loads((tmp_path / "p.json").read_text())
    del old["fidelity"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Profile.load(tmp_path / "old.json").fidelity is None


def test_a_bound_on_a_menu_is_wider_than_one_on_a_single(parts):
    sizes, swept, _ = profile_of(parts)
    of_one = fit_samples(parts, sizes, swept, range(20, len(sizes))).cost.bound
    of_two = fit_samples(parts, sizes, swept, range(20, len(sizes)), num_menu=2).cost.bound
    assert of_two.num_menu == 2
    assert of_one.quantiles[0] <= of_two.quantiles[0] < float("inf")


def test_module_sweeps_move_one_module_each_and_fit_a_plain_clock(parts):
    alone = sweep_sizes(parts)
    assert all(len(sizes) == 1 for sizes in alone)
    moving = [set(parts.shares(parts.partition.keep(sizes)).items()) for sizes in alone]
    assert len({frozenset(shares) for shares in moving}) == len(alone)
    price = {part.name: 1e-6 * part.flops for part in parts.parts}

    def sample(size):
        shares = parts.shares(parts.partition.keep(size))
        return Sample(shares, 0.3 + sum(price[name] * share for name, share in shares.items()))

    drawn = draw_many(parts, 24, seed=1)
    sizes = [*alone, *drawn]
    swept = Swept({i: sample(s) for i, s in enumerate(sizes)}, {}, Reading(value=sample({}).latency_ms, unit="ms"))
    calibrated = fit_samples(parts, sizes, swept, range(len(alone), len(sizes)), sweeps=True)
    for size in draw_many(parts, 10, seed=2):
        shares = calibrated.parts.shares(parts.partition.keep(size))
        assert calibrated.cost.predict(shares) == pytest.approx(sample(size).latency_ms, rel=0.03)


def test_a_profile_of_another_network_is_not_carried_over(parts):
    sizes, swept, profile = profile_of(parts)
    other = dataclasses.replace(profile, view=View(activations=not profile.view.activations))
    with pytest.raises(CostError, match="whose parts are not"):
        carry_over(other, parts, sizes, swept, range(36, len(sizes)))


@pytest.mark.parametrize(("anchors", "fit", "bound"), [(4, 32, 22), (4, 8, 22), (0, 1, 1), (3, 5, 0)])
def test_every_half_of_the_draws_has_its_share_of_the_bound(anchors, fit, bound):
    found = bounding_among(anchors, fit, bound)
    assert len(found) == bound
    assert all(anchors <= place < anchors + fit + bound for place in found)
    middle = anchors + (fit + bound) // 2
    assert abs(sum(place < middle for place in found) - bound / 2) <= 1


def test_a_chunk_that_ran_faster_as_a_whole_leaves_the_bound_its_room(parts):
    """The second half of the session 4 % faster: a bound of that half alone would lie under the first half."""
    sizes, samples = clock(parts)
    drawn = samples[1:]
    half = len(drawn) // 2
    moved = [s if i < half else dataclasses.replace(s, latency_ms=0.96 * s.latency_ms) for i, s in enumerate(drawn)]
    swept = Swept(dict(enumerate(moved)), {}, Reading(value=samples[0].latency_ms, unit="ms"))

    def held(bounding):
        cost = fit_samples(parts, sizes[1:], swept, bounding).cost
        return sum(cost.upper(s.shares) >= s.latency_ms for s in drawn) / len(drawn)

    assert held(bounding_among(0, len(drawn) - 20, 20)) >= 0.95
    assert held(range(len(drawn) - 20, len(drawn))) < 0.9
