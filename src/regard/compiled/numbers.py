"""Tracing a function of numbers, as FlexAttention's mods are, to a Graph (graph.py).

The examples have no dimensions. So table[h] is a small tensor of its own, as in the function: `torch.dot` of two such
rows, `(row == j).any()` or `interval[0]` mean what they say. Each element of such a tensor is a node. Rows of a
captured tensor are only written down, until an operation reads their elements. Operations element by element are
repeated for each element; sums become trees of additions; operations on shapes move the numbers of the elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._compat import tree_flatten, tree_map
from .graph import BOOL, INT, REAL, Untraceable
from .rules import RULES, Call
from .tracing import SHAPES, Traced, Tracer, broadcast_shape, check_selection, kind_of, traced_twice, whole_rows

MOST_ELEMENTS = 512  # of a tensor whose elements become nodes

_STRUCTURE = (*SHAPES, "unbind", "split", "split_with_sizes", "chunk", "expand", "cat", "stack", "flip")
# Reductions: the operation on two elements, by the kind of the result.
_REDUCTIONS = {
    **{name: {REAL: "add", INT: "add"} for name in ("sum", "mean")},
    "prod": {REAL: "mul", INT: "mul"},
    **{name: {REAL: "maximum", INT: "maximum", BOOL: "or"} for name in ("amax", "max")},
    **{name: {REAL: "minimum", INT: "minimum", BOOL: "and"} for name in ("amin", "min")},
    "any": {BOOL: "or"},
    "all": {BOOL: "and"},
}


class _Element(NamedTuple):
    """The operand of a rule, in the place of a tensor."""

    node: int


class _Rows(NamedTuple):
    """Elements of a captured tensor: for each dimension the node of an index, or None for all of them."""

    tensor: Tensor
    indices: tuple[int | None, ...]


def trace_numbers(function: Callable[..., Tensor], inputs: Sequence[tuple[str, str]]) -> Traced:
    """Trace a function of numbers; each input is given as (name, kind)."""
    examples = [[torch.tensor(n if kind == INT else n + 0.25) for _, kind in inputs] for n in (0, 1)]
    traced = lambda *args: _indexed(function, *args)  # noqa: E731
    return traced_twice(traced, inputs, examples, _NumberTracer)


def _indexed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Call the function so that table[h] with a traced number h does not read the number."""
    with _Indexing(args):
        return function(*args)


class _Indexing(TorchFunctionMode):
    """Indexing by traced numbers, told to the tracer. (PyTorch would read the value of an index without dimensions.)"""

    def __init__(self, args: Sequence[Tensor]) -> None:
        super().__init__()
        self.args = args

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, index = args
        items = list(index) if isinstance(index, tuple) else [index]
        if not any(isinstance(x, Tensor) for x in items):
            return func(tensor, index)
        if any(isinstance(x, Tensor) and x.dtype == torch.bool for x in items):
            return func(tensor, index)  # the tracer has a message
        where = [n for n, x in enumerate(items) if x is Ellipsis]
        if where:
            missing = tensor.ndim - sum(x is not None and x is not Ellipsis for x in items)
            items[where[0] : where[0] + 1] = [slice(None)] * missing
        # Numbers, slices and None first, as in PyTorch; they move the dimensions that are left.
        plain = tuple(slice(None) if isinstance(x, Tensor) else x for x in items)
        if any(x != slice(None) for x in plain):
            tensor = func(tensor, plain)
        indices = [x if isinstance(x, Tensor) else None for x in items if not isinstance(x, int)]
        return torch.ops.aten.index.Tensor(tensor, indices)


@dataclass
class _NumberTracer(Tracer):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.arrays: dict[int, list[int]] = {}  # id of a tensor with dimensions -> the nodes of its elements
        self.rows: dict[int, _Rows] = {}

    def tracks(self, tensor: Tensor) -> bool:
        return id(tensor) in self.nodes or id(tensor) in self.arrays or id(tensor) in self.rows

    def keep_array(self, tensor: Tensor, nodes: list[int]) -> Tensor:
        """The result of an operation. A tensor without dimensions is a node."""
        if tensor.ndim == 0:
            return self.keep(tensor, nodes[0])
        self.alive.append(tensor)
        self.arrays[id(tensor)] = nodes
        return tensor

    # --- elements -----------------------------------------------------------------------------------------------------

    def node(self, value: Any, what: str) -> int:
        if isinstance(value, _Element):
            return value.node
        if isinstance(value, Tensor) and value.numel() == 1:
            return self.elements(value, what)[0]
        return super().node(value, what)

    def elements(self, tensor: Tensor, what: str) -> list[int]:
        """The nodes of a tensor's elements."""
        if id(tensor) in self.nodes:
            return [self.nodes[id(tensor)]]
        if id(tensor) in self.arrays:
            return self.arrays[id(tensor)]
        if tensor.numel() > MOST_ELEMENTS:
            raise Untraceable(
                f"{what} uses a whole tensor of shape {list(tensor.shape)}, of more than {MOST_ELEMENTS} elements: "
                "index it, as in table[h]"
            )
        if id(tensor) in self.fresh:
            return [self.builder.constant(x) for x in tensor.flatten().tolist()]
        rows = self.rows.get(id(tensor), _Rows(tensor, (None,) * tensor.ndim))
        free = [d for d, index in enumerate(rows.indices) if index is None]
        nodes = []
        for place in itertools.product(*(range(rows.tensor.shape[d]) for d in free)):
            at = dict(zip(free, place, strict=True))
            index = [self.builder.constant(at[d]) if x is None else x for d, x in enumerate(rows.indices)]
            nodes.append(self.without_gradient(self.gather(rows.tensor, index)))
        return nodes

    # --- operations ---------------------------------------------------------------------------------------------------

    def operation(self, func: Any, shown: str, name: str, args: Any, kwargs: Any) -> Any:
        if name == "index":
            return self.index(args[0], list(args[1]))
        if name in _STRUCTURE and func.namespace == "aten":
            return self.structure(func, shown, name, args, kwargs)
        if name in _REDUCTIONS and func.namespace == "aten":
            return self.reduction(func, shown, name, args, kwargs)
        if name == "dot":
            a, b = (self.elements(x, shown) for x in args)
            terms = [self.multiplied(x, y, kind_of(args[0].dtype)) for x, y in zip(a, b, strict=True)]
            return self.keep(torch.zeros((), dtype=args[0].dtype), self.folded(terms, "add", kind_of(args[0].dtype)))
        rule = RULES.get(name)
        if func.namespace != "aten" or rule is None:
            return self.decomposed(func, shown, args, kwargs)
        with torch.no_grad():
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise Untraceable(f"{shown} is not among the operations that can be compiled")
        call = Call(self, shown, name, kind_of(result.dtype))
        operands: dict[int, list[int]] = {}
        for x in tree_flatten((args, kwargs))[0]:
            if isinstance(x, Tensor):
                if broadcast_shape(x.shape, result.shape) != list(result.shape):
                    raise Untraceable(f"{shown} is not computed element by element")
                numbers = torch.arange(x.numel()).view(x.shape).expand(result.shape).flatten().tolist()
                elements = self.elements(x, shown)
                operands[id(x)] = [elements[n] for n in numbers]
        if result.numel() > MOST_ELEMENTS:
            raise Untraceable(f"{shown} makes a tensor of more than {MOST_ELEMENTS} elements")
        nodes = []
        for n in range(result.numel()):
            element = lambda x, n=n: _Element(operands[id(x)][n]) if isinstance(x, Tensor) else x  # noqa: E731
            nodes.append(self.without_gradient(rule(call, *tree_map(element, args), **tree_map(element, kwargs))))
        return self.keep_array(result, nodes)

    def multiplied(self, a: int, b: int, kind: str) -> int:
        return self.builder.integer("mul", a, b) if kind == INT else self.builder.mul(a, b)

    def folded(self, nodes: list[int], op: str, kind: str) -> int:
        """All elements combined by an operation, as a balanced tree."""
        g = self.builder
        combine = g.logic if kind == BOOL else g.integer if kind == INT else g.call
        nodes = [g.cast(n, kind) for n in nodes]
        while len(nodes) > 1:
            pairs = [combine(op, a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
            nodes = pairs + nodes[len(pairs) * 2 :]
        return self.without_gradient(nodes[0])

    def reduction(self, func: Any, shown: str, name: str, args: Any, kwargs: Any) -> Tensor:
        x, *rest = args
        if rest and isinstance(rest[0], Tensor):
            raise Untraceable(f"{shown} is not among the operations that can be compiled")
        with torch.no_grad():
            result = func(*args, **kwargs)
        ops = _REDUCTIONS[name]
        if not isinstance(result, Tensor) or kind_of(result.dtype) not in ops or not x.numel():
            raise Untraceable(f"{shown} is not among the operations that can be compiled")
        kind, elements = kind_of(result.dtype), self.elements(x, shown)
        dims = kwargs.get("dim", rest[0] if rest else None)
        dims = [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
        dims = sorted({d % x.ndim for d in dims}) if x.ndim else []
        kept = [d for d in range(x.ndim) if d not in dims]
        size = math.prod(x.shape[d] for d in dims)
        numbers = torch.arange(x.numel()).view(x.shape).permute([*kept, *dims]).reshape(-1, size).tolist()
        nodes = [self.folded([elements[n] for n in row], ops[kind], kind) for row in numbers]
        if name == "mean":
            nodes = [self.builder.div(n, self.builder.real(size)) for n in nodes]
        return self.keep_array(result, nodes)

    def structure(self, func: Any, shown: str, name: str, args: Any, kwargs: Any) -> Any:
        """An operation that only moves elements: what it does with their numbers."""
        with torch.no_grad():
            result = func(*args, **kwargs)
        if name == "select" and id(args[0]) in self.rows:
            tensor, indices = self.rows[id(args[0])]
            dim, at = args[1] % args[0].ndim, args[2] % args[0].shape[args[1]]  # func has checked them
            return self.row(tensor, _filled(indices, {dim: self.builder.constant(at)}), result.dtype)
        elements: list[int] = []

        def numbered(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            first = len(elements)
            elements.extend(self.elements(x, shown))
            return torch.arange(first, len(elements)).view(x.shape)

        moved = func(*tree_map(numbered, args), **tree_map(numbered, kwargs))
        many = isinstance(result, list | tuple)
        for tensor, numbers in zip(result if many else [result], moved if many else [moved], strict=True):
            self.keep_array(tensor, [elements[n] for n in numbers.flatten().tolist()])
        return result

    def row(self, tensor: Tensor, indices: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
        shape = [tensor.shape[d] for d, index in enumerate(indices) if index is None]
        result = torch.zeros((), dtype=dtype).expand(shape)
        if not shape:
            return self.keep(result, self.without_gradient(self.gather(tensor, list(indices))))  # type: ignore[arg-type]
        self.alive.append(result)
        self.rows[id(result)] = _Rows(tensor, indices)
        return result

    def index(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
        if id(tensor) in self.nodes or id(tensor) in self.arrays:
            raise Untraceable("torch.index reads elements of a computed tensor; only captured tensors can be indexed")
        base, before = self.rows.get(id(tensor), _Rows(tensor, (None,) * tensor.ndim))
        given = {d: x for d, x in enumerate(indices) if x is not None}
        check_selection(list(given.values()))
        shape = broadcast_shape(*(x.shape for x in given.values())) or []
        if not shape:
            nodes = {d: self.builder.cast(self.node(x, "torch.index"), INT) for d, x in given.items()}
            return self.row(base, _filled(before, nodes), tensor.dtype)
        if len(given) != tensor.ndim:
            raise whole_rows(tensor)
        result = torch.zeros(shape, dtype=tensor.dtype)
        operands = {}
        for d, x in given.items():
            numbers = torch.arange(x.numel()).view(x.shape).expand(shape).flatten().tolist()
            elements = [self.builder.cast(n, INT) for n in self.elements(x, "torch.index")]
            operands[d] = [elements[n] for n in numbers]
        found = []
        for n in range(result.numel()):
            index = _filled(before, {d: nodes[n] for d, nodes in operands.items()})
            found.append(self.without_gradient(self.gather(base, list(index))))  # type: ignore[arg-type]
        return self.keep_array(result, found)


def _filled(indices: tuple[int | None, ...], given: dict[int, int]) -> tuple[int | None, ...]:
    """The indices with nodes for some of the free dimensions, which are numbered from 0."""
    free = [d for d, index in enumerate(indices) if index is None]
    named = {free[n]: node for n, node in given.items()}
    return tuple(named.get(d, index) for d, index in enumerate(indices))
