"""Loading a model by reference: a built-in name, a Hugging Face style folder, or ``module.path:factory``."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from apportion.errors import ModelError
from apportion.models.factored import break_even, can_factor, factored, replace_layer
from apportion.models.hub import PREFIX as HUB
from apportion.models.hub import find_on_hub
from apportion.models.network import Edits, Int8, Network, Origin, Readout, float_outputs, forward
from apportion.models.registry import BUILT_IN, find_packaged
from apportion.models.safefile import TensorInfo, read_header, read_json, refuse_pickle, weight_files
from apportion.models.size import Size, sides_of
from apportion.models.skip import skip_blocks
from apportion.models.sparse import unpack, unpacked_headers
from apportion.models.tokens import merge_tokens

EDITS_FILE = "apportion.json"
CALIBRATION_FILE = "calibration.safetensors"
FORMAT = 1
for _noisy in ("torchao", "torch.utils._pytree"):  # where torchao is there, transformers loads it, and it talks
    logging.getLogger(_noisy).setLevel(logging.ERROR)
_BLOAT = 4  # a config may describe at most this many times the numbers that the weights hold (tied weights, buffers)


def load(
    ref: str,
    *,
    batch: int = 1,
    tokens: int = 64,
    seed: int = 0,
    size: Size | None = None,
    factory: str | None = None,
) -> Network:
    """Loads a model on the CPU in evaluation mode.

    Args:
        ref: a built-in name (``minilm``, ``efficientnet-lite0``, …), a folder with ``config.json`` and safetensors, a
            folder written by ``models.save``, ``hf:owner/name`` (see ``models.hub``), or ``module.path:factory``, a
            function returning ``(module, example inputs)``.
        batch: examples in the inputs that the model is traced and priced at.
        tokens: length of those inputs for text models.
        seed: of the example inputs.
        size: side of those inputs for models of images, a factory's too, or ``"HEIGHTxWIDTH"``; the model's own where
            it is None.
        factory: the factory that a saved model came from; needed because code named in a file is never run.
    """
    if min(batch, tokens) < 1:
        raise ModelError(f"batch {batch} and tokens {tokens} must be at least 1")
    sides = None if size is None else sides_of(size)
    network = _loaded(ref, batch, tokens, seed, factory)
    if (
        batch > 1
        and network.origin.factory is not None
        and {len(tensor) for tensor in network.inputs.values()} != {batch}
    ):
        made = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in network.inputs.items())
        raise ModelError(f"{ref} brings its own example inputs ({made}); make them {batch} there, or give no batch")
    return network if sides is None else _at_size(network, sides)


def _loaded(ref: str, batch: int, tokens: int, seed: int, factory: str | None) -> Network:
    if ref in BUILT_IN:
        return _from_folder(ref, find_packaged(ref), batch, tokens, seed)
    if ref.startswith(HUB):
        return _from_folder(ref, find_on_hub(ref), batch, tokens, seed)
    path = Path(ref)
    try:
        path.exists()
    except OSError as error:
        raise ModelError(f"no model {ref[:40]!r}… ({error.strerror}); give a folder") from None
    if path.is_dir():
        if (path / EDITS_FILE).is_file():
            return _from_saved(ref, path, batch, tokens, seed, factory)
        return _from_folder(ref, path, batch, tokens, seed)
    if path.is_file():
        refuse_pickle(path)
        raise ModelError(f"{ref} is a file; give the folder that holds it together with its config.json")
    if is_factory(ref):
        return _from_factory(ref)
    raise ModelError(
        f"no model {ref!r}: neither a folder here nor a built-in name ({', '.join(BUILT_IN)}) nor hf:owner/name "
        "nor module.path:factory"
    )


def is_factory(ref: str) -> bool:
    """Whether a reference names code: ``module.path:factory``."""
    return ":" in ref and not ref.startswith(HUB) and not Path(ref).exists()


def _at_size(network: Network, sides: tuple[int, int]) -> Network:
    """The network with example images of another size, the nearest pixels of its own; tried once where it differs."""
    images = {key: tensor for key, tensor in network.inputs.items() if tensor.dim() == 4 and tensor.is_floating_point()}
    if not images:
        takes = ", ".join(network.inputs)
        raise ModelError(f"{network.origin.ref} takes {takes}, which are no images to give a size; give no --size")
    own = {tuple(tensor.shape[-2:]) for tensor in images.values()}
    if own == {sides}:
        return network
    try:
        with torch.no_grad():
            resized = {key: nn.functional.interpolate(tensor, size=sides) for key, tensor in images.items()}
        with torch.inference_mode():
            forward(network.module, {**network.inputs, **resized})
    except Exception as error:  # a network's own code may raise anything for a size that it does not take
        known = " and ".join(f"{height}x{width}" for height, width in sorted(own))
        raise ModelError(
            f"{network.origin.ref} can't run on images of {sides[0]}x{sides[1]} pixels "
            f"({_first_line(error).rstrip('.')}); its own are {known}: give no --size for them"
        ) from None
    return network.replace(inputs={**network.inputs, **resized})


def _from_folder(ref: str, folder: Path, batch: int, tokens: int, seed: int) -> Network:
    headers: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        headers |= read_header(path)
    config, model_class = _config(folder)
    with torch.device("meta"):
        described = sum(p.numel() for p in _build(folder, config, model_class, headers).parameters())
    stored = sum(math.prod(info.shape) for info in headers.values())
    if described > _BLOAT * max(stored, 1):
        raise ModelError(
            f"{folder}/config.json describes {described} weights, but its files hold {stored}; fetch it again"
        )
    try:
        with _Quiet():
            module, info = model_class.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                **_options(model_class, headers),
            )
    except Exception as error:  # the library raises many kinds for a mismatch
        raise ModelError(f"{folder}: the weights don't fit the config ({_first_line(error)}); fetch it again") from None
    if info["missing_keys"]:
        raise ModelError(f"{folder} lacks the weights of {sorted(info['missing_keys'])[0]!r}; fetch it again")
    return _network(ref, folder, module.eval(), batch, tokens, seed)


def _network(ref: str, folder: Path, module: Any, batch: int, tokens: int, seed: int) -> Network:
    return Network(
        module=module,
        inputs=example_inputs(module, batch=batch, tokens=tokens, seed=seed),
        origin=Origin(ref=ref, folder=folder),
        readout=_readout(type(module).__name__),
        pooling=_pooling(folder),
    )


def _from_saved(ref: str, folder: Path, batch: int, tokens: int, seed: int, factory: str | None) -> Network:
    fields = read_json(folder / EDITS_FILE)
    if fields.get("apportion_model") != FORMAT:
        raise ModelError(f"{folder}/{EDITS_FILE} is of another format than {FORMAT}; save the model again")
    path = folder / "model.safetensors"
    headers = read_header(path)
    if fields.get("factory") is not None:
        if factory is None:
            raise ModelError(
                f"{ref} was made by the factory {fields['factory']!r}; code named in a file is not run: name it "
                "yourself (fit --factory, verify --model)"
            )
        network = copy.deepcopy(_made_once(_function(factory), factory, _saved_readout(fields)))
        network = network.replace(origin=Origin(ref=ref, folder=folder, factory=factory))
        module = network.module
    else:
        config, model_class = _config(folder)
        with torch.device("meta"):
            plan = _build(folder, config, model_class, headers)
        edits = _read_edits(folder, fields)
        for name, tensor in plan.state_dict().items():  # a layer that was not cut must fit as it is
            cut = name.rpartition(".")[0] in edits.widths or any(name.startswith(f"{skip}.") for skip in edits.skips)
            if not cut and name in headers and headers[name].shape != tuple(tensor.shape):
                raise ModelError(
                    f"{path}: {name!r} has {list(headers[name].shape)}, not {list(tensor.shape)}; save it again"
                )
        _apply_edits(folder, plan, edits)
        _check_weights(path, plan, headers, fields.get("tied"), fields.get("packed", []))
        with _Quiet(), no_init_weights():
            module = _build(folder, config, model_class, headers)
        network = _network(ref, folder, module.eval(), batch, tokens, seed)
    edits = _read_edits(folder, fields)
    _apply_edits(folder, module, edits)
    _load_weights(path, module, headers, fields.get("tied"), fields.get("packed", []))
    calibration = _calibration(folder / CALIBRATION_FILE, network.inputs)
    return network.replace(edits=edits, calibration=calibration, int8=_read_int8(folder, fields.get("int8", {})))


def _read_int8(folder: Path, fields: Any) -> Int8:
    """How the model is quantised; files from before there was a choice don't say and mean the default."""
    default = Int8()
    try:
        activations, scope = (fields.get(name, getattr(default, name)) for name in ("activations", "scope"))
        in_float = tuple(fields.get("in_float", ()))
        known = activations in ("uint8", "int8") and scope in ("layers", "graph", "dynamic")
        if not known or not all(isinstance(name, str) and name for name in in_float):
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise ModelError(f"{folder}/{EDITS_FILE} has an unknown kind of int8; save the model again") from None
    return Int8(activations=activations, scope=scope, in_float=in_float)


def _calibration(path: Path, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """The inputs that int8 ranges are set by: batches like the example inputs but for their sizes."""
    if not path.is_file():
        return ()
    batches: dict[str, dict[str, Tensor]] = {}
    header = read_header(path)
    for name, info in header.items():
        number, _, key = name.partition(".")
        if not number.isdigit() or key not in inputs or len(info.shape) != inputs[key].dim():
            raise ModelError(f"{path} holds {name!r}, which is no input of this model; quantise it again")
    for name, tensor in (load_file(path) if header else {}).items():
        number, _, key = name.partition(".")
        batches.setdefault(number, {})[key] = tensor.to(inputs[key].dtype)
    return tuple(batches[number] for number in sorted(batches, key=int))


def _saved_readout(fields: Mapping[str, Any]) -> Readout:
    readout = fields.get("readout")
    return readout if readout in ("embedding", "logits", "token-logits") else "embedding"


@lru_cache(maxsize=1)
def _made_once(make: Callable[[], Any], ref: str, readout: Readout) -> Network:
    """What a factory makes, kept: many saved cuts of one network are loaded side by side, each with its own weights."""
    return _made(make, ref, readout)


def _from_factory(ref: str) -> Network:
    return _made(_function(ref), ref)


def _function(ref: str) -> Callable[[], Any]:
    module_name, _, function = ref.partition(":")
    try:
        make = getattr(importlib.import_module(module_name), function)
        inspect.signature(make).bind()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _uncallable(ref, error) from None
    return make


def _uncallable(ref: str, error: Exception) -> ModelError:
    return ModelError(f"can't call the factory {ref!r} ({error}); write it as module.path:function")


def _made(make: Callable[[], Any], ref: str, readout: Readout | None = None) -> Network:
    try:
        made = make()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _uncallable(ref, error) from None
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, tuple | list):
        inputs = {str(position): tensor for position, tensor in enumerate(inputs)}
    if not isinstance(module, nn.Module) or not isinstance(inputs, Mapping):
        raise ModelError(f"the factory {ref!r} must return (module, example inputs): a torch module and its tensors")
    if readout is None:
        readout = "logits" if len(_shape(module, inputs)) == 2 else "embedding"
    return Network(module=module.eval(), inputs=dict(inputs), origin=Origin(ref=ref, factory=ref), readout=readout)


def _shape(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
    with torch.no_grad():
        outputs = float_outputs(forward(module.eval(), inputs))
    if not outputs:
        raise ModelError("the model returns no floating-point tensor; return the tensor that matters first")
    return tuple(outputs[0].shape)


def _config(folder: Path) -> tuple[Any, Any]:
    fields = read_json(folder / "config.json")
    for key in ("num_labels", "image_size"):
        sides = fields.get(key, 1)
        sides = sides if isinstance(sides, list) else [sides]
        if len(sides) not in (1, 2) or any(type(n) is int and not 0 <= n <= 10**5 for n in sides):
            raise ModelError(f"{folder}/config.json has {key} {fields[key]}; fetch it again")
    _own_architectures(fields)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{folder}/config.json describes no known architecture ({_first_line(error)}); fetch it again"
        ) from None
    architectures = fields.get("architectures") or [""]
    name = architectures[0] if isinstance(architectures, list) else ""
    model_class = None
    if isinstance(name, str) and name:
        model_class = _own_architectures(fields).get(name) or getattr(transformers, name, None)
    if not name:
        mapped = transformers.MODEL_MAPPING.get(type(config), None)
        model_class = mapped[0] if isinstance(mapped, tuple) else mapped
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ModelError(
            f"{folder}/config.json names the architecture {name!r}, which transformers does not have; "
            "upgrade it or fetch another model"
        )
    return config, model_class


def _own_architectures(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Architectures of ours, made known to transformers when a config names one; loading them takes seconds."""
    if fields.get("model_type") == "efficientnet_lite":
        from apportion.models import backbones

        return backbones.ARCHITECTURES
    if fields.get("model_type") in ("apportion_mobile_cnn", "apportion_small_encoder"):
        from apportion.models import templates

        return templates.ARCHITECTURES
    return {}


def _build(folder: Path, config: Any, model_class: Any, headers: Mapping[str, TensorInfo]) -> Any:
    """An instance without weights; the number of layers is checked first, as each one costs time and memory."""
    layers = [value for name, value in vars(config).items() if "layer" in name and type(value) is int]
    for name, value in vars(config).items():
        if ("depth" in name or "repeat" in name) and isinstance(value, list):
            layers += [n for n in value if type(n) is int]
    if layers and (max(layers) > len(headers) or min(layers) < 0):
        raise ModelError(
            f"{folder}/config.json speaks of {max(layers)} layers, but its files hold {len(headers)} tensors; "
            "fetch it again"
        )
    try:
        return model_class(config, **_options(model_class, headers))
    except Exception as error:
        raise ModelError(f"{folder}/config.json can't be built ({_first_line(error)}); fetch it again") from None


def _options(model_class: Any, headers: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Encoders are often saved without the pooler that their class has by default."""
    if "add_pooling_layer" in inspect.signature(model_class).parameters and not any("pooler" in n for n in headers):
        return {"add_pooling_layer": False}
    return {}


def _readout(class_name: str) -> Readout:
    if "ForCausalLM" in class_name or "LMHead" in class_name or "ForMaskedLM" in class_name:
        return "token-logits"
    return "logits" if "Classification" in class_name else "embedding"


def _pooling(folder: Path) -> Literal["mean", "cls"]:
    path = folder / "1_Pooling" / "config.json"
    if path.is_file() and read_json(path).get("pooling_mode_cls_token") is True:
        return "cls"
    return "mean"


def example_inputs(module: Any, *, batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """Inputs of the shape that the model is priced at, from its config."""
    config = module.config
    generator = torch.Generator().manual_seed(seed)
    if module.main_input_name == "input_ids":
        longest = getattr(config, "max_position_embeddings", None) or tokens
        if tokens > longest:
            raise ModelError(f"the model takes at most {longest} tokens, asked for {tokens}; give a smaller --tokens")
        low = min(1000, config.vocab_size // 2)
        ids = torch.randint(low, config.vocab_size, (batch, tokens), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if module.main_input_name == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    raise ModelError(
        f"no example inputs are known for {type(module).__name__} (it takes {module.main_input_name!r}); wrap it in a "
        "module.path:factory that returns (module, inputs)"
    )


def _read_edits(folder: Path, fields: Mapping[str, Any]) -> Edits:
    try:
        return Edits(
            widths={layer: {side: int(n) for side, n in sides.items()} for layer, sides in fields["widths"].items()},
            attributes={
                own: {name: int(n) for name, n in names.items()} for own, names in fields["attributes"].items()
            },
            skips={name: int(n) for name, n in fields["skips"].items()},
            keep={name: tuple(int(unit) for unit in units) for name, units in fields["keep"].items()},
            ranks={name: int(rank) for name, rank in fields.get("ranks", {}).items()},
            tokens={str(name): (int(left), int(whole)) for name, left, whole in fields.get("tokens", [])},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ModelError(f"{folder}/{EDITS_FILE} can't be read; save the model again") from None


def _apply_edits(folder: Path, module: nn.Module, edits: Edits) -> None:
    """Repeats a slice on a freshly built architecture; nothing in the file can name code or grow a layer."""
    if edits == Edits():
        return
    from apportion.models.channels import num_channels, remove_channels  # needs torch-pruning, whole models don't
    from apportion.models.trace import HEAD_COUNT_NAMES, HEAD_WIDTH_NAMES

    try:
        for name, rank in edits.ranks.items():  # before widths: a pair is sliced as the layer it stands for
            plain = _existing(module, name) if name else None
            if plain is None or not can_factor(plain) or not 0 < rank < break_even(plain):
                raise ValueError(f"layer {name!r} can't have rank {rank}")
            replace_layer(module, name, factored(plain, rank))
        for layer_name, sides in edits.widths.items():
            layer = _existing(module, layer_name)
            if layer is None:
                if any(layer_name.startswith(f"{block}.") for block in edits.skips):
                    continue
                raise ValueError(f"no layer {layer_name!r}")
            for told, width in sides.items():
                side: Literal["out", "in"] = "out" if told == "out" else "in"
                if told not in ("out", "in") or not 0 < width <= num_channels(layer, side):
                    raise ValueError(f"layer {layer_name!r} can't have {width} {told} channels")
                if width < num_channels(layer, side):
                    remove_channels(layer, side, range(width, num_channels(layer, side)))
        for owner, values in edits.attributes.items():
            for name, value in values.items():
                part = _existing(module, owner)
                old = getattr(part, name, None)
                if name not in HEAD_COUNT_NAMES + HEAD_WIDTH_NAMES or type(old) is not int or not 0 < value <= old:
                    raise ValueError(f"{owner!r} can't have {name}={value}")
                setattr(part, name, value)
        for name, num_outputs in edits.skips.items():
            if not name or _existing(module, name) is None or not 0 <= num_outputs <= 16:
                raise ValueError(f"no block {name!r}")
        skip_blocks(module, edits.skips)
        for name, (left, whole) in edits.tokens.items():
            if _existing(module, name) is None or not 2 <= left <= whole:
                raise ValueError(f"block {name!r} can't take {left} of {whole} tokens")
        merge_tokens(module, edits.tokens)
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{folder}/{EDITS_FILE} does not fit the architecture ({error}); save the model again"
        ) from None


_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def _check_weights(
    path: Path, module: nn.Module, headers: Mapping[str, TensorInfo], tied: Any, packed: Any
) -> dict[str, str]:
    expected = module.state_dict()
    headers = unpacked_headers(path, headers, packed, expected)
    aliases = (
        {k: v for k, v in tied.items() if isinstance(v, str) and k not in headers} if isinstance(tied, dict) else {}
    )
    if isinstance(tied, dict) and len(aliases) != len(tied):
        raise ModelError(f"{path}: {next(k for k in tied if k not in aliases)!r} can't be tied; save the model again")
    for name, tensor in expected.items():
        stored = headers.get(aliases.get(name, name))
        if (
            stored is None
            or stored.shape != tuple(tensor.shape)
            or stored.dtype != _DTYPES.get(tensor.dtype, stored.dtype)
        ):
            given = "lacks it" if stored is None else f"has {list(stored.shape)} of {stored.dtype}"
            raise ModelError(
                f"{path}: tensor {name!r} should have the shape {list(tensor.shape)}, but the file {given}; "
                "save the model again"
            )
    unused = set(headers) - {aliases.get(name, name) for name in expected}
    if unused:
        raise ModelError(f"{path}: nothing takes the tensor {min(unused)!r}; save the model again")
    return aliases


def _load_weights(path: Path, module: nn.Module, headers: Mapping[str, TensorInfo], tied: Any, packed: Any) -> None:
    aliases = _check_weights(path, module, headers, tied, packed)
    state = unpack(path, load_file(path), packed, module.state_dict())
    module.load_state_dict({name: state[aliases.get(name, name)] for name in module.state_dict()}, strict=True)
    if hasattr(module, "tie_weights"):
        module.tie_weights()  # type: ignore[operator]


def _existing(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class _Quiet:
    """Silences transformers' log lines and progress bars; what matters is raised as an error."""

    def __enter__(self) -> None:
        self._level = transformers.logging.get_verbosity()
        self._bars = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def __exit__(self, *exc: object) -> None:
        transformers.logging.set_verbosity(self._level)
        if self._bars:
            transformers.logging.enable_progress_bar()
