"""Selection: rules keep their promise on simulated arms, move only to better ones, and weaken claims honestly."""

from __future__ import annotations

import random

import pytest

from apportion.core.knob import Setting
from apportion.errors import ApportionError
from apportion.methods.search.evidence import Evidence, bounded, estimated_sigma, known_sigma
from apportion.methods.search.pareto import hypervolume, nondominated, pareto_select
from apportion.methods.search.race import Fidelity, race
from apportion.methods.search.select import RULES, certified_epsilon, climb, select


def arm(number):
    return Setting({"arm": number})


class Bandit:
    """Arms with known means and normal noise; counts pulls and stops at a limit."""

    def __init__(self, means, sigma=1.0, seed=0, limit=10**6):
        self.means, self.sigma, self.limit = means, sigma, limit
        self.rng = random.Random(seed)
        self.pulls = 0

    def into(self, evidence):
        def draw(archs):
            if self.pulls + len(archs) > self.limit:
                return False
            self.pulls += len(archs)
            for arch in archs:
                evidence.add(arch, self.rng.gauss(self.means[arch["arm"]], self.sigma))
            return True

        return draw


def decide(means, *, rule="lucb", epsilon=1.0, delta=0.1, seed=0, limit=10**6, radius=None, **options):
    bandit = Bandit(means, seed=seed, limit=limit)
    evidence = Evidence(radius or known_sigma(1.0), delta)
    rivals = [arm(number) for number in range(1, len(means))]
    decision = select(arm(0), rivals, evidence, bandit.into(evidence), epsilon=epsilon, rule=rule, **options)
    return decision, bandit.pulls, evidence


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("means", [(0.0, -2.0, 0.4, -1.0), (0.0, 3.0, -1.0, 0.2), (0.0, 1.0, 1.0, -4.0)])
def test_rules_stay_only_if_safe_and_move_only_to_better_arms(rule, means):
    wrong = 0
    for seed in range(60):
        decision, _, _ = decide(means, rule=rule, seed=seed)
        chosen = means[decision.choice["arm"]]
        wrong += chosen <= means[0] if decision.moved else max(means) - means[0] > 1.0
    assert wrong <= 6  # delta is 0.1; unions make the true rate far smaller


@pytest.mark.parametrize("rule", RULES)
def test_settling_on_the_best_is_within_epsilon_of_it(rule):
    for seed in range(20):
        decision, _, _ = decide((0.0, 5.0, 8.0, 7.5), rule=rule, seed=seed, settle="best")
        assert decision.moved
        assert decision.choice["arm"] in (2, 3)


def test_adaptive_rules_take_fewer_samples_than_uniform():
    means = (0.0, *([-4.0] * 10), 0.3)
    taken = {rule: sum(decide(means, rule=rule, seed=seed)[1] for seed in range(10)) for rule in RULES}
    assert taken["lucb"] < taken["uniform"] / 2
    assert taken["elimination"] < taken["uniform"] / 2


def test_running_out_of_evaluations_weakens_the_claim_to_what_the_evidence_says():
    decision, pulls, evidence = decide((0.0, 0.5), epsilon=0.1, limit=40)
    assert not decision.moved
    assert decision.reason == "out of evaluations"
    assert pulls <= 40
    assert decision.epsilon == certified_epsilon(arm(0), [arm(1)], evidence) > 0.1


def test_without_a_first_sample_of_each_nothing_is_claimed():
    decision, pulls, _ = decide((0.0, 0.5, 0.1), limit=2)
    assert pulls == 0
    assert decision.epsilon == float("inf")


def test_estimated_and_bounded_noise_also_decide():
    decision, _, _ = decide((0.0, 6.0), radius=estimated_sigma(), initial=2)
    assert decision.moved
    decision, _, _ = decide((0.0, 6.0), radius=bounded(20.0), initial=2)
    assert decision.moved


def test_climbing_follows_means_and_never_returns():
    bandit = Bandit((0.0, 5.0, 9.0), sigma=0.1)
    evidence = Evidence(known_sigma(0.1), 0.1)
    rivals = [arm(1), arm(2)]
    decision = climb(arm(0), rivals, evidence, bandit.into(evidence), visited={arm(0)})
    assert decision.choice == arm(2)
    decision = climb(arm(0), rivals, evidence, bandit.into(evidence), visited={arm(0), arm(2)})
    assert decision.choice == arm(1)
    decision = climb(arm(2), [arm(0), arm(1)], evidence, bandit.into(evidence), visited={arm(0), arm(2)})
    assert not decision.moved


def test_bad_rules_and_epsilons_are_refused():
    with pytest.raises(ApportionError, match="lucb, elimination, uniform"):
        decide((0.0, 1.0), rule="best")
    with pytest.raises(ApportionError, match="epsilon is 0"):
        decide((0.0, 1.0), epsilon=0.0)
    with pytest.raises(ApportionError, match="confidence"):
        Evidence(known_sigma(1.0), 1.0)
    with pytest.raises(ApportionError, match="scale above 0"):
        known_sigma(0.0)
    with pytest.raises(ApportionError, match="left out"):
        Evidence(known_sigma(1.0), 0.1).add(arm(0), float("nan"))


def test_evidence_is_the_same_whatever_the_order_of_samples():
    one, other = Evidence(known_sigma(1.0), 0.1), Evidence(known_sigma(1.0), 0.1)
    for value in (1.0, 2.0, 6.0):
        one.add(arm(0), value)
    for value in (6.0, 1.0, 2.0):
        other.add(arm(0), value)
    assert one.interval(arm(0)).mean == pytest.approx(other.interval(arm(0)).mean) == 3.0
    assert one.arm(arm(0)).variance == pytest.approx(7.0)


# Racing


def test_nobody_leaves_a_race_before_all_have_run_and_only_those_worse_by_more_than_the_slack():
    bandit = Bandit((0.0, -9.0, -9.0, 1.0), sigma=0.01)
    evidence = Evidence(known_sigma(0.01), 0.1)
    rivals = [arm(1), arm(2), arm(3)]
    draw = bandit.into(evidence)
    assert race(arm(0), rivals, evidence, draw, Fidelity("short", known_sigma(0.01), 0.1, slack=2.0)) == [arm(3)]
    assert {evidence.num_pulls(arm(number)) for number in range(4)} == {1}
    assert race(arm(0), rivals, evidence, draw, Fidelity("short", known_sigma(0.01), 0.1, slack=20.0)) == rivals
    empty = Evidence(known_sigma(0.01), 0.1)
    stopped = Bandit((0.0, -9.0, -9.0, 1.0), limit=3).into(empty)
    assert race(arm(0), rivals, empty, stopped, Fidelity("short", known_sigma(0.01), 0.1, slack=0.0)) == rivals


# Several utilities


def test_the_local_pareto_set_keeps_exactly_the_undominated_arms():
    means = {"accuracy": (0.0, 2.0, 4.0, 1.0), "robustness": (4.0, 3.0, 0.0, 1.0)}
    evidence = {name: Evidence(known_sigma(0.5), 0.05) for name in means}
    rng = random.Random(0)

    def draw(archs):
        for arch in archs:
            for name, values in means.items():
                evidence[name].add(arch, rng.gauss(values[arch["arm"]], 0.5))
        return True

    kept, settled = pareto_select(
        [arm(number) for number in range(4)], evidence, draw, epsilon={"accuracy": 0.5, "robustness": 0.5}
    )
    assert settled
    assert kept == [arm(0), arm(1), arm(2)]


def test_hypervolume_and_front_agree_with_counting_cells():
    rng = random.Random(1)
    for _ in range(20):
        points = [(float(rng.randrange(10)), float(rng.randrange(10))) for _ in range(6)]
        cells = sum(
            any(cost <= c and utility >= u + 1 for cost, utility in points) for c in range(10) for u in range(10)
        )
        assert hypervolume(points, (10.0, 0.0)) == cells
        front = [points[index] for index in nondominated([((cost,), utility) for cost, utility in points])]
        assert hypervolume(front, (10.0, 0.0)) == cells
        assert len(set(front)) == len(front)
