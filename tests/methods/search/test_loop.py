"""The search: ends at a certified local optimum in the band, resumes, and is the same with any number of workers."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.search.toy import NoisyProxy, Toy, cost, utility

from apportion.core.ledger import Ledger
from apportion.errors import ApportionError, InfeasibleError, LedgerError
from apportion.methods.search.anchors import pareto_anchors, recompensate, starts_in_band
from apportion.methods.search.band import Band
from apportion.methods.search.baselines import penalised, random_local
from apportion.methods.search.costs import MeasuredIsoCost, Recalibrated, combined
from apportion.methods.search.evidence import Evidence, known_sigma
from apportion.methods.search.loop import Search, SearchConfig
from apportion.methods.search.mutate import Infeasible, Neighbour
from apportion.methods.search.neighbours import IsoCost, Uncompensated
from apportion.methods.search.proxy import Here, Journal, Processes, Request, Sampler
from apportion.methods.search.race import Fidelity

SPACE = Toy()
START = SPACE.start()


def search(
    seed=0, *, tau=0.05, ledger=None, executor=None, limit=None, neighbours=None, sigma=0.1, starts=1, **options
):
    sampler = Sampler(NoisyProxy(sigma, seed), Journal(ledger), executor, max_evaluations=limit)
    config = SearchConfig(**{"epsilon": 0.2, **options})
    band = Band.around(cost(START), tau)
    found = Search(SPACE, sampler, known_sigma(sigma), config).run(
        neighbours or IsoCost(SPACE, band, cost),
        starts_in_band(SPACE, band, cost, starts, random.Random(1)),
    )
    return found, sampler


def locally_optimal(arch, epsilon, tau=0.05):
    around = IsoCost(SPACE, Band.around(cost(START), tau), cost).around(arch, SPACE.layers)
    return all(utility(one) <= utility(arch) + epsilon for one in around.archs)


@pytest.mark.parametrize("schedule", ["pooled", "per-layer"])
@pytest.mark.parametrize("scope", ["layer", "neighbourhood"])
@pytest.mark.parametrize("climb", [True, False])
def test_a_search_ends_at_an_epsilon_optimum_of_the_whole_neighbourhood_inside_the_band(schedule, scope, climb):
    for seed in range(5):
        found, _ = search(seed, schedule=schedule, scope=scope, climb=climb)
        assert found.outcome == "local optimum"
        assert found.claim.as_asked
        assert locally_optimal(found.arch, found.claim.epsilon)
        assert abs(cost(found.arch)["latency"].value / cost(START)["latency"].value - 1) <= 0.05
        assert utility(found.arch) > utility(START)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.02, 0.2), st.floats(0.1, 1.0))
def test_the_path_never_leaves_the_band_and_the_claim_holds(seed, tau, epsilon):
    found, _ = search(seed, tau=tau, epsilon=epsilon)
    anchor = cost(START)["latency"].value
    for arch in found.path:
        assert abs(cost(arch)["latency"].value / anchor - 1) <= tau + 1e-9
    assert locally_optimal(found.arch, found.claim.epsilon, tau)
    assert found.claim.epsilon <= epsilon * (1 + 1e-9)


def test_a_band_that_follows_the_incumbent_may_drift_and_says_so():
    band = Band.around(cost(START), 0.05)
    found, _ = search(neighbours=IsoCost(SPACE, band, cost, per_step=True))
    values = [cost(arch)["latency"].value for arch in found.path]
    for before, after in pairwise(values):
        assert abs(after / before - 1) <= 0.05 + 1e-9
    assert found.drift == pytest.approx(abs(values[-1] / values[0] - 1))


def test_evaluations_are_kept_to_and_the_claim_says_what_is_left_of_it():
    found, sampler = search(limit=60, epsilon=0.05, sigma=0.5)
    assert sampler.num_evaluations <= 60
    assert found.outcome == "out of evaluations"
    assert not found.claim.as_asked
    tiny, _ = search(limit=3)
    assert tiny.claim.epsilon == math.inf
    assert tiny.claim.to_json()["epsilon"] is None


def test_a_killed_search_goes_on_where_it_stopped_and_asks_nothing_twice(tmp_path):
    whole = Ledger()
    found, sampler = search(3, ledger=whole)
    for keep in (1, 2, 10, len(whole) // 2, len(whole)):
        part = Ledger(tmp_path / f"{keep}.jsonl")
        for row in whole[:keep]:
            part.append(row)
        part.close()
        asked = []

        class Watched(NoisyProxy):
            def evaluate(self, request, asked=asked):
                asked.append(request)
                return super().evaluate(request)

        with Ledger(tmp_path / f"{keep}.jsonl") as ledger:
            again = Sampler(Watched(0.1, 3), Journal(ledger))
            band = Band.around(cost(START), 0.05)
            resumed = Search(SPACE, again, known_sigma(0.1), SearchConfig(epsilon=0.2)).run(
                IsoCost(SPACE, band, cost), [START]
            )
            assert [row.setting for row in ledger] == [row.setting for row in whole]
        assert resumed.arch == found.arch
        assert resumed.claim == found.claim
        assert len(asked) == sampler.num_evaluations - sum(row.kind == "trial" for row in whole[:keep])


def test_a_ledger_of_another_search_is_refused():
    ledger = Ledger()
    search(0, ledger=ledger, scope="layer")
    with pytest.raises(LedgerError, match="other settings"):
        search(0, ledger=ledger, scope="neighbourhood", climb=False)


def test_workers_change_nothing_but_time():
    alone, _ = search(5, executor=Here())
    pool = Processes(2)
    try:
        shared, _ = search(5, executor=pool)
    finally:
        pool.close()
    assert shared.path == alone.path
    assert shared.claim == alone.claim
    with pytest.raises(ApportionError, match="at least 1"):
        Processes(0)


def test_every_decision_is_in_the_trace_with_its_evidence():
    ledger = Ledger()
    found, _ = search(2, ledger=ledger)
    moves = [row for row in ledger if row.kind == "move"]
    told = [json.loads(row.note) for row in moves]
    assert [row.setting for row in moves if row.accepted] == list(found.path[1:])
    assert all({"from", "arms", "reason", "infeasible", "layers"} <= set(one) for one in told)
    assert all(row.cost == 0 for row in moves)  # inside the band
    assert told[-1]["phase"] == "sweep"


def test_several_starts_share_evidence_and_the_best_goes_on():
    one, _ = search(1)
    several, _ = search(1, starts=4)
    assert utility(several.arch) >= utility(one.arch) - 0.2
    with pytest.raises(ApportionError, match="at least one start"):
        Search(SPACE, Sampler(NoisyProxy(), Journal()), known_sigma(1.0), SearchConfig(epsilon=1.0)).run(
            IsoCost(SPACE, Band.around(cost(START), 0.1), cost), []
        )


def test_racing_at_a_cheap_fidelity_keeps_the_claim_true_and_costs_less():
    config = SearchConfig(epsilon=0.1)
    band = Band.around(cost(START), 0.05)
    spent = {}
    for name, fidelities in {"plain": (), "raced": (Fidelity("short", known_sigma(0.02), 0.05, slack=0.0),)}.items():
        sampler = Sampler(_TwoFidelities(), Journal(), prices={"short": 0.05})
        run = Search(SPACE, sampler, known_sigma(0.3), config, fidelities=fidelities)
        found = run.run(IsoCost(SPACE, band, cost), [START])
        assert locally_optimal(found.arch, found.claim.epsilon)
        assert found.claim.as_asked
        spent[name] = found.spent
    assert spent["raced"] < spent["plain"]


class _TwoFidelities(NoisyProxy):
    def evaluate(self, request):
        self.sigma = 0.02 if request.fidelity == "short" else 0.3
        return super().evaluate(request)


def test_bad_configurations_are_told_in_one_line():
    for wrong in ({"epsilon": 0.0}, {"confidence": 1.0}, {"rule": "best"}, {"initial": 0}):
        with pytest.raises(ApportionError):
            SearchConfig(**{"epsilon": 1.0, **wrong})


# Several devices, anchors, transfer


def slow_at_a(arch):
    value = cost(arch)["latency"].value * (1.5 if arch["a"] else 1.0)
    return {"latency@b": cost(arch)["latency"].__class__(value=value, unit="ms")}


def test_several_devices_must_all_be_in_their_band():
    both = combined(cost, slow_at_a)
    band = Band.around(both(START), 0.1)
    found, _ = search(neighbours=IsoCost(SPACE, band, both))
    assert band.holds(both(found.arch))
    assert found.arch["a"] == START["a"]  # no single width suits both devices once a changes
    with pytest.raises(ApportionError, match="name each once"):
        combined(cost, cost)(START)


def test_a_solution_is_carried_over_by_compensating_again():
    found, _ = search()
    band = Band.around(slow_at_a(START), 0.05)
    moved = recompensate(SPACE, found.arch, band, slow_at_a)
    assert isinstance(moved, Neighbour)
    assert band.holds(moved.costs)
    assert all(moved.arch[layer] == found.arch[layer] for layer in SPACE.layers)
    stay = recompensate(SPACE, START, band, slow_at_a)
    assert stay.arch == START
    far = Band.around({"latency": cost(START)["latency"].__class__(value=1e-6, unit="ms")}, 0.05)
    assert isinstance(recompensate(SPACE, START, far, cost), Infeasible)
    with pytest.raises(InfeasibleError, match="nearest has latency"):
        starts_in_band(SPACE, far, cost, 1, random.Random(0), tries=5)


def test_anchors_make_a_front_of_measured_costs():
    def at(anchor):
        reading = cost(START)["latency"].__class__(value=anchor, unit="ms")
        band = Band.around({"latency": reading}, 0.05)
        starts = starts_in_band(SPACE, band, cost, 1, random.Random(0))
        sampler = Sampler(NoisyProxy(0.02), Journal())
        return Search(SPACE, sampler, known_sigma(0.02), SearchConfig(epsilon=0.1)).run(
            IsoCost(SPACE, band, cost), starts
        )

    front = pareto_anchors((1.0, 2.0, 4.0), at, lambda arch: cost(arch)["latency"].value)
    assert front.kept == (0, 1, 2)
    upside_down = pareto_anchors((1.0, 2.0, 4.0), at, lambda arch: -cost(arch)["latency"].value)
    assert upside_down.kept == (2,)
    with pytest.raises(InfeasibleError, match="from small to large"):
        pareto_anchors((2.0, 1.0), at, lambda arch: 0.0)


# Measured neighbourhoods and online recalibration


def biased(arch):
    return {"latency": cost(arch)["latency"].__class__(value=0.8 * cost(arch)["latency"].value + 0.05, unit="ms")}


def test_estimates_learn_from_measurements_and_only_measured_candidates_compete():
    band = Band.around(cost(START), 0.05)
    estimate = Recalibrated(biased, cost(START))
    measured = []

    def measure(archs):
        measured.extend(archs)
        return {arch: cost(arch) for arch in archs}

    near = MeasuredIsoCost(SPACE, band, estimate, measure, num=3, reach=4.0, method="finite")
    found, _ = search(neighbours=near)
    assert band.holds(cost(found.arch))
    assert len(measured) == len(set(measured))
    probe = SPACE.start().replace("width", 48)
    assert abs(estimate(probe)["latency"].value / cost(probe)["latency"].value - 1) < 0.02
    assert abs(biased(probe)["latency"].value / cost(probe)["latency"].value - 1) > 0.1
    assert estimate.error("latency").count == len(measured)
    assert estimate.error("memory") is None


def test_what_cannot_be_measured_is_no_candidate():
    band = Band.around(cost(START), 0.05)
    near = MeasuredIsoCost(
        SPACE,
        band,
        Recalibrated(cost, cost(START)),
        lambda archs: {arch: cost(arch) for arch in archs if arch["a"] != 1},
    )
    around = near.around(START, SPACE.layers)
    assert around.archs
    assert all(arch["a"] != 1 for arch in around.archs)
    assert any(one.reason == "died" for one in around.infeasible)


# Baselines


def test_the_penalty_is_tuned_to_the_budget_and_reuses_evaluations():
    sampler = Sampler(NoisyProxy(0.02), Journal(), max_evaluations=4000)
    budget = cost(START)["latency"].value * 1.05
    found = penalised(
        SPACE,
        sampler,
        known_sigma(0.02),
        SearchConfig(epsilon=0.1),
        Uncompensated(_WidthToo(), None, cost),
        [START],
        cost=lambda arch: cost(arch)["latency"].value,
        budget=budget,
    )
    assert cost(found.arch)["latency"].value <= budget
    assert utility(found.arch) > utility(START)
    distinct = {(row.setting, i) for i, row in enumerate(sampler.journal.ledger) if row.kind == "trial"}
    assert len(distinct) == sampler.num_evaluations


class _WidthToo(Toy):
    layers = (*Toy.layers, "width")

    def proposals(self, arch, layer):
        if layer == "width":
            from apportion.methods.search.space import Proposal

            return [Proposal(layer, {layer: width}) for width in self.widths if width != arch["width"]]
        return super().proposals(arch, layer)


def test_rejecting_above_a_budget_never_exceeds_it():
    band = Band.around(cost(START), 0.05, one_sided=True)
    found, _ = search(neighbours=Uncompensated(SPACE, band, cost))
    assert cost(found.arch)["latency"].value <= 1.05 * cost(START)["latency"].value


def test_random_local_search_uses_its_evaluations_and_stays_in_the_band():
    sampler = Sampler(NoisyProxy(0.1), Journal(), max_evaluations=60)
    band = Band.around(cost(START), 0.05)
    evidence = Evidence(known_sigma(0.1), 0.05)
    arch = random_local(sampler, evidence, IsoCost(SPACE, band, cost), SPACE.layers, START, seed=0)
    assert band.holds(cost(arch))
    assert sampler.num_evaluations in (59, 60)
    with pytest.raises(ApportionError, match="a number of them"):
        random_local(Sampler(NoisyProxy(), Journal()), evidence, IsoCost(SPACE, band, cost), SPACE.layers, START, 0)


def test_a_request_evaluates_the_same_in_any_order():
    proxy = NoisyProxy(0.1, 1)
    requests = [Request(START, "utility", replicate) for replicate in range(3)]
    assert [proxy.evaluate(one) for one in requests] == [proxy.evaluate(one) for one in requests[::-1]][::-1]
