"""Energy budgets: planned by the clock, decided by the counter, on a made-up device and on a made-up counter."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from apportion.core.meter import Reading
from apportion.device.measure import Session, Timing
from apportion.device.meters import FlopCount
from apportion.errors import InfeasibleError, MeasureError
from apportion.methods.compress import bench, plan
from apportion.methods.compress.fit import fit
from apportion.methods.compress.foreseen import PredictedEnergy
from apportion.methods.compress.rundir import FitConfig, RunDir
from apportion.methods.compress.verify import verify
from apportion.models.load import load

CNN = "tests.factories:small_cnn"
IDLE_MJ, WORKING_MJ = 20.0, 30.0  # not in proportion to the milliseconds, as the plan takes it to be


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "images.safetensors"
    save_file({"0": torch.randn(120, 3, 16, 16, generator=torch.Generator().manual_seed(0))}, path)
    return str(path)


@pytest.fixture
def device(request, monkeypatch, counter):
    """A made-up device, whose milliseconds and millijoules go by the operations; returns its state to be changed.

    With the parameter ``"plan"`` it is planned with alone: energies and checks are of real processes.
    """
    state = {"draws": 1.0, "works": True}
    whole = FlopCount().read(load(CNN)).value

    def timing(candidate, processes):
        share = FlopCount().read(load(candidate.ref, factory=candidate.factory)).value / whole
        ms, mj = 1 + 9 * share, state["draws"] * (IDLE_MJ + WORKING_MJ * share)
        return (Timing(ms, 0.01, 0.01, ms, 9, energy_mj=mj if state["works"] else None),) * processes

    def measure(candidates, target, shape, *, processes=1, energy_seconds=0.0, **_):
        told = "measured" if state["works"] else "unavailable"
        conditions = {"processes": processes, "energy": {"provenance": told, "why": "it stood still"}}
        return Session({one.name: timing(one, processes) for one in candidates}, conditions)

    monkeypatch.setattr("apportion.cost.sweep.measure", measure)
    if getattr(request, "param", "all") == "all":
        monkeypatch.setattr(bench, "measure", measure)
    return state


def run(tmp_path, images, budget, **options):
    defaults = {"rungs": 1, "repair_steps": 0, "num_steps": 4, "policy": "scheduled"}
    return fit(FitConfig(model=CNN, budget=budget, data=images, **defaults | options), tmp_path / "run")


def drawn_mj(folder):
    """What the made-up device draws for the model of a run."""
    original, small = (load(CNN), load(str(folder / "model"), factory=CNN))
    return IDLE_MJ + WORKING_MJ * FlopCount().read(small).value / FlopCount().read(original).value


def test_energy_is_planned_as_the_originals_times_the_ratio_of_latencies():
    class Clock:
        unit = "ms"

        def read(self, model):
            return Reading(value=model, unit="ms")

    assert PredictedEnergy(Clock(), Reading(value=50.0, unit="mJ"), 10.0).read(4.0) == Reading(value=20.0, unit="mJ")


@pytest.mark.parametrize(("budget", "limit_mj"), [("energy<=70%", 35.0), ("energy<=35mJ@torch-cpu-1t", 35.0)])
def test_the_counter_decides_is_certified_and_verified(tmp_path, images, device, budget, limit_mj):
    result = run(tmp_path, images, budget)
    (key,) = result["limits"]
    final = result["final"][key]
    assert result["met"]
    assert result["limits"][key] == pytest.approx(limit_mj)
    assert result["baseline"][key]["value"] == pytest.approx(IDLE_MJ + WORKING_MJ)
    assert final["unit"] == "mJ"
    assert final["value"] == pytest.approx(drawn_mj(tmp_path / "run"))
    assert final["value"] <= limit_mj
    assert RunDir(tmp_path / "run").certificate().measured[key].value == final["value"]
    device["draws"] = 2.0  # an hour in which everything draws twice as much
    again = verify(tmp_path / "run", CNN)
    assert again["met"] is budget.endswith("%")


def test_predictions_that_are_too_low_are_corrected_by_checks(tmp_path, images, device):
    """By the clock half of the operations draw 55 % of the energy; the counter says 70 %."""
    result = run(tmp_path, images, "energy<=60%")
    rows = [json.loads(line) for line in (tmp_path / "run/rungs/1/ledger.jsonl").read_text().splitlines()]
    checks = [row for row in rows if row.get("kind") == "check"]
    assert result["met"]
    assert [row["accepted"] for row in checks][-1]
    assert not checks[0]["accepted"]


def test_latency_and_energy_are_limited_together(tmp_path, images, device):
    result = run(tmp_path, images, "latency<=60%, energy<=95%")
    assert result["met"]
    assert result["final"]["latency"]["value"] <= 6.0
    assert result["final"]["energy"]["value"] == pytest.approx(drawn_mj(tmp_path / "run"))


def test_a_budget_under_the_smallest_networks_energy_is_refused_with_it(tmp_path, images, device):
    with pytest.raises(InfeasibleError, match=r"energy<=19mJ can't be met: the smallest .* measures 2\d") as refused:
        run(tmp_path, images, "energy<=19mJ")
    assert refused.value.exit_code == 3


def test_a_counter_that_gives_nothing_is_told(tmp_path, images, device):
    device["works"] = False
    with pytest.raises(MeasureError, match="the energy of baseline was not measured: it stood still"):
        run(tmp_path, images, "energy<=70%")


def test_the_table_has_a_row_of_energy(images, device, told):
    done = told("fit", CNN, "--budget", "energy<=70%", "--data", images, "-o", "run", "--rungs", 1, "--repair-steps", 0)
    row = next(line for line in done.stdout.splitlines() if "energy" in line and "mJ" in line)
    assert done.returncode == 0
    assert [cell.strip() for cell in row.split("│")[2:4]] == ["50mJ", "35mJ"]


@pytest.mark.parametrize("device", ["plan"], indirect=True)
def test_real_processes_read_the_counter(tmp_path, images, device, monkeypatch):
    monkeypatch.setattr(bench, "ENERGY_SECONDS", 0.2)
    monkeypatch.setattr(plan, "LOOSER", 0.6)  # the first check is of a network far under the limit
    result = run(tmp_path, images, "energy<=90%", processes=1, rules="prune-all", num_steps=1)
    certificate = RunDir(tmp_path / "run").certificate()
    assert result["met"]
    assert certificate.met
    assert certificate.conditions["energy"] == {"provenance": "measured", "why": "RAPL, 1 package(s)"}
    assert 0 < certificate.measured["energy"].value <= 0.9 * certificate.baseline["energy"].value
