"""A whole search on a clock that is known: the grid it finds, the network it leaves, a resume that changes nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apportion.device.measure import Session, Timing
from apportion.errors import ApportionError, InfeasibleError
from apportion.methods.search import clock, front, run
from apportion.methods.search.folder import SearchFolder, SearchRunConfig, found_by
from apportion.methods.search.front import Anchor, verify_front
from apportion.methods.search.run import search
from apportion.methods.search.spaces.mobile_cnn import MobileCnn
from apportion.methods.search.verify import verify

GRID = 16
CONFIG = SearchRunConfig(
    space="mobile-cnn", max_evaluations=14, steps=4, final_steps=6, image_size=8, tolerance=0.3, calibration=8
)


def known_ms(folder: Path) -> float:
    """Every block costs its kernel and expansion times its width, rounded up to what the kernels work on."""
    return blocks_ms(json.loads((folder / "config.json").read_text())["blocks"])


def blocks_ms(blocks: list[dict[str, Any]]) -> float:
    return 0.1 + sum(
        1e-3 * -(-block["width"] // GRID) * GRID * (1 + block["expand"] / 3) * (1 + block["kernel"] / 9)
        for block in blocks
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
        patch.setattr(front, "measure", measure)
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


ANCHORS = [Anchor.parse(text) for text in ("150%", "60%")]
SMALL = replace(CONFIG, align=GRID, sigma=5.0, max_evaluations=6)


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    folder = tmp_path_factory.mktemp("front") / "run"
    return folder, front.front(SMALL, ANCHORS, folder)


def test_a_front_has_a_certified_point_at_every_anchor_from_small_to_large(points):
    folder, result = points
    assert [point["asked"] for point in result["points"]] == ["60%", "150%"]
    space = MobileCnn(align=GRID)
    template = blocks_ms(space.config(space.start()).blocks)
    for number, (point, share) in enumerate(zip(result["points"], (0.6, 1.5), strict=True), 1):
        low, high = point["band"]["latency@torch-cpu-1t"]
        measured = point["measured"]["latency@torch-cpu-1t"]["value"]
        assert low <= measured <= high
        assert measured == pytest.approx(known_ms(folder / str(number) / "model"))
        assert (low + high) / 2 == pytest.approx(share * template)
    assert verify_front(folder)["met"] is result["met"] is True


def test_points_that_another_beats_on_measured_cost_are_not_kept(points):
    _, result = points
    accuracy = [point["quality_after"]["value"] for point in result["points"]]
    assert [point["kept"] for point in result["points"]] == [True, accuracy[1] > accuracy[0]]


def test_a_killed_front_goes_on(points, tmp_path):
    folder, result = points
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    (half / "result.json").unlink()
    shutil.rmtree(half / "2")
    told = front.front(SMALL, ANCHORS, half)
    assert [point["arch"] for point in told["points"]] == [point["arch"] for point in result["points"]]
    with pytest.raises(ApportionError, match="other settings"):
        front.front(SMALL, ANCHORS[:1], half)


def test_anchors_out_of_reach_or_alike_are_told(tmp_path):
    with pytest.raises(InfeasibleError, match="narrowest and widest measure"):
        front.front(SMALL, [Anchor.parse("100%"), Anchor.parse("0.01ms")], tmp_path / "far")
    with pytest.raises(ApportionError, match=r"100% and 100\.0% are the same cost"):
        front.front(SMALL, [Anchor.parse("100%"), Anchor.parse("100.0%")], tmp_path / "same")


def test_a_solution_is_carried_over_with_its_choices_into_another_band(found, tmp_path):
    folder, first = found
    config = replace(CONFIG, start=found_by(folder, "mobile-cnn"), anchor_cost="150%", max_evaluations=8, tolerance=0.1)
    moved = search(config, tmp_path / "moved")
    low, high = moved["band"]["latency@torch-cpu-1t"]
    assert low <= known_ms(tmp_path / "moved" / "anchor") <= high
    assert not low <= first["final"]["latency@torch-cpu-1t"]["value"] <= high  # it had to be paid for
    choices = {name: value for name, value in first["arch"].items() if not name.endswith(".width")}
    assert choices.items() <= moved["anchor"]["arch"].items()
    assert moved["met"] is True
    assert SearchFolder(tmp_path / "moved").config() == config


def test_only_a_finished_search_of_the_same_space_is_carried_over(found, tmp_path):
    folder, _ = found
    with pytest.raises(ApportionError, match="is a search of mobile-cnn, not of small-encoder"):
        found_by(folder, "small-encoder")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ApportionError, match="holds no finished search"):
            found_by(path, "mobile-cnn")
    for number, arch in enumerate(([], {"b0.width": "16"}, {"b0.width": True}, {"b0.kind": [1]})):
        damaged = tmp_path / str(number)
        damaged.mkdir()
        (damaged / "result.json").write_text(json.dumps({"space": "mobile-cnn", "arch": arch}))
        with pytest.raises(ApportionError, match="is damaged"):
            found_by(damaged, "mobile-cnn")
    far = replace(CONFIG, start=found_by(folder, "mobile-cnn"), anchor_cost="0.01ms")
    with pytest.raises(InfeasibleError, match="another run's choices"):
        search(far, tmp_path / "far")


def test_several_utilities_leave_a_local_pareto_set_in_the_band(tmp_path):
    config = replace(SMALL, utilities=("accuracy", "robust"), max_evaluations=20)
    result = search(config, tmp_path / "run")
    members = result["pareto"]["members"]
    assert members
    low, high = result["band"]["latency@torch-cpu-1t"]
    for member in members:
        assert low <= known_ms(tmp_path / "run" / member["model"]) <= high
        assert set(member["long"]) == {"accuracy", "robust"}
    means = [tuple(member["short"][name]["mean"] for name in config.utilities) for member in members]
    assert not any(a[0] > b[0] and a[1] > b[1] for a in means for b in means)
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    trials = [row["readings"] for row in rows if row.get("kind") == "trial"]
    assert trials
    assert all(set(readings) == {"utility", "robust"} for readings in trials)
    assert len(trials) <= 20


def test_the_command_makes_a_front_prints_it_verifies_it_and_returns_it_again(told, tmp_path):
    folder = tmp_path / "front"
    options = ("--anchor", "150%", "--anchor", "80%", "--utility", "accuracy", "--utility", "worst-class")
    options += ("--evaluations", 6, "--sigma", 5, "--align", GRID, "--steps", 2, "--final-steps", 2)
    options += ("--image-size", 8, "--tolerance", "30%", "-o", folder)
    done = told("search", "mobile-cnn", *options)
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines() if str(folder) not in line) <= 80
    assert "dominated" in done.stdout or done.stdout.count("kept") == 2
    result = json.loads(told("search", "mobile-cnn", *options, "--json").stdout)
    assert result == json.loads((folder / "result.json").read_text())
    assert [point["asked"] for point in result["points"]] == ["80%", "150%"]
    for number, point in enumerate(result["points"], 1):
        assert (folder / str(number) / "model" / "model.safetensors").is_file()
        assert all((folder / str(number) / one["model"]).is_dir() for one in point["pareto"]["members"])
    verdict = told("verify", folder, "--json")
    assert verdict.returncode == 0
    assert len(json.loads(verdict.stdout)["points"]) == sum(point["kept"] for point in result["points"])
    shutil.rmtree(folder / "1" / "model")
    assert told("verify", folder).returncode == 2
