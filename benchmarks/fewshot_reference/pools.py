"""What could the references have been drawn from? The same features under other rows, classes, shots and readouts.

    .venv/bin/python benchmarks/fewshot_reference/pools.py       # ten minutes, most of them for images

The data folder's READMEs give nearest-class-mean accuracies without the rows and classes they were drawn from. This
prints what each choice reads, 600 episodes a cell; for texts also how far 200 episodes over 20 random classes, or over
all of them, stray from each other; for images also what half the pixels leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from run import MEASURED, capped, spaced

from apportion.models import load
from apportion.models.network import Network, float_outputs, forward
from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.features import Features, features, text_inputs, tokenise
from apportion.tasks.heads import HEADS
from apportion.tasks.scores import score_episodes
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
DOMAINS = ("banking77", "clinc150", "snips", "trec")
IMAGES = "efficientnet-lite0"
IMAGE_DOMAINS = ("sign_digits", "fruits360", "grocery", "plantdoc", "omniglot")
EPISODES, AS_BEFORE, DRAWS = 600, 200, 40
NUM_CLASSES = 20
MAX_RAW = 4000  # texts read anew for features that are not kept


def main() -> None:
    summary = Summary(HERE)
    texts, images = load("minilm"), load(IMAGES)
    columns = {name: dict(variants(texts, load_domain(name))) for name in DOMAINS}
    show(columns, MEASURED["minilm"])
    pictures = {name: dict(image_variants(images, load_domain(name))) for name in IMAGE_DOMAINS}
    show(pictures, MEASURED[IMAGES])
    summary.write({}, name="pools", packages=("torch", "transformers", "numpy"), columns=columns, pictures=pictures)


def show(columns: dict[str, dict[str, str]], before: dict[str, float]) -> None:
    print("| what is drawn | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    print("| measured before | " + " | ".join(f"{before[name]:.1f}" for name in columns) + " |")
    for what in dict.fromkeys(what for column in columns.values() for what in column):
        print(f"| {what} | " + " | ".join(column.get(what, "") for column in columns.values()) + " |")
    print(flush=True)


def image_variants(network: Network, domain: Domain) -> Iterator[tuple[str, str]]:
    """What the class means of images read: other files, other classes, fewer pixels."""
    cell = capped(domain, quick=False)
    yield "as the cells draw them", shown(network, cell)
    if domain.name == "sign_digits":
        yield "the first 20 files of a class", shown(network, some_files(domain, slice(20)))
        yield "every third file", shown(network, some_files(domain, slice(None, None, 3)))
        yield "all files", shown(network, domain)
    if len(domain.classes) > len(cell.classes):
        for count in (10, 20):
            chosen = [cell.classes[place] for place in spaced(len(cell.classes), count)]
            if count < len(cell.classes):
                yield f"{count} classes", shown(network, cell.select(classes=chosen))
    yield "half the pixels in height and width", shown(network, halved(cell))


def some_files(domain: Domain, which: slice) -> Domain:
    return domain.select(rows=np.concatenate([domain.examples(name)[which] for name in domain.classes]))


def halved(domain: Domain) -> Domain:
    """The domain with every image scaled down to half its height and width."""
    images = [Image.fromarray(np.asarray(image)) for image in domain.content]
    small = tuple(np.asarray(image.resize((image.width // 2, image.height // 2))) for image in images)
    return replace(domain, content=small, checksum=f"{domain.checksum}-half")


def variants(network: Network, domain: Domain) -> Iterator[tuple[str, str]]:
    """What the class means of a domain read, choice by choice."""
    assert domain.split_N is not None
    for split in ("train", "valid", "test"):
        if split in domain.split_N:
            part = domain.select(splits=[split])
            yield f"{split} rows, as the cells draw them" if split == "train" else f"{split} rows", shown(network, part)
    train, test = domain.select(splits=["train"]), domain.select(splits=["test"])
    some = train.select(rows=np.unique(np.linspace(0, len(train) - 1, MAX_RAW).astype(np.int64)))
    yield "train rows, features not of unit length", shown(network, some, raw=True)
    yield "test rows, cosine", shown(network, test, head="cosine")
    yield "test rows, features not of unit length", shown(network, test, raw=True)
    yield "test rows, first token instead of the mean", shown(network.replace(pooling="cls"), test)
    yield "test rows, 10 shots", shown(network, test, shots=10)
    table = {train.name: features(network, train)}
    reference = MEASURED["minilm"][domain.name]
    for num in (len(train.classes), NUM_CLASSES):
        if num > len(train.classes):
            continue
        values = np.array([drawn(train, table, num, seed) for seed in range(DRAWS)])
        share = np.mean(values >= reference) if reference > values.mean() else np.mean(values <= reference)
        which = "all" if num == len(train.classes) else str(num)
        yield (
            f"train rows, {which} classes, {AS_BEFORE} episodes: mean and range of {DRAWS} draws",
            f"{values.mean():.1f}, {values.min():.1f} to {values.max():.1f}; as far as before: {share:.0%}",
        )


def shown(network: Network, domain: Domain, *, shots: int = 5, head: str = "prototype", raw: bool = False) -> str:
    table = {domain.name: unscaled(network, domain) if raw else features(network, domain)}
    queries = 10 if domain.name == "omniglot" else 15
    sampler = Sampler(domain, Shape(ways=5, shots=shots, queries=queries), seed=0)
    scores = score_episodes(list(sampler.episodes(EPISODES)), table, HEADS[head])
    return f"{100 * scores.reading().value:.1f} ± {100 * scores.half_width():.1f}"


def drawn(domain: Domain, table: dict[str, Features], num: int, seed: int) -> float:
    """One measurement of the size of the one before, over some classes drawn at random."""
    rng = np.random.default_rng(seed)
    classes = [domain.classes[place] for place in rng.permutation(len(domain.classes))[:num]]
    rows = np.flatnonzero(np.isin(domain.label_N, [domain.classes.index(name) for name in classes]))
    part = domain.select(classes=classes)
    inner = {part.name: Features(np.arange(len(part)), table[domain.name].feature_ND[rows])}
    episodes = list(Sampler(part, Shape(ways=5, shots=5, queries=15), seed=seed).episodes(AS_BEFORE))
    return 100 * score_episodes(episodes, inner, HEADS["prototype"]).reading().value


def unscaled(network: Network, domain: Domain) -> Features:
    """Features as the network gives them, not scaled to unit length."""
    tokens, rows = tokenise(network, domain), np.arange(len(domain))
    parts = []
    with torch.inference_mode():
        for i in range(0, len(rows), 32):
            inputs = text_inputs(tokens, rows[i : i + 32])
            mask = inputs["attention_mask"].unsqueeze(-1)
            hidden_NTD = float_outputs(forward(network.module, inputs))[0]
            parts.append(((hidden_NTD * mask).sum(1) / mask.sum(1)).numpy())
    return Features(rows, np.concatenate(parts))


if __name__ == "__main__":
    main()
