"""The figures of theory.md, computed by regard and drawn as plain SVG: `python docs/figures.py` writes docs/figures/.

They follow the browser's light or dark theme. Coordinates are rounded to a tenth of a pixel, so that the files do not
depend on rounding errors of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import Tensor

import regard
from regard import KL, Transport, Tsallis

FOLDER = Path(__file__).parent / "figures"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px; fill: #57606a }
.bold { font-weight: 600 } .axis { stroke: #8c959f; stroke-width: 1; fill: none }
.grid { stroke: #d0d7de; stroke-width: .6 }
.a { stroke: #0969da; fill: none } .b { stroke: #bc4c00; fill: none } .c { stroke: #1a7f37; fill: none }
.d { stroke: #8250df; fill: none }
.fa { fill: #0969da } .fb { fill: #bc4c00 } .fc { fill: #1a7f37 } .fd { fill: #8250df } .fg { fill: #8c959f }
.line { stroke-width: 2 } .thin { stroke-width: 1 } .band { fill: #0969da; fill-opacity: .16 }
.key { fill: #57606a } .level { stroke: #0969da; stroke-opacity: .45; stroke-width: .8; fill: none }
.dash { stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .axis { stroke: #6e7681 } .grid { stroke: #30363d }
.a { stroke: #58a6ff } .b { stroke: #f0883e } .c { stroke: #3fb950 } .d { stroke: #bc8cff }
.fa { fill: #58a6ff } .fb { fill: #f0883e } .fc { fill: #3fb950 } .fd { fill: #bc8cff } .fg { fill: #6e7681 }
.band { fill: #58a6ff } .key { fill: #9198a1 } .level { stroke: #58a6ff }
}
"""
Point = tuple[float, float]


class Drawing:
    """SVG elements, one method per kind; coordinates in pixels from the top left."""

    def __init__(self, width: int, height: int, title: str):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        )
        self.parts: list[str] = []

    def path(self, points: Iterable[Point], style: str, closed: bool = False) -> None:
        steps = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path class="{style}" d="{steps}{" Z" if closed else ""}"/>')

    def segments(self, pairs: Iterable[tuple[Point, Point]], style: str) -> None:
        steps = " ".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for a, b in pairs)
        self.parts.append(f'<path class="{style}" d="{steps}"/>')

    def line(self, a: Point, b: Point, style: str) -> None:
        self.path((a, b), style)

    def dot(self, at: Point, radius: float, style: str) -> None:
        self.parts.append(f'<circle class="{style}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}"/>')

    def bar(self, x: float, width: float, y0: float, y1: float, style: str) -> None:
        top, height = min(y0, y1), abs(y1 - y0)
        self.parts.append(
            f'<rect class="{style}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        )

    def text(self, at: Point, text: str, style: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text class="{style}" x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def write(self, name: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.svg").write_text(self.head + "\n" + "\n".join(self.parts) + "\n</svg>\n")


class Axes:
    """A rectangle of the drawing with its own scales; `log` makes x logarithmic."""

    def __init__(self, on: Drawing, box: tuple[float, float, float, float], x: Point, y: Point, log: bool = False):
        self.on, self.box, self.x, self.y, self.log = on, box, x, y, log

    def at(self, x: float, y: float) -> Point:
        left, top, width, height = self.box
        low, high = self.x
        share = math.log(x / low) / math.log(high / low) if self.log else (x - low) / (high - low)
        return left + share * width, top + height * (1 - (y - self.y[0]) / (self.y[1] - self.y[0]))

    def ticks(self, xs: Sequence[float], ys: Sequence[float], x_name: str = "", y_name: str = "") -> None:
        left, top, width, height = self.box
        for y in ys:
            self.on.line(self.at(self.x[0], y), self.at(self.x[1], y), "grid")
            self.on.text((left - 6, self.at(self.x[0], y)[1] + 4), f"{y:g}".replace("-", "−"), "small", "end")
        for x in xs:
            self.on.text((self.at(x, self.y[0])[0], top + height + 16), f"{x:g}".replace("-", "−"), "small", "middle")
        self.on.line((left, top + height), (left + width, top + height), "axis")
        self.on.text((left + width / 2, top + height + 32), x_name, "small", "middle")
        self.on.text((left, top - 8), y_name, "small")

    def curve(self, xs: Tensor, ys: Tensor, style: str) -> None:
        self.on.path((self.at(x, y) for x, y in zip(xs.tolist(), ys.tolist(), strict=True)), style)


def contour(values: Tensor, corner: Callable[[int, int], Point], level: float) -> list[tuple[Point, Point]]:
    """The level line of values on a triangular grid [n, n] (i + j < n), by linear interpolation in each triangle."""
    n, found = values.shape[0], []
    table = values.tolist()

    def crossing(a: tuple[int, int], b: tuple[int, int]) -> Point | None:
        u, v = table[a[0]][a[1]] - level, table[b[0]][b[1]] - level
        if (u < 0) == (v < 0):
            return None
        t, (ax, ay), (bx, by) = u / (u - v), corner(*a), corner(*b)
        return ax + t * (bx - ax), ay + t * (by - ay)

    for i in range(n - 1):
        for j in range(n - 1 - i):
            for triangle in (((i, j), (i + 1, j), (i, j + 1)), ((i + 1, j), (i, j + 1), (i + 1, j + 1))):
                if sum(triangle[2]) > n - 1:
                    continue
                a, b, c = triangle
                ends = [p for p in (crossing(a, b), crossing(b, c), crossing(c, a)) if p is not None]
                if len(ends) == 2:
                    found.append((ends[0], ends[1]))
    return found


def simplex() -> None:
    """Three keys: the objective of each plan, and the path of the optimum as the temperature falls."""
    scores = torch.tensor([1.0, 0.7, 0.0])
    panels: list[tuple[str, Transport, str]] = [
        ("softmax (KL), τ = 0.25", Transport(KL(), temperature=0.25), "a"),
        ("softmax (KL), τ = 1", Transport(KL(), temperature=1.0), "a"),
        ("sparsemax (Tsallis 2), τ = 1", Transport(Tsallis(2.0), temperature=1.0), "b"),
    ]
    drawing = Drawing(840, 300, "The objective over the simplex of three keys and its optimum as the temperature moves")
    side, n = 230, 61
    temperatures = torch.logspace(-2.3, 2.3, 161)
    grid = torch.linspace(0, 1, n)
    for panel, (title, problem, style) in enumerate(panels):
        left, bottom = 30 + 275 * panel, 252.0

        def place(p1: float, p2: float, left: float = left, bottom: float = bottom) -> Point:
            """Key 1 on top, key 2 at the right, key 3 at the left."""
            return left + side * (p2 + p1 / 2), bottom - side * math.sqrt(0.75) * p1

        def corner(i: int, j: int, place: Callable[[float, float], Point] = place) -> Point:
            return place(grid[i].item(), grid[j].item())

        p1, p2 = torch.meshgrid(grid, grid, indexing="ij")
        plans = torch.stack([p1, p2, (1 - p1 - p2).clamp(min=0)], -1)
        worth = regard.certify(scores.expand_as(plans), plans, problem).primal
        best = regard.solve(scores, problem)
        top = float(best.certificate().primal)
        for step in (0.01, 0.04, 0.09, 0.16, 0.25, 0.36, 0.49, 0.64, 0.81):
            drawing.segments(contour(worth, corner, top - step), "level")
        drawing.path((place(1, 0), place(0, 1), place(0, 0)), "axis", closed=True)
        regularizer = problem.regularizer
        path = regard.solve(
            scores.expand(len(temperatures), 3), Transport(regularizer, temperature=temperatures[:, None])
        )
        drawing.path((place(*p[:2]) for p in path.weights.tolist()), f"{style} line")
        for tau in (0.1, 0.25, 0.5, 1.0, 2.0):
            weights = regard.solve(scores, Transport(regularizer, temperature=tau)).weights.tolist()
            drawing.dot(place(*weights[:2]), 2.5, f"f{style}")
        at = place(*best.weights.tolist()[:2])
        drawing.dot(at, 5.5, f"f{style}")
        drawing.text((left + side / 2, 290), title, "bold", "middle")
        for name, where, (dx, dy), anchor in (
            ("s = 1", place(1, 0), (0.0, -8.0), "middle"),
            ("0.7", place(0, 1), (0.0, 16.0), "middle"),
            ("0", place(0, 0), (0.0, 16.0), "middle"),
        ):
            drawing.text((where[0] + dx, where[1] + dy), name, "small", anchor)
    drawing.write("simplex")


def advantage() -> None:
    """One row: weights, utilities with their baseline, and the resulting gradient."""
    scores = torch.tensor([2.8, 1.2, 0.5, 3.1])
    utility = torch.tensor([1.0, -1.5, 0.5, 2.0])
    keys = ["cat", "sat", "on", "the"]
    p = scores.softmax(-1)
    advantages = regard.geometry.advantage(p, utility)
    gradient = regard.geometry.policy_gradient(scores, utility)
    baseline = float((utility - advantages)[0])
    drawing = Drawing(840, 250, "Weights, utilities with their baseline, and the gradient of the scores")
    for panel, (title, values, limits, ticks) in enumerate(
        (
            ("weights p", p, (0.0, 0.6), (0, 0.2, 0.4, 0.6)),
            ("utility u, baseline E[u]", utility, (-2.0, 2.5), (-2, -1, 0, 1, 2)),
            ("gradient p (u − E[u])", gradient, (-0.3, 0.5), (-0.2, 0, 0.2, 0.4)),
        )
    ):
        axes = Axes(drawing, (45 + 275 * panel, 40, 215, 160), (0, 4), limits)
        axes.ticks([], ticks)
        drawing.text((45 + 275 * panel, 22), title, "bold")
        for i, value in enumerate(values.tolist()):
            x, zero = axes.at(i + 0.22, 0)
            good = panel != 1 or value > baseline
            style = ("fa", "fc" if good else "fb", "fc" if value > 0 else "fb")[panel]
            drawing.bar(x, axes.at(i + 0.78, 0)[0] - x, zero, axes.at(0, value)[1], style)
            drawing.text((axes.at(i + 0.5, 0)[0], 218), keys[i], "small", "middle")
        drawing.line(axes.at(0, 0), axes.at(4, 0), "axis")
        if panel == 1:
            drawing.line(axes.at(0, baseline), axes.at(4, baseline), "d line dash")
            drawing.text((axes.at(4, 0)[0] + 4, axes.at(0, baseline)[1] + 4), f"{baseline:.2f}", "small")
    drawing.write("advantage")


def fisher() -> None:
    """Queries in the plane: how far each one can move until its plan has changed by a fixed amount."""
    generator = torch.Generator().manual_seed(3)
    keys = 1.1 * torch.randn(7, 2, generator=generator)
    grid = torch.cartesian_prod(torch.linspace(-2.6, 2.6, 9), torch.linspace(-1.8, 1.8, 6))
    query, key = grid[None, None], keys[None, None]
    columns = [
        regard.geometry.fisher_vector_product(query, key, torch.eye(2)[i].expand_as(query), scale=1.0)[0, 0]
        for i in range(2)
    ]
    metric = torch.stack(columns, -1)  # [queries, 2, 2]
    drawing = Drawing(840, 430, "Fisher's metric of queries in the plane, with the keys")
    axes = Axes(drawing, (30, 20, 780, 380), (-3.3, 3.3), (-2.3, 2.3))
    longest = 0.31
    turn = torch.linspace(0, 2 * math.pi, 49)
    circle = torch.stack([turn.cos(), turn.sin()], -1)
    for centre, matrix in zip(grid, metric, strict=True):
        values, vectors = torch.linalg.eigh(matrix.double())
        # The ellipse x' F x = r^2. It is unbounded in a direction that does not change the plan: cut off and dashed.
        lengths = (0.11 / values.clamp(min=1e-12).sqrt()).float()
        shape = circle * lengths.clamp(max=longest) @ vectors.float().T + centre
        pale = bool((lengths > longest).any())
        drawing.path((axes.at(*point) for point in shape.tolist()), "a thin dash" if pale else "a line", closed=True)
    for i, point in enumerate(keys.tolist()):
        drawing.dot(axes.at(*point), 5, "fb")
        x, y = axes.at(*point)
        drawing.text((x + 8, y + 4), f"k{i + 1}", "small")
    drawing.write("fisher")


def error_bars() -> None:
    """Attention as an estimate: the value with its 95 % interval, over a range of queries."""
    generator = torch.Generator().manual_seed(1)
    place = torch.sort(torch.rand(24, generator=generator) * 8 - 4).values
    place = torch.cat([place[place < 0.4], place[place > 2.0]])  # a gap without keys
    values = torch.sin(1.3 * place) + 0.15 * torch.randn(len(place), generator=generator)
    sweep = torch.linspace(-4, 4, 161)
    # (x - k)^2 is a dot product of (x, 1) with (k, -k^2/2), up to a factor and a constant of the row.
    width = 0.45
    key = torch.stack([place, -(place**2) / 2], -1)[None, None] / width**2
    query = torch.stack([sweep, torch.ones_like(sweep)], -1)[None, None]
    found = regard.estimate(query, key, values[None, None, :, None], scale=1.0)
    low, high = found.interval(0.95)
    drawing = Drawing(840, 300, "The attended value with its 95 % interval, over a sweep of queries")
    axes = Axes(drawing, (45, 25, 770, 220), (-4, 4), (-2, 2))
    axes.ticks([-4, -3, -2, -1, 0, 1, 2, 3, 4], [-2, -1, 0, 1, 2], "query", "value")
    top = [axes.at(x, min(2.0, y)) for x, y in zip(sweep.tolist(), high[0, 0, :, 0].tolist(), strict=True)]
    bottom = [axes.at(x, max(-2.0, y)) for x, y in zip(sweep.tolist(), low[0, 0, :, 0].tolist(), strict=True)]
    drawing.path(top + bottom[::-1], "band", closed=True)
    axes.curve(sweep, found.value[0, 0, :, 0], "a line")
    for x, y in zip(place.tolist(), values.tolist(), strict=True):
        drawing.dot(axes.at(x, y), 3, "key")
    drawing.write("error_bars")


def temperature_path() -> None:
    """One row of scores, from hard routing at low temperatures to the prior at high ones."""
    scores = torch.tensor([3.0, 2.6, 1.0, 0.4, 0.0, -0.5, -1.0, -2.0])
    temperatures = torch.logspace(-2, 2, 201)
    drawing = Drawing(840, 300, "Expected score, entropy, divergence and variance against the temperature")
    lines = (("softmax", KL(), "a"), ("entmax 1.5", Tsallis(1.5), "c"), ("sparsemax", Tsallis(2.0), "b"))
    panels = (
        ("expected score", "expected_score", (0.0, 3.2), (0, 1, 2, 3)),
        ("entropy H", "entropy", (0.0, 2.2), (0, 0.5, 1, 1.5, 2)),
        ("variance of s/τ", "variance", (0.0, 1.0), (0, 0.25, 0.5, 0.75, 1)),
    )
    for panel, (title, field, limits, ticks) in enumerate(panels):
        axes = Axes(drawing, (45 + 275 * panel, 40, 215, 190), (0.01, 100.0), limits, log=True)
        axes.ticks([0.01, 0.1, 1, 10, 100], ticks, "temperature τ")
        drawing.text((45 + 275 * panel, 22), title, "bold")
        for name, regularizer, style in lines:
            path = regard.path(scores, temperatures, Transport(regularizer))
            axes.curve(temperatures, getattr(path, field), f"{style} line")
            if panel == 1:
                y = 186 + 15 * [line[0] for line in lines].index(name)
                drawing.line((442, y), (462, y), f"{style} line")
                drawing.text((468, y + 4), name, "small")
    drawing.write("temperature_path")


FIGURES = (simplex, advantage, fisher, error_bars, temperature_path)

if __name__ == "__main__":
    for figure in FIGURES:
        figure()
        print(f"docs/figures/{figure.__name__}.svg")
