"""How far losses of composed moves are from adding up, and a bound on the total loss that earlier runs support."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from apportion.core.knob import Value
from apportion.core.ledger import Row
from apportion.core.meter import Reading
from apportion.errors import DataError
from apportion.numerics.conformal import conformal_quantile, conformal_rank
from apportion.numerics.multiple import binomial_upper

CONFIDENCE = 0.95
ROUNDING = 1e-9  # of the scale of a run's losses; sums of readings agree no better than this


@dataclass(frozen=True)
class Step:
    """An accepted move: what it was predicted to lose and save before others were made, and what it did."""

    step: int
    knob: str
    value: Value
    predicted_loss: float
    loss: float
    predicted_saved: float
    saved: float


@dataclass(frozen=True)
class Composition:
    """The accepted moves of one run, in order."""

    steps: tuple[Step, ...]

    @property
    def predicted_loss(self) -> float:
        return math.fsum(step.predicted_loss for step in self.steps)

    @property
    def loss(self) -> float:
        return math.fsum(step.loss for step in self.steps)

    @property
    def scale(self) -> float:
        """The sum of the predicted losses, each without its sign."""
        return math.fsum(abs(step.predicted_loss) for step in self.steps)

    @property
    def score(self) -> float:
        """How much more was lost than predicted, in units of the scale; 0 where that is rounding (eq. M6)."""
        violation = self.loss - self.predicted_loss
        if abs(violation) <= ROUNDING * max(self.scale, abs(self.loss)):
            return 0.0
        return violation / self.scale if self.scale > 0 else math.copysign(math.inf, violation)


def composition(rows: Sequence[Row], cost: str, quality: str = "quality") -> Composition:
    """What the moves of a ledger were predicted to lose and save, and what they did.

    The prediction is additive: what the same change of the same knob did alone, read from the start; where that was
    not read, what it did when it was first read in the run. Moves that were accepted for restoring quality are no
    part of the composition.

    Args:
        rows: the ledger of a run.
        cost: the name of the cost reading, a key of the budget such as ``latency@ort-cpu-1t``.
        quality: the name of the quality reading.
    """
    if not rows:
        return Composition(())
    missing = next((name for name in (cost, quality) if name not in rows[0].readings), None)
    if missing is not None:
        known = ", ".join(rows[0].readings)
        raise DataError(f"the ledger has no reading {missing!r}; its readings are {known}")
    alone: dict[tuple[str, Value], Row] = {}
    first: dict[tuple[str, Value, Value], tuple[Row, Row]] = {}
    steps = []
    start = here = rows[0]
    limits_moved = False
    for row in rows[1:]:
        if row.kind == "check":
            limits_moved = limits_moved or not row.accepted
            continue
        assert row.knob is not None
        assert row.value is not None
        old = here.setting[row.knob]
        if here is start:
            alone.setdefault((row.knob, row.value), row)
        first.setdefault((row.knob, old, row.value), (here, row))
        if not row.accepted:
            continue
        if limits_moved or row.cost < here.cost:
            was = start if old == start.setting[row.knob] else alone.get((row.knob, old))
            now = alone.get((row.knob, row.value))
            before, after = (was, now) if was is not None and now is not None else first[row.knob, old, row.value]
            steps.append(
                Step(
                    row.step,
                    row.knob,
                    row.value,
                    predicted_loss=_fall(before.readings, after.readings, quality),
                    loss=_fall(here.readings, row.readings, quality),
                    predicted_saved=_fall(before.readings, after.readings, cost),
                    saved=_fall(here.readings, row.readings, cost),
                )
            )
        here, limits_moved = row, False
    return Composition(tuple(steps))


def _fall(before: dict[str, Reading], after: dict[str, Reading], name: str) -> float:
    return before[name].value - after[name].value


@dataclass(frozen=True)
class LossBound:
    r"""A one-sided bound on the total loss of a composition (eq. M6).

    .. math:: L \le \sum_t \hat\ell_t + q \sum_t |\hat\ell_t|

    ``margin`` is :math:`q`, the conformal quantile of the scores of ``num_runs`` earlier runs. A new run that is drawn
    as those were (models, policy, budgets) exceeds the bound with probability at most ``alpha``.

    ``num_left_out`` earlier runs were each judged by the bound of the others; ``num_exceeded`` of them lost more.
    ``num_over_additive`` of the earlier runs lost more than the plain sum says.
    """

    alpha: float
    margin: float
    num_runs: int
    num_left_out: int
    num_exceeded: int
    num_over_additive: int

    def upper(self, predicted: Composition) -> float:
        """The loss that a composition stays under with probability ``1 - alpha``."""
        return predicted.predicted_loss + self.margin * predicted.scale

    def exceeded_by(self, run: Composition) -> bool:
        """Whether a run lost more than the bound allowed."""
        return run.score > self.margin

    @property
    def violation_rate(self) -> float:
        """The measured share of runs that exceed the bound of the others; NaN with too few runs to leave one out."""
        return self.num_exceeded / self.num_left_out if self.num_left_out else math.nan

    @property
    def violation_rate_upper(self) -> float:
        """The rate that those counts still allow, with a confidence of 95 %; NaN like the rate itself."""
        if not self.num_left_out:
            return math.nan
        return binomial_upper(self.num_exceeded, self.num_left_out, CONFIDENCE)


def fit_bound(runs: Sequence[Composition], alpha: float = 0.1) -> LossBound:
    """The bound that earlier runs support, with its violation rate measured by leaving each of them out."""
    if not 0 < alpha < 1:
        raise DataError(f"alpha is {alpha!r}; give the share of runs that may exceed the bound, between 0 and 1")
    scores = [run.score for run in runs]
    if conformal_rank(len(scores), alpha) > len(scores):
        needed = math.ceil(1 / alpha - 1 - ROUNDING)
        raise DataError(f"a bound at alpha {alpha:g} needs {needed} earlier runs, {len(scores)} were given; add runs")
    can_leave_out = conformal_rank(len(scores) - 1, alpha) <= len(scores) - 1
    num_exceeded = 0
    if can_leave_out:
        for left_out, score in enumerate(scores):
            others = scores[:left_out] + scores[left_out + 1 :]
            num_exceeded += score > conformal_quantile(others, alpha)
    return LossBound(
        alpha=alpha,
        margin=conformal_quantile(scores, alpha),
        num_runs=len(scores),
        num_left_out=len(scores) if can_leave_out else 0,
        num_exceeded=num_exceeded,
        num_over_additive=sum(score > 0 for score in scores),
    )


def as_table(run: Composition, bound: LossBound | None = None) -> str:
    """The steps of a run as text, predicted beside realised, at most 80 columns wide."""
    lines = [f"{'':36} {'quality lost':^20} {'cost saved':^20}"]
    lines.append(f"{'step':>4} {'knob':<23} {'value':>7} {'said':>10}{'was':>10} {'said':>10}{'was':>10}")
    for step in run.steps:
        value = str(step.value) if isinstance(step.value, str) else f"{step.value:g}"
        numbers = _numbers(step.predicted_loss, step.loss, step.predicted_saved, step.saved)
        lines.append(f"{step.step:>4} {_shortened(step.knob, 23):<23} {value:>7.7} {numbers}")
    saved = (math.fsum(step.predicted_saved for step in run.steps), math.fsum(step.saved for step in run.steps))
    lines.append(f"{'':4} {'total':<31} {_numbers(run.predicted_loss, run.loss, *saved)}")
    if bound is not None:
        verdict = "exceeded" if bound.exceeded_by(run) else "kept"
        upper = f"{bound.upper(run):.4g}"
        lines.append(f"bound at {1 - bound.alpha:.0%} from {bound.num_runs} runs: {upper} lost at most ({verdict})")
        if bound.num_left_out:
            lines.append(
                f"left out in turn, {bound.num_exceeded} of {bound.num_left_out} runs exceeded it "
                f"(at most {bound.violation_rate_upper:.0%} at {CONFIDENCE:.0%});"
            )
        lines.append(f"{bound.num_over_additive} of {bound.num_runs} lost more than the plain sum")
    return "\n".join(lines)


def _numbers(predicted_loss: float, loss: float, predicted_saved: float, saved: float) -> str:
    return f"{predicted_loss:>10.3g}{loss:>10.3g} {predicted_saved:>10.3g}{saved:>10.3g}"


def _shortened(name: str, width: int) -> str:
    """A name's end, which tells modules apart."""
    return name if len(name) <= width else f"…{name[1 - width :]}"
