"""The paper's rates, bounds and hardness, as experiments on problems whose answers are known.

Features are white, so the excess risk of an estimate is half its squared distance to the truth. Sufficient statistics
are drawn directly: with n examples of noise σ they are the truth plus noise of variance σ²/n.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from apportion.methods.compose.losses import Squared
from apportion.methods.compose.oracle import OracleConfig, solve
from apportion.numerics.thresholding import hard_threshold

DTYPE = torch.float64


def white_task(theta_D, num_examples, generator, sigma=1.0):
    """A squared loss whose matrix is the identity and whose linear term is the truth plus its noise."""
    size = len(theta_D)
    noise_D = sigma / math.sqrt(num_examples) * torch.randn(size, generator=generator, dtype=DTYPE)
    scale = math.sqrt(size)
    return Squared(scale * torch.eye(size, dtype=DTYPE), scale * (theta_D + noise_D))


def excess(estimate_D, theta_D):
    return 0.5 * float((estimate_D - theta_D).square().sum())


def fitted_exponent(x, y):
    """Slope of log y over log x, and its standard error."""
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    slope = (centred @ log_y) / (centred @ centred)
    rest = log_y - log_y.mean() - slope * centred
    return slope, math.sqrt(float(rest @ rest) / max(len(x) - 2, 1) / float(centred @ centred))


def assert_exponent(x, y, expected, slack):
    slope, stderr = fitted_exponent(np.array(x), np.array(y))
    assert abs(slope - expected) <= slack + 2 * stderr, (slope, stderr)


def mean_risk(sources, k, size, num_examples, trials=30, block=1):
    """Mean excess risk of the oracle on the hardest kind of task: no residual in truth, k of noise to be mistaken."""
    generator = torch.Generator().manual_seed(1000 * sources + 100 * k + size + num_examples)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=DTYPE)).Q
    source_SD = 4 * basis[:sources]
    theta_D = source_SD.mean(0)  # in the middle of the simplex, so that no bound is active
    config = OracleConfig(
        k=k, block_D=None if block == 1 else torch.arange(size) // block, max_rounds=4, tolerance=1e-6
    )
    risks = []
    for _ in range(trials):
        loss = white_task(theta_D, num_examples, generator)
        risks.append(excess(solve(loss, source_SD, config).theta(source_SD), theta_D))
    return float(np.mean(risks))


def test_risk_falls_as_one_over_n():
    counts = [200, 800, 3200]
    assert_exponent(counts, [mean_risk(6, 0, 64, n) for n in counts], -1, 0.15)
    assert_exponent(counts, [mean_risk(4, 4, 64, n) for n in counts], -1, 0.15)


def test_risk_of_the_weights_grows_with_the_dimension_of_the_simplex():
    """Without residual the constant is known: σ² (R - 1) / 2n."""
    sizes = [2, 4, 8, 16]
    risks = [mean_risk(size, 0, 64, 2000, trials=80) for size in sizes]
    assert_exponent([size - 1 for size in sizes], risks, 1, 0.15)
    for size, risk in zip(sizes, risks, strict=True):
        assert risk == pytest.approx((size - 1) / (2 * 2000), rel=5 * math.sqrt(2 / (80 * (size - 1))))


def test_risk_of_the_residual_grows_as_k_log_of_d_over_k():
    cases = [(k, size) for k in (2, 4, 8, 16) for size in (64, 256)]
    risks = [mean_risk(1, k, size, 1000, trials=12) for k, size in cases]
    assert_exponent([k * math.log(size / k) for k, size in cases], risks, 1, 0.2)


def test_risk_as_a_whole_follows_the_rate():
    """(R + k log(d/k)) / n over a grid of all four, eq. 11."""
    cases = list(itertools.product((2, 12), (1, 8), (64, 192), (400, 3200)))
    risks = [mean_risk(r, k, d, n, trials=6) for r, k, d, n in cases]
    rates = [(r + k * math.log(d / k)) / n for r, k, d, n in cases]
    assert_exponent(rates, risks, 1, 0.15)
    constants = np.array(risks) / np.array(rates)
    assert constants.max() / constants.min() < 6  # one constant serves the grid


def test_risk_of_blocks_follows_their_number_and_width():
    """k log(L/k) + k d_blk over n, eq. 12, without sources to speak of."""
    cases = [(k, num_blocks, width) for k in (1, 4) for num_blocks in (16, 64) for width in (2, 8)]
    risks = [mean_risk(1, k, num_blocks * width, 1000, trials=8, block=width) for k, num_blocks, width in cases]
    rates = [k * math.log(num_blocks / k) + k * width for k, num_blocks, width in cases]
    assert_exponent(rates, risks, 1, 0.25)


def test_mismatch_adds_its_approximation_error_and_nothing_else():
    """Eq. 13: with many examples the excess risk is App(T) = δ²/2, whatever δ."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=DTYPE)).Q
    source_SD = 4 * basis[:3]
    for distance in (0.0, 0.5, 2.0):
        theta_D = source_SD.mean(0) + distance * basis[10]  # at right angles to the hull
        loss = white_task(theta_D, 10**6, generator)
        risk = excess(solve(loss, source_SD).theta(source_SD), theta_D)
        assert risk == pytest.approx(distance**2 / 2, abs=1e-4)


def test_no_estimator_knows_the_support_below_the_threshold():
    """The lower bound's packing: at amplitudes under √(2 log(d/k)/n) even the best support is mostly wrong."""
    size, k, num_examples = 400, 5, 100
    generator = torch.Generator().manual_seed(3)
    threshold = math.sqrt(2 * math.log(size / k) / num_examples)
    found = {}
    for share in (0.3, 3.0):
        hits = 0
        for _ in range(40):
            theta_D = torch.zeros(size, dtype=DTYPE)
            theta_D[:k] = share * threshold
            noisy_D = theta_D + torch.randn(size, generator=generator, dtype=DTYPE) / math.sqrt(num_examples)
            hits += int((hard_threshold(noisy_D, k)[:k] != 0).sum())
        found[share] = hits / (40 * k)
    assert found[0.3] < 0.25
    assert found[3.0] > 0.95


def test_amortisation_costs_no_more_than_the_distance_of_the_weights():
    """ℓ(w) - ℓ(w*) ≤ max|∇| ‖w - w*‖₁ + L/2 max‖θ‖² ‖w - w*‖₁²: what a router's error can cost."""
    generator = torch.Generator().manual_seed(0)
    source_SD = torch.randn(6, 20, generator=generator, dtype=DTYPE)
    feature = torch.randn(50, 20, generator=generator, dtype=DTYPE)
    loss = Squared(feature, torch.randn(50, generator=generator, dtype=DTYPE))
    best = solve(loss, source_SD)
    slope_S = loss.mixing(source_SD, torch.zeros(20, dtype=DTYPE)).objective(best.weight_S)[1]
    smooth = float(torch.linalg.eigvalsh(loss.matrix_DD)[-1])
    gaps = []
    for share in (0.0, 0.05, 0.2, 0.7):
        router_S = (1 - share) * best.weight_S + share * torch.full((6,), 1 / 6, dtype=DTYPE)
        distance = float((router_S - best.weight_S).abs().sum())
        gap = loss.evaluate(router_S @ source_SD)[0] - best.value
        spread = float(slope_S.max() - slope_S.min()) / 2
        bound = spread * distance + smooth / 2 * float(source_SD.square().sum(-1).max()) * distance**2
        assert -1e-9 <= gap <= bound + 1e-9
        gaps.append(gap)
    assert gaps == sorted(gaps)


def test_greedy_choice_of_sources_provably_fails_where_search_succeeds():
    """Theorem 5's kind of instance: a decoy is nearer to the task than either source that together make it."""
    source_SD = torch.tensor([[2.0, 0, 0], [-2.0, 0, 0], [0, 0.5, 0.5]], dtype=DTYPE)
    loss = white_task(torch.zeros(3, dtype=DTYPE), 10**12, torch.Generator().manual_seed(0))
    greedy = solve(loss, source_SD, OracleConfig(max_active=1))
    assert greedy.weight_S.tolist() == [0, 0, 1]  # the decoy
    pairs = {}
    for pair in itertools.combinations(range(3), 2):
        pairs[pair] = solve(loss, source_SD[list(pair)]).value
    assert min(pairs, key=pairs.get) == (0, 1)
    assert pairs[0, 1] == pytest.approx(0, abs=1e-9)
    # whatever partner the greedy choice is given, it stays worse than the pair that search finds
    assert min(pairs[0, 2], pairs[1, 2]) > 0.1
    # the relaxation over all mixtures, which is what the oracle solves, finds the pair
    assert solve(loss, source_SD).value == pytest.approx(0, abs=1e-6)


def test_thresholding_fails_on_coherent_features_where_search_succeeds():
    """Two features that nearly cancel explain the target together; a third one looks best alone."""
    generator = torch.Generator().manual_seed(0)
    shared, own = (
        torch.randn(2000, generator=generator, dtype=DTYPE),
        torch.randn(2000, generator=generator, dtype=DTYPE),
    )
    first, second = shared + 0.2 * own, shared - 0.2 * own
    target = 5 * (first - second)  # = 2 own
    decoy = own + 1.0 * torch.randn(2000, generator=generator, dtype=DTYPE)
    feature = torch.stack([first, second, decoy], 1)
    feature /= feature.norm(dim=0) / math.sqrt(2000)
    loss = Squared(feature, target)
    zero = torch.zeros(1, 3, dtype=DTYPE)
    best = min(
        loss.evaluate(loss.minimise_on(zero[0], torch.tensor([n in chosen for n in range(3)])))[0]
        for chosen in itertools.combinations(range(3), 2)
    )
    found = solve(loss, zero, OracleConfig(k=2, max_steps=50, max_rounds=3))
    assert best < 1e-9
    assert found.value > 0.05
