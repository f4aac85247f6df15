"""A Graph as C++ text, on the vectors of csrc/engine/functions.h.

`Writer.statements` writes nodes as statements, each with the type that its kind has: Vec<R>, Mask<R>, or for integers
Mask<R> (narrow) where their bounds fit 32 bits and Wide<R> elsewhere. R is a template parameter, float or double.
`vector_function` is a whole function of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from .graph import BOOL, COMPARISONS, INT, REAL, Graph, Node

POSITIONS = 2**26  # indices, heads and batch entries that compiled code is written for are smaller
_FITS = 2**31 - 1
_WORST = 2**63 - 1

_REALS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "abs": "absolute({})",
    "sign": "sign({})",
    "floor": "floor_of({})",
    "ceil": "ceil_of({})",
    "round": "round_of({})",
    "trunc": "trunc_of({})",
    "remainder": "remainder_of_reals({}, {})",
    "floor_divide": "floor_divide_reals({}, {})",
    "minimum": "minimum({}, {})",
    "maximum": "maximum({}, {})",
    "at_least": "maximum({}, {})",
    "at_most": "minimum({}, {})",
    "relu": "relu({})",
    "sqrt": "root({})",
    "rsqrt": "reciprocal_root({})",
    "pow": "power({}, {})",
    "sigmoid": "sigmoid({})",
    "softplus": "softplus({})",
    "erf": "erf_exactly({})",
    "expm1": "expm1_exactly({})",
    "sin": "sin_exactly({})",
    "cos": "cos_exactly({})",
    "atan": "atan_exactly({})",
    "xlogy": "xlogy({}, {})",
    "stop": "{}",
}
_FAST = ("exp", "exp2", "log", "log2", "log1p", "tanh")  # in float32 by polynomials, or by the C library
_ORDINARY = {"log": (1e-30, 1e30), "log1p": (-0.5, 1e30)}  # where no special case can occur (vector_math.h)
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_STEPS = ("sign", "floor", "ceil", "round", "trunc", "floor_divide", "remainder", *COMPARISONS)


def bounds(graph: Graph) -> list[tuple[int, int]]:
    """The least and the largest value that each integer node may have (of others: unused)."""
    found: list[tuple[int, int]] = []
    for node in graph.nodes:
        found.append(_bound(node, [(graph.nodes[a], found[a]) for a in node.args], graph))
    return found


def _bound(node: Node, args: list[tuple[Node, tuple[int, int]]], graph: Graph) -> tuple[int, int]:
    worst = (-_WORST - 1, _WORST)
    if node.kind != INT:
        return worst
    a, b = (args[0][1] if args else worst), (args[1][1] if len(args) > 1 else worst)
    if node.op == "constant":
        low, high = int(node.value), int(node.value)  # type: ignore[arg-type]
    elif node.op == "input":
        low, high = -POSITIONS, POSITIONS
    elif node.op == "gather":
        limit = graph.slots[int(node.value)].limit  # type: ignore[arg-type]
        low, high = -limit, limit
    elif node.op == "cast":
        low, high = (0, 1) if args[0][0].kind == BOOL else worst
    elif node.op == "add":
        low, high = a[0] + b[0], a[1] + b[1]
    elif node.op == "sub":
        low, high = a[0] - b[1], a[1] - b[0]
    elif node.op == "mul":
        products = [x * y for x in a for y in b]
        low, high = min(products), max(products)
    elif node.op == "neg":
        low, high = -a[1], -a[0]
    elif node.op == "abs":
        low, high = 0, max(abs(a[0]), abs(a[1]))
    elif node.op == "sign":
        low, high = -1, 1
    elif node.op == "minimum":
        low, high = min(a[0], b[0]), min(a[1], b[1])
    elif node.op == "maximum":
        low, high = max(a[0], b[0]), max(a[1], b[1])
    elif node.op == "remainder":
        low, high = (0, b[0] - 1) if b[0] > 0 else (b[0] + 1, 0)
    elif node.op in ("floor_divide", "trunc_divide"):
        low, high = -max(abs(a[0]), abs(a[1])) - 1, max(abs(a[0]), abs(a[1])) + 1
    elif node.op == "where":
        b, c = args[1][1], args[2][1]
        low, high = min(b[0], c[0]), max(b[1], c[1])
    elif node.op == "not":
        low, high = -a[1] - 1, -a[0] - 1
    else:  # bits
        top = max(abs(a[0]), abs(a[1]), abs(b[0]), abs(b[1]))
        top = 2 ** int(top).bit_length()
        low, high = -top, top
    # Beyond 64 bits the numbers wrap around, as PyTorch's do.
    return (low, high) if low >= -_WORST - 1 and high <= _WORST else worst


def ranges(graph: Graph, integers: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Bounds of real nodes that are made of integers and finite constants; (-inf, inf) if nothing is known."""
    found: list[tuple[float, float]] = []
    unknown = (-math.inf, math.inf)
    for node in graph.nodes:
        args = [found[a] for a in node.args]
        result = unknown
        if node.kind == INT:
            result = (float(integers[len(found)][0]), float(integers[len(found)][1]))
        elif node.kind == BOOL:
            result = (0.0, 1.0)
        elif node.op == "constant" and math.isfinite(value := float(node.value)):  # type: ignore[arg-type]
            result = (value, value)
        elif node.op == "cast":
            result = args[0]
        elif any(math.inf in pair or -math.inf in pair for pair in args):
            result = unknown
        elif node.op == "add":
            result = (args[0][0] + args[1][0], args[0][1] + args[1][1])
        elif node.op == "sub":
            result = (args[0][0] - args[1][1], args[0][1] - args[1][0])
        elif node.op == "neg":
            result = (-args[0][1], -args[0][0])
        elif node.op == "mul":
            products = [x * y for x in args[0] for y in args[1]]
            result = (min(products), max(products))
        elif node.op == "abs":
            result = (max(0.0, args[0][0], -args[0][1]), max(abs(args[0][0]), abs(args[0][1])))
        elif node.op in ("maximum", "at_least"):
            result = (max(args[0][0], args[1][0]), max(args[0][1], args[1][1]))
        elif node.op in ("minimum", "at_most"):
            result = (min(args[0][0], args[1][0]), min(args[0][1], args[1][1]))
        found.append(result)
    return found


def _is_narrow(bound: tuple[int, int]) -> bool:
    return bound[0] >= -_FITS and bound[1] <= _FITS


def _literal(node: Node) -> str:
    if node.kind == BOOL:
        return "Mask<R>{} - 1" if node.value else "Mask<R>{}"
    value = float(node.value)  # type: ignore[arg-type]
    if math.isnan(value):
        return "broadcast(NOT_A_NUMBER<R>)"
    if math.isinf(value):
        return "broadcast(INF<R>)" if value > 0 else "broadcast(-INF<R>)"
    return f"broadcast((R){value!r})"


class Writer:
    """Writes the nodes of one graph. Variables are x0, x1, ... with the number of their node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bounds = bounds(graph)
        self.exact = self._exact()
        self.placed: dict[tuple[int, int, int], str] = {}  # (slot, dimension, node) -> a variable that has its place
        self.ranges = ranges(graph, self.bounds)

    def narrow(self, n: int) -> bool:
        return _is_narrow(self.bounds[n])

    def type(self, n: int) -> str:
        kind = self.graph.nodes[n].kind
        return "Vec<R>" if kind == REAL else "Mask<R>" if kind == BOOL or self.narrow(n) else "Wide<R>"

    def _exact(self) -> set[int]:
        """Real nodes that are rounded or compared later."""
        found: set[int] = set()
        for n in reversed(range(len(self.graph.nodes))):
            node = self.graph.nodes[n]
            if n in found or node.op in _STEPS or (node.op == "cast" and node.kind != REAL):
                found.update(a for a in node.args if self.graph.nodes[a].kind == REAL)
        return found

    def integer(self, n: int, narrow: bool) -> str:
        """An integer node in the width that is wanted."""
        if self.narrow(n) == narrow:
            return f"x{n}"
        return f"narrow<R>(x{n})" if narrow else f"wide<R>(x{n})"

    def statements(self, nodes: Iterable[int], indent: str, gather: str = "") -> list[str]:
        """`const TYPE xN = ...;` for these nodes, in order. Inputs must be defined already. `gather` is the array of
        captured tensors; `invalid` must be a mask in scope if the graph has gathers with indices."""
        lines = []
        for n in nodes:
            node = self.graph.nodes[n]
            if node.op == "gather":
                lines += [f"{indent}{line}" for line in self._gather(n, node, gather)]
            elif node.op != "input":
                lines.append(f"{indent}const {self.type(n)} x{n} = {self.expression(n)};")
        return lines

    def place(self, slot: str, d: int, a: int) -> str:
        """What index number d, node a, contributes to the place of an element of a captured tensor."""
        name = "place" if self.narrow(a) else "place_wide"
        return f"{name}<R>(x{a}, {slot}.sizes[{d}], {slot}.strides[{d}], invalid)"

    def places(self, slot: int, array: str, indices: Iterable[int]) -> str:
        """Where elements of a captured tensor are, given the nodes of their indices."""
        parts = [self.placed.get((slot, d, a)) or self.place(f"{array}[{slot}]", d, a) for d, a in enumerate(indices)]
        return " + ".join(parts) or "{}"

    def _gather(self, n: int, node: Node, array: str) -> list[str]:
        slot = f"{array}[{node.value}]"
        reader = {REAL: "read_reals", INT: "read_integers", BOOL: "read_truths"}[node.kind]
        value = f"{reader}<R>({slot}, at{n})"
        if node.kind == INT and self.narrow(n):
            value = f"narrow<R>({value})"
        at = f"const Mask<R> at{n} = {self.places(int(node.value), array, node.args)};"  # type: ignore[arg-type]
        return [at, f"const {self.type(n)} x{n} = {value};"]

    def expression(self, n: int) -> str:
        node = self.graph.nodes[n]
        args = [f"x{a}" for a in node.args]
        if node.op == "constant":
            if node.kind == INT:
                return (
                    f"{self.type(n)}{{}} + (int64_t){node.value}"
                    if not self.narrow(n)
                    else (f"Mask<R>{{}} + (typename Simd<R>::I){node.value}")
                )
            return _literal(node)
        if node.op == "cast":
            return self._cast(node)
        if node.op == "where":
            if node.kind == INT:
                narrow = self.narrow(n)
                a, b = (self.integer(x, narrow) for x in node.args[1:])
                return f"{args[0]} ? {a} : {b}" if narrow else f"wide<R>({args[0]}) ? {a} : {b}"
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if node.kind == REAL:
            if node.op in _ORDINARY and n not in self.exact:
                (low, high), (least, most) = self.ranges[node.args[0]], _ORDINARY[node.op]
                if least <= low and high <= most:
                    return f"v{node.op}({args[0]})"
            if node.op in _FAST:
                return f"{node.op}_{'exactly' if n in self.exact else 'anywhere'}({args[0]})"
            return _REALS[node.op].format(*args)
        if node.kind == INT:
            return self._integer(n, node)
        if node.op in COMPARISONS:
            if self.graph.nodes[node.args[0]].kind == REAL:
                return f"{args[0]} {_SIGNS[node.op]} {args[1]}"
            narrow = all(self.narrow(a) for a in node.args)
            a, b = (self.integer(x, narrow) for x in node.args)
            comparison = f"{a} {_SIGNS[node.op]} {b}"
            return comparison if narrow else f"narrow<R>({comparison})"
        return f"~{args[0]}" if node.op == "not" else f"{args[0]} {_BITS[node.op]} {args[1]}"

    def _cast(self, node: Node) -> str:
        (a,) = node.args
        before = self.graph.nodes[a].kind
        if node.kind == REAL:
            name = "truth" if before == BOOL else "narrow" if self.narrow(a) else "wide"
            return f"real_of_{name}<R>(x{a})"
        if node.kind == INT:
            return f"narrow_of_truth<R>(x{a})" if before == BOOL else f"wide_of_real<R>(x{a})"
        if before == REAL:
            return f"x{a} != 0"
        return f"x{a} != 0" if self.narrow(a) else f"narrow<R>(x{a} != 0)"

    def _integer(self, n: int, node: Node) -> str:
        """The operation is in 32 bits where its arguments and its result fit, in 64 bits elsewhere."""
        narrow = self.narrow(n) and all(self.narrow(a) for a in node.args)
        args = [self.integer(a, narrow) for a in node.args]
        if node.op in ("remainder", "floor_divide", "trunc_divide"):
            divisor = self.graph.nodes[node.args[1]].value
            result = f"int_{node.op}({args[0]}, {divisor})"
        elif node.op in ("abs", "sign", "minimum", "maximum"):
            result = f"int_{node.op}({', '.join(args)})"
        else:
            signs = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "neg": "-{}", "not": "~{}"}
            result = (signs.get(node.op) or f"{{}} {_BITS[node.op]} {{}}").format(*args)
        return f"narrow<R>({result})" if self.narrow(n) and not narrow else result


def vector_function(graph: Graph, name: str) -> str:
    """`template <class R> void NAME(inputs..., const R *captured, Vec<R> &out0, ...)`: a graph of real inputs, whose
    captured tensors have one element each. captured[n] is the value of slot n."""
    writer = Writer(graph)
    parameters = [f"Vec<R> in_{label}" for label, _ in graph.inputs]
    outputs = [f"Vec<R> &out{k}" for k in range(len(graph.outputs))]
    lines = [
        f"template <class R> INLINE void {name}({', '.join([*parameters, 'const R *captured', *outputs])}) {{",
        "  (void)captured;",
        *(f"  (void)in_{label};" for label, _ in graph.inputs),
    ]
    for n, node in enumerate(graph.nodes):
        if node.op == "input":
            lines.append(f"  const Vec<R> x{n} = in_{node.value};")
        elif node.op == "gather":
            lines.append(f"  const Vec<R> x{n} = broadcast(captured[{node.value}]);")
        else:
            lines += writer.statements([n], "  ")
    lines += [f"  out{k} = {real_output(writer, n)};" for k, n in enumerate(graph.outputs)]
    return "\n".join([*lines, "}"])


def real_output(writer: Writer, n: int) -> str:
    node = writer.graph.nodes[n]
    if node.kind == REAL:
        return f"x{n}"
    name = "truth" if node.kind == BOOL else "narrow" if writer.narrow(n) else "wide"
    return f"real_of_{name}<R>(x{n})"
