"""Published splits row by row."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from apportion.errors import DataError
from apportion.tasks.domain import data_root
from apportion.tasks.fixed import fixed_split, omniglot_sampler

pytestmark = pytest.mark.usefixtures("data")


@pytest.mark.parametrize(("name", "classes", "test"), [("banking77", 77, 3080), ("clinc150", 150, 4500)])
@pytest.mark.parametrize("shots", [5, 10])
def test_the_support_and_test_rows_are_those_of_the_file(name, classes, test, shots):
    split = fixed_split(name, shots)
    episode, domain = split.episode, split.domain
    assert np.bincount(episode.support.label_N).tolist() == [shots] * classes
    with gzip.open(data_root() / f"text/{name}.tsv.gz", "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    for part, wanted in ((episode.support, f"train_{shots}"), (episode.query, "test")):
        ours = [
            (domain.classes[label], domain.content[row]) for row, label in zip(part.row_N, part.label_N, strict=True)
        ]
        assert ours == [(label, text) for source, label, text in rows if source == wanted]
    assert len(episode.query) == test


def test_omniglot_episodes_are_of_the_published_test_classes():
    sampler = omniglot_sampler(ways=20, shots=1, seed=3)
    published = set((data_root() / "vision/omniglot_vinyals_test.txt").read_text().split())
    episode = sampler.episode(0)
    assert {sampler.domains[0].classes[place] for place in episode.class_W} <= published
    assert len(episode.support) == 20
    assert len(sampler.domains[0].classes) == len(published) == 1692


def test_splits_that_were_not_published_are_refused():
    with pytest.raises(DataError, match="no fixed split 'snips'"):
        fixed_split("snips", 5)
    with pytest.raises(DataError, match="7-way 1-shot was not published"):
        omniglot_sampler(ways=7, shots=1)
