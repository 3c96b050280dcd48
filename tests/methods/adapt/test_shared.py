"""One resident network with side branches answers as every task's own merged network does."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from apportion.errors import ApportionError, ModelError
from apportion.methods.adapt.groups import merge_all
from apportion.methods.adapt.shared import MAX_PLANS, WHOLE_RATIO, SharedTasks, cost_shares, rounded_up
from apportion.tasks.heads import Cosine, Logistic


@pytest.fixture
def family(tiny, generator):
    family = tiny.family()
    with torch.no_grad():
        for bundle in family.stacks:
            bundle.delta.normal_(0, 0.05, generator=generator)
    return family


@pytest.fixture
def shared(family, generator):
    with SharedTasks.of(family) as shared:
        for number in range(3):
            shared.add(f"task {number}", torch.rand(4, generator=generator).softmax(-1))
        yield shared


@pytest.fixture
def inputs(tiny):
    return tiny.pools["a"].at(tiny.sampler.episode(0).query.row_N)


def merged(family, shared, name, inputs):
    """Features of the task's own network."""
    with torch.no_grad():
        made_NF = family.embed(inputs, shared.task(name).gates, torch.ones(family.groups.count))
    return functional.normalize(made_NF.float(), dim=-1)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_tasks_and_open_groups_agrees_with_the_merged_networks(family, shared, inputs, seed):
    generator = torch.Generator().manual_seed(seed)
    count = len(next(iter(inputs.values())))
    for share, name in zip(torch.rand(3, generator=generator), shared.names, strict=True):
        shared.open(name, torch.rand(family.groups.count, generator=generator) < share)
    each = [shared.names[t] for t in torch.randint(0, 3, (count,), generator=generator)]
    mixed_NF = shared.embed(inputs, each)
    for name in set(each):
        rows = torch.tensor([other == name for other in each])
        torch.testing.assert_close(mixed_NF[rows], merged(family, shared, name, inputs)[rows], atol=2e-6, rtol=1e-5)


def test_the_delta_is_felt(family, shared, inputs):
    """Else the agreement above would hold for branches that add nothing."""
    own_NF = shared.embed(inputs, "task 0")
    shared.open("task 0", torch.zeros(family.groups.count))
    assert (own_NF - shared.embed(inputs, "task 0")).abs().max() > 1e-3


def test_heads_of_mixed_tasks_score_as_their_own(family, shared, inputs, generator):
    count = len(next(iter(inputs.values())))
    heads = {"task 0": Cosine(scale=4.0), "task 1": Logistic(), "task 2": None}
    for ways, (name, head) in enumerate(heads.items(), start=2):
        label_S = torch.arange(count) % ways
        shared.fit_head(name, inputs, label_S, [f"{name} class {c}" for c in range(ways)], head)
    each = [shared.names[n % 3] for n in range(count)]
    scores, said = shared.scores(inputs, each), shared.classify(inputs, each)
    for row, name in enumerate(each):
        head = shared.task(name).head
        own_W = merged(family, shared, name, inputs)[row] @ head.weight_FW + head.bias_W
        torch.testing.assert_close(scores[row], own_W, atol=1e-4, rtol=1e-4)
        assert said[row] == head.classes[int(own_W.argmax())]


def test_opening_other_groups_asks_for_a_new_head(family, shared, inputs):
    label_S = torch.arange(len(next(iter(inputs.values())))) % 2
    shared.fit_head("task 0", inputs, label_S, ("yes", "no"))
    shared.open("task 0", torch.ones(family.groups.count))
    with pytest.raises(ApportionError, match="fit_head"):
        shared.classify(inputs, "task 0")


def test_hooks_are_put_on_once_and_sleep_outside_of_calls(tiny, family, inputs):
    module = tiny.network.module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        plain = module(**inputs).last_hidden_state
    shared = SharedTasks.of(family)
    shared.add("task", torch.full((4,), 0.25))

    num_layers = 3 * 8  # three blocks of six linear layers and two norms

    def num_hooks():
        return sum(len(layer._forward_hooks) for layer in module.modules())

    assert num_hooks() == num_layers
    for _ in range(2):
        shared.embed(inputs, "task")
        with torch.no_grad():
            assert torch.equal(plain, module(**inputs).last_hidden_state)
    assert num_hooks() == num_layers
    shared.close()
    assert num_hooks() == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    with pytest.raises(ApportionError, match="closed"):
        shared.embed(inputs, "task")


def test_tasks_come_and_go(family, shared, inputs):
    before_NF = shared.embed(inputs, "task 1")
    shared.remove("task 0")
    torch.testing.assert_close(shared.embed(inputs, "task 1"), before_NF)
    for wrong, told in ((lambda: shared.embed(inputs, "task 0"), "no task 'task 0'"),
                        (lambda: shared.add("task 1", torch.full((4,), 0.25)), "there already"),
                        (lambda: shared.add("new", torch.full((3,), 1 / 3)), "4 shares"),
                        (lambda: shared.embed(inputs, ["task 1"]), "1 tasks for"),
                        (lambda: shared.open("task 1", torch.ones(3)), "3 groups")):  # fmt: skip
        with pytest.raises(ApportionError, match=told):
            wrong()


def test_one_more_task_takes_its_gates_and_its_head(family, shared, inputs):
    sizes = shared.size_bytes()
    shared.add("more", torch.full((4,), 0.25))
    assert shared.size_bytes()["tasks"] - sizes["tasks"] == 5 * family.groups.count
    assert {**shared.size_bytes(), "tasks": 0} == {**sizes, "tasks": 0}
    label_S = torch.arange(len(next(iter(inputs.values())))) % 2
    shared.fit_head("more", inputs, label_S, ("yes", "no"))
    assert shared.size_bytes()["tasks"] - sizes["tasks"] == 5 * family.groups.count + 4 * (32 * 2 + 2)


def test_what_is_gathered_for_batches_is_bounded(family, shared, inputs):
    """A branch with every group open is the delta itself; others copy what is open, for the last few combinations."""
    shared.embed(inputs, "task 0")
    whole = shared.size_bytes()["gathered"]
    assert whole < 0.1 * shared.size_bytes()["delta"]
    for number in range(MAX_PLANS + 3):
        shared.add(f"other {number}", torch.full((4,), 0.25))
        shared.open(f"other {number}", torch.arange(family.groups.count) % 2 == 0)
        shared.embed(inputs, f"other {number}")
    each = shared.size_bytes()["gathered"] / MAX_PLANS
    assert whole < each < shared.size_bytes()["delta"]


def test_a_group_is_worth_what_its_gate_adds_to_the_weights(family, shared):
    none_G, ones_G = torch.zeros(family.groups.count), torch.ones(family.groups.count)
    frozen = merge_all(family.stacks, none_G, ones_G)
    for group in (0, 13, family.groups.count - 1):
        gate_G = none_G.clone()
        gate_G[group] = sum(float(shared.task(name).gate_G[group]) for name in shared.names)
        moved = merge_all(family.stacks, gate_G, ones_G)
        norm = sum((moved[name] - frozen[name]).detach().square().sum() for name in frozen).sqrt()
        torch.testing.assert_close(shared.values()[group], norm, rtol=1e-4, atol=1e-6)


def test_nearly_all_of_a_module_runs_whole():
    module_G = torch.tensor([0] * 10 + [1] * 10)
    open_G = torch.zeros(20, dtype=torch.bool)
    open_G[: int(10 * WHOLE_RATIO)] = True
    open_G[10:13] = True
    assert rounded_up(open_G, module_G).tolist() == [True] * 13 + [False] * 7
    assert cost_shares(open_G, module_G).tolist() == pytest.approx([1.0, 0.3 / WHOLE_RATIO])
    run_G = rounded_up(open_G, module_G)
    assert torch.equal(cost_shares(run_G, module_G), cost_shares(open_G, module_G))  # what runs costs what was opened


def test_a_layer_without_side_branch_is_named(tiny, monkeypatch):
    family = tiny.family()
    name = "encoder.layer.0.output.LayerNorm"
    parent = tiny.network.module.get_submodule("encoder.layer.0.output")
    odd = nn.GroupNorm(1, 32)
    monkeypatch.setitem(parent._modules, "LayerNorm", odd)
    with pytest.raises(ModelError, match=name):
        SharedTasks.of(family)


def test_masks_over_single_numbers_are_refused(tiny):
    with pytest.raises(ModelError, match="--masks groups"):
        SharedTasks.of(tiny.family(masks="weights"))
