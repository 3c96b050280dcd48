"""Learned: ranks moves by what earlier runs say they lose per cost saved, and so skips trials that greedy makes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from apportion.core.ledger import Row
from apportion.core.policy import Proposal, State
from apportion.errors import DataError
from apportion.methods.compress.history import seen
from apportion.methods.compress.policies.features import NAMES, View, kind_of

VERSION = 1
ALPHAS = tuple(10.0**power for power in range(-2, 5))
MIN_EXAMPLES = 20


@dataclass(frozen=True, kw_only=True)
class Ranker:
    r"""A ridge regression of a move's ratio on its features (eq. M5).

    .. math:: \hat t = b + \sum_j w_j (x_j - m_j) / s_j

    ``weight``, ``mean`` and ``scale`` have one number per name in ``NAMES`` and one per kind; a kind that no training
    run had adds nothing. ``held_out_r2`` is the share of variance explained in runs it was not trained on.
    """

    kinds: tuple[str, ...]
    weight: tuple[float, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    intercept: float
    num_runs: int
    num_examples: int
    held_out_r2: float | None

    def predict(self, view: View, knob: str, old: float | str, value: float | str) -> float:
        features = [*view.features(knob, old, value), *(float(kind == kind_of(knob)) for kind in self.kinds)]
        parts = zip(self.weight, features, self.mean, self.scale, strict=True)
        return self.intercept + math.fsum(weight * (x - mean) / scale for weight, x, mean, scale in parts)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"apportion_ranker": VERSION, "features": NAMES, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Ranker:
        """Reads a saved ranker; raises ``DataError`` where the file is none or was made for other features."""
        hint = "train one with recipes/train_policy.py"
        try:
            fields = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            raise DataError(f"{path} can't be read as a learned policy; {hint}") from None
        if not isinstance(fields, dict) or fields.get("apportion_ranker") != VERSION:
            raise DataError(f"{path} is not a learned policy of version {VERSION}; {hint}")
        if fields.get("features") != list(NAMES):
            raise DataError(f"{path} was trained on other features than this version has; {hint}")
        try:
            ranker = cls(
                kinds=tuple(str(kind) for kind in fields["kinds"]),
                **{name: tuple(float(x) for x in fields[name]) for name in ("weight", "mean", "scale")},
                intercept=float(fields["intercept"]),
                num_runs=int(fields["num_runs"]),
                num_examples=int(fields["num_examples"]),
                held_out_r2=None if fields["held_out_r2"] is None else float(fields["held_out_r2"]),
            )
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{path} lacks a field of a learned policy or holds no number there; {hint}") from None
        numbers = (*ranker.weight, *ranker.mean, *ranker.scale, ranker.intercept)
        lengths = {len(ranker.weight), len(ranker.mean), len(ranker.scale)}
        if lengths != {len(NAMES) + len(ranker.kinds)} or not all(map(math.isfinite, numbers)) or 0.0 in ranker.scale:
            raise DataError(f"{path} holds numbers that don't fit a learned policy; {hint}")
        return ranker


@dataclass(frozen=True)
class Learned:
    """Takes the move that a ranker expects to lose least quality per cost saved.

    A knob is tried once before its first move, and only when it is expected to be the best; after that its moves are
    taken without a trial. A move that was read from the current setting is judged by what was read.
    """

    ranker: Ranker

    def propose(self, state: State) -> Proposal | None:
        moves = state.next_moves()
        if not moves:
            return None
        view = View.of(state.rows, state.quality)
        read_here = {(row.knob, row.value) for row in state.rows_here() if row.knob is not None}

        def expected(move: int) -> float:
            knob, value = moves[move]
            last = view.newest.get(knob.name)
            if last is not None and last.value == value and (knob.name, value) in read_here:
                return view.target(last.ratio)
            return self.ranker.predict(view, knob.name, state.setting[knob.name], value)

        knob, value = moves[min(range(len(moves)), key=expected)]
        return Proposal(knob.name, value, commit=any(row.knob == knob.name for row in state.rows))


def train(runs: Sequence[Sequence[Row]], quality: str = "quality") -> Ranker:
    """Fits a ranker to what the proposals of earlier runs lost and saved; each is described as it looked beforehand.

    The ridge penalty is chosen, and the accuracy reported, on runs left out of the fit.
    """
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GridSearchCV, GroupKFold

    for rows in runs:
        if rows and quality not in rows[0].readings:
            raise DataError(
                f"a run has no reading {quality!r}, only {', '.join(rows[0].readings)}; choose one of these"
            )
    kinds = tuple(sorted({kind_of(name) for rows in runs for name in (rows[0].setting if rows else ())}))
    examples = [(number, *example) for number, rows in enumerate(runs) for example in _examples(rows, kinds, quality)]
    if len(examples) < MIN_EXAMPLES:
        raise DataError(
            f"{len(runs)} runs hold {len(examples)} proposals to learn from, at least {MIN_EXAMPLES} are needed; "
            "add finished runs"
        )
    group_N = np.array([number for number, _, _ in examples])
    x_NF = np.array([features for _, features, _ in examples])
    y_N = np.array([target for _, _, target in examples])
    mean_F, scale_F = x_NF.mean(axis=0), x_NF.std(axis=0)
    scale_F[scale_F < 1e-9] = 1.0
    num_folds = min(5, len(set(group_N)))
    alpha, r2 = 1.0, None
    if num_folds > 1:
        found = GridSearchCV(Ridge(), {"alpha": ALPHAS}, cv=GroupKFold(num_folds), scoring="r2")
        found.fit((x_NF - mean_F) / scale_F, y_N, groups=group_N)
        alpha, r2 = float(found.best_params_["alpha"]), float(found.best_score_)
    fitted = Ridge(alpha=alpha).fit((x_NF - mean_F) / scale_F, y_N)
    return Ranker(
        kinds=kinds,
        weight=tuple(map(float, fitted.coef_)),
        mean=tuple(map(float, mean_F)),
        scale=tuple(map(float, scale_F)),
        intercept=float(fitted.intercept_),
        num_runs=len(set(group_N)),
        num_examples=len(examples),
        held_out_r2=r2,
    )


def _examples(rows: Sequence[Row], kinds: tuple[str, ...], quality: str) -> list[tuple[list[float], float]]:
    """Features and target of every proposal after the first; the first has nothing to be compared with."""
    examples = []
    known: set[tuple[int, str, object]] = set()
    for number, one in enumerate(seen(rows, quality)):
        repeated = (one.base, one.knob, one.value) in known  # a trial that was then taken is one example, not two
        known.add((one.base, one.knob, one.value))
        if number == 0 or repeated or one.censored:
            continue
        view = View.of(rows[: one.step], quality)
        features = view.features(one.knob, one.old, one.value)
        features += [float(kind == kind_of(one.knob)) for kind in kinds]
        examples.append((features, view.target(one.ratio)))
    return examples
