"""Scores over episodes: accuracy with its interval, its tail, its table by domain, and calibration error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from apportion.core.meter import Reading
from apportion.errors import DataError
from apportion.models.network import Network
from apportion.numerics.calibration import calibration_error
from apportion.numerics.cvar import cvar
from apportion.tasks.domain import Domain
from apportion.tasks.episode import Episode
from apportion.tasks.features import Features, features
from apportion.tasks.heads import Head, Prototype


@dataclass(frozen=True, eq=False)
class Scores:
    """Accuracy of every episode and its domain, and all answers with the confidence they were given with."""

    accuracy_E: NDArray[np.float64]
    domains: tuple[str, ...]
    confidence_Q: NDArray[np.float64]
    right_Q: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.accuracy_E)

    def reading(self) -> Reading:
        """Mean accuracy over episodes; for a single episode the error is that of its queries."""
        count = len(self)
        if count > 1:
            stderr = float(self.accuracy_E.std(ddof=1) / np.sqrt(count))
        else:
            mean = float(self.accuracy_E[0])
            stderr = float(np.sqrt(mean * (1 - mean) / len(self.right_Q)))
        return Reading(value=float(self.accuracy_E.mean()), unit="ratio", stderr=stderr, count=count)

    def half_width(self) -> float:
        """Half of the 95 % interval of the mean accuracy."""
        return 1.96 * self.reading().stderr

    def tail(self, beta: float) -> float:
        """Mean accuracy of the worst ``1 - beta`` share of the episodes: one minus the CVaR of the error."""
        return 1 - cvar((1 - self.accuracy_E).tolist(), beta)

    def calibration(self) -> float:
        return calibration_error(self.confidence_Q, self.right_Q)

    def by_domain(self) -> dict[str, Reading]:
        """Mean accuracy of every domain, in the order they first appear."""
        names = np.array(self.domains)
        readings = {}
        for name in dict.fromkeys(self.domains):
            accuracy_E = self.accuracy_E[names == name]
            stderr = float(accuracy_E.std(ddof=1) / np.sqrt(len(accuracy_E))) if len(accuracy_E) > 1 else 0.0
            readings[name] = Reading(value=float(accuracy_E.mean()), unit="ratio", stderr=stderr, count=len(accuracy_E))
        return readings

    def table(self) -> str:
        """The table by domain in Markdown, accuracies in percent with their 95 % intervals."""
        lines = ["| domain | episodes | accuracy, % |", "|---|---|---|"]
        for name, reading in self.by_domain().items():
            lines.append(f"| {name} | {reading.count} | {percent(reading)} |")
        return "\n".join(lines)


def percent(reading: Reading) -> str:
    return f"{100 * reading.value:.1f} ± {196 * reading.stderr:.1f}"


def score_episodes(
    episodes: Iterable[Episode],
    table: Mapping[str, Features],
    head: Head,
    *,
    query_table: Mapping[str, Features] | None = None,
) -> Scores:
    """Fits the head anew on the support of every episode and judges it on the queries.

    Args:
        table: features by domain; ``query_table`` those of the queries where they differ (a corruption, say).
    """
    accuracy, domains, confidence, right = [], [], [], []
    for episode in episodes:
        found = table[episode.domain]
        with torch.no_grad():
            score_QW = head.score(
                found.at(episode.support.row_N),
                torch.from_numpy(episode.support.label_N),
                (query_table or table)[episode.domain].at(episode.query.row_N),
                episode.ways,
            )
            best_Q = score_QW.softmax(-1).max(-1)
        right_Q = best_Q.indices.numpy() == episode.query.label_N
        accuracy.append(right_Q.mean())
        domains.append(episode.domain)
        confidence.append(best_Q.values.double().numpy())
        right.append(right_Q)
    if not accuracy:
        raise DataError("no episodes were given; ask for at least one")
    return Scores(np.array(accuracy), tuple(domains), np.concatenate(confidence), np.concatenate(right))


class EpisodeAccuracy:
    """Quality meter with labels: mean few-shot accuracy of a head on a network's features over fixed episodes."""

    unit = "ratio"

    def __init__(self, domains: Sequence[Domain], episodes: Sequence[Episode], head: Head | None = None) -> None:
        self.domains = {domain.name: domain for domain in domains}
        self.episodes, self.head = tuple(episodes), head or Prototype()

    def read(self, model: Network) -> Reading:
        return self.scores(model).reading()

    def scores(self, model: Network) -> Scores:
        rows: dict[str, list[NDArray[np.int64]]] = {}
        for episode in self.episodes:
            rows.setdefault(episode.domain, []).extend((episode.support.row_N, episode.query.row_N))
        table = {
            name: features(model, self.domains[name], np.unique(np.concatenate(parts))) for name, parts in rows.items()
        }
        return score_episodes(self.episodes, table, self.head)
