"""Charts as SVG text: they need no plotting library, and an HTML page can contain them."""

import math
from collections.abc import Iterable, Mapping
from html import escape

import numpy as np
from jaxtyping import Float

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5d5d5d", "#b8860b")
"""Okabe and Ito's palette, which colour-blind readers can distinguish."""
_WIDTH, _HEIGHT, _GAP = 200, 110, 16
"""Size of a small chart, and the space between two, in pixels."""
_LEFT, _TOP = 40, 22
"""Space for a small chart's scale on its left and its name above it."""
_BAR_WIDTH = 640


def stacked_bars(bars: Mapping[str, Mapping[str, float]], *, title: str, unit: str, limit: float | None = None) -> str:
    """Draw one bar per name, made of parts end to end, with a legend; `limit` is a line across every bar."""
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    palette = (*COLOURS, "#882255")  # a ninth colour, so that all parts of a run differ
    colours = {name: palette[i % len(palette)] for i, name in enumerate(names)}
    totals = {bar: sum(parts.values()) for bar, parts in bars.items()}
    scale = _BAR_WIDTH / (max(*totals.values(), limit or 0.0) * 1.05 or 1.0)
    width, legend = _BAR_WIDTH + 2 * _GAP, 66 + 76 * len(bars)
    height = legend + 18 * math.ceil(len(names) / 2) + _GAP
    drawn = []
    for row, (bar, parts) in enumerate(bars.items()):
        x, y = float(_GAP), 76 + 76 * row
        drawn.append(f'<text x="{_GAP}" y="{y - 6}">{escape(bar)}: {totals[bar]:.4g} {escape(unit)}</text>')
        for name, value in parts.items():
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="26" fill="{colours[name]}">'
                f"<title>{escape(name)}: {value:.4g} {escape(unit)}</title></rect>"
            )
            x += value * scale
        if limit is not None:
            at = _GAP + limit * scale
            drawn.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 4}" y2="{y + 30}" stroke="#c00" stroke-width="2"/>'
            )
            drawn.append(f'<text x="{at:.1f}" y="{y + 42}" text-anchor="middle" fill="#c00">{limit:.4g}</text>')
    for i, name in enumerate(names):
        x, y = _GAP + (i % 2) * _BAR_WIDTH / 2, legend + 18 * (i // 2)
        drawn.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colours[name]}"/>')
        drawn.append(f'<text x="{x + 17}" y="{y + 10}">{escape(name)}</text>')
    return _svg(width, height, title, drawn)


def success_chart(
    bars: Mapping[str, tuple[int, int, float, float]],
    curves: Mapping[str, Mapping[int, float]],
    *,
    title: str,
) -> str:
    """Draw success rates as bars, and small charts of curves below them.

    `bars`: by name, (successes, episodes, lower and upper end of the interval). `curves`: by name, values by step.
    """
    label, bar, row = 190, 430, 34
    drawn = []
    for i, (name, (successes, episodes, low, high)) in enumerate(bars.items()):
        y = 56 + row * i
        rate, middle = successes / max(episodes, 1), y + 11
        drawn += [
            f'<text x="{label - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{label}" y="{y}" width="{bar}" height="22" fill="#f0f0f0"/>',
            f'<rect x="{label}" y="{y}" width="{bar * rate:.1f}" height="22" fill="{COLOURS[i % len(COLOURS)]}"/>',
            f'<line x1="{label + bar * low:.1f}" x2="{label + bar * high:.1f}" y1="{middle}" y2="{middle}" '
            'stroke="#222" stroke-width="1.5"/>',
            *(
                f'<line x1="{label + bar * end:.1f}" x2="{label + bar * end:.1f}" y1="{middle - 5}" y2="{middle + 5}" '
                'stroke="#222" stroke-width="1.5"/>'
                for end in (low, high)
            ),
            f'<text x="{label + bar + 8}" y="{y + 15}">{successes} of {episodes}</text>',
        ]
    top, columns = 56 + row * len(bars) + _GAP + _TOP, 4
    drawn += [
        _panel(
            name,
            points,
            x=_GAP + (i % columns) * (_WIDTH + _LEFT + _GAP) + _LEFT,
            y=top + (i // columns) * (_HEIGHT + _TOP + 2 * _GAP),
        )
        for i, (name, points) in enumerate(curves.items())
    ]
    rows = math.ceil(len(curves) / columns)
    width = max(label + bar + 90, min(len(curves), columns) * (_WIDTH + _LEFT + _GAP) + _GAP)
    return _svg(width, top + rows * (_HEIGHT + _TOP + 2 * _GAP) + _GAP, title, drawn)


def curve_chart(panels: Mapping[str, Mapping[str, Mapping[int, float]]], *, title: str, across: str) -> str:
    """Draw charts side by side, each with one line per name through its values by step, and one legend for all."""
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    wide, high, left, top = 360, 240, 44, 76
    drawn = []
    for column, (panel, curves) in enumerate(panels.items()):
        x = column * (left + wide + _GAP) + left
        steps = np.array([step for points in curves.values() for step in points])
        low, upper = padded_range(np.array([[value for points in curves.values() for value in points.values()]]))
        begin, span = steps.min(), max(steps.max() - steps.min(), 1)
        drawn += [
            f'<text x="{x}" y="{top - 10}" font-size="12">{escape(panel)}</text>',
            f'<rect x="{x}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="#ccc"/>',
            f'<text x="{x}" y="{top + high + 15}" fill="#666">{begin}</text>',
            f'<text x="{x + wide}" y="{top + high + 15}" text-anchor="end" fill="#666">{steps.max()} {escape(across)}'
            "</text>",
        ]
        for value in _round_numbers(low, upper):
            y = top + (upper - value) / (upper - low) * high
            drawn += [
                f'<line x1="{x}" x2="{x + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>',
                f'<text x="{x - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{value:g}</text>',
            ]
        for name, points in curves.items():
            path = " ".join(
                f"{x + (step - begin) / span * wide:.1f},{top + (upper - value) / (upper - low) * high:.1f}"
                for step, value in points.items()
            )
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
    for i, name in enumerate(names):
        x, y = left + (i % 3) * 250, top + high + 38 + 20 * (i // 3)
        drawn.append(f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{COLOURS[i % len(COLOURS)]}"/>')
        drawn.append(f'<text x="{x + 24}" y="{y - 3}">{escape(name)}</text>')
    height = top + high + 38 + 20 * math.ceil(len(names) / 3)
    return _svg(len(panels) * (left + wide + _GAP) + _GAP, height, title, drawn)


def _round_numbers(low: float, high: float) -> list[float]:
    """Return two to six round numbers between the two, for a scale."""
    size = 10.0 ** math.floor(math.log10(high - low))
    step = next(part * size for part in (0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (part * size) <= 6)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def padded_range(lines: Float[np.ndarray, "lines points"]) -> tuple[float, float]:
    """Return the range of values that a chart of the lines should show; NaN and Inf are ignored."""
    finite = lines[np.isfinite(lines)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    margin = 0.05 * (high - low) or 0.5 * abs(high) or 0.5  # puts a constant line in the middle
    return low - margin, high + margin


def _panel(name: str, points: Mapping[int, float], *, x: int, y: int) -> str:
    """Draw a small chart of values by step, in rising order; NaN and Inf are left out."""
    low, high = padded_range(np.array([list(points.values())], np.float64))
    steps = list(points)
    first, last = (steps[0], steps[-1]) if steps else (0, 0)

    def place(step: int, value: float) -> tuple[float, float]:
        across = (step - first) / max(last - first, 1) * _WIDTH
        down = (high - value) / (high - low) * _HEIGHT
        return x + across, y + down

    placed = [place(step, float(value)) for step, value in points.items() if np.isfinite(value)]
    line = " ".join(f"{across:.1f},{down:.1f}" for across, down in placed)
    drawn = f'<polyline fill="none" stroke="{COLOURS[0]}" stroke-width="1.5" points="{line}"/>'
    if len(placed) == 1:  # a line of one point is invisible
        ((across, down),) = placed
        drawn += f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{COLOURS[0]}"/>'
    return (
        f'<text x="{x}" y="{y - 6}">{escape(name)}</text>'
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#ccc"/>'
        f'<text x="{x - 4}" y="{y + 9}" text-anchor="end" fill="#666">{high:.3g}</text>'
        f'<text x="{x - 4}" y="{y + _HEIGHT}" text-anchor="end" fill="#666">{low:.3g}</text>'
        f'<text x="{x}" y="{y + _HEIGHT + 12}" fill="#666">{first}</text>'
        f'<text x="{x + _WIDTH}" y="{y + _HEIGHT + 12}" text-anchor="end" fill="#666">step {last}</text>' + drawn
    )


def _svg(width: int, height: int, title: str, drawn: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#222">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{_GAP}" y="30" font-size="16">{escape(title)}</text>' + "".join(drawn) + "</svg>\n"
    )
