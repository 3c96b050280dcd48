"""Paired samples: the share kept, its error against one drawn by chance, and what none lost proves."""

from __future__ import annotations

import pytest
import torch

from apportion.core.meter import Reading
from apportion.models.load import load
from apportion.tasks.agreement import Agreement
from apportion.tasks.batches import Examples
from apportion.tasks.quality import Accuracy
from apportion.tasks.regression import R2
from apportion.tasks.sample import Sample, apart

NUM_DRAWS, COUNT = 2000, 500


def pairs(generator, count=COUNT):
    """Right or wrong before and after: 90 % right before, of which 3 % are lost, and a tenth of the rest is won."""
    before_N = torch.rand(count, generator=generator) < 0.9
    luck_N = torch.rand(count, generator=generator)
    after_N = torch.where(before_N, luck_N > 0.03, luck_N < 0.1)
    return tuple(Sample(part_N.double().mean().item(), part_N.double()) for part_N in (before_N, after_N))


def test_the_paired_error_is_the_spread_of_the_share_over_draws(generator):
    shares, errors, loose = [], [], []
    for _ in range(NUM_DRAWS):
        before, after = pairs(generator)
        share = after.share_of(before)
        shares.append(share.value)
        errors.append(share.stderr)
        loose.append(apart(after.reading(), before.reading()).stderr)
    spread = torch.tensor(shares).std().item()
    # the spread of 2000 draws is known to 1.6 %; the example added each way widens by a few percent
    assert spread * 0.95 < sum(errors) / NUM_DRAWS < spread * 1.15
    assert sum(loose) / NUM_DRAWS > 1.5 * spread  # as if other examples had been taken


def test_a_share_of_a_mean_keeps_the_mean_and_follows_its_scale(generator):
    before, after = pairs(generator)
    assert after.share_of(before).value == pytest.approx(after.value / before.value)
    smooth = [Sample(10 * one.value, 10 * one.part_N, counted=False) for one in (before, after)]
    bare = [Sample(one.value, one.part_N, counted=False) for one in (before, after)]
    for scaled, plain in ((smooth, bare),):
        assert scaled[1].share_of(scaled[0]).stderr == pytest.approx(plain[1].share_of(plain[0]).stderr)


@pytest.mark.parametrize("count", [10, 1000])
def test_none_lost_is_no_proof_that_none_would_be(count):
    same = Sample(1.0, torch.ones(count))
    kept = same.share_of(same)
    assert kept.value == 1.0
    assert kept.stderr == pytest.approx(2**0.5 / (count + 2))
    assert same.reading() == Reading(value=1.0, unit="ratio", stderr=0.0, count=count)


def test_every_meter_reads_what_its_sample_says_and_pairs_a_model_with_itself(generator):
    network, regressor = load("tests.factories:small_cnn"), load("tests.factories:small_regressor")
    batch = {"0": torch.randn(48, 3, 16, 16, generator=generator)}
    labelled = Examples((batch,), "labelled", torch.randint(10, (48,), generator=generator))
    numbers = Examples((batch,), "numbers", torch.randn(48, generator=generator))
    bare = Examples((batch,), "bare")
    meters = [
        (network, Accuracy(network, labelled, labelled)),
        (network, Agreement(network, bare)),
        (regressor, R2(regressor, numbers, numbers)),
    ]
    for model, meter in meters:
        sample = meter.sample(model)
        assert sample.reading() == meter.read(model)
        assert len(sample.part_N) == 48
        # parts are centred on the value up to the jackknife's bias, of order one over the count
        assert sample.part_N.mean().item() == pytest.approx(sample.value, abs=0.2)
        assert sample.share_of(sample).value == 1.0
