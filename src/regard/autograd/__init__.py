"""Gradients for every backend: one autograd Function in eager mode (eager.py), one operator for compilers (library.py).

`run` computes output and statistics by a backend and makes them differentiable. A backend supplies `forward` and
`backward`; transforms, forward mode, second derivatives, batched gradients and torch.compile are handled here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._compat import dispatch_modes_active, forward_mode, transforms_active
from ..backends import BACKENDS, REFERENCE
from ..backends.derivatives import differentiable
from ..form import Form
from ..statistics import DIFFERENTIABLE
from .eager import apply
from .library import run_compiled


def run(backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics by a backend; `out`, `lse` and `entropy` are differentiable."""
    ahead = forward_mode()
    if BACKENDS[backend].has_own_autograd and not ahead:
        return {"out": BACKENDS[backend].attend(form)}
    if torch.compiler.is_compiling():
        if ahead:
            raise NotImplementedError(
                "forward mode under torch.compile is not supported: use the transform in eager mode"
            )
        return run_compiled(backend, form, names)
    transformed = transforms_active()
    if dispatch_modes_active():
        # A mode records or replaces every operator (fake tensors, make_fx). It must see regard's operator, or the plain
        # operations of the reference: an engine reads memory, which fake tensors do not have.
        if not (ahead or transformed):
            return run_compiled(backend, form, names)
        backend = REFERENCE.name
    if ahead and backend == REFERENCE.name:
        return differentiable(form, names)
    if ahead or transformed:
        # A transform differentiates every output, so the tangent of a statistic must be right, not zero.
        others = tuple(name for name in names if name not in DIFFERENTIABLE)
        if others:
            results = differentiable(form, others)
            rest = tuple(name for name in names if name in DIFFERENTIABLE)
            return results | run(backend, form, rest) if rest else results
    elif not torch.is_grad_enabled() or not form.requires_grad():
        return BACKENDS[backend].forward(form, names)
    return dict(zip(names, apply(backend, form, names), strict=False))
