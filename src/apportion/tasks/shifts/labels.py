"""Shifts of labels: other class shares among the queries, wrong labels in the support."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.errors import DataError
from apportion.tasks.episode import Episode, Part


def label_shift(episode: Episode, rng: np.random.Generator, *, concentration: float = 1.0) -> Episode:
    r"""The episode with queries of other class shares, drawn from a Dirichlet law (eq. T7).

    .. math:: \pi \sim \mathrm{Dir}(\alpha 1), \quad n_w = \lfloor \pi_w M \rfloor, \quad M = \min_w n_w^{0} / \pi_w

    ``concentration`` is α: large keeps the classes balanced, small leaves few of them. Queries are only left out, never
    repeated, and the class of the largest share keeps all of its own.
    """
    if not concentration > 0:
        raise DataError(f"concentration {concentration:g} must be above 0; 1 draws all shares alike")
    count_W = np.bincount(episode.query.label_N, minlength=episode.ways)
    share_W = rng.dirichlet(np.full(episode.ways, concentration))
    total = np.min(np.where(share_W > 0, count_W / np.maximum(share_W, 1e-300), np.inf))
    keep_W = np.minimum(np.floor(share_W * total + 1e-9).astype(np.int64), count_W)
    kept = [
        rng.permutation(np.flatnonzero(episode.query.label_N == label))[:count] for label, count in enumerate(keep_W)
    ]
    places = np.sort(np.concatenate(kept))
    query = Part(row_N=episode.query.row_N[places], label_N=episode.query.label_N[places])
    return replace(episode, query=query)


def label_noise(episode: Episode, rng: np.random.Generator, *, ratio: float) -> Episode:
    """The episode with a share of its support labels replaced by another class, as far as every class keeps a row."""
    if not 0 <= ratio <= 1:
        raise DataError(f"noise ratio {ratio:g} is no share; give a number from 0 to 1")
    label_S = episode.support.label_N.copy()
    wanted = round(ratio * len(label_S))
    count_W = np.bincount(label_S, minlength=episode.ways)
    for place in rng.permutation(len(label_S)):
        if wanted == 0:
            break
        if count_W[label_S[place]] > 1:
            wrong = (label_S[place] + rng.integers(1, episode.ways)) % episode.ways
            count_W[label_S[place]] -= 1
            count_W[wrong] += 1
            label_S[place] = wrong
            wanted -= 1
    return replace(episode, support=Part(row_N=episode.support.row_N, label_N=label_S))
