"""The shadow prices that a run of adapt learned: what a bit more of every module is worth at every budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from apportion.core.folder import write_whole


def write_prices(prices: Mapping[str, Any], title: str, path: Path) -> None:
    """Writes the page from what ``shadow_prices`` gives: modules over budgets as a map, the price of time below."""
    budgets = [f"{100 * rho:.0f} %" for rho in prices["budgets"]]
    names = list(prices["modules"])
    # each budget's worths as shares of its largest: what matters there, whatever the scale of its losses
    largest = [max(prices["modules"][name][place] for name in names) or 1.0 for place in range(len(budgets))]
    shares = [[prices["modules"][name][place] / largest[place] for place in range(len(budgets))] for name in names]
    figure = make_subplots(
        rows=2,
        row_heights=[0.75, 0.25],
        vertical_spacing=0.12,
        subplot_titles=("worth of a bit more of a module, of the largest at that budget", "price of time"),
    )
    figure.add_trace(
        go.Heatmap(z=shares, x=budgets, y=names, colorscale="Blues", zmin=0, zmax=1, colorbar={"len": 0.7, "y": 0.62}),
        row=1,
        col=1,
    )
    for target, values in prices["time"].items():
        figure.add_trace(go.Scatter(x=budgets, y=values, mode="lines+markers", name=target), row=2, col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(title_text="budget, of the whole network's latency", row=2, col=1)
    height = 320 + 22 * len(names)
    figure.update_layout(
        template="plotly_white", title=title, height=height, margin={"l": 240}, legend={"orientation": "h", "y": -0.15}
    )
    write_whole(path, figure.to_html(include_plotlyjs=True, full_html=True).encode())
