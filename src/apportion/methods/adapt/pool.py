"""A pool: the examples of a domain as inputs of a network, all on one device, read by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apportion.core.progress import Progress, Silent
from apportion.errors import DataError
from apportion.models.network import Network, read_out
from apportion.tasks.domain import Domain
from apportion.tasks.features import image_inputs, tokenise

MAX_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Pool:
    """Inputs of every example, and the frozen network's features of them, which the router reads."""

    name: str
    inputs: dict[str, Tensor]
    length_N: Tensor | None
    feature_NF: Tensor

    def at(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Inputs of some rows; texts are cut to the longest of them."""
        place = torch.from_numpy(rows)
        device = next(iter(self.inputs.values())).device
        if self.length_N is None:
            return {name: tensor[place.to(device)] for name, tensor in self.inputs.items()}
        longest = int(self.length_N[place].max())
        return {name: tensor[place.to(device), :longest] for name, tensor in self.inputs.items()}


def make_pool(network: Network, domain: Domain, device: str, batch: int = 128) -> Pool:
    """Encodes a whole domain and runs the frozen network over it once."""
    if network.takes_text != (domain.kind == "text"):
        raise DataError(f"{domain.name} holds {domain.kind}s, which {network.origin.ref} does not take; choose others")
    length_N = None
    if network.takes_text:
        tokens = tokenise(network, domain)
        texts = [tokens[row][:MAX_TOKENS] for row in range(len(tokens))]
        length_N = torch.tensor([len(ids) for ids in texts])
        ids_NT = torch.full((len(texts), int(length_N.max())), tokens.pad, dtype=torch.long)
        for row, ids in enumerate(texts):
            ids_NT[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        mask_NT = (torch.arange(ids_NT.shape[1]) < length_N[:, None]).long()
        inputs = {"input_ids": ids_NT.to(device), "attention_mask": mask_NT.to(device)}
    else:
        some = [
            image_inputs(network, [domain.content[row] for row in range(start, min(start + 256, len(domain)))])
            for start in range(0, len(domain), 256)
        ]
        inputs = {name: torch.cat([part[name] for part in some]).to(device) for name in some[0]}
    pool = Pool(domain.name, inputs, length_N, torch.empty(0))
    order = np.arange(len(domain)) if length_N is None else np.argsort(length_N.numpy(), kind="stable")
    feature_NF: Tensor | None = None
    with torch.inference_mode():
        for start in range(0, len(domain), batch):
            rows = order[start : start + batch]
            some_NF = read_out(network, pool.at(rows)).float().cpu()
            if feature_NF is None:
                feature_NF = torch.empty(len(domain), some_NF.shape[1])
            feature_NF[torch.from_numpy(rows)] = some_NF
    assert feature_NF is not None
    return Pool(domain.name, inputs, length_N, feature_NF.clone())


def make_pools(
    network: Network, domains: tuple[Domain, ...], device: str, progress: Progress | None = None
) -> dict[str, Pool]:
    """Pools by the names of their domains."""
    pools = {}
    with (progress or Silent()).stage("read the tasks") as update:
        for number, domain in enumerate(domains):
            pools[domain.name] = make_pool(network, domain, device)
            update((number + 1) / len(domains))
    return pools
