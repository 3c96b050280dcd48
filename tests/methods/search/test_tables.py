"""NAS-Bench-201 read from its tables: sizes, costs, noise without bias, and a search over it that keeps its claim."""

from __future__ import annotations

import random

import numpy as np
import pytest

from apportion.core.knob import Setting
from apportion.errors import DataError
from apportion.methods.search.anchors import starts_in_band
from apportion.methods.search.band import Band
from apportion.methods.search.evidence import known_sigma
from apportion.methods.search.loop import Search, SearchConfig
from apportion.methods.search.neighbours import IsoCost
from apportion.methods.search.proxy import FULL, Journal, Request, Sampler
from apportion.methods.search.race import Fidelity
from apportion.methods.search.space import SpaceError
from apportion.methods.search.spaces.nasbench201 import EDGES, SHORT, Nasbench201, TableCost, TableProxy


@pytest.fixture(scope="module")
def space():
    try:
        return Nasbench201()
    except DataError as error:
        pytest.skip(f"the NAS tables are not here: {error}")


def test_the_tables_hold_every_cell_once_and_leave_out_those_recorded_wrongly(space):
    assert len(space.row) == 5**6
    assert int((~space.kept).sum()) == 150
    assert len(space.devices) >= 20
    assert "eyeriss" not in space.devices
    dropped = space.archs[int(np.flatnonzero(~space.kept)[0])]
    with pytest.raises(SpaceError, match="recorded cost is wrong"):
        space.check(dropped)
    with pytest.raises(SpaceError, match="no NAS-Bench-201 cell"):
        space.check(Setting({"01": "conv9"}))
    with pytest.raises(SpaceError, match="unknown device"):
        space.column("toaster")


def test_compensation_edits_other_edges_only_and_skips_dropped_cells(space):
    start = space.start()
    (ladder,) = space.ladders(start.replace("01", "conv3"), "01")
    assert len(ladder.rungs) <= 21
    for rung in ladder.rungs:
        assert rung.arch["01"] == "conv3"
        assert sum(rung.arch[edge] != start[edge] for edge in EDGES[1:]) == rung.drift
        assert space.kept[space.row[rung.arch]]


@pytest.mark.parametrize("noise", ["pooled", "own"])
def test_evaluations_average_to_the_recorded_mean_and_are_reproducible(space, noise):
    proxy = TableProxy(space, "c10", seed=3, noise=noise)
    arch = space.random(random.Random(1))
    values = [proxy.evaluate(Request(arch, FULL, replicate)) for replicate in range(600)]
    spread = np.std(values) / len(values) ** 0.5
    assert abs(np.mean(values) - proxy.truth[space.row[arch]]) < 5 * spread + 1e-9
    assert values[:5] == [proxy.evaluate(Request(arch, FULL, replicate)) for replicate in range(5)]
    other = TableProxy(space, "c10", seed=4, noise=noise)
    assert values[:20] != [other.evaluate(Request(arch, FULL, replicate)) for replicate in range(20)]


def test_a_search_keeps_its_claim_by_the_recorded_means(space):
    proxy = TableProxy(space, "c100", seed=0)
    cost = TableCost(space, ["titan_rtx_256"])
    band = Band.around(cost(space.start()), 0.05)
    starts = starts_in_band(space, band, cost, 3, random.Random(0))
    near = IsoCost(space, band, cost, num=2)
    found = Search(space, Sampler(proxy, Journal()), known_sigma(proxy.sigma), SearchConfig(epsilon=2.0)).run(
        near, starts
    )

    def truth(arch):
        return proxy.truth[space.row[arch]]

    assert found.claim.as_asked
    assert band.holds(cost(found.arch))
    assert all(truth(arch) <= truth(found.arch) + found.claim.epsilon for arch in near.around(found.arch, EDGES).archs)


def test_short_trainings_thin_out_rivals_when_their_slack_is_the_true_one(space):
    proxy = TableProxy(space, "c100", seed=0)
    cost = TableCost(space, ["titan_rtx_256"])
    band = Band.around(cost(space.start()), 0.05)
    short = np.asarray(space.core["c100_val12"], dtype=np.float64)
    gap = (proxy.truth - short)[space.kept]
    slack = float(gap.max() - gap.min())  # no difference strays further than this between the fidelities
    low = Fidelity(SHORT, known_sigma(1e-6), price=12 / 200, slack=slack)
    sampler = Sampler(proxy, Journal(), prices={SHORT: 12 / 200})
    search = Search(space, sampler, known_sigma(proxy.sigma), SearchConfig(epsilon=2.0), fidelities=[low])
    found = search.run(IsoCost(space, band, cost), starts_in_band(space, band, cost, 1, random.Random(0)))
    assert found.claim.as_asked
    assert found.spent < sampler.num_evaluations


def test_parameters_and_devices_disagree_on_what_costs_the_same(space):
    cost = TableCost(space, ["params", "gold_6226"])
    costs = cost(space.start())
    assert set(costs) == {"params", "latency@gold_6226"}
    assert costs["params"].unit == "params"
