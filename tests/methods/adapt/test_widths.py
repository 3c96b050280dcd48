from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.methods.adapt.episodes import episode_features, logits
from apportion.methods.adapt.solve import solve
from apportion.methods.adapt.widths import SliceLoss, search_widths

EVEN = torch.full((4,), 0.25)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), rho=st.floats(0.3, 0.9))
def test_every_candidate_keeps_the_budget_the_depth_and_the_limits(tiny, seed, rho):
    family, clock = tiny.family(), tiny.clocks[0]
    budget_ms = rho * clock.whole_ms
    start = solve(family, EVEN, budget_ms, clock).sizes
    within = {name: max(size, start[name]) for name, size in solve(family, EVEN, clock.whole_ms, clock).sizes.items()}
    seen = []

    def loss(sizes):
        seen.append(dict(sizes))
        return float(np.random.default_rng(len(seen)).random())

    best, least, first = search_widths(clock, start, budget_ms, loss, 6, np.random.default_rng(seed), within)
    assert seen[0] == start
    assert len({tuple(sizes.values()) for sizes in seen}) == len(seen)
    assert least <= first
    assert best in seen
    blocks = [module.name for module in family.partition if module.blocks]
    for sizes in seen:
        assert clock.upper_ms(sizes) <= budget_ms
        assert all(sizes[name] == start[name] for name in blocks)
        assert all(size <= within[name] for name, size in sizes.items())


def test_the_search_finds_the_module_that_matters(tiny):
    family, clock = tiny.family(), tiny.clocks[0]
    budget_ms = 0.5 * clock.whole_ms
    start = solve(family, EVEN, budget_ms, clock).sizes
    (wanted, *_) = [module for module in family.partition if module.kind == "neurons"]
    best, least, first = search_widths(
        clock, start, budget_ms, lambda sizes: -float(sizes[wanted.name]), 40, np.random.default_rng(0)
    )
    assert -least == best[wanted.name] > -first


@torch.no_grad()
def test_the_loss_of_a_slice_is_that_of_its_episodes_by_the_masked_network(tiny):
    family, clock = tiny.family(), tiny.clocks[0]
    sizes = solve(family, EVEN, 0.5 * clock.whole_ms, clock).sizes
    drawn = [(tiny.pools[one.domain], one) for one in (tiny.sampler.episode(number) for number in range(3))]
    lost = []
    for pool, episode in drawn:
        feature_NF = episode_features(family, pool, episode, family.gates(EVEN), family.keep_of(sizes))
        label_Q = torch.from_numpy(episode.query.label_N)
        lost.append(float(torch.nn.functional.cross_entropy(logits(family, episode, feature_NF), label_Q)))
    assert SliceLoss(family, EVEN, drawn)(sizes) == pytest.approx(np.mean(lost), rel=1e-4)
