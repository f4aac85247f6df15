"""Attention with one part left out or replaced, as document 003 proposes. Each function is named after the change.

The lab compares these functions with attention; they are not meant for use. None of them is the optimum of a
`Transport`, except `no_mask`, `no_scaling` and `without_sign`. The first half works on queries, keys and values: every
function has the arguments (query, key, value, is_causal), [B, H, T, D] each, so that it can be a `Transformer`'s
attention. All but `no_scaling` keep the scale 1/√D. The second half works on rows of scores, [..., Tk].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..features import ReLUFeatures
from ..operator import attention
from ..regularizers import FDivergence

# --- on queries, keys and values --------------------------------------------------------------------------------------


def raw_dot_products(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """The scores are the weights: negative weights subtract values, and the sum of a row is unbounded."""
    return _causal(_scores(query, key), is_causal) @ value


def row_sum_normalisation(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """s / Σs: rows sum to 1, but the weights have poles where the scores of a row sum to 0."""
    return by_sum(_causal(_scores(query, key), is_causal)) @ value


def relu_normalisation(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """ReLU(s) / Σ ReLU(s), and 0 where no score is positive. Quadratic in T: the ReLU acts on the product."""
    s = _causal(_scores(query, key).relu(), is_causal)
    total = s.sum(-1, keepdim=True)
    return s / torch.where(total > 0, total, 1.0) @ value


def relu_features(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """⟨ReLU(q), ReLU(k)⟩ / Σ: linear in T, because the ReLU acts on q and k *before* the product."""
    return ReLUFeatures()(query, key, value, is_causal)


def mask_to_zero(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Softmax of scores whose future is set to 0 instead of −∞: exp(0) = 1, so future keys receive weight."""
    return _causal(_scores(query, key), is_causal).softmax(-1) @ value


def no_mask(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Softmax over all keys; `is_causal` is ignored."""
    return attention(query, key, value)


def no_scaling(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """softmax(qk): the temperature is √D times lower than usual."""
    return attention(query, key, value, is_causal=is_causal, scale=1.0)


def no_shift(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """exp(s) / Σ exp(s) without subtracting the maximum: in float32 a score above 88.7 makes the row NaN."""
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
    """The weights, with zeros in the future if `is_causal`."""
    return weights.tril() if is_causal else weights


# --- on rows of scores ------------------------------------------------------------------------------------------------


def by_sum(scores: Tensor) -> Tensor:
    """s / Σs."""
    return scores / scores.sum(-1, keepdim=True)


def by_relu(scores: Tensor) -> Tensor:
    """ReLU(s) / Σ ReLU(s), NaN where no score is positive."""
    return by_sum(scores.relu())


def naive_softmax(scores: Tensor) -> Tensor:
    """exp(s) / Σ exp(s), the textbook formula without the shift by the maximum."""
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def without_sign() -> FDivergence:
    """The regulariser Σ p²/2 (L2) without p ≥ 0: the link is the identity, so p = (s − λ)/τ may be negative."""
    return FDivergence(f=lambda x: x.square() / 2, link=lambda t: t, slope=torch.ones_like)
