"""Leakage: a planted duplicate is found, exact or nearly so, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tasks.conftest import made_domain

from apportion.errors import DataError
from apportion.tasks.domains import load_domain
from apportion.tasks.leakage import Judged, Texts, jaccard, shingles
from apportion.tasks.protocol import PROTOCOLS, Protocol, Selection, load_protocol, read_protocol

texts = st.lists(st.text("abc d", min_size=0, max_size=14), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(texts, st.text("abc d", max_size=14), st.sampled_from([0.3, 0.5, 0.8, 1.0]))
def test_the_prefix_filter_finds_what_comparing_all_pairs_finds(pool, text, near):
    likeness = [jaccard(shingles(text), shingles(other)) for other in pool]
    best = max(likeness)
    expected = (likeness.index(best), best) if best >= near else None
    assert Texts(pool, near=near).nearest(text) == expected


SENTENCES = (
    "how do i change the oil of my car",
    "what is the weather like in tampa today",
    "please book me a table for two at eight",
    "my card was declined at the petrol station",
)


@pytest.mark.parametrize(
    "planted",
    [
        "my card was declined at the petrol station",
        "My card was declined, at the petrol station!",
        "my card was declined at the petrol stations",
    ],
)
def test_a_planted_duplicate_is_caught(planted):
    judged = Judged([made_domain([2, 2], "judged", content=SENTENCES)])
    train = made_domain([1, 2], "train", content=("turn on the light", planted, "play some jazz"))
    (leak,) = judged.leaks(train)
    assert (leak.row, leak.other, leak.other_row) == (1, "judged", 3)
    with pytest.raises(DataError, match=r"1 examples of train are also judged \(in judged\)"):
        judged.refuse(train)
    clean, num_dropped = judged.without(train)
    assert num_dropped == 1
    assert list(clean.content) == ["turn on the light", "play some jazz"]


def test_different_texts_on_one_subject_are_no_leak():
    judged = Judged([made_domain([2, 2], "judged", content=SENTENCES)])
    judged.refuse(made_domain([1, 1], "train", content=("my card was swallowed by a machine", "the weather in oslo")))


def test_a_planted_image_is_caught_by_its_pixels():
    rng = np.random.default_rng(0)
    images = tuple(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(6))
    judged = Judged([made_domain([1, 2], "judged", "image", images[:3])])
    judged.refuse(made_domain([1, 1], "train", "image", images[3:5]))
    assert [leak.row for leak in judged.leaks(made_domain([1, 1], "train", "image", (images[5], images[1])))] == [1]


def test_a_protocol_drops_or_refuses_what_is_judged():
    domains = {
        "train": made_domain([2, 2], "train", content=(*SENTENCES[:3], "sing a song")),
        "far": made_domain([1, 1], "far", content=("entirely other words", SENTENCES[0].upper())),
    }
    whole = {name: (Selection(domain=name),) for name in domains}
    protocol = Protocol(name="p", train=whole["train"], id=(), ood=whole["far"])
    loaded = load_protocol(protocol, domains.__getitem__)
    assert loaded.num_dropped == {"train": 1}
    assert len(loaded.train[0]) == 3
    with pytest.raises(DataError, match="also judged"):
        load_protocol(protocol, domains.__getitem__, on_leak="refuse")


@pytest.mark.usefixtures("data")
def test_the_built_in_text_protocol_ends_without_leaks():
    protocol = PROTOCOLS["text"]
    small = Protocol(name="small", train=protocol.train[:1], id=protocol.id[:1], ood=protocol.ood[:2])
    loaded = load_protocol(small, load_domain)
    assert loaded.num_dropped["clinc150/banking"] > 0  # CLINC150 repeats itself between train and test
    judged = Judged((*loaded.id, *loaded.ood))
    assert judged.leaks(loaded.train[0]) == []


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_built_in_protocols_name_domains_that_exist(name):
    from apportion.tasks.domains import BUILT_IN

    protocol = PROTOCOLS[name]
    assert {part.domain for part in (*protocol.train, *protocol.id, *protocol.ood)} <= set(BUILT_IN)


def test_a_protocol_can_be_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[[train]]\ndomain = "snips"\nsplits = ["train"]\n[[ood]]\ndomain = "trec"\n')
    protocol = read_protocol(path)
    assert protocol.train == (Selection(domain="snips", splits=("train",)),)
    assert protocol.ood == (Selection(domain="trec"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 1 2", "can't be read"),
        ("[[train]]\nname = 'x'\n[[ood]]\ndomain='y'", "can't be read"),
        ("[[train]]\ndomain = 'x'\n[[ood]]\ndomain='x'", "also judges as OOD"),
        ("[[train]]\ndomain = 'x'", "one to judge on"),
    ],
)
def test_bad_protocols_are_refused(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_protocol(path)
