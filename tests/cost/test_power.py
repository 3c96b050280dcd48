"""The power of a profile: read where there is a counter, used where there is none, and refused in one line."""

from __future__ import annotations

import json

import pytest
from tests.cost.test_held_out import profile
from tests.pipeline.check import assert_one_line

from apportion.core.meter import Reading
from apportion.cost import power as reading
from apportion.cost.calibrate import calibrate
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.cost.sample import Sample
from apportion.cost.sweep import Swept
from apportion.device.measure import Shape
from apportion.device.power import Drawn, PowerCurve, modelled_energy
from apportion.device.target import find_target
from apportion.models.load import load
from apportion.models.partition import Partition

CNN = "tests.factories:small_cnn"
TARGET = find_target("torch-cpu-1t")
POWER = PowerCurve(
    whole=Drawn(latency_ms=2.0, watts=12.0, stderr_watts=0.3),
    cheapest=Drawn(latency_ms=0.5, watts=8.0, stderr_watts=0.2),
    source="RAPL, 1 package(s)",
)


@pytest.fixture
def made_up_clock(monkeypatch):
    """Latencies by the shares of the parts, without a device; the power is read of real processes."""

    def sweep(network, parts, drawn, target, shape, **_):
        shares = [parts.shares(parts.partition.keep(sizes)) for sizes in drawn]
        samples = {i: Sample(row, 1 + sum(row.values()), 0.01) for i, row in enumerate(shares)}
        return Swept(samples, {}, Reading(value=1.0 + len(shares[0]), unit="ms"))

    monkeypatch.setattr("apportion.cost.calibrate.sweep", sweep)
    monkeypatch.setattr(reading, "SECONDS", 0.2)
    monkeypatch.setattr(reading, "PROCESSES", 1)


def calibrated():
    network = load(CNN)
    return calibrate(network, Parts.of(network, Partition.of(network)), TARGET, Shape(), num_fit=24)


@pytest.fixture
def no_counter(tmp_path, monkeypatch):
    """Call it, and the counter is gone."""
    (tmp_path / "empty").mkdir()
    return lambda: monkeypatch.setattr("apportion.device.energy.RAPL", tmp_path / "empty")


def measured(told, *options):
    done = told("measure", CNN, "--processes", 1, "--seconds", 0.1, *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["readings"]


def test_a_calibration_beside_a_counter_stores_a_power_that_is_used_where_there_is_none(
    tmp_path, told, made_up_clock, counter, no_counter
):
    calibrated().save(tmp_path / "p.json")
    stored = Profile.load(tmp_path / "p.json")
    power = stored.power
    assert power.source == "RAPL, 1 package(s)"
    assert power.whole.watts > 0 < power.cheapest.watts
    beside = measured(told, "--power", "p.json")["energy"]
    assert beside["provenance"] == "measured: RAPL, 1 package(s); --power is not used"
    no_counter()
    readings = measured(told, "--power", "p.json")
    latency = Reading(value=readings["latency"]["value"], unit="ms", stderr=readings["latency"]["stderr"])
    at = power.at(latency)
    assert readings["energy"]["value"] == pytest.approx(latency.value * at.watts)
    assert readings["energy"]["stderr"] == pytest.approx(modelled_energy(latency, at).stderr)
    assert readings["energy"]["provenance"] == (
        f"modelled: {at.watts:.3g} ± {at.stderr_watts:.2g} W from p.json, "
        f"read by RAPL, 1 package(s) on {stored.machine['processor']}"
    )


def test_without_a_counter_no_power_is_stored_and_nothing_is_measured_for_it(
    tmp_path, made_up_clock, no_counter, monkeypatch
):
    no_counter()
    monkeypatch.setattr(reading, "measure", lambda *_, **__: pytest.fail("measured for nothing"))
    made = calibrated()
    assert made.power is None
    made.save(tmp_path / "p.json")
    fields = json.loads((tmp_path / "p.json").read_text())
    del fields["power"]  # as profiles were before
    (tmp_path / "old.json").write_text(json.dumps(fields))
    assert Profile.load(tmp_path / "old.json").power is None


def test_a_counter_that_stands_still_stores_no_power(tmp_path, made_up_clock, monkeypatch):
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "max_energy_range_uj").write_text(str(10**12))
    (package / "energy_uj").write_text("5")
    monkeypatch.setattr("apportion.device.energy.RAPL", tmp_path)
    assert calibrated().power is None


def test_watts_as_given_are_told_in_the_table(told, no_counter):
    no_counter()
    table = told("measure", CNN, "--processes", 1, "--seconds", 0.1, "--power", 15).stdout
    cells = [cell.strip() for cell in next(line for line in table.splitlines() if "energy" in line).split("│")]
    assert cells[2].endswith("mJ")
    assert cells[4].startswith("modelled: 15 W")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (0, ("--power 0 is no power", "above 0")),
        (-3, ("--power -3 is no power",)),
        ("nan", ("--power nan is no power",)),
        ("much", ("--power much is neither", "watts")),
        ("bare.json", ("bare.json holds no power", "counter")),
        ("other.json", ("the power of ort-cpu-1t, not of torch-cpu-1t",)),
        ("negative.json", ("negative.json is not a profile", "-8.0", "is no power")),
        ("text.json", ("text.json is not a profile",)),
    ],
)
def test_what_is_no_power_here_is_refused_before_anything_is_measured(told, tmp_path, given, parts):
    files = {
        "bare.json": profile(),
        "other.json": profile(power=POWER, target=find_target("ort-cpu-1t")),
        "negative.json": profile(power=POWER),
    }
    for name, made in files.items():
        made.save(tmp_path / name)
    text = (tmp_path / "negative.json").read_text()
    (tmp_path / "negative.json").write_text(text.replace('"watts": 8.0', '"watts": -8.0'))
    (tmp_path / "text.json").write_text("watts: 8")
    assert_one_line(told("measure", CNN, "--power", given, "--json"), 2, *parts)
