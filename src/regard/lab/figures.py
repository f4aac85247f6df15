"""Draws an experiment's figures as plain SVG: lines over an axis, or rows of dots."""

from __future__ import annotations

import html
import math
from importlib import resources
from typing import Any

Record = dict[str, Any]  # a figure or a whole conclusion, as conclusion.json holds it


def escaped(text: object) -> str:
    return html.escape(str(text))


def colours_of(record: Record) -> dict[str, str]:
    """The colour class of each series name, the same in all figures of an experiment."""
    names = dict.fromkeys(s["name"] for f in record["figures"] for s in f["series"])
    return {name: f"s{n % 10}" for n, name in enumerate(names)}


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 250, 52, 36, 10, 12  # pixels; the last four are margins

# The style of a figure that is a file of its own.
ALONE = """
svg { --ink: #1a1d21; --muted: #58626e; --line: #dde2e7; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ed; --muted: #9ba6b3; --line: #2f353d; } }
text { font: 11px system-ui, sans-serif; fill: var(--muted); } .axis { stroke: var(--line); }
.null { stroke: var(--muted); } .dashed { stroke-dasharray: 5 4; }
"""


def to_svg(figure: Record, colours: dict[str, str]) -> str:
    """A figure as a file of its own, which follows the light or dark theme of the reader."""
    style = ALONE + resources.files("regard.lab").joinpath("page.css").read_text("utf-8").partition("/* page */")[0]
    return (
        draw_figure(figure, colours, ' xmlns="http://www.w3.org/2000/svg" class="plot"', f"<style>{style}</style>")
        + "\n"
    )


def draw_figure(figure: Record, colours: dict[str, str], attributes: str = 'width="100%"', first: str = "") -> str:
    """The SVG element of a figure; `first` is put before what is drawn."""
    height, parts = (_dots if figure["kind"] == "dots" else _lines)(figure, colours)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escaped(figure["title"])}" {attributes}>'
        f"{first}{''.join(parts)}</svg>"
    )


class Axis:
    """Maps numbers to pixels, linearly or by logarithm, with round ticks."""

    def __init__(self, values: list[float], start: float, stop: float, log: bool) -> None:
        values = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
        self.log, self.start, self.stop = log, start, stop
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if log:
            low, high = math.log10(low), math.log10(high)
        margin = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
        self.low, self.high = low - margin, high + margin

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value)
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def shows(self, value: float | None) -> bool:
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self) -> list[float]:
        if self.log and self.high - self.low > 0.8:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            steps = (1, 2, 5) if self.high - self.low < 3 else (1,)
            found = [s * 10.0**p for p in powers for s in steps]
            return [t for t in found if self.low <= math.log10(t) <= self.high]
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        raw = (high - low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = min((unit * s for s in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
        first = math.ceil(low / step)
        return [n * step for n in range(first, math.floor(high / step) + 1)]


def _number(value: float) -> str:
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def _label(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escaped(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _lines(figure: Record, colours: dict[str, str]) -> tuple[float, list[str]]:
    """The height of a figure of lines, and its elements."""
    series = figure["series"]
    x = Axis([v for s in series for v in s["x"]], LEFT, WIDTH - RIGHT, figure["log_x"])
    heights = [v for s in series for name in ("y", "low", "high") for v in s[name] or ()]
    reference = figure["reference"]
    y = Axis([*heights, *([] if reference is None else [reference])], HEIGHT - BOTTOM, TOP, figure["log_y"])
    parts = []
    for tick in y.ticks():
        parts += [
            _line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "axis"),
            _label(LEFT - 5, y(tick) + 4, _number(tick), "end"),
        ]
    parts += [_label(x(tick), HEIGHT - BOTTOM + 15, _number(tick)) for tick in x.ticks()]
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, figure["x"]))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_label(11, middle, figure["y"], more=f' transform="rotate(-90 11 {middle:.1f})"'))
    if reference is not None:
        parts.append(_line(LEFT, y(reference), WIDTH - RIGHT, y(reference), "null dashed"))
    for s in series:
        places = [i for i, (a, b) in enumerate(zip(s["x"], s["y"], strict=True)) if x.shows(a) and y.shows(b)]
        inner = ""
        if s["low"] and s["high"]:
            ends = [i for i in places if y.shows(s["low"][i]) and y.shows(s["high"][i])]
            edge = [(x(s["x"][i]), y(s["high"][i])) for i in ends] + [
                (x(s["x"][i]), y(s["low"][i])) for i in ends[::-1]
            ]
            inner += f'<polygon class="band" points="{_points(edge)}"/>'
        path = [(x(s["x"][i]), y(s["y"][i])) for i in places]
        inner += f'<polyline class="line own" fill="none" points="{_points(path)}"/>'
        inner += "".join(
            f'<circle class="dot own" r="2.5" cx="{a:.1f}" cy="{b:.1f}"/>' for a, b in path if len(path) <= 12
        )
        parts.append(f'<g class="{colours[s["name"]]}"><title>{escaped(s["name"])}</title>{inner}</g>')
    height, keys = _keys([s["name"] for s in series], colours) if len(series) > 1 else (HEIGHT, [])
    return height, parts + keys


def _keys(names: list[str], colours: dict[str, str]) -> tuple[float, list[str]]:
    """The total height with the names below a figure, in as many rows as they need, and their elements."""
    parts, x, y = [], LEFT, HEIGHT + 16
    for name in names:
        width = 34 + 6.2 * len(name)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + 17
        key = f'<rect class="key" x="{x:.1f}" y="{y - 6}" width="14" height="4"/>'
        parts.append(f'<g class="{colours[name]}">{key}{_label(x + 19, y, name, "start")}</g>')
        x += width
    return y + 8, parts


def _dots(figure: Record, colours: dict[str, str]) -> tuple[float, list[str]]:
    """The height of a figure of dots, and its elements: per series a row with a dot per number and a bar low–high."""
    series = figure["series"]
    widest = max((len(s["name"]) for s in series), default=0)
    left, row = min(190, 12 + 6.2 * widest), 24
    height = TOP + row * len(series) + BOTTOM
    ends = [v for s in series for name in ("y", "low", "high") for v in s[name] or ()]
    reference = figure["reference"]
    x = Axis([*ends, *([] if reference is None else [reference])], left, WIDTH - RIGHT, figure["log_x"])
    parts = []
    for tick in x.ticks():
        parts += [
            _line(x(tick), TOP, x(tick), height - BOTTOM, "axis"),
            _label(x(tick), height - BOTTOM + 15, _number(tick)),
        ]
    parts.append(_label((left + WIDTH - RIGHT) / 2, height - 4, figure["x"]))
    if reference is not None:
        parts.append(_line(x(reference), TOP, x(reference), height - BOTTOM, "null dashed"))
    for n, s in enumerate(series):
        middle = TOP + row * (n + 0.5)
        inner = _label(left - 6, middle + 4, s["name"], "end", ' class="name"')
        for low, high in zip(s["low"] or (), s["high"] or (), strict=True):
            if x.shows(low) and x.shows(high):
                inner += _line(x(low), middle, x(high), middle, "bar")
        shown = [v for v in s["y"] if x.shows(v)]
        inner += "".join(f'<circle class="dot own" r="4" cx="{x(v):.1f}" cy="{middle:.1f}"/>' for v in shown)
        if not shown:
            inner += _label(left + 4, middle + 4, "diverged", "start")
        parts.append(f'<g class="{colours[s["name"]]}">{inner}</g>')
    return height, parts


def _points(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
