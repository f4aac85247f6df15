"""`attention` and `select_backend`: the signature, and which backend serves a call.

A call passes through these files: the arguments become a `Form` (lowering.py), `solver_for(form)` names the solver
(solvers/), the solver runs passes of a backend (backends/), and autograd/ makes them differentiable. dispatch.py puts
these steps together.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .arguments import AttentionOptions
from .backends import Choice
from .dispatch import attend
from .lowering import lower
from .priors import Region
from .problem import RowsAndColumns, Transport
from .solvers import solver_for
from .statistics import AuxOutput, requested
from .structured import Selected

DENSE_MASK = 2**22  # pairs of a head, up to which a compiled graph holds a region as a dense bool mask


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Any,
    return_aux: None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *positional: Any, return_aux: object, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, AuxOutput]: ...
def attention(  # type: ignore[reportInconsistentOverload] - the overloads name the options by AttentionOptions
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    problem: Transport | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    score: Literal["dot", "cosine", "euclidean"] = "dot",
    return_aux: object = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention as the exact solution of a transport problem; a drop-in for `F.scaled_dot_product_attention`.

    The first eight arguments have PyTorch's names, order and meaning. `problem` is a `Transport` (None: softmax). Masks
    and `is_causal` (aligned top-left) multiply into its prior. A mask of PyTorch's type `CausalBias` counts as the
    causal prior that it stands for; other subclasses of Tensor raise. `score` is "dot" (scale * qk), "cosine" (of unit
    vectors, scale 1 unless given) or "euclidean" (-scale * |q - k|^2 / 2). `softcap=c` replaces a score s by
    c * tanh(s / c). `key_scale` multiplies the scores of each key by a number (`calibrate` finds such numbers) and
    broadcasts to [..., H, Tk] or [..., Hkv, Tk].

    With `return_aux=AuxRequest(...)` the result is (output, AuxOutput). `backend` is "auto" or the name of a backend. A
    named backend that cannot serve the problem raises and never falls back. A row without admissible keys gives 0.

    query [..., H, Tq, D], key [..., Hkv, Tk, D], value [..., Hkv, Tk, Dv] -> [..., H, Tq, Dv] in query's dtype.
    """
    run = attend
    if problem is not None and torch.compiler.is_compiling() and _breaks_graph(problem, query, key):
        if torch.compiler.is_exporting() and isinstance(problem.marginal, RowsAndColumns):
            raise NotImplementedError(
                "problem: expected a marginal that torch.export can trace, got RowsAndColumns, whose number of passes "
                "depends on the data (torch.compile without fullgraph=True serves it, by a break of the graph)"
            )
        from .compile_break import attend_eagerly as run  # the graph breaks here
    return run(
        return_aux, backend, query, key, value,
        attn_mask, dropout_p, is_causal, scale, enable_gqa, problem, softcap, key_scale, score,
    )  # fmt: skip


def _breaks_graph(problem: Transport, query: Tensor, key: Tensor) -> bool:
    """A map of tiles has a size that depends on values. In a graph a region is a dense bool mask instead, if that is
    small."""
    if isinstance(problem.marginal, RowsAndColumns):
        return True
    factors = () if problem.prior is None else problem.prior.factors()
    regions = any(isinstance(factor, Region) for factor in factors)
    regions = regions or sum(isinstance(factor, Selected) for factor in factors) > 1  # their intersection is one
    return regions and query.shape[-2] * key.shape[-2] > DENSE_MASK


_SIGNATURE = inspect.signature(attention)


def select_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Any,
    return_aux: object = None,
    **options: Unpack[AttentionOptions],
) -> Choice:
    """The backend that `attention` would use for the same arguments, and why each backend before it was not chosen."""
    try:
        call = _SIGNATURE.bind(query, key, value, *positional, return_aux=return_aux, **options)
    except TypeError as error:
        raise TypeError(f"select_backend(): {error}") from None
    call.apply_defaults()
    given = call.arguments
    return_aux, backend = given.pop("return_aux"), given.pop("backend")
    with torch.random.fork_rng(devices=[]):  # lowering draws a dropout seed, which must not change the caller's state
        form = lower(**given)
    names = ("out", *requested(return_aux))
    return Choice(*solver_for(form).choose(form, names, backend))


select_backend.__signature__ = _SIGNATURE.replace(return_annotation=Choice)  # type: ignore[attr-defined]
