"""Pictures of an adapt benchmark as SVG: shadow prices of modules by budget, and accuracy over measured latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from cells import OURS, WHOLE, Cells
from figures import areas

from apportion.methods.adapt.family import FamilyConfig

COLOURS = ("#0b5fa5", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#666666")
TICKS = (0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
NUM_BASELINES = 5
TITLE = 'font-size="17" font-weight="bold"'


def page(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
    style = f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" font-size="13">'
    return "\n".join([head + style, f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *parts, "</svg>\n"])


def text(x: float, y: float, told: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(told)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, width: float = 1.6, more: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" {more}/>'


def prices_svg(ours: Mapping, title: str) -> str:
    """Maps of modules over budgets: what a bit more of a module is worth, and its multiplier; below, time's price.

    Both maps are shares of the largest of each budget, so a column says what matters there whatever its scale.
    """
    state, names = ours["state"], list(ours["orders"])
    price_TB = np.array(state["mu"]["values"]).reshape(state["mu"]["shape"])
    lam_TBL = np.array(state["lambda"]["values"]).reshape(state["lambda"]["shape"])
    bins = price_TB.shape[1]
    floor = FamilyConfig().tightest
    middles = [floor ** (1 - (place + 0.5) / bins) for place in range(bins)]  # ranges are even in the logarithm
    heads = [f"{100 * rho:.0f}%" for rho in middles]
    left, top, cell, row, gap = 190.0, 84.0, 44.0, 20.0, 36.0
    width, under = left + 2 * bins * cell + gap + 30, top + row * len(names)
    parts = [text(16, 26, f"{title}; maps are shares of the largest at each budget", more=TITLE)]
    maps = (
        ("worth of a bit more of a module (v)", np.array(state["values"])),
        ("multiplier of its budget (λ), mean of targets", lam_TBL.mean(0)),
    )
    for place, (label, value_BL) in enumerate(maps):
        start = left + place * (bins * cell + gap)
        parts.append(text(start, top - 28, label, more='font-weight="bold"'))
        parts += [text(start + (b + 0.5) * cell, top - 8, head, "middle") for b, head in enumerate(heads)]
        for b in range(bins):
            largest = value_BL[b].max() or 1.0
            for m in range(len(names)):
                share = max(0.0, float(value_BL[b, m] / largest))
                x, y = start + b * cell, top + m * row
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell - 1:g}" height="{row - 1:g}" fill="{blue(share)}"/>'
                )
                if share >= 0.005:
                    ink = "white" if share > 0.55 else "#333"
                    told = text(x + cell / 2, y + 14, f"{share:.2f}", "middle", f'font-size="11" fill="{ink}"')
                    parts.append(told)
    parts += [text(left - 8, top + m * row + 14, short(name), "end") for m, name in enumerate(names)]
    axis = Axes(left, under + 50, bins * cell, 120, (middles[0], middles[-1]), (0.0, float(price_TB.max()) or 1.0))
    parts.append(text(left, under + 36, "price of time (μ), by target", more='font-weight="bold"'))
    parts += axis.frame(middles, heads, [0.0, float(price_TB.max()) or 1.0], ".1f")
    for place, target in enumerate(ours["targets"]):
        points = [axis.at(rho, price) for rho, price in zip(middles, price_TB[place], strict=True)]
        y = under + 76 + 22 * place
        parts += [line(points, COLOURS[place]), *(dot(x, y_, COLOURS[place]) for x, y_ in points)]
        x = left + bins * cell + gap
        parts += [line([(x, y - 4), (x + 28, y - 4)], COLOURS[place]), text(x + 36, y, target)]
    parts.append(text(left + bins * cell / 2, under + 210, "budget, of the whole network's latency", "middle"))
    return page(width, under + 226, parts)


def frontier_svg(cells: Cells, title: str) -> str:
    """Accuracy over measured latency, mean of targets, on each side: ours and the baselines nearest to it."""
    ranked = sorted(cells.baselines, key=lambda name: float(np.divide(*areas(cells, name))))
    names = [OURS, *ranked[:NUM_BASELINES]]
    parts = [text(16, 28, title, more=TITLE)]
    size, gap = 400.0, 76.0
    for place, side in enumerate(cells.main):
        lines = {name: mean_line(cells, name, side) for name in names}
        values = [100 * y for points in lines.values() for _, y in points]
        span_x = (0.97 * min(x for points in lines.values() for x, _ in points), 1.0)
        axis = Axes(64 + place * (size + gap), 66, size, 330, span_x, (min(values) - 0.5, max(values) + 0.5))
        parts.append(text(axis.left, 56, f"{side.upper()}: accuracy, %", more='font-weight="bold"'))
        ticks = [tick for tick in TICKS if tick >= span_x[0]]
        parts += axis.frame(ticks, [f"{100 * tick:.0f}%" for tick in ticks], nice(*axis.span_y), "g")
        for number, name in reversed(list(enumerate(names))):
            points = [axis.at(x, 100 * y) for x, y in lines[name]]
            parts.append(line(points, COLOURS[number], 2.8 if name == OURS else 1.5))
            parts += [dot(x, y, COLOURS[number], 4.0 if name == OURS else 2.6) for x, y in points]
        parts.append(text(axis.left + size / 2, 440, "measured latency, of the whole network's", "middle"))
    for number, name in enumerate(names):
        x = 64 + number * 146
        parts += [line([(x, 466), (x + 26, 466)], COLOURS[number], 3), text(x + 32, 470, name)]
    return page(64 + 2 * size + gap + 24, 486, parts)


def mean_line(cells: Cells, name: str, side: str) -> list[tuple[float, float]]:
    """Latency and accuracy of every budget, means over targets, by rising latency."""
    found = []
    for rho in (*cells.budgets, WHOLE):
        rows = cells.each(name, rho, side)
        found.append((float(np.mean([row.latency for row in rows])), float(np.mean(cells.all(name, rho, side)))))
    return sorted(point for point in found if not np.isnan(point[0]))


class Axes:
    """A frame with a logarithmic axis of shares and an even one of values."""

    def __init__(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        span_x: tuple[float, float],
        span_y: tuple[float, float],
    ) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.span_x, self.span_y = span_x, span_y

    def at(self, x: float, y: float) -> tuple[float, float]:
        low, high = np.log(self.span_x)
        share = (y - self.span_y[0]) / (self.span_y[1] - self.span_y[0])
        return self.left + float((np.log(x) - low) / (high - low)) * self.width, self.top + (1 - share) * self.height

    def frame(self, ticks: Sequence[float], labels: Sequence[str], values: Sequence[float], form: str) -> list[str]:
        under, right = self.top + self.height, self.left + self.width
        parts = [line([(self.left, self.top), (self.left, under), (right, under)], "#444", 1)]
        for tick, label in zip(ticks, labels, strict=True):
            x, _ = self.at(tick, self.span_y[0])
            parts += [line([(x, self.top), (x, under)], "#e4e4e4", 1), text(x, under + 18, label, "middle")]
        for value in values:
            _, y = self.at(self.span_x[0], value)
            parts.append(line([(self.left, y), (right, y)], "#e4e4e4", 1))
            parts.append(text(self.left - 6, y + 4, f"{value:{form}}", "end"))
        return parts


def dot(x: float, y: float, colour: str, radius: float = 3.0) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>'


def nice(low: float, high: float) -> list[float]:
    """Round values between two, four to nine of them."""
    for step in (0.5, 1.0, 2.0, 5.0, 10.0):
        if (high - low) / step <= 9:
            return [float(v) for v in np.arange(np.ceil(low / step) * step, high, step)]
    return [low, high]


def blue(share: float) -> str:
    """From nearly white to dark blue."""
    low, high = np.array([240, 244, 250]), np.array([8, 64, 129])
    return "#" + "".join(f"{round(v):02x}" for v in low + share * (high - low))


def short(name: str) -> str:
    """A module's name without what all share."""
    for long, new in (("encoder.", ""), ("attention.", ""), ("intermediate.dense", "neurons"), ("mlp.fc1", "neurons")):
        name = name.replace(long, new)
    return name
