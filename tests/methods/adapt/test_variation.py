"""Variations change all images of an episode alike, and leave texts and the examples themselves as they are."""

from __future__ import annotations

import numpy as np
import torch

from apportion.methods.adapt.pool import Pool, read_pool
from apportion.methods.adapt.variation import varied, vary
from apportion.models.load import load
from apportion.models.network import read_out
from apportion.tasks.domain import Domain
from apportion.tasks.episode import Sampler, Shape


def drawn(seed, count=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 16, 16, generator=generator)


def test_every_image_is_changed_the_same_way():
    """What becomes of an image does not depend on its place among the others."""
    image_NCHW = drawn(0)
    for seed in range(30):
        together = vary(image_NCHW, torch.Generator().manual_seed(seed))
        order = torch.tensor([3, 1, 5, 0, 2, 4])
        again = vary(image_NCHW[order], torch.Generator().manual_seed(seed))
        torch.testing.assert_close(together[order], again)
        assert together.shape == image_NCHW.shape


def test_equal_images_stay_equal_and_others_apart():
    image_NCHW = drawn(1)
    image_NCHW[1] = image_NCHW[0]
    for seed in range(30):
        found = vary(image_NCHW, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(found[0], found[1])
        assert (found[0] - found[2]).abs().max() > 0.01


def test_variations_differ_and_stay_in_the_range_of_the_images():
    image_NCHW = drawn(2)
    found = [vary(image_NCHW, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert len({round(float((one - image_NCHW).abs().sum()), 3) for one in found}) > 10
    for one in found:
        assert image_NCHW.min() - 1e-5 <= one.min()
        assert one.max() <= image_NCHW.max() + 1e-5


def test_an_episode_keeps_its_labels_and_gets_features_of_what_it_shows():
    network = load("vit-64")
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (64, 64, 3), dtype=np.uint8) for _ in range(12)]
    domain = Domain(
        name="noise",
        kind="image",
        content=images,
        label_N=np.repeat(np.arange(3), 4),
        classes=("a", "b", "c"),
        licence="",
        provenance="",
        checksum="",
    )
    pool = read_pool(network, domain).on(network, "cpu")
    episode = Sampler((domain,), Shape(ways=3, shots=2, queries=1), seed=0).episode(0)
    changed, moved = varied(network, pool, episode, torch.Generator().manual_seed(3))
    assert moved.support.label_N.tolist() == episode.support.label_N.tolist()
    assert moved.query.label_N.tolist() == episode.query.label_N.tolist()
    before = np.concatenate([episode.support.row_N, episode.query.row_N])
    rows = np.concatenate([moved.support.row_N, moved.query.row_N])
    shown = changed.at(rows)["pixel_values"]
    plain = pool.at(before)["pixel_values"]
    torch.testing.assert_close(shown, vary(plain, torch.Generator().manual_seed(3)))
    assert (shown - plain).abs().max() > 0.1
    torch.testing.assert_close(changed.feature_NF, read_out(network, changed.at(rows)).float(), atol=1e-4, rtol=1e-4)
    assert pool.inputs["pixel_values"].shape[0] == 12


def test_texts_stay_as_they_are(tiny):
    sampler_episode = tiny.sampler.episode(0)
    pool = tiny.pools[sampler_episode.domain]
    assert isinstance(pool, Pool)
    assert varied(tiny.network, pool, sampler_episode, torch.Generator()) == (pool, sampler_episode)
