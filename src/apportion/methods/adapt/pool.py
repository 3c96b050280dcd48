"""A pool: the examples of a domain as inputs of a network, all on one device, read by row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apportion.core.progress import Progress, Silent
from apportion.errors import DataError
from apportion.models.network import Network, read_out
from apportion.tasks.domain import Domain
from apportion.tasks.features import image_inputs, text_inputs, tokenise

MAX_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Pool:
    """Inputs of every example, and the frozen network's features of them, which the router reads."""

    name: str
    inputs: dict[str, Tensor]
    length_N: Tensor | None
    feature_NF: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def at(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Inputs of some rows; texts are cut to the longest of them."""
        place = torch.from_numpy(rows)
        device = next(iter(self.inputs.values())).device
        if self.length_N is None:
            return {name: tensor[place.to(device)] for name, tensor in self.inputs.items()}
        longest = int(self.length_N[place].max())
        return {name: tensor[place.to(device), :longest] for name, tensor in self.inputs.items()}

    def on(self, network: Network, device: str, batch: int = 256) -> Pool:
        """The same pool on a device, with the features of the network, which is there, too."""
        moved = Pool(self.name, {name: tensor.to(device) for name, tensor in self.inputs.items()}, self.length_N)
        count = len(next(iter(self.inputs.values())))
        order = np.arange(count) if self.length_N is None else np.argsort(self.length_N.numpy(), kind="stable")
        parts = []
        with torch.no_grad():
            for start in range(0, count, batch):
                parts.append(read_out(network, moved.at(order[start : start + batch])).float().cpu())
        feature_NF = torch.empty(count, parts[0].shape[1])
        feature_NF[torch.from_numpy(order)] = torch.cat(parts)
        return Pool(self.name, moved.inputs, self.length_N, feature_NF)


def read_pool(network: Network, domain: Domain) -> Pool:
    """Encodes a whole domain as the network takes it, on the CPU, without features."""
    if network.takes_text != (domain.kind == "text"):
        raise DataError(f"{domain.name} holds {domain.kind}s, which {network.origin.ref} does not take; choose others")
    if network.takes_text:
        inputs = text_inputs(tokenise(network, domain), np.arange(len(domain)), MAX_TOKENS)
        return Pool(domain.name, inputs, inputs["attention_mask"].sum(1))
    some = [
        image_inputs(network, [domain.content[row] for row in range(start, min(start + 256, len(domain)))])
        for start in range(0, len(domain), 256)
    ]
    return Pool(domain.name, {name: torch.cat([part[name] for part in some]) for name in some[0]}, None)


def make_pools(
    network: Network, domains: tuple[Domain, ...], device: str, progress: Progress | None = None
) -> dict[str, Pool]:
    """Pools with features, by the names of their domains."""
    pools = {}
    with (progress or Silent()).stage("read the tasks") as update:
        for number, domain in enumerate(domains):
            pools[domain.name] = read_pool(network, domain).on(network, device)
            update((number + 1) / len(domains))
    return pools
