"""What the parts of a problem share: frozen, compared by structure, printed as they are written, and pytrees."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Scalar = float | Tensor


def describe(value: object) -> str:
    """How an error message or a repr shows a value."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"Tensor({kind}, {list(value.shape)})"
    return repr(value)


def is_number(value: object) -> bool:
    """A real number, NumPy's scalars included; not a bool."""
    return isinstance(value, int | float | numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """An integer, NumPy's and symbolic ones included; not a bool."""
    return isinstance(value, int | torch.SymInt | numbers.Integral) and not isinstance(value, bool)


@dataclass_transform(frozen_default=True, eq_default=False)
class Part:
    """A frozen piece of a problem: compared by structure, its tensors by identity; a pytree with tensors as leaves."""

    _names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, abstract: bool = False) -> None:
        super().__init_subclass__()
        # Methods defined here win over dataclass's own: eq and repr are ours.
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        cls._names = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        if not abstract:
            _register_pytree(cls)
            torch.serialization.add_safe_globals([cls])  # plain data: may stand in a checkpoint

    def _values(self) -> tuple:
        return tuple(getattr(self, name) for name in self._names)

    def _declare(self) -> None:
        """Called once the fields are set, however they were set."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part) or type(self) is not type(other):
            return NotImplemented
        return all(
            a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
            for a, b in zip(self._values(), other._values(), strict=True)
        )

    def __hash__(self) -> int:
        return hash((type(self), *(id(v) if isinstance(v, Tensor) else v for v in self._values())))

    def __repr__(self) -> str:
        shown = []
        positional = True
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not isinstance(value, Tensor) and value == field.default:
                positional = False
                continue
            shown.append(describe(value) if positional else f"{field.name}={describe(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _register_pytree(cls: type[Part]) -> None:
    names = cls._names

    def split(part: Any) -> tuple[list[str], list[Any], tuple]:
        # Tensors, parts and tuples of parts are children; numbers, strings and callables are structure.
        # One that was unflattened keeps its children, whatever they have become.
        moving = getattr(part, "_moving", None) or [
            n for n in names if isinstance(getattr(part, n), Tensor | Part | tuple)
        ]
        fixed = tuple((n, getattr(part, n)) for n in names if n not in moving)
        return moving, [getattr(part, n) for n in moving], (tuple(moving), fixed)

    def flatten(part: Any) -> tuple[list[Any], tuple]:
        _, children, context = split(part)
        return children, context

    def flatten_with_keys(part: Any) -> tuple[list[Any], tuple]:
        moving, children, context = split(part)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(moving, children, strict=True)], context

    def unflatten(children: Any, context: tuple) -> Any:
        # No validation: a tree_map may put anything where a tensor was.
        moving, fixed = context
        part = cls.__new__(cls)
        for name, value in itertools.chain(zip(moving, children, strict=True), fixed):
            object.__setattr__(part, name, value)
        object.__setattr__(part, "_moving", list(moving))
        part._declare()
        return part

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"regard.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=json.dumps,
        from_dumpable_context=lambda text: tuple(tuple(map(tuple_or_self, x)) for x in json.loads(text)),
    )


def tuple_or_self(value: Any) -> Any:
    """JSON has no tuples: give a list back as one."""
    return tuple(value) if isinstance(value, list) else value


# --- checks of numbers -----------------------------------------------------------------------------------------------


def check_scalar(name: str, value: object, expected: str, valid: Callable[[float], bool]) -> None:
    """A number must satisfy `valid`; a tensor must be floating (its values are checked where it is used)."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name}: expected a number or a floating-point tensor, got {describe(value)}")
    elif not is_number(value):
        raise TypeError(f"{name}: expected a number or a floating-point tensor, got {describe(value)}")
    elif not valid(value):  # type: ignore[arg-type]
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def finite(x: float) -> bool:
    return -math.inf < x < math.inf  # Dynamo cannot trace math.isfinite of a symbolic float


def positive(x: float) -> bool:
    return 0 < x < math.inf


def not_negative(x: float) -> bool:
    return 0 <= x < math.inf


def probability(x: float) -> bool:
    return 0 <= x <= 1


def above_one(x: float) -> bool:
    return 1 < x < math.inf
