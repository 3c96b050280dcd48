"""A tiny encoder with a known clock, and two small domains that it can tell apart."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers

from apportion.core.meter import Reading
from apportion.cost.bound import UpperBound
from apportion.cost.curve import Curve
from apportion.cost.law import AdditiveLaw
from apportion.cost.model import CostModel
from apportion.cost.parts import WRITTEN, Parts, View
from apportion.cost.profile import Profile
from apportion.device.measure import Shape as InputShape
from apportion.device.target import find_target
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.family import Family, FamilyConfig
from apportion.methods.adapt.pool import Pool
from apportion.models.network import Network, Origin
from apportion.models.partition import Partition
from apportion.tasks.domain import Domain
from apportion.tasks.episode import Sampler, Shape

PLAIN = View()


@dataclass(frozen=True)
class Tiny:
    """A network, its parts, clocks and pools."""

    network: Network
    partition: Partition
    parts: Parts
    clocks: tuple[Clock, ...]
    pools: dict[str, Pool]
    sampler: Sampler

    def family(self, **settings) -> Family:
        torch.manual_seed(0)
        return Family(self.network, self.partition, self.clocks, 32, FamilyConfig(**settings))


def profile_of(
    parts: Parts, target: str, *, heads: float = 1.0, all_ms: float = 8.0, quantile: float = 0.05, view: View = PLAIN
) -> Profile:
    """A profile whose law is known: every part costs its operations, attention ``heads`` times as much.

    Activations, where ``view`` prices them, cost a quarter of all.
    """
    parts = parts.seen(view)
    total = sum(part.flops for part in parts.parts)
    curves = {}
    for part in parts.parts:
        slope = all_ms * part.flops / total * (heads if part.signature.startswith("heads") else 1.0)
        curves[part.signature] = Curve(0.02, (1.0,), (all_ms / 4 if part.name == WRITTEN else slope,))
    law = AdditiveLaw(0.5, curves, parts.signature_of)
    cost = CostModel(law, bound=UpperBound(0.05, (quantile,), (30,)))
    whole = cost.predict(dict.fromkeys(parts.signature_of, 1.0))
    return Profile(
        model="tiny",
        target=find_target(target),
        shape=InputShape(batch=1, tokens=8),
        baseline=Reading(value=whole, unit="ms"),
        floor_ms=None,
        cost=cost,
        view=view,
        seed=0,
        seconds=0.0,
        machine={},
        failures={},
    )


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    module = transformers.BertModel(config, add_pooling_layer=False).eval()
    ids_NT = torch.randint(1, 50, (2, 8))
    inputs = {"input_ids": ids_NT, "attention_mask": torch.ones_like(ids_NT)}
    network = Network(module=module, inputs=inputs, origin=Origin(ref="tiny"), readout="embedding")
    partition = Partition.of(network, multiple={"neurons": 16})
    parts = Parts.of(network, partition)
    clocks = (
        Clock.of(profile_of(parts, "ort-cpu-1t"), parts),
        Clock.of(profile_of(parts, "openvino-cpu-1t", heads=4.0), parts),
    )
    domains, pools = [], {}
    for place, name in enumerate(("a", "b")):
        rng = np.random.default_rng(place)
        label_N = np.repeat(np.arange(6), 12)
        # a class is the tokens it draws from
        ids = 1 + 8 * label_N[:, None] % 48 + rng.integers(0, 8, (len(label_N), 8))
        tokens = {"input_ids": torch.from_numpy(ids % 50), "attention_mask": torch.ones(ids.shape, dtype=torch.long)}
        pools[name] = Pool(name, tokens, torch.full((len(ids),), 8)).on(network, "cpu")
        domains.append(
            Domain(
                name=name,
                kind="text",
                classes=tuple(f"class {c}" for c in range(6)),
                label_N=label_N,
                content=[str(row) for row in range(len(ids))],
                licence="",
                provenance="",
                checksum=name,
            )
        )
    sampler = Sampler(domains, Shape(ways=3, shots=2, queries=2), seed=1)
    return Tiny(network, partition, parts, clocks, pools, sampler)
