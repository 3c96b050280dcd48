"""Held-out samples of a clock that drifted: a ratio hides it, milliseconds show it, and a correction removes it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from apportion.core.meter import Reading
from apportion.cost.audit import audit
from apportion.cost.bound import UpperBound
from apportion.cost.curve import Curve
from apportion.cost.held_out import MAX_CORRECTING, MIN_JUDGING, HeldOut, correct, measure_held_out
from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.parts import Parts, View
from apportion.cost.profile import Profile
from apportion.cost.sample import Sample
from apportion.cost.sweep import Swept
from apportion.device.measure import Shape
from apportion.device.target import find_target, machine
from apportion.models.load import load
from apportion.models.partition import Partition

LAW = AdditiveLaw(1.0, {"a": Curve(0.0, (1.0,), (4.0,))}, {"p": "a", "q": "a"})
WHOLE_MS = 9.0


def profile(**changes):
    made = Profile(
        model="two-parts",
        target=find_target("torch-cpu-1t"),
        shape=Shape(),
        baseline=Reading(value=WHOLE_MS, unit="ms"),
        floor_ms=1.0,
        cost=CostModel(LAW, bound=UpperBound(0.05, (0.05,), (19,))),
        view=View(),
        seed=0,
        seconds=1.0,
        machine=machine(),
        failures={},
    )
    return dataclasses.replace(made, **changes)


def slowed(by, count):
    rng = np.random.default_rng(0)
    rows = [{part: float(rng.uniform()) for part in LAW.signature_of} for _ in range(count)]
    samples = [Sample(row, by * LAW.predict(row) * rng.lognormal(0.0, 0.005)) for row in rows]
    return HeldOut(samples, Reading(value=by * WHOLE_MS, unit="ms"), 0.001)


def test_a_slower_clock_is_hidden_by_the_ratio_and_shown_in_milliseconds():
    known, found = profile(), slowed(1.2, 24)
    assert audit(known.cost, found.as_of(known.baseline)).coverage == 1.0
    absolute = audit(known.cost, found.samples)
    assert absolute.coverage == 0.0
    assert absolute.median_rel_error == pytest.approx(1 - 1 / 1.2, abs=0.01)


@pytest.mark.parametrize("how", ["affine", "isotonic", "margin"])
def test_a_corrected_profile_speaks_of_the_clock_of_now_and_has_a_bound(how):
    found = slowed(1.2, 60)
    corrected = correct(profile(), found, how)
    made = corrected.profile
    assert made.baseline == found.baseline
    assert made.floor_ms == pytest.approx(1.2)
    judged = audit(made.cost, corrected.unseen)
    assert judged.median_rel_error < 0.03
    assert judged.coverage >= 0.8
    assert made.cost.bound.finite
    assert made.cost.bound.drift == found.drift
    assert "holds for one configuration" in corrected.explain()


def test_what_corrects_what_bounds_and_what_judges_are_apart():
    found = slowed(1.1, 60)
    corrected = correct(profile(), found, "affine")
    num_bounding = corrected.profile.cost.bound.counts[0]
    assert MAX_CORRECTING + num_bounding + len(corrected.unseen) == 60
    assert list(corrected.unseen) == list(found.samples[MAX_CORRECTING + num_bounding :])


@pytest.mark.parametrize("count", [2, 8, 24, 30])
def test_too_few_samples_leave_no_bound_and_say_how_many_more_it_takes(count):
    corrected = correct(profile(), slowed(1.1, count), "affine")
    assert corrected.profile.cost.bound is None
    assert f"{corrected.num_lacking} more" in corrected.explain()
    enough = correct(profile(), slowed(1.1, count + corrected.num_lacking), "affine")
    assert enough.profile.cost.bound.finite
    assert len(enough.unseen) >= MIN_JUDGING


def test_a_profile_of_another_machine_says_so_in_one_line():
    assert profile().elsewhere() is None
    assert profile(machine={}).elsewhere() is None  # an old profile that does not say
    assert profile(machine=machine() | {"python": "3.0"}).elsewhere() is None
    said = profile(machine=machine() | {"processor": "Abacus"}).elsewhere()
    assert "Abacus" in said
    assert "\n" not in said


def test_unseen_configurations_are_measured_at_the_size_of_the_profile(monkeypatch):
    cnn = "tests.factories:small_cnn"
    network = load(cnn, size=24)
    signature_of = Parts.of(network, Partition.of(network)).signature_of
    law = AdditiveLaw(1.0, dict.fromkeys(signature_of.values(), LAW.curves["a"]), signature_of)
    seen = []

    def sweep(network, parts, drawn, target, shape, **_):
        seen.append((tuple(network.inputs["0"].shape), shape))
        return Swept({}, {}, Reading(value=1.0, unit="ms"))

    monkeypatch.setattr("apportion.cost.held_out.sweep", sweep)
    sized = profile(model=cnn, shape=Shape(size=24), cost=CostModel(law))
    measure_held_out(sized, count=2, seed=1, confirmed=cnn)
    assert seen == [((1, 3, 24, 24), Shape(size=24))]
