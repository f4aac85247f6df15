"""Attention with one part left out or replaced, as document 003 asks: each under the name of what was done.

Every function has the arguments (query, key, value, is_causal), [B, H, T, D] each, and can be a `Transformer`'s
attention. They are meant to be compared, not used: what a problem can express is a `Transport`, and none of those that
are written out below is one. All keep the scale 1/√D but `no_scaling`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..features import ReLUFeatures
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


def relu_features(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """⟨ReLU(q), ReLU(k)⟩ / Σ: linear in T, because the ReLU acts on q and k *before* the product."""
    return ReLUFeatures()(query, key, value, is_causal)


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
