"""What training and judging share: a suite's backbone and tasks, and a family of a method before training."""

from __future__ import annotations

import argparse
import copy
import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from pathlib import Path

import torch
from torch import multiprocessing

from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.episodes import order_units, unit_scores
from apportion.methods.adapt.family import Family, FamilyConfig
from apportion.methods.adapt.pool import Pool, read_pool
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.protocol import PROTOCOLS, Loaded, load_protocol
from methods import METHODS, start_fractions

SUITES = {"text": ("minilm", "text"), "vision": ("vit-64", "vision")}
SIDES = ("train", "id", "ood")
TARGETS = ("ort-cpu-1t", "openvino-cpu-1t", "torch-cpu-1t")
TWINS = {"ort-cpu-1t": "ort-int8-cpu-1t", "openvino-cpu-1t": "openvino-int8-cpu-1t"}
PROFILES = Path(__file__).with_name("profiles")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Suite:
    """A backbone and its domains, encoded; ``loaded`` keeps rows and labels, ``read`` the inputs."""

    name: str
    network: Network
    loaded: Loaded
    read: dict[str, list[Pool]]

    def pools(self, *sides: str) -> dict[str, Pool]:
        """The pools of some sides on the device, with the frozen network's features."""
        return {pool.name: pool.on(self.network, DEVICE) for side in sides for pool in self.read[side]}

    def sampler(self, seed: int) -> Sampler:
        return Sampler(self.loaded.train, Shape(ways=(5, 10), shots=(1, 5), queries=5), seed=seed + 1)


def options(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="text")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--model", help="folder of the backbone, where its package is not installed")
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of MODEL-TARGET.json")
    parser.add_argument("--classes", type=int, default=400, help="most classes of a domain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def read_suite(suite: str, model: str | None, classes: int, sides: Sequence[str] = SIDES) -> Suite:
    name, protocol = SUITES[suite]
    network = load(model or name, tokens=32)
    loaded = load_protocol(PROTOCOLS[protocol], load_domain)
    few = {side: tuple(some_classes(domain, classes) for domain in getattr(loaded, side)) for side in SIDES}
    read = {side: [read_pool(network, domain) for domain in few[side]] for side in sides}
    light = {side: tuple(replace(domain, content=range(len(domain))) for domain in few[side]) for side in SIDES}
    return Suite(name, network, Loaded(**light, num_dropped=loaded.num_dropped), read)


def some_classes(domain: Domain, count: int) -> Domain:
    """Evenly spaced classes, at most so many."""
    step = max(1, -(-len(domain.classes) // count))
    return domain if step == 1 else domain.select(classes=[glob.escape(name) for name in domain.classes[::step]])


def read_clocks(profiles: Path, model: str, targets: Sequence[str], parts: Parts) -> list[Clock]:
    return [Clock.of(Profile.load(profiles / f"{model}-{target}.json"), parts) for target in targets]


def beside(profiles: Path, model: str) -> Path:
    """Where it is kept what the whole network takes in int8 as a share of float, by target, measured side by side."""
    return profiles / f"{model}-beside.json"


def shares_in_int8(profiles: Path, model: str) -> dict[str, float]:
    path = beside(profiles, model)
    return json.loads(path.read_text()) if path.is_file() else {}


def make_family(
    suite: Suite, method_name: str, profiles: Path, num_features: int, scores: Mapping[str, torch.Tensor]
) -> Family:
    """A family of a method before training, on the device; ``scores`` are those of the units of every module."""
    method = METHODS[method_name]
    partition = order_units(Partition.of(suite.network.replace(module=cpu_copy(suite.network))), scores)
    parts = Parts.of(suite.network.replace(module=cpu_copy(suite.network)), partition)
    clocks = read_clocks(profiles, suite.name, method.targets or TARGETS, parts)
    config = FamilyConfig(num_experts=method.experts, allocation=method.allocation, masks=method.masks)
    floor = max(config.tightest, *(clock.floor_ms() / clock.whole_ms for clock in clocks))
    sensitivity_L = torch.stack([scores[module.name].sum() for module in partition])
    start_KL = start_fractions(method.start, clocks, floor, sensitivity_L)
    family = Family(suite.network, partition, clocks, num_features, config, start_KL)
    family.stacks.to(DEVICE)
    return family


def score_units(suite: Suite, pools: dict[str, Pool], seed: int) -> dict[str, torch.Tensor]:
    partition = Partition.of(suite.network.replace(module=cpu_copy(suite.network)))
    sampler = suite.sampler(seed)
    return unit_scores(suite.network, partition, pools, [sampler.episode(number) for number in range(64)])


def forks() -> BaseContext:
    """Processes that fork from one that has imported everything and holds no device yet: they start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["apportion.methods.adapt.specialise", "apportion.tasks.protocol"])
    return context


def cpu_copy(network: Network) -> torch.nn.Module:
    return copy.deepcopy(network.module).cpu()
