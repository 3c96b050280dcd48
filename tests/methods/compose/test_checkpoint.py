"""Reading checkpoints block by block: every number type, shards, quantised tensors, files that lie."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.methods.compose.checkpoints import tensors, write

from apportion.errors import ModelError
from apportion.methods.compose.checkpoint import Checkpoint, blocks, from_float32, to_float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_any_range_of_any_float_type_reads_as_float32(tmp_path, dtype):
    state = {
        "a": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype),
        "b": torch.ones(3, dtype=dtype),
    }
    checkpoint = Checkpoint(write(tmp_path / "m", state))
    for start, stop in ((0, 35), (0, 0), (4, 5), (3, 31), (34, 35)):
        want = state["a"].reshape(-1)[start:stop].float().numpy()
        np.testing.assert_array_equal(checkpoint.read("a", start, stop), want)
    assert checkpoint.read_bytes("b") == state["b"].view(torch.uint8).numpy().tobytes()


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=50))
def test_bfloat16_is_written_as_torch_rounds_it(values):
    value_N = np.array(values, np.float32)
    mine = torch.from_numpy(to_float32(from_float32(value_N, "BF16"), "BF16"))
    torch.testing.assert_close(mine, torch.from_numpy(value_N).bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 300))
def test_blocks_cover_every_number_once(size, block):
    assert [n for start, stop in blocks(size, block) for n in range(start, stop)] == list(range(size))


def test_shards_are_one_checkpoint(tmp_path):
    state = tensors(0)
    names = list(state)
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({n: state[n] for n in names[:2]}, folder / "one.safetensors")
    save_file({n: state[n] for n in names[2:]}, folder / "two.safetensors")
    index = {n: "one.safetensors" if n in names[:2] else "two.safetensors" for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    checkpoint = Checkpoint(folder)
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy().reshape(-1))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**index, names[0]: "two.safetensors"}})
    )
    with pytest.raises(ModelError, match=r"layer\.weight"):
        Checkpoint(folder)


@pytest.mark.parametrize("scales", ["row", "tensor", "bitsandbytes"])
def test_int8_is_dequantised_by_the_scales_beside_it(tmp_path, scales, generator):
    code = torch.randint(-127, 128, (6, 4), generator=generator, dtype=torch.int8)
    if scales == "bitsandbytes":
        extra = {"w.SCB": torch.rand(6, generator=generator), "w.weight_format": torch.tensor(0, dtype=torch.uint8)}
        want = code.float() * (extra["w.SCB"] / 127)[:, None]
    else:
        extra = {"w.weight_scale": torch.rand(6 if scales == "row" else 1, 1, generator=generator)}
        want = code.float() * extra["w.weight_scale"]
    checkpoint = Checkpoint(write(tmp_path / "m", {"w.weight": code, **extra}))
    assert list(checkpoint.tensors) == ["w.weight"]
    assert checkpoint.tensors["w.weight"].mixable
    np.testing.assert_allclose(checkpoint.read("w.weight", 3, 20), want.reshape(-1)[3:20].numpy(), rtol=1e-6)


def test_scales_that_do_not_fit_are_refused(tmp_path):
    state = {"w.weight": torch.zeros(6, 4, dtype=torch.int8), "w.weight_scale": torch.ones(5)}
    with pytest.raises(ModelError, match=r"w\.weight_scale"):
        Checkpoint(write(tmp_path / "m", state))


@pytest.mark.parametrize("kind", ["cut", "lying", "folder"])
def test_a_corrupt_shard_is_one_clear_line(tmp_path, kind):
    folder = write(tmp_path / "m", tensors(0))
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    if kind == "cut":
        path.write_bytes(raw[:-10])
    elif kind == "lying":
        header = json.dumps({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 40)
    else:
        folder = tmp_path / "nothing"
    with pytest.raises(ModelError) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_after_it_was_opened_is_refused_not_a_crash(tmp_path):
    folder = write(tmp_path / "m", tensors(0))
    checkpoint = Checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="became shorter"):
        checkpoint.read("long")
