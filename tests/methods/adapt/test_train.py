"""Training is deterministic, resumes exactly, learns, and prices what is scarce."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from apportion.errors import DataError, TargetError
from apportion.methods.adapt.adapt import shadow_prices
from apportion.methods.adapt.depth import balanced_depths, every_depth, nested_depths, sizes_by_depth
from apportion.methods.adapt.episodes import episode_features, frozen_means, logits, order_units, unit_scores
from apportion.methods.adapt.family import UNSETTLED, Family, FamilyConfig
from apportion.methods.adapt.folder import LATER, AdaptConfig, AdaptFolder
from apportion.methods.adapt.solve import left_out, solve
from apportion.methods.adapt.train import TrainConfig, Trainer, budget_bin, module_values


def trainer_of(tiny, steps=6, **options):
    family = tiny.family(**{k: options.pop(k) for k in ("allocation", "num_experts", "masks") if k in options})
    return Trainer(family, tiny.pools, tiny.sampler, TrainConfig(steps=steps, episodes=3, warmup=2, **options))


def test_the_same_seed_gives_the_same_tensors(tiny):
    rows, tensors = [], []
    for _ in range(2):
        trainer = trainer_of(tiny)
        rows.append([trainer.step(number) for number in range(6)])
        tensors.append(trainer.tensors())
    assert rows[0] == rows[1]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_a_resumed_run_ends_where_an_unbroken_one_does(tiny):
    whole = trainer_of(tiny)
    for number in range(6):
        whole.step(number)
    first = trainer_of(tiny)
    for number in range(3):
        first.step(number)
    second = trainer_of(tiny)
    second.load_tensors(first.tensors())
    second.load_state(first.state())
    for number in range(3, 6):
        second.step(number)
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(second.tensors()[name], tensor, msg=name)
    assert second.state() == whole.state()


@pytest.mark.parametrize("objective", ["mean", "cvar", "group", "kl"])
@pytest.mark.parametrize("allocation", ["learned", "template"])
def test_every_objective_trains(tiny, objective, allocation):
    trainer = trainer_of(tiny, steps=4, objective=objective, beta=0.5, allocation=allocation)
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    rows = [trainer.step(number) for number in range(4)]
    assert all(np.isfinite(row["loss"]) and np.isfinite(row["kkt"]["stationarity"]) for row in rows)
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.tensors().items() if name in before)


def test_holding_keeps_the_whole_network_near_the_frozen_one(tiny):
    likeness = []
    for hold in (0.0, 20.0):
        trainer = trainer_of(tiny, steps=30, rate=2e-3, hold=hold)
        for number in range(30):
            trainer.step(number)
        family, episode = trainer.family, tiny.sampler.episode(1000)
        pool = tiny.pools[episode.domain]
        alpha_M = torch.full((family.config.num_experts,), 1 / family.config.num_experts)
        with torch.no_grad():
            gate_G, ones_G = family.gates(alpha_M), torch.ones(family.groups.count)
            feature_NF = episode_features(family, pool, episode, gate_G, ones_G)
        rows = torch.from_numpy(np.concatenate([episode.support.row_N, episode.query.row_N]))
        likeness.append(float(torch.cosine_similarity(feature_NF, pool.feature_NF[rows]).mean()))
    assert likeness[0] < likeness[1] <= 1.0 + 1e-6


def test_losses_fall(tiny):
    trainer = trainer_of(tiny, steps=60, rate=2e-3)
    losses = [trainer.step(number)["loss"] for number in range(60)]
    assert np.mean(losses[-15:]) < 0.8 * np.mean(losses[:15])


def test_time_gets_a_price_while_the_policy_is_over_budget(tiny):
    trainer = trainer_of(tiny, steps=4)
    with torch.no_grad():
        trainer.family.policy.start_L.fill_(5.0)  # everything, at every budget
    row = trainer.step(0)
    assert row["u"] > 0.1
    assert trainer.mu.values.max() > 0
    assert row["kkt"]["feasibility"] > 0.1


@pytest.mark.parametrize("masks", ["groups", "weights"])
def test_gates_close_while_more_are_open_than_may_be(tiny, masks):
    trainer = trainer_of(tiny, steps=40, masks=masks, capacity=0.3)
    shares = [trainer.step(number)["open"] for number in range(40)]
    assert trainer.nu.values[0] > 1.0
    assert shares[0] > 0.9
    assert shares[-1] < shares[20] < shares[0] - 0.002


def test_masks_of_single_numbers_train_and_resume(tiny):
    whole, first, second = (trainer_of(tiny, masks="weights") for _ in range(3))
    before = {name: tensor.clone() for name, tensor in whole.tensors().items()}
    for number in range(4):
        whole.step(number)
    assert all(not torch.equal(before[n], t) for n, t in whole.tensors().items() if n.endswith("gate_logit"))
    for number in range(2):
        first.step(number)
    second.load_tensors(first.tensors())
    second.load_state(first.state())
    for number in range(2, 4):
        second.step(number)
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(second.tensors()[name], tensor, msg=name)


def slopes(trainer):
    """Slopes of one step, by parameter; it is the first, so that nothing but the passes differs."""
    row = trainer.step(0)
    return row, {name: p.grad for name, p in trainer.family.named_parameters() if p.grad is not None}


def test_blocks_that_run_again_give_the_same_slopes(tiny):
    (row, plain), (row_again, again) = (slopes(trainer_of(tiny, checkpoint=flag)) for flag in (False, True))
    assert row["loss"] == row_again["loss"]
    assert plain.keys() == again.keys()
    for name, slope in plain.items():
        torch.testing.assert_close(again[name], slope, msg=name, atol=1e-6, rtol=1e-4)
    assert not any("forward" in vars(module) for module in tiny.network.module.modules())  # all is put back


@pytest.mark.parametrize("checkpoint", [False, True])
def test_half_the_bits_give_nearly_the_same_losses(tiny, checkpoint):
    (row, plain), (row_low, low) = (
        slopes(trainer_of(tiny, precision=precision, checkpoint=checkpoint)) for precision in ("fp32", "bf16")
    )
    assert row_low["loss"] == pytest.approx(row["loss"], rel=0.02)
    assert all(slope.dtype == torch.float32 and slope.isfinite().all() for slope in low.values())
    whole = [torch.cat([each[name].flatten() for name in plain if "delta" in name]) for each in (plain, low)]
    assert torch.cosine_similarity(*whole, dim=0) > 0.95
    assert not torch.allclose(*whole, rtol=1e-3)  # it did run in fewer bits


def test_prices_follow_the_gains_and_start_anew_after_a_window_with_slack(tiny):
    asked = AdaptConfig(
        model="minilm", tasks="text", targets=("ort-cpu-1t",), gains=(0.5, 2.0), window=3, damping=0.0, capacity=0.5
    )
    config = replace(asked.training(), steps=8, episodes=3, small_rate=1e-9)
    trainer = Trainer(tiny.family(), tiny.pools, tiny.sampler, config)
    row = trainer.step(0)
    assert trainer.nu.values[0] == pytest.approx(2.0 * (row["open"] - 0.5), abs=1e-3)
    with torch.no_grad():
        trainer.family.gate_logit_MG.fill_(-10.0)  # now with slack
    prices = [trainer.step(number)["nu"] for number in range(1, 4)]
    trainer.nu.values[:] = 15.0
    with torch.no_grad():
        assert prices[-1] == 0.0
        trainer.family.gate_logit_MG.fill_(10.0)
    trainer.step(4)
    with torch.no_grad():
        trainer.family.gate_logit_MG.fill_(-10.0)
    prices = [trainer.step(number)["nu"] for number in range(5, 8)]
    assert prices[1] > 10.0  # it falls by steps, and then at once
    assert prices[2] == 0.0


def test_the_logged_residuals_see_the_open_gates(tiny):
    trainer = trainer_of(tiny, steps=4, capacity=0.2)
    trainer.nu.values[:] = 4.0
    row = trainer.step(0)
    assert row["kkt"]["feasibility"] == pytest.approx(row["open"] - 0.2, abs=1e-3)
    assert row["kkt"]["complementarity"] == pytest.approx(row["nu"] * (row["open"] - 0.2), rel=1e-2)


def test_a_fixed_policy_stays(tiny):
    trainer = trainer_of(tiny, steps=3, allocation="fixed")
    before = trainer.family.policy(0.5, tiny.clocks[0].prices())
    for number in range(3):
        trainer.step(number)
    assert torch.equal(before, trainer.family.policy(0.5, tiny.clocks[0].prices()))


def test_units_are_ordered_by_what_the_loss_says(tiny):
    episodes = [tiny.sampler.episode(number) for number in range(3)]
    scores = unit_scores(tiny.network, tiny.partition, tiny.pools, episodes)
    ordered = order_units(tiny.partition, scores)
    for module in ordered:
        values = scores[module.name][list(module.order)]
        assert (values.diff() <= 0).all()
    assert {module.name: sorted(module.order) for module in ordered} == {
        module.name: list(range(module.num_units)) for module in tiny.partition
    }


def test_budgets_fall_into_bins_that_cover_all():
    assert budget_bin(0.15, 0.15) == 0
    assert budget_bin(1.0, 0.15) == 7
    assert budget_bin(0.05, 0.15) == 0
    drawn = [budget_bin(0.15 ** (1 - (place + 0.5) / 800), 0.15) for place in range(800)]
    assert {drawn.count(bin_) for bin_ in range(8)} == {100}  # as often each, as budgets are drawn


def test_shadow_prices_stand_at_the_budgets_of_their_ranges(tiny):
    trainer = trainer_of(tiny, steps=2)
    told = shadow_prices(trainer)
    assert [budget_bin(rho, trainer.family.floor) for rho in told["budgets"]] == list(range(8))
    assert set(told["modules"]) == {module.name for module in tiny.partition}
    assert all(len(prices) == 8 for prices in (*told["time"].values(), *told["modules"].values()))


def test_every_device_meets_every_range_of_budgets(tiny):
    trainer = Trainer(tiny.family(), tiny.pools, tiny.sampler, TrainConfig(steps=60))
    for number in range(60):
        trainer.step(number)
    assert None not in trainer.mu.state()["last"]


def test_prices_rise_as_fast_however_many_there_are(tiny):
    """A policy that is over budget and stays so: its prices after as many steps, for one device and for two of it."""
    means = []
    for clocks in (tiny.clocks[:1], tiny.clocks):
        family = Family(tiny.network, tiny.partition, clocks, 32, FamilyConfig())
        with torch.no_grad():
            family.policy.start_L += 2.0
        still = {"rate": 1e-9, "small_rate": 1e-9, "max_price": 1e9}
        trainer = Trainer(family, tiny.pools, tiny.sampler, TrainConfig(steps=48, **still))
        for number in range(48):
            trainer.step(number)
        means.append(trainer.mu.values.mean())
    assert means[0] > 1.0
    assert means[1] == pytest.approx(means[0], rel=0.25)


def test_images_are_varied_and_texts_are_not():
    asked = AdaptConfig(model="minilm", tasks="text", targets=("ort-cpu-1t",))
    assert asked.training().vary == asked.training().hold == 0
    assert asked.training(images=True).vary > 0
    with pytest.raises(DataError, match="is not a share"):
        TrainConfig(vary=1.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"objective": "best"},
        {"objective": "cvar", "beta": 1.0},
        {"objective": "kl", "beta": -0.1},
        {"capacity": 0.0},
        {"rate": -1.0},
        {"precision": "fp8"},
        {"seed": -1},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(DataError):
        TrainConfig(**wrong)


def test_a_run_with_usual_settings_is_saved_as_before_later_ones_came(tmp_path):
    for name, changes in (("usual", {}), ("other", {"masks": "weights", "gains": (0.5, 1.0)})):
        asked = AdaptConfig(model="minilm", tasks="text", targets=("ort-cpu-1t",), **changes)
        folder = AdaptFolder(tmp_path / name)
        folder.start(asked, "digest")
        assert folder.config() == asked
        assert {*folder.read(folder.file)["config"]} & {*LATER} == {*changes}


def test_int8_is_no_target_but_a_way_to_run_slices():
    with pytest.raises(DataError, match="ort-int8-cpu-1t is in int8; name ort-cpu-1t, with --int8"):
        AdaptConfig(model="minilm", tasks="text", targets=("ort-int8-cpu-1t",))


def test_a_step_without_finite_slopes_changes_nothing_that_is_kept(tiny, monkeypatch):
    trainer = trainer_of(tiny)
    trainer.step(0)
    before, state = {name: tensor.clone() for name, tensor in trainer.tensors().items()}, trainer.state()
    run = trainer._run

    def broken(*args):
        found = run(*args)
        return replace(found, loss=found.loss * torch.nan)

    monkeypatch.setattr(trainer, "_run", broken)
    trainer.step(1)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.tensors().items())
    assert trainer.state() == state


def test_an_unknown_target_is_refused_before_anything_is_written():
    with pytest.raises(TargetError, match="ort-cpu-9q"):
        AdaptConfig(model="minilm", tasks="text", targets=("ort-cpu-1t", "ort-cpu-9q"))


def test_depths_are_settled_by_the_losses_of_episodes_that_come_after_the_last_step(tiny):
    trainer = trainer_of(tiny, steps=20, rate=2e-3, settle=0.9)
    for number in range(18):
        assert "depths" not in trainer.step(number)
    family, clock = trainer.family, tiny.clocks[0]
    assert (family.depth_KJ == UNSETTLED).all()
    rows = trainer.settle(num_episodes=4)
    episodes = [tiny.sampler.episode(20 * 3 + number) for number in range(4)]
    judged = []
    budgets = [*family.knots[:-1], family.knots[-2] ** 0.5]  # near the whole the least of those that it stands for
    for rho in budgets:
        with torch.no_grad():
            means = [frozen_means(tiny.pools[episode.domain], episode) for episode in episodes]
            mixtures = [family.plan(mean_WF, rho, clock.name).alpha_M for mean_WF in means]
            value_L = module_values(trainer.value_BL, rho, family.floor)
            losses_of = {}
            for depth, sizes in sizes_by_depth(family, torch.stack(mixtures).mean(0), rho, clock, value_L).items():
                losses_of[depth] = []
                for episode, alpha_M in zip(episodes, mixtures, strict=True):
                    pool, keep_G = tiny.pools[episode.domain], family.keep_of(sizes)
                    feature_NF = episode_features(family, pool, episode, family.gates(alpha_M), keep_G)
                    label_Q = torch.from_numpy(episode.query.label_N)
                    loss = torch.nn.functional.cross_entropy(logits(family, episode, feature_NF), label_Q)
                    losses_of[depth].append(float(loss))
        told = {row["depth"]: row["loss"] for row in rows if row["rho"] == round(rho, 4)}
        assert told == pytest.approx({depth: np.mean(losses) for depth, losses in losses_of.items()}, abs=2e-4)
        judged.append({depth: np.array(losses) for depth, losses in losses_of.items()})
    assert sum(len(losses_of) > 1 for losses_of in judged) >= 3
    settled = [family.depth(rho * 1.001) for rho in budgets]
    assert settled == nested_depths(every_depth(family), judged, balanced_depths(family))
    assert family.depth(1.0) is None


def test_slices_have_the_settled_depth_from_the_step_that_settles_it(tiny):
    trainer = trainer_of(tiny, steps=10, settle=0.5)
    for number in range(5):
        trainer.step(number)
    assert trainer.step(5)["depths"]
    family, clock = trainer.family, tiny.clocks[0]
    (place,) = family.block_places
    plan = family.plan_with(torch.full((4,), 0.25), 0.5, clock.name)
    wanted_L = trainer._wanted(plan, 0.5, clock.name, torch.Generator().manual_seed(0))
    assert (round(wanted_L[place].item() * 3),) == family.depth(0.5)
    assert wanted_L.requires_grad
    assert clock.relaxed_upper_ms(wanted_L.detach()) == pytest.approx(0.5 * clock.whole_ms, rel=0.01)


def test_a_share_of_the_slices_runs_at_depths_next_to_the_settled_one(tiny):
    trainer = trainer_of(tiny, near=0.5)
    family, clock, generator = trainer.family, tiny.clocks[0], torch.Generator().manual_seed(0)
    (place,) = family.block_places
    family.depth_KJ.fill_(2)
    plan = family.plan_with(torch.full((4,), 0.25), 0.4, clock.name)
    seen = []
    for _ in range(60):
        wanted_L = trainer._wanted(plan, 0.4, clock.name, generator)
        seen.append(round(wanted_L[place].item() * 3))
        assert clock.relaxed_upper_ms(wanted_L.detach()) <= 0.4 * clock.whole_ms * (1 + 1e-6)
    others = set(seen) - {2}
    assert others
    assert others <= {1, 3}
    assert 0.3 < seen.count(2) / len(seen) < 0.95
    family.depth_KJ.fill_(3)
    plan = family.plan_with(torch.full((4,), 0.25), 0.99, clock.name)
    seen = [
        round(trainer._wanted(plan, 0.99, clock.name, generator)[place].item() * 3) for _ in range(20)
    ]  # two full blocks take less than they may, and there is no more of them
    assert set(seen) == {2, 3}


def test_a_slice_that_is_the_whole_network_has_nothing_to_learn_from_it(tiny):
    trainer = trainer_of(tiny, steps=2)
    episode = trainer.sampler.episode(0)
    pool, ones_G = trainer.pools[episode.domain], torch.ones(trainer.family.groups.count)
    gate_G = trainer.family.gates(torch.full((4,), 0.25))
    whole_NF = episode_features(trainer.family, pool, episode, gate_G, ones_G).detach()
    half_G = trainer.family.keep(torch.full((len(tiny.partition),), 0.5))
    half_NF = episode_features(trainer.family, pool, episode, gate_G, half_G)
    assert trainer._unlike(episode, whole_NF, whole_NF).item() == pytest.approx(0.0, abs=1e-5)
    assert trainer._unlike(episode, half_NF, whole_NF).item() > 1e-4


def test_widths_found_at_the_settled_depths_lose_less_and_stay(tiny):
    trainer = trainer_of(tiny, steps=10, settle=0.5, search=6)
    family, clock = trainer.family, tiny.clocks[0]
    for number in range(5):
        assert "widths" not in trainer.step(number)
    rows = trainer.step(5)["widths"]
    assert len(rows) >= 6
    assert any(row["loss"] < row["before"] for row in rows)
    assert all(row["loss"] <= row["before"] for row in rows)
    before = {name: tensor.clone() for name, tensor in family.policy.named_parameters()}
    alpha_M = torch.full((4,), 0.25)
    near = 0
    for row in rows:
        assert clock.upper_ms(row["sizes"]) <= row["rho"] * clock.whole_ms * (1 + 1e-3)
        sizes = solve(family, alpha_M, row["rho"] * clock.whole_ms * (1 + 1e-3), clock).sizes
        gone = left_out(clock, sizes)
        near += all(
            abs(sizes[module.name] - row["sizes"][module.name]) <= max(module.sizes()[0], 16)
            for module in family.partition
            if module.name not in gone
        )
    assert near >= len(rows) - 1  # the curves go through what was found; rounding may differ by a step
    for number in range(6, 10):
        trainer.step(number)
    assert torch.equal(family.policy.start_L, before["start_L"])
    assert torch.equal(family.policy.rise_KL, before["rise_KL"])


def test_a_run_resumed_after_the_search_ends_where_an_unbroken_one_does(tiny):
    whole, first, second = (trainer_of(tiny, settle=0.5, search=3) for _ in range(3))
    for number in range(6):
        whole.step(number)
    for number in range(4):
        first.step(number)
    second.load_tensors(first.tensors())
    second.load_state(first.state())
    for number in range(4, 6):
        second.step(number)
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(second.tensors()[name], tensor, msg=name)


@pytest.mark.parametrize(
    ("options", "message"), [({"search": -1}, "-1 widths"), ({"allocation": "uniform", "search": 2}, "uniform")]
)
def test_a_search_that_is_not_possible_is_refused(tiny, options, message):
    with pytest.raises(DataError, match=message):
        trainer_of(tiny, **options)
