"""The results that tests compare with: attention in float64, written from the theory without code of the library.

It is slow and simple on purpose: every prior is a full matrix, and every dual variable is found by bisection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import regard
from regard.function_priors import FromFunction


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


def parts_of(prior):
    """The priors that a product or a union is made of."""
    if isinstance(prior, regard.priors.Product | regard.priors.Union):
        return [leaf for part in prior.parts for leaf in parts_of(part)]
    return [] if prior is None else [prior]


def mask_of(prior, i, j, B, H):
    """Where a prior of 0 and 1 admits a pair, broadcastable to [B, H, Tq, Tk]; None for a prior of another kind. `i`
    are the positions of the queries, `j` those of the keys."""
    Tq, Tk = len(i), j.shape[1]
    if isinstance(prior, regard.priors.Product | regard.priors.Union):
        masks = [mask_of(part, i, j, B, H) for part in prior.parts]
        if any(mask is None for mask in masks):
            return None
        masks = torch.stack([mask.expand(B, H, Tq, Tk) for mask in masks])
        return masks.all(0) if isinstance(prior, regard.priors.Product) else masks.any(0)
    if isinstance(prior, regard.Causal):
        return j <= i
    if isinstance(prior, regard.Window):
        after = torch.ones_like(j >= i) if prior.left is None else j >= i - prior.left
        return after if prior.right is None else after & (j <= i + prior.right)
    if isinstance(prior, regard.Documents):
        q = prior.query_ids.view(-1, Tq)
        k = q if prior.key_ids is None else prior.key_ids.view(-1, Tk)
        return ((q[:, :, None] == k[:, None]) & (q[:, :, None] >= 0))[:, None]
    if isinstance(prior, regard.Prefix):
        return j < torch.as_tensor(prior.n).view(-1, 1, 1, 1)
    if isinstance(prior, regard.Blocks):
        return prior.map[..., torch.arange(Tq)[:, None] // prior.size, torch.arange(Tk) // prior.size]
    if isinstance(prior, regard.Selected):
        return (prior.index[..., None] == torch.arange(Tk) // prior.block).any(-2)
    return None


def log_prior_matrix(prior, is_causal, attn_mask, B, H, Tq, Tk):
    result = torch.zeros(B, H, Tq, Tk, dtype=torch.float64)
    factors = list(prior.parts) if isinstance(prior, regard.priors.Product) else [] if prior is None else [prior]
    alignments = [leaf.alignment for leaf in parts_of(prior) if getattr(leaf, "alignment", None)]
    if is_causal:
        factors.append(regard.Causal("top_left"))
    offset = Tk - Tq if "bottom_right" in alignments else 0
    i, j = torch.arange(Tq)[:, None] + offset, torch.arange(Tk)[None]
    for factor in factors:
        mask = mask_of(factor, i, j, B, H)
        if mask is not None:
            result = result.masked_fill(~mask, -math.inf)
        elif isinstance(factor, regard.ALiBi):
            slopes = torch.as_tensor(factor.slopes, dtype=torch.float64).detach().view(-1, 1, 1)
            result = result - slopes * (i - j).abs()
        elif isinstance(factor, regard.Bias):
            result = result + factor.log_prior.detach().double()
        elif isinstance(factor, regard.Relative):
            table = factor.table.detach().double()
            reach = table.shape[-1] // 2
            result = result + table[..., (j - i).clamp(-reach, reach) + reach]
        elif isinstance(factor, regard.LowRank):
            a, b = factor.query_factor.detach().double(), factor.key_factor.detach().double()
            if b.dim() > 2 and 1 < b.shape[-3] < H:
                b = b.repeat_interleave(H // b.shape[-3], -3)
            result = result + (a[..., :, None, :] * b[..., None, :, :]).sum(-1)
        elif isinstance(factor, regard.Decay):
            # log pi is the sum of the gates after key j, up to the query's position.
            gates, key = factor.log_forget.detach().double(), torch.arange(Tk)
            between = ((key > j[..., None]) & (key <= i[..., None])).double()  # [Tq, Tk, Tk]
            result = result + torch.einsum("...l,ijl->...ij", gates, between)
            result = result.masked_fill(j > i, -math.inf)
        elif isinstance(factor, FromFunction):
            batch, head = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
            result = result + factor.function(batch, head, i[None, None], j[None, None]).detach().double()
        elif isinstance(factor, regard.Density):
            result = result + factor.prior.detach().double().log()
        else:
            raise NotImplementedError(repr(factor))
    if attn_mask is not None:
        masked = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        result = result.masked_fill(masked, -math.inf)
    return result


def temperature_of(problem, log_prior):
    """[B, H, Tq, 1]; the rule ByKeys gives the inverse from the number of admissible keys."""
    B, H, Tq, _ = log_prior.shape
    rule = problem.temperature
    if not isinstance(rule, regard.ByKeys):
        return per_row(rule, B, H, Tq)
    slope, offset, power = (per_row(value, B, H, Tq) for value in (rule.slope, rule.offset, rule.power))
    keys = (log_prior > -math.inf).sum(-1, keepdim=True).double()
    return 1 / (offset + slope * torch.where(keys > 1, keys, 1.0).log() ** power)


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
    tau = temperature_of(problem, log_prior)
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
