"""Train one method of an adapt benchmark and judge it on episodes; meant for a CUDA machine, where many run at once.

    python3 benchmarks/adapt_text/train.py --suite text --method ours --model FOLDER --profiles FOLDER --out FOLDER

Leaves the trained family, its log, and rows of accuracy by target and budget with the sizes that were chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.episodes import episode_logits, frozen_means, order_units, unit_scores
from apportion.methods.adapt.family import Family, FamilyConfig
from apportion.methods.adapt.pool import Pool, make_pools
from apportion.methods.adapt.solve import solve
from apportion.methods.adapt.train import TrainConfig, Trainer
from apportion.models.load import load
from apportion.models.partition import Partition
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.protocol import PROTOCOLS, load_protocol
from methods import METHODS, start_fractions

BUDGETS = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
SUITES = {"text": ("minilm", "text"), "vision": ("vit-64", "vision")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="text")
    parser.add_argument("--method", choices=METHODS, default="ours")
    parser.add_argument("--model", help="folder of the backbone, where its package is not installed")
    parser.add_argument("--profiles", type=Path, required=True, help="folder of MODEL-TARGET.json")
    parser.add_argument("--targets", default="ort-cpu-1t,openvino-cpu-1t,torch-cpu-1t")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop training after these")
    parser.add_argument("--episodes", type=int, default=300, help="of each side, ID and OOD")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    method = METHODS[args.method]
    name, protocol = SUITES[args.suite]
    network = load(args.model or name, tokens=32)
    partition = Partition.of(network)
    network.module.to(device)
    loaded = load_protocol(PROTOCOLS[protocol], load_domain)
    pools = make_pools(network, (*loaded.train, *loaded.id, *loaded.ood), device)
    shape = Shape(ways=5, shots=5, queries=10)
    sampler = Sampler(loaded.train, Shape(ways=(5, 10), shots=(1, 5), queries=5), seed=args.seed + 1)
    scores = unit_scores(network, partition, pools, [sampler.episode(n) for n in range(64)])
    partition = order_units(partition, scores)
    parts = Parts.of(network.replace(module=network.module.cpu()), partition)
    network.module.to(device)
    names = args.targets.split(",")
    clocks = [Clock.of(Profile.load(args.profiles / f"{name}-{target}.json"), parts) for target in names]
    config = FamilyConfig(num_experts=method.experts, allocation=method.allocation)
    floor = max(config.tightest, *(clock.floor_ms() / clock.whole_ms for clock in clocks))
    sensitivity_L = torch.stack([scores[module.name].sum() for module in partition])
    start_KL = start_fractions(method.start, clocks, floor, sensitivity_L)
    family = Family(network, partition, clocks, next(iter(pools.values())).feature_NF.shape[1], config, start_KL)
    family.stacks.to(device)
    train = TrainConfig(
        steps=args.steps,
        distil=method.distil,
        slices=method.slices,
        capacity=method.capacity,
        objective=method.objective,
        rate=args.rate,
        seed=args.seed,
        episodes=8 if method.objective != "mean" else 4,
    )
    trainer = Trainer(family, pools, sampler, train)
    args.out.mkdir(parents=True, exist_ok=True)
    ready = time.perf_counter()
    done = 0
    with (args.out / "training.jsonl").open("w") as log:
        for step in range(train.steps if method.train else 0):
            row = trainer.step(step)
            done = step + 1
            if step % 20 == 0:
                log.write(json.dumps({**row, "seconds": round(time.perf_counter() - ready, 1)}) + "\n")
            if time.perf_counter() - ready > args.seconds:
                break
    trained = time.perf_counter()
    tensors = {key: t.half() if t.numel() > 1000 else t for key, t in trainer.tensors().items() if key[:5] != "adam."}
    save_file(tensors, args.out / "family.safetensors")
    orders = {module.name: list(module.order) for module in partition}
    rows = judge(family, trainer, pools, loaded, shape, args.episodes, method, clocks)
    result = {
        "method": args.method,
        "suite": args.suite,
        "steps": done,
        "seconds": {"prepare": ready - began, "train": trained - ready, "judge": time.perf_counter() - trained},
        "orders": orders,
        "state": trainer.state(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "rows": rows,
    }
    (args.out / "result.json").write_text(json.dumps(result))
    print(args.method, {k: round(v) for k, v in result["seconds"].items()}, done, summary(rows), flush=True)


def judge(
    family: Family,
    trainer: Trainer,
    pools: dict[str, Pool],
    loaded,
    shape: Shape,
    count: int,
    method,
    clocks,
) -> list[dict]:
    """Accuracy of every episode at every target and budget, with the sizes chosen for it."""
    family.eval()
    rows = []
    episodes = []
    for side in ("id", "ood"):
        sampler = Sampler(getattr(loaded, side), shape, seed=77)
        episodes += [(side, sampler.episode(number)) for number in range(count)]
    known: dict[tuple, dict[str, int]] = {}
    with torch.inference_mode():
        for clock in clocks:
            for rho in BUDGETS:
                accuracy, chosen = [], []
                for _, episode in episodes:
                    pool = pools[episode.domain]
                    alpha_M = family.plan(frozen_means(pool, episode), rho, clock.name).alpha_M
                    fraction_L = family.plan_with(alpha_M, rho, clock.name).fraction_L
                    key = (clock.name, rho, tuple((100 * fraction_L).round().int().tolist()))
                    if key not in known:
                        value_L = trainer.values(rho) if method.allocation == "learned" and method.train else None
                        known[key] = solve(family, alpha_M, rho * clock.whole_ms, clock, value_L, num_steps=0).sizes
                    sizes = known[key]
                    logit_QW = episode_logits(family, pool, episode, family.gates(alpha_M), family.keep_of(sizes))
                    label_Q = torch.from_numpy(episode.query.label_N).to(logit_QW.device)
                    accuracy.append(float((logit_QW.argmax(-1) == label_Q).float().mean()))
                    chosen.append(list(sizes.values()))
                distinct = sorted({tuple(sizes) for sizes in chosen})
                rows.append(
                    {
                        "target": clock.name,
                        "rho": rho,
                        "accuracy": [round(value, 4) for value in accuracy],
                        "sizes": [list(sizes) for sizes in distinct],
                        "chosen": [distinct.index(tuple(sizes)) for sizes in chosen],
                    }
                )
        whole = []
        for _, episode in episodes:
            pool = pools[episode.domain]
            alpha_M = family.plan(frozen_means(pool, episode), 1.0, clocks[0].name).alpha_M
            ones_G = torch.ones(family.groups.count)
            logit_QW = episode_logits(family, pool, episode, family.gates(alpha_M), ones_G)
            label_Q = torch.from_numpy(episode.query.label_N).to(logit_QW.device)
            whole.append(round(float((logit_QW.argmax(-1) == label_Q).float().mean()), 4))
    rows.append({"target": "whole", "rho": 1.0, "accuracy": whole, "sizes": [], "chosen": []})
    for row in rows:
        row["side"] = [side for side, _ in episodes]
        row["domain"] = [episode.domain for _, episode in episodes]
    return rows


def summary(rows: list[dict]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for side in ("id", "ood"):
            some = [a for a, s in zip(row["accuracy"], row["side"], strict=True) if s == side]
            found.setdefault(f"{row['target']} {side}", []).append(round(100 * sum(some) / len(some), 1))
    return found


if __name__ == "__main__":
    main()
