"""On an int8 clock with a grid, counting parameters or FLOPs picks widths off it; equal measured cost never does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apportion.core.meter import Reading
from apportion.methods.search.band import Band
from apportion.methods.search.clock import counted
from apportion.methods.search.neighbours import IsoCost
from apportion.methods.search.spaces.mobile_cnn import MobileCnn

GRID = 16
SPACE = MobileCnn(widths=(32, 48), strides=(2, 1), image_size=8, align=GRID, precisions=("int8",))
FINE = replace(SPACE, align=1)
START = SPACE.start()


def on_device(arch):
    """Kernels work on whole groups of channels, and padding a part of one costs a copy."""
    total = 0.1
    for block in range(SPACE.num_blocks):
        spec = SPACE.spec(arch, block)
        copy = 1.15 if spec["width"] % GRID else 1.0
        total += 1e-3 * -(-spec["width"] // GRID) * GRID * spec["expand"] * (1 + spec["kernel"]) * copy
    return {"latency": Reading(value=total, unit="ms")}


def parameters(arch):
    return {"count": Reading(value=float(sum(p.numel() for p in FINE.build(arch).module.parameters())), unit="params")}


def flops(arch):
    return {"count": Reading(value=sum(row[1] for row in counted(FINE, arch).values()), unit="FLOPs")}


def off_grid(arch):
    return [arch[f"{layer}.width"] for layer in SPACE.layers if arch[f"{layer}.width"] % GRID]


def test_no_neighbour_at_equal_measured_cost_is_off_the_grid():
    band = Band.around(on_device(START), 0.1)
    around = IsoCost(SPACE, band, on_device).around(START, SPACE.layers)
    assert len(around.archs) > 3
    assert not any(off_grid(arch) for arch in around.archs)
    assert all(band.holds(on_device(arch)) for arch in around.archs)


@pytest.mark.parametrize("count", [parameters, flops], ids=["parameters", "FLOPs"])
def test_neighbours_at_equal_counts_are_off_the_grid_and_out_of_the_band(count):
    device = Band.around(on_device(START), 0.1)
    around = IsoCost(FINE, Band.around(count(START), 0.1), count).around(START, FINE.layers)
    off = [arch for arch in around.archs if off_grid(arch)]
    assert off
    assert any(not device.holds(on_device(arch)) for arch in off)
