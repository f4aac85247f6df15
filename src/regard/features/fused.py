"""Attention by features on the native engine (csrc/features/): the map, the sums and the quotient in one kernel.

`declined` gives the reason why the engine cannot serve a call; PyTorch's operations (`sums`) serve it then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._compat import dispatch_modes_active, forward_mode, is_legacy_batchedtensor, transforms_active
from .._validate import compute_dtype
from ..backends.native import features as engine
from .sums import first_keys


class Kernel(NamedTuple):
    """What the engine needs to know of a feature map."""

    map: str  # one of engine.MAPS
    scale: float  # the default
    projection: Tensor | None = None  # random directions [M, D]


def declined(kernel: Kernel, tensors: tuple[Tensor, ...]) -> str | None:
    """Why the engine does not serve a call with these tensors, or None."""
    if transforms_active() or forward_mode():
        return "serves neither transforms of torch.func nor forward mode"
    if dispatch_modes_active():
        return "is invisible to modes that record every operator, as tracing does"
    if any(type(t) not in (Tensor, nn.Parameter) or not t.is_cpu for t in tensors):
        return "runs on plain CPU tensors only"
    if kernel.projection is not None and kernel.projection.requires_grad:
        return "has no gradient of the directions"
    return engine.unavailable(tensors[0])


def attend(
    module: nn.Module,
    kernel: Kernel,
    q: Tensor,  # [B, H, Tq, D]
    k: Tensor,  # [B, Hkv, Tk, D]
    v: Tensor,  # [B, Hkv, Tk, Dv]
    keep: Tensor | None,  # [B|1, 1, Tk, 1]
    *,
    scale: float | None,
    causal: bool,
    offset: int,
) -> Tensor:
    """Rows [B, H, Tq, Dv] in the compute dtype. `module` is called for second derivatives, see `_Fused`."""
    projection = kernel.projection
    if projection is not None:
        projection = projection.to(q.device, compute_dtype(q.dtype))
    if causal:
        k, v, keep = first_keys(k, v, keep, offset + q.shape[2])
    call = engine.Call(kernel.map, kernel.scale if scale is None else scale, causal, offset)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return _Fused.apply(module, call, q, k, v, projection, keep)  # type: ignore[return-value]
    return engine.forward(call, q, k, v, projection, keep)[0]


class _Fused(torch.autograd.Function):
    """apply(module, call, q, k, v, projection, keep) -> rows.

    The engine computes the first derivative. Second derivatives, and gradients under a transform, are those of
    `module` on PyTorch's operations."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, call: engine.Call, *tensors: Any) -> Tensor:  # type: ignore[override]
        outputs = engine.forward(call, *tensors)
        q, k, v, projection, keep = tensors
        if projection is not None:
            projection = projection.clone()  # a redraw before backward overwrites the original
        ctx.module, ctx.call = module, call
        ctx.save_for_backward(q, k, v, projection, keep, *outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        q, k, v, projection, keep, *outputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:5]
        batched = is_legacy_batchedtensor(grad)  # by is_grads_batched
        transformed = transforms_active() or forward_mode()
        if not (torch.is_grad_enabled() or batched or transformed):
            found = engine.backward(ctx.call, q, k, v, projection, keep, tuple(outputs), grad, needed)
            return (None, None, *found, None, None)
        inputs: tuple[Tensor, Tensor, Tensor] = (q, k, v)
        varied = [n for n, need in enumerate(needed) if need]

        def rows(*values: Tensor) -> Tensor:
            q_k_v = list(inputs)
            for n, tensor in zip(varied, values, strict=True):
                q_k_v[n] = tensor
            return _by_module(ctx.module, ctx.call, q_k_v, projection, keep).to(grad.dtype)

        wanted = [inputs[n] for n in varied]
        if batched:  # torch.func does not take the old batched tensors
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in wanted]
                results = torch.autograd.grad(rows(*leaves), leaves, grad)
        else:
            _, pull = torch.func.vjp(rows, *wanted)  # type: ignore[misc]
            results = pull(grad)
        by_input = dict(zip(varied, results, strict=True))
        return (None, None, *(by_input.get(n) for n in range(3)), None, None)


def _by_module(
    module: nn.Module,
    call: engine.Call,
    q_k_v: list[Tensor],
    projection: Tensor | None,
    keep: Tensor | None,
) -> Tensor:
    """The rows of a call in PyTorch's operations, with the directions that the call had."""
    options = {
        "scale": call.scale,
        "enable_gqa": True,
        "key_mask": None if keep is None else keep.expand(q_k_v[0].shape[0], -1, -1, -1)[:, 0, :, 0],
        "alignment": "bottom_right" if call.causal and call.offset else "top_left",
        "backend": "torch",
    }
    buffers = {} if projection is None else {"projection": projection}
    return functional_call(module, buffers, (*q_k_v, call.causal), options)
