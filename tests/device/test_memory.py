"""Peak memory on networks whose peak is known by hand; energy that says where it comes from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apportion.device.energy import EnergySource, find_source, read_energy
from apportion.device.memory import AllocatedPeak, CudaPeak, LivenessPeak, SpreadPeak, peak_on
from apportion.device.target import find_target
from apportion.errors import MeasureError
from apportion.models.network import Network, Origin


def network_of(module: nn.Module, *shape: int) -> Network:
    return Network(module=module.eval(), inputs={"0": torch.zeros(*shape)}, origin=Origin(ref="x"), readout="logits")


@pytest.mark.parametrize("meter", [AllocatedPeak(), LivenessPeak()])
def test_a_chain_holds_two_neighbours_at_once(meter):
    """1000 -> 3000 -> 100 floats: while the second layer runs, its input and output are alive."""
    network = network_of(nn.Sequential(nn.Linear(1000, 3000, bias=False), nn.Linear(3000, 100, bias=False)), 1, 1000)
    assert meter.read(network).value == 4 * (3000 + 100)


def test_a_peak_to_plan_with_falls_when_one_of_two_that_share_it_is_cut():
    def chain(first, second):
        layers = (nn.Linear(a, b, bias=False) for a, b in ((100, first), (first, 100), (100, second), (second, 100)))
        return network_of(nn.Sequential(*layers), 1, 100)

    whole, one, both = chain(900, 900), chain(450, 900), chain(450, 450)
    spread = SpreadPeak(whole, AllocatedPeak())
    assert AllocatedPeak().read(one).value == AllocatedPeak().read(whole).value
    assert spread.read(whole).value == pytest.approx(AllocatedPeak().read(whole).value)
    assert spread.read(both).value < spread.read(one).value < 0.99 * spread.read(whole).value


class Wide(nn.Module):
    """Keeps its first result until the end, as a skip connection does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(500, 500, bias=False) for _ in range(3))

    def forward(self, x):
        first = self.a(x)
        return first + self.c(self.b(first))


@pytest.mark.parametrize("meter", [AllocatedPeak(), LivenessPeak()])
def test_a_skip_connection_holds_three(meter):
    assert meter.read(network_of(Wide(), 1, 500)).value == 4 * 500 * 3


@pytest.mark.parametrize("meter", [AllocatedPeak(), LivenessPeak()])
def test_views_take_no_memory_of_their_own(meter):
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(400, 400, bias=False)

        def forward(self, x):
            return self.a(x).view(20, 20).t()

    assert meter.read(network_of(View(), 1, 400)).value == 4 * 400


def test_a_counter_that_wraps_around_is_followed(tmp_path):
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "max_energy_range_uj").write_text("1000000")
    (package / "energy_uj").write_text("900000")
    source = find_source("cpu", tmp_path)
    assert source.provenance == "measured"
    before = source.joules()
    (package / "energy_uj").write_text("100000")  # past its end: 0.2 J later
    assert source.joules() - before == pytest.approx(0.2)


def test_without_a_counter_energy_is_unavailable_and_says_why(tmp_path):
    source = find_source("cpu", tmp_path)
    assert source.provenance == "unavailable"
    assert "RAPL" in source.why
    with pytest.raises(MeasureError, match="not available here"):
        read_energy(lambda: None, source)


def test_energy_is_the_counters_growth_per_step():
    ticks = iter([5.0, 5.5, 6.0, 6.5, 7.0])
    reading = read_energy(lambda: None, EnergySource("measured", "test", lambda: next(ticks)), seconds=0.01)
    assert reading.value == pytest.approx(2000.0 / reading.count)
    assert reading.unit == "mJ"


def test_a_counter_that_stands_still_is_no_measurement_of_nothing():
    with pytest.raises(MeasureError, match=r"the counter \(test\) did not move"):
        read_energy(lambda: None, EnergySource("measured", "test", lambda: 5.0), seconds=0.0)


def test_memory_on_a_gpu_is_what_the_pass_adds_to_what_was_held(monkeypatch):
    held, calls = {"now": 1000, "peak": 9999}, []

    def open_network(network, target):
        def step():
            calls.append(target.name)
            held["peak"] = max(held["peak"], held["now"] + 640)

        return step

    monkeypatch.setattr("apportion.device.runtimes.eager.RUNTIME.open_network", open_network)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=held["now"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    assert CudaPeak(find_target("torch-cuda")).read(network_of(nn.Linear(1, 1), 1, 1)).value == 640
    assert calls == ["torch-cuda"] * 2  # once before, as first use compiles and reserves


def test_the_peak_of_a_limit_is_that_of_the_device():
    assert isinstance(peak_on(find_target("compile-cuda")), CudaPeak)
    for target in (find_target("ort-cpu-1t"), None):
        assert isinstance(peak_on(target), AllocatedPeak)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_on_a_real_gpu_holds_the_activations():
    chain = nn.Sequential(nn.Linear(1000, 3000, bias=False), nn.Linear(3000, 100, bias=False))
    assert CudaPeak(find_target("torch-cuda")).read(network_of(chain, 1, 1000)).value >= 4 * (3000 + 100)
    assert {weight.device.type for weight in chain.parameters()} == {"cpu"}
