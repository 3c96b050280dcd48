"""Files from outside are checked before they are used: a safetensors header tells the truth or is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.models import zoo

from apportion.errors import ModelError
from apportion.models import load, save
from apportion.models.safefile import file_digest, folder_digest, read_header, read_json, refuse_pickle, weight_files

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1, 2], dtype=torch.int64),
    "c": torch.zeros(0, 4),
    "d": torch.tensor(2.5, dtype=torch.float64),
}


def parts(path: Path) -> tuple[bytes, bytes]:
    """The header and the data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], raw[8 + length :]


def write(path: Path, header: object, data: bytes, *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


# ---------------------------------------------------------------- reading a header


def test_a_header_lists_every_tensor_with_its_type_and_shape(path):
    infos = read_header(path)
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (2,)),
        "c": ("F32", (0, 4)),
        "d": ("F64", ()),
    }


def test_a_file_without_tensors_is_empty_not_wrong(tmp_path):
    assert read_header(write(tmp_path / "model.safetensors", {}, b"")) == {}


F32 = {"dtype": "F32", "shape": [2]}
LIES = {
    "data longer than declared": ({"a": {**F32, "data_offsets": [0, 8]}}, 9),
    "data cut short": ({"a": {**F32, "data_offsets": [0, 8]}}, 7),
    "shape larger than its bytes": ({"a": {"dtype": "F32", "shape": [1000000], "data_offsets": [0, 8]}}, 8),
    "type wider than its bytes": ({"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}}, 8),
    "overlapping tensors": ({"a": {**F32, "data_offsets": [0, 8]}, "b": {**F32, "data_offsets": [4, 12]}}, 12),
    "the same bytes twice": ({"a": {**F32, "data_offsets": [0, 8]}, "b": {**F32, "data_offsets": [0, 8]}}, 8),
    "a gap between tensors": ({"a": {**F32, "data_offsets": [0, 8]}, "b": {**F32, "data_offsets": [12, 20]}}, 20),
    "offsets past the end": ({"a": {**F32, "data_offsets": [1000, 1008]}}, 8),
    "offsets of exabytes": ({"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}, 8),
    "negative offsets": ({"a": {**F32, "data_offsets": [-8, 0]}}, 8),
    "offsets backwards": ({"a": {**F32, "data_offsets": [8, 0]}}, 8),
    "negative shape": ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, 8),
    "fractional shape": ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, 8),
    "boolean shape": ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, 8),
    "shape of text": ({"a": {"dtype": "U8", "shape": "12", "data_offsets": [0, 2]}}, 2),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
    "unknown type": ({"a": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 8]}}, 8),
    "type of no type": ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, 8),
    "no offsets": ({"a": F32}, 8),
    "one offset": ({"a": {**F32, "data_offsets": [0]}}, 8),
    "three offsets": ({"a": {**F32, "data_offsets": [0, 8, 16]}}, 8),
    "offsets of text": ({"a": {**F32, "data_offsets": ["0", "8"]}}, 8),
    "an end of text": ({"a": {**F32, "data_offsets": [0, "8"]}}, 8),
    "no end": ({"a": {**F32, "data_offsets": [0, None]}}, 8),
    "fractional offsets": ({"a": {**F32, "data_offsets": [0.0, 8.0]}}, 8),
    "boolean offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, 1),
    "an entry of no kind": ({"a": 5}, 8),
    "a list": ([1, 2], 8),
    "a number": (5, 8),
    "metadata that is not text": ({"__metadata__": {"a": [1]}, "a": {**F32, "data_offsets": [0, 8]}}, 8),
    "no JSON": (b"{not json", 8),
    "no text": (b"\xff\xfe\xfd", 8),
    "JSON in another encoding": (json.dumps({"a": {**F32, "data_offsets": [0, 8]}}).encode("utf-16"), 8),
    "lists without end": (b"[" * 100_000, 8),
    "objects without end": (b'{"a":' * 100_000, 8),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_does_not_fit_its_file_is_refused(lie, tmp_path):
    header, num_bytes = LIES[lie]
    path = write(tmp_path / "model.safetensors", header, b"\0" * num_bytes)
    with zoo.refused(str(path)):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_that_is_not_the_header_s_is_refused_without_reading_that_much(length, path):
    header, data = parts(path)
    with zoo.limit(5), zoo.refused(str(path)):
        read_header(write(path, header, data, length=length))


def test_a_header_that_claims_the_data_is_refused(path):
    header, data = parts(path)
    with zoo.refused(str(path)):
        read_header(write(path, header, data, length=len(header) + len(data)))


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 50, -1])
def test_a_file_cut_short_is_refused(num_bytes, path):
    path.write_bytes(path.read_bytes()[:num_bytes])
    with zoo.refused(str(path), "fetch it again"):
        read_header(path)


def test_random_bytes_are_refused(path):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        path.write_bytes(bytes(torch.randint(0, 256, (500,), generator=generator).tolist()))
        with zoo.refused(str(path)):
            read_header(path)


def test_a_missing_file_is_refused(tmp_path):
    with zoo.refused("model.safetensors", "give a folder"):
        read_header(tmp_path / "model.safetensors")


# ---------------------------------------------------------------- pickles


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "m.pkl", "m.pickle", "m.ckpt"])
def test_a_pickle_is_refused_by_its_name(name, tmp_path):
    (tmp_path / name).write_bytes(b"anything")
    with zoo.refused(name, "pickle", "convert"):
        refuse_pickle(tmp_path / name)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_whatever_its_name_and_never_run(protocol, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=protocol))
    with zoo.refused("model.safetensors"):
        read_header(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_is_refused_under_any_name_and_never_run(zipped, tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save({"weight": Bomb(tmp_path / "ran")}, path, _use_new_zipfile_serialization=zipped)
    with zoo.refused("model.safetensors"):
        read_header(path)
    assert not (tmp_path / "ran").exists()


def test_safetensors_are_no_pickle(path):
    refuse_pickle(path)


# ---------------------------------------------------------------- folders


def test_a_folder_s_single_file_is_its_weights(path):
    assert weight_files(path.parent) == [path]


def test_a_folder_s_shards_are_those_its_index_names(tmp_path):
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../x.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "deeper/x.safetensors"}},
        {"weight_map": {"a": "one.safetensors", "b": "../../x.safetensors"}},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": ["one.safetensors"]}},
        {"weight_map": {"a": {}}},
        {"weight_map": ["one.safetensors"]},
        {"weight_map": {}},
        {},
        [],
    ],
    ids=str,
)
def test_an_index_that_leads_out_of_its_folder_or_nowhere_is_refused(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with zoo.refused("model.safetensors.index.json", "fetch it again"):
        weight_files(tmp_path)


def test_a_folder_with_only_a_pickle_is_refused_as_such(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with zoo.refused("pytorch_model.bin", "pickle", "convert"):
        weight_files(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with zoo.refused(str(tmp_path), "give a folder"):
        weight_files(tmp_path)


# ---------------------------------------------------------------- JSON, digests


@pytest.mark.parametrize("text", ["", "{", "nul", "[]", "5", '"text"', "[" * 100_000, '{"a":' * 100_000])
def test_json_that_holds_no_object_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with zoo.refused("config.json", "fetch it again"):
        read_json(tmp_path / "config.json")


def test_json_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with zoo.refused("config.json", "fetch it again"):
        read_json(tmp_path / "config.json")


def test_missing_json_is_refused(tmp_path):
    with zoo.refused("config.json", "give a folder"):
        read_json(tmp_path / "config.json")


def test_a_digest_changes_with_any_byte_and_any_name(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    digests = [folder_digest(tmp_path)]
    assert folder_digest(tmp_path) == digests[0]
    (tmp_path / "b").write_bytes(b"3")
    digests.append(folder_digest(tmp_path))
    (tmp_path / "b").rename(tmp_path / "c")
    digests.append(folder_digest(tmp_path))
    (tmp_path / "deeper" / "a").rename(tmp_path / "a")
    digests.append(folder_digest(tmp_path))
    assert len(set(digests)) == 4
    # SHA-256 of the letter 3, from sha256sum
    assert file_digest(tmp_path / "c") == "4e07408562bedb8b60ce05c1decfe3ad16b72230967de01f640b7e4729b49fce"


# ---------------------------------------------------------------- mutated files

FACTORY = f"{zoo.__name__}:mlp_factory"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A small saved model, whose ``model.safetensors`` the tests below exchange."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(load(FACTORY), folder)
    return folder


def assert_true_or_refused(saved: Path, folder: Path, header: bytes, data: bytes) -> None:
    """Loading the mutated file gives the tensors that were saved, or a refusal."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    write(folder / "model.safetensors", header, data)
    try:
        loaded = load(str(folder), factory=FACTORY)
    except ModelError:
        return
    truth = torch.frombuffer(bytearray(parts(saved / "model.safetensors")[1]), dtype=torch.float32)
    entries = json.loads(parts(saved / "model.safetensors")[0])
    for name, tensor in loaded.module.state_dict().items():
        begin, end = (offset // 4 for offset in entries[name]["data_offsets"])
        assert torch.equal(tensor.flatten(), truth[begin:end]), name


def types_differ(one: bytes, other: bytes) -> bool:
    """Whether two headers name the same tensors with other types: an honest file of another model."""
    try:
        first, second = ({key: entry["dtype"] for key, entry in json.loads(raw).items()} for raw in (one, other))
        return first.keys() == second.keys() and first != second
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


relaxed = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_header_with_some_bytes_changed_gives_the_true_tensors_or_is_refused(saved, tmp_path, changes):
    header, data = parts(saved / "model.safetensors")
    mutated = bytearray(header)
    for where, byte in changes:
        mutated[int(where * len(mutated))] = byte
    assume(not types_differ(header, bytes(mutated)))
    assert_true_or_refused(saved, tmp_path, bytes(mutated), data)


ODD_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(-4, 4)
    | st.floats()
    | st.text(max_size=3)
    | st.just([])
    | st.just({})
)


@relaxed
@given(
    st.sampled_from(["0.weight", "0.bias", "2.weight", "2.bias"]),
    st.sampled_from(["shape", "data_offsets", "begin", "end", "whole", "name", "extra"]),
    st.lists(ODD_VALUES, max_size=3) | ODD_VALUES,
    st.text(max_size=8),
)
def test_a_header_with_an_odd_field_gives_the_true_tensors_or_is_refused(saved, tmp_path, name, place, value, text):
    header, data = parts(saved / "model.safetensors")
    entries = json.loads(header)
    if place == "whole":
        entries[name] = value
    elif place == "name":
        entries[text] = entries.pop(name)
    elif place == "extra":
        entries[name][text] = value
    elif place in ("begin", "end"):
        entries[name]["data_offsets"][place == "end"] = value
    else:
        entries[name][place] = value
    assume(not types_differ(header, json.dumps(entries).encode()))
    assert_true_or_refused(saved, tmp_path, json.dumps(entries).encode(), data)


@relaxed
@given(st.integers(0, 600), st.binary(max_size=20))
def test_a_file_cut_anywhere_with_anything_appended_is_true_or_refused(saved, tmp_path, cut, tail):
    raw = (saved / "model.safetensors").read_bytes()
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(raw[:cut] + tail)
    with zoo.refused():
        load(str(tmp_path), factory=FACTORY)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_weights_of_another_type_of_the_same_width_are_refused_not_converted(dtype, saved, tmp_path):
    header, data = parts(saved / "model.safetensors")
    entries = json.loads(header)
    entries["0.weight"]["dtype"] = dtype
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "model.safetensors", entries, data)
    with zoo.refused("0.weight"):
        load(str(tmp_path), factory=FACTORY)
