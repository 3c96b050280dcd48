"""Loading by reference: what is right loads exactly, what is not is refused in one line that says what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.models import zoo
from tests.models.test_safefile import Bomb
from torch import nn

from apportion.device.meters import flops_by_part
from apportion.errors import ModelError
from apportion.models import Partition, load
from apportion.models.cut import slice_network
from apportion.models.load import example_inputs
from apportion.models.save import save

every_transformer = pytest.mark.parametrize("name", zoo.TRANSFORMERS)
NEXT_STEP = re.compile(r"\b(fetch|give|install|run|convert|save|write|name it|choose|use|wrap|upgrade)\b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of one of the architectures, written once."""
    root = tmp_path_factory.mktemp("hub")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            zoo.save_pretrained(name, root / name)
        return root / name

    return folder


@pytest.fixture
def copied(folders, tmp_path) -> Callable[[str], Path]:
    """A copy of such a folder, to be spoilt."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folders(name), tmp_path / name))

    return copy


# ---------------------------------------------------------------- what loads


@every_transformer
def test_a_folder_loads_with_the_weights_it_holds(name, folders):
    network = load(str(folders(name)), tokens=zoo.TOKENS)
    written = zoo.build(name, dtype=torch.float32)
    assert type(network.module) is type(written.module)
    assert not network.module.training
    state = network.module.state_dict()
    for key, tensor in written.module.state_dict().items():
        assert torch.equal(state[key], tensor), key
    # the file's weights lie where they lie in memory, and a kernel may add in another order for it: 1000 times eps
    outputs = zoo.outputs(network, written.inputs)
    assert zoo.largest_difference(outputs, zoo.outputs(written)) <= 1000 * torch.finfo(torch.float32).eps


@every_transformer
def test_example_inputs_have_the_shape_asked_for_and_run(name, folders):
    network = load(str(folders(name)), batch=3, tokens=5)
    size = zoo.IMAGE if "resnet" not in name else 224  # ResNet's config names no size
    shape = (3, 5) if network.takes_text else (3, 3, size, size)
    assert next(iter(network.inputs.values())).shape == shape
    if size == zoo.IMAGE:
        assert zoo.outputs(network)[0].shape[0] == 3


def test_example_inputs_follow_the_seed(folders):
    first, again, other = (load(str(folders("bert")), tokens=9, seed=seed).inputs["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("name", "readout"),
    [("bert", "embedding"), ("vit", "embedding"), ("resnet-basic", "logits"), ("gpt2", "token-logits")],
)
def test_the_readout_follows_the_kind_of_head(name, readout, folders):
    assert load(str(folders(name)), tokens=8).readout == readout


def test_pooling_follows_the_sentence_transformers_file(copied):
    folder = copied("bert")
    assert load(str(folder), tokens=8).pooling == "mean"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert load(str(folder), tokens=8).pooling == "cls"


def test_shards_load_as_one_file_does(tmp_path):
    written = zoo.save_pretrained("bert", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    state = load(str(tmp_path), tokens=8).module.state_dict()
    for key, tensor in written.module.state_dict().items():
        assert torch.equal(state[key], tensor), key


def test_tied_weights_stay_tied(folders):
    module = load(str(folders("gpt2")), tokens=8).module
    assert module.lm_head.weight is module.transformer.wte.weight


def test_half_precision_files_load_in_single_precision(tmp_path):
    network = zoo.build("bert", dtype=torch.bfloat16)
    network.module.save_pretrained(tmp_path)
    state = load(str(tmp_path), tokens=8).module.state_dict()
    for key, tensor in network.module.state_dict().items():
        assert state[key].dtype in (torch.float32, torch.int64)
        assert torch.equal(state[key], tensor.to(state[key].dtype)), key


def test_a_loaded_model_can_be_partitioned(folders):
    names = [module.name for module in Partition.of(load(str(folders("bert")), tokens=8))]
    assert names == [module.name for module in zoo.partition("bert")]


# ---------------------------------------------------------------- the size of images


@pytest.mark.parametrize("name", ["resnet-basic", "mobilenetv2", "convnext"])
def test_images_of_another_size_are_what_the_model_is_priced_at(name, folders):
    own, larger = (load(str(folders(name)), batch=2, size=size) for size in (None, 2 * zoo.IMAGE))
    side = own.inputs["pixel_values"].shape[-1]
    assert load(str(folders(name)), batch=2, size=side).inputs["pixel_values"].equal(own.inputs["pixel_values"])
    assert larger.inputs["pixel_values"].shape == (2, 3, 2 * zoo.IMAGE, 2 * zoo.IMAGE)
    assert larger.inputs["pixel_values"].std() == pytest.approx(1.0, abs=0.1)


def test_images_need_not_be_square(folders):
    assert load(str(folders("resnet-basic")), size="24x40").inputs["pixel_values"].shape == (1, 3, 24, 40)


def test_convolutions_over_images_of_twice_the_side_take_four_times_the_operations():
    flops = [flops_by_part(load("tests.factories:small_cnn", size=size))["stem"] for size in (None, 16, 32)]
    assert flops == [flops[0], flops[0], 4 * flops[0]]


def test_a_cut_model_takes_the_size_that_it_is_loaded_at(tmp_path):
    network = load("tests.factories:small_cnn")
    partition = Partition.of(network)
    keep = partition.keep({module.name: module.sizes()[0] for module in partition})
    save(slice_network(network, partition, keep), tmp_path / "small")
    image = load(str(tmp_path / "small"), factory="tests.factories:small_cnn", size=24).inputs["0"]
    assert image.shape == (1, 3, 24, 24)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("vit", 48, ("48x48 pixels", "doesn't match model", "its own are 32x32", "give no --size")),
        ("vit", "32x48", ("32x48 pixels", "doesn't match model", "its own are 32x32", "give no --size")),
        ("bert", 48, ("takes input_ids", "no images", "give no --size")),
        *(
            ("resnet-basic", size, (f"size {size} were", "from 1 to"))
            for size in (0, 50_000, -3, "32x0", "x", "8x", "2x2x2")
        ),
    ],
)
def test_a_size_that_the_model_does_not_take_is_refused_with_its_own(name, size, words, folders):
    with zoo.refused(*words):
        load(str(folders(name)), tokens=zoo.TOKENS, size=size)


# ---------------------------------------------------------------- factories


def factory(function: Callable[[], object], monkeypatch) -> str:
    monkeypatch.setattr(zoo, "made_by_test", function, raising=False)
    return f"{zoo.__name__}:made_by_test"


LINEAR = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (torch.ones(2, 6), {"0"}),
        ((torch.ones(2, 6),), {"0"}),
        ([torch.ones(2, 6)], {"0"}),
        ({"input": torch.ones(2, 6)}, {"input"}),
    ],
)
def test_a_factory_gives_the_module_and_its_inputs_in_any_form(inputs, names, monkeypatch):
    network = load(factory(lambda: (LINEAR, inputs), monkeypatch))
    assert set(network.inputs) == names
    assert network.readout == "logits"
    assert torch.equal(zoo.outputs(network)[0], LINEAR(torch.ones(2, 6)).detach())


def test_a_factory_s_module_is_put_into_evaluation_mode(monkeypatch):
    module = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    assert not load(factory(lambda: (module.train(), torch.ones(2, 6)), monkeypatch)).module.training


@pytest.mark.parametrize(
    "made", [LINEAR, (LINEAR, None), (LINEAR, 5), (None, torch.ones(1)), None, (LINEAR, torch.ones(1), 3)]
)
def test_a_factory_that_returns_something_else_is_refused(made, monkeypatch):
    with zoo.refused("made_by_test", "must return", "example inputs"):
        load(factory(lambda: made, monkeypatch))


def test_a_module_without_floating_point_outputs_is_refused(monkeypatch):
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x > 0).sum()

    with zoo.refused("floating-point"):
        load(factory(lambda: (Counts(), torch.ones(2)), monkeypatch))


def test_a_factory_that_needs_arguments_is_refused(monkeypatch):
    with zoo.refused("made_by_test", "module.path:function"):
        load(factory(lambda size: size, monkeypatch))


@pytest.mark.parametrize(
    "ref", ["no_such_module:f", f"{zoo.__name__}:no_such_function", ":f", ".relative:f", "os:path", "json:", ":"]
)
def test_a_factory_that_is_not_there_is_refused(ref):
    with zoo.refused(repr(ref), "module.path:function"):
        load(ref)


# ---------------------------------------------------------------- what is refused


def test_a_name_that_leads_nowhere_is_refused_with_what_there_is():
    with zoo.refused("'no-such-model'", "folder", "minilm", "module.path:factory"):
        load("no-such-model")


@pytest.mark.parametrize("ref", ["x" * 5000, "a\0b", "", " "], ids=["long", "null", "empty", "blank"])
def test_an_odd_name_is_refused(ref):
    with zoo.refused():
        load(ref)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_is_refused_with_the_hint_to_its_folder(name, folders):
    with zoo.refused(name, "give the folder"):
        load(str(folders("bert") / name))


def test_a_pickled_file_is_refused_as_such(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(Bomb(tmp_path / "ran"), path)
    with zoo.refused("pytorch_model.bin", "pickle", "convert"):
        load(str(path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("batch", "tokens"), [(0, 8), (1, 0), (-1, 8)])
def test_an_empty_shape_is_refused(batch, tokens, folders):
    with zoo.refused("batch", "tokens", "at least 1"):
        load(str(folders("bert")), batch=batch, tokens=tokens)


def test_more_tokens_than_the_model_has_positions_are_refused(folders):
    with zoo.refused("32", "64", "--tokens"):
        load(str(folders("bert")), tokens=64)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: folder.joinpath(name).write_bytes(content) and None


def configure(**fields: object) -> Callable[[Path], None]:
    return lambda folder: zoo.change_json(folder / "config.json", **fields)


def sharded(index: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil


def cut(num_bytes: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return spoil


def pickled(name: str, *, alone: bool) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        if alone:
            (folder / "model.safetensors").unlink()
        torch.save(Bomb(folder / "ran"), folder / name)

    return spoil


def lied(field: str, value: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header["pooler.dense.bias"][field] = value
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return spoil


# how a folder is spoilt, the architecture, and what the message must contain
SPOILT: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "no config": ("bert", drop("config.json"), ("config.json",)),
    "config is no JSON": ("bert", put("config.json", b"{oops"), ("config.json",)),
    "config is a list": ("bert", put("config.json", b"[]"), ("config.json",)),
    "config is a maze": ("bert", put("config.json", b'{"a":' * 100_000), ("config.json",)),
    "no model type": ("bert", put("config.json", b"{}"), ("config.json",)),
    "unknown model type": ("bert", configure(model_type="no-such-type"), ("config.json", "no-such-type")),
    "unknown architecture": ("bert", configure(architectures=["NoSuchModel"]), ("config.json", "NoSuchModel")),
    "an architecture that is no model": ("bert", configure(architectures=["BertTokenizer"]), ("BertTokenizer",)),
    "an architecture of another type": ("bert", configure(architectures=["LlamaForCausalLM"]), ("config.json",)),
    "absurdly many layers": ("bert", configure(num_hidden_layers=10**9), ("config.json", str(10**9))),
    "absurdly many layers by another name": ("gpt2", configure(n_layer=10**9), ("config.json", str(10**9))),
    "absurdly deep stages": ("resnet-basic", configure(depths=[10**9, 3]), ("config.json",)),
    "fewer layers than none": ("bert", configure(num_hidden_layers=-1), ("config.json",)),
    "one layer too many": ("bert", configure(num_hidden_layers=4), ("encoder.layer.3",)),
    "absurdly wide": ("bert", configure(hidden_size=10**6), ("config.json",)),
    "absurdly many words": ("bert", configure(vocab_size=10**12), ("config.json",)),
    "absurdly many positions": ("bert", configure(max_position_embeddings=10**10), ("config.json",)),
    "absurdly large images": ("mobilenetv2", configure(image_size=10**6), ("image_size",)),
    "images of three sides": ("mobilenetv2", configure(image_size=[8, 8, 8]), ("image_size",)),
    "absurdly many classes": ("resnet-basic", configure(num_labels=10**9), ("config.json",)),
    "width that the weights don't have": ("bert", configure(hidden_size=64), ()),
    "an attention kernel from afar": ("bert", configure(attn_implementation="someone/kernel"), ("config.json",)),
    "no weights": ("bert", drop("model.safetensors"), ("model.safetensors",)),
    "weights of random bytes": ("bert", put("model.safetensors", bytes(range(256)) * 9), ("model.safetensors",)),
    "weights cut short": ("bert", cut(100), ("model.safetensors",)),
    "weights cut to nothing": ("bert", put("model.safetensors", b""), ("model.safetensors",)),
    "a huge header": ("bert", put("model.safetensors", b"\xff" * 7 + b"\x7f{}"), ("model.safetensors",)),
    "a pickle by its name": ("bert", pickled("pytorch_model.bin", alone=True), ("pytorch_model.bin", "pickle")),
    "a pickle as safetensors": ("bert", pickled("model.safetensors", alone=True), ("model.safetensors",)),
    "overlapping offsets": ("bert", lied("data_offsets", [0, 128]), ("model.safetensors",)),
    "offsets past the end": ("bert", lied("data_offsets", [2**50, 2**50 + 128]), ("model.safetensors",)),
    "a shape that its bytes don't fill": ("bert", lied("shape", [2**40]), ("model.safetensors",)),
    "a shape that the model doesn't have": ("bert", lied("shape", [4, 8]), ()),
    "a shard outside the folder": ("bert", sharded({"weight_map": {"a": "../x.safetensors"}}), ("index.json",)),
    "a shard that is not there": ("bert", sharded({"weight_map": {"a": "x.safetensors"}}), ("x.safetensors",)),
    "a shard that is a pickle": ("bert", sharded({"weight_map": {"a": "x.bin"}}), ("x.bin", "pickle")),
    "an index of nothing": ("bert", sharded({}), ("index.json",)),
    "a shard of no name": ("bert", sharded({"weight_map": {"a": ["x"]}}), ("index.json",)),
}


MESSAGES: dict[str, str] = {}


def refusal(label: str, copied: Callable[[str], Path]) -> str:
    """The message with which the spoilt folder is refused, before much time or memory goes into it."""
    name, spoil, words = SPOILT[label]
    folder = copied(name)
    spoil(folder)
    with zoo.limit(3), zoo.Allocations(1 << 28), zoo.refused(*words) as caught:
        load(str(folder), tokens=8)
    assert not (folder / "ran").exists()
    return str(caught.value)


@pytest.mark.parametrize("label", SPOILT)
def test_a_spoilt_folder_is_refused_in_one_line_at_little_cost(label, copied):
    MESSAGES[label] = ""
    MESSAGES[label] = refusal(label, copied)
    assert "can't allocate" not in MESSAGES[label]


@pytest.mark.parametrize("label", SPOILT)
def test_a_refusal_says_what_to_do_next(label, copied):
    message = MESSAGES[label] if label in MESSAGES else refusal(label, copied)
    if not message:
        pytest.skip("it is not refused at all: the test above fails")
    assert NEXT_STEP.search(message), message


def test_code_that_a_folder_brings_along_is_not_run(copied):
    folder = copied("bert")
    (folder / "modeling.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: pass\n")
    names = {"AutoConfig": "modeling.Evil", "AutoModel": "modeling.Evil"}
    zoo.change_json(folder / "config.json", auto_map=names)
    load(str(folder), tokens=8)
    zoo.change_json(folder / "config.json", model_type="evil", architectures=["Evil"])
    with zoo.refused("config.json"):
        load(str(folder), tokens=8)
    assert not (folder / "ran").exists()


def test_an_architecture_whose_inputs_are_unknown_is_refused_with_a_way_round():
    class Odd(nn.Module):
        main_input_name = "input_smells"
        config = object()

    with zoo.refused("input_smells", "module.path:factory"):
        example_inputs(Odd(), batch=1, tokens=1, seed=0)


def test_a_model_error_is_a_value_error():
    assert issubclass(ModelError, ValueError)
