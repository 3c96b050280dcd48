"""Composing by a support set: the loss, its gradient in the weights, the choices and the residual; a tiny encoder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from tests.methods.compose.checkpoints import tiny_bert
from tokenizers import Tokenizer, models, pre_tokenizers

from apportion.errors import BudgetError, DataError, InfeasibleError, ModelError
from apportion.methods.compose.blend import Blend, layer_groups, module_groups
from apportion.methods.compose.choose import _safest, best_single, greedy_soup, oracle, with_residual
from apportion.methods.compose.compose import ComposeConfig, open_all
from apportion.methods.compose.fewshot import TaskConfig, compose_for, prepare
from apportion.methods.compose.router import Router, save_router
from apportion.methods.compose.support import encode, held_out_losses, support_loss, support_scores
from apportion.tasks.support import read_support

WORDS = [f"w{n}" for n in range(58)]


def add_tokenizer(folder):
    tokenizer = Tokenizer(
        models.WordLevel({"[PAD]": 0, "[UNK]": 1, **{w: n + 2 for n, w in enumerate(WORDS)}}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    found = [tiny_bert(root / f"s{n}", n) for n in range(3)]
    for folder in found:
        add_tokenizer(folder)
    return found


@pytest.fixture
def task(tmp_path):
    """Two classes of sentences that share few words."""
    generator = np.random.default_rng(0)
    rows = []
    for label, low in (("a", 0), ("b", 20)):
        for _ in range(6):
            rows.append(f"{' '.join(f'w{n}' for n in generator.integers(low, low + 30, 6))},{label}")
    path = tmp_path / "task.csv"
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


@pytest.fixture
def blended(folders, task, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ComposeConfig(sources=tuple(map(str, folders)), method="oracle")
    return lambda by_layer=False: prepare(
        config, open_all(config, None), read_support(str(task)), tmp_path / f"scratch{by_layer}", by_layer, None
    )


def weights(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_scores_leave_each_example_out_of_its_own_class(generator):
    feature_ND = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    label_N = torch.tensor([0, 0, 0, 1, 1, 2, 0])
    score_NC = support_scores(feature_ND, label_N)
    for row in range(7):
        for label in range(3):
            others = [n for n in range(7) if label_N[n] == label and n != row] or [row]
            distance = (feature_ND[row] - feature_ND[others].mean(0)).square().sum()
            assert score_NC[row, label].item() == pytest.approx(-10 * distance.item())


def test_a_blend_is_the_mixture_of_its_sources(folders, blended):
    blend, _ = blended()
    blend.set_weights(weights(0.5, 0.2, 0.3))
    states = [transformers.BertModel.from_pretrained(folder).state_dict() for folder in folders]
    for name, parameter in blend.parameters.items():
        want = 0.5 * states[0][name] + 0.2 * states[1][name] + 0.3 * states[2][name]
        torch.testing.assert_close(parameter, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_gradient_in_the_weights_is_that_of_the_loss(blended, by_layer):
    blend, support = blended(by_layer)
    weight_LS = weights(0.5, 0.2, 0.3).expand(len(blend.groups), -1).clone()
    value, gradient_LS = blend.objective(support, weight_LS)
    assert value == pytest.approx(blend.loss(weight_LS, support), rel=1e-5)
    for row, place in ((0, 0), (len(blend.groups) - 1, 2)):
        losses = []
        for step in (-1e-2, 1e-2):
            moved_LS = weight_LS.clone()
            moved_LS[row, place] += step
            losses.append(blend.loss(moved_LS, support))
        slope = (losses[1] - losses[0]) / 2e-2
        assert gradient_LS[row, place].item() == pytest.approx(slope, rel=0.05, abs=2e-3)


def test_the_oracle_is_no_worse_than_what_it_could_have_taken(blended):
    blend, support = blended()
    single, greedy, found = (
        best_single(blend, support),
        greedy_soup(blend, support),
        oracle(blend, support, max_steps=6),
    )
    uniform = blend.loss(weights(1 / 3, 1 / 3, 1 / 3), support)
    assert found.loss <= min(single.loss, uniform) + 1e-6
    assert single.loss == pytest.approx(min(single.notes["single_losses"]))
    assert int((single.weight_LS > 0).sum()) == 1
    active = greedy.weight_LS[0][greedy.weight_LS[0] > 0]
    torch.testing.assert_close(active, torch.full_like(active, 1 / len(active)))


def test_max_sources_and_layers(blended):
    blend, support = blended(True)
    found = oracle(blend, support, max_steps=4, max_active=2)
    assert ((found.weight_LS > 0).sum(-1) <= 2).all()
    torch.testing.assert_close(found.weight_LS.sum(-1), torch.ones(len(blend.groups), dtype=torch.float64))


def test_a_residual_edits_few_modules_and_only_where_held_out_examples_gain(blended):
    blend, support = blended()
    choice = best_single(blend, support)
    found = with_residual(blend, support, choice, 2)
    losses = found.notes["held_out_loss"]
    assert losses[found.notes["residual_steps"]] <= losses[0]
    assert len(module_groups(list(found.edits))) <= 2
    assert found.loss <= choice.loss + 1e-6
    if found.notes["residual_steps"] == 0:
        assert found.edits == {}


def test_a_residual_that_held_out_examples_reject_is_dropped(blended, monkeypatch):
    blend, support = blended()
    choice = best_single(blend, support)
    calls = iter(range(10**6))
    monkeypatch.setattr(
        "apportion.methods.compose.choose.held_out_losses", lambda _, __, held: torch.full((len(held),), next(calls))
    )
    found = with_residual(blend, support, choice, 2)  # every step looks worse than the one before
    assert found.notes["residual_steps"] == 0
    assert found.edits == {}
    assert found.loss == pytest.approx(choice.loss, rel=1e-5)


@pytest.mark.parametrize(("gain", "noise", "taken"), [(0.5, 0.1, 1), (0.5, 5.0, 0), (-0.5, 0.1, 0), (0.0, 0.0, 0)])
def test_a_residual_takes_a_gain_that_luck_does_not_explain(gain, noise, taken):
    luck_N = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    start_N = torch.full((40,), 3.0).double()
    assert _safest(torch.stack([start_N, start_N - gain + noise * (luck_N - luck_N.mean())])) == taken


def test_a_residual_is_seldom_taken_where_there_is_nothing_to_gain():
    generator = torch.Generator().manual_seed(0)
    taken = [_safest(torch.randn(2, 30, generator=generator).double()) for _ in range(400)]
    assert sum(taken) / 400 < 0.06


def test_a_scattered_residual_edits_as_many_numbers_anywhere(blended, monkeypatch):
    blend, support = blended()
    choice = best_single(blend, support)
    calls = iter(range(10**6))
    monkeypatch.setattr(
        "apportion.methods.compose.choose.held_out_losses", lambda _, __, held: -torch.full((len(held),), next(calls))
    )
    found = {scattered: with_residual(blend, support, choice, 2, scattered=scattered) for scattered in (False, True)}
    numbers = {kind: sum(int((edit != 0).sum()) for edit in one.edits.values()) for kind, one in found.items()}
    allowed = sum(edit.numel() for edit in found[False].edits.values())
    assert 0 < numbers[True] <= allowed
    assert len(module_groups(list(found[True].edits))) > 2
    assert found[True].loss < choice.loss


def test_folds_hold_out_every_repeated_class_once(blended):
    _, support = blended()
    held = [len(part) for _, part in support.folds(4, 0)]
    assert sum(held) == len(support)
    for fitted, part in support.folds(4, 0):
        assert len(fitted) + len(part) == len(support)
        assert set(fitted.label_N.tolist()) == {0, 1}


def test_losses_of_the_support_on_itself_are_finite(blended):
    blend, support = blended()
    assert held_out_losses(blend.network, support, support).isfinite().all()
    assert np.isfinite(support_loss(blend.network, support))


@pytest.mark.parametrize("at_once", [1, 3, 7])
def test_a_support_in_parts_has_the_loss_and_gradient_of_the_whole(blended, monkeypatch, at_once):
    blend, support = blended()
    blend.set_weights(weights(0.2, 0.5, 0.3))
    loss, gradient = blend.gradients(support)
    monkeypatch.setattr("apportion.methods.compose.support._AT_ONCE", at_once)
    assert len(support.parts()) == -(-len(support) // at_once)
    again, in_parts = blend.gradients(support)
    assert again == pytest.approx(loss, rel=1e-5)
    for name, slope in gradient.items():
        torch.testing.assert_close(in_parts[name], slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "kwargs", [{}, {"block_weights": True}, {"residual_blocks": 2, "max_sources": 2}, {"budget": "10s"}]
)
def test_the_result_is_written_and_loads_as_it_was_chosen(folders, task, tmp_path, monkeypatch, kwargs):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ComposeConfig(sources=tuple(map(str, folders)), method="oracle")
    result = compose_for(config, TaskConfig(support=str(task), **kwargs), tmp_path / "out")
    from apportion.models.load import load

    network = load(str(tmp_path / "out"), tokens=8)
    support = encode(network, read_support(str(task)))
    assert support_loss(network, support) == pytest.approx(result["support_loss"], rel=1e-3, abs=1e-4)
    record = json.loads((tmp_path / "out" / "compose.json").read_text())
    assert sum(source["weight"] for source in record["sources"]) == pytest.approx(1)
    assert record["active_sources"] <= kwargs.get("max_sources", 3)


@pytest.mark.parametrize("method", ["best-single", "greedy-soup"])
def test_the_other_choices_are_written_too(folders, task, tmp_path, monkeypatch, method):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ComposeConfig(sources=tuple(map(str, folders)), method=method)
    result = compose_for(config, TaskConfig(support=str(task)), tmp_path / "out")
    assert result["active_sources"] >= 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("text,label\n", "no examples|none"),
        ("text,label\nhello w1,a\nhello w2,a\n", "one class"),
        ("text\nhello\n", "label"),
    ],
)
def test_a_support_that_is_none_is_refused(tmp_path, text, part):
    path = tmp_path / "task.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=part):
        read_support(str(path))


def test_budgets_that_can_not_be_read_or_met(folders, task, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BudgetError, match="40ms"):
        TaskConfig(support="x", budget="20MB")
    config = ComposeConfig(sources=tuple(map(str, folders)), method="oracle")
    with pytest.raises(InfeasibleError, match="below"):
        compose_for(config, TaskConfig(support=str(task), budget="0.001us"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_senseless_settings_are_refused():
    with pytest.raises(ModelError, match="max-sources"):
        TaskConfig(support="x", max_sources=0)


def test_groups_by_layer():
    names = [
        "embeddings.word.weight",
        "encoder.layer.0.a.weight",
        "encoder.layer.0.b.bias",
        "encoder.layer.11.a.weight",
    ]
    assert list(layer_groups(names)) == ["embeddings", "encoder.layer.0", "encoder.layer.11"]


def test_a_blend_refuses_names_that_the_network_does_not_have(blended):
    blend, _ = blended()

    class Renamed:
        ref = "renamed"
        tensors = {"other.weight": next(iter(blend.sources[0].tensors.values()))}  # noqa: RUF012

    with pytest.raises(ModelError, match=r"other\.weight"):
        Blend(blend.network, [Renamed()])


def test_a_task_seen_before_is_remembered_in_any_order_and_forgotten_when_anything_changes(
    folders, task, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ComposeConfig(sources=tuple(map(str, folders)), method="oracle")
    first = compose_for(config, TaskConfig(support=str(task)), tmp_path / "a")
    lines = task.read_text().splitlines()
    task.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    second = compose_for(config, TaskConfig(support=str(task)), tmp_path / "b")
    assert "remembered" not in first["search"]
    assert second["search"] == {"remembered": True}
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    other = compose_for(config, TaskConfig(support=str(task), max_sources=1), tmp_path / "c")
    assert "remembered" not in other["search"]


@pytest.mark.parametrize("mode", ["no-adapt", "gradient-free", "gradient"])
def test_a_router_s_weights_are_written_also_for_a_source_it_does_not_know(folders, task, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    router = Router(16)
    save_router(tmp_path / "router.safetensors", router, {"s1": torch.randn(16)})  # s2 was added later
    config = ComposeConfig(sources=tuple(map(str, folders[1:])), base=str(folders[0]), method="router")
    settings = TaskConfig(support=str(task), router=str(tmp_path / "router.safetensors"), mode=mode)
    result = compose_for(config, settings, tmp_path / "out")
    assert result["search"] == {"mode": mode, "new_sources": ["s2"]}
    assert sum(source["weight"] for source in result["sources"]) == pytest.approx(1)
    transformers.AutoModel.from_pretrained(tmp_path / "out")


def test_a_router_needs_its_base_and_a_known_mode(folders, task, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ComposeConfig(sources=tuple(map(str, folders)), method="router")
    with pytest.raises(ModelError, match="--base"):
        compose_for(config, TaskConfig(support=str(task), router="x"), tmp_path / "out")
    with pytest.raises(ModelError, match="possible are"):
        TaskConfig(support="x", mode="magic")
