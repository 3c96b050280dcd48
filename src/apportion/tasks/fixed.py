"""Published fixed splits: the 5- and 10-shot rows of BANKING77 and CLINC150, and Omniglot episodes as published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from apportion.errors import DataError
from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.domains.intents import SOURCES, rows_of
from apportion.tasks.episode import Episode, Part, Sampler, Shape

FIXED = ("banking77", "clinc150")
SHOTS = (5, 10)
PUBLISHED: Mapping[str, Mapping[str, float]] = {  # accuracy in percent, by the names of methods
    "banking77_5shot": {"RoBERTa + classifier": 74.04, "USE + ConveRT": 77.75, "CPFT": 80.86, "ICDA": 84.01},
    "banking77_10shot": {"RoBERTa + classifier": 84.27, "USE + ConveRT": 85.19, "CPFT": 87.20, "ICDA": 89.79},
    "clinc150_5shot": {"RoBERTa + classifier": 87.99, "USE + ConveRT": 90.49, "CPFT": 92.34, "ICDA": 92.62},
    "clinc150_10shot": {"RoBERTa + classifier": 91.55, "USE + ConveRT": 93.26, "CPFT": 94.18, "ICDA": 94.84},
    "omniglot_20way1shot": {"MatchingNet": 93.8, "MAML": 95.8, "ProtoNet": 96.0},
}


@dataclass(frozen=True)
class Fixed:
    """A domain with the fixed and the test rows, repeated or not, and the one episode of the published comparison."""

    domain: Domain
    episode: Episode


def fixed_split(name: str, shots: int) -> Fixed:
    """All classes, the published support rows, and the full test set, in the order of the file."""
    if name not in FIXED or shots not in SHOTS:
        raise DataError(f"no fixed split {name!r} of {shots} shots; there are {' and '.join(FIXED)} of 5 and 10")
    rows = [row for row in rows_of(name) if row[0] in ("train_5", "train_10", "test")]
    classes = tuple(dict.fromkeys(label for split, label, _ in rows if split == "train_5"))
    index = {label: place for place, label in enumerate(classes)}
    label_N = np.array([index[label] for _, label, _ in rows], dtype=np.int64)
    split_N = np.array([split for split, _, _ in rows])
    domain = Domain(
        name=f"{name}-fixed",
        kind="text",
        classes=classes,
        label_N=label_N,
        content=tuple(text for _, _, text in rows),
        licence=SOURCES[name].licence,
        provenance=SOURCES[name].provenance,
        checksum=f"{SOURCES[name].digest}-fixed",
        split_N=split_N,
    )
    support, query = np.flatnonzero(split_N == f"train_{shots}"), np.flatnonzero(split_N == "test")
    episode = Episode(
        domain=domain.name,
        class_W=np.arange(len(classes)),
        support=Part(row_N=support, label_N=label_N[support]),
        query=Part(row_N=query, label_N=label_N[query]),
    )
    return Fixed(domain, episode)


def omniglot_sampler(*, ways: int, shots: int, queries: int = 5, seed: int = 0) -> Sampler:
    """Episodes over the published test classes of Vinyals et al., rotations as classes of their own."""
    if ways not in (5, 20) or shots not in (1, 5):
        raise DataError(f"{ways}-way {shots}-shot was not published; possible are 5 or 20 ways of 1 or 5 shots")
    domain = load_domain("omniglot-vinyals-test")
    return Sampler(domain, Shape(ways=ways, shots=shots, queries=queries), seed=seed)
