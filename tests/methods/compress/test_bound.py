"""The bound on composed losses: exact where they add up, a known distance where they don't, and its coverage."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core.budget import Budget, Limit
from apportion.core.knob import Choice, Setting
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import budgeted_loop
from apportion.core.meter import Reading
from apportion.core.policy import Greedy, Scheduled
from apportion.errors import DataError
from apportion.methods.compress.bound import Composition, Step, as_table, composition, fit_bound
from apportion.methods.compress.policies.exact import Exact
from apportion.testing.toys import Additive, Scaled, Toy, concave_toy


def run(toy, share, policy, **options):
    ledger = Ledger()
    limit_ms = share * toy.meters["latency"].read(toy.start).value
    budgeted_loop(
        toy.start,
        knobs=toy.knobs,
        rules=toy.rules,
        meters=toy.meters,
        budget=Budget((Limit(quantity="latency", value=limit_ms, unit="ms"),)),
        policy=policy,
        ledger=ledger,
        **options,
    )
    return list(ledger)


@dataclass
class Coupled:
    """Minus the sum of the losses and ``coupling`` times its square: what is lost later is lost dearer."""

    losses: dict
    coupling: float
    unit: str = "points"

    def read(self, model):
        lost = math.fsum(self.losses[name][value] for name, value in model.items())
        return Reading(value=-(lost + self.coupling * lost**2), unit=self.unit)


def coupled_toy(seed, coupling):
    generator = random.Random(seed)
    knobs = tuple(Choice(f"part{i}", range(4)) for i in range(4))
    losses = {knob.name: {3: 0.0, 2: 1.0, 1: 2.0 + generator.random(), 0: 4.0 + generator.random()} for knob in knobs}
    costs = {knob.name: {value: value * (1.0 + generator.random()) for value in knob.values} for knob in knobs}
    return Toy(knobs, {"latency": Additive(costs, base=1.0), "quality": Coupled(losses, coupling)})


# predicted and realised


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(0.2, 0.9), st.sampled_from([Exact(), Greedy(), Scheduled()]))
def test_where_losses_add_up_every_step_is_as_predicted(seed, share, policy):
    toy = concave_toy(random.Random(seed))
    rows = run(toy, share, policy)
    made = composition(rows, "latency")
    assert len(made.steps) == sum(row.kind == "move" and row.accepted for row in rows)
    for step in made.steps:
        assert step.predicted_loss == step.loss
        assert step.predicted_saved == step.saved
    assert made.score == 0.0
    last = next(row for row in reversed(rows) if row.accepted)
    assert made.loss == rows[0].readings["quality"].value - last.readings["quality"].value


@pytest.mark.parametrize("coupling", [0.01, 0.1, -0.02])
@pytest.mark.parametrize("seed", range(3))
def test_where_losses_grow_together_the_violation_is_the_known_one(seed, coupling):
    toy = coupled_toy(seed, coupling)
    rows = run(toy, 0.5, Exact())
    made = composition(rows, "latency")
    last = next(row for row in reversed(rows) if row.accepted)
    alone = [toy.meters["quality"].losses[name][value] for name, value in last.setting.items()]
    assert sum(loss > 0 for loss in alone) > 1
    known = coupling * (sum(alone) ** 2 - sum(loss**2 for loss in alone))
    assert made.loss - made.predicted_loss == pytest.approx(known)
    assert made.score == pytest.approx(known / made.scale)
    assert [step.predicted_saved for step in made.steps] == pytest.approx([step.saved for step in made.steps])


def test_a_step_from_a_value_further_down_is_predicted_by_the_difference_of_what_both_did_alone():
    toy = coupled_toy(0, 0.1)
    # the check fails, so that knobs move again from where the first plan left them
    slower = Scaled(toy.meters["latency"], 1.2)
    rows = run(toy, 0.7, Exact(), check=lambda model: {"latency": slower.read(model)})
    made = composition(rows, "latency")
    last = next(row for row in reversed(rows) if row.kind == "move" and row.accepted)
    assert len({step.knob for step in made.steps}) < len(made.steps)
    start = toy.start
    predicted = sum(
        toy.meters["quality"].read(start).value - toy.meters["quality"].read(start.replace(name, value)).value
        for name, value in last.setting.items()
    )
    assert made.predicted_loss == pytest.approx(predicted)


def test_without_a_table_a_step_is_predicted_by_when_it_was_first_read():
    toy = coupled_toy(1, 0.1)
    rows = run(toy, 0.4, Greedy())
    for step in composition(rows, "latency").steps:
        first = next(row for row in rows if row.knob == step.knob and row.value == step.value)
        base = next(row for row in reversed(rows[: first.step]) if row.accepted)
        alone = {row.value for row in rows if row.knob == step.knob and row.step <= rows_at_start(rows)}
        if step.value not in alone:
            assert step.predicted_loss == base.readings["quality"].value - first.readings["quality"].value
    assert composition(rows, "latency").score > 0


def rows_at_start(rows):
    return next(row.step for row in rows if row.kind == "move" and row.accepted)


def test_moves_that_restore_quality_are_no_part_of_a_composition():
    def row(step, kind, quality, latency_ms, cost, knob=None, value=None, **setting):
        readings = {"quality": Reading(value=quality, unit="points"), "latency": Reading(value=latency_ms, unit="ms")}
        return Row(
            step=step,
            kind=kind,
            setting=Setting(setting),
            readings=readings,
            cost=cost,
            accepted=True,
            knob=knob,
            value=value,
        )

    rows = [
        row(0, "start", 0.9, 8.0, 1.0, prune=2, distil=1),
        row(1, "move", 0.7, 6.0, 0.5, "prune", 1, prune=1, distil=1),
        row(2, "move", 0.85, 6.0, 0.5, "distil", 0, prune=1, distil=0),
        row(3, "move", 0.8, 4.0, 0.0, "prune", 0, prune=0, distil=0),
    ]
    made = composition(rows, "latency")
    assert [step.step for step in made.steps] == [1, 3]
    assert made.loss == pytest.approx(0.25)


def test_a_reading_that_the_ledger_lacks_is_refused():
    rows = run(concave_toy(random.Random(0)), 0.5, Greedy())
    with pytest.raises(DataError, match="no reading 'size'; its readings are latency, quality"):
        composition(rows, "size")
    assert composition([], "latency").steps == ()


# the bound


def made_run(score, *losses):
    """A run of moves predicted to lose ``losses``, which together lost more by ``score`` times their sum."""
    losses = losses or (1.0, 3.0)
    extra = score * sum(map(abs, losses)) / len(losses)
    return Composition(tuple(Step(i, f"part{i}", 0, loss, loss + extra, 1.0, 1.0) for i, loss in enumerate(losses)))


def test_the_bound_is_the_plain_sum_where_every_earlier_run_added_up():
    bound = fit_bound([made_run(0.0)] * 20)
    assert bound.margin == 0.0
    assert bound.upper(made_run(0.7, 2.0, 5.0)) == 7.0
    assert (bound.num_over_additive, bound.num_exceeded, bound.violation_rate) == (0, 0, 0.0)
    assert bound.exceeded_by(made_run(0.01))
    assert not bound.exceeded_by(made_run(-0.5))


def test_the_margin_is_the_violation_that_enough_earlier_runs_stayed_under():
    bound = fit_bound([made_run(score / 10) for score in range(1, 20)], alpha=0.1)
    assert bound.margin == pytest.approx(1.8)  # rank 18 of 19
    assert bound.upper(made_run(0.0, 2.0, -1.0)) == pytest.approx(1.0 + 1.8 * 3.0)
    assert bound.num_over_additive == 19
    # left out, only the largest lies above the bound of the others
    assert (bound.num_left_out, bound.num_exceeded) == (19, 1)
    assert bound.violation_rate == pytest.approx(1 / 19)
    assert bound.violation_rate < bound.violation_rate_upper < 0.3


def test_a_new_run_exceeds_the_bound_as_often_as_promised():
    generator = random.Random(0)
    num_repeats, num_runs, alpha = 1500, 19, 0.1

    def draw():
        return made_run(generator.expovariate(1.0) - 0.3, 1.0 + generator.random(), generator.random())

    exceeded = 0
    for _ in range(num_repeats):
        bound = fit_bound([draw() for _ in range(num_runs)], alpha)
        exceeded += bound.exceeded_by(draw())
    stderr = math.sqrt(alpha * (1 - alpha) / num_repeats)
    assert abs(exceeded / num_repeats - alpha) <= 5 * stderr  # exactly 2 of 20 without ties


def test_runs_drawn_otherwise_exceed_the_bound_more_often():
    bound = fit_bound([made_run(score / 100) for score in range(40)])
    assert all(bound.exceeded_by(made_run(0.5 + score / 100)) for score in range(10))


@pytest.mark.parametrize(("alpha", "needed"), [(0.1, 9), (0.05, 19), (0.25, 3)])
def test_too_few_runs_are_refused_with_the_number_needed(alpha, needed):
    with pytest.raises(DataError, match=f"needs {needed} earlier runs, {needed - 1} were given"):
        fit_bound([made_run(0.1)] * (needed - 1), alpha)
    bound = fit_bound([made_run(0.1)] * needed, alpha)
    assert bound.margin == pytest.approx(0.1)
    assert math.isnan(bound.violation_rate)  # one less would be too few
    assert math.isnan(bound.violation_rate_upper)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, math.nan])
def test_a_share_that_is_none_is_refused(alpha):
    with pytest.raises(DataError, match="between 0 and 1"):
        fit_bound([made_run(0.1)] * 40, alpha)


def test_a_run_predicted_to_lose_nothing_that_lost_something_is_beyond_every_scale():
    assert made_run(0.0, 0.0, 0.0).score == 0.0
    surprise = Composition((Step(1, "a", 0, 0.0, 0.5, 1.0, 1.0),))
    assert surprise.score == math.inf
    assert fit_bound([made_run(0.1)] * 20).exceeded_by(surprise)


def test_the_table_shows_every_step_and_fits_a_terminal():
    toy = coupled_toy(0, 0.1)
    made = composition(run(toy, 0.4, Exact()), "latency")
    bound = fit_bound([made_run(score / 10) for score in range(30)])
    lines = as_table(made, bound).splitlines()
    assert all(len(line) <= 80 for line in lines)
    for step in made.steps:
        assert any(step.knob in line and f"{step.loss:.3g}" in line for line in lines)
    assert f"{bound.upper(made):.4g} lost at most (kept)" in "\n".join(lines)
    extreme = Step(
        10_000, "prune.encoder.layer.11.attention.output.dense", "a long value", -1 / 3e7, -1 / 3e7, 1e9, -2 / 3
    )
    lines = as_table(Composition((extreme,))).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "11.attention.output.dense"[-22:] in lines[2]
    assert lines[2].split()[-4:] == ["-3.33e-08", "-3.33e-08", "1e+09", "-0.667"]
