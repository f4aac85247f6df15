"""One HTML page of what the lab found: verdicts first, then every experiment's tables and figures, drawn as plain SVG.

The page is made from the conclusion.json of each run, holds no script and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from .judging import VERDICTS

Record = dict[str, Any]  # what conclusion.json holds


def read(folder: Path) -> list[Record]:
    """The conclusions of all runs in a folder, and of all that were kept in it (`results`), by name."""
    runs = [json.loads(path.read_text("utf-8")) for path in folder.glob("*/conclusion.json")]
    found = runs + [json.loads(path.read_text("utf-8"))["conclusion"] for path in folder.glob("*.json")]
    return sorted(found, key=lambda record: (record["profile"] != "full", record["name"]))


def to_html(records: list[Record]) -> str:
    parts = ("regard.inspection", "page.css"), ("regard.lab", "page.css")
    style = "".join(resources.files(package).joinpath(name).read_text("utf-8") for package, name in parts)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    counted = Counter(v["verdict"] for r in records for v in r["verdicts"])
    counts = ", ".join(f"{counted[v]} {v}" for v in VERDICTS)
    summary = f"{_plural(len(records), 'experiment')}, {_plural(sum(counted.values()), 'claim')}: {counts}"
    body = "".join(map(_experiment, records))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>What the lab measured</title>
<style>{style}</style>
</head>
<body>
<header>
  <p class="kicker">regard lab</p>
  <h1>What the lab measured</h1>
  <p class="facts">{_text(summary)}</p>
</header>
<main>
<section aria-labelledby="verdicts"><h2 id="verdicts">Verdicts</h2>
<p class="about">Measured: the effect is there and agrees with the claim. Refuted: its 95 % interval excludes what was
claimed. Not significant: these runs cannot tell. Effects compare runs that share seed, weights and batches.</p>
<div class="scroll"><table class="verdicts">
<thead><tr><th>experiment</th><th>claim</th><th>measured</th><th>verdict</th></tr></thead>
<tbody>{"".join(_verdict_row(r, v) for r in records for v in r["verdicts"])}</tbody>
</table></div></section>
{body}
</main>
</body>
</html>
"""


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _text(text: object) -> str:
    return html.escape(str(text))


def _name(record: Record) -> str:
    quick = " (quick)" if record["profile"] != "full" else ""
    return f"{record['name']}{quick}"


def _verdict_row(record: Record, verdict: Record) -> str:
    note = f'<br><span class="source">{_text(verdict["note"])}</span>' if verdict["note"] else ""
    name, kind = _name(record), verdict["verdict"].replace(" ", "-")
    return (
        f'<tr><td class="top"><a href="#{_text(_id(record))}">{_text(name)}</a></td>'
        f'<td class="wrap">{_text(verdict["claim"])}<br><span class="source">{_text(verdict["source"])}</span></td>'
        f'<td class="wrap">{_text(verdict["effect"])}{note}</td>'
        f'<td class="top"><span class="tag {kind}">{_text(verdict["verdict"])}</span></td></tr>'
    )


def _id(record: Record) -> str:
    return f"{record['name']}-{record['profile']}"


def _experiment(record: Record) -> str:
    partly = "" if record["complete"] else f" Not finished: {_plural(len(record['seeds']), 'seed')} so far."
    colours = colours_of(record)
    figures = "".join(
        f'<figure><figcaption>{_text(f["title"])}</figcaption><div class="plot">{_figure(f, colours)}</div></figure>'
        for f in record["figures"]
    )
    tables = "".join(map(_table, record["tables"]))
    return f"""<section id="{_text(_id(record))}">
<h2>{_text(_name(record))}: {_text(record["question"])}</h2>
<p class="about">{_text(record["about"])}{_text(partly)}</p>
<div class="charts">{figures}</div>
{tables}
<table class="provenance">
{"".join(f"<tr><th>{name}</th><td>{_text(value)}</td></tr>" for name, value in provenance(record))}
<tr><th>command</th><td><code>{_text(record["command"])}</code></td></tr>
</table>
</section>
"""


def provenance(record: Record) -> list[tuple[str, str]]:
    """Where a claim comes from, what was computed, and by what, each in a line; the command apart."""
    versions = record["versions"]
    by = ", ".join(f"{name} {versions[name]}" for name in ("regard", "torch", "python"))
    device = versions.get("device", "cpu")  # runs of before devices could be chosen do not say
    by += f", {device}" if device != "cpu" else ""
    by += ", bf16" if versions.get("precision") == "bf16" else ""
    by += f", {versions['processor']}, {_plural(versions['threads'], 'thread')}"
    by += f" in each of {versions['processes']} processes" if versions["processes"] > 1 else ""
    return [
        ("source", record["source"]),
        ("text", f"{record['corpus']['name']}, {record['corpus']['characters']:,} characters"),
        ("configuration", ", ".join(f"{name} {_short(value)}" for name, value in record["config"].items())),
        ("computed by", by),
    ]


def colours_of(record: Record) -> dict[str, str]:
    """A name has one colour in all figures of an experiment."""
    names = dict.fromkeys(s["name"] for f in record["figures"] for s in f["series"])
    return {name: f"s{n % 10}" for n, name in enumerate(names)}


def _short(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(table: Record) -> str:
    head = "".join(f'<th class="text">{_text(cell)}</th>' for cell in table["header"])
    rows = "".join(
        "<tr>" + f'<th scope="row">{_text(row[0])}</th>' + "".join(map(_cell, row[1:])) + "</tr>"
        for row in table["rows"]
    )
    return (
        f'<figure class="wide"><figcaption>{_text(table["title"])}</figcaption><div class="scroll">'
        f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></figure>'
    )


def _cell(text: str) -> str:
    """Numbers to the right, words to the left."""
    kind = "" if text[:1].isdigit() or text[:1] in "-−" else ' class="text"'
    return f"<td{kind}>{_text(text)}</td>"


# --- figures ----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 420, 250, 52, 36, 10, 12


ALONE = """
svg { --ink: #1a1d21; --muted: #58626e; --line: #dde2e7; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ed; --muted: #9ba6b3; --line: #2f353d; } }
text { font: 11px system-ui, sans-serif; fill: var(--muted); } .axis { stroke: var(--line); }
.null { stroke: var(--muted); } .dashed { stroke-dasharray: 5 4; }
"""


def to_svg(figure: Record, colours: dict[str, str]) -> str:
    """A figure as a file of its own, which follows the reader's light or dark theme."""
    style = ALONE + resources.files("regard.lab").joinpath("page.css").read_text("utf-8").partition("/* page */")[0]
    return (
        _figure(figure, colours, ' xmlns="http://www.w3.org/2000/svg" class="plot"', f"<style>{style}</style>") + "\n"
    )


def _figure(figure: Record, colours: dict[str, str], attributes: str = 'width="100%"', first: str = "") -> str:
    height, parts = (_dots if figure["kind"] == "dots" else _lines)(figure, colours)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{_text(figure["title"])}" {attributes}>'
        f"{first}{''.join(parts)}</svg>"
    )


class _Axis:
    """Numbers to pixels, straight or by logarithm, with round ticks."""

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
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{_text(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _lines(figure: Record, colours: dict[str, str]) -> tuple[float, list[str]]:
    """The height, and what is drawn."""
    series = figure["series"]
    x = _Axis([v for s in series for v in s["x"]], LEFT, WIDTH - RIGHT, figure["log_x"])
    heights = [v for s in series for name in ("y", "low", "high") for v in s[name] or ()]
    reference = figure["reference"]
    y = _Axis([*heights, *([] if reference is None else [reference])], HEIGHT - BOTTOM, TOP, figure["log_y"])
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
        parts.append(f'<g class="{colours[s["name"]]}"><title>{_text(s["name"])}</title>{inner}</g>')
    height, keys = _keys([s["name"] for s in series], colours) if len(series) > 1 else (HEIGHT, [])
    return height, parts + keys


def _keys(names: list[str], colours: dict[str, str]) -> tuple[float, list[str]]:
    """The names below a figure, in as many rows as they need, and the height with them."""
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
    """One row per series: a dot for each number, a bar from low to high."""
    series = figure["series"]
    widest = max((len(s["name"]) for s in series), default=0)
    left, row = min(190, 12 + 6.2 * widest), 24
    height = TOP + row * len(series) + BOTTOM
    ends = [v for s in series for name in ("y", "low", "high") for v in s[name] or ()]
    reference = figure["reference"]
    x = _Axis([*ends, *([] if reference is None else [reference])], left, WIDTH - RIGHT, figure["log_x"])
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
