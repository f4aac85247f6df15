"""Checks of arguments, and their conversion to common shapes.

An error names the argument, what was expected and what was given: `name: expected ..., got ...`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import torch
from torch import Tensor

from ._compat import (
    PLAIN_TENSOR_TYPES,
    autocast_anywhere,
    get_unwrapped,
    has_torch_dispatch,
    is_batchedtensor,
    is_gradtrackingtensor,
    transforms_active,
)

Scalar = float | Tensor


def describe(value: object) -> str:
    """How an error message or a repr shows a value."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"Tensor({kind}, {list(value.shape)})"
    if type(value) in (tuple, list):  # a tensor's own repr would print its values
        inside = ", ".join(map(describe, value))  # type: ignore[arg-type]
        comma = "," if type(value) is tuple and len(value) == 1 else ""  # type: ignore[arg-type]
        return f"({inside}{comma})" if type(value) is tuple else f"[{inside}]"
    return repr(value)


def is_number(value: object) -> bool:
    """A real number, NumPy's scalars included; not a bool."""
    return isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """An integer, NumPy's and symbolic ones included; not a bool."""
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


# --- numbers ----------------------------------------------------------------------------------------------------------


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


# --- tensors ----------------------------------------------------------------------------------------------------------


def concrete(tensor: object) -> bool:
    """Whether a tensor's values can be read. They cannot while compiling, under a transform, or on fake tensors."""
    return (
        not torch.compiler.is_compiling()
        and (type(tensor) is Tensor or isinstance(tensor, torch.nn.Parameter))
        and not tensor.is_meta
        and not transforms_active()
    )


def check_values(name: str, value: Scalar, expected: str, valid: Callable[[Tensor], Tensor]) -> None:
    if isinstance(value, Tensor) and concrete(value):
        good = valid(value)  # NaN fails every comparison
        if not bool(good.all()):
            raise ValueError(f"{name}: expected {expected}, got {value.detach()[~good][0].item()}")


def may_be_zero(temperature: Scalar) -> bool:
    if not isinstance(temperature, Tensor):
        return temperature == 0
    if torch.compiler.is_compiling():
        return True
    plain = temperature
    while is_gradtrackingtensor(plain):  # values can be read under grad and jvp, but not under vmap
        plain = get_unwrapped(plain)
    if type(plain) not in (Tensor, torch.nn.Parameter) or plain.is_meta or is_batchedtensor(plain):
        return True
    return bool((plain == 0).any())


def number(name: str, value: object, expected: str, valid: Callable[[float], bool]) -> float:
    if type(value) is float and valid(value):
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if not is_number(value):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    if not valid(value):  # type: ignore[arg-type]
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def default_scale(D: int) -> float:
    return 1 / math.sqrt(D) if D else 1.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which inputs of this dtype are computed: float32 for half types."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, as query, got one on {tensor.device}")


def check_type(name: str, tensor: Tensor) -> None:
    """Raise for a subclass of Tensor, because its memory may not hold the numbers that it represents. Subclasses that
    implement PyTorch's operations themselves (`__torch_dispatch__`: DTensor and other wrappers) are accepted."""
    kind = type(tensor)
    if kind not in PLAIN_TENSOR_TYPES and not has_torch_dispatch(kind):
        raise TypeError(f"{name}: expected a plain tensor, got a {kind.__name__}, which is a subclass of Tensor")


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, cast to the autocast dtype as PyTorch's own attention does (float64 stays float64)."""
    if not autocast_anywhere():
        return query, key, value
    device = query.device.type if isinstance(query, Tensor) else "meta"
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (query, key, value)
    )
    return query, key, value


def plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """A quick test for the common case: dense tensors [B, H, T, D] of one dtype, on one device, whose sizes agree.
    For these, `check_tensors`, `leading_shape` and `fold` have nothing to do."""
    for tensor in (query, key, value):
        if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
            return False
    q, k, v = query.shape, key.shape, value.shape
    return (
        len(q) == len(k) == len(v) == 4
        and q[:2] == k[:2] == v[:2]
        and q[3] == k[3]
        and k[2] == v[2]
        and query.dtype is key.dtype is value.dtype
        and query.dtype in _FLOATS
        and query.device == key.device == value.device
    )


_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {describe(tensor)}")
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
            raise TypeError(f"{name}: expected a dense tensor (pack sequences with Documents), got {kind}")
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {describe(tensor)}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: expected {query.dtype}, as query, got {tensor.dtype}")
        if tensor.dim() < 2:
            raise ValueError(f"{name}: expected shape [..., T, D], got {list(tensor.shape)}")
        check_device(name, tensor, query.device)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: expected head size D={query.shape[-1]}, as query, got {list(key.shape)}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: expected Tk={key.shape[-2]} rows, as key, got {list(value.shape)}")


def leading_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """(*batch, H) of the plan; key and value may have fewer heads, or batch dimensions that broadcast."""
    if not isinstance(enable_gqa, bool):
        raise TypeError(f"enable_gqa: expected a bool, got {describe(enable_gqa)}")
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value)]
    if heads[1] != heads[2] and heads[1] != 1 and heads[2] != 1:
        raise ValueError(f"value: expected {heads[1]} heads, as key, got {list(value.shape)}")
    heads[1] = max(heads[1], heads[2])
    if heads[0] != heads[1] and heads[0] != 1 and heads[1] != 1:
        if not enable_gqa:
            raise ValueError(
                f"key: expected {heads[0]} heads, as query, got {list(key.shape)} "
                f"(enable_gqa=True allows query heads to share key heads)"
            )
        if heads[1] == 0 or heads[0] % heads[1]:
            raise ValueError(f"key: expected a number of heads that divides query's {heads[0]}, got {list(key.shape)}")
    batch: tuple[int, ...] = tuple(query.shape[:-3])
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[:-3] == batch:
            continue
        try:
            batch = tuple(torch.broadcast_shapes(batch, tensor.shape[:-3]))
        except RuntimeError:
            raise ValueError(
                f"{name}: expected batch dimensions that broadcast with query's {list(query.shape[:-3])}, "
                f"got {list(tensor.shape)}"
            ) from None
    return (*batch, max(heads[0], heads[1]) if heads[0] == 1 else heads[0])


def fold(tensor: Tensor, lead: tuple[int, ...], heads: int | None = None) -> Tensor:
    """[..., h, T, D] -> [B, h, T, D]; `heads` expands a single head to that number (as a view)."""
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    shape = (*lead[:-1], heads or tensor.shape[-3], *tensor.shape[-2:])
    if tensor.shape != shape:
        tensor = tensor.expand(shape)
    if tensor.dim() == 3:
        return tensor.unsqueeze(0)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def broadcastable(name: str, tensor: Tensor, lead: tuple[int, ...], Tq: int, Tk: int, device: torch.device) -> Tensor:
    """A tensor that broadcasts to [*lead, Tq, Tk], as four dimensions. It is not expanded."""
    check_type(name, tensor)
    check_device(name, tensor, device)
    full = (*lead, Tq, Tk)
    shape = (1,) * (len(full) - tensor.dim()) + tuple(tensor.shape)
    if len(shape) > len(full) or any(s != 1 and s != f for s, f in zip(shape, full, strict=True)):
        raise ValueError(f"{name}: expected a shape that broadcasts to {list(full)}, got {list(tensor.shape)}")
    tensor = tensor.view(shape)
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() > 4:
        batch = lead[:-1]
        if any(s != 1 for s in shape[: len(batch)]):
            tensor = tensor.expand(*batch, *shape[len(batch) :])
        tensor = tensor.flatten(0, -4)
    return tensor


def row_parameter(
    name: str, value: Scalar, B: int, H: int, Tq: int, dtype: torch.dtype, device: torch.device, per_head: bool
) -> Scalar:
    """A number unchanged; a tensor as [B|1, H|1, Tq|1, 1] in the compute dtype (shape [H] is per head, if allowed)."""
    if not isinstance(value, Tensor):
        return float(value)
    check_type(name, value)
    check_device(name, value, device)
    if per_head and value.dim() == 1 and (value.shape[0] == 1 or value.shape[0] == H):
        value = value.view(-1, 1, 1)
    full = (B, H, Tq, 1)
    shape = (1,) * (4 - value.dim()) + tuple(value.shape)
    if len(shape) > 4 or any(s != 1 and s != f for s, f in zip(shape, full, strict=True)):
        heads = f"[H={H}] or " if per_head else ""
        raise ValueError(
            f"{name}: expected a number or a shape {heads}that broadcasts to [B, H, Tq, 1] = {list(full)} "
            f"(per head: [H, 1, 1]), got {list(value.shape)}"
        )
    return value.reshape(shape).to(dtype)
