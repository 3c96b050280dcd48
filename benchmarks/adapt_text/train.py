"""Train the methods of an adapt benchmark and judge them on episodes, each in a process, on a CUDA machine.

    python3 benchmarks/adapt_text/train.py --suite text --model FOLDER --profiles FOLDER --out FOLDER

Leaves our trained family, logs, and rows of accuracy by target and budget with the sizes that were chosen.
"""

from __future__ import annotations

import argparse
import copy
import glob
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.episodes import episode_logits, frozen_means, order_units, unit_scores
from apportion.methods.adapt.family import Family, FamilyConfig
from apportion.methods.adapt.pool import Pool, read_pool
from apportion.methods.adapt.solve import solve
from apportion.methods.adapt.train import TrainConfig, Trainer, module_values
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Episode, Sampler, Shape
from apportion.tasks.protocol import PROTOCOLS, Loaded, load_protocol
from methods import METHODS, start_fractions

BEGAN = time.perf_counter()
BUDGETS = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
SIDES = ("train", "id", "ood")
SHAPE = Shape(ways=5, shots=5, queries=10)
SUITES = {"text": ("minilm", "text"), "vision": ("vit-64", "vision")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="text")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--model", help="folder of the backbone, where its package is not installed")
    parser.add_argument("--profiles", type=Path, required=True, help="folder of MODEL-TARGET.json")
    parser.add_argument("--targets", default="ort-cpu-1t,openvino-cpu-1t,torch-cpu-1t")
    parser.add_argument("--steps", type=int, default=2000, help="at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="of training; the steps are set to take these")
    parser.add_argument("--episodes", type=int, default=300, help="of each side, ID and OOD")
    parser.add_argument("--wall", type=float, default=1e9, help="stop judging after these seconds in all")
    parser.add_argument("--classes", type=int, default=400, help="most classes of a domain")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(8)
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.time() + args.wall
    name, protocol = SUITES[args.suite]
    network = load(args.model or name, tokens=32)
    partition = Partition.of(network)
    loaded = load_protocol(PROTOCOLS[protocol], load_domain)
    few = {side: tuple(some_classes(domain, args.classes) for domain in getattr(loaded, side)) for side in SIDES}
    loaded = Loaded(**few, num_dropped=loaded.num_dropped)
    read = {side: [read_pool(network, d) for d in getattr(loaded, side)] for side in SIDES}
    light = {side: tuple(replace(d, content=range(len(d))) for d in getattr(loaded, side)) for side in read}
    loaded = Loaded(**light, num_dropped=loaded.num_dropped)
    print("read", round(time.perf_counter() - BEGAN), {k: len(v) for k, v in read.items()}, flush=True)
    workers = {
        method: multiprocessing.get_context("spawn").Process(
            target=work, args=(args, method, name, network, partition, loaded, read, until)
        )
        for method in args.methods.split(",")
    }
    for worker in workers.values():
        worker.start()
    for worker in workers.values():
        worker.join()
    made = [path for method in workers if (path := args.out / f"{method}.json").is_file()]
    with (args.out / "results.jsonl").open("w") as file:
        file.writelines(path.read_text() + "\n" for path in made)
    for path in made:
        path.unlink()


def work(
    args, method_name: str, name: str, network: Network, partition: Partition, loaded: Loaded, read: dict, until: float
) -> None:
    """One method in a process of its own."""
    began = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    method = METHODS[method_name]
    parts_network = network.replace(module=copy.deepcopy(network.module))
    network.module.to(device)
    pools = {pool.name: pool.on(network, device) for pool in read["train"]}
    sampler = Sampler(loaded.train, Shape(ways=(5, 10), shots=(1, 5), queries=5), seed=args.seed + 1)
    scores = unit_scores(network, partition, pools, [sampler.episode(n) for n in range(64)])
    partition = order_units(partition, scores)
    parts = Parts.of(parts_network, partition)
    clocks = [Clock.of(Profile.load(args.profiles / f"{name}-{t}.json"), parts) for t in args.targets.split(",")]
    config = FamilyConfig(num_experts=method.experts, allocation=method.allocation)
    floor = max(config.tightest, *(clock.floor_ms() / clock.whole_ms for clock in clocks))
    sensitivity_L = torch.stack([scores[module.name].sum() for module in partition])
    start_KL = start_fractions(method.start, clocks, floor, sensitivity_L)
    family = Family(network, partition, clocks, next(iter(pools.values())).feature_NF.shape[1], config, start_KL)
    family.stacks.to(device)
    settings = TrainConfig(
        steps=args.steps,
        distil=method.distil,
        slices=method.slices,
        capacity=method.capacity,
        objective=method.objective,
        rate=args.rate,
        seed=args.seed,
        episodes=8 if method.objective != "mean" else 4,
    )
    ready, done = time.perf_counter(), 0
    rows = []
    if method.train:
        steps = args.steps
        if args.seconds < 1e9:  # a few steps say how many fit into the time; then it starts afresh
            probe = Trainer(family, pools, sampler, replace(settings, warmup=10**6))
            for step in range(12):
                if step == 4:
                    timed = time.perf_counter()
                probe.step(step)
            each = (time.perf_counter() - timed) / 8
            steps = min(args.steps, int((args.seconds - (time.perf_counter() - ready)) / each))
        trainer = Trainer(family, pools, sampler, replace(settings, steps=steps))
        while done < steps:
            row = trainer.step(done)
            if done % 10 == 0:
                rows.append({**row, "seconds": round(time.perf_counter() - ready, 1)})
            done += 1
            if time.perf_counter() - ready > 1.25 * args.seconds:
                break
    else:
        trainer = Trainer(family, pools, sampler, settings)
    trained = time.perf_counter()
    with (args.out / f"{method_name}.log.jsonl").open("w") as log:
        log.writelines(json.dumps(row) + "\n" for row in rows)
    if method_name == "ours":
        tensors = {k: t.half() if t.numel() > 1000 else t for k, t in trainer.tensors().items() if k[:5] != "adam."}
        halves = [{}, {}]
        for place, key in enumerate(sorted(tensors, key=lambda k: -tensors[k].numel())):
            halves[place % 2][key] = tensors[key]
        for place, half in enumerate(halves):
            save_file(half, args.out / f"family-{place}.safetensors")
    judged = {pool.name: pool.on(network, device) for side in ("id", "ood") for pool in read[side]}
    scored = judge(family, trainer, judged, loaded, args, method, clocks, until)
    result = {
        "method": method_name,
        "suite": args.suite,
        "steps": done,
        "seconds": {"prepare": ready - began, "train": trained - ready, "judge": time.perf_counter() - trained},
        "orders": {module.name: list(module.order) for module in partition},
        "modules": [module.name for module in partition],
        "state": trainer.state(),
        "policy": [family.policy(rho, clocks[0].prices()).tolist() for rho in BUDGETS],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": scored,
    }
    (args.out / f"{method_name}.json").write_text(json.dumps(result))
    print(method_name, {k: round(v) for k, v in result["seconds"].items()}, done, summary(scored), flush=True)


def some_classes(domain: Domain, count: int) -> Domain:
    """Evenly spaced classes, at most so many."""
    step = max(1, -(-len(domain.classes) // count))
    return domain if step == 1 else domain.select(classes=[glob.escape(name) for name in domain.classes[::step]])


def judge(family: Family, trainer: Trainer, pools: dict[str, Pool], loaded, args, method, clocks, until) -> list[dict]:
    """Accuracy of every episode at every target and budget, with the sizes chosen for it; as many as time allows."""
    family.eval()
    samplers = {side: Sampler(getattr(loaded, side), SHAPE, seed=77) for side in ("id", "ood")}
    characters = [domain for domain in loaded.id if domain.name.startswith("omniglot")]
    if characters:
        samplers["20-way 1-shot"] = Sampler(characters, Shape(ways=20, shots=1, queries=5), seed=77)
    cells = [(clock, rho) for clock in clocks for rho in BUDGETS]
    rows = [{"target": clock.name, "rho": rho, "accuracy": [], "chosen": [], "sizes": []} for clock, rho in cells]
    rows.append({"target": "whole", "rho": 1.0, "accuracy": [], "chosen": [], "sizes": []})
    seen: list[tuple[str, str]] = []
    known: dict[tuple, dict[str, int]] = {}
    ones_G = torch.ones(family.groups.count)

    def accuracy(pool: Pool, episode: Episode, alpha_M: Tensor, keep_G: Tensor) -> float:
        logit_QW = episode_logits(family, pool, episode, family.gates(alpha_M), keep_G)
        label_Q = torch.from_numpy(episode.query.label_N).to(logit_QW.device)
        return round(float((logit_QW.argmax(-1) == label_Q).float().mean()), 4)

    with torch.inference_mode():
        for number in range(args.episodes):
            if time.time() > until and number >= 5:
                break
            for side, sampler in samplers.items():
                episode = sampler.episode(number)
                pool = pools[episode.domain]
                means_WF = frozen_means(pool, episode)
                seen.append((side, episode.domain))
                for row, (clock, rho) in zip(rows, cells, strict=False):
                    plan = family.plan(means_WF, rho, clock.name)
                    key = (clock.name, rho, tuple((100 * plan.fraction_L).round().int().tolist()))
                    if key not in known:
                        value_L = (
                            module_values(trainer.value_BL, rho, family.floor)
                            if method.allocation == "learned" and method.train
                            else None
                        )
                        solved = solve(family, plan.alpha_M, rho * clock.whole_ms, clock, value_L, num_steps=0)
                        known[key] = solved.sizes
                    sizes = list(known[key].values())
                    if sizes not in row["sizes"]:
                        row["sizes"].append(sizes)
                    row["chosen"].append(row["sizes"].index(sizes))
                    row["accuracy"].append(accuracy(pool, episode, plan.alpha_M, family.keep_of(known[key])))
                alpha_M = family.plan(means_WF, 1.0, clocks[0].name).alpha_M
                rows[-1]["accuracy"].append(accuracy(pool, episode, alpha_M, ones_G))
    for row in rows:
        row["side"], row["domain"] = [side for side, _ in seen], [domain for _, domain in seen]
    return rows


def summary(rows: list[dict]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for side in dict.fromkeys(row["side"]):
            some = [a for a, s in zip(row["accuracy"], row["side"], strict=True) if s == side]
            found.setdefault(f"{row['target']} {side}", []).append(round(100 * sum(some) / len(some), 1))
    return found


if __name__ == "__main__":
    main()
