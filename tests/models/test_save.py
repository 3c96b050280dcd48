"""What is saved loads back bit for bit, appears whole or not at all, and can't be tampered into anything else."""

from __future__ import annotations

import importlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.models import zoo
from torch import Tensor, nn

from apportion.models import Network, Partition, load, save, slice_network
from apportion.models.skip import Skip

every_transformer = pytest.mark.parametrize("name", zoo.TRANSFORMERS)
FACTORY = f"{zoo.__name__}:mlp_factory"
SAVE_MODULE = importlib.import_module("apportion.models.save")  # the package has a function of that name


def sliced(name: str, *, seed: int = 3) -> Network:
    """A network in single precision with every width cut and some blocks gone."""
    network, partition = zoo.build(name, dtype=torch.float32), zoo.partition(name)
    return slice_network(network, partition, zoo.random_keep(partition, seed=seed))


def assert_same(loaded: Network, written: Network) -> None:
    first, second = loaded.module.state_dict(), written.module.state_dict()
    assert first.keys() == second.keys()
    for key in first:
        assert first[key].dtype == second[key].dtype, key
        assert torch.equal(first[key], second[key]), key
    for a, b in zip(zoo.outputs(loaded, written.inputs), zoo.outputs(written), strict=True):
        assert torch.equal(a, b)
    assert loaded.edits == written.edits
    assert zoo.num_parameters(loaded) == zoo.num_parameters(written)


# ---------------------------------------------------------------- there and back


@every_transformer
@pytest.mark.parametrize("seed", [3, 4])
def test_a_sliced_network_loads_back_bit_for_bit(name, seed, tmp_path):
    network = sliced(name, seed=seed)
    save(network, tmp_path / "model")
    assert_same(load(str(tmp_path / "model"), tokens=zoo.TOKENS), network)


@every_transformer
def test_a_whole_network_loads_back_bit_for_bit(name, tmp_path):
    network = zoo.build(name, dtype=torch.float32)
    save(network, tmp_path / "model")
    assert_same(load(str(tmp_path / "model"), tokens=zoo.TOKENS), network)


def test_weights_that_were_tied_are_stored_once_and_tied_again(tmp_path):
    network = sliced("gpt2")
    assert network.module.lm_head.weight is network.module.transformer.wte.weight
    save(network, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert ("lm_head.weight" in stored) != ("transformer.wte.weight" in stored)
    module = load(str(tmp_path / "model"), tokens=8).module
    assert module.lm_head.weight is module.transformer.wte.weight


def test_saving_what_was_loaded_gives_the_same_files(tmp_path):
    for name in ("bert", "gpt2"):
        save(sliced(name), tmp_path / "first")
        save(load(str(tmp_path / "first"), tokens=8), tmp_path / "second")
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), name
        one, two = (json.loads((tmp_path / run / "apportion.json").read_text()) for run in ("first", "second"))
        told_by_class = {"origin": None, "readout": None}
        assert {**one, **told_by_class} == {**two, **told_by_class}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "resnet-bottleneck", "efficientnet"])
def test_a_network_sliced_saved_and_loaded_can_be_sliced_further(name, tmp_path):
    partition, first = zoo.partition(name), sliced(name)
    then = {key: kept[: -(-len(kept) // 2)] for key, kept in first.edits.keep.items()}
    save(first, tmp_path / "model")
    further = slice_network(load(str(tmp_path / "model"), tokens=zoo.TOKENS), partition, then)
    at_once = slice_network(zoo.build(name, dtype=torch.float32), partition, then)
    for a, b in zip(zoo.outputs(further, at_once.inputs), zoo.outputs(at_once), strict=True):
        assert torch.equal(a, b)
    save(further, tmp_path / "further")
    assert_same(load(str(tmp_path / "further"), tokens=zoo.TOKENS), further)


def test_a_loaded_llama_generates_with_its_cache(tmp_path):
    network = zoo.build("llama", dtype=torch.float32)
    small = slice_network(network, zoo.partition("llama"), {"model.layers.blocks": (1, 2)})
    save(small, tmp_path / "model")
    module = load(str(tmp_path / "model"), tokens=8).module
    ids = network.inputs["input_ids"][:1]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = module.generate(ids, use_cache=True, **options)
    assert torch.equal(with_cache, module.generate(ids, use_cache=False, **options))
    assert torch.equal(with_cache, small.module.generate(ids, use_cache=True, **options))


def test_the_files_of_a_tokenizer_come_along(tmp_path):
    zoo.save_pretrained("bert", tmp_path / "hub")
    (tmp_path / "hub" / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "hub" / "1_Pooling").mkdir()
    (tmp_path / "hub" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    save(load(str(tmp_path / "hub"), tokens=8), tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == '{"a": 1}'
    assert load(str(tmp_path / "model"), tokens=8).pooling == "cls"


def test_a_saved_folder_holds_no_pickle(tmp_path):
    save(sliced("bert"), tmp_path / "model")
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["apportion.json", "config.json", "model.safetensors"]


# ---------------------------------------------------------------- factories


def test_a_factory_s_network_loads_back_when_its_factory_is_named(tmp_path):
    network = load(FACTORY)
    partition = Partition.of(network)
    network = slice_network(network, partition, {partition.modules[0].name: (0, 5, 9, 31)})
    save(network, tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()
    assert_same(load(str(tmp_path / "model"), factory=FACTORY), network)


def test_a_factory_s_network_is_refused_without_its_factory_which_is_not_run(tmp_path, monkeypatch):
    save(load(FACTORY), tmp_path / "model")
    monkeypatch.setattr(zoo, "mlp_factory", lambda: pytest.fail("code named in a file was run"))
    with zoo.refused(FACTORY, "name it yourself"):
        load(str(tmp_path / "model"))


def test_a_factory_that_makes_another_architecture_is_refused(tmp_path, monkeypatch):
    save(load(FACTORY), tmp_path / "model")
    other = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    monkeypatch.setattr(zoo, "mlp_factory", lambda: (other, torch.ones(2, 6)))
    with zoo.refused("0.weight", "[16, 6]", "[32, 6]"):
        load(str(tmp_path / "model"), factory=FACTORY)


class Transposed(nn.Module):
    """An autoencoder whose decoder is the transpose of its encoder: one memory, two square views."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.data.t())
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.decode(torch.relu(self.encode(x))))))


def test_two_views_of_one_memory_are_stored_as_what_they_read(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "mlp_factory", lambda: (Transposed(), torch.ones(2, 8)))
    network = load(FACTORY)
    written = {key: tensor.clone() for key, tensor in network.module.state_dict().items()}
    save(network, tmp_path / "model")
    state = load(str(tmp_path / "model"), factory=FACTORY).module.state_dict()
    for key, tensor in written.items():
        assert torch.equal(state[key], tensor), key


# ---------------------------------------------------------------- whole or not at all


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def saved_before(tmp_path) -> Path:
    """A folder that holds nothing but a saved model."""
    save(sliced("bert", seed=1), tmp_path / "runs" / "model")
    return tmp_path / "runs" / "model"


def test_saving_again_replaces_the_folder_and_leaves_nothing_else(saved_before):
    (saved_before / "stale").write_text("from before")
    network = sliced("bert", seed=2)
    save(network, saved_before)
    assert_same(load(str(saved_before), tokens=8), network)
    assert not (saved_before / "stale").exists()
    assert [path.name for path in saved_before.parent.iterdir()] == ["model"]


def test_folders_on_the_way_are_made(tmp_path):
    save(sliced("bert"), tmp_path / "a" / "b" / "model")
    assert (tmp_path / "a" / "b" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "interrupted"])
@pytest.mark.parametrize("step", ["save_file", "_write_json"])
def test_a_save_that_breaks_off_leaves_the_old_folder_whole(step, error, saved_before, monkeypatch):
    before = contents(saved_before)

    def breaks(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(SAVE_MODULE, step, breaks)
    with pytest.raises(type(error)):
        save(sliced("bert", seed=2), saved_before)
    assert contents(saved_before) == before
    assert [path.name for path in saved_before.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("nth", [1, 2])
def test_a_save_that_breaks_off_while_folders_are_exchanged_leaves_the_old_one_whole(nth, saved_before, monkeypatch):
    before, rename, calls = contents(saved_before), Path.rename, []

    def breaks(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == nth:
            raise OSError("no more entries in this folder")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", breaks)
    with pytest.raises(OSError, match="no more entries"):
        save(sliced("bert", seed=2), saved_before)
    assert contents(saved_before) == before
    assert [path.name for path in saved_before.parent.iterdir()] == ["model"]


def test_a_save_that_breaks_off_leaves_nothing_where_nothing_was(tmp_path, monkeypatch):
    def breaks(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(SAVE_MODULE, "save_file", breaks)
    with pytest.raises(OSError, match="disk full"):
        save(sliced("bert"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with zoo.refused("thesis"):
        save(sliced("bert"), tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"


# ---------------------------------------------------------------- tampering


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(sliced("bert"), folder)
    return folder


Fields = dict[str, dict[str, object]]
DENSE, SELF = "encoder.layer.0.output.dense", "encoder.layer.0.attention.self"
# what is changed in apportion.json, and what the message must contain
TAMPERED: dict[str, tuple[Callable[[Fields], object], tuple[str, ...]]] = {
    "an unknown layer": (lambda f: f["widths"].update(nope={"out": 3}), ("'nope'",)),
    "a layer that is a container": (lambda f: f["widths"].update(encoder={"out": 3}), ()),
    "a layer that is no layer": (lambda f: f["widths"].update(config={"out": 3}), ("'config'",)),
    "the whole model as a layer": (lambda f: f["widths"].update({"": {"out": 3}}), ()),
    "a width larger than the original": (lambda f: f["widths"].update({DENSE: {"in": 4800}}), (DENSE, "4800")),
    "a width of nothing": (lambda f: f["widths"].update({DENSE: {"in": 0}}), (DENSE, "0")),
    "a negative width": (lambda f: f["widths"].update({DENSE: {"in": -1}}), (DENSE, "-1")),
    "an infinite width": (lambda f: f["widths"].update({DENSE: {"in": float("inf")}}), ()),
    "a width of text": (lambda f: f["widths"].update({DENSE: {"in": "wide"}}), ()),
    "an unknown side": (lambda f: f["widths"].update({DENSE: {"sideways": 3}}), (DENSE, "sideways")),
    "a width that the weights don't have": (lambda f: f["widths"].update({DENSE: {"in": 7}}), (DENSE,)),
    "an attribute not on the list": (lambda f: f["attributes"].update({SELF: {"training": 1}}), ("training",)),
    "an attribute of every object": (lambda f: f["attributes"].update({SELF: {"__class__": 1}}), ("__class__",)),
    "a method": (lambda f: f["attributes"].update({SELF: {"forward": 1}}), ("forward",)),
    "an attribute that grows": (lambda f: f["attributes"].update({SELF: {"num_attention_heads": 99}}), ("99",)),
    "an attribute of nobody": (lambda f: f["attributes"].update(nope={"num_attention_heads": 1}), ("'nope'",)),
    "an infinite attribute": (lambda f: f["attributes"].update({SELF: {"num_heads": float("inf")}}), ()),
    "an unknown block": (lambda f: f["skips"].update(nope=0), ("'nope'",)),
    "a block that is the whole model": (lambda f: f["skips"].update({"": 0}), ()),
    "a block that is no block": (lambda f: f["skips"].update(embeddings=0), ("embeddings",)),
    "a block with endless outputs": (lambda f: f["skips"].update({"encoder.layer.0": 10**9}), ("encoder.layer.0",)),
    "a rank of an unknown layer": (lambda f: f["ranks"].update(nope=1), ("'nope'", "rank 1")),
    "a rank of a container": (lambda f: f["ranks"].update(encoder=1), ("'encoder'",)),
    "a rank of the whole model": (lambda f: f["ranks"].update({"": 1}), ("rank 1",)),
    "a rank that grows the layer": (lambda f: f["ranks"].update({DENSE: 10**9}), (DENSE, "1000000000")),
    "a rank of nothing": (lambda f: f["ranks"].update({DENSE: 0}), (DENSE, "rank 0")),
    "a rank that the weights don't have": (lambda f: f["ranks"].update({DENSE: 3}), (DENSE,)),
    "a rank of text": (lambda f: f["ranks"].update({DENSE: "low"}), ()),
    "ranks of no kind": (lambda f: f.update(ranks=[DENSE]), ()),
    "a factory": (lambda f: f.update(factory="os:getcwd"), ("os:getcwd", "not run")),
    "a factory of no kind": (lambda f: f.update(factory=["os"]), ()),
    "another format": (lambda f: f.update(apportion_model=99), ("format",)),
    "tied to no tensor": (lambda f: f["tied"].update({"pooler.dense.bias": "nope"}), ("pooler.dense.bias",)),
    "tied to a list": (lambda f: f["tied"].update({"pooler.dense.bias": []}), ()),
    "tied though stored": (lambda f: f["tied"].update({"pooler.dense.bias": f"{DENSE}.bias"}), ("pooler.dense.bias",)),
    "no widths": (lambda f: f.pop("widths"), ()),
    "widths of no kind": (lambda f: f.update(widths=[1]), ()),
    "keep of no kind": (lambda f: f.update(keep={"a": 7}), ()),
    "skips of no kind": (lambda f: f.update(skips=7), ()),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_file_of_edits_that_was_tampered_with_is_refused(what, original, tmp_path):
    tamper, words = TAMPERED[what]
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    fields = json.loads((folder / "apportion.json").read_text())
    tamper(fields)
    (folder / "apportion.json").write_text(json.dumps(fields))
    with zoo.refused(str(folder), *words):
        load(str(folder), tokens=8)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_file_of_edits_that_is_no_json_is_refused(text, original, tmp_path):
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    (folder / "apportion.json").write_text(text)
    with zoo.refused("apportion.json"):
        load(str(folder), tokens=8)


@pytest.mark.parametrize(
    "fields",
    [{"num_hidden_layers": 10**9}, {"hidden_size": 10**6}, {"hidden_size": 40_000}, {"vocab_size": 10**8}],
    ids=str,
)
def test_a_saved_config_made_absurd_is_refused_at_little_cost(fields, original, tmp_path):
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    zoo.change_json(folder / "config.json", **fields)
    with zoo.limit(5), zoo.Allocations(1 << 28), zoo.refused(str(folder)) as caught:
        load(str(folder), tokens=8)
    assert "can't allocate" not in str(caught.value)


def test_saved_weights_that_are_missing_or_exchanged_are_refused(original, tmp_path):
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    with zoo.refused("model.safetensors", "pickle"):
        load(str(folder), tokens=8)
    (folder / "model.safetensors").unlink()
    with zoo.refused("model.safetensors", "give a folder"):
        load(str(folder), tokens=8)


def test_a_loaded_network_has_stand_ins_where_blocks_were(original):
    network = load(str(original), tokens=8)
    for name in network.edits.skips:
        assert isinstance(network.module.get_submodule(name), Skip)
