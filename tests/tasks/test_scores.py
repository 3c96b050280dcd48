"""Features and scores: rows in order, whatever the batch; intervals that hold; real texts told apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tasks.conftest import made_domain
from torch import nn

from apportion.core.meter import Reading
from apportion.errors import DataError
from apportion.models.load import load
from apportion.models.network import Network, Origin
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.features import Features, features, image_inputs, network_digest, tokenise
from apportion.tasks.heads import HEADS
from apportion.tasks.scores import EpisodeAccuracy, Scores, score_episodes


class Colours(nn.Module):
    """Mean colour of an image, counting its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.num_images = 0

    def forward(self, pixel_values):
        self.num_images += len(pixel_values)
        return pixel_values.mean((2, 3)) * self.scale + 2


def colour_network() -> Network:
    return Network(
        module=Colours(),
        inputs={"pixel_values": torch.zeros(1, 3, 16, 16)},
        origin=Origin(ref="colours"),
        readout="embedding",
    )


def coloured_domain(noise=60, per_class=30):
    rng = np.random.default_rng(0)
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [0, 255, 255], [255, 0, 255]])
    images = tuple(
        np.clip(colour + rng.normal(0, noise, 3) + rng.normal(0, 9, (10, 14, 3)), 0, 255).astype(np.uint8)
        for colour in colours
        for _ in range(per_class)
    )
    return made_domain([per_class] * 6, "colours", "image", images)


@pytest.mark.usefixtures("pillow")
def test_features_are_those_of_the_rows_whatever_the_batch(monkeypatch, tmp_path):
    network, domain = colour_network(), coloured_domain()
    rows = np.array([70, 3, 3, 111])
    whole = features(network, domain, batch=32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    some = features(network, domain, rows, batch=2)
    assert some.row_N.tolist() == [3, 70, 111]
    torch.testing.assert_close(some.at(rows), whole.at(rows))
    torch.testing.assert_close(whole.at(rows).norm(dim=1), torch.ones(4))
    with pytest.raises(DataError, match="not computed"):
        some.at(np.array([5]))


@pytest.mark.usefixtures("pillow")
def test_features_are_computed_once_until_weights_change():
    network, domain = colour_network(), coloured_domain()
    features(network, domain)
    features(network, domain)
    assert network.module.num_images == len(domain)
    before = network_digest(network)
    with torch.no_grad():
        network.module.scale[0] = 2.0
    assert network_digest(network) != before
    features(network, domain)
    assert network.module.num_images == 2 * len(domain)


@pytest.mark.usefixtures("pillow")
def test_images_are_scaled_as_the_model_says(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        '{"rescale_factor": 1.0, "image_mean": [127, 127, 127], "image_std": [128, 128, 128]}'
    )
    network = colour_network().replace(origin=Origin(ref="x", folder=tmp_path))
    white = np.full((5, 9, 3), 255, dtype=np.uint8)
    pixels = image_inputs(network, [white])["pixel_values"]
    assert pixels.shape == (1, 3, 16, 16)
    assert torch.equal(pixels, torch.ones_like(pixels))


@pytest.mark.usefixtures("pillow")
def test_images_are_stretched_to_the_height_and_the_width_of_the_model(tmp_path):
    network = colour_network().replace(
        inputs={"pixel_values": torch.zeros(1, 3, 24, 40)}, origin=Origin(ref="x", folder=tmp_path)
    )
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    image[:, 4:] = 255  # the right half
    pixels = image_inputs(network, [image])["pixel_values"]
    assert pixels.shape == (1, 3, 24, 40)
    assert (pixels[..., 30:] > 0.9).all()
    assert (pixels[..., :10] < -0.9).all()


def test_texts_are_not_given_to_an_image_model():
    with pytest.raises(DataError, match="holds texts, which colours does not take"):
        features(colour_network(), made_domain([3, 3]))


@pytest.mark.usefixtures("pillow")
def test_a_meter_reads_few_shot_accuracy():
    network, domain = colour_network(), coloured_domain()
    episodes = list(Sampler(domain, Shape(shots=5, queries=10)).episodes(30))
    meter = EpisodeAccuracy([domain], episodes)
    reading = meter.read(network)
    assert reading.count == 30
    assert reading.value > 0.85
    with torch.no_grad():
        network.module.scale[:] = 0.0  # every feature the same
    assert abs(meter.read(network).value - 0.2) < 0.05


def test_random_features_give_chance_and_the_interval_covers_it():
    domain = made_domain([60] * 10)
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(20):
        table = {"made": Features(np.arange(600), rng.normal(size=(600, 8)).astype(np.float32))}
        episodes = Sampler(domain, Shape(ways=5, shots=5), seed=trial).episodes(60)
        scores = score_episodes(episodes, table, HEADS["prototype"])
        covered += abs(scores.reading().value - 0.2) <= scores.half_width()
    # each 95 % interval covers with chance 0.95 or a little less, as episodes share rows; 13 of 20 is 5 errors off
    assert covered >= 13


def test_summaries_are_what_they_say():
    accuracy_E = np.array([0.2, 0.4, 0.6, 0.8])
    scores = Scores(accuracy_E, ("a", "b", "a", "b"), np.array([0.9, 0.9]), np.array([True, False]))
    assert scores.reading() == Reading(value=0.5, unit="ratio", stderr=float(accuracy_E.std(ddof=1) / 2), count=4)
    assert scores.tail(0.5) == pytest.approx(0.3)
    assert scores.tail(0.0) == pytest.approx(0.5)
    assert scores.calibration() == pytest.approx(0.4)
    assert {name: reading.value for name, reading in scores.by_domain().items()} == {
        "a": pytest.approx(0.4),
        "b": pytest.approx(0.6),
    }
    assert "| a | 2 | 40.0 ±" in scores.table()


def test_no_episodes_are_refused():
    with pytest.raises(DataError, match="no episodes"):
        score_episodes([], {}, HEADS["prototype"])


@pytest.mark.usefixtures("minilm_installed")
def test_minilm_tells_topics_apart():
    network, domain = load("minilm"), load_domain("chatterbot")
    sampler = Sampler(domain, Shape(ways=5, shots=5, queries=5), seed=0)
    episodes = list(sampler.episodes(10))
    rows = np.unique(np.concatenate([part.row_N for e in episodes for part in (e.support, e.query)]))
    table = {domain.name: features(network, domain, rows)}
    assert score_episodes(episodes, table, HEADS["prototype"]).reading().value > 0.6  # chance is 0.2
    tokens = tokenise(network, domain)
    assert len(tokens) == len(domain)
    assert tokens[0][0] == 101  # [CLS]
    assert tokens[0][-1] == 102  # [SEP]
