"""Functions of a pair of query and key, log pi = f(b, h, i, j): as text, evaluated in PyTorch, and compiled.

A graph travels through forms and operators as text, so that nothing needs to be registered. The compiled library has
two functions for each dtype: `fill` adds log pi of a block of keys and rows to the engine's gate, `scatter` adds what
such a block contributes to the gradients of the captured tensors. Nodes that depend on the row alone, or on the key
alone, are computed once for a row or a key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .._compat import constant_when_traced
from .cpp import Writer, real_output
from .graph import BOOL, INT, REAL, Builder, Graph, Node, Slot, adjoints, evaluate, pruned
from .library import Library, Unavailable, load

INPUTS = (("b", INT), ("h", INT), ("i", INT), ("j", INT))
MOST_DIMENSIONS = 8  # of a captured tensor


# --- text -------------------------------------------------------------------------------------------------------------


def to_text(graph: Graph) -> str:
    record = {"nodes": graph.nodes, "slots": graph.slots, "output": graph.outputs[0]}
    return json.dumps(record, separators=(",", ":"))


@lru_cache(maxsize=256)
def from_text(text: str) -> Graph:
    record = json.loads(text)
    nodes = tuple(Node(op, kind, tuple(args), value) for op, kind, args, value in record["nodes"])
    return Graph(nodes, INPUTS, tuple(Slot(*slot) for slot in record["slots"]), (record["output"],))


def as_log_prior(graph: Graph) -> Graph:
    """The graph with a real output. A truth value is a mask: log pi is 0 where it is true, and -inf elsewhere."""
    (output,) = graph.outputs
    g = Builder(graph.nodes)
    masked = g.where(output, g.real(0.0), g.real(-math.inf)) if g.kind(output) == BOOL else g.cast(output, REAL)
    return pruned(g.nodes, graph.inputs, graph.slots, (masked,))


def is_mask(graph: Graph) -> bool:
    """Whether log pi is 0 or -inf by construction."""

    def binary(n: int) -> bool:
        node = graph.nodes[n]
        if node.op == "where":
            return binary(node.args[1]) and binary(node.args[2])
        return node.op == "constant" and node.value in (0, -math.inf)

    return binary(graph.outputs[0])


@constant_when_traced  # Dynamo would trace into a cached function
def product(first: str, second: str) -> str:
    """The text of the product of two priors. The captured tensors of the second follow those of the first."""
    return _product(first, second)


@lru_cache(maxsize=256)
def _product(first: str, second: str) -> str:
    one, other = from_text(first), from_text(second)
    g = Builder(one.nodes)
    place: list[int] = []
    for node in other.nodes:
        value = node.value
        if node.op == "gather":
            value = int(value) + len(one.slots)  # type: ignore[arg-type]
        place.append(g.add_node(node.op, node.kind, [place[a] for a in node.args], value))
    a, b, never = one.outputs[0], place[other.outputs[0]], g.real(-math.inf)
    masked = g.logic("or", g.compare("eq", a, never), g.compare("eq", b, never))  # also where the other is NaN
    output = g.where(masked, never, g.call("add", a, b))
    return to_text(pruned(g.nodes, INPUTS, one.slots + other.slots, (output,)))


# --- in PyTorch -------------------------------------------------------------------------------------------------------


def log_prior_at(text: str, captured: Sequence[Tensor], index: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """log pi at indices b, h, i, j that broadcast; i is the position of the query."""
    names = [name for name, _ in INPUTS]
    return evaluate(from_text(text), dict(zip(names, index, strict=True)), captured, dtype)[0]


def indices(sizes: Sequence[int], starts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices of a block of a plan, each along its own dimension."""
    found = []
    for n, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        index = torch.arange(size, device=device) + start
        found.append(index.view([-1 if m == n else 1 for m in range(4)]))
    return tuple(found)  # type: ignore[return-value]


# --- in C++ -----------------------------------------------------------------------------------------------------------

_HEAD = """#include "engine/functions.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
namespace {
struct Sums { double *data; int64_t size; };  // of one captured tensor; each unit of work has its own

template <class R> INLINE Mask<R> lanes(const int64_t *from) {
  Mask<R> x;
  for (int n = 0; n < Simd<R>::N; ++n) x[n] = (typename Simd<R>::I)from[n];
  return x;
}
template <class R> INLINE Mask<R> same(int64_t x) { return Mask<R>{} + (typename Simd<R>::I)x; }
"""
_ARGUMENTS = (
    "const Captured *captured, int64_t b, const int64_t *head, const int64_t *position, int64_t first, int64_t keys, "
    "int64_t vectors"
)
_INPUT = {
    "b": "same<R>(b)",
    "h": "lanes<R>(head + n * Simd<R>::N)",
    "i": "lanes<R>(position + n * Simd<R>::N)",
    "j": "same<R>(first + j)",
}


class _Levels:
    """The nodes of a graph by what they depend on: "call" (the batch entry at most), "row", "key" or "pair"."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.writer = graph, Writer(graph)
        self.levels = [_level(names) for names in graph.depends()]
        self.kept = [n for n in self.at("row") if self._used_below(n)]
        self.reads = any(graph.nodes[n].args for n in graph.gathers())
        # The part of a place that one index contributes, where it does not depend on the pair: computed earlier.
        self.placed = {
            (int(node.value), d, a): f"p{node.value}_{d}_{a}"  # type: ignore[arg-type]
            for n, node in enumerate(graph.nodes)
            if node.op == "gather" and self.levels[n] == "pair"
            for d, a in enumerate(node.args)
            if self.levels[a] != "pair"
        }

    def at(self, level: str) -> list[int]:
        return [n for n, found in enumerate(self.levels) if found == level]

    def _used_below(self, n: int) -> bool:
        """Whether a row's value is needed in the loop over the keys."""
        users = (m for m, node in enumerate(self.graph.nodes) if n in node.args and self.levels[m] != "row")
        return n in self.graph.outputs or next(users, None) is not None

    def lines(self, level: str, indent: str) -> list[str]:
        """Statements of one level; inputs first."""
        lines = []
        for n in self.at(level):
            node = self.graph.nodes[n]
            if node.op == "input":
                lines.append(f"{indent}const Mask<R> x{n} = {_INPUT[str(node.value)]};")
            else:
                lines += self.writer.statements([n], indent, "captured")
        for (slot, d, a), name in self.placed.items():
            if self.levels[a] == level:
                lines.append(f"{indent}const Mask<R> {name} = {self.writer.place(f'captured[{slot}]', d, a)};")
        return lines

    def rows(self) -> list[str]:
        """What depends on the row alone, for each vector of rows, before the loop over the keys."""
        places = [name for (_, _, a), name in self.placed.items() if self.levels[a] == "row"]
        declared = [f"  {self.writer.type(n)} r{n}[3];" for n in self.kept] + [f"  Mask<R> r{p}[3];" for p in places]
        stored = [f"    r{n}[n] = x{n};" for n in self.kept] + [f"    r{p}[n] = {p};" for p in places]
        return [
            "  Mask<R> invalid = {};",
            *self.lines("call", "  "),
            *declared,
            "  const Mask<R> call_invalid = invalid;",
            "  Mask<R> row_invalid[3];",
            "  bool row_wrong = false;",
            "  for (int64_t n = 0; n < vectors; ++n) {",
            "    Mask<R> invalid = call_invalid;",
            *self.lines("row", "    "),
            *stored,
            "    row_invalid[n] = invalid, row_wrong |= any(invalid);",
            "  }",
        ]

    def key(self) -> list[str]:
        return [
            "    Mask<R> invalid = {};",
            *self.lines("key", "    "),
            "    const Mask<R> key_invalid = invalid;",
            "    const bool wrong = row_wrong || any(key_invalid);",
        ]

    def pair(self) -> list[str]:
        loaded = [f"      const {self.writer.type(n)} x{n} = r{n}[n];" for n in self.kept]
        for (_, _, a), name in self.placed.items():
            if self.levels[a] == "row":
                loaded.append(f"      const Mask<R> {name} = r{name}[n];")
        self.writer.placed = self.placed
        lines = self.lines("pair", "      ")
        self.writer.placed = {}
        return ["      Mask<R> invalid = key_invalid | row_invalid[n];", *loaded, *lines]


def _level(names: frozenset[str]) -> str:
    of_row = bool(names & {"h", "i"})
    return ("pair" if of_row else "key") if "j" in names else "row" if of_row else "call"


def _fill(graph: Graph) -> list[str]:
    levels = _Levels(graph)
    result = real_output(levels.writer, graph.outputs[0])
    at_pairs = any(graph.nodes[n].op == "gather" and graph.nodes[n].args for n in levels.at("pair"))
    when = "any(invalid)" if at_pairs else "wrong"
    wrong = f"      if ({when}) result = invalid ? broadcast(NOT_A_NUMBER<R>) : result;"
    return [
        f"template <class R> void fill({_ARGUMENTS}, R *gate, uint8_t *live, int64_t fresh) {{",
        *levels.rows(),
        "  for (int64_t j = 0; j < keys; ++j) {",
        *levels.key(),
        "    Mask<R> open = {};",
        "    for (int64_t n = 0; n < vectors; ++n) {",
        *levels.pair(),
        f"      Vec<R> result = {result};",
        *([wrong] if levels.reads else []),
        "      R *at = gate + (j * vectors + n) * Simd<R>::N;",
        "      const Vec<R> before = fresh ? Vec<R>{} : load(at);",
        "      const Mask<R> shut = (result == -INF<R>) | (before == -INF<R>);",
        "      const Vec<R> sum = vmax(broadcast(LOWEST<R>), before + result * (R)LOG2E);",
        "      store(at, shut ? broadcast(-INF<R>) : sum);",
        "      open |= ~shut;",
        "    }",
        "    live[j] = any(open);",
        "  }",
        "}",
    ]


def _scatter(graph: Graph) -> list[str]:
    """For each place where a captured tensor of reals is read: G times the derivative of log pi by what was read, added
    to the sum of that element. Sums over the keys of a row and over the rows of a key are taken first."""
    reads = [n for n in graph.gathers() if graph.nodes[n].kind == REAL]
    grown = adjoints(graph, reads, keep=[a for n in reads for a in graph.nodes[n].args])
    levels = _Levels(grown)
    depends = grown.depends()
    before, each, after_key, after = [], [], [], []
    rest = list(grown.outputs[len(reads) :])
    for k, n in enumerate(reads):
        node = graph.nodes[n]
        index, rest = rest[: len(node.args)], rest[len(node.args) :]
        level = _level(frozenset().union(*(depends[a] for a in index)))
        levels.writer.placed = levels.placed if level == "pair" else {}
        at = f"const Mask<R> at{k} = {levels.writer.places(int(node.value), 'captured', index)};"  # type: ignore[arg-type]
        levels.writer.placed = {}
        add = f"add_{'sum' if level == 'key' else 'each'}<R>(sums{k}"
        before.append(f"  double *sums{k} = sums_of(gradients[{node.value}], unit);")
        part = f"const Vec<R> d{k} = gate == 0 ? gate : gate * x{grown.outputs[k]};"
        if level in ("call", "row"):
            before.append(f"  Vec<R> total{k}[3] = {{}};")
            each.append(f"      if (sums{k}) {{ {part} total{k}[n] += d{k}; }}")
            loaded = "".join(f"const {levels.writer.type(a)} x{a} = r{a}[n]; " for a in index if a in levels.kept)
            after.append(f"    if (sums{k}) {{ {loaded}Mask<R> invalid = {{}}; {at} {add}, at{k}, total{k}[n]); }}")
        elif level == "key":
            before.append(f"  Vec<R> total{k};")
            after_key.append(f"    if (sums{k}) {{ {at} {add}, at{k}, total{k}); }}")
            each.append(f"      if (sums{k}) {{ {part} total{k} = n ? total{k} + d{k} : d{k}; }}")
        else:
            each.append(f"      if (sums{k}) {{ {part} {at} {add}, at{k}, d{k}); }}")
    return [
        "INLINE double *sums_of(const Sums &s, int64_t unit) { return s.data ? s.data + unit * s.size : nullptr; }",
        f"template <class R> void scatter({_ARGUMENTS}, const R *g, const Sums *gradients, int64_t unit) {{",
        *levels.rows(),
        *before,
        "  for (int64_t j = 0; j < keys; ++j) {",
        *levels.key(),
        "    for (int64_t n = 0; n < vectors; ++n) {",
        *levels.pair(),
        "      const Vec<R> gate = load(g + (j * vectors + n) * Simd<R>::N);",
        *each,
        "    }",
        *after_key,
        "  }",
        "  for (int64_t n = 0; n < vectors; ++n) {",
        *after,
        "  }",
        "}",
    ]


@lru_cache(maxsize=256)
def source(text: str) -> str:
    """The C++ text of a function of pairs."""
    graph = from_text(text)
    lines = [_HEAD, *_fill(graph), *_scatter(graph), "}  // namespace"]
    for kind, suffix in (("float", "f32"), ("double", "f64")):
        names = "captured, b, head, position, first, keys, vectors"
        lines += [
            f"EXPORT void fill_{suffix}({_ARGUMENTS}, {kind} *gate, uint8_t *live, int64_t fresh) {{",
            f"  fill<{kind}>({names}, gate, live, fresh);",
            "}",
            f"EXPORT void scatter_{suffix}({_ARGUMENTS}, const {kind} *g, const Sums *gradients, int64_t unit) {{",
            f"  scatter<{kind}>({names}, g, gradients, unit);",
            "}",
        ]
    return "\n".join([*lines, ""])


def library(text: str, isa: str) -> Library:
    """The compiled functions. Raises Unavailable with the reason."""
    return load(source(text), isa)


@constant_when_traced
def unavailable(text: str, isa: str) -> str | None:
    """Why the functions cannot be compiled, or None. Compiles them if this was not done before."""
    try:
        library(text, isa)
    except Unavailable as error:
        return str(error)
    return None
