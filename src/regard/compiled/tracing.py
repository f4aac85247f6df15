"""Tracing: a function of tensors, called on small examples, becomes a Graph (graph.py).

PyTorch reports every operation to a dispatch mode. (make_fx would import PyTorch's compiler, which takes more than a
second; later processes are to load a compiled function in milliseconds.) Operations on the examples become nodes.
Operations on captured tensors alone (`table.exp()`, `weight.T`) are recorded as they are and repeated at each use of
the graph, so that their gradients are autograd's. The function is called twice, with examples of different sizes: if
the two graphs differ, its result depends on more than the values of its arguments. What cannot be compiled raises
Untraceable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import READ_A_NUMBER, DispatchMode, tree_flatten, tree_map, writes_to_arguments
from .graph import BOOL, INT, REAL, Builder, Graph, SideEffect, Slot, Untraceable, pruned
from .rules import RULES, Call


class Derived(NamedTuple):
    """A tensor that is computed from captured tensors alone, by one of PyTorch's operations."""

    function: Any
    args: tuple
    kwargs: dict
    output: int | None = None  # which one, if the operation has several results


class Reference(NamedTuple):
    """In the arguments of a Derived: a captured tensor (leaf) or a derived one."""

    leaf: bool
    number: int


@dataclass
class Traced:
    """A graph, the tensors that its function captured, and how the tensors of its slots follow from them."""

    graph: Graph
    leaves: list[Tensor]  # captured, by identity
    recipe: list[Derived]
    slots: list[Reference]

    def map(self, change: Callable[[Graph], Graph]) -> Traced:
        """The same with another graph of the same slots."""
        return replace(self, graph=change(self.graph))

    def without_leaves(self) -> Traced:
        """The same for a caller that keeps the leaves itself."""
        return replace(self, leaves=[])

    def captured(self, leaves: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The tensors of the graph's slots, computed from the leaves as they are now (or from others like them)."""
        leaves = self.leaves if leaves is None else leaves
        derived: list[Any] = []

        def resolve(x: Any) -> Any:
            return (leaves if x.leaf else derived)[x.number] if isinstance(x, Reference) else x

        for step in self.recipe:
            result = step.function(*_mapped(resolve, step.args), **_mapped(resolve, step.kwargs))
            derived.append(result if step.output is None else result[step.output])
        return [resolve(slot) for slot in self.slots]


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Reference):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, v) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(function, v) for k, v in value.items()}
    return value


def trace(function: Callable[..., Tensor], inputs: Sequence[tuple[str, str]], broadcast: bool = True) -> Traced:
    """Trace function(*inputs), each given as (name, kind). The examples are tensors that broadcast to one shape (each
    input has a dimension of its own), or (`broadcast=False`) vectors of one length."""
    sizes = ((2, 3, 5, 7, 6), (3, 2, 7, 4, 8))
    return traced_twice(function, inputs, [_examples(inputs, broadcast, given) for given in sizes], Tracer)


def traced_twice(
    function: Callable[..., Tensor],
    inputs: Sequence[tuple[str, str]],
    examples: Sequence[list[Tensor]],
    tracer: type[Tracer],
) -> Traced:
    """The graph of a function, which must be the same with both lists of examples."""
    first, second = (_traced(function, tracer(inputs, given)) for given in examples)
    same = repr(first.graph) == repr(second.graph)  # equality would separate NaN from itself
    same = same and len(first.leaves) == len(second.leaves)
    same = same and all(a is b or _equal(a, b) for a, b in zip(first.leaves, second.leaves, strict=True))
    if not same:
        raise Untraceable("the function gives different results when it is called again with tensors of other shapes")
    return first


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _examples(inputs: Sequence[tuple[str, str]], broadcast: bool, sizes: Sequence[int]) -> list[Tensor]:
    examples = []
    for n, (_, kind) in enumerate(inputs):
        size = sizes[n % len(sizes)] if broadcast else sizes[-1]
        values = torch.arange(size, dtype=torch.int64)
        values = values if kind == INT else values.double() / 4 + 0.25
        examples.append(values.view([size if m == n else 1 for m in range(len(inputs))]) if broadcast else values)
    return examples


def _traced(function: Callable[..., Tensor], mode: Tracer) -> Traced:
    examples = mode.examples
    shapes = ", ".join(str(list(x.shape)) for x in examples)
    shape = broadcast_shape(*(x.shape for x in examples)) or []
    try:
        # Inference mode: autograd would replace the results of views by other objects. `enable_grad` only sets the flag
        # that tells whether the function itself disables gradients.
        with torch.inference_mode(), torch.enable_grad(), mode:
            result = function(*examples)
    except Untraceable:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Untraceable(f"the function raised {text} (its arguments had the shapes {shapes})") from error
    if not isinstance(result, Tensor):
        result = _number(result)
        output = mode.builder.constant(result)
    else:
        if broadcast_shape(result.shape, shape) != shape:
            raise Untraceable(
                f"the function returned the shape {list(result.shape)} for arguments that broadcast to {shape}"
            )
        output = mode.node(result, "the result")
    return mode.finish(output)


def broadcast_shape(*shapes: Sequence[int]) -> list[int] | None:
    """The common shape, or None. (`torch.broadcast_shapes` would import the compiler, which takes seconds.)"""
    ndim = max(map(len, shapes))
    result = []
    for sizes in zip(*([1] * (ndim - len(shape)) + list(shape) for shape in shapes), strict=True):
        others = {size for size in sizes if size != 1}
        if len(others) > 1:
            return None
        result.append(others.pop() if others else 1)
    return result


def _number(value: object) -> float | int | bool:
    if isinstance(value, bool | int | float):
        return value
    raise Untraceable(f"the function returned {type(value).__name__}, not a tensor")


MOST_NODES = 4000  # of a graph; beyond, a compiler takes minutes
# Operations on shapes. (Some others count as views only because they may return their argument.)
SHAPES = (
    "select",
    "slice",
    "view",
    "reshape",
    "transpose",
    "permute",
    "t",
    "unsqueeze",
    "squeeze",
    "diagonal",
    "movedim",
)
# Operations that read values. Python then decides by them, which a graph cannot show.
READS = (READ_A_NUMBER, "item", "is_nonzero", "equal", "nonzero", "allclose")


# --- the mode ---------------------------------------------------------------------------------------------------------


def kind_of(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        raise Untraceable(f"it computes with {dtype} numbers")
    return REAL if dtype.is_floating_point else BOOL if dtype == torch.bool else INT


@dataclass
class Tracer(DispatchMode):
    """Records what PyTorch does with the examples."""

    inputs: Sequence[tuple[str, str]]
    examples: list[Tensor]
    builder: Builder = field(default_factory=Builder)

    def __post_init__(self) -> None:
        super().__init__()
        self.nodes: dict[int, int] = {}  # id of a tensor -> its node
        self.alive: list[Any] = []  # keeps the ids of tensors unique
        self.references: dict[int, Reference] = {}  # captured and derived tensors, by id
        self.leaves: list[Tensor] = []
        self.recipe: list[Derived] = []
        self.slots: list[Reference] = []
        self.slot_types: list[Slot] = []
        self.fresh: set[int] = set()  # tensors that the function made from nothing
        for (name, kind), example in zip(self.inputs, self.examples, strict=True):
            self.keep(example, self.builder.add_node("input", kind, (), name))

    def keep(self, tensor: Tensor, node: int) -> Tensor:
        self.alive.append(tensor)
        self.nodes[id(tensor)] = node
        return tensor

    def finish(self, output: int) -> Traced:
        g = self.builder
        graph = pruned(g.nodes, tuple(self.inputs), (), (output,))
        if len(graph.nodes) > MOST_NODES:
            raise Untraceable(f"it has {len(graph.nodes)} operations, and at most {MOST_NODES} are compiled")
        used = sorted({graph.nodes[n].value for n in graph.gathers()})  # type: ignore[type-var]
        place = {old: new for new, old in enumerate(used)}
        nodes = tuple(node._replace(value=place[node.value]) if node.op == "gather" else node for node in graph.nodes)
        graph = Graph(nodes, graph.inputs, tuple(self.slot_types[n] for n in used), graph.outputs)  # type: ignore[index]
        leaves = [leaf.clone() if leaf.is_inference() else leaf for leaf in self.leaves]  # those that the function made
        return Traced(graph, leaves, self.recipe, [self.slots[n] for n in used])  # type: ignore[index]

    # --- values -------------------------------------------------------------------------------------------------------

    def node(self, value: Any, what: str) -> int:
        """The node of an operand: a traced tensor, a number, or a captured tensor with one element."""
        if not isinstance(value, Tensor):
            return self.builder.constant(_number(value))
        if id(value) in self.nodes:
            return self.nodes[id(value)]
        if value.numel() != 1:
            raise Untraceable(
                f"{what} uses a whole tensor of shape {list(value.shape)}, not its elements: index it, as in table[h]"
            )
        zero = self.builder.constant(0)
        return self.gather(value, [zero] * value.ndim)

    def gather(self, tensor: Tensor, indices: list[int]) -> int:
        if id(tensor) in self.fresh and tensor.numel() == 1:
            return self.builder.constant(tensor.item())
        if tensor.numel() == 0:
            raise Untraceable(f"it reads a tensor without elements, of shape {list(tensor.shape)}")
        reference = self.reference(tensor)
        if reference not in self.slots:
            kind = kind_of(tensor.dtype)
            limit = 2**63 - 1 if kind != INT else torch.iinfo(tensor.dtype).max + 1
            self.slots.append(reference)
            self.slot_types.append(Slot(kind, tensor.ndim, min(limit, 2**63 - 1)))
        number = self.slots.index(reference)
        return self.builder.add_node("gather", self.slot_types[number].kind, indices, number)

    def reference(self, tensor: Tensor) -> Reference:
        if id(tensor) not in self.references:
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise Untraceable(f"it captures a {type(tensor).__name__}, which is no plain tensor")
            self.references[id(tensor)] = Reference(True, len(self.leaves))
            self.leaves.append(tensor)
            self.alive.append(tensor)
        return self.references[id(tensor)]

    # --- operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        flat, _ = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        shown = f"torch.{name}" if func.namespace == "aten" else func.name()
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Untraceable(f"{shown} draws random numbers")
        if name in READS:
            if all(id(t) in self.fresh for t in tensors):
                return func(*args, **kwargs)
            raise Untraceable(
                "it reads the value of a tensor (data-dependent control flow, `if`, bool(), int() or .item()): "
                "use torch.where"
            )
        if not any(self.tracks(t) for t in tensors):
            return self.aside(func, shown, name, args, kwargs, tensors)
        if writes_to_arguments(func):
            raise Untraceable(f"{shown} writes to a tensor in place")
        return self.operation(func, shown, name, args, kwargs)

    def tracks(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the arguments of the function."""
        return id(tensor) in self.nodes

    def operation(self, func: Any, shown: str, name: str, args: Any, kwargs: Any) -> Any:
        """An operation on traced tensors."""
        if func.is_view and name in SHAPES:
            raise Untraceable(
                f"{shown} changes the shape of a tensor of indices, which are combined element by element"
            )
        if name == "index":
            return self.index(args[0], list(args[1]))
        rule = RULES.get(name)
        if func.namespace != "aten" or rule is None:
            return self.decomposed(func, shown, args, kwargs)
        with torch.no_grad():
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise Untraceable(f"{shown} is not among the operations that can be compiled")
        kind = kind_of(result.dtype)
        return self.keep(result, self.without_gradient(rule(Call(self, shown, name, kind), *args, **kwargs)))

    def decomposed(self, func: Any, shown: str, args: Any, kwargs: Any) -> Any:
        """An operation that has no rule, by operations that may have one."""
        try:
            with self:
                result = func.decompose(*args, **kwargs)
        except Untraceable as error:
            raise Untraceable(f"{shown}: {error}") from None
        if result is NotImplemented:
            raise Untraceable(f"{shown} is not among the operations that can be compiled")
        return result

    def without_gradient(self, node: int) -> int:
        """The node, whose derivative is zero if the function has disabled gradients."""
        stopped = not torch.is_grad_enabled() and self.builder.kind(node) == REAL
        return self.builder.call("stop", node) if stopped else node

    def aside(self, func: Any, shown: str, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """An operation on no traced tensor: record it, to repeat it at each use."""
        made = all(id(t) in self.fresh for t in tensors)
        if writes_to_arguments(func) and not made:
            raise SideEffect(f"{shown} writes to a captured tensor in place")
        if name == "lift_fresh":
            made = True
        result = func(*args, **kwargs)
        many = isinstance(result, list | tuple)
        given = tuple(tensors)
        for n, x in enumerate(result if many else [result]):
            if not isinstance(x, Tensor) or id(x) in self.fresh or (not made and any(x is t for t in given)):
                continue  # no tensor, or (`x.double()`) an argument
            self.alive.append(x)
            if made:
                if name in ("full", "zeros", "ones", "scalar_tensor") and x.numel():
                    self.keep(x, self.builder.constant(x.flatten()[0].item()))
                self.fresh.add(id(x))
                continue
            called = func if torch.is_grad_enabled() else _without_grad(func)
            refer = lambda t: self.reference(t) if isinstance(t, Tensor) else t  # noqa: E731
            step = Derived(called, tree_map(refer, args), tree_map(refer, kwargs), n if many else None)
            self.references[id(x)] = Reference(False, len(self.recipe))
            self.recipe.append(step)
        return result

    def index(self, tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
        """table[i, j, ...] by integers; the result is made up, because values of examples may be outside."""
        if id(tensor) in self.nodes:
            raise Untraceable("torch.index reads elements of a computed tensor; only captured tensors can be indexed")
        given = [x for x in indices if x is not None]
        check_selection(given)
        if len(given) != tensor.ndim or any(x is None for x in indices):
            raise whole_rows(tensor)
        zero = torch.zeros(broadcast_shape(*(x.shape for x in given)) or [], dtype=tensor.dtype)
        node = self.gather(tensor, [self.builder.cast(self.node(x, "torch.index"), INT) for x in given])
        return self.keep(zero, self.without_gradient(node))


def check_selection(indices: Sequence[Tensor]) -> None:
    if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
        raise Untraceable("torch.index selects by a mask, so the shape of its result depends on the data")


def whole_rows(tensor: Tensor) -> Untraceable:
    return Untraceable(
        f"torch.index reads whole rows of a tensor of shape {list(tensor.shape)}: "
        "give an index for each dimension, as in table[h, i - j]"
    )


def _without_grad(func: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return func(*args, **kwargs)

    return call
