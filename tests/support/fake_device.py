"""A device for tests on machines that have only a CPU. Its tensors report `DEVICE` and hold their numbers on the CPU.

Inside `pretended()`, tensors that are moved to or created on `DEVICE` are of type `Elsewhere`. As on a GPU, an
operation on such a tensor and a CPU tensor raises, unless the CPU tensor has no dimension, is an index, or is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")  # besides "cpu" the only one that PyTorch's autograd supports without hardware
ACROSS = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}


class Elsewhere(Tensor):
    numbers: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=DEVICE,
        )
        made.numbers = real
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.numbers!r})"

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatched(func, args, kwargs or {})


class Mixed(RuntimeError):
    """An operation got tensors of both devices."""


def dispatched(func: Any, args: tuple, kwargs: dict) -> Any:
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    away = [t for t in given if isinstance(t, Elsewhere)]
    here = [t for t in given if not isinstance(t, Elsewhere) and t.dim() > 0]
    name, device = func._schema.name, kwargs.get("device")
    if away and here and name not in ACROSS:
        raise Mixed(f"{func}: tensors on {DEVICE} and on the CPU, of shapes {[list(t.shape) for t in here]}")
    if device is not None:
        to = torch.device(device) == DEVICE
    else:
        to = isinstance(args[0], Elsewhere) if name == "aten::copy_" else bool(away)
    if device is not None and to:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda leaf: leaf.numbers if isinstance(leaf, Elsewhere) else leaf, (args, kwargs))
    out = func(*args, **kwargs)
    known = {id(t.numbers): t for t in away}  # a tensor that was changed in place keeps its wrapper

    def wrapped(leaf: Any) -> Any:
        if not to or not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else Elsewhere(leaf)

    return tree_map(wrapped, out)


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatched(func, args, kwargs or {})


@contextmanager
def pretended() -> Iterator[None]:
    with _Factories():
        yield
