"""`attention`: check and lower the arguments, choose a backend, run it, give results back in the caller's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from . import budget, ops, sinkhorn
from .backends import native, sdpa
from .backends import torch as definition
from .form import Form, lower
from .parts import describe
from .problem import Budget, RowsAndColumns, Transport
from .statistics import COLUMNS, AuxOutput, requested, undefined

BACKENDS = {"native": native, "sdpa": sdpa, "torch": definition}

# Told of each call's form, of how to compute more of it (names -> results) and of its output [B, H, Tq, Dv]: empty but
# where a `Monitor` samples a step.
observers: list[Callable[[Form, Callable[[tuple[str, ...]], dict[str, Tensor]], Tensor], None]] = []


@overload
def attention(
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
    return_aux: None = None,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention(
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
    return_aux: object,
    backend: str = "auto",
) -> tuple[Tensor, AuxOutput]: ...
def attention(
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
    return_aux: object = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention as the exact solution of a transport problem; a drop-in for `F.scaled_dot_product_attention`.

    The first eight arguments have PyTorch's names, order and meaning. `problem` is a `Transport` (None: softmax); masks
    and `is_causal` (aligned top-left) multiply into its prior; PyTorch's mask type `CausalBias` is the causal prior
    that it stands for, and other subclasses of Tensor raise. `softcap=c` makes the score c * tanh(scale * qk / c).
    `key_scale` multiplies each key by a number of its own; it broadcasts to [..., H, Tk] or [..., Hkv, Tk].
    With `return_aux=AuxRequest(...)` the result is (output, AuxOutput). `backend` is "auto" or one of `BACKENDS`; a
    named one that cannot serve the problem raises and never falls back. A row without admissible keys gives 0.

    query [..., H, Tq, D], key [..., Hkv, Tk, D], value [..., Hkv, Tk, Dv] -> [..., H, Tq, Dv] in query's dtype.
    """
    if problem is not None and torch.compiler.is_compiling() and _columns(problem) is not None:
        from .outside import attend  # the graph breaks here

        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            problem=problem, softcap=softcap, key_scale=key_scale, return_aux=return_aux, backend=backend,
        )  # fmt: skip
    form = lower(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, problem, softcap, key_scale)
    statistics = requested(return_aux)
    results = _compute(form, problem, ("out", *statistics), backend)
    assert form.query is not None
    out = results["out"]
    for observe in observers:
        observe(form, lambda names: _compute(form, problem, names, "auto"), out)
    if out.dtype != form.query.dtype:  # which autocast may have changed
        out = out.to(form.query.dtype)
    out = _unfold(out, query, key, value)
    if return_aux is None:
        return out
    return out, AuxOutput(**{name: _unfold(results[name], query, key, value) for name in statistics})


def _compute(form: Form, problem: Transport | None, names: tuple[str, ...], backend: str) -> dict[str, Tensor]:
    """Output and statistics: what meets the columns and what meets a budget are solvers of their own."""
    columns = _columns(problem)
    if columns is None:
        return run(form, names, backend, _budget(problem))
    return sinkhorn.run(_choose_rows(form, names, backend)[0], form, names, columns)


def run(form: Form, names: tuple[str, ...], backend: str = "auto", to_meet: Budget | None = None) -> dict[str, Tensor]:
    """Output and statistics of a lowered problem, by the backend named or chosen."""
    if to_meet is not None:
        chosen, _ = _choose(form, (*names, *budget.MEASURED), backend)
        return budget.run(chosen, form, names, to_meet)
    chosen, _ = _choose(form, names, backend)
    if chosen == "sdpa" and not ops.forward_mode():  # PyTorch's own autograd
        return {"out": sdpa.attend(form)}
    return ops.run(chosen, form, names)


def _budget(problem: Transport | None) -> Budget | None:
    """What the rows' temperatures are to meet, if they are not given."""
    return problem.temperature if problem is not None and isinstance(problem.temperature, Budget) else None


def _columns(problem: Transport | None) -> RowsAndColumns | None:
    """How to meet the columns, if they are constrained."""
    return problem.marginal if problem is not None and isinstance(problem.marginal, RowsAndColumns) else None


def _choose_rows(form: Form, names: tuple[str, ...], backend: str) -> tuple[str, dict[str, str]]:
    """The backend for the one-sided passes that solve a plan with both marginals."""
    for name in names:
        _refuse_undefined(name, form)
    rows = sinkhorn.one_sided(form)
    assert form.query is not None
    rows.log_priors = [*rows.log_priors, form.query.new_zeros((1, 1, 1, 1), dtype=form.dtype)]  # the keys' prices
    return _choose(rows, (*(n for n in names if n not in COLUMNS), *sinkhorn.NEEDED), backend)


@dataclass(frozen=True)
class Choice:
    """The backend that `attention` would use, and why each one before it was passed over."""

    backend: str
    reasons: dict[str, str] = field(default_factory=dict)


def select_backend(
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
    return_aux: object = None,
    backend: str = "auto",
) -> Choice:
    """Which backend `attention` would take for these arguments, with the reasons against the others."""
    with torch.random.fork_rng(devices=[]):  # lowering draws dropout's seed; asking must not
        form = lower(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, problem, softcap, key_scale)
    if _columns(problem) is not None:
        return Choice(*_choose_rows(form, ("out", *requested(return_aux)), backend))
    measured = () if _budget(problem) is None else budget.MEASURED
    return Choice(*_choose(form, ("out", *requested(return_aux), *measured), backend))


def _choose(form: Form, names: tuple[str, ...], backend: str) -> tuple[str, dict[str, str]]:
    """The backend, and why each one before it was passed over."""
    for name in names:
        _refuse_undefined(name, form)
    if backend != "auto":
        if backend not in BACKENDS:
            known = ", ".join(f'"{name}"' for name in ("auto", *BACKENDS))
            raise ValueError(f"backend: expected one of {known}, got {describe(backend)}")
        reason = BACKENDS[backend].unsupported(form, names)
        if reason is not None:
            raise NotImplementedError(f'backend "{backend}" cannot serve this problem: {reason}')
        return backend, {}
    reasons = {}
    reason = native.unsupported(form, names)
    if reason is None:
        return "native", reasons
    reasons["native"] = reason
    reason = sdpa.unsupported(form, names) or sdpa.unwise(form)
    if reason is None:
        return "sdpa", reasons
    reasons["sdpa"] = reason
    return "torch", reasons


def _refuse_undefined(name: str, form: Form) -> None:
    reason = undefined(name, form)
    if reason is not None:
        raise ValueError(f"return_aux: {reason}")


def _unfold(result: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, ...] -> the caller's leading dimensions."""
    rank = max(query.dim(), key.dim(), value.dim())
    if rank == 4:
        return result
    if rank == 3:
        return result.squeeze(0)
    if rank == 2:
        return result.squeeze(0).squeeze(0)
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    return result.unflatten(0, batch)
