"""Retrieval: average precisions that can be counted by hand, scikit-learn's, and the jackknife done the long way."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import nn

from apportion.errors import DataError
from apportion.models.network import Network, Origin
from apportion.tasks.batches import Examples
from apportion.tasks.quality import quality_meter
from apportion.tasks.retrieval import Retrieval, average_precisions


def network_of(readout="embedding"):
    return Network(module=nn.Identity(), inputs={"0": torch.zeros(1, 2)}, origin=Origin(ref="x"), readout=readout)


def at(*degrees):
    """Points on the circle, where the nearest by cosine is the nearest by angle."""
    angle_N = torch.tensor(degrees, dtype=torch.float32).deg2rad()
    return torch.stack([angle_N.cos(), angle_N.sin()], 1)


def meter_over(point_ND, label_N):
    examples = Examples(tuple({"0": part} for part in point_ND.split(3)), "points", torch.as_tensor(label_N))
    return Retrieval(network_of(), examples)


def test_an_average_precision_by_hand():
    precision_N, without_NK = average_precisions(torch.tensor([[True, False, True], [False, False, True]]))
    assert precision_N.tolist() == pytest.approx([(1 + 2 / 3) / 2, 1 / 3])
    assert without_NK[0].tolist() == pytest.approx([1 / 2, 1.0, 1.0])
    assert without_NK[1, :2].tolist() == pytest.approx([1 / 2, 1 / 2])
    assert without_NK[1, 2].isnan()  # nothing relevant is left


def test_classes_that_lie_apart_are_found_wholly_and_mixed_ones_as_counted():
    apart = meter_over(at(0, 10, 20, 90, 100, 110), [0, 0, 0, 1, 1, 1])
    assert apart.read(network_of()).value == 1.0
    # 0 meets 1 first, then 0; 10 meets 0 (or 20: they are as near), both of the other class or its own by the side
    mixed = meter_over(at(0, 9, 20), [0, 1, 0])
    reading = mixed.read(network_of())
    assert reading.value == pytest.approx(0.5)  # both askers find their fellow second; the third asks nothing
    assert reading.count == 2


def test_it_is_scikit_learns_and_the_error_is_the_jackknifes_done_one_by_one(generator):
    point_ND, label_N = torch.randn(30, 5, generator=generator), torch.arange(30) % 4
    point_ND[:, 0] += label_N == 1

    def value(rows):
        feature_ND = nn.functional.normalize(point_ND[rows].double(), dim=-1)
        scores = []
        for place in range(len(rows)):
            others = [other for other in range(len(rows)) if other != place]
            relevant = (label_N[rows][others] == label_N[rows][place]).numpy()
            scores.append(average_precision_score(relevant, (feature_ND[others] @ feature_ND[place]).numpy()))
        return sum(scores) / len(scores)

    everything = list(range(30))
    reading = meter_over(point_ND, label_N).score(point_ND, "embedding")
    assert reading.value == pytest.approx(value(everything))
    left = [value([row for row in everything if row != gone]) for gone in everything]
    mean = sum(left) / 30
    assert reading.stderr == pytest.approx(math.sqrt(29 / 30 * sum((one - mean) ** 2 for one in left)))
    assert reading.count == 30


def test_lengths_do_not_matter_and_answers_score_as_the_network_reads(generator):
    point_ND = torch.randn(20, 2, generator=generator)
    meter = meter_over(nn.functional.normalize(point_ND, dim=-1), torch.arange(20) % 3)
    assert meter.read(network_of()) == meter.score(nn.functional.normalize(point_ND, dim=-1), "embedding")
    stretched = point_ND * torch.rand(20, 1, generator=generator).add(0.5)
    assert meter.score(stretched, "logits").value == pytest.approx(meter.read(network_of()).value)


def test_what_can_not_be_retrieved_is_refused():
    alone = Examples(({"0": at(0, 90, 180)},), "points", torch.arange(3))
    with pytest.raises(DataError, match="no class has two"):
        quality_meter(network_of(), alone, alone, "retrieval")
    bare = Examples(alone.batches, "points")
    with pytest.raises(DataError, match="retrieval needs labels"):
        quality_meter(network_of(), bare, bare, "retrieval")
    with pytest.raises(DataError, match="likelihood"):
        quality_meter(network_of("token-logits"), alone, alone, "retrieval")
