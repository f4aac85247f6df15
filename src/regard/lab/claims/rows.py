"""Rows of scores, their plans and what is measured on them: what the checks of several documents share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import regard
from regard import AuxRequest, Transport

from ..numbers import draw, tensor

EXAMPLE = tensor(2.8, 1.2, 0.5, 3.1)  # the scores of document 003's example: cat, sat, on, the
TAU = 0.7  # a temperature that is not 1, so that a missing factor τ is noticed
INF = math.inf


def weights(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """The weights of regard's plan: softmax(scores / temperature)."""
    return regard.solve(scores, Transport(temperature=temperature)).weights


def softmax(*scores: float, temperature: float = 1.0) -> Tensor:
    """`weights` of scores that are written out."""
    return weights(tensor(*scores), temperature)


def entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q)."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def random_plans(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed, scale=1.5).softmax(-1)


def tangents(constraints: Tensor) -> Tensor:
    """An orthonormal basis [n, k] of the directions that leave every row of `constraints` [m, n] unchanged."""
    _, singular, v = torch.linalg.svd(constraints, full_matrices=True)
    return v[int((singular > 1e-9).sum()) :].T


def jacobian_norm(s: Tensor) -> float:
    """The largest singular value of ∂ softmax / ∂ s."""
    found = torch.autograd.functional.jacobian(lambda x: regard.solve(x).weights, s)
    assert isinstance(found, Tensor)
    return float(torch.linalg.matrix_norm(found, 2))


def fully_masked_row() -> tuple[Tensor, Tensor]:
    """Softmax of a row in which every key is masked, and regard's output for such a row."""
    q, k, v = (draw(1, 1, 2, 4, seed=i) for i in (1, 2, 3))
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    return tensor(-INF, -INF).softmax(-1), regard.attention(q, k, v, attn_mask=nothing)


def random_attention(d: int, scale: float | None) -> tuple[float, float]:
    """Mean largest weight and mean entropy over 128 keys, for standard normal queries and keys in R^d."""
    q, k = draw(1, 1, 256, d, seed=d), draw(1, 1, 128, d, seed=d + 1)
    _, aux = regard.attention(q, k, k, scale=scale, return_aux=AuxRequest(max_weight=True, entropy=True))
    assert aux.max_weight is not None and aux.entropy is not None
    return float(aux.max_weight.mean()), float(aux.entropy.mean())
