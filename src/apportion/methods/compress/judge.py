"""The judge of a run's moves: quality on the examples chosen with, and a finer reading of likeness to the original."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from apportion.core.meter import Meter, Reading
from apportion.methods.compress.policies import LIKENESS
from apportion.methods.compress.quantise import AsRun
from apportion.methods.compress.repair import answer_loss
from apportion.models.network import Network, read_out
from apportion.models.quantise import simulate
from apportion.tasks.batches import Examples, Splits, load_splits
from apportion.tasks.quality import Accuracy, quality_meter
from apportion.tasks.regression import R2, has_numbers, is_regressor, with_numbers, without_targets
from apportion.tasks.sample import Sample


@runtime_checkable
class Scores(Protocol):
    """A quality meter that can also score answers computed elsewhere, in the order of its examples."""

    def score(self, answer_ND: Tensor, readout: str) -> Reading: ...


@runtime_checkable
class ScoresTokens(Protocol):
    """A quality meter of language models that can score logits computed elsewhere, batch after batch."""

    def sample_tokens(self, answers: Iterable[Tensor]) -> Sample: ...


def load_examples(network: Network, data: str | None, kind: str, *, seed: int, guard: bool = False) -> Splits:
    """The splits of the user's data: with numbers as targets where R² is read, else with classes if there are any."""
    splits = load_splits(network, data, seed=seed, guard=guard)
    if kind == "r2" or (kind == "auto" and (has_numbers(splits.report) or is_regressor(network, splits.report))):
        return with_numbers(splits, data)
    return without_targets(splits) if kind == "agreement" else splits


def meter_of(original: Network, splits: Splits, examples: Examples, kind: str) -> Meter[Network]:
    """The quality meter of a kind; numbers, as targets or as a network's answers, are read by R² unless a class is."""
    numbers = kind in ("auto", "agreement") and is_regressor(original, examples)
    if kind == "r2" or numbers or (kind == "auto" and has_numbers(examples)):
        return R2(original, splits.training, examples)
    return quality_meter(original, splits.training, examples, kind)  # type: ignore[arg-type]


def meter_over(
    meter: Meter[Network], original: Network, splits: Splits, examples: Examples, kind: str
) -> Meter[Network]:
    """A quality meter of a kind over other examples, with the same head where it has one."""
    return meter.over(examples) if isinstance(meter, Accuracy | R2) else meter_of(original, splits, examples, kind)


class Judge:
    """Reads a network's answers once for both of its meters.

    Quality is a count of right answers on few examples, which most small cuts leave as it is. Likeness is minus the
    loss that repair trains on (eq. R1, R2), read without training: it tells such cuts apart.
    """

    def __init__(self, original: Network, meter: Meter[Network], examples: Examples) -> None:
        self.meter, self.examples = meter, examples
        self._last: tuple[Network, list[Tensor]] | None = None
        self._wanted = self._answers(original) if self.reads_likeness(original) else []

    def reads_likeness(self, network: Network) -> bool:
        """Not for language models, whose likelihood is fine enough and whose answers are too large to keep."""
        return isinstance(self.meter, Scores) and network.readout != "token-logits"

    def quality(self, model: Network) -> Reading:
        if not self._wanted:
            return AsRun(self.meter).read(model)
        assert isinstance(self.meter, Scores)
        return self.meter.score(torch.cat(self._answers(model)), model.readout)

    def likeness(self, model: Network) -> Reading:
        answers = self._answers(model)
        losses = [
            answer_loss(answer, wanted, model.readout).item() * len(wanted)
            for answer, wanted in zip(answers, self._wanted, strict=True)
        ]
        return Reading(value=-sum(losses) / len(self.examples), unit="nat", count=len(self.examples))

    def _answers(self, model: Network) -> list[Tensor]:
        if self._last is None or self._last[0] is not model:
            run = simulate(model) if model.calibration else model
            with torch.inference_mode():
                self._last = (model, [read_out(run, batch) for batch in self.examples.batches])
        return self._last[1]

    def meters(self) -> dict[str, Meter[Network]]:
        """The meters of a run, by name."""
        named: dict[str, Meter[Network]] = {"quality": _Part(self.meter.unit, self.quality)}
        return named | ({LIKENESS: _Part("nat", self.likeness)} if self._wanted else {})


@dataclass(frozen=True)
class _Part:
    """One of the judge's readings as a meter."""

    unit: str
    read: Callable[[Network], Reading]
