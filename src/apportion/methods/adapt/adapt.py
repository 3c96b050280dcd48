"""Adapt: learn, once, how a network answers any small task within any budget; specialise does the rest in seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from apportion.core.folder import write_whole
from apportion.core.progress import Progress, Silent
from apportion.cost.calibrate import calibrate
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.device.measure import Shape as InputShape
from apportion.device.probe import int8_twin, working_target
from apportion.errors import ApportionError, DataError
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.episodes import order_units, unit_scores
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.folder import AdaptConfig, AdaptFolder
from apportion.methods.adapt.pair import share_in_int8
from apportion.methods.adapt.pool import Pool, make_pools
from apportion.methods.adapt.train import Trainer, module_values
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.models.safefile import read_header
from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.features import network_digest
from apportion.tasks.protocol import PROTOCOLS, load_protocol, read_protocol

SAVE_SECONDS = 60.0
NUM_ORDER = 16
STATE = "training"  # what the state goes by in the metadata of the tensors


def adapt(config: AdaptConfig, path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Trains a family and leaves all of it in ``path``; started again with the same folder it goes on.

    Returns:
        The result as it stands in ``result.json``.
    """
    progress = progress or Silent()
    folder = AdaptFolder(path)
    domains = training_domains(config.tasks)
    sampler = Sampler(
        domains, Shape(ways=config.ways, shots=config.shots, queries=config.queries), seed=config.seed + 1
    )
    with progress.stage("load and trace"):
        network = load(config.model, batch=config.batch, tokens=config.tokens, seed=config.seed)
        if network.readout != "embedding":
            raise DataError(f"{config.model} gives {network.readout}; adapt takes encoders, which give embeddings")
        parts = Parts.of(network, Partition.of(network))
    digest = network_digest(network)
    folder.start(config, digest)
    finished = folder.result()
    if finished is not None:
        return finished
    profiles = _profiles(config, folder, network, parts, progress)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network.module.to(device)
    pools = make_pools(network, domains, device, progress)
    partition = _ordered(folder, network, parts.partition, pools, sampler, progress)
    made = build(
        config, network, replace(parts, partition=partition), profiles, next(iter(pools.values())).feature_NF.shape[1]
    )
    made.stacks.to(device)
    trainer = Trainer(made, pools, sampler, config.training(images=not network.takes_text))
    seconds = _train(trainer, folder, progress)
    result = {
        "model": config.model,
        "network": digest,
        "tasks": config.tasks,
        "domains": [domain.name for domain in domains],
        "targets": {
            clock.name: {"whole_ms": clock.whole_ms, "floor_ms": clock.floor_ms()} for clock in made.clocks.values()
        },
        "steps": config.steps,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "prices": shadow_prices(trainer),
        "last": _last(folder.log),
    }
    folder.write("result.json", result)
    return result


@dataclass(frozen=True, eq=False)
class Learned:
    """A trained family as it is read back, with what its training learned that modules are worth."""

    config: AdaptConfig
    family: Family
    value_BL: Tensor

    def values(self, rho: float) -> Tensor:
        return module_values(self.value_BL, rho, self.family.floor)


def read_learned(path: Path) -> Learned:
    """Reads a finished run.

    Raises:
        ApportionError: no run, or one that is not finished.
    """
    folder = AdaptFolder(path)
    config = folder.config()
    result = folder.result()
    if result is None:
        raise ApportionError(f"{path} is not finished; start it again with apportion adapt to go on")
    network = load(config.model, batch=config.batch, tokens=config.tokens, seed=config.seed)
    if result.get("network") not in (None, network_digest(network)):  # earlier versions don't say
        raise ApportionError(
            f"{config.model} is not the network that {path} was trained on; put it back, or adapt again"
        )
    orders = folder.read("orders.json")
    parts = Parts.of(network, Partition.of(network).ordered(orders))
    profiles = [Profile.load(folder.profile(target)) for target in config.targets]
    header = read_header(folder.tensors)
    if "depth_KJ" not in header:
        raise ApportionError(f"{path} was trained by an older version, which settled no depths; adapt again")
    features = header["router.per_class.0.weight"].shape[1] if "router.per_class.0.weight" in header else 0
    family = build(config, network, parts, profiles, features)
    family.load_state_dict({k: v for k, v in load_file(folder.tensors).items() if not k.startswith("adam.")})
    return Learned(config, family, torch.tensor(folder.read("training.json")["prices"]["values"]))


def build(
    config: AdaptConfig, network: Network, parts: Parts, profiles: Iterable[Profile], num_features: int
) -> Family:
    """The family of a config, untrained."""
    clocks = [Clock.of(profile, parts) for profile in profiles]
    return Family(network, parts.partition, clocks, num_features, config.family())


def training_domains(tasks: str) -> tuple[Domain, ...]:
    """The domains to train on: of a protocol by name or file, or domains between commas."""
    if tasks in PROTOCOLS or tasks.endswith(".toml"):
        protocol = PROTOCOLS[tasks] if tasks in PROTOCOLS else read_protocol(Path(tasks))
        domains = load_protocol(protocol, load_domain).train
    else:
        given = [name.strip() for name in tasks.split(",") if name.strip()]
        if not given:
            raise DataError(f"tasks {tasks!r} name no domain; give {', '.join(PROTOCOLS)}, a .toml file, or domains")
        domains = tuple(load_domain(name) for name in given)
    names = [domain.name for domain in domains]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"tasks {tasks!r} name {twice[0]!r} twice, by which its examples go; give each a name of its own"
        )
    return domains


def shadow_prices(trainer: Trainer) -> dict[str, Any]:
    """Prices of time and of every module, by device and budget, as training left them."""
    floor = trainer.family.floor
    bins = trainer.mu.values.shape[1]
    middles = [floor ** (1 - (place + 0.5) / bins) for place in range(bins)]  # ranges are even in the logarithm
    return {
        "budgets": [round(rho, 4) for rho in middles],
        "time": {name: trainer.mu.values[i].round(4).tolist() for i, name in enumerate(trainer.names)},
        "modules": {
            module.name: trainer.value_BL[:, place].numpy().round(5).tolist()
            for place, module in enumerate(trainer.family.partition)
        },
    }


def _profiles(
    config: AdaptConfig, folder: AdaptFolder, network: Network, parts: Parts, progress: Progress
) -> list[Profile]:
    """The profile of every target: given, made by an earlier start, or measured now."""
    shape = InputShape(batch=config.batch, tokens=config.tokens, seed=config.seed)
    twins = [twin.name for name in config.targets if config.int8 and (twin := int8_twin(working_target(name)))]
    given = {}
    if not all(folder.profile(target).is_file() for target in (*config.targets, *twins)):
        given = {profile.target.name: profile for profile in map(_given(network, parts, shape), config.profiles)}
    unknown = sorted(set(given) - {*config.targets, *twins})
    if unknown:
        raise DataError(f"a profile is of {unknown[0]}, which is not among the targets {', '.join(config.targets)}")
    found = []
    for target in (*config.targets, *twins):
        path = folder.profile(target)
        if not path.is_file():
            known = given.get(target)
            if known is None:
                with progress.stage(f"calibrate {target}") as update:
                    where = working_target(target)
                    known = calibrate(network, parts, where, shape, seed=config.seed, on_share=update)
            known.save(path)
        if target in config.targets:  # training knows float slices; int8 ones are chosen by their own prices
            found.append(Profile.load(path))
    measure_int8(config, folder, network, shape, progress)
    return found


def measure_int8(
    config: AdaptConfig, folder: AdaptFolder, network: Network, shape: InputShape, progress: Progress
) -> None:
    """Measures the whole network in int8 beside float, which relates the two profiles; once for every target."""
    pairs = ((name, int8_twin(working_target(name))) for name in config.targets if config.int8)
    twins = {name: twin.name for name, twin in pairs if twin is not None}
    shares = folder.shares_in_int8() if twins else {}
    for target, twin in twins.items():
        if twin not in shares:
            with progress.stage(f"measure int8 beside float on {target}"):
                shares[twin] = round(share_in_int8(config.model, network, target, shape), 5)
            folder.write(folder.beside.name, shares)


def _given(network: Network, parts: Parts, shape: InputShape) -> Callable[[str], Profile]:
    """Reads a profile that the user gave, if it is about this network and these inputs."""

    def read(name: str) -> Profile:
        profile = Profile.load(Path(name))
        same = profile.shape.batch == shape.batch and profile.shape.size is None
        if not same or (network.takes_text and profile.shape.tokens != shape.tokens):
            raise DataError(
                f"{name} is about {profile.shape.explain()}, the run about {shape.explain()}; calibrate it for these, "
                "or adapt with the profile's --batch and --tokens"
            )
        Clock.of(profile, parts)  # says where its parts are others
        return profile

    return read


def _ordered(
    folder: AdaptFolder,
    network: Network,
    partition: Partition,
    pools: dict[str, Pool],
    sampler: Sampler,
    progress: Progress,
) -> Partition:
    """The partition in its order of importance, found once."""
    if not (folder.path / "orders.json").is_file():
        with progress.stage("order the units"):
            scores = unit_scores(network, partition, pools, [sampler.episode(number) for number in range(NUM_ORDER)])
            orders = {module.name: list(module.order) for module in order_units(partition, scores)}
        folder.write("orders.json", orders)
    return partition.ordered(folder.read("orders.json"))


def _train(trainer: Trainer, folder: AdaptFolder, progress: Progress) -> float:
    """All steps that are left; tensors and state are saved every minute, the log after every step."""
    steps, done, before = trainer.config.steps, 0, 0.0
    if folder.tensors.is_file():
        state = _state_beside(folder)
        trainer.load_tensors(load_file(folder.tensors))
        trainer.load_state(state["prices"])
        done, before = int(state["steps"]), float(state["seconds"])
    _cut(folder.log, done)
    began = saved = time.perf_counter()
    with progress.stage("train") as update, folder.log.open("a", encoding="utf-8") as log:
        update(done / steps)
        while done < steps:
            log.write(json.dumps(trainer.step(done)) + "\n")
            log.flush()
            done += 1
            update(done / steps)
            if done == steps or time.perf_counter() - saved > SAVE_SECONDS:
                os.fsync(log.fileno())
                spent = before + time.perf_counter() - began
                state = {"steps": done, "seconds": spent, "prices": trainer.state()}
                write_whole(folder.tensors, save(trainer.tensors(), metadata={STATE: json.dumps(state)}))
                folder.write("training.json", state)  # for those who read; to go on, what is with the tensors counts
                saved = time.perf_counter()
    return before + time.perf_counter() - began


def _state_beside(folder: AdaptFolder) -> dict[str, Any]:
    """The state of training that was saved with the tensors, in one file, so that they are of the same step."""
    with safe_open(folder.tensors, "pt") as file:
        state: dict[str, Any] = json.loads((file.metadata() or {})[STATE])
    return state


def _cut(log: Path, done: int) -> None:
    """Leaves the rows of the steps that were saved; later ones are run again."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)[:done] if log.is_file() else []
    write_whole(log, "".join(lines).encode())


def _last(log: Path) -> dict[str, Any]:
    """Means over the last tenth of the log."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    some = rows[-max(1, len(rows) // 10) :]
    return {name: sum(row[name] for row in some) / len(some) for name in ("loss", "whole_loss", "accuracy", "u", "mu")}
