"""A traced function as a flat list of typed nodes: building, evaluating and differentiating it.

A node is real, integer or boolean, and its arguments are nodes before it. A real number has no width: it is computed in
the dtype of the call that uses the graph. `gather` reads one element of a captured tensor. An index outside of the
tensor makes the whole result NaN, so that it stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

REAL, INT, BOOL = "real", "int", "bool"


class Untraceable(Exception):
    """A function that cannot be compiled. The message is a sentence that names the operation."""


class SideEffect(Untraceable):
    """A function that changes what it reads, so that each call would give another result."""


class Node(NamedTuple):
    op: str
    kind: str  # REAL, INT or BOOL
    args: tuple[int, ...] = ()
    value: float | int | bool | str | None = None  # of a constant; name of an input; number of a captured tensor


class Slot(NamedTuple):
    """What the code must know of a captured tensor."""

    kind: str
    ndim: int
    limit: int = 2**63 - 1  # the largest absolute value that its dtype has, if it holds integers


# --- operations -------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """How an operation is evaluated, and its partial derivatives: partials(builder, args, out) gives a node or None
    (zero) for each argument."""

    evaluate: Callable[..., Tensor]
    partials: Callable[[Builder, Sequence[int], int], list[int | None]] | None = None


def _unary(partial: Callable[[Builder, int, int], int | None]) -> Callable[[Builder, Sequence[int], int], list]:
    return lambda g, args, out: [partial(g, args[0], out)]


def _extremum(g: Builder, args: Sequence[int], wins: str) -> list[int | None]:
    """A tie gives half of the derivative to each argument, as in PyTorch."""
    a, b = args
    tie = g.where(g.compare("eq", a, b), g.real(0.5), g.real(0.0))
    return [g.where(g.compare(wins, x, y), g.real(1.0), tie) for x, y in ((a, b), (b, a))]


def _pow(g: Builder, args: Sequence[int], out: int) -> list[int | None]:
    x, y = args
    exponent = g.nodes[y]
    if exponent.op == "constant":
        c = float(exponent.value)  # type: ignore[arg-type]
        return [None if c == 0 else g.mul(g.real(c), g.call("pow", x, g.real(c - 1))), None]
    zero = g.real(0.0)
    by_x = g.where(g.compare("eq", y, zero), zero, g.mul(y, g.call("pow", x, g.sub(y, g.real(1.0)))))
    at_zero = g.logic("and", g.compare("eq", x, zero), g.compare("ge", y, zero))
    return [by_x, g.where(at_zero, zero, g.mul(out, g.call("log", x)))]


def _xlogy(g: Builder, args: Sequence[int], out: int) -> list[int | None]:
    x, y = args
    none = g.logic("and", g.compare("eq", x, g.real(0.0)), g.compare("le", y, g.real(0.0)))
    return [g.where(none, g.real(0.0), g.call("log", y)), g.div(x, y)]


# Operations on real numbers. Those without partials have the derivative zero, as in PyTorch.
REALS: dict[str, Operation] = {
    "add": Operation(torch.add, lambda g, args, out: [g.real(1.0), g.real(1.0)]),
    "sub": Operation(torch.sub, lambda g, args, out: [g.real(1.0), g.real(-1.0)]),
    "mul": Operation(torch.mul, lambda g, args, out: [args[1], args[0]]),
    "div": Operation(torch.div, lambda g, args, out: [g.div(g.real(1.0), args[1]), g.call("neg", g.div(out, args[1]))]),
    "neg": Operation(torch.neg, _unary(lambda g, x, out: g.real(-1.0))),
    "abs": Operation(torch.abs, _unary(lambda g, x, out: g.call("sign", x))),
    "sign": Operation(torch.sign),
    "floor": Operation(torch.floor),
    "ceil": Operation(torch.ceil),
    "round": Operation(torch.round),
    "trunc": Operation(torch.trunc),
    "remainder": Operation(
        torch.remainder,
        lambda g, args, out: [g.real(1.0), g.call("neg", g.call("floor", g.div(args[0], args[1])))],
    ),
    "floor_divide": Operation(torch.floor_divide),
    "minimum": Operation(torch.minimum, lambda g, args, out: _extremum(g, args, "lt")),
    "maximum": Operation(torch.maximum, lambda g, args, out: _extremum(g, args, "gt")),
    "at_least": Operation(
        torch.maximum, lambda g, args, out: [g.step("ge", *args), g.step("gt", args[1], args[0])]
    ),  # clamp(min=): its derivative at the bound is 1
    "at_most": Operation(torch.minimum, lambda g, args, out: [g.step("le", *args), g.step("lt", args[1], args[0])]),
    "relu": Operation(torch.relu, _unary(lambda g, x, out: g.step("gt", x, g.real(0.0)))),
    "exp": Operation(torch.exp, _unary(lambda g, x, out: out)),
    "exp2": Operation(torch.exp2, _unary(lambda g, x, out: g.mul(out, g.real(math.log(2))))),
    "expm1": Operation(torch.expm1, _unary(lambda g, x, out: g.add(out, g.real(1.0)))),
    "log": Operation(torch.log, _unary(lambda g, x, out: g.div(g.real(1.0), x))),
    "log2": Operation(torch.log2, _unary(lambda g, x, out: g.div(g.real(1 / math.log(2)), x))),
    "log1p": Operation(torch.log1p, _unary(lambda g, x, out: g.div(g.real(1.0), g.add(x, g.real(1.0))))),
    "sqrt": Operation(torch.sqrt, _unary(lambda g, x, out: g.div(g.real(0.5), out))),
    "rsqrt": Operation(torch.rsqrt, _unary(lambda g, x, out: g.mul(g.real(-0.5), g.mul(out, g.mul(out, out))))),
    "pow": Operation(torch.pow, _pow),
    "sigmoid": Operation(torch.sigmoid, _unary(lambda g, x, out: g.mul(out, g.call("sigmoid", g.call("neg", x))))),
    "tanh": Operation(torch.tanh, _unary(lambda g, x, out: g.sub(g.real(1.0), g.mul(out, out)))),
    "softplus": Operation(
        lambda x: torch.nn.functional.softplus(x, threshold=1e4), _unary(lambda g, x, out: g.call("sigmoid", x))
    ),
    "erf": Operation(
        torch.erf,
        _unary(lambda g, x, out: g.mul(g.real(2 / math.sqrt(math.pi)), g.call("exp", g.call("neg", g.mul(x, x))))),
    ),
    "sin": Operation(torch.sin, _unary(lambda g, x, out: g.call("cos", x))),
    "cos": Operation(torch.cos, _unary(lambda g, x, out: g.call("neg", g.call("sin", x)))),
    "atan": Operation(torch.atan, _unary(lambda g, x, out: g.div(g.real(1.0), g.add(g.real(1.0), g.mul(x, x))))),
    "xlogy": Operation(torch.xlogy, _xlogy),
    "stop": Operation(lambda x: x.detach()),  # no_grad and detach
}
# Operations on integers; all of them are exact in int64.
INTS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "remainder": torch.remainder,
    "floor_divide": torch.floor_divide,
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
}
COMPARISONS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}
LOGIC = {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not}
_DTYPES = {INT: torch.int64, BOOL: torch.bool}


# --- building ---------------------------------------------------------------------------------------------------------


class Builder:
    """Adds nodes. Equal nodes are stored once, and the simplest constant expressions are folded."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes = list(nodes)
        self._found = {self._key(node): n for n, node in enumerate(self.nodes)}

    @staticmethod
    def _key(node: Node) -> Node:
        # Equality of Python numbers joins 0.0 and -0.0, and separates NaN from itself.
        return node._replace(value=repr(node.value)) if node.op == "constant" else node

    def add_node(self, op: str, kind: str, args: Sequence[int] = (), value: float | str | None = None) -> int:
        node = Node(op, kind, tuple(args), value)
        found = self._found.setdefault(self._key(node), len(self.nodes))
        if found == len(self.nodes):
            self.nodes.append(node)
        return found

    def constant(self, value: float | int | bool) -> int:
        kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else REAL
        return self.add_node("constant", kind, (), value)

    def real(self, value: float) -> int:
        return self.constant(float(value))

    def kind(self, node: int) -> str:
        return self.nodes[node].kind

    def cast(self, x: int, kind: str) -> int:
        node = self.nodes[x]
        if node.kind == kind:
            return x
        if node.op == "constant":
            kinds = {REAL: float, INT: int, BOOL: bool}
            return self.constant(kinds[kind](node.value))  # type: ignore[arg-type]
        return self.add_node("cast", kind, (x,))

    def call(self, op: str, *args: int) -> int:
        """An operation on real numbers."""
        return self.add_node(op, REAL, [self.cast(x, REAL) for x in args])

    def integer(self, op: str, *args: int) -> int:
        return self.add_node(op, INT, [self.cast(x, INT) for x in args])

    def compare(self, op: str, a: int, b: int) -> int:
        kinds = (self.kind(a), self.kind(b))
        kind = REAL if REAL in kinds else INT
        return self.add_node(op, BOOL, (self.cast(a, kind), self.cast(b, kind)))

    def logic(self, op: str, *args: int) -> int:
        return self.add_node(op, BOOL, [self.cast(x, BOOL) for x in args])

    def where(self, condition: int, a: int, b: int) -> int:
        kinds = (self.kind(a), self.kind(b))
        kind = REAL if REAL in kinds else INT if INT in kinds else BOOL
        a, b = self.cast(a, kind), self.cast(b, kind)
        return a if a == b else self.add_node("where", kind, (self.cast(condition, BOOL), a, b))

    def step(self, op: str, a: int, b: int) -> int:
        return self.where(self.compare(op, a, b), self.real(1.0), self.real(0.0))

    # Sums and products of derivatives are mostly by 0 and 1.

    def _is(self, node: int, value: float) -> bool:
        found = self.nodes[node]
        return found.op == "constant" and found.kind == REAL and found.value == value

    def add(self, a: int, b: int) -> int:
        return b if self._is(a, 0.0) else a if self._is(b, 0.0) else self.call("add", a, b)

    def sub(self, a: int, b: int) -> int:
        return a if self._is(b, 0.0) else self.call("sub", a, b)

    def mul(self, a: int, b: int) -> int:
        if self._is(a, 1.0) or self._is(b, 1.0):
            return b if self._is(a, 1.0) else a
        if self._is(a, -1.0) or self._is(b, -1.0):
            return self.call("neg", b if self._is(a, -1.0) else a)
        return self.call("mul", a, b)

    def div(self, a: int, b: int) -> int:
        return a if self._is(b, 1.0) else self.call("div", a, b)


@dataclass(frozen=True)
class Graph:
    """A function of `inputs` and of captured tensors; `outputs` are nodes."""

    nodes: tuple[Node, ...]
    inputs: tuple[tuple[str, str], ...]  # name and kind
    slots: tuple[Slot, ...]
    outputs: tuple[int, ...]

    def with_outputs(self, *outputs: int) -> Graph:
        """The same nodes with other results; nodes that they do not need are left out."""
        return pruned(self.nodes, self.inputs, self.slots, outputs)

    def depends(self) -> list[frozenset[str]]:
        """The inputs that each node depends on."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = {str(node.value)} if node.op == "input" else set()
            found.append(frozenset(own.union(*(found[a] for a in node.args))))
        return found

    def gathers(self) -> list[int]:
        """The nodes that read captured tensors."""
        return [n for n, node in enumerate(self.nodes) if node.op == "gather"]


def pruned(nodes: Sequence[Node], inputs: tuple, slots: tuple, outputs: Sequence[int]) -> Graph:
    needed = set(outputs)
    for n in reversed(range(len(nodes))):
        if n in needed:
            needed.update(nodes[n].args)
    place = {n: at for at, n in enumerate(sorted(needed))}
    kept = tuple(nodes[n]._replace(args=tuple(place[a] for a in nodes[n].args)) for n in place)
    return Graph(kept, inputs, slots, tuple(place[n] for n in outputs))


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(graph: Graph, inputs: dict[str, Tensor], captured: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The outputs, in PyTorch's operations; real numbers are computed in `dtype`. Differentiable in the captured
    tensors and in real inputs."""
    values: list[Tensor] = []
    device = next(iter(inputs.values())).device
    invalid = None
    for node in graph.nodes:
        args = [values[a] for a in node.args]
        kind = dtype if node.kind == REAL else _DTYPES[node.kind]
        if node.op == "constant":
            result = torch.tensor(node.value, dtype=kind, device=device)
        elif node.op == "input":
            result = inputs[str(node.value)].to(kind)
        elif node.op == "cast":
            result = args[0] != 0 if node.kind == BOOL else args[0].to(kind)
        elif node.op == "where":
            result = torch.where(*args)
        elif node.op == "gather":
            result, outside = _gather(captured[node.value], args)  # type: ignore[index]
            result = result.to(kind)
            if outside is not None:
                invalid = outside if invalid is None else invalid | outside
        elif node.kind == REAL:
            result = REALS[node.op].evaluate(*args)
        elif node.kind == INT:
            result = INTS[node.op](*args)
        else:
            result = (COMPARISONS if node.op in COMPARISONS else LOGIC)[node.op](*args)
        values.append(result)
    outputs = [values[n] for n in graph.outputs]
    return outputs if invalid is None else [_invalidate(x, invalid) for x in outputs]


def _gather(tensor: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Elements of a tensor, and where an index is outside of it."""
    if not indices:
        return tensor.reshape(()), None
    # In float64, because each entry of the gradient is a sum over all pairs that read it.
    table = tensor.double() if tensor.is_floating_point() else tensor
    outside, places = None, []
    for index, size in zip(indices, tensor.shape, strict=True):
        wrong = (index < -size) | (index >= size)
        outside = wrong if outside is None else outside | wrong
        places.append(index.clamp(-size, size - 1))
    return table[tuple(places)], outside


def _invalidate(x: Tensor, invalid: Tensor) -> Tensor:
    return torch.where(invalid, math.nan, x) if x.is_floating_point() else x


# --- derivatives ------------------------------------------------------------------------------------------------------


def derivative(graph: Graph, name: str) -> Graph:
    """The graph of the outputs' derivatives with respect to a real input, by forward mode."""
    g = Builder(graph.nodes)
    tangents: list[int | None] = []
    for n, node in enumerate(graph.nodes):
        tangent: int | None = None
        if node.op == "input" and node.value == name:
            tangent = g.real(1.0)
        elif node.kind == REAL and any(tangents[a] is not None for a in node.args):
            for argument, partial in zip(node.args, _partials(g, node, n), strict=True):
                if tangents[argument] is not None and partial is not None:
                    part = g.mul(partial, tangents[argument])  # type: ignore[arg-type]
                    tangent = part if tangent is None else g.add(tangent, part)
            if node.op == "where":  # not by products: the derivative of the other branch may be infinite
                zero = g.real(0.0)
                a, b = (zero if tangents[x] is None else tangents[x] for x in node.args[1:])
                tangent = g.where(node.args[0], a, b)  # type: ignore[arg-type]
        tangents.append(tangent)
    outputs = [g.real(0.0) if tangents[n] is None else tangents[n] for n in graph.outputs]
    return pruned(g.nodes, graph.inputs, graph.slots, outputs)  # type: ignore[arg-type]


def adjoints(graph: Graph, of: Sequence[int], keep: Sequence[int] = ()) -> Graph:
    """The graph of the derivatives of the only output with respect to the nodes `of`, by reverse mode. The nodes in
    `keep` are further outputs."""
    (output,) = graph.outputs
    g = Builder(graph.nodes)
    found: dict[int, int] = {output: g.real(1.0)}
    for n in reversed(range(len(graph.nodes))):
        node = graph.nodes[n]
        if n not in found or node.kind != REAL:
            continue
        if node.op == "where":
            condition, zero = node.args[0], g.real(0.0)
            parts = [None, g.where(condition, found[n], zero), g.where(condition, zero, found[n])]
        else:
            parts = [p if p is None else g.mul(found[n], p) for p in _partials(g, node, n)]
        for argument, part in zip(node.args, parts, strict=True):
            if part is not None and graph.nodes[argument].kind == REAL:
                found[argument] = g.add(found[argument], part) if argument in found else part
    outputs = [*(found.get(n, g.real(0.0)) for n in of), *keep]
    return pruned(g.nodes, graph.inputs, graph.slots, outputs)


def _partials(g: Builder, node: Node, n: int) -> list[int | None]:
    rule = REALS[node.op].partials if node.op in REALS else None
    return [None] * len(node.args) if rule is None else rule(g, node.args, n)
