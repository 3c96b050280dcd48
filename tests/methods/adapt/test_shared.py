"""One resident network with side branches answers as every task's own merged network does."""

import pytest
import torch
from torch import nn

from apportion.errors import ModelError
from apportion.methods.adapt.shared import SharedBackbone


def test_a_batch_of_mixed_tasks_agrees_with_the_merged_networks(tiny, generator):
    family = tiny.family()
    with torch.no_grad():
        for bundle in family.stacks:
            bundle.delta.normal_(0, 0.05, generator=generator)
    shared = SharedBackbone(family)
    mixtures = [torch.rand(4, generator=generator).softmax(-1) for _ in range(3)]
    tasks = [shared.add(f"task {number}", alpha_M) for number, alpha_M in enumerate(mixtures)]
    inputs = tiny.pools["a"].at(tiny.sampler.episode(0).query.row_N)
    count = len(next(iter(inputs.values())))
    task_N = torch.arange(count) % len(tasks)
    mixed_NF = shared.embed(inputs, task_N)
    ones_G = torch.ones(family.groups.count)
    for task, alpha_M in zip(tasks, mixtures, strict=True):
        with torch.no_grad():
            own_NF = family.embed(inputs, family.gates(alpha_M), ones_G)
        torch.testing.assert_close(mixed_NF[task_N == task], own_NF[task_N == task], atol=2e-6, rtol=1e-5)


def test_the_backbone_is_left_as_it_was(tiny):
    family = tiny.family()
    shared = SharedBackbone(family)
    shared.add("task", torch.full((4,), 0.25))
    before = {name: tensor.clone() for name, tensor in tiny.network.module.state_dict().items()}
    shared.embed(tiny.network.inputs, torch.zeros(2, dtype=torch.long))
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.network.module.state_dict().items())
    assert not any(module._forward_hooks for module in tiny.network.module.modules())
    assert shared.size_bytes() == 4 * (family.groups.count + 1)


def test_a_layer_without_side_branch_is_named(tiny, monkeypatch):
    family = tiny.family()
    name = "encoder.layer.0.output.LayerNorm"
    parent = tiny.network.module.get_submodule("encoder.layer.0.output")
    odd = nn.GroupNorm(1, 32)
    monkeypatch.setitem(parent._modules, "LayerNorm", odd)
    with pytest.raises(ModelError, match=name):
        SharedBackbone(family)
