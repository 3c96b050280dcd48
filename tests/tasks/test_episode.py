"""Episodes: the shape asked for, nothing on both sides, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tasks.conftest import made_domain

from apportion.errors import DataError
from apportion.tasks.episode import Sampler, Shape

counts = st.lists(st.integers(4, 300), min_size=5, max_size=12)
ranges = st.tuples(st.integers(1, 3), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=60, deadline=None)
@given(counts, ranges, st.integers(1, 3), st.floats(1, 8), st.integers(0, 2**40), st.integers(0, 2**40))
def test_an_episode_keeps_to_its_shape(sizes, shots, queries, imbalance, seed, number):
    domain = made_domain(sizes)
    shape = Shape(ways=(2, 5), shots=shots, queries=(1, queries), imbalance=imbalance)
    episode = Sampler(domain, shape, seed=seed).episode(number)
    assert 2 <= episode.ways <= 5
    assert len(set(episode.class_W.tolist())) == episode.ways
    rows = np.concatenate([episode.support.row_N, episode.query.row_N])
    assert len(set(rows.tolist())) == len(rows)  # no row twice, so none on both sides
    for part in (episode.support, episode.query):
        assert np.array_equal(domain.label_N[part.row_N], episode.class_W[part.label_N])
    shots_W = np.bincount(episode.support.label_N, minlength=episode.ways)
    queries_W = np.bincount(episode.query.label_N, minlength=episode.ways)
    assert shots_W.min() >= 1
    assert shots_W.max() <= shots[1]
    assert len(set(queries_W.tolist())) == 1
    assert 1 <= queries_W[0] <= queries
    if imbalance == 1:
        assert shots_W.min() == shots_W.max() >= min(shots[0], min(sizes) - 1)


def test_imbalance_falls_geometrically():
    sampler = Sampler(made_domain([100] * 5), Shape(ways=5, shots=16, queries=4, imbalance=16))
    assert np.bincount(sampler.episode(3).support.label_N).tolist() == [16, 8, 4, 2, 1]


def test_the_support_can_be_bounded():
    sampler = Sampler(made_domain([100] * 5), Shape(ways=5, shots=10, max_support=23))
    shots = np.bincount(sampler.episode(0).support.label_N)
    assert shots.sum() == 23
    assert shots.max() - shots.min() <= 1


def test_domains_take_turns():
    domains = [made_domain([30] * size, name) for name, size in {"small": 5, "large": 40, "third": 6}.items()]
    drawn = [episode.domain for episode in Sampler(domains, Shape(), seed=2).episodes(300)]
    assert {name: drawn.count(name) for name in set(drawn)} == {"small": 100, "large": 100, "third": 100}
    assert drawn[:3] != drawn[3:6] or drawn[3:6] != drawn[6:9]  # in an order of their own every time


def test_every_class_and_row_is_drawn_equally_often():
    sampler = Sampler(made_domain([20] * 10), Shape(ways=2, shots=1, queries=1), seed=5)
    num = 4000
    rows = np.concatenate([episode.support.row_N for episode in sampler.episodes(num)])
    expected = num * 2 / 200
    # a row is in an episode's support with chance 1/100, so counts are binomial
    assert np.abs(np.bincount(rows, minlength=200) - expected).max() < 5 * np.sqrt(expected)


def test_seeds_and_numbers_give_different_episodes():
    domain = made_domain([50] * 20)
    digests = {Sampler(domain, Shape(), seed=seed).episode(n).digest() for seed in range(20) for n in range(20)}
    assert len(digests) == 400


SCRIPT = """
from apportion.tasks.episode import Sampler, Shape
from tests.tasks.conftest import made_domain
domains = [made_domain([40] * 8, name) for name in ("one", "two")]
for number in (0, 7, 123456789):
    print(Sampler(domains, Shape(ways=(3, 6), shots=(1, 5)), seed=11).episode(number).digest())
"""


def test_the_same_seed_gives_the_same_episodes_in_two_processes():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=os.getcwd(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().split() == [  # and the same as when this was written
        "44bff096ae180902e633d2d0ae239e71ec168e592ccbd76052032aa9c06c671c",
        "10d97114254235ff1bc1e0e5ca5424619166ece9709fd248f7b772b1ff225e31",
        "33727f69cba60d16f8644bd2485eecbf340f4fa70623d34874b166a0711c107f",
    ]


def test_a_class_with_too_few_examples_is_left_out_or_refused():
    sampler = Sampler(made_domain([30, 30, 3, 30]), Shape(ways=2))
    assert sampler.left_out == {"made": ("c2",)}
    assert all(2 not in episode.class_W for episode in sampler.episodes(50))
    with pytest.raises(DataError, match=r"3 classes of at least 20 examples, 4 are needed \(class 'c2' has 3\)"):
        Sampler(made_domain([30, 30, 3, 30]), Shape(ways=4))


@pytest.mark.parametrize(
    "fields", [{"ways": 1}, {"shots": 0}, {"queries": (3, 2)}, {"imbalance": 0.5}, {"ways": 5, "max_support": 4}]
)
def test_impossible_shapes_are_refused(fields):
    with pytest.raises(DataError):
        Shape(**fields)
