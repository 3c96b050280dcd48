"""The models of the comparison with their data: what every tool is given, and the test examples that none sees."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from benchmarks.compress_vs_peers.pictures import test_examples, tools_zip

from apportion.models.load import load
from apportion.models.network import Network
from apportion.tasks.batches import Examples, Splits, load_splits
from apportion.tasks.domains import load_domain
from apportion.tasks.domains.intents import rows_of
from apportion.tasks.quality import Accuracy

WORK = Path("build/compress_vs_peers")
NUM_TEXTS = 2000


@dataclass(frozen=True)
class Case:
    """A model, the data that tools are given, and the steps of fine-tuning that each stage or rung may take.

    Ours repairs a rung early where quality collapses there, and tries rungs in float, too; a ``repair`` of its is
    shorter, so that it trains about as much in all. ``floor`` is the lowest budget, a share of the original's latency,
    and ``rungs`` how many lead there; ``deepest`` is the share of channels and heads that the last stage of a tool
    takes which prunes without a clock.
    """

    name: str
    ref: str
    steps: int
    floor: float
    repair: int = 90
    rungs: int = 6
    deepest: float = 0.8

    @property
    def budgets(self) -> list[float]:
        return [self.floor ** (place / self.rungs) for place in range(1, self.rungs + 1)]

    @property
    def factory(self) -> str | None:
        return self.ref if ":" in self.ref else None

    @cached_property
    def network(self) -> Network:
        return load(self.ref)

    @cached_property
    def data(self) -> str:
        if self.network.takes_text:
            return str(_intents_table(WORK / "banking77.csv"))
        return str(tools_zip(WORK / "fashion.zip"))

    @cached_property
    def splits(self) -> Splits:
        return load_splits(self.network, self.data, seed=0)

    @cached_property
    def test(self) -> Examples:
        return _test_texts(self.network, self.data) if self.network.takes_text else test_examples(self.network)

    @cached_property
    def meter(self) -> Accuracy:
        return Accuracy(self.network, self.splits.training, self.test)

    def right(self, answer_ND: torch.Tensor, label_N: torch.Tensor) -> torch.Tensor:
        """Which answers are right: the greatest logit, or the nearest class mean."""
        if self.meter.mean_KD is not None:
            answer_ND = answer_ND @ self.meter.mean_KD.T
        return answer_ND.argmax(-1) == label_N


CASES = {
    "resnet20": Case("resnet20", "benchmarks.compress_vs_peers.networks:resnet20", steps=150, floor=0.2),
    "minilm": Case("minilm", "minilm", steps=150, floor=0.15),
    "mobilenetv2": Case("mobilenetv2", "benchmarks.compress_vs_peers.networks:mobilenetv2", steps=150, floor=0.3),
}


def _intents_table(path: Path) -> Path:
    """BANKING77 without its test rows, as a table; written once."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            seen = {text for split, _, text in rows_of("banking77") if split == "test"}
            rows = {text: label for split, label, text in rows_of("banking77") if split != "test" and text not in seen}
            writer.writerows(rows.items())
    return path


def _test_texts(network: Network, data: str) -> Examples:
    """``NUM_TEXTS`` test rows, evenly spaced so that all intents are among them; numbered as in the data."""
    rows = list(dict.fromkeys((text, label) for split, label, text in rows_of("banking77") if split == "test"))
    classes = load_domain(data).classes
    num_texts = min(NUM_TEXTS, len(rows))
    rows = [rows[place * len(rows) // num_texts] for place in range(num_texts)]
    rows.sort(key=lambda row: len(row[0]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(network.origin.folder, local_files_only=True)
    batches = []
    for start in range(0, len(rows), 50):
        texts = [text for text, _ in rows[start : start + 50]]
        encoded = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        batches.append({key: encoded[key] for key in network.inputs})
    label_N = torch.tensor([classes.index(label) for _, label in rows])
    return Examples(tuple(batches), f"{len(rows)} test texts of banking77", label_N)
