"""Every private name of PyTorch that regard uses, in one file.

PyTorch may rename or remove these names in any version. Then this is the only file to change: no other module of regard
imports a name of PyTorch that begins with an underscore.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (  # type: ignore[import-not-found]
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
    unwrap_if_dead,
)
from torch._functorch.utils import unwrap_dead_wrappers
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = [
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "PLAIN_TENSOR_TYPES",
    "READ_A_NUMBER",
    "TO_COPY",
    "DispatchMode",
    "Override",
    "add_legacy_batch",
    "autocast_anywhere",
    "autograd_inside",
    "constant_when_traced",
    "dispatch_modes_active",
    "fast_apply",
    "forward_mode",
    "forward_mode_enabled",
    "get_unwrapped",
    "has_torch_dispatch",
    "in_backward",
    "is_batchedtensor",
    "is_gradtrackingtensor",
    "is_legacy_batchedtensor",
    "legacy_vmap_level",
    "offer_flash_attention",
    "pytree",
    "register_batching_rule",
    "remove_forward_hook",
    "remove_legacy_batch",
    "transform_depth",
    "transforms_active",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "uncompiled",
    "unwrap_dead_wrappers",
    "unwrap_if_dead",
    "version_of",
    "without_memory",
    "writes_to_arguments",
]

# Tensors whose memory holds their values, and the types that PyTorch's own tracing puts in their place.
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)

# Names of operators: PyTorch's fast attention on the CPU and its gradient; `tensor.to`; `tensor.item`.
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
CPU_ATTENTION_BACKWARD = f"{CPU_ATTENTION}_backward"
TO_COPY, READ_A_NUMBER = "_to_copy", "_local_scalar_dense"

_NO_DISPATCH = Tensor.__torch_dispatch__  # type: ignore[reportAttributeAccessIssue]


def has_torch_dispatch(kind: type) -> bool:
    """Whether a subclass of Tensor implements PyTorch's operations itself."""
    return kind.__torch_dispatch__ is not _NO_DISPATCH  # type: ignore[reportAttributeAccessIssue]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def without_memory(kind: type, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that implements PyTorch's operations itself and stores no values."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


def uncompiled(model: Any) -> Any:
    """The model inside of `torch.compile(model)`, and None for one that is not compiled."""
    return getattr(model, "_orig_mod", None)


# --- which transforms are active --------------------------------------------------------------------------------------


# Whether the caller is inside `torch.func.grad`, `vmap`, `jvp` or a similar transform.
transforms_active = torch._C._are_functorch_transforms_active


def transform_depth() -> int:
    """How many transforms of `torch.func` are nested here."""
    return len(get_interpreter_stack() or ())


def forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    return forward_ad._current_level >= 0


def forward_mode_enabled() -> AbstractContextManager:
    """A context in which forward mode is enabled. The jvp of a Function needs it."""
    return forward_ad._set_fwd_grad_enabled(True)


# Whether a mode replaces or records every operator: fake tensors, make_fx.
dispatch_modes_active = torch._C._len_torch_dispatch_stack


def in_backward() -> bool:
    """Whether a backward pass is running. Checkpointing repeats forward passes there."""
    return torch._C._current_graph_task_id() != -1


# Whether autocast is enabled for any device.
autocast_anywhere = torch._C._is_any_autocast_enabled


# --- the batched tensors of `torch.autograd.grad(is_grads_batched=True)` ----------------------------------------------


def legacy_vmap_level() -> int:
    """The level of the innermost batch."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def add_legacy_batch(tensor: Tensor, level: int) -> Tensor:
    """Mark the first dimension as the batch."""
    return torch._add_batch_dim(tensor, 0, level)  # type: ignore[reportPrivateImportUsage]


def remove_legacy_batch(tensor: Tensor, level: int) -> Tensor:
    """Make the batch an ordinary first dimension."""
    # The size (here 1) is used only for tensors that are not batched.
    return torch._remove_batch_dim(tensor, level, 1, 0)  # type: ignore[reportPrivateImportUsage]


# --- functions and operators ------------------------------------------------------------------------------------------


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for code outside of transforms. It skips the slow inspection of forward's signature."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutogradOther
)


def autograd_inside() -> Any:
    """A context that enables autograd in the body of an operator, where PyTorch disables it."""
    inside, outside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(inside, outside - _AUTOGRAD)


_F = TypeVar("_F", bound=Callable[..., Any])


def constant_when_traced(function: _F) -> _F:
    """`torch.compiler.assume_constant_result`, which would load Dynamo: torch.compile calls the function and keeps the
    result, a number or a string, as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class DispatchMode(TorchDispatchMode):
    """A mode that is not hidden from Dynamo: hiding it would import Dynamo, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def writes_to_arguments(operator: Any) -> bool:
    """Whether an operator changes one of its arguments in place."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments)


_library = torch.library.Library("regard", "FRAGMENT")


def register_batching_rule(operator: Any, rule: Callable[..., Any]) -> None:
    """Register how an operator of regard computes on batched gradients."""
    _library.impl(operator._opname, rule, "Batched")


# --- hooks ------------------------------------------------------------------------------------------------------------


def remove_forward_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a function from a module's hooks before and after forward, wherever it is among them."""
    for hooks, options in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for key in [key for key, found in hooks.items() if found is hook]:
            del hooks[key]
            for option in options:
                option.pop(key, None)


# --- other kernels for PyTorch's own operators ------------------------------------------------------------------------


class Override:
    """Kernels in place of PyTorch's on the CPU, until `remove`. The first argument of each is PyTorch's own kernel."""

    def __init__(self, kernels: dict[str, Callable[..., Any]]) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, kernel in kernels.items():
                _replace(self._library, name, kernel)

    def remove(self) -> None:
        """Restore PyTorch's kernels."""
        self._library._destroy()


def _replace(library: Any, name: str, kernel: Callable[..., Any]) -> None:
    if hasattr(torch.library, "get_kernel"):
        stock: Callable[..., Any] = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
        how = {"dispatch_key": "CPU", "allow_override": True}
    else:  # before 2.9 a kernel that was replaced cannot be called: register one step above it
        operator = getattr(torch.ops.aten, name).default
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        how = {"dispatch_key": "BackendSelect"}

        def below_us(keys: Any, *args: Any, **kwargs: Any) -> Any:
            return operator.redispatch(keys & below, *args, **kwargs)

        stock = below_us

    def replaced(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not args[0].is_cpu:  # meta tensors, before 2.9
            return stock(keys, *args, **kwargs)
        return kernel(functools.partial(stock, keys), *args, **kwargs)

    library.impl(name, replaced, with_keyset=True, **how)


def offer_flash_attention(name: str, activate: Callable[[], Any]) -> None:
    """Register an implementation that `torch.nn.attention.activate_flash_attention_impl(name)` activates; nothing in
    versions of PyTorch without that function."""
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is not None:
        register(name, register_fn=activate)
