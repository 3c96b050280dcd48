"""Whole merges from disk to disk: same result for any number of threads, whole output or none, bounded memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.methods.compose.checkpoints import family, tensors, tiny_bert, write

from apportion.errors import ModelError
from apportion.methods.compose import merge
from apportion.methods.compose.compose import BLIND, ComposeConfig, compose


def config(sources, method="soup", **kwargs):
    return ComposeConfig(sources=tuple(map(str, sources)), method=method, **kwargs)


@pytest.mark.parametrize("method", BLIND)
def test_threads_do_not_change_a_bit(tmp_path, method):
    base, sources = family(tmp_path, 2)
    files = []
    for threads in (1, 3):
        out = tmp_path / f"out{threads}"
        compose(config(sources, method, base=str(base), threads=threads), out)
        files.append((out / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_the_result_is_loaded_by_transformers(tmp_path):
    sources = [tiny_bert(tmp_path / f"s{n}", n) for n in range(3)]
    compose(config(sources, weights=(0.5, 0.25, 0.25)), tmp_path / "out")
    states = [transformers.BertModel.from_pretrained(folder).state_dict() for folder in (*sources, tmp_path / "out")]
    for name, merged in states[-1].items():
        want = 0.5 * states[0][name] + 0.25 * states[1][name] + 0.25 * states[2][name]
        torch.testing.assert_close(merged, want, rtol=1e-6, atol=1e-7)
    assert "s1 | 0.25" in (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "out" / "compose.json").read_text()


def test_the_type_asked_for_is_written(tmp_path):
    _, sources = family(tmp_path, 2)
    compose(config(sources, dtype="BF16"), tmp_path / "out")
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    a, b = (load_file(source / "model.safetensors")["long"] for source in sources)
    torch.testing.assert_close(state["long"], ((a + b) / 2).bfloat16(), rtol=0, atol=0)


def test_sources_of_different_types_are_mixed_in_single_precision(tmp_path):
    state = tensors(1)
    half = {name: tensor.bfloat16() for name, tensor in tensors(2).items()}
    sources = [write(tmp_path / "a", state), write(tmp_path / "b", half)]
    result = compose(config(sources), tmp_path / "out")
    assert any("BF16, F32" in remark for remark in result["remarks"])
    got = load_file(tmp_path / "out" / "model.safetensors")["long"]
    torch.testing.assert_close(got, (state["long"] + half["long"].float()) / 2, rtol=0, atol=0)


def test_integers_are_copied_and_skipped_tensors_may_differ(tmp_path):
    first = {**tensors(1), "positions": torch.arange(5), "head": torch.ones(3, 2)}
    second = {**tensors(2), "positions": torch.arange(5), "head": torch.ones(7, 2)}
    sources = [write(tmp_path / "a", first), write(tmp_path / "b", second)]
    compose(config(sources, skip=("head",)), tmp_path / "out")
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["positions"].tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(state["head"], first["head"])


def test_a_source_that_is_not_finite_is_named_with_its_tensor_and_nothing_is_written(tmp_path):
    _, sources = family(tmp_path, 2)
    state = load_file(sources[1] / "model.safetensors")
    state["long"][2, 199_999] = float("nan")
    write(sources[1], state)
    with pytest.raises(ModelError, match=r"s1.*not finite in 'long'"):
        compose(config(sources), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "s0", "s1"]


def test_a_disk_that_fills_up_leaves_the_old_result_whole(tmp_path, monkeypatch):
    _, sources = family(tmp_path, 2)
    compose(config(sources), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    written = 0

    def full(handle, raw, position):
        nonlocal written
        written += len(raw)
        if written > 1_500_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os_pwrite(handle, raw, position)

    os_pwrite = os.pwrite
    monkeypatch.setattr(merge.os, "pwrite", full)
    with pytest.raises(ModelError, match="no room for"):
        compose(config(sources, weights=(1, 3)), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "s0", "s1"]


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    _, sources = family(tmp_path, 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("dear reader")
    with pytest.raises(ModelError, match="something else"):
        compose(config(sources), tmp_path / "mine")


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"weights": (1.0,)}, "1 weights were given for 2"),
        ({"weights": (1.0, float("nan"))}, "finite"),
        ({"weights": (0.0, 0.0)}, "all weights are zero"),
        ({"method": "magic"}, "possible are"),
        ({"dtype": "I8"}, "possible are"),
        ({"method": "ties"}, "--base"),
        ({"method": "slerp", "weights": (1.0, 2.0)}, "--position"),
        ({"method": "greedy-soup"}, "--support"),
        ({"threads": 0}, "threads"),
        ({"scale": float("inf")}, "scale"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_settings_are_one_line(tmp_path, kwargs, part):
    _, sources = family(tmp_path, 2)
    with pytest.raises(ModelError, match=part) as caught:
        compose(config(sources, **kwargs), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_one_source_without_a_base_is_no_merge(tmp_path):
    _, sources = family(tmp_path, 1)
    with pytest.raises(ModelError, match="at least two"):
        compose(config(sources), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits on the address space are Linux's")
def test_eight_checkpoints_of_400_mb_merge_under_a_limit_of_one_gigabyte(tmp_path):
    """Address space, not only memory, is limited: the sources together are three times larger than the limit."""
    folders = []
    for number in range(8):
        folder = tmp_path / f"big{number}"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "plain"}')
        _sparse_checkpoint(folder / "model.safetensors", number)
        folders.append(str(folder))
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))\n"
        "from pathlib import Path\n"
        "from apportion.methods.compose.compose import ComposeConfig, compose\n"
        "compose(ComposeConfig(sources=tuple(sys.argv[2:]), threads=2), Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out"), *folders],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 400e6
    from apportion.methods.compose.checkpoint import Checkpoint

    np.testing.assert_array_equal(Checkpoint(tmp_path / "out").read("w0", 0, 4), np.full(4, 3.5, np.float32))


def _sparse_checkpoint(path: Path, number: int) -> None:
    """100 million numbers that are zero on disk without taking room, but for the first few of every tensor."""
    import json

    shapes = {f"w{n}": (1000, 10_000) for n in range(10)}
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for entry in header.values():
            file.seek(start + entry["data_offsets"][0])
            file.write(np.full(4, number, np.float32).tobytes())
        file.truncate(start + position)
