"""Problems as Python writes them, for the command line: `Transport(Tsallis(1.5), prior=Causal() * Window(63))`.

The text is parsed to a syntax tree and never evaluated. It may contain calls of parts, products and unions of priors,
numbers, texts, True, False, None, inf, nan, and lists where an argument is a tensor. Anything else raises.
"""

from __future__ import annotations

import ast
import math
import typing
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._pytree import Part, part_class, part_names
from .priors import Prior
from .problem import Transport
from .serialization import argument_types, make

_NAMES = {"inf": math.inf, "nan": math.nan}


def read_problem(
    text: str, parameters: Mapping[str, Tensor] | None = None, *, allow_imports: bool = False
) -> Transport:
    """The problem of a text: JSON if it starts with "{" (with the arguments of `Transport.from_json`), else an
    expression."""
    if text.lstrip().startswith("{"):
        return Transport.from_json(text, parameters, allow_imports=allow_imports)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"problem: expected Transport(...) or JSON, got {text!r} ({error})") from None
    try:
        found = _value(tree.body)
    except RecursionError:
        raise ValueError("problem: expected parts of parts, got a text that is nested too deeply") from None
    if not isinstance(found, Transport):
        raise ValueError(f"problem: expected Transport(...) or JSON, got {text!r}")
    return found


def _value(node: ast.expr) -> Any:
    """A number, text, part, or a list that becomes a tensor."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):  # int: bool, too
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.BitOr):
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, Prior) and isinstance(right, Prior):
            return _combined(node, left, right)
    if isinstance(node, ast.Call):
        return _part(node)
    raise ValueError(
        f"problem: expected parts such as Transport(Tsallis(1.5), prior=Causal() * Window(63)), numbers, texts and "
        f"lists, got {ast.unparse(node)!r}"
    )


def _combined(node: ast.BinOp, left: Any, right: Any) -> Prior:
    try:
        return left * right if isinstance(node.op, ast.Mult) else left | right
    except TypeError:
        raise ValueError(f"problem: expected priors that have a union, got {ast.unparse(node)!r}") from None


def _part(node: ast.Call) -> Part:
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "regard":
        function = ast.Name(function.attr)
    cls = part_class(function.id) if isinstance(function, ast.Name) else None
    if cls is None:
        known = ", ".join(name for name in part_names() if ":" not in name)
        raise ValueError(f"problem: expected a call of {known}, got {ast.unparse(node)!r}")
    if any(isinstance(item, ast.Starred) for item in node.args) or any(k.arg is None for k in node.keywords):
        raise ValueError(f"problem: expected arguments one by one, got {ast.unparse(node)!r}")
    named = {k.arg: _value(k.value) for k in node.keywords if k.arg is not None}
    return _made(cls, tuple(map(_value, node.args)), named)


def _made(cls: type[Part], positional: tuple, named: dict[str, Any]) -> Part:
    """The part, with tensors in place of lists. Whole numbers are integers, unless the part asks for a float."""
    hints = argument_types(cls)
    names = [*hints, *("" for _ in positional)][: len(positional)]

    def build(whole: bool) -> Part:
        first = tuple(_tensor(n, v, hints, whole) for n, v in zip(names, positional, strict=True))
        return make(cls, first, {n: _tensor(n, v, hints, whole) for n, v in named.items()})

    try:
        return build(whole=True)
    except TypeError:
        if not any(isinstance(value, list) for value in (*positional, *named.values())):
            raise
        return build(whole=False)


def _tensor(name: str, value: Any, hints: dict[str, Any], whole: bool) -> Any:
    if not isinstance(value, list):
        return value
    if Tensor not in (hints.get(name), *typing.get_args(hints.get(name))):
        return tuple(value)
    try:
        tensor = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}: expected lists of numbers, of equal lengths, got {value!r}") from None
    if tensor.is_floating_point() or not whole:
        return tensor.to(torch.float32) if tensor.dtype != torch.bool else tensor
    return tensor
