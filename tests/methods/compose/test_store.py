"""The store: what is read back, what is shared, what is lost, and what happens when a block is damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.methods.compose.checkpoints import SHAPES, family, tensors, tiny_bert, write

from apportion.errors import ModelError
from apportion.methods.compose import store as store_module
from apportion.methods.compose.compose import ComposeConfig, compose
from apportion.methods.compose.delta import Dense, Int8, Sparse, low_rank
from apportion.methods.compose.source import open_source
from apportion.methods.compose.store import KINDS, Store


@pytest.fixture
def filled(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK", 4096)  # so that small tensors have several blocks
    base, sources = family(tmp_path, 2)
    store = Store(tmp_path / "store")
    store.add("base", open_source(str(base)))
    return store, sources


@pytest.mark.parametrize("coding", [Dense(), Dense("F16"), Sparse(), Int8()])
@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 3000), seed=st.integers(0, 1000), data=st.data())
def test_any_range_of_a_block_reads_back_as_in_the_whole(tmp_path_factory, coding, size, seed, data):
    value_N = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    value_N[::3] = 0
    path = tmp_path_factory.mktemp("block") / "block"
    path.write_bytes(coding.encode(value_N))
    assert coding.fits(path.stat().st_size, size)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole_N = coding.decode(path, size, 0, size)
    np.testing.assert_array_equal(coding.decode(path, size, start, stop), whole_N[start:stop])
    allowed = {Dense: 1e-3, Sparse: 0, Int8: np.abs(value_N).max() / 250}[type(coding)]
    np.testing.assert_allclose(whole_N, value_N, atol=allowed, rtol=allowed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_reads_back_within_its_reported_error(filled, kind):
    store, sources = filled
    name = f"kept-{kind}"
    added = store.add(
        name, open_source(str(sources[0])), base=None if kind == "whole" else "base", kind=kind, density=0.3, rank=10
    )
    state = load_file(sources[0] / "model.safetensors")
    kept = open_source(name, store=store.folder)
    lost = norm = 0.0
    for tensor, value in state.items():
        want = value.numpy().reshape(-1)
        got = kept.read(tensor)
        assert kept.tensors[tensor].shape == SHAPES[tensor]
        np.testing.assert_array_equal(kept.read(tensor, len(want) // 3, len(want)), got[len(want) // 3 :])
        lost += float(np.square(got - want, dtype=np.float64).sum())
        norm += float(np.square(want, dtype=np.float64).sum())
    assert added.error_ratio == pytest.approx((lost / norm) ** 0.5, rel=1e-3, abs=1e-7)
    assert added.error_ratio <= {"whole": 0, "dense": 1e-7, "sparse": 0.1, "low-rank": 0.1, "int8": 1e-3}[kind]


def test_a_low_rank_difference_is_kept_exactly_in_its_rank(filled, tmp_path):
    store, _ = filled
    base = load_file(tmp_path / "base" / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    shape = base["long"].shape
    base["long"] += torch.randn(shape[0], 1, generator=generator) @ torch.randn(1, shape[1], generator=generator)
    tuned = write(tmp_path / "tuned", base)
    added = store.add("tuned", open_source(str(tuned)), base="base", kind="low-rank", rank=1)
    assert added.error_ratio < 1e-6
    assert added.new_bytes < 0.4 * added.whole_bytes


def test_low_rank_is_near_the_best_possible(generator):
    matrix = torch.randn(60, 40, generator=generator) * torch.logspace(0, -3, 40)
    left, right = low_rank(matrix.numpy(), 8)
    best = torch.linalg.svdvals(matrix)[8:].square().sum().sqrt().item()
    assert np.linalg.norm(matrix.numpy() - left @ right) <= 1.05 * best


def test_unchanged_tensors_and_equal_blocks_take_no_room(filled, tmp_path):
    store, _ = filled
    base = load_file(tmp_path / "base" / "model.safetensors")
    base["layer.bias"] += 1
    tuned = open_source(str(write(tmp_path / "tuned", base)))
    assert store.add("delta", tuned, base="base", kind="dense").new_bytes < 1000
    assert store.add("whole", tuned).new_bytes < 1000


def test_removing_frees_what_no_other_source_needs(filled):
    store, sources = filled
    before = sorted(path.name for path in store.folder.rglob("*") if path.is_file())
    store.add("s0", open_source(str(sources[0])), base="base", kind="sparse")
    with pytest.raises(ModelError, match="base of s0"):
        store.remove("base")
    assert store.remove("s0") > 0
    assert sorted(path.name for path in store.folder.rglob("*") if path.is_file()) == before
    with pytest.raises(ModelError, match="no source 's0'"):
        store.remove("s0")


def test_a_failed_addition_leaves_nothing(filled, tmp_path):
    store, sources = filled
    before = sorted(path.name for path in store.folder.rglob("*") if path.is_file())
    state = load_file(sources[0] / "model.safetensors")
    state["scalar"] = torch.tensor(float("nan"))
    bad = open_source(str(write(tmp_path / "bad", state)))
    with pytest.raises(ModelError, match="not finite in 'scalar'"):
        store.add("bad", bad)
    assert sorted(path.name for path in store.folder.rglob("*") if path.is_file()) == before


def test_check_names_the_tensor_of_a_damaged_block(filled):
    store, _ = filled
    assert store.check("base") == []
    digest, size = store.record("base")["tensors"]["layer.weight"]["parts"][0]
    path = store.block_path(digest)
    raw = bytearray(path.read_bytes())
    raw[17] ^= 1
    path.write_bytes(raw)
    assert "'layer.weight'" in store.check("base")[0]
    path.write_bytes(raw[: size - 4])
    with pytest.raises(ModelError, match=r"'layer\.weight' is missing or cut short"):
        store.open("base")


@pytest.mark.parametrize(
    "change", [{"shape": [40, 31]}, {"kind": "magic"}, {"parts": [["../../etc", 3]]}, {"dtype": "F4"}]
)
def test_a_list_that_lies_is_refused(filled, change):
    store, _ = filled
    path = store.folder / "sources" / "base.json"
    fields = json.loads(path.read_text())
    fields["tensors"]["layer.weight"] |= change
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="add"):
        store.open("base")


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"name": "../up"}, "no name for a source"),
        ({"name": "base"}, "already holds"),
        ({"kind": "magic", "base": "base"}, "possible are"),
        ({"kind": "sparse"}, "needs a base"),
        ({"kind": "whole", "base": "base"}, "takes no base"),
        ({"kind": "dense", "base": "nowhere"}, "no source 'nowhere'"),
        ({"kind": "sparse", "base": "base", "density": 0.0}, "density"),
    ],
)
def test_bad_additions_are_one_line(filled, kwargs, part):
    store, sources = filled
    with pytest.raises(ModelError, match=part):
        store.add(**{"name": "new", "source": open_source(str(sources[0])), **kwargs})


def test_stored_sources_compose_like_folders_and_load(tmp_path):
    sources = [tiny_bert(tmp_path / f"s{n}", n) for n in range(2)]
    store = Store(tmp_path / "store")
    for source in sources:
        store.add(source.name, open_source(str(source)))
    compose(ComposeConfig(sources=("s0", "s1")), tmp_path / "a", store=store.folder)
    compose(ComposeConfig(sources=tuple(map(str, sources))), tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_tensors_of_a_type_that_is_not_float_survive(tmp_path):
    state = {**tensors(0), "ids": torch.arange(9)}
    store = Store(tmp_path / "store")
    store.add("a", open_source(str(write(tmp_path / "a", state))))
    assert np.frombuffer(store.open("a").read_bytes("ids"), np.int64).tolist() == list(range(9))
