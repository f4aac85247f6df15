"""What the declared parts of a problem share.

A part is frozen, compares by structure (its tensors by identity), prints as the call that makes it, and is a pytree
whose leaves are its tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import Tensor

from ._compat import pytree
from ._validate import describe

_PARTS: dict[str, type[Part]] = {}  # the classes that are not abstract, by `part_name`


def part_name(cls: type[Part]) -> str:
    """The name of a class in a text: its own for a class of this library, module:name for any other."""
    return cls.__name__ if cls.__module__.partition(".")[0] == "regard" else f"{cls.__module__}:{cls.__qualname__}"


def part_class(name: str) -> type[Part] | None:
    """The class of that name; None if there is none, or if its module has not been imported."""
    return _PARTS.get(name)


def part_names() -> list[str]:
    return sorted(_PARTS)


@dataclass_transform(frozen_default=True, eq_default=False)
class Part:
    """A frozen piece of a problem: compared by structure, its tensors by identity; a pytree with tensors as leaves."""

    _names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, abstract: bool = False) -> None:
        super().__init_subclass__()
        # This class defines eq and repr, so dataclass must not generate them.
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        cls._names = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        if not abstract:
            _PARTS[part_name(cls)] = cls
            _register_pytree(cls)
            torch.serialization.add_safe_globals([cls])  # plain data: torch.load may read it from a checkpoint

    def arguments(self) -> dict[str, Any]:
        """The arguments that make this part, by name: its fields, unless the class has an `__init__` of its own."""
        return dict(zip(self._names, self._values(), strict=True))

    def _values(self) -> tuple:
        return tuple(getattr(self, name) for name in self._names)

    def _declare(self) -> None:
        """Called after unflattening has set the fields. A subclass may register the new object here."""

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
        # An unflattened part keeps the same children, because tree_map may have replaced tensors by other objects.
        child_names = getattr(part, "_child_names", None) or [
            n for n in names if isinstance(getattr(part, n), (Tensor, Part, tuple))
        ]
        fixed = tuple((n, getattr(part, n)) for n in names if n not in child_names)
        return child_names, [getattr(part, n) for n in child_names], (tuple(child_names), fixed)

    def flatten(part: Any) -> tuple[list[Any], tuple]:
        _, children, context = split(part)
        return children, context

    def flatten_with_keys(part: Any) -> tuple[list[Any], tuple]:
        child_names, children, context = split(part)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(child_names, children, strict=True)], context

    def unflatten(children: Any, context: tuple) -> Any:
        # No validation: tree_map may have replaced a tensor by any object.
        child_names, fixed = context
        part = cls.__new__(cls)
        for name, value in itertools.chain(zip(child_names, children, strict=True), fixed):
            object.__setattr__(part, name, value)
        object.__setattr__(part, "_child_names", list(child_names))
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
    """A list as a tuple, because JSON has no tuples. Other values stay as they are."""
    return tuple(value) if isinstance(value, list) else value
