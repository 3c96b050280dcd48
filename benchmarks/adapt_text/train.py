"""Train the methods of an adapt benchmark, each in a process, on a CUDA machine; ``judge.py`` comes after it.

    python3 benchmarks/adapt_text/train.py --suite text --model FOLDER --out FOLDER

Leaves, for every method, its family, the log of its training and what a reader of the family needs.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import torch
from safetensors.torch import save_file
from suite import DEVICE, Suite, forks, make_family, options, read_suite, score_units

from apportion.methods.adapt.train import TrainConfig, Trainer
from methods import METHODS


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--hold", type=float, default=0.0, help="weight of likeness to the frozen features")
    parser.add_argument("--vary", type=float, default=0.0, help="share of episodes with changed images")
    args = parser.parse_args()
    torch.set_num_threads(8)
    args.out.mkdir(parents=True, exist_ok=True)
    suite = read_suite(args.suite, args.model, args.classes, ("train",))
    workers = [
        forks().Process(target=work, args=(args, name, suite))
        for name in args.methods.split(",")
        if not METHODS[name].of
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def work(args, method_name: str, suite: Suite) -> None:
    """One method in a process of its own."""
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    method = METHODS[method_name]
    suite.network.module.to(DEVICE)
    pools = suite.pools("train")
    scores = score_units(suite, pools, args.seed)
    num_features = next(iter(pools.values())).feature_NF.shape[1]
    family = make_family(suite, method_name, args.profiles, num_features, scores)
    episodes = 8 if method.objective != "mean" else 4  # a tail needs more of them; fewer steps make up for it
    steps = args.steps * 4 // episodes
    settings = TrainConfig(
        steps=steps,
        distil=method.distil,
        slices=method.slices,
        capacity=method.capacity,
        objective=method.objective,
        rate=args.rate,
        hold=args.hold,
        vary=args.vary,
        near=method.near,
        search=method.search,
        precision="bf16" if method.half else "fp32",
        checkpoint=method.half,
        seed=args.seed,
        episodes=episodes,
    )
    trainer = Trainer(family, pools, suite.sampler(args.seed), settings)
    ready, rows = time.perf_counter(), []
    steps = steps if method.train else 0
    for number in range(steps):
        row = trainer.step(number)
        if number % 10 == 0 or number == steps - 1:
            rows.append({**row, "seconds": round(time.perf_counter() - ready, 1)})
    with (args.out / f"{method_name}.log.jsonl").open("w") as log:
        log.writelines(json.dumps(row) + "\n" for row in rows)
    tensors = {
        name: t.half() if t.numel() > 1000 else t for name, t in trainer.tensors().items() if name[:5] != "adam."
    }
    save_file(tensors, args.out / f"{method_name}.safetensors")
    trained = {
        "method": method_name,
        "suite": args.suite,
        "steps": steps,
        "settings": asdict(settings),
        "seconds": {"prepare": ready - began, "train": time.perf_counter() - ready},
        "features": num_features,
        "targets": list(family.clocks),
        "open": rows[-1]["open"] if rows else None,
        "orders": {module.name: list(module.order) for module in family.partition},
        "scores": {name: [round(float(s), 8) for s in score_U] for name, score_U in scores.items()},
        "state": trainer.state(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    (args.out / f"{method_name}.trained.json").write_text(json.dumps(trained))
    print(method_name, {name: round(value) for name, value in trained["seconds"].items()}, rows[-1:], flush=True)


if __name__ == "__main__":
    main()
