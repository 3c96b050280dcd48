"""Predicted against measured latency, with the upper bound, as one standalone page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from apportion.cost.profile import Profile
from apportion.cost.sample import Sample


def write_scatter(profile: Profile, samples: Sequence[Sample], path: Path) -> None:
    """Writes the page; points above the bound's line broke it."""
    rows = sorted((profile.cost.predict(s.shares), s.latency_ms, s.stderr_ms) for s in samples)
    predicted, measured, errors = (list(column) for column in zip(*rows, strict=True))
    figure = go.Figure()
    ends = [0.0, 1.05 * max(*predicted, *measured)]
    figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", name="prediction", line={"dash": "dot", "color": "#888"}))
    bound = profile.cost.bound
    if bound is not None and bound.finite:
        upper = [bound(value) for value in predicted]
        figure.add_trace(
            go.Scatter(
                x=predicted, y=upper, mode="lines", name=f"bound ({1 - bound.alpha:.0%})", line={"color": "#c44"}
            )
        )
    figure.add_trace(
        go.Scatter(
            x=predicted,
            y=measured,
            mode="markers",
            name="measured",
            marker={"color": "#26c", "size": 8},
            error_y={"type": "data", "array": [1.96 * error for error in errors], "thickness": 1},
        )
    )
    figure.update_layout(
        template="plotly_white",
        title=f"{profile.model} on {profile.target.name}: {len(rows)} configurations the profile has not seen",
        xaxis_title="predicted latency (ms)",
        yaxis_title="measured latency (ms)",
        legend={"x": 0.02, "y": 0.98},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    figure.write_html(draft, include_plotlyjs=True, full_html=True)
    draft.replace(path)
