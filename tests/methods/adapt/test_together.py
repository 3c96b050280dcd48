"""An episode under many networks at once, as the adapt benchmarks judge it."""

import sys

import numpy as np
import pytest
import torch

from apportion.methods.adapt.episodes import episode_features


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's module, imported as its scripts do."""
    monkeypatch.syspath_prepend("benchmarks/adapt_text")
    import together

    yield together
    for name in ("together", "rounded"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("int8", [False, True])
def test_networks_run_together_give_the_features_of_each_alone(tiny, bench, monkeypatch, int8):
    monkeypatch.setattr(bench, "AT_ONCE", 2)
    family, episode = tiny.family(), tiny.sampler.episode(0)
    with torch.no_grad():
        for bundle in family.stacks:
            bundle.delta.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    pool, generator = tiny.pools[episode.domain], np.random.default_rng(0)
    wanted = []
    for share in (1.0, 0.7, 0.4):
        most = {m.name: max(share * m.num_units, m.sizes()[0]) for m in tiny.partition}
        sizes = {m.name: max(size for size in m.sizes() if size <= most[m.name]) for m in tiny.partition}
        wanted.append((torch.from_numpy(generator.dirichlet(np.ones(4))).float(), family.keep_of(sizes), int8))
    together = bench.Together(family, pool, episode)
    together.run([*wanted, wanted[0]])
    assert len(together.known) == 3
    for alpha_M, keep_G, _ in wanted:
        with torch.no_grad():
            gate_G = family.gates(alpha_M)
            if int8:
                alone_NF = bench.int8_features(family, together.inputs, len(episode.support), gate_G, keep_G)
            else:
                alone_NF = episode_features(family, pool, episode, gate_G, keep_G)
        found_NF = together.features(alpha_M, keep_G, int8)
        if int8:  # a number between two levels may round either way; networks differ by far more
            others = [together.features(*one) for one in wanted if one[0] is not alpha_M]
            assert (found_NF - alone_NF).norm() < 0.1 * min((found_NF - other).norm() for other in others)
        else:
            torch.testing.assert_close(found_NF, alone_NF, rtol=1e-4, atol=1e-5)
    assert len(together.known) == 3
