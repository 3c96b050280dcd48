"""Features of a domain's examples under a network, computed once and then read from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from apportion.core.progress import Progress, Silent, Update
from apportion.errors import DataError
from apportion.models.network import Network, read_out
from apportion.models.safefile import file_digest, read_json
from apportion.tasks.cache import Arrays, cached
from apportion.tasks.domain import Domain, Rows
from apportion.tasks.pictures import resize

MAX_TOKENS = 128
READING = 1  # raised when preprocessing changes, so that old caches are not used


@dataclass(frozen=True, eq=False)
class Features:
    """Unit features of some rows of a domain, which are sorted."""

    row_N: Rows
    feature_ND: NDArray[np.float32]

    def at(self, rows: Rows) -> Tensor:
        """Features of rows, in the order asked for."""
        place = np.searchsorted(self.row_N, rows)
        if len(rows) and (place.max() >= len(self.row_N) or (self.row_N[place] != rows).any()):
            raise DataError("features were asked for rows that were not computed; pass these rows to features()")
        return torch.from_numpy(self.feature_ND[place])


def features(
    network: Network, domain: Domain, rows: Rows | None = None, *, batch: int = 32, progress: Progress | None = None
) -> Features:
    """What the network makes of a domain's examples (all, or some rows): its embedding or its logits, unit length."""
    wanted = np.arange(len(domain)) if rows is None else np.unique(rows)
    if network.takes_text != (domain.kind == "text"):
        raise DataError(f"{domain.name} holds {domain.kind}s, which {network.origin.ref} does not take; choose another")
    key: dict[str, object] = {
        "network": network_digest(network),
        "domain": domain.checksum,
        "rows": hashlib.sha256(wanted.tobytes()).hexdigest(),
        "reading": READING,
        "preprocessing": _preprocessing(network) if domain.kind == "image" else MAX_TOKENS,
    }
    if domain.kind == "text":
        key["domain"] = _texts_digest(domain)

    def make() -> Arrays:
        with (progress or Silent()).stage(f"{domain.name} features") as update:
            if domain.kind == "text":
                return {"feature": _text_features(network, domain, wanted, batch, update)}
            return {"feature": _image_features(network, domain, wanted, batch, update)}

    return Features(wanted, cached("features", key, make)["feature"])


def network_digest(network: Network) -> str:
    """A fingerprint of a network's weights and readout."""
    total = hashlib.sha256(f"{network.readout}/{network.pooling}/{sorted(network.edits.skips)}".encode())
    for name, tensor in network.module.state_dict().items():
        total.update(f"{name}{tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().view(torch.uint8).numpy() if tensor.dim() else str(tensor).encode())
    return total.hexdigest()


def _readings(network: Network, inputs: dict[str, Tensor]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return torch.nn.functional.normalize(read_out(network, inputs), dim=-1).float().numpy()


def _text_features(network: Network, domain: Domain, rows: Rows, batch: int, update: Update) -> NDArray[np.float32]:
    tokens = tokenise(network, domain)
    order = np.argsort([len(tokens[row]) for row in rows], kind="stable")
    parts = []
    for start in range(0, len(rows), batch):
        parts.append(_readings(network, text_inputs(tokens, rows[order[start : start + batch]])))
        update(min(1.0, (start + batch) / len(rows)))
    feature_ND = np.concatenate(parts)
    out_ND = np.empty_like(feature_ND)
    out_ND[order] = feature_ND
    return out_ND


class Tokens(Sequence[Any]):
    """Token numbers of every text of a domain in one flat array."""

    def __init__(self, arrays: Arrays, pad: int) -> None:
        self.flat, self.end_N, self.pad = arrays["ids"], arrays["end"], pad

    def __len__(self) -> int:
        return len(self.end_N)

    def __getitem__(self, row: Any) -> Any:
        return self.flat[self.end_N[row - 1] if row else 0 : self.end_N[row]]


def tokenise(network: Network, domain: Domain) -> Tokens:
    """A domain's texts under the network's tokeniser, cut at ``MAX_TOKENS``; cached on disk."""
    folder = network.origin.folder
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise DataError(f"{network.origin.ref} has no tokenizer.json; give a model folder that holds one")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    key = {
        "texts": _texts_digest(domain),
        "tokenizer": file_digest(folder / "tokenizer.json"),
        "max_tokens": MAX_TOKENS,
    }

    def make() -> Arrays:
        encoded = tokenizer(list(domain.content), truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return {
            "ids": np.concatenate([np.array(ids, dtype=np.int32) for ids in encoded]),
            "end": np.cumsum([len(ids) for ids in encoded]).astype(np.int64),
        }

    return Tokens(cached("tokens", key, make), tokenizer.pad_token_id or 0)


def text_inputs(tokens: Tokens, rows: Rows, max_tokens: int = MAX_TOKENS) -> dict[str, Tensor]:
    """Texts as an encoder takes them: token numbers, padded to the longest of them, and the mask."""
    texts = [tokens[int(row)][:max_tokens] for row in rows]
    length_N = torch.tensor([len(ids) for ids in texts])
    ids_NT = torch.full((len(texts), int(length_N.max())), tokens.pad, dtype=torch.long)
    for place, ids in enumerate(texts):
        ids_NT[place, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
    mask_NT = (torch.arange(ids_NT.shape[1]) < length_N[:, None]).long()
    return {"input_ids": ids_NT, "attention_mask": mask_NT}


def _texts_digest(domain: Domain) -> str:
    return hashlib.sha256("\0".join(domain.content).encode()).hexdigest()


def _image_features(network: Network, domain: Domain, rows: Rows, batch: int, update: Update) -> NDArray[np.float32]:
    parts = []
    for start in range(0, len(rows), batch):
        images = [domain.content[int(row)] for row in rows[start : start + batch]]
        parts.append(_readings(network, image_inputs(network, images)))
        update(min(1.0, (start + batch) / len(rows)))
    return np.concatenate(parts)


def image_inputs(network: Network, images: Sequence[NDArray[np.uint8]]) -> dict[str, Tensor]:
    """Images as the network takes them: its size, and its mean and deviation from ``preprocessor_config.json``."""
    settings = _preprocessing(network)
    pixel_NHWC = torch.from_numpy(resize(images, *settings["sides"]).astype(np.float32)) * settings["rescale"]
    pixel_NHWC = (pixel_NHWC - torch.tensor(settings["mean"])) / torch.tensor(settings["std"])
    return {settings["input"]: pixel_NHWC.permute(0, 3, 1, 2).contiguous()}


def _preprocessing(network: Network) -> dict[str, Any]:
    names = [name for name, tensor in network.inputs.items() if tensor.dim() == 4 and tensor.shape[1] == 3]
    if len(names) != 1 or len(network.inputs) != 1:
        raise DataError(f"{network.origin.ref} takes {', '.join(network.inputs)}, not one batch of RGB images")
    path = network.origin.folder / "preprocessor_config.json" if network.origin.folder else None
    fields: dict[str, Any] = read_json(path) if path is not None and path.is_file() else {}
    return {
        "input": names[0],
        "sides": tuple(network.inputs[names[0]].shape[-2:]),
        "rescale": float(fields.get("rescale_factor", 1 / 255)),
        "mean": [float(value) for value in fields.get("image_mean", (0.5, 0.5, 0.5))],
        "std": [float(value) for value in fields.get("image_std", (0.5, 0.5, 0.5))],
    }
