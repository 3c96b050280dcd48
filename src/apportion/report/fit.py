"""The page of a fit: the price of every part, and what every move was said to lose beside what it lost."""

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
    """Writes the page from the ``prices`` of a result: parts by price above, the losses of the moves below."""
    parts = list(prices["parts"].items())[:MAX_PARTS]
    steps = prices["steps"]
    figure = make_subplots(
        rows=2,
        subplot_titles=(f"{prices['loss']} lost for each {prices['unit']} saved", bound_line(prices)),
        vertical_spacing=0.15,
    )
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
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(title="move (point at it to see which)", row=2, col=1)
    figure.update_layout(template="plotly_white", title=title, height=700 + 18 * len(parts), margin={"l": 260})
    write_whole(path, figure.to_html(include_plotlyjs=True, full_html=True).encode())


def bound_line(prices: Mapping[str, Any]) -> str:
    """What was lost beside the sum and the bound, with how often the bound was exceeded in earlier runs."""
    line = f"{prices['loss']} lost: {prices['lost']:.3g}, the moves alone sum to {prices['predicted_loss']:.3g}"
    bound = prices["bound"]
    if bound is None:
        return line
    rate = f"{bound['num_exceeded']} of {bound['num_left_out']} earlier runs exceeded theirs"
    return f"{line}; bound {bound['upper']:.3g} ({'exceeded' if bound['exceeded'] else 'kept'}; {rate})"
