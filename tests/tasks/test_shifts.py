"""Shifts change what they say and nothing else, more with every severity, and the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tasks.conftest import made_domain

from apportion.errors import DataError
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.shifts import Mixture, corrupt, corruptions, cue_episode, label_noise, label_shift, with_cues
from apportion.tasks.shifts.spurious import cues_of

seeds = st.integers(0, 2**32 - 1)
EPISODE = Sampler(made_domain([40] * 8), Shape(ways=5, shots=5, queries=15)).episode(0)


@settings(deadline=None)
@given(seeds, st.floats(0.01, 100))
def test_label_shift_leaves_out_queries_and_touches_nothing_else(seed, concentration):
    shifted = label_shift(EPISODE, np.random.default_rng(seed), concentration=concentration)
    assert shifted.support is EPISODE.support
    before = set(zip(EPISODE.query.row_N.tolist(), EPISODE.query.label_N.tolist(), strict=True))
    after = list(zip(shifted.query.row_N.tolist(), shifted.query.label_N.tolist(), strict=True))
    assert set(after) <= before
    assert len(set(after)) == len(after)
    assert np.bincount(shifted.query.label_N).max() == 15  # the largest class keeps all


def test_label_shift_follows_the_law_it_names():
    rng = np.random.default_rng(0)
    shares = [np.bincount(label_shift(EPISODE, rng, concentration=1e6).query.label_N, minlength=5) for _ in range(5)]
    assert min(map(min, shares)) >= 14  # nearly balanced
    narrow = [len(set(label_shift(EPISODE, rng, concentration=0.05).query.label_N.tolist())) for _ in range(40)]
    assert np.mean(narrow) < 3


@settings(deadline=None)
@given(seeds, st.floats(0, 0.6))
def test_label_noise_is_of_the_size_asked_for(seed, ratio):
    noisy = label_noise(EPISODE, np.random.default_rng(seed), ratio=ratio)
    assert np.array_equal(noisy.support.row_N, EPISODE.support.row_N)
    assert noisy.query is EPISODE.query
    assert (noisy.support.label_N != EPISODE.support.label_N).sum() == round(ratio * 25)
    assert np.bincount(noisy.support.label_N, minlength=5).min() >= 1


def test_label_noise_never_empties_a_class():
    one_shot = Sampler(made_domain([40] * 8), Shape(ways=5, shots=1)).episode(0)
    noisy = label_noise(one_shot, np.random.default_rng(0), ratio=1.0)
    assert np.bincount(noisy.support.label_N, minlength=5).min() >= 1


def photographs():
    rng = np.random.default_rng(1)
    rough = rng.normal(0, 3, (12, 32, 32, 1))
    smooth = np.repeat(np.cumsum(np.cumsum(rough, axis=1), axis=2), 3, axis=3) + 128
    images = tuple(np.clip(image, 0, 255).astype(np.uint8) for image in smooth)
    return made_domain([6, 6], "photographs", "image", images)


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize("name", corruptions("image"))
def test_images_suffer_more_with_every_severity(name):
    domain = photographs()
    damage = []
    for severity in range(1, 6):
        changed = corrupt(domain, name, severity, seed=3)
        assert changed.content[0].shape == domain.content[0].shape
        assert changed.content[0].dtype == np.uint8
        assert np.array_equal(changed.content[4], corrupt(domain, name, severity, seed=3).content[4])
        damage.append(
            np.mean([np.abs(changed.content[r].astype(float) - domain.content[r]).mean() for r in range(len(domain))])
        )
    assert damage == sorted(damage)
    assert damage[0] > 0
    assert damage[4] > 1.5 * damage[0]


def distance(one: str, other: str) -> int:
    """Levenshtein's, by the book."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row, last = [i], row
        for j, b in enumerate(other, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b)))
    return row[-1]


@pytest.mark.parametrize("name", corruptions("text"))
def test_texts_suffer_more_with_every_severity(name):
    texts = tuple(f"please tell me what the weather is like on day {n} of the holiday" for n in range(30))
    domain = made_domain([15, 15], "texts", content=texts)
    damage = []
    for severity in range(1, 6):
        changed = corrupt(domain, name, severity, seed=3)
        assert list(changed.content) == list(corrupt(domain, name, severity, seed=3).content)
        damage.append(sum(distance(a, b) for a, b in zip(domain.content, changed.content, strict=True)))
    assert damage == sorted(damage)
    assert damage[4] > 2 * damage[0] > 0
    assert corrupt(domain, name, 5, seed=3).checksum != corrupt(domain, name, 5, seed=4).checksum


@given(st.text(max_size=40), seeds, st.sampled_from(corruptions("text")), st.integers(1, 5))
def test_any_text_can_be_corrupted(text, seed, name, severity):
    domain = made_domain([1, 1], "texts", content=(text, "b"))
    assert isinstance(corrupt(domain, name, severity, seed=seed).content[0], str)


def test_unknown_corruptions_and_severities_are_refused():
    with pytest.raises(DataError, match="no corruption 'blur' of texts"):
        corrupt(made_domain([2, 2]), "blur", 1)
    with pytest.raises(DataError, match="severity 6"):
        corrupt(made_domain([2, 2]), "typos", 6)


@settings(deadline=None)
@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_cues_go_with_the_class_as_often_as_asked(seed, support_ratio, query_ratio):
    shifted = cue_episode(
        EPISODE, np.random.default_rng(seed), num_cues=5, support_ratio=support_ratio, query_ratio=query_ratio
    )
    for part, original, ratio in (
        (shifted.support, EPISODE.support, support_ratio),
        (shifted.query, EPISODE.query, query_ratio),
    ):
        assert np.array_equal(part.row_N // 5, original.row_N)
        assert (cues_of(part.row_N, 5) == part.label_N).sum() == round(ratio * len(part))


def test_cues_can_be_seen():
    plain = photographs()
    domain = with_cues(plain, 3)
    assert len(domain) == 36
    assert domain.label_N[3 * 7 + 2] == plain.label_N[7]
    corners = {tuple(domain.content[3 * 7 + cue][0, 0]) for cue in range(3)}
    assert len(corners) == 3
    assert np.array_equal(domain.content[22][10:, 10:], plain.content[7][10:, 10:])
    assert len({with_cues(made_domain([2, 2]), 3).content[row] for row in range(3)}) == 3


def test_a_head_that_reads_the_cue_is_fooled_by_it():
    import torch

    from apportion.tasks.features import Features
    from apportion.tasks.heads import HEADS
    from apportion.tasks.scores import score_episodes

    rng = np.random.default_rng(0)
    domain = with_cues(made_domain([40] * 8), 5)
    signal = np.eye(8)[domain.label_N] + 0.5 * rng.normal(size=(len(domain), 8))
    cue = np.eye(5)[np.arange(len(domain)) % 5]
    feature_ND = np.concatenate([signal, 3 * cue], axis=1).astype(np.float32)
    table = {"made+cues": Features(np.arange(len(domain)), feature_ND)}
    sampler = Sampler(made_domain([40] * 8), Shape())
    torch.manual_seed(0)

    def accuracy(support_ratio):
        episodes = [
            cue_episode(episode, np.random.default_rng(n), num_cues=5, support_ratio=support_ratio)
            for n, episode in enumerate(sampler.episodes(20))
        ]
        return score_episodes(episodes, table, HEADS["prototype"]).reading().value

    assert accuracy(1.0) < accuracy(0.2) - 0.2


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**40), st.floats(0, 1))
def test_a_mixture_holds_the_share_it_names(seed, gamma):
    inside = Sampler(made_domain([30] * 5, "in"), Shape(), seed=1)
    outside = Sampler(made_domain([30] * 5, "out"), Shape(), seed=1)
    mixture = Mixture(inside, outside, gamma=gamma, seed=seed)
    drawn = np.array([mixture.is_outside(number) for number in range(400)])
    assert abs(drawn.mean() - gamma) <= 5 * np.sqrt(gamma * (1 - gamma) / 400) + 1e-9
    more = Mixture(inside, outside, gamma=(1 + gamma) / 2, seed=seed)
    assert all(more.is_outside(number) for number in np.flatnonzero(drawn))
    assert mixture.episode(7).domain == ("out" if drawn[7] else "in")


def test_a_mixture_refuses_no_share():
    sampler = Sampler(made_domain([30] * 5), Shape())
    with pytest.raises(DataError, match=r"gamma 1.5 is no share"):
        Mixture(sampler, sampler, gamma=1.5)
