"""The results that tests compare with: attention in float64, written from the theory without code of the library.

It is slow and simple on purpose: every prior is a full matrix, and every dual variable is found by bisection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import regard


@dataclass
class Truth:
    out: Tensor  # [B, H, Tq, Dv]
    weights: Tensor  # [B, H, Tq, Tk]
    null: Tensor  # [B, H, Tq]
    scores: Tensor
    log_prior: Tensor  # -inf where not admissible
    dual: Tensor  # [B, H, Tq]
    tau: Tensor  # [B, H, Tq, 1]


def f_and_link(regularizer):
    """f and g = (f')^-1 as the theory page states them."""
    if isinstance(regularizer, regard.KL):
        return lambda x: torch.xlogy(x, x) - x + 1, torch.exp
    if isinstance(regularizer, regard.Tsallis):
        a = torch.as_tensor(regularizer.alpha, dtype=torch.float64).detach()
        a = a.view(-1, 1, 1) if a.dim() == 1 else a
        return lambda x: x**a / (a * (a - 1)), lambda eta: ((a - 1) * eta).clamp(min=0) ** (1 / (a - 1))
    if isinstance(regularizer, regard.FermiDirac):
        return lambda x: torch.xlogy(x, x) + torch.xlogy(1 - x, 1 - x), torch.sigmoid
    lower = regularizer.lower

    def link(eta):
        return torch.where(eta > lower, regularizer.user_link(torch.clamp(eta, min=max(lower + 1e-300, -1e300))), 0.0)

    return regularizer.user_f, link


def log_prior_matrix(prior, is_causal, attn_mask, B, H, Tq, Tk):
    result = torch.zeros(B, H, Tq, Tk, dtype=torch.float64)
    factors = [] if prior is None else list(prior.factors())
    alignment = next((f.alignment for f in factors if getattr(f, "alignment", None)), "top_left")
    if is_causal:
        factors.append(regard.Causal("top_left"))
    offset = Tk - Tq if alignment == "bottom_right" else 0
    i, j = torch.arange(Tq)[:, None] + offset, torch.arange(Tk)[None]
    for factor in factors:
        if isinstance(factor, regard.Causal):
            result = result.masked_fill(j > i, -math.inf)
        elif isinstance(factor, regard.Window):
            if factor.left is not None:
                result = result.masked_fill(j < i - factor.left, -math.inf)
            if factor.right is not None:
                result = result.masked_fill(j > i + factor.right, -math.inf)
        elif isinstance(factor, regard.ALiBi):
            slopes = torch.as_tensor(factor.slopes, dtype=torch.float64).detach().view(-1, 1, 1)
            result = result - slopes * (i - j).abs()
        elif isinstance(factor, regard.Bias):
            result = result + factor.log_prior.detach().double()
        elif isinstance(factor, regard.Documents):
            q = factor.query_ids.view(-1, Tq)
            k = q if factor.key_ids is None else factor.key_ids.view(-1, Tk)
            same = (q[:, :, None] == k[:, None]) & (q[:, :, None] >= 0)
            result = result.masked_fill(~same[:, None], -math.inf)
    if attn_mask is not None:
        masked = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        result = result.masked_fill(masked, -math.inf)
    return result


def per_row(value, B, H, Tq):
    value = torch.as_tensor(value, dtype=torch.float64).detach()
    value = value.view(-1, 1, 1) if value.dim() == 1 else value
    return value.expand(B, H, Tq, 1)


def scores_of(q, k, score, scale):
    """The scores before softcap and mask, [..., Tq, Tk]: a loop over the definitions, without products of norms."""
    D = q.shape[-1]
    if score == "cosine":
        q, k = (t / t.norm(dim=-1, keepdim=True).clamp(min=1e-12) for t in (q, k))
        return q @ k.mT * (1.0 if scale is None else scale)
    scale = 1 / math.sqrt(D) if scale is None else scale
    if score == "euclidean":
        return -scale * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2
    return q @ k.mT * scale


def truth(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    problem=None,
    softcap=None,
    score="dot",
    key_scale=None,
    **_,
) -> Truth:
    q, k, v = (t.detach().double() for t in (query, key, value))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    B, H, Tq, _ = q.shape
    Tk = k.shape[2]
    problem = regard.Transport() if problem is None else problem
    s = scores_of(q, k, score, scale)
    if key_scale is not None:
        s = s * key_scale.detach().double()[..., None, :]
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        s = s + attn_mask.detach().double()
    log_prior = log_prior_matrix(problem.prior, is_causal, attn_mask, B, H, Tq, Tk)
    s = s.masked_fill(log_prior == -math.inf, 0.0)
    tau = per_row(problem.temperature, B, H, Tq)
    p, null, dual = solve(s, log_prior, tau, problem)
    return Truth(p @ v, p, null, s, log_prior, dual, tau)


def solve(s, log_prior, tau, problem):
    """Weights, weight of the null key and dual by bisection on the marginal."""
    B, H, Tq, _ = s.shape
    _, link = f_and_link(problem.regularizer)
    marginal = problem.marginal
    prior, admissible = log_prior.exp(), log_prior > -math.inf
    free = isinstance(marginal, regard.Free)
    sink = None if free or marginal.sink is None else per_row(marginal.sink, B, H, Tq)
    relax = None if free or marginal.relax is None else per_row(marginal.relax, B, H, Tq)
    kl = isinstance(problem.regularizer, regard.KL)

    def plan(lam):
        eta = (s - lam) / tau
        p = (eta + log_prior).exp() if kl else prior * link(eta)
        return torch.where(admissible, p, 0.0)

    if free:
        lam = -per_row(marginal.offset, B, H, Tq)
        return plan(lam), torch.zeros(B, H, Tq), lam.squeeze(-1)

    def excess(lam):
        taken = plan(lam).sum(-1, keepdim=True)
        if sink is not None:
            taken = taken + link((sink - lam) / tau)
        return taken - (marginal.mass if relax is None else torch.exp(lam / relax))

    empty = ~admissible.any(-1, keepdim=True) if sink is None else torch.zeros(B, H, Tq, 1, dtype=torch.bool)
    spread = 60 * tau + s.abs().amax((-1), keepdim=True) * 2 + 200
    low, high = -spread.expand(B, H, Tq, 1), spread.expand(B, H, Tq, 1)
    for _ in range(200):
        middle = (low + high) / 2
        above = excess(middle) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    lam = (low + high) / 2
    p = plan(lam)
    if isinstance(problem.regularizer, regard.FermiDirac) and sink is None and relax is None:
        full = prior.sum(-1, keepdim=True) <= marginal.mass
        p, lam = torch.where(full, prior, p), torch.where(full, -math.inf, lam)
    p, lam = torch.where(empty, 0.0, p), torch.where(empty, -math.inf, lam)
    null = torch.zeros(B, H, Tq) if sink is None else link((sink - lam) / tau).squeeze(-1)
    return p, null.double(), lam.squeeze(-1)
