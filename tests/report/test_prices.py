"""The page of shadow prices names every module, target and budget, and works where all prices are zero."""

import pytest

from apportion.report.prices import write_prices


@pytest.mark.parametrize("worth", [0.5, 0.0])
def test_the_page_shows_modules_targets_and_budgets(tmp_path, worth):
    prices = {
        "budgets": [0.2, 0.6],
        "time": {"ort-cpu-1t": [0.0, 1.0]},
        "modules": {"layer.0.heads": [worth, 0.1 * worth], "layer.0.mlp": [0.0, worth]},
    }
    write_prices(prices, "a title", tmp_path / "prices.html")
    page = (tmp_path / "prices.html").read_text()
    for part in ("layer.0.heads", "layer.0.mlp", "ort-cpu-1t", "20 %", "60 %", "a title"):
        assert part in page.replace("\\u0025", "%")
