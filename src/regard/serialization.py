"""Problems as JSON: a text for run files, for a model's configuration and for the command line.

    {"format": "regard-problem", "version": 1, "problem": {"Transport": {"regularizer": {"Tsallis": {"alpha": 1.5}}}}}

A part is an object with one entry: the name of its class, and the arguments that make it. The other objects are
"tensor" (values), "parameter" (the name of a tensor that the reader provides), "function" (module:name) and "number"
(inf, -inf, nan). This file knows no part by name: a class is found by its own name as soon as it is defined.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import inspect
import json
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._pytree import Part, part_class, part_name, part_names
from ._validate import describe

FORMAT, VERSION = "regard-problem", 1
LISTED = 64  # a tensor with more numbers is written in base64

_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


# --- writing ----------------------------------------------------------------------------------------------------------


def to_json(part: Part, parameters: Mapping[str, Tensor] | None = None) -> str:
    """The part as JSON. A tensor that is one of `parameters` is written by its name, others by value."""
    names = {id(tensor): name for name, tensor in (parameters or {}).items()}
    written = _written(part, type(part).__name__, names)
    return json.dumps({"format": FORMAT, "version": VERSION, "problem": written}, allow_nan=False)


def _written(value: Any, where: str, names: dict[int, str]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _number(float(value))
    if isinstance(value, Tensor):
        return {"parameter": names[id(value)]} if id(value) in names else {"tensor": _tensor(value, where)}
    if isinstance(value, Part):
        name, required = part_name(type(value)), _required(type(value))
        arguments = {n: v for n, v in value.arguments().items() if v is not None or n in required}
        return {name: {n: _written(v, f"{name.rpartition(':')[2]}({n})", names) for n, v in arguments.items()}}
    if isinstance(value, tuple | list):
        return [_written(item, f"{where}[{n}]", names) for n, item in enumerate(value)]
    if callable(value):
        return {"function": _import_path(value, where)}
    raise TypeError(f"{where}: expected a number, a text, a tensor, a part or a function, got {describe(value)}")


def _number(value: float) -> Any:
    return value if math.isfinite(value) else {"number": repr(value)}


def _tensor(tensor: Tensor, where: str) -> dict[str, Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        raise TypeError(
            f"{where}: expected a plain tensor that has values, got a {type(tensor).__name__} on {tensor.device}"
        )
    if name not in _DTYPES:
        raise TypeError(f"{where}: expected a tensor of {', '.join(_DTYPES)}, got {describe(tensor)}")
    plain = tensor.detach().cpu().contiguous()
    written: dict[str, Any] = {"dtype": name, "shape": list(plain.shape)}
    if plain.numel() <= LISTED:
        # A float64 holds every number of a smaller type, and its shortest text gives the same number back.
        flat = plain.flatten()
        values = flat.double().tolist() if flat.is_floating_point() else flat.tolist()
        written["values"] = [v if not isinstance(v, float) or math.isfinite(v) else repr(v) for v in values]
    else:
        written["base64"] = base64.b64encode(_bytes(plain).numpy().tobytes()).decode()
    if tensor.requires_grad:
        written["requires_grad"] = True
    return written


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, the low byte of each number first."""
    parts = tensor.flatten().view(torch.uint8).view(-1, tensor.element_size())
    return parts if sys.byteorder == "little" else parts.flip(1)


def _import_path(function: Callable, where: str) -> str:
    """module:name, by which an import finds this very function."""
    module, name = getattr(function, "__module__", None), str(getattr(function, "__qualname__", ""))
    paths = [f"{module}:{name}", f"torch:{name.rpartition('.')[2]}"]  # PyTorch's compiled functions have other names
    for path in paths:
        try:
            if module != "__main__" and _resolve(path) is function:
                return path
        except (ImportError, AttributeError, ValueError):
            continue
    raise ValueError(
        f"{where}: expected a function that `from module import name` finds, got {describe(function)}; define it at "
        f"the top level of a module that can be imported"
    )


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for piece in name.split("."):
        found = getattr(found, piece)
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def from_json(text: str, parameters: Mapping[str, Tensor] | None = None, allow_imports: bool = False) -> Part:
    """The part that `to_json` wrote. `parameters` gives the tensors that are written by name. Only with
    `allow_imports` are functions imported, which runs the code of their modules."""
    if not isinstance(text, str):
        raise TypeError(f"text: expected a str, got {describe(text)}")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"text: expected JSON, got {_short(text)} ({error})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f'text: expected an object whose "format" is "{FORMAT}", got {_short(text)}')
    if type(record.get("version")) is not int or record["version"] != VERSION:
        raise ValueError(
            f"version: expected {VERSION}, got {record.get('version')!r}; another version of regard wrote it"
        )
    if unknown := record.keys() - {"format", "version", "problem"}:
        raise ValueError(f"text: expected format, version and problem, got {_listed(unknown)}")
    try:
        found = _Reader(parameters or {}, allow_imports).value(record.get("problem"), "problem")
    except RecursionError:
        raise ValueError("problem: expected parts of parts, got a text that is nested too deeply") from None
    if not isinstance(found, Part):
        raise ValueError(f"problem: expected a part, got {_short(record.get('problem'))}")
    return found


class _Reader:
    def __init__(self, parameters: Mapping[str, Tensor], allow_imports: bool) -> None:
        self.parameters, self.allow_imports = parameters, allow_imports

    def value(self, written: Any, where: str) -> Any:
        if isinstance(written, list):
            return tuple(self.value(item, f"{where}[{n}]") for n, item in enumerate(written))
        if not isinstance(written, dict):
            return written
        if len(written) != 1:
            raise ValueError(f"{where}: expected an object with one entry, got {_listed(written)}")
        ((kind, content),) = written.items()
        special = {
            "tensor": _read_tensor,
            "parameter": self._parameter,
            "function": self._function,
            "number": _read_number,
        }
        return special[kind](content, where) if kind in special else self._part(kind, content, where)

    def _part(self, name: str, content: Any, where: str) -> Part:
        cls = part_class(name)
        if cls is None and ":" in name:  # a class of the user's
            self._check_import(name, where)
            _imported(name, where)
            cls = part_class(name)
        if cls is None:
            raise ValueError(f"{where}: expected one of {', '.join(part_names())}, got {name!r}")
        if not isinstance(content, dict):
            raise ValueError(f"{where}: expected the arguments of {name} as an object, got {_short(content)}")
        short = name.rpartition(":")[2]
        return make(cls, (), {n: self.value(item, f"{short}({n})") for n, item in content.items()})

    def _parameter(self, name: Any, where: str) -> Tensor:
        found = self.parameters.get(name) if isinstance(name, str) else None
        if not isinstance(found, Tensor):
            raise ValueError(
                f"{where}: expected a tensor named {name!r} in `parameters`, got {_listed(self.parameters) or 'none'}"
            )
        return found

    def _function(self, path: Any, where: str) -> Callable:
        if not isinstance(path, str) or ":" not in path:
            raise ValueError(f"{where}: expected a function as module:name, got {path!r}")
        self._check_import(path, where)
        found = _imported(path, where)
        if not callable(found):
            raise ValueError(f"{where}: expected a function at {path}, got {describe(found)}")
        return found

    def _check_import(self, path: str, where: str) -> None:
        if not self.allow_imports:
            raise ValueError(
                f"{where}: expected no code to import, got {path!r}; allow_imports=True imports it, which runs the "
                f"code of its module"
            )


def _imported(path: str, where: str) -> Any:
    try:
        return _resolve(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: expected module:name that can be imported, got {path!r} ({error})") from None


def _read_number(text: Any, where: str) -> float:
    if not isinstance(text, str) or text not in _SPECIAL:
        raise ValueError(f"{where}: expected inf, -inf or nan, got {text!r}")
    return _SPECIAL[text]


def _read_tensor(written: Any, where: str) -> Tensor:
    known = {"dtype", "shape", "values", "base64", "requires_grad"}
    if not isinstance(written, dict) or not {"dtype", "shape"} <= written.keys() <= known:
        got = _listed(written) if isinstance(written, dict) else _short(written)
        raise ValueError(f"{where}: expected dtype, shape, values or base64 of a tensor, got {got}")
    name, shape = written["dtype"], written["shape"]
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{where}: expected one of {', '.join(_DTYPES)} as dtype, got {name!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{where}: expected sizes of a tensor as shape, got {shape!r}")
    dtype, count = _DTYPES[name], math.prod(shape)
    if "values" in written:
        flat = _from_values(written["values"], dtype, where)
    else:
        flat = _from_base64(written.get("base64"), dtype, where)
    if flat.numel() != count:
        raise ValueError(f"{where}: expected {count} numbers for the shape {shape}, got {flat.numel()}")
    tensor = flat.view(shape)
    return torch.nn.Parameter(tensor) if written.get("requires_grad") is True else tensor


def _from_values(values: Any, dtype: torch.dtype, where: str) -> Tensor:
    if not isinstance(values, list):
        raise ValueError(f"{where}: expected a list of numbers, got {_short(values)}")
    if dtype.is_floating_point:
        values = [_SPECIAL.get(v, v) if isinstance(v, str) else v for v in values]
        good = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    else:
        good = all(type(v) is (bool if dtype == torch.bool else int) for v in values)
    if not good:
        raise ValueError(f"{where}: expected numbers of {dtype}, got {_short(values)}")
    try:
        return torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"{where}: expected numbers of {dtype}, got {_short(values)} ({error})") from None


def _from_base64(text: Any, dtype: torch.dtype, where: str) -> Tensor:
    try:
        content = bytearray(base64.b64decode(text, validate=True))
    except (TypeError, ValueError, binascii.Error):
        raise ValueError(f"{where}: expected base64, got {_short(text)}") from None
    if len(content) % dtype.itemsize:
        raise ValueError(f"{where}: expected {dtype.itemsize} bytes for each number, got {len(content)} in all")
    if not content:
        return torch.zeros(0, dtype=dtype)
    parts = torch.frombuffer(content, dtype=torch.uint8).view(-1, dtype.itemsize)
    return (parts if sys.byteorder == "little" else parts.flip(1).contiguous()).view(dtype).flatten()


# --- making a part from arguments that were read ----------------------------------------------------------------------


def make(cls: type[Part], positional: tuple, named: dict[str, Any]) -> Part:
    """cls(*positional, **named), where the types of the arguments are checked by their annotations, too."""
    name, signature = cls.__name__, inspect.signature(cls)
    for given in named:
        if given not in signature.parameters:
            raise ValueError(f"{name}: expected {', '.join(signature.parameters) or 'no arguments'}, got {given!r}")
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise ValueError(f"{name}: expected {', '.join(signature.parameters) or 'no arguments'}, got {error}") from None
    hints = argument_types(cls)
    for given, value in bound.arguments.items():
        if given in hints and not fits(value, hints[given]):
            raise ValueError(f"{name}({given}): expected {_in_words(hints[given])}, got {describe(value)}")
    return cls(*bound.args, **bound.kwargs)


def argument_types(cls: type[Part]) -> dict[str, Any]:
    """The types of the arguments that make a part; empty where they cannot be resolved."""
    try:
        return typing.get_type_hints(cls.__init__)
    except NameError:
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read has the annotated type. An annotation that is not known here admits all."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, tuple) and (inner[1:] != (...,) or all(fits(item, inner[0]) for item in value))
    if origin is not None or not isinstance(hint, type):
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _required(cls: type[Part]) -> set[str]:
    return {n for n, p in inspect.signature(cls).parameters.items() if p.default is not None}


def _in_words(hint: Any) -> str:
    """An annotation as it is written, without the names of modules."""
    return hint.__name__ if isinstance(hint, type) else re.sub(r"\b(\w+\.)+(?=\w)", "", str(hint))


def _listed(names: Any) -> str:
    return ", ".join(map(repr, sorted(names)))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
