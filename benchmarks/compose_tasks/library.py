"""What the benchmark is about: the domains of the sources, the tasks they are judged on, and the sources themselves."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from apportion.methods.compose.resident import Resident
from apportion.methods.compose.support import Support
from apportion.models.network import Network, Origin
from apportion.models.registry import find_packaged
from apportion.tasks.domain import Domain, text_domain
from apportion.tasks.domains import load_domain
from apportion.tasks.leakage import Judged

HERE = Path(__file__).parent
WORK = HERE.parents[1] / "build" / "compose_tasks"
CLINC = {
    "travel": ("travel", "auto_and_commute"),
    "home": ("home", "kitchen_and_dining", "utility"),
    "work": ("work", "credit_cards", "banking"),
}
SOURCES = ("banking77", "trec", "snips", *CLINC)
TWINS = tuple(f"banking77-{seed}" for seed in (1, 2, 3))
"""The same domain trained again with other seeds: near-duplicates."""


@dataclass(frozen=True)
class Pool:
    """Texts that tasks are drawn from: classes of a domain that no source has seen, or rows that none has."""

    name: str
    domain: Domain


def banking_classes(*, seen: bool) -> list[str]:
    """Every other class of BANKING77 was seen by a source; the rest are new to all."""
    return [name for place, name in enumerate(sorted(load_domain("banking77").classes)) if (place % 2 == 0) == seen]


def judged(side: str) -> list[Pool]:
    """Pools of ``id`` tasks (a source knows the domain, not these classes or rows) and ``ood`` tasks (none does)."""
    if side == "ood":
        return [Pool(part, load_domain(f"clinc150/{part}")) for part in ("small_talk", "meta")]
    if side == "many":  # classes that none has seen, with all their rows
        return [Pool("banking77", load_domain("banking77").select(classes=banking_classes(seen=False))), *judged("ood")]
    rows = "valid" if side == "valid" else "test"
    pools = [Pool("banking77", load_domain("banking77").select(classes=banking_classes(seen=False), splits=[rows]))]
    if side != "valid":
        pools.append(Pool("trec", load_domain("trec").select(splits=["test"])))
    pools.append(Pool("snips", load_domain("snips").select(splits=[rows])))
    for name, parts in CLINC.items():
        pools.append(Pool(name, load_domain(f"clinc150/{parts[0]}").select(splits=[rows])))
    return pools


def training_domains() -> dict[str, Domain]:
    """What every source is trained on, without anything that is judged."""
    found = {
        "banking77": load_domain("banking77").select(classes=banking_classes(seen=True), splits=["train"]),
        "trec": load_domain("trec").select(splits=["train"]),
        "snips": load_domain("snips").select(splits=["train"]),
    }
    for name, parts in CLINC.items():
        classes = [intent for part in parts for intent in load_domain(f"clinc150/{part}").classes]
        found[name] = load_domain("clinc150").select(classes=classes, splits=["train"])
    index = Judged(tuple(pool.domain for side in ("id", "ood", "valid") for pool in judged(side)))
    return {name: index.without(domain)[0] for name, domain in found.items()}


def prepare() -> Path:
    """Writes the texts that the sources are trained on."""
    path = WORK / "texts.json"
    if not path.is_file():
        WORK.mkdir(parents=True, exist_ok=True)
        texts = {}
        for name, domain in training_domains().items():
            rows = {label: domain.rows_by_class[place] for place, label in enumerate(domain.classes)}
            texts[name] = {
                label: [domain.content[int(n)] for n in found] for label, found in rows.items() if len(found) > 3
            }
        path.write_text(json.dumps(texts))
    return path


def prepared() -> list[Pool]:
    """What the sources were trained on, as pools to draw the router's lessons from."""
    pools = []
    for name, texts in json.loads(prepare().read_text()).items():
        domain = text_domain(
            name=name,
            texts=[text for found in texts.values() for text in found],
            labels=[label for label, found in texts.items() for _ in found],
            licence="see docs/tasks.md",
            provenance="training texts of a source",
            checksum=name,
        )
        pools.append(Pool(name, domain))
    return pools


def train(steps: int, workers: int) -> Path:
    """Trains the sources that are not there yet, in processes of their own."""
    folder = WORK / f"sources-{steps}"
    names = [*SOURCES, *TWINS]
    command = [sys.executable, str(HERE / "train_sources.py"), "--model", str(find_packaged("minilm"))]
    command += ["--texts", str(prepare()), "-o", str(folder), "--steps", str(steps), "--names"]
    folder.mkdir(parents=True, exist_ok=True)
    shares = [names[first::workers] for first in range(min(workers, len(names)))]
    processes = [subprocess.Popen([*command, *share]) for share in shares]
    if sum(process.wait() for process in processes):
        raise SystemExit("a source could not be trained; see above")
    return folder


class Library:
    """The base, its fine-tunes and a network that can become any mixture of them."""

    def __init__(self, folder: Path, names: Sequence[str] = SOURCES, device: str = "cpu") -> None:
        base = find_packaged("minilm")
        self.device = device
        module = AutoModel.from_pretrained(base).to(device).eval()
        inputs = {
            "input_ids": torch.zeros(1, 8, dtype=torch.long),
            "attention_mask": torch.ones(1, 8, dtype=torch.long),
        }
        self.network = Network(
            module=module, inputs=inputs, origin=Origin(ref="minilm", folder=base), readout="embedding"
        )
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.base = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
        self.states = {name: self.read(folder / name / "model.safetensors") for name in names}

    def read(self, path: Path) -> dict[str, torch.Tensor]:
        state = load_file(path)
        return {key: state[key].to(self.device) for key in self.base}

    def having(self, states: dict[str, dict[str, torch.Tensor]]) -> Library:
        """The same network and base with other sources."""
        other = copy.copy(self)
        other.states = states
        return other

    def blend(self, names: Sequence[str] | None = None, groups: dict[str, list[str]] | None = None) -> Resident:
        chosen = list(names or self.states)
        return Resident(self.network, [self.states[name] for name in chosen], groups, chosen)

    def encode(self, texts: Sequence[str], labels: Sequence[int]) -> Support:
        encoded = self.tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt")
        inputs = {key: encoded[key].to(self.device) for key in ("input_ids", "attention_mask")}
        label_N = torch.as_tensor(labels, dtype=torch.long, device=self.device)
        return Support(inputs, label_N, tuple(map(str, range(int(label_N.max()) + 1))))

    def set_state(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.network.module.named_parameters():
                parameter.copy_(state[name].to(self.device).view_as(parameter))


@dataclass(frozen=True)
class Task:
    """A support set and queries; ``pools`` says where its classes come from."""

    pools: tuple[str, ...]
    support: Support
    query: Support
    texts: tuple[str, ...]


def draw(
    library: Library,
    parts: Sequence[tuple[Pool, int]],
    rng: np.random.Generator,
    *,
    shots: int = 2,
    queries: int = 5,
    noise: float = 0.0,
    corrupt: Callable[[str], str] | None = None,
) -> Task:
    """Some classes of every pool, ``shots`` examples of each to learn from and up to ``queries`` to be judged on."""
    learn: list[tuple[str, int]] = []
    judge: list[tuple[str, int]] = []
    number = 0
    for pool, ways in parts:
        usable = [rows for rows in pool.domain.rows_by_class if len(rows) > shots]
        for place in rng.choice(len(usable), min(ways, len(usable)), replace=False):
            rows = rng.permutation(usable[place])
            learn += [(pool.domain.content[int(row)], number) for row in rows[:shots]]
            judge += [(pool.domain.content[int(row)], number) for row in rows[shots : shots + queries]]
            number += 1
    labels, spoil = np.array([label for _, label in learn]), np.random.default_rng(int(rng.integers(2**32)))
    wrong = spoil.random(len(labels)) < noise
    labels[wrong] = (labels[wrong] + spoil.integers(1, number, int(wrong.sum()))) % number
    query_texts = [text if corrupt is None else corrupt(text) for text, _ in judge]
    texts = tuple(text for text, _ in learn)
    return Task(
        tuple(pool.name for pool, _ in parts),
        library.encode(texts, labels.tolist()),
        library.encode(query_texts, [label for _, label in judge]),
        texts,
    )
