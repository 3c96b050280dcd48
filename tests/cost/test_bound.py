"""Upper bounds: coverage over many draws within five standard errors, for one configuration and for menus."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cost.bound import Spread, UpperBound, num_needed
from apportion.cost.sample import CostError

NUM_DRAWS = 2000


def draw(rng, shape):
    """Predictions, and latencies with a relative spread that grows as they shrink."""
    predicted = rng.uniform(1.0, 20.0, shape)
    return predicted, predicted * np.exp((0.02 + 0.2 / predicted) * rng.standard_normal(shape))


def close(rate, expected):
    return abs(rate - expected) <= 5 * math.sqrt(expected * (1 - expected) / NUM_DRAWS)


@pytest.mark.parametrize("spread", [None, Spread(0.02, 0.2)])
def test_split_conformal_covers_at_its_rate(spread):
    rng = np.random.default_rng(0)
    predicted, latency = draw(rng, (NUM_DRAWS, 60))
    held = 0
    for p, y in zip(predicted, latency, strict=True):
        bound = UpperBound.fit(p[:-1].tolist(), y[:-1].tolist(), alpha=0.1, spread=spread)
        held += y[-1] <= bound(p[-1])
    assert close(held / NUM_DRAWS, 54 / 60)  # ceil(60 * 0.9) / 60, exact for distinct scores


def test_a_regime_covers_by_itself_where_the_pooled_bound_does_not():
    rng = np.random.default_rng(1)
    predicted, latency = draw(rng, (NUM_DRAWS, 80))
    edges, held, small = (5.0,), [0, 0], 0
    for p, y in zip(predicted, latency, strict=True):
        if p[-1] >= 5.0:
            continue
        small += 1
        for place, regime in enumerate(((), edges)):
            bound = UpperBound.fit(p[:-1].tolist(), y[:-1].tolist(), alpha=0.1, edges_ms=regime)
            held[place] += y[-1] <= bound(p[-1])
    pooled, mondrian = held[0] / small, held[1] / small
    assert pooled < 0.85  # short latencies are the noisy ones
    assert mondrian >= 0.9 - 5 * math.sqrt(0.09 / small)


@pytest.mark.parametrize("method", ["exchangeable", "union"])
def test_a_menu_is_covered_all_at_once(method):
    rng = np.random.default_rng(2)
    predicted, latency = draw(rng, (NUM_DRAWS, 105))
    held = 0
    for p, y in zip(predicted, latency, strict=True):
        bound = UpperBound.fit(p[:-5].tolist(), y[:-5].tolist(), alpha=0.1, num_menu=5, method=method)
        held += all(y[i] <= bound(p[i]) for i in range(100, 105))
    assert held / NUM_DRAWS >= 0.9 - 5 * math.sqrt(0.09 / NUM_DRAWS)


def test_max_score_covers_menus_whose_members_share_their_noise():
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(NUM_DRAWS):
        predicted = rng.uniform(1.0, 20.0, (20, 4))
        shared = rng.standard_normal((20, 1)) + 0.3 * rng.standard_normal((20, 4))
        latency = predicted * np.exp(0.05 * shared)
        rows = [list(zip(p, y, strict=True)) for p, y in zip(predicted.tolist(), latency.tolist(), strict=True)]
        bound = UpperBound.fit_menus(rows[:-1], alpha=0.1)
        held += all(y <= bound(p) for p, y in rows[-1])
    assert close(held / NUM_DRAWS, 18 / 20)


def test_a_local_spread_is_tighter_at_the_same_coverage():
    rng = np.random.default_rng(4)
    p, y = (part.tolist() for part in draw(rng, 2000))
    plain = UpperBound.fit(p[:1000], y[:1000])
    local = UpperBound.fit(p[:1000], y[:1000], spread=Spread.fit(p[1000:], y[1000:]))
    assert np.mean([local(one) / one for one in p]) < np.mean([plain(one) / one for one in p])


@pytest.mark.parametrize(("num_menu", "method"), [(1, "single"), (4, "union"), (4, "exchangeable")])
def test_too_few_samples_give_no_bound_and_say_how_many_it_takes(num_menu, method):
    needed = num_needed(0.05, num_menu, method)
    ones = [1.0] * needed
    enough = UpperBound.fit(ones, ones, 0.05, num_menu=num_menu, method=method)
    short = UpperBound.fit(ones[1:], ones[1:], 0.05, num_menu=num_menu, method=method)
    assert enough.finite
    assert enough(2.0) == 2.0
    assert not short.finite
    assert short(2.0) == math.inf
    assert f"it takes {needed}" in short.explain()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 20.0), st.floats(0.5, 20.0)), min_size=1, max_size=40))
def test_json_keeps_a_bound(rows):
    bound = UpperBound.fit(*zip(*rows, strict=True), 0.1, spread=Spread(0.1, 0.2), edges_ms=(3.0, 6.0))
    text = json.dumps(bound.to_json(), allow_nan=False)
    assert UpperBound.from_json(json.loads(text)) == bound


def test_nonsense_is_refused():
    with pytest.raises(CostError, match="alpha is"):
        UpperBound.fit([1.0], [1.0], alpha=0.0)
    with pytest.raises(CostError, match="union, exchangeable or menus"):
        UpperBound.fit([1.0], [1.0], num_menu=3, method="single")
    with pytest.raises(CostError, match="one size"):
        UpperBound.fit_menus([[(1.0, 1.0)], []])


def test_mapie_agrees_on_the_quantile():
    mapie = pytest.importorskip("mapie.regression")
    from sklearn.dummy import DummyRegressor

    rng = np.random.default_rng(5)
    latency = np.exp(0.1 * rng.standard_normal(99))
    constant = DummyRegressor(strategy="constant", constant=1.0).fit(np.zeros((1, 1)), [1.0])
    oracle = mapie.SplitConformalRegressor(constant, confidence_level=0.8, prefit=True)
    oracle.conformalize(np.zeros((99, 1)), latency)
    width = oracle.predict_interval(np.zeros((1, 1)))[1][0, 1, 0] - 1.0
    # symmetric absolute scores: fold ours the same way
    ours = UpperBound.fit([1.0] * 99, (1 + np.abs(latency - 1)).tolist(), alpha=0.2)
    assert ours(1.0) - 1.0 == pytest.approx(width)


def test_a_bound_allows_for_what_whole_sessions_share():
    rng, num, drift = np.random.default_rng(4), 1500, 0.03
    held = {0.0: 0, drift: 0}
    for _ in range(num):
        predicted = rng.uniform(1.0, 10.0, 30)
        latency = predicted * np.exp(0.005 * rng.standard_normal(30))
        shared = np.exp(drift * rng.standard_normal(2))  # of the session that calibrates, and of the one to come
        for allowed in held:
            calibrated = (latency[:-1] * shared[0]).tolist()
            bound = UpperBound.fit(predicted[:-1].tolist(), calibrated, alpha=0.05, drift=allowed)
            held[allowed] += latency[-1] * shared[1] <= bound(predicted[-1])
    assert held[0.0] / num < 0.75
    assert 0.95 <= held[drift] / num < 0.99


def test_the_drift_of_a_bound_is_kept_in_its_file():
    bound = UpperBound.fit([1.0] * 20, [1.1] * 20, drift=0.02)
    assert UpperBound.from_json(bound.to_json()) == bound
    assert bound(1.0) == pytest.approx(1.1 * (1 + 1.6449 * 2**0.5 * 0.02), rel=1e-4)
    old = {name: value for name, value in bound.to_json().items() if name != "drift"}
    assert UpperBound.from_json(old).drift == 0.0
    with pytest.raises(CostError, match="drift"):
        UpperBound.fit([1.0] * 20, [1.1] * 20, drift=-0.1)
