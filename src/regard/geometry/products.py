"""Derivatives as functions of queries and keys, which never store the plan: products with the metric, and the jvp."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from .. import dispatch
from .._validate import describe
from ..arguments import ScoreOptions, takes_options
from ..form import Form
from ..lowering import lower
from ..operator import attention
from ..problem import Transport
from .inputs import check_tangent, check_temperature


@takes_options(ScoreOptions)
def fisher_vector_product(
    query: Tensor, key: Tensor, tangent: Tensor, problem: Transport | None = None, **options: Unpack[ScoreOptions]
) -> Tensor:
    """The metric of each query times a tangent of the queries' shape: (scale/tau)^2 Cov_w(k) t, [..., H, Tq, D].

    Options: `attn_mask`, `is_causal`, `scale` and `enable_gqa`, as for `attention`.

    Cov_w(k) = sum w k k^T - (sum w k)(sum w k)^T / (sum w + kappa). This needs no kernel of its own: if the values are
    the keys and the gradient of the output is t, the utility of key j is <k_j, t>. The gradient of the query is then
    tau/scale times the product, and the backward pass of the backend that serves the problem computes it.
    """
    form = lower(query, key, key, problem=problem, **options)
    check_temperature(problem, form)
    product = _hessian_product(form, query, key, tangent)
    return dispatch.unfold(product / form.temperature, query, key, key).to(query.dtype)


@takes_options(ScoreOptions)
def free_energy_hvp(
    query: Tensor, key: Tensor, tangent: Tensor, problem: Transport | None = None, **options: Unpack[ScoreOptions]
) -> Tensor:
    """The Hessian of F, as a function of each query, times a tangent: tau times `fisher_vector_product`.

    Options: `attn_mask`, `is_causal`, `scale` and `enable_gqa`, as for `attention`.
    """
    form = lower(query, key, key, problem=problem, **options)
    check_temperature(problem, form)
    return dispatch.unfold(_hessian_product(form, query, key, tangent), query, key, key).to(query.dtype)


def _hessian_product(form: Form, query: Tensor, key: Tensor, tangent: Tensor) -> Tensor:
    """scale^2/tau Cov_w(k) t, [B, H, Tq, D] in the compute dtype."""
    assert form.query is not None
    shape = dispatch.unfold(form.query, query, key, key).shape
    check_tangent("tangent", tangent, shape, query.device)

    def attended(q: Tensor) -> Tensor:
        return dispatch.compute(form.with_tensors({"query": q}), ("out",))["out"]

    # In the compute dtype: half precision would round the sum before its last factor.
    wide = form.query.to(form.dtype)
    if wide.dtype != form.query.dtype:
        assert form.key is not None
        form.key = form.value = form.key.to(form.dtype)
    out, pull = torch.func.vjp(attended, wide)  # type: ignore[misc]
    (found,) = pull(tangent.reshape(out.shape).to(out.dtype))
    return form.scale * found


@takes_options(ScoreOptions)
def jvp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    problem: Transport | None = None,
    *,
    softcap: float | None = None,
    score: Literal["dot", "cosine", "euclidean"] = "dot",
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]:
    """The output of `attention` and its tangent, for tangents (dq, dk, dv) of query, key and value; None is 0.

    Options: `attn_mask`, `is_causal`, `scale`, `enable_gqa`, `softcap` and `score`, as for `attention`.

    The output comes from the backend that `attention` would choose. The tangent is computed block by block and never
    stores the plan, unless something requires a gradient: autograd then keeps it.
    """
    inputs = {"query": query, "key": key, "value": value}
    if not isinstance(tangents, (tuple, list)) or len(tangents) != 3:
        raise TypeError(f"tangents: expected (dq, dk, dv), got {describe(tangents)}")
    moving = {}
    for i, ((name, tensor), tangent) in enumerate(zip(inputs.items(), tangents, strict=True)):
        if tangent is not None and isinstance(tensor, Tensor):
            check_tangent(f"tangents[{i}]", tangent, tensor.shape, tensor.device)
            moving[name] = tangent.to(tensor.dtype)

    def attended(moved: dict[str, Tensor]) -> Any:
        q, k, v = (inputs | moved).values()
        return attention(q, k, v, problem=problem, softcap=softcap, score=score, **options)

    if not moving:
        out = attended({})
        return out, torch.zeros_like(out)
    return torch.func.jvp(attended, ({name: inputs[name] for name in moving},), (moving,))  # type: ignore[return-value]
