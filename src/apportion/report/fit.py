"""The page of a fit: the price of every part, what every move was said to lose beside what it lost, and the checks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from apportion.core.folder import write_whole

MAX_PARTS = 60


def write_fit(prices: Mapping[str, Any], title: str, path: Path) -> None:
    """Writes the page from the ``prices`` of a result: parts by price, losses of the moves, costs as checked."""
    parts = list(prices["parts"].items())[:MAX_PARTS]
    steps = prices["steps"]
    checks = prices.get("checks", ())  # runs from before these were told have none
    titles = [f"{prices['loss']} lost for each {prices['unit']} saved", bound_line(prices)]
    if checks:
        titles.append(f"{prices['cost']} as read and as measured, at every fresh check")
    figure = make_subplots(rows=len(titles), subplot_titles=titles, vertical_spacing=0.12)
    figure.add_trace(
        go.Bar(x=[part["price"] for _, part in parts], y=[name for name, _ in parts], orientation="h", name="price"),
        row=1,
        col=1,
    )
    moves = [f"{place}. {step['knob']} → {step['value']}" for place, step in enumerate(steps, start=1)]
    for name, key in (("said, summed", "predicted_loss"), ("was", "loss")):
        total = list(accumulate(step[key] for step in steps))
        line = go.Scatter(y=total, x0=1, dx=1, hovertext=moves, mode="lines+markers", name=name)
        figure.add_trace(line, row=2, col=1)
    for name, key in (("read", "predicted"), ("measured", "measured")) if checks else ():
        error = [check["stderr"] if key == "measured" else 0.0 for check in checks]
        line = go.Scatter(
            x=[check["after"] for check in checks],
            y=[check[key] for check in checks],
            error_y={"array": error},
            hovertext=[f"after {check['knob']} → {check['value']}" for check in checks],
            mode="lines+markers",
            name=name,
        )
        figure.add_trace(line, row=3, col=1)
    if checks:
        figure.update_xaxes(title="step of the move that was checked", row=3, col=1)
        figure.update_yaxes(title=prices["unit"], row=3, col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(title="move (point at it to see which)", row=2, col=1)
    figure.update_layout(
        template="plotly_white", title=title, height=350 * len(titles) + 18 * len(parts), margin={"l": 260}
    )
    write_whole(path, figure.to_html(include_plotlyjs=True, full_html=True).encode())


def bound_line(prices: Mapping[str, Any]) -> str:
    """What was lost beside the sum and the bound, with how often the bound was exceeded in earlier runs."""
    line = f"{prices['loss']} lost: {prices['lost']:.3g}, the moves alone sum to {prices['predicted_loss']:.3g}"
    bound = prices["bound"]
    if bound is None:
        return line
    rate = f"{bound['num_exceeded']} of {bound['num_left_out']} earlier runs exceeded theirs"
    return f"{line}; bound {bound['upper']:.3g} ({'exceeded' if bound['exceeded'] else 'kept'}; {rate})"
