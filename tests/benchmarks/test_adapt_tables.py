"""The tables of the adapt benchmarks follow what the files hold: any methods, left-out targets, missing latencies."""

import importlib
import math
import xml.etree.ElementTree
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

TARGETS, BUDGETS = ("a", "b"), (0.2, 0.4, 0.8)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks/adapt_text")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("cells", "figures", "plots", "tables")})


def method(accuracy, sizes, targets=TARGETS):
    """Twelve episodes of each side; ``accuracy`` of a budget, ``sizes`` names what is measured there."""
    rows = []
    for target in TARGETS:
        for rho in (*BUDGETS, 1.0):
            whole = rho == 1.0
            luck_N = np.random.default_rng(0).normal(0, 0.01, 24)  # the same episodes for all
            rows.append(
                {
                    "target": target,
                    "rho": rho,
                    "accuracy": (accuracy(rho) + luck_N).tolist(),
                    "side": ["id", "ood"] * 12,
                    "domain": ["x", "y"] * 12,
                    "sizes": [] if whole else [[sizes, int(100 * rho)]],
                    "chosen": [] if whole else [0] * 24,
                }
            )
    return {"rows": rows, "targets": list(targets), "steps": 1}


def measured(**used):
    """Latency of the sizes of every method: the share of the budget that it uses."""
    places = {
        f"{sizes} {int(100 * rho)}": [share * rho, 0.0] for sizes, share in enumerate(used.values()) for rho in BUDGETS
    }
    return dict.fromkeys(TARGETS, places)


def rising(rho):
    return 0.9 + 0.05 * math.log(rho)


def raised(by, rho):
    return rising(rho) + by


def test_a_method_that_uses_less_of_its_budgets_is_behind_at_budgets_and_level_at_latencies(bench):
    methods = {"ours": method(rising, 0), "thrifty": method(lambda rho: rising(0.8 * rho if rho < 1 else 1), 1)}
    cells = bench.cells.Cells.of(methods, measured(ours=1.0, thrifty=0.8))
    for rho in BUDGETS:
        assert cells.ahead_at_budget("ours", "thrifty", rho, "id", "ood")[0] == pytest.approx(-0.05 * math.log(0.8))
        assert cells.ahead("ours", "thrifty", rho, "id", "ood")[0] == pytest.approx(0, abs=1e-9)
    assert bench.figures.areas(cells, "thrifty") == pytest.approx((rising(1), rising(1)), abs=0.05)
    assert np.divide(*bench.figures.areas(cells, "thrifty")) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("share", "wins"), [(1.9, 0), (2.1, 1)])
def test_a_baseline_without_a_point_is_beaten_only_where_it_cannot_keep_the_budget(bench, share, wins):
    """Tight is 0.2 alone. At 1.9 it begins before ours' next point and is better; at 2.1 it has no point there."""
    methods = {"ours": method(rising, 0), "slow": method(lambda rho: 0.1 + rising(rho), 1)}
    cells = bench.cells.Cells.of(methods, measured(ours=1.0, slow=share))
    assert (cells.ahead("ours", "slow", 0.2, "id") is None) == bool(wins)
    assert bench.figures.frontier(cells, cells.ahead, [cells.main])[0] == wins


def test_a_method_that_was_not_measured_is_neither_beaten_nor_ahead(bench):
    methods = {"ours": method(rising, 0), "new": method(lambda rho: rising(rho) - 0.1, 7)}
    cells = bench.cells.Cells.of(methods, measured(ours=1.0))
    assert cells.ahead("ours", "new", 0.2, "id") is None
    assert not cells.cannot("new", 0.2)
    assert bench.figures.frontier(cells, cells.ahead, [cells.main])[0] == 0


def test_an_episode_over_its_budget_counts_as_wrong(bench):
    cells = bench.cells.Cells.of({"ours": method(lambda _: 0.5, 0)}, measured(ours=1.01))
    assert bench.figures.held_and_used(cells, "ours") == (0.0, pytest.approx(1.01), pytest.approx(1.01))
    assert bench.figures.adjusted(cells, "ours") == 0


@pytest.mark.parametrize(("error", "clear"), [(0.002, 1.0), (0.1, 0.0)])
def test_a_budget_is_clearly_broken_where_the_clock_s_error_does_not_explain_it(bench, error, clear):
    places = {name: [latency, error] for name, (latency, _) in measured(ours=1.05)["a"].items()}
    cells = bench.cells.Cells.of({"ours": method(rising, 0)}, dict.fromkeys(TARGETS, places))
    assert bench.figures.clearly_broken(cells, "ours") == clear
    assert bench.figures.held_and_used(cells, "ours")[0] == 0


def test_a_network_that_fits_whole_in_int8_has_used_what_there_is(bench):
    ours = method(lambda _: 0.9, 0)
    for row in ours["rows"]:
        row["sizes"] = [["int8", *sizes[:1], min(sizes[1], 40)] for sizes in row["sizes"]]
    places = {"int8 0 20": [0.19, 0.0], "int8 0 40": [0.3, 0.0]}  # the second is the whole network
    cells = bench.cells.Cells.of({"ours": ours, "pruned": method(rising, 1)}, dict.fromkeys(TARGETS, places))
    held, used, of_budget = bench.figures.held_and_used(cells, "ours")
    assert held == 1
    assert used == pytest.approx((0.19 / 0.2 + 1 + 1) / 3)
    assert of_budget == pytest.approx((0.19 / 0.2 + 0.3 / 0.4 + 0.3 / 0.8) / 3)


def test_baselines_with_the_int8_of_ours_are_compared_apart(bench):
    names = ("ours", "ours-float", "global", "pruned-int8", "template-int8")
    better = {"ours": 0.02, "template-int8": 0.03}
    methods = {name: method(partial(raised, better.get(name, 0.0)), 0) for name in names}
    cells = bench.cells.Cells.of(methods, measured(ours=0.95))
    assert cells.baselines == ("global", "pruned-int8")
    assert cells.rounded == ("pruned-int8", "template-int8")
    figures = bench.figures.all_figures(cells, 1.0, [])
    assert figures["frontier_wins_tight"] == 1
    assert figures["frontier_wins_tight_in_float"] == figures["frontier_losses_in_float"] == 0
    assert figures["frontier_wins_tight_in_int8"] == 0
    assert figures["frontier_losses_in_int8"] == 1


def test_a_side_that_one_method_skipped_is_compared_among_the_others_on_the_same_episodes(bench):
    methods = {"ours": method(rising, 0), "other": method(rising, 0)}
    for row in methods["other"]["rows"]:
        some = [place for place, side in enumerate(row["side"]) if side == "id"][:9]
        for name in ("accuracy", "side", "domain", "chosen"):
            row[name] = [row[name][place] for place in some] if row[name] else []
    cells = bench.cells.Cells.of(methods, measured(ours=1.0))
    assert cells.judged("id") == ("ours", "other")
    assert cells.judged("ood") == ("ours",)
    assert cells.ahead_at_budget("ours", "other", 0.4, "id") == (0.0, 0.0)
    assert [len(cells.all("ours", 0.4, side)) for side in ("id", "ood")] == [18, 24]


@pytest.mark.parametrize("known", [measured(ours=0.95, left=0.9, other=0.9), {}])
def test_tables_and_figures_follow_the_files(bench, capsys, known):
    methods = {
        "ours": method(rising, 0),
        "ours-no-b": method(rising, 1, targets=("a",)),
        "other": method(lambda rho: rising(rho) - 0.02, 2),
        "ours:noise": method(lambda rho: rising(rho) - 0.01, 0),
    }
    figures = bench.tables.print_tables(methods, known, {}, [])
    out = capsys.readouterr().out
    assert "ours-no-b: trained without b" in out
    assert "| noise | -1.0±0.0 |" in out
    assert "nan" not in out
    assert figures["transfer_feasibility"] == (1.0 if known else None)
    assert figures["frontier_wins_tight"] == (1.0 if known else 0.0)
    assert figures["feasibility_gap"] == (0.0 if known else None)
    assert figures["frontier_wins_tight_at_budget"] == 1.0


def test_pictures_are_whole_and_name_what_they_show(bench):
    shape = [len(TARGETS), 4]
    state = {
        "mu": {"shape": shape, "values": list(range(8))},
        "lambda": {"shape": [*shape, 2], "values": [0.0] * 16},  # no module binds
        "values": [[0.1, 0.2]] * 4,
    }
    ours = {"state": state, "orders": {"layer.0.attention.heads": [], "layer.blocks": []}, "targets": list(TARGETS)}
    told = xml.etree.ElementTree.tostring(xml.etree.ElementTree.fromstring(bench.plots.prices_svg(ours, "a & b")))
    assert all(part in told for part in (b"layer.0.heads", b"layer.blocks", b"a &amp; b", b"0.50", b"1.00"))
    methods = {"ours": method(rising, 0), "other": method(rising, 1)}
    cells = bench.cells.Cells.of(methods, measured(ours=1.0, other=0.8))
    root = xml.etree.ElementTree.fromstring(bench.plots.frontier_svg(cells, "frontiers"))
    dots = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(dots) == 2 * 2 * (len(BUDGETS) + 1)  # sides, methods, budgets and the whole
