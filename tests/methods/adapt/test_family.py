"""A masked task network computes what the sliced one does; smaller budgets are nested in larger ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.adapt.conftest import profile_of

from apportion.errors import ModelError
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.family import Family, FamilyConfig
from apportion.methods.adapt.groups import merge_all, places
from apportion.methods.adapt.router import Router
from apportion.models.network import read_out


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), masks=st.sampled_from(["groups", "weights"]))
def test_masked_and_sliced_task_networks_agree(tiny, seed, masks):
    generator = torch.Generator().manual_seed(seed)
    family = tiny.family(masks=masks)
    with torch.no_grad():
        for bundle in family.stacks:
            bundle.delta.normal_(0, 0.05, generator=generator)
        alpha_M = torch.rand(4, generator=generator).softmax(-1)
        sizes = {m.name: m.sizes()[int(torch.randint(len(m.sizes()), (), generator=generator))] for m in tiny.partition}
        masked = family.embed(tiny.network.inputs, family.gates(alpha_M), family.keep_of(sizes))
        sliced = read_out(family.sliced(alpha_M, sizes), tiny.network.inputs)
    torch.testing.assert_close(masked, sliced, atol=2e-6, rtol=1e-5)


def test_without_a_delta_the_whole_network_is_the_frozen_one(tiny):
    family = tiny.family()
    ones_G = torch.ones(family.groups.count)
    with torch.no_grad():
        made = family.embed(tiny.network.inputs, ones_G, ones_G)
        torch.testing.assert_close(made, read_out(tiny.network, tiny.network.inputs), atol=1e-6, rtol=1e-5)


def test_every_parameter_of_a_block_has_a_place_and_embeddings_have_none(tiny):
    family = tiny.family()
    found = places(tiny.network, family.groups)
    inside = {name for name, _ in tiny.network.module.named_parameters() if name.startswith("encoder.layer.")}
    assert set(found) == inside
    assert all(0 <= group < family.groups.count for place in found.values() for group in place.group)


def test_a_delta_gate_switches_its_own_units_alone(tiny):
    family = tiny.family()
    name = tiny.partition.modules[0].name  # heads of the first layer
    module = tiny.partition[name]
    first = family.groups.offsets()[name]
    gate_G = torch.zeros(family.groups.count)
    gate_G[first] = 1.0
    with torch.no_grad():
        for bundle in family.stacks:
            bundle.delta.fill_(1.0)
        merged = merge_all(family.stacks, gate_G, torch.ones(family.groups.count))
    base = dict(tiny.network.module.named_parameters())
    query = next(member for member in module.members if member.layer.endswith("query"))
    moved = (merged[f"{query.layer}.weight"] - base[f"{query.layer}.weight"]).abs().sum(1) > 0.5
    assert moved.tolist() == [unit == module.order[0] for unit in query.units]


def test_a_gate_of_a_single_number_switches_that_number_alone(tiny):
    family = tiny.family(masks="weights", num_experts=2)
    with torch.no_grad():
        for bundle in family.bundles:
            bundle.delta.fill_(1.0)
            bundle.gate_logit.fill_(-10.0)
        bundle = family.bundles[0]
        bundle.gate_logit[1].view(-1)[5] = 10.0  # of the second expert
        merged = merge_all(family.stacks, family.gates(torch.tensor([0.75, 0.25])), torch.ones(family.groups.count))
    base = dict(tiny.network.module.named_parameters())
    moved = {name: merged[name] - base[name].detach() for name in merged}
    torch.testing.assert_close(moved[bundle.names[0]].flatten()[5], torch.tensor(0.25))
    assert sum(int((change != 0).sum()) for change in moved.values()) == 1


def test_the_open_share_of_single_numbers_is_of_those_that_are_kept_and_read(tiny):
    family = tiny.family(masks="weights", num_experts=1)
    sizes = {module.name: module.sizes()[0] for module in tiny.partition if not module.blocks}
    keep_G = family.keep_of({module.name: module.num_units for module in tiny.partition} | sizes)
    with torch.no_grad():
        for bundle in family.bundles:
            bundle.gate_logit.copy_(torch.where(bundle.kept(torch.cat([keep_G, torch.ones(1)])) > 0, 10.0, -10.0)[None])
        assert float(family.open_share(torch.ones(1), keep_G)) == pytest.approx(1.0, abs=1e-3)
        assert float(family.open_share(torch.ones(1), torch.ones_like(keep_G))) < 0.8
    sliced = family.sliced(torch.ones(1), {module.name: module.num_units for module in tiny.partition} | sizes)
    inside = [p.numel() for name, p in sliced.module.named_parameters() if name.startswith("encoder.layer.")]
    kept = sum(float(bundle.kept(torch.cat([keep_G, torch.ones(1)])).sum()) for bundle in family.bundles)
    assert kept == sum(inside)


@settings(max_examples=30, deadline=None)
@given(low=st.floats(0, 1), high=st.floats(0, 1))
def test_keep_gates_are_nested(tiny, low, high):
    family = tiny.family()
    low, high = min(low, high), max(low, high)
    small_G, large_G = (family.keep(torch.full((len(tiny.partition),), f)) for f in (low, high))
    assert (small_G <= large_G).all()


def test_drawn_keep_gates_are_on_or_off_and_right_on_average(tiny):
    family = tiny.family()
    fraction_L = torch.full((len(tiny.partition),), 0.6)
    soft_G = family.keep(fraction_L)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([family.keep(fraction_L, generator) for _ in range(2000)])
    assert set(draws.unique().tolist()) <= {0.0, 1.0}
    # five standard errors of a mean of 2000 coin tosses
    torch.testing.assert_close(draws.mean(0), soft_G, atol=5 * 0.5 / 2000**0.5, rtol=0)


@settings(max_examples=30, deadline=None)
@given(low=st.floats(0.1, 1), high=st.floats(0.1, 1), seed=st.integers(0, 100))
def test_larger_budgets_allow_no_less_of_any_module(tiny, low, high, seed):
    family = tiny.family()
    with torch.no_grad():
        for parameter in family.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        price_L = tiny.clocks[0].prices()
        small_L, large_L = (family.policy(rho, price_L) for rho in (min(low, high), max(low, high)))
    assert (small_L <= large_L + 1e-6).all()
    assert (small_L >= family.policy.least_L).all()
    assert (large_L <= 1).all()


@pytest.mark.parametrize("allocation", ["learned", "uniform", "template", "unconditional", "fixed"])
def test_a_policy_starts_on_budget(tiny, allocation):
    family = tiny.family(allocation=allocation)
    with torch.no_grad():
        cost = tiny.clocks[0].ratio(family.policy(0.6, tiny.clocks[0].prices()))
    if allocation in ("learned", "fixed"):
        assert abs(float(cost) - 0.6) < 0.1  # the start costs 0.6 on average over both clocks, between knots
    if allocation == "fixed":
        assert not any(parameter.requires_grad for parameter in family.policy.parameters())


def test_the_seed_alone_says_where_a_family_begins(tiny):
    def begun(seed, luck):
        torch.manual_seed(luck)
        family = Family(tiny.network, tiny.partition, tiny.clocks, 32, FamilyConfig(seed=seed))
        assert torch.initial_seed() == luck  # the caller's generator is left alone
        return family.state_dict()

    one, same, other = begun(0, 1), begun(0, 2), begun(1, 1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert {name for name in one if not torch.equal(one[name], other[name])} >= {
        "gate_logit_MG",
        "router.head.0.weight",
    }


def test_a_device_on_which_nothing_is_saved_is_refused(tiny):
    clock = Clock.of(profile_of(tiny.parts, "torch-cpu-1t", quantile=30.0), tiny.parts)
    assert clock.floor_ms() > clock.whole_ms
    with pytest.raises(ModelError, match="on torch-cpu-1t the smallest network is bounded by"):
        Family(tiny.network, tiny.partition, (clock,), 32)


def test_a_device_in_int8_goes_by_its_float_sibling_and_a_new_one_by_the_first(tiny):
    family = tiny.family()
    names = {
        "openvino-int8-cpu-1t": "openvino-cpu-1t",
        "openvino-cpu-1t": "openvino-cpu-1t",
        "torch-cpu-1t": "ort-cpu-1t",
    }
    for name, known in names.items():
        assert family.known(Clock.of(profile_of(tiny.parts, name), tiny.parts)) == known


def test_routing_does_not_depend_on_the_order_of_classes():
    torch.manual_seed(0)
    router, mean_WF, device_F = Router(8, 4), torch.randn(5, 8), torch.rand(4)
    there, back = router(mean_WF, 0.5, device_F), router(mean_WF.flip(0), 0.5, device_F)
    torch.testing.assert_close(there, back)
    assert router(mean_WF[:2], 0.5, device_F).shape == (4,)
    assert not torch.equal(there, router(mean_WF, 0.2, device_F))  # the budget is seen


@pytest.mark.parametrize("wrong", [{"num_experts": 0}, {"allocation": "best"}, {"tightest": 1.5}, {"masks": "all"}])
def test_impossible_families_are_refused(wrong):
    with pytest.raises(ModelError):
        FamilyConfig(**wrong)
