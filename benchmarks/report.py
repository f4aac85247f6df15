"""Results of the benchmarks: a Markdown table line by line, a CSV file, and a plot of ratios against length.

python benchmarks/report.py README.md docs/speed.md     # replace the table of goals in these pages by the last run's
"""

from __future__ import annotations

import csv
import math
import sys
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path

from measure import Spread


@dataclass
class Row:
    """One implementation in one case. A ratio is its time divided by regard's time in the same round."""

    case: str
    implementation: str
    kind: str = ""
    T: int = 0
    Tq: int = 0
    H: int = 0
    Hkv: int = 0
    D: int = 0
    dtype: str = "float32"
    density: float | None = None
    error: float | None = None
    ms_low: float | None = None
    ms: float | None = None
    ms_high: float | None = None
    ratio_low: float | None = None
    ratio: float | None = None
    ratio_high: float | None = None
    gflops: float | None = None  # billions of operations per second
    of_sgemm: float | None = None
    of_fma: float | None = None
    of_bandwidth: float | None = None
    extra_mib: float | None = None
    target: str = ""
    verdict: str = ""  # "reached", "not reached", or "" without a target
    note: str = ""

    def time(self, spread: Spread) -> None:
        self.ms_low, self.ms, self.ms_high = (1e3 * x for x in (spread.low, spread.middle, spread.high))

    def ratios(self, spread: Spread) -> None:
        self.ratio_low, self.ratio, self.ratio_high = spread.low, spread.middle, spread.high

    def judge(self, target: str, reached: bool) -> None:
        self.target, self.verdict = target, "reached" if reached else "not reached"


def short(x: float) -> str:
    """About three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 1 else f"{x:.3f}"


def interval(low: float | None, middle: float | None, high: float | None) -> str:
    if low is None or middle is None or high is None:
        return ""
    return f"{short(middle)} ({short(low)}–{short(high)})"


def _percent(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}"


COLUMNS = {  # heading: width, and the text of a row
    "case": (22, lambda r: r.case),
    "kind": (6, lambda r: r.kind),
    "T": (5, lambda r: str(r.T) if r.T else ""),
    "D": (3, lambda r: str(r.D) if r.D else ""),
    "implementation": (14, lambda r: r.implementation),
    "ms (10–90 %)": (21, lambda r: interval(r.ms_low, r.ms, r.ms_high)),
    "× regard (10–90 %)": (19, lambda r: interval(r.ratio_low, r.ratio, r.ratio_high)),
    "sgemm": (5, lambda r: _percent(r.of_sgemm)),
    "FMA": (4, lambda r: _percent(r.of_fma)),
    "MiB": (5, lambda r: "" if r.extra_mib is None else f"{r.extra_mib:.0f}"),
    "target": (9, lambda r: r.target),
    "verdict": (11, lambda r: r.verdict),
    "note": (0, lambda r: r.note),
}


def heading() -> str:
    names = " | ".join(name.ljust(width) for name, (width, _) in COLUMNS.items())
    rules = "|".join("-" * (width + 2) if width else "---" for width, _ in COLUMNS.values())
    return f"| {names} |\n|{rules}|"


def line(row: Row) -> str:
    return "| " + " | ".join(text(row).ljust(width) for width, text in COLUMNS.values()) + " |"


def write(rows: list[Row], machine: dict[str, str], folder: Path) -> list[Path]:
    """Write results.csv, results.md and ratios.svg into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table, page, plot = folder / "results.csv", folder / "results.md", folder / "ratios.svg"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(f.name for f in fields(Row)), *machine])
        writer.writeheader()
        writer.writerows(asdict(row) | machine for row in rows)
    about = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    page.write_text(f"{about}\n\n{heading()}\n" + "\n".join(map(line, rows)) + "\n")
    plot.write_text(svg(rows, ", ".join(machine[name] for name in ("cpu", "threads", "torch") if name in machine)))
    return [table, page, plot]


# --- the goals alone --------------------------------------------------------------------------------------------------

GOALS = "| case | kind | T | against | times as fast [10 %, 90 %] | goal | |"


def read(table: Path) -> list[Row]:
    """The rows that `write` wrote."""
    kinds = {f.name: str(f.type) for f in fields(Row)}

    def value(name: str, text: str) -> object:
        if kinds[name] == "str":
            return text
        return int(text) if kinds[name] == "int" else float(text) if text else None

    with table.open(newline="") as file:
        return [Row(**{n: value(n, text) for n, text in r.items() if n in kinds}) for r in csv.DictReader(file)]  # type: ignore[arg-type]


def goals(rows: list[Row]) -> str:
    """A table of the rows that have a goal, as README shows it."""
    lines, density = [GOALS, "|---|---|---|---|---|---|---|"], None
    for row in rows:
        density = row.density if row.implementation == "regard" else density
        if not row.verdict:
            continue
        case = {"call": "call, no gradient", "call, recorded": "call, gradient recorded (the forward alone)"}.get(
            row.case, row.case
        )
        case = case.replace("entmax15", "entmax 1.5")
        if row.implementation in ("SDPA", "eager", "regard causal"):
            found = f"**{short(row.ratio)}** [{short(row.ratio_low)}, {short(row.ratio_high)}]"  # type: ignore[arg-type]
            case += "" if density is None else f", {density:.1%} of keys".replace("%", " %")
            case += ", bf16" if row.dtype == "bfloat16" else ""
            case += f", D = {row.D}" if row.D != 64 else ""
        elif row.case.startswith("call"):
            found = row.note.replace(" us a call", " µs")
        elif row.extra_mib is not None:
            found = f"{row.extra_mib:.0f} MiB"
        else:
            found = row.note.replace("% of the read bandwidth, float32", " %").replace(
                "% of the read bandwidth, bfloat16", " %, bf16"
            )
        against = {"regard": "", "eager": "`entmax` package, eager"}.get(row.implementation, row.implementation)
        goal = row.target.replace(">=", "≥").replace("<=", "≤").replace(" us", " µs")
        missed = "not reached" if row.verdict == "not reached" else ""
        lines.append(f"| {case} | {row.kind} | {row.T} | {against} | {found} | {goal} | {missed} |")
    return "\n".join(lines) + "\n"


def with_goals(table: str, page: Path) -> str:
    """The page's text with its table of goals replaced by this one. Raises if the new table has fewer rows."""
    before, _, rest = page.read_text().partition(GOALS)
    if not rest:
        raise SystemExit(f"{page}: expected a table that begins with {GOALS!r}")
    old, _, after = rest.partition("\n\n")
    if len(old.strip().splitlines()) > len(table.strip().splitlines()) - 1:
        raise SystemExit(f"{page}: its table has more rows than the last run: run all benchmarks first")
    return f"{before}{table}\n{after}" if after else f"{before}{table}"


# --- the plot ---------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 330, 220, 46, 34, 28  # of a panel, and its margins
FONT = 'font-family="sans-serif" font-size="11"'
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e6c8a", "#b08900", "#555555")


def svg(rows: list[Row], caption: str) -> str:
    """Time divided by regard's time against T, both logarithmic: a panel per case, a line per peer."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row.ratio and row.implementation != "regard" and row.T:
            sizes = f"D={row.D}" + (f", Tq={row.Tq}, {row.dtype}" if row.Tq else "")
            density = "" if row.density is None else ", dense" if row.density > 0.05 else ", sparse"
            panels.setdefault(f"{row.case}, {row.kind}{density}, {sizes}", {}).setdefault(
                row.implementation, []
            ).append(row)
    panels = {title: lines for title, lines in panels.items() if len({r.T for rs in lines.values() for r in rs}) > 1}
    peers = list(dict.fromkeys(implementation for lines in panels.values() for implementation in lines))
    title = f"Time divided by regard's time, against T (above 1: regard is faster). {caption}"
    across = 3
    height = -(-len(panels) // across) * HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across * WIDTH}" height="{height}" {FONT}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16" font-size="13">{escape(title)}</text>',
    ]
    for n, implementation in enumerate(peers):
        x = 8 + 130 * n
        parts.append(f'<rect x="{x}" y="26" width="12" height="4" fill="{COLOURS[n % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 16}" y="32">{escape(implementation)}</text>')
    for n, (name, lines) in enumerate(panels.items()):
        parts.append(f'<g transform="translate({n % across * WIDTH}, {n // across * HEIGHT + 44})">')
        parts += _panel(name, lines, peers)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, lines: dict[str, list[Row]], peers: list[str]) -> list[str]:
    points = [row for rows in lines.values() for row in rows]
    lengths = sorted({row.T for row in points})
    low = min(1.0, *(r.ratio_low or r.ratio for r in points))  # type: ignore[type-var]
    high = max(2.0, *(r.ratio_high or r.ratio for r in points))  # type: ignore[type-var]
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))

    def x(T: int) -> float:
        share = math.log(T / lengths[0]) / math.log(lengths[-1] / lengths[0])
        return LEFT + 10 + share * (WIDTH - LEFT - 40)

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (math.log2(ratio) - first) / (last - first) * (HEIGHT - BOTTOM - TOP)

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for power in range(first, last + 1, max(1, (last - first) // 6)):
        at = y(2.0**power)
        colour = "#888" if power == 0 else "#ddd"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="{colour}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{2.0**power:g}</text>')
    marks = lengths[:: -(-len(lengths) // 5)]
    parts += [f'<text x="{x(T):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{T}</text>' for T in marks]
    for implementation, rows in lines.items():
        colour = COLOURS[peers.index(implementation) % len(COLOURS)]
        rows = sorted(rows, key=lambda r: r.T)
        path = " ".join(f"{x(r.T):.1f},{y(r.ratio):.1f}" for r in rows if r.ratio)
        if len({r.T for r in rows}) == len(rows):  # otherwise one length has several densities
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for r in rows:
            assert r.ratio and r.ratio_low and r.ratio_high
            at = f"{x(r.T):.1f}"
            parts.append(
                f'<line x1="{at}" x2="{at}" y1="{y(r.ratio_low):.1f}" y2="{y(r.ratio_high):.1f}" stroke="{colour}"/>'
            )
            parts.append(f'<circle cx="{at}" cy="{y(r.ratio):.1f}" r="2.5" fill="{colour}"/>')
    return parts


if __name__ == "__main__":
    found = goals(read(Path(__file__).parent / "results" / "results.csv"))
    pages = {Path(name): with_goals(found, Path(name)) for name in sys.argv[1:]}
    for path, text in pages.items():
        path.write_text(text)
    print(found)
