"""A whole search on a clock that is known: the grid it finds, the network it leaves, a resume that changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from apportion.device.measure import Session, Timing
from apportion.methods.search import clock, run
from apportion.methods.search.folder import SearchRunConfig
from apportion.methods.search.run import search
from apportion.methods.search.verify import verify

GRID = 16
CONFIG = SearchRunConfig(
    space="mobile-cnn", max_evaluations=14, steps=4, final_steps=6, image_size=8, tolerance=0.3, calibration=8
)


def known_ms(folder: Path) -> float:
    """Every block costs its kernel and expansion times its width, rounded up to what the kernels work on."""
    config = json.loads((folder / "config.json").read_text())
    return 0.1 + sum(
        1e-3 * -(-block["width"] // GRID) * GRID * (1 + block["expand"] / 3) * (1 + block["kernel"] / 9)
        for block in config["blocks"]
    )


@pytest.fixture(scope="module", autouse=True)
def known_clock():
    def measure(candidates, target, shape, *, processes=1, **options):
        timings = {}
        for candidate in candidates:
            told_ms = known_ms(Path(candidate.ref))
            timings[candidate.name] = (Timing(told_ms, 1e-4 * told_ms, 0.0, told_ms, 100),) * processes
        return Session(timings, {"processes": processes, "tight": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "measure", measure)
        patch.setattr(run, "measure", measure)
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search") / "run"
    return folder, search(CONFIG, folder)


def test_a_search_follows_the_grid_of_the_clock_and_stays_in_its_band(found):
    folder, result = found
    assert result["met"] is True
    assert result["align"] == GRID
    assert all(width % GRID == 0 for name, width in result["arch"].items() if name.endswith(".width"))
    (low, high) = result["band"]["latency@torch-cpu-1t"]
    assert low <= result["final"]["latency@torch-cpu-1t"]["value"] <= high
    assert result["num_evaluations"] <= 14
    assert known_ms(folder / "model") == pytest.approx(result["final"]["latency@torch-cpu-1t"]["value"])
    assert verify(folder)["met"] is True


def test_a_killed_search_goes_on_from_its_ledger(found, tmp_path):
    folder, result = found
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    (half / "result.json").unlink()
    lines = (half / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (half / "ledger.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    told = search(CONFIG, half)
    assert told["arch"] == result["arch"]
    assert told["claim"] == result["claim"]
