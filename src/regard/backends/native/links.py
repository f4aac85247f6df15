"""A user's regulariser in the engine: its formulas are traced, written as C++, compiled, and called by address.

The generated text gives the formulas to the loops of csrc/links/compiled_link.h. A parameter that is a number is a
constant of the text. A parameter that is a tensor, and a tensor of one element that the formulas hold, is an argument.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._compat import constant_when_traced
from ..._validate import Scalar
from ...compiled.cpp import vector_function
from ...compiled.graph import REAL, Graph, Node, Untraceable, derivative
from ...compiled.library import Library, Unavailable, load
from ...compiled.tracing import Traced, trace
from ...form import Form
from ...regularizers import FDivergence, Regularizer, regularizer_of
from .engine import extension

ARGUMENTS = 4  # tensors that a link may have as arguments (LINK_PARAMETERS in csrc/engine/problem.h)
_NUMBERS = {torch.float32: "float", torch.float64: "double"}


@dataclass(frozen=True)
class Link:
    """A compiled link, for both dtypes of computation."""

    library: Library
    lower: float
    upper: float
    ceiling: float
    full_support: bool
    parameters: int  # tensors among the regulariser's own parameters
    held: tuple[Traced, ...]  # functions with the tensors that they hold, in the order of the arguments
    no_value: str | None  # why f could not be compiled

    def addresses(self, dtype: torch.dtype) -> dict[str, int]:
        """The functions by the name of their field in the record."""
        kind = _NUMBERS[dtype]
        names = {"link": "link", "link_derivatives": "derivatives"}
        names |= {} if self.no_value else {"link_divergence": "divergence"}
        return {field: self.library.address(f"regard_{name}_{kind}") for field, name in names.items()}

    def arguments(self, form: Form) -> list[Tensor]:
        """The tensors that the link depends on, each [B|1, H|1, Tq|1, 1]."""
        held = [tensor for traced in self.held for tensor in traced.captured()]
        own = [x for x in form.parameters if isinstance(x, Tensor)]
        return own + [x.detach().to(form.dtype).reshape(1, 1, 1, 1) for x in held]


def link_of(form: Form) -> Link:
    """The compiled link of a problem for which `link_missing` returns None."""
    found = _lookup(form.family, _numbers(form.parameters))
    assert isinstance(found, Link), found
    return found


def link_missing(form: Form) -> str | None:
    """Why the regulariser's link cannot be compiled, or None."""
    return _missing(form.family, _numbers(form.parameters))


def value_missing(form: Form) -> str | None:
    """Why the statistic `value`, which needs f, cannot be computed with a compiled link; or None."""
    return _value_missing(form.family, _numbers(form.parameters))


def lists_keys(form: Form) -> bool:
    """Whether keys below some score have no weight, so that a row may list the others. (The gradient of a parameter is
    summed over tiles, not over lists.)"""
    constant = not any(isinstance(x, Tensor) for x in form.parameters)
    return constant and _lists_keys(form.family, _numbers(form.parameters))


def bounded(form: Form) -> bool:
    """Whether link has a ceiling."""
    return _bounded(form.family, _numbers(form.parameters))


def _numbers(parameters: list[Scalar]) -> tuple[float | None, ...]:
    """The parameters that are numbers; None in the place of a tensor."""
    return tuple(None if isinstance(x, Tensor) else x for x in parameters)


@constant_when_traced  # torch.compile does not trace the tracing
def _missing(family: str, numbers: tuple[float | None, ...]) -> str | None:
    found = _lookup(family, numbers)
    return found if isinstance(found, str) else None


@constant_when_traced
def _value_missing(family: str, numbers: tuple[float | None, ...]) -> str | None:
    found = _lookup(family, numbers)
    return found if isinstance(found, str) else found.no_value


@constant_when_traced
def _lists_keys(family: str, numbers: tuple[float | None, ...]) -> bool:
    found = _lookup(family, numbers)
    return isinstance(found, Link) and found.lower > -math.inf and found.ceiling == math.inf


@constant_when_traced
def _bounded(family: str, numbers: tuple[float | None, ...]) -> bool:
    found = _lookup(family, numbers)
    return isinstance(found, Link) and found.ceiling < math.inf


# --- compilation ------------------------------------------------------------------------------------------------------

# By regulariser (an FDivergence) or class; then by the parameters that are numbers and the instruction set.
_links: weakref.WeakKeyDictionary[Any, dict[tuple, Link | str]] = weakref.WeakKeyDictionary()


def _lookup(family: str, numbers: tuple[float | None, ...]) -> Link | str:
    """The link, or why there is none."""
    example = regularizer_of(family, tuple(math.nan if x is None else x for x in numbers), checked=False)
    owner = example if isinstance(example, FDivergence) else type(example)
    known = _links.setdefault(owner, {})
    isa = extension()[0].isa()
    at = (numbers, isa)
    if at not in known:
        try:
            known[at] = _compile(example, numbers, isa)
        except (Untraceable, Unavailable) as error:
            known[at] = str(error)
    return known[at]


def _compile(example: Regularizer, numbers: tuple[float | None, ...], isa: str) -> Link:
    if example.signed:
        raise Untraceable("a signed plan (link inverts f' at negative ratios) has no kernel")
    if type(example).origin is not Regularizer.origin:
        raise Untraceable(f"{type(example).__name__} has an `origin` of its own, which has no kernel")
    names = [name for name, number in zip(example.parameters, numbers, strict=True) if number is None]

    def traced(method: str) -> Traced:
        """A formula as a graph of its argument and the parameters that are tensors."""

        def formula(x: Tensor, *values: Tensor) -> Tensor:
            own = example.with_parameters({**example.parameters, **dict(zip(names, values, strict=True))})
            return _formulas(own)[method](x)

        inputs = [("x", REAL), *((f"parameter{n}", REAL) for n in range(len(names)))]
        try:
            found = trace(formula, inputs, broadcast=False)
        except Untraceable as error:
            raise Untraceable(f"{method}: {error}") from error
        if any(slot.kind != REAL for slot in found.graph.slots):
            raise Untraceable(f"{method}: it holds a tensor of integers")
        return found

    link = traced("link")
    if "slope" in _formulas(example):
        slope = traced("slope")
    else:
        slope = Traced(derivative(link.graph, "x"), link.leaves, link.recipe, link.slots)
    parts = [link, slope] if slope.leaves is not link.leaves else [link]
    value, no_value = None, None
    try:
        value = traced("f")
        parts.append(value)
    except Untraceable as error:
        no_value = str(error)
    held = tuple(part for part in parts if part.slots)
    arguments = len(names) + sum(len(part.slots) for part in held)
    if arguments > ARGUMENTS:
        raise Untraceable(f"it has {arguments} parameters and held tensors, and the engine takes at most {ARGUMENTS}")
    lower, upper = -math.inf, math.inf  # of a class: its link itself is 0 and inf outside of its range
    if isinstance(example, FDivergence):
        lower, upper = example.lower, example.upper
    text = _source(link, slope, value, len(names), held, lower, upper, example.ceiling)
    library = load(text, isa)
    return Link(library, lower, upper, example.ceiling, example.full_support, len(names), held, no_value)


def _formulas(regularizer: Regularizer) -> dict[str, Callable[[Tensor], Tensor]]:
    """The formulas where link is positive and finite. A slope that is left out is derived."""
    if not isinstance(regularizer, FDivergence):
        return {"f": regularizer.f, "link": regularizer.link, "slope": regularizer.slope}
    found = {"f": regularizer.user_f, "link": regularizer.user_link}
    return found if regularizer.user_slope is None else found | {"slope": regularizer.user_slope}


def _source(
    link: Traced,
    slope: Traced,
    value: Traced | None,
    parameters: int,
    held: tuple[Traced, ...],
    lower: float,
    upper: float,
    ceiling: float,
) -> str:
    places, at = {}, parameters  # where the arguments of each function's held tensors begin
    for part in held:
        places[id(part.slots)] = at
        at += len(part.slots)

    def written(part: Traced, graph: Graph, name: str) -> str:
        return vector_function(_with_inputs(graph, places.get(id(part.slots), 0)), name)

    def call(name: str, part: Traced, argument: str, out: str) -> str:
        first = places.get(id(part.slots), 0)
        given = [*range(parameters), *range(first, first + len(part.slots))]
        inputs = [argument, *(f"parameters[{n}]" for n in given)]
        return f"formula_{name}<R>({', '.join(inputs)}, (const R *)nullptr, {out});"

    functions = [written(link, link.graph, "formula_link"), written(slope, slope.graph, "formula_slope")]
    if value is not None:
        functions.append(written(value, value.graph, "formula_f"))
    derived = []
    for n in range(parameters):
        functions.append(written(link, derivative(link.graph, f"parameter{n}"), f"formula_by{n}"))
        derived.append(call(f"by{n}", link, "t", f"by[{n}]"))
    derived += [f"by[{n}] = V{{}};" for n in range(parameters, at)]
    bodies = {
        "link(V t, const V *parameters, V &g, V &slope)": [
            call("link", link, "t", "g"),
            call("slope", slope, "t", "slope"),
        ],
        "derivatives(V t, const V *parameters, V *by)": derived,
    }
    if value is not None:
        bodies["divergence(V t, const V *parameters, V &value)"] = [call("f", value, "t", "value")]
    lines = ['#include "engine/functions.h"', '#include "links/compiled_link.h"', "", "namespace {"]
    lines += [*functions, "", "template <class R> struct Formulas {", "  using V = Vec<R>;"]
    lines.append(f"  static constexpr int PARAMETERS = {at};")
    for name, number in (("LOWER", lower), ("UPPER", upper), ("CEILING", ceiling)):
        lines.append(f"  static constexpr double {name} = {_literal(number)};")
    for signature, body in bodies.items():
        lines += [f"  static INLINE void {signature} {{", *(f"    {line}" for line in body), "  }"]
    lines += ["};", "}  // namespace", ""]
    for kind in _NUMBERS.values():
        for name in ("link", "derivatives", *(("divergence",) if value is not None else ())):
            block = f"const regard::LinkBlock<{kind}> *b"
            lines.append(f'extern "C" __attribute__((visibility("default"))) void regard_{name}_{kind}({block}) {{')
            lines += [f"  {name}_of<{kind}, Formulas<{kind}>>(*b);", "}"]
    return "\n".join([*lines, ""])


def _literal(number: float) -> str:
    return repr(number) if math.isfinite(number) else "INF<double>" if number > 0 else "-INF<double>"


def _with_inputs(graph: Graph, first: int) -> Graph:
    """The graph with its held tensors, each of one element, as inputs."""

    def node(given: Node) -> Node:
        return Node("input", REAL, (), f"held{given.value}") if given.op == "gather" else given

    inputs = (*graph.inputs, *((f"held{n}", REAL) for n in range(len(graph.slots))))
    return Graph(tuple(map(node, graph.nodes)), inputs, (), graph.outputs)
