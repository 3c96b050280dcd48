"""Repair by adapters: less loss in the old shape, few directions changed, zeros kept, the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from apportion.errors import ApportionError
from apportion.methods.compress.adapters import RANK, Adapters, require_peft
from apportion.methods.compress.repair import DistilOptions, answer_loss
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.network import read_out
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples

CNN = "tests.factories:small_cnn"


@pytest.fixture(scope="module")
def cut():
    network = load(CNN)
    partition = Partition.of(network)
    sizes = {module.name: module.sizes()[0] for module in partition if module.kind == "channels"}
    small = slice_network(network, partition, partition.keep(sizes))
    with torch.no_grad():
        small.module.blocks[0].first.weight[:, ::2] = 0.0
    generator = torch.Generator().manual_seed(0)
    batches = tuple({"0": torch.randn(32, 3, 16, 16, generator=generator)} for _ in range(3))
    return network, small, Examples(batches, "noise")


def test_a_missing_library_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ApportionError, match="needs PEFT"):
        require_peft()


def test_adapters_win_back_likeness_and_leave_shape_and_zeros(cut):
    pytest.importorskip("peft")
    network, small, examples = cut
    rule = Adapters(network, examples, (), DistilOptions(steps=30))
    before = {name: tensor.clone() for name, tensor in small.module.state_dict().items()}
    repaired = rule.train(small)
    for name, tensor in small.module.state_dict().items():
        assert torch.equal(tensor, before[name])  # the rule is pure
    after = repaired.module.state_dict()
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    assert type(repaired.module.stem) is torch.nn.Conv2d
    assert torch.equal(after["blocks.0.first.weight"], before["blocks.0.first.weight"])
    moved = (after["blocks.1.first.weight"] - before["blocks.1.first.weight"]).flatten(1)
    assert 0 < torch.linalg.matrix_rank(moved, rtol=1e-4) <= RANK
    with torch.inference_mode():
        batch = examples.batches[0]
        wanted = read_out(network, batch)
        losses = [answer_loss(read_out(model, batch), wanted, model.readout).item() for model in (small, repaired)]
    assert losses[1] < 0.8 * losses[0]
    again = rule.train(small).module.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in after.items())
