"""Probing: a target that dies is tried under lower instruction-set caps; answers are remembered."""

from __future__ import annotations

import json

import pytest

from apportion.device import probe as probing
from apportion.device.measure import Session
from apportion.device.probe import ISA_CAPS, Probed, probe, probe_all, working_target
from apportion.device.process import Failure
from apportion.device.target import find_target
from apportion.errors import TargetError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def machine_that_dies_above(cap, tried):
    """Stands for a machine whose hypervisor hides instructions: every target dies until capped at ``cap``."""

    def measure(candidates, target, *_args, **_options):
        tried.append(target.isa)
        died = ISA_CAPS.index(target.isa) < ISA_CAPS.index(cap)
        failures = {"probe": Failure("died", "killed by SIGILL")} if died else {}
        return Session({}, {"tight": True}, failures)

    return measure


def test_torch_works_here():
    found = probe(find_target("torch-cpu-1t"))
    assert found.available
    assert found.why.startswith("works")


@pytest.mark.parametrize("cap", ISA_CAPS)
def test_the_highest_cap_that_works_is_found(cap, monkeypatch):
    tried = []
    monkeypatch.setattr(probing, "measure", machine_that_dies_above(cap, tried))
    found = probe(find_target("torch-cpu-1t"))
    assert found == Probed("torch-cpu-1t", True, found.why, cap)
    assert tried == list(ISA_CAPS[: ISA_CAPS.index(cap) + 1])


def test_other_failures_are_not_tried_again(monkeypatch):
    def measure(*_args, **_options):
        return Session({}, {}, {"probe": Failure("hung", "killed after 180 s")})

    monkeypatch.setattr(probing, "measure", measure)
    assert probe(find_target("torch-cpu-1t")) == Probed("torch-cpu-1t", False, "hung: killed after 180 s")


def test_answers_are_remembered_until_asked_to_refresh(monkeypatch):
    calls = []

    def once(target, limits=None):
        calls.append(target.name)
        return Probed(target.name, True, "works")

    monkeypatch.setattr(probing, "probe", once)
    for refresh, expected in ((False, 1), (False, 1), (True, 2)):
        probe_all(["torch-cpu-1t"], refresh=refresh)
        assert len(calls) == expected


def test_a_damaged_memory_is_made_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(probing, "probe", lambda target, limits=None: Probed(target.name, True, "works"))
    probe_all(["torch-cpu-1t"])
    (saved,) = (tmp_path / "apportion" / "targets").iterdir()
    assert json.loads(saved.read_text())["torch-cpu-1t"]["available"] is True
    saved.write_text("{torn")
    assert probe_all(["torch-cpu-1t"])[0].available


def test_a_target_that_does_not_work_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(probing, "probe", lambda target, limits=None: Probed(target.name, False, "not installed: x"))
    with pytest.raises(TargetError, match=r"'ort-cpu-1t' does not work here: not installed: x"):
        working_target("ort-cpu-1t")


def test_the_cap_found_comes_with_the_target(monkeypatch):
    monkeypatch.setattr(probing, "probe", lambda target, limits=None: Probed(target.name, True, "works", "AVX2"))
    assert working_target("openvino-cpu-1t").isa == "AVX2"
