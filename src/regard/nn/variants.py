"""Attention with one part left out or replaced, as document 003 asks: each under the name of what was done.

Every function has the arguments (query, key, value, is_causal), [B, H, T, D] each, and can be a `Transformer`'s
attention. They are meant to be compared, not used: what a problem can express is a `Transport`, and none of those that
are written out below is one. All keep the scale 1/√D but `no_scaling`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..operator import attention


def raw_dot_products(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """The scores themselves are the weights: negative ones subtract, and nothing bounds the sum."""
    return _causal(_scores(query, key), is_causal) @ value


def row_sum_normalisation(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """s / Σs: sums to 1, but has poles where the scores of a row sum to 0."""
    s = _causal(_scores(query, key), is_causal)
    return s / s.sum(-1, keepdim=True) @ value


def relu_normalisation(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """ReLU(s) / Σ ReLU(s), 0 where no score is positive. Quadratic in T: the ReLU acts on the product."""
    s = _causal(_scores(query, key).relu(), is_causal)
    total = s.sum(-1, keepdim=True)
    return s / torch.where(total > 0, total, 1.0) @ value


def relu_features(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, chunk: int = 64) -> Tensor:
    """⟨ReLU(q), ReLU(k)⟩ / Σ: linear in T, because the ReLU acts on q and k *before* the product.

    Then Σ_j φ(q)·φ(k_j) v_j = φ(q) · Σ_j φ(k_j) v_jᵀ, and the sum over the past is carried along: within a chunk of
    queries the few weights are written out, all earlier keys are in one D x Dv state. 0 where no weight is positive.
    """
    q, k = query.relu(), key.relu()
    v = torch.cat([value, torch.ones_like(value[..., :1])], -1)  # the last column collects the denominator
    if not is_causal:
        summed = q @ (k.mT @ v)
    else:
        pieces, state = [], q.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
        for start in range(0, q.shape[-2], chunk):
            rows, keys, values = (t[..., start : start + chunk, :] for t in (q, k, v))
            pieces.append(rows @ state + (rows @ keys.mT).tril() @ values)
            state = state + keys.mT @ values
        summed = torch.cat(pieces, -2)
    total = summed[..., -1:]
    return summed[..., :-1] / torch.where(total > 0, total, 1.0)


def mask_to_zero(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Softmax of scores whose future was set to 0, not to −∞: exp(0) = 1, so the future is read."""
    return _causal(_scores(query, key), is_causal).softmax(-1) @ value


def no_mask(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Softmax over all keys, whatever `is_causal` says."""
    return attention(query, key, value)


def no_scaling(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """softmax(qk): the temperature is √D times lower than usual."""
    return attention(query, key, value, is_causal=is_causal, scale=1.0)


def no_shift(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """exp(s) / Σ exp(s) as it stands in the textbook: in float32 a score above 88.7 makes the row NaN."""
    weights = _causal(_scores(query, key).exp(), is_causal)
    return weights / weights.sum(-1, keepdim=True) @ value


VARIANTS = {
    function.__name__: function
    for function in (
        raw_dot_products,
        row_sum_normalisation,
        relu_normalisation,
        relu_features,
        mask_to_zero,
        no_mask,
        no_scaling,
        no_shift,
    )
}


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / math.sqrt(query.shape[-1])  # [B, H, Tq, Tk]


def _causal(weights: Tensor, is_causal: bool) -> Tensor:
    """With zeros in the future."""
    return weights.tril() if is_causal else weights
