"""Sweeps: what the processes of a session share is told apart from what single candidates do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from apportion.core.meter import Reading
from apportion.cost.draw import draw_many
from apportion.cost.parts import Parts
from apportion.cost.sample import Sample
from apportion.cost.sweep import COPIES, WHOLE, Swept, _averaging_copies, shared_error, sweep
from apportion.device.measure import Session, Shape, Timing
from apportion.device.process import Failure
from apportion.device.store import Store
from apportion.device.target import find_target
from apportion.errors import MeasureError
from apportion.models.load import load
from apportion.models.partition import Partition


def timing(median_ms: float) -> Timing:
    return Timing(median_ms, 0.01, 0.1, 1.1 * median_ms, 20)


def session(shared: float, own: float, seed: int, num: int = 40, processes: int = 4) -> Session:
    """Candidates whose ratio to the whole has a common factor in every process, and one of its own."""
    rng = np.random.default_rng(seed)
    common = np.exp(shared * rng.standard_normal(processes))
    timings = {WHOLE: tuple(timing(10.0) for _ in range(processes))}
    for name in range(num):
        ratios = rng.uniform(0.2, 0.9) * common * np.exp(own * rng.standard_normal(processes))
        timings[str(name)] = tuple(timing(10.0 * ratio) for ratio in ratios)
    return Session(timings, {})


@pytest.mark.parametrize(("shared", "own", "expected"), [(0.03, 0.0, 0.015), (0.03, 0.03, 0.015), (0.0, 0.03, 0.0)])
def test_what_all_candidates_share_is_found(shared, own, expected):
    names = [str(name) for name in range(40)]
    found = [shared_error(session(shared, own, seed), names) ** 2 for seed in range(200)]
    assert np.mean(found) ** 0.5 == pytest.approx(expected, abs=0.003)


def test_one_process_says_nothing_of_what_is_shared():
    assert shared_error(session(0.1, 0.1, 0, processes=1), ["0"]) == 0.0
    assert shared_error(session(0.1, 0.1, 0), []) == 0.0


def test_copies_of_the_whole_are_averaged_in_every_process():
    timings = {copy: (timing(10.0 + place), timing(20.0 + place)) for place, copy in enumerate(COPIES)}
    made = _averaging_copies(Session(timings, {})).timings[WHOLE]
    assert [one.median_ms for one in made] == [11.0, 21.0]
    assert [one.count for one in made] == [60, 60]
    assert made[0].stderr_ms == pytest.approx(0.01 / 3**0.5)


def test_a_sweep_is_kept_with_its_drift_and_conditions():
    swept = Swept({0: Sample({"a": 0.5}, 1.0)}, {}, Reading(value=2.0, unit="ms"), 0.01, {"disturbed": "busy"})
    assert Swept.from_json(swept.to_json()) == swept
    old = {name: value for name, value in swept.to_json().items() if name not in ("drift", "conditions")}
    assert (Swept.from_json(old).drift, Swept.from_json(old).conditions) == (0.0, {})


def test_a_sweep_that_was_stopped_measures_only_what_it_had_not(tmp_path, monkeypatch):
    network = load("tests.factories:small_cnn")
    parts = Parts.of(network, Partition.of(network))
    sizes, target = draw_many(parts, 5, seed=0), find_target("torch-cpu-1t")
    measured = []

    def fake(network, parts, wanted, *_):
        if stopped and measured:
            raise KeyboardInterrupt
        measured.extend(wanted)
        return Session({name: (timing(2.0), timing(3.0)) for name in (*COPIES, *map(str, wanted))}, {})

    monkeypatch.setattr("apportion.cost.sweep._measure_chunk", fake)
    monkeypatch.setattr("apportion.cost.sweep.chunk_size", lambda *_: 2)
    stopped = True
    with pytest.raises(KeyboardInterrupt):
        sweep(network, parts, sizes, target, Shape(), store=Store(tmp_path / "kept"))
    stopped = False
    resumed = sweep(network, parts, sizes, target, Shape(), store=Store(tmp_path / "kept"))
    assert sorted(measured) == [0, 1, 2, 3, 4]
    assert resumed == sweep(network, parts, sizes, target, Shape())

    measured.clear()
    with torch.no_grad():
        next(network.module.parameters()).add_(1.0)
    sweep(network, parts, sizes, target, Shape(), store=Store(tmp_path / "kept"))
    assert measured == [0, 1, 2, 3, 4]  # another network: nothing of the old one is taken for it


def test_a_chunk_without_the_whole_network_is_not_kept(tmp_path, monkeypatch):
    network = load("tests.factories:small_cnn")
    parts = Parts.of(network, Partition.of(network))
    sizes = draw_many(parts, 2, seed=0)
    died = {COPIES[0]: Failure("killed", "out of memory")}
    sound = {name: (timing(2.0),) for name in (*COPIES, "0", "1")}
    sessions = [Session({}, {}, died), Session(sound, {})]
    monkeypatch.setattr("apportion.cost.sweep._measure_chunk", lambda *_: sessions.pop(0))
    store = Store(tmp_path / "kept")
    with pytest.raises(MeasureError, match="out of memory"):
        sweep(network, parts, sizes, find_target("torch-cpu-1t"), Shape(), store=store)
    assert set(sweep(network, parts, sizes, find_target("torch-cpu-1t"), Shape(), store=store).samples) == {0, 1}
