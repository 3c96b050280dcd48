"""How good are frozen features? Prototypes and linear probes for every backbone and domain, and the published splits.

.venv/bin/python benchmarks/fewshot_reference/run.py [--quick] [--episodes 600] [--backbones minilm vit-s14]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from apportion.cli.show import Bars
from apportion.errors import ApportionError
from apportion.models import Network, load
from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.features import features
from apportion.tasks.fixed import PUBLISHED, fixed_split, omniglot_sampler
from apportion.tasks.heads import HEADS
from apportion.tasks.scores import Scores, score_episodes
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
TEXT_BACKBONES = ("minilm", "minilm-sre")
IMAGE_BACKBONES = ("efficientnet-lite0", "mobilenetv2-224", "mobilenetv2-160", "vit-s14", "vit-64")
QUICK_BACKBONES = ("minilm", "efficientnet-lite0", "mobilenetv2-160")
TEXT_DOMAINS = ("banking77", "clinc150", "snips", "trec", "chatterbot")
IMAGE_DOMAINS = ("fruits360", "grocery", "plantdoc", "sign_digits", "mnist", "fashion_mnist", "digits", "omniglot")
QUICK_IMAGE_DOMAINS = ("fruits360", "grocery", "sign_digits", "mnist", "omniglot")
CELL_HEADS = ("prototype", "ridge")

# Measured before this project, nearest class mean, 5-way 5-shot (READMEs of the data folder), in percent.
MEASURED = {
    "minilm": {"clinc150": 98.9, "banking77": 97.1, "snips": 87.2, "trec": 57.8},
    "efficientnet-lite0": {
        "fruits360": 99.4,
        "grocery": 98.2,
        "omniglot": 93.7,
        "fashion_mnist": 83.5,
        "mnist": 77.4,
        "sign_digits": 71.4,
        "plantdoc": 63.3,
    },
}
MEASURED_EPISODES = {"minilm": 200, "efficientnet-lite0": 300}
# Published, full test set, all classes, in percent: fine-tuned language models, trained convolutions.


class Run:
    """Figures and rows as they are found; everything printed is also kept."""

    def __init__(self, *, quick: bool, num_episodes: int, seed: int) -> None:
        self.quick, self.num_episodes, self.seed = quick, num_episodes, seed
        self.figures: dict[str, float] = {}
        self.rows: list[dict[str, object]] = []
        self.bars = Bars(quiet=False)

    def keep(self, name: str, arm: str, head: str, scores: Scores, *, main: bool) -> None:
        value = round(100 * scores.reading().value, 2)
        self.figures[name if main else f"{name}.{head}"] = value
        self.rows.append(
            {
                "figure": name,
                "arm": arm,
                "head": head,
                "accuracy_percent": value,
                "half_width_percent": round(100 * scores.half_width(), 2),
                "worst_tenth_percent": round(100 * scores.tail(0.9), 2),
                "calibration_error": round(scores.calibration(), 4),
                "num_episodes": len(scores),
                "seed": self.seed,
            }
        )

    def cells(self, backbone: str, names: Iterable[str]) -> None:
        try:
            network = load(backbone)
        except ApportionError as error:
            print(f"| {backbone} | | | | | | skipped: {error} |")
            return
        for name in names:
            try:
                domain = capped(load_domain(name), quick=self.quick)
                sampler = Sampler(
                    domain, Shape(ways=5, shots=5, queries=15 if name != "omniglot" else 10), seed=self.seed
                )
            except ApportionError as error:
                print(f"| {backbone} | {name} | | | | | skipped: {error} |")
                continue
            episodes = list(sampler.episodes(self.num_episodes))
            table = {domain.name: features(network, domain, progress=self.bars)}
            scores = {head: score_episodes(episodes, table, HEADS[head]) for head in CELL_HEADS}
            for head, score in scores.items():
                self.keep(f"{backbone}.{name}", backbone, head, score, main=head == CELL_HEADS[0])
            first = scores[CELL_HEADS[0]]
            print(
                f"| {backbone} | {name} | {shown(first)} | {shown(scores['ridge'])} | {100 * first.tail(0.9):.1f} | "
                f"{first.calibration():.2f} | {against(backbone, name, first)} |",
                flush=True,
            )

    def fixed(self, backbone: str) -> None:
        network = load(backbone)
        for name in ("banking77", "clinc150"):
            for shots in (5, 10):
                try:
                    split = fixed_split(name, shots)
                except ApportionError as error:
                    print(f"| {name} {shots} shots | skipped: {error} | | | | |")
                    continue
                table = {split.domain.name: features(network, split.domain, progress=self.bars)}
                self.published(f"{name}_{shots}shot", backbone, table, [split.episode], "logistic")

    def omniglot(self, backbone: str, num_episodes: int) -> None:
        try:
            network = at_size(load(backbone), 112)
            sampler = omniglot_sampler(ways=20, shots=1, queries=1, seed=self.seed)
        except ApportionError as error:
            print(f"| omniglot | skipped: {error} | | | | |")
            return
        episodes = list(sampler.episodes(num_episodes))
        domain = sampler.domains[0]
        rows = np.unique(np.concatenate([part.row_N for e in episodes for part in (e.support, e.query)]))
        table = {domain.name: features(network, domain, rows, progress=self.bars)}
        self.published("omniglot_20way1shot", f"{backbone} at 112 px", table, episodes, "prototype")

    def published(self, name: str, arm: str, table: dict, episodes: list, main: str) -> None:
        scores = {head: score_episodes(episodes, table, HEADS[head]) for head in HEADS}
        for head, score in scores.items():
            self.keep(name, arm, head, score, main=head == main)
        cells = " | ".join(shown(scores[head]) for head in HEADS)
        peers = ", ".join(f"{peer} {value}" for peer, value in PUBLISHED[name].items())
        print(f"| {name} | {arm} | {cells} | {peers} |", flush=True)

    def rate(self) -> None:
        """Episodes drawn per second, indices alone."""
        for name, shape in {
            "banking77": Shape(),
            "omniglot-vinyals-test": Shape(ways=20, shots=1, queries=5),
            "digits": Shape(ways=(3, 8), shots=(1, 10), queries=15, imbalance=4),
        }.items():
            try:
                sampler = Sampler(load_domain(name), shape, seed=self.seed)
            except ApportionError as error:
                print(f"| {name} | skipped: {error} |")
                continue
            sampler.episode(0)
            began = time.perf_counter()
            for _ in sampler.episodes(4000):
                pass
            self.figures[f"episodes_per_second.{name}"] = round(4000 / (time.perf_counter() - began))
            print(f"| {name} | {self.figures[f'episodes_per_second.{name}']} |")


def capped(domain: Domain, *, quick: bool) -> Domain:
    """The training split, and of images a part, evenly spaced: neighbours in a file are often of one session."""
    if domain.split_N is not None and "train" in domain.split_N:
        domain = domain.select(splits=["train"])
    if domain.kind == "text" and not quick:
        return domain
    if domain.kind == "text":
        max_classes, per_class = 20, 40
    else:
        max_classes, per_class = (10, 20) if quick else (60 if domain.name == "omniglot" else 20, 30)
    classes = [domain.classes[place] for place in spaced(len(domain.classes), max_classes)]
    rows = [domain.examples(name)[spaced(len(domain.examples(name)), per_class)] for name in classes]
    return domain.select(classes=classes, rows=np.concatenate(rows))


def spaced(total: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, total - 1, min(total, count)).round().astype(np.int64))


def at_size(network: Network, side: int) -> Network:
    """The network fed with smaller images, at a quarter of the time; Omniglot's are 105 px."""
    return network.replace(inputs={name: tensor[..., :side, :side] for name, tensor in network.inputs.items()})


def shown(scores: Scores) -> str:
    return f"{100 * scores.reading().value:.1f} ± {100 * scores.half_width():.1f}"


def against(backbone: str, name: str, scores: Scores) -> str:
    reference = MEASURED.get(backbone, {}).get(name)
    if reference is None:
        return ""
    gap = 100 * scores.reading().value - reference
    # the reference's interval is not known; its episodes vary as ours do
    width = 100 * scores.half_width() * (1 + len(scores) / MEASURED_EPISODES[backbone]) ** 0.5
    return f"{reference} {'agrees' if abs(gap) <= width else f'differs by {gap:+.1f}'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer images and backbones, within five minutes")
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--backbones", nargs="*", default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    summary = Summary(HERE)
    run = Run(quick=args.quick, num_episodes=args.episodes, seed=args.seed)
    chosen = args.backbones or (QUICK_BACKBONES if args.quick else TEXT_BACKBONES + IMAGE_BACKBONES)
    print("| domain | episodes drawn per second |\n|---|---|")
    run.rate()
    print("\n| published split | ours on | " + " | ".join(HEADS) + " | published |\n" + "|---" * 7 + "|")
    if "minilm" in chosen:
        run.fixed("minilm")
    if "efficientnet-lite0" in chosen:
        run.omniglot("efficientnet-lite0", 25 if args.quick else args.episodes)
    print("\n| backbone | domain | prototype, % | ridge, % | worst tenth, % | calibration error | measured before |")
    print("|---" * 7 + "|")
    for backbone in chosen:
        images = QUICK_IMAGE_DOMAINS if args.quick else IMAGE_DOMAINS
        run.cells(backbone, TEXT_DOMAINS if backbone in TEXT_BACKBONES else images)
    asked = {"backbones": list(chosen), "num_episodes": args.episodes, "seed": args.seed}
    summary.write(run.figures, packages=("torch", "transformers", "numpy"), quick=args.quick, **asked)
    lines = (json.dumps({**row, "commit": summary.commit}) for row in run.rows)
    (HERE / "results" / "summary.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
