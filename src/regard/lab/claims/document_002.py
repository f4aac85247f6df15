"""The claims of document 002, a post: Why Softmax?

s are scores, β = 1/τ the inverse temperature and p the plan (the attention weights).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import KL, AuxRequest, Bias, Causal, Transport, Window

from ..numbers import agree, certified, draw, how_close, increasing, show, tensor, tick
from .claim import CheckResult, collect, judged, says, untestable
from .rows import EXAMPLE, divergence, entropy, weights

_INTRODUCTION, _TESTING, _MOTIVATION = "Introduction", "Softmax as hypothesis testing", "Motivation"
_KL_VIEW, _INTERPRETATION = "A KL-constrained view", "Interpretation"
_BETAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@says("002", _INTRODUCTION, "a token attends to “all tokens before it {{ h_i : i < t }}”")
def strictly_the_past() -> CheckResult:
    q, k, v = (draw(1, 1, 5, 4, seed=i) for i in (1, 2, 3))
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    strict = regard.attention(q, k, v, problem=Transport(prior=Window(None, -1)))
    inclusive = regard.attention(q, k, v, problem=Transport(prior=Window(None, 0)))
    return judged(
        f"i ≤ t: the token itself is included in PyTorch's causal attention ({how_close(inclusive, causal)}). With "
        f"i < t the first token has no key: its output is {show(strict[0, 0, 0].abs().max()[None], 0)}.",
        agree(strict, causal),
        agree(inclusive, causal),
    )


@says("002", _INTRODUCTION, "“q, k ∈ R^d_k and d_k < d_model”")
def keys_are_smaller() -> CheckResult:
    h, ranks, optimal = draw(10, 8, seed=1), [], []
    for d_k in (3, 8):
        w_q, w_k = draw(8, d_k, seed=2), draw(8, d_k, seed=3)
        s = h @ w_q @ (h @ w_k).mT
        ranks.append(int(torch.linalg.matrix_rank(s)))
        optimal.append(regard.certify(s, weights(s)).holds(1e-9))
    return judged(
        f"A convention: d_k = 3 of d_model = 8 gives scores of rank {ranks[0]}, d_k = d_model of rank {ranks[1]}; the "
        f"weights are optimal either way {tick(all(optimal))}.",
        not optimal[1],
        all(optimal) and ranks == [3, 8],
    )


@says("002", _INTRODUCTION, "O = Σ π v with π = exp(β k·q)/Σ exp(β k·q)")
def update_of_the_stream() -> CheckResult:
    q, k, v = draw(1, 1, 5, 4, seed=1), draw(1, 1, 7, 4, seed=2), draw(1, 1, 7, 3, seed=3)
    beta = 0.3
    z = (beta * q @ k.mT).exp()
    o = z / z.sum(-1, keepdim=True) @ v
    found = regard.attention(q, k, v, scale=beta)
    inside = bool(((o >= v.amin(2, keepdim=True)) & (o <= v.amax(2, keepdim=True))).all())
    return judged(
        f"The formula and attention with scale β {how_close(o, found)}; every output lies between the smallest and "
        f"largest value {tick(inside)}: an average.",
        agree(o, found) and inside,
    )


@says("002", _INTRODUCTION, "“π_i = softmax(β k_i·q)”")
def softmax_of_a_number() -> CheckResult:
    one, row = regard.solve(EXAMPLE[:1]).weights, regard.solve(EXAMPLE).weights
    return judged(
        f"Softmax of the single number 2.8 is {one.item():.0f}. It is a function of the whole row: component 1 of "
        f"softmax(2.8, 1.2, 0.5, 3.1) is {row[0]:.3f}.",
        agree(one, row[:1]),
        agree(row, EXAMPLE.exp() / EXAMPLE.exp().sum()),
    )


@says("002", _INTRODUCTION, "“information between positions can become more and more mixed”")
def mixing() -> CheckResult:
    x = draw(1, 1, 8, 4, seed=4)

    def layers(x: Tensor, depth: int) -> Tensor:
        for _ in range(depth):
            x = x + regard.attention(x, x, x, problem=Transport(prior=Window(1)))
        return x[0, 0, -1].sum()

    reached = []
    for depth in (1, 2, 3, 4):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layers(leaf, depth), leaf)
        reached.append(int((slope[0, 0].abs().amax(-1) > 0).sum()))
    return judged(
        "Layers that see one token back: the last position depends on "
        f"{', '.join(map(str, reached))} tokens after 1 … 4 layers.",
        increasing(reached),
    )


looking_for = untestable(
    "002",
    _INTRODUCTION,
    "the query is what a token is “looking for”, keys are what is “advertised”",
    "An interpretation; it predicts no number.",
)


@says("002", _TESTING, "without a reason “to prefer one index over another” …")
def no_preference() -> CheckResult:
    plans = torch.stack([weights(torch.full((5,), 1.7).double(), 1 / b) for b in _BETAS])
    return judged(
        f"Equal scores give the uniform null at every β (weights {show(plans[0, :1], 2)} of 5 keys; "
        f"{how_close(plans, torch.full_like(plans, 0.2))}).",
        agree(plans, torch.full_like(plans, 0.2)),
    )


testing_is_unfinished = untestable(
    "002",
    _TESTING,
    "the section's argument",
    "The section ends before its argument, and refers to an equation that is missing. What can be tested is in the "
    "rows on KL below.",
)


@says("002", _TESTING, "“The limit β → ∞ produces hard routing.”")
def hard_limit() -> CheckResult:
    hard = weights(EXAMPLE, 0.0)
    apart = [float((weights(EXAMPLE, 1 / b) - hard).abs().max()) for b in (10.0, 100.0, 1000.0)]
    bound = [3 * math.exp(-0.3 * b) for b in (10.0, 100.0, 1000.0)]
    tied = weights(tensor(2, 2, 1), 0.0)
    converges = all(a <= b for a, b in zip(apart, bound, strict=True)) and apart[-1] < 1e-12
    return judged(
        f"Distance to argmax at β = 10, 100: {apart[0]:.3f}, {apart[1]:.0e}; below (n − 1)exp(−β·gap) always "
        f"{tick(converges)}. Tied keys share: {show(tied, 1)}.",
        converges and agree(tied, tensor(0.5, 0.5, 0)),
    )


@says("002", _TESTING, "π* = argmax Σ π z − (1/β) KL(π‖u)")
def maximiser() -> CheckResult:
    s, beta = draw(200, 5, seed=5, scale=2), 1.7
    null = Bias(torch.full((5,), -math.log(5), dtype=torch.float64))
    p = (beta * s).softmax(-1)
    optimal = regard.certify(s, p, Transport(KL(), prior=null, temperature=1 / beta)).holds(1e-10)
    return judged(
        f"softmax(βz) for 200 rows, with u as prior and τ = 1/β: {certified(optimal)}. The argmax is "
        "the whole plan, not its component i.",
        optimal,
    )


@says("002", _MOTIVATION, "“attention weights are usually written as” exp(βz)/Σ exp(βz)")
def usual_weights() -> CheckResult:
    q, k = draw(1, 1, 4, 9, seed=6), draw(1, 1, 6, 9, seed=7)
    read = F.scaled_dot_product_attention(q, k, torch.eye(6).double()[None, None])
    p = weights(q @ k.mT, 3.0)
    return judged(f"PyTorch's SDPA is that with β = 1/√d_k: {how_close(read, p)}.", agree(read, p))


@says("002", _KL_VIEW, "“KL-constrained”")
def constrained_or_penalised() -> CheckResult:
    mild, wild = tensor(0.3, 0.1, 0), tensor(3, 1, 0)
    null = torch.full((3,), 1 / 3, dtype=torch.float64)

    def evidence(s: Tensor, beta: float) -> float:
        return float(divergence(weights(s, 1 / beta), null))

    spent = [evidence(mild, 1.7), evidence(wild, 1.7)]
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle == 0 or evidence(wild, middle) < spent[1] else (low, middle)
    return judged(
        f"Penalised: the same β = 1.7 spends {spent[0]:.3f} nats on one row and {spent[1]:.3f} on another. A budget "
        f"picks one β per row: {spent[1]:.3f} nats gives back β = {low:.3f}.",
        abs(spent[0] - spent[1]) < 1e-6,
        abs(low - 1.7) < 1e-6,
    )


@says("002", _KL_VIEW, "u is “uniform … over admissible indices”")
def null_over_admissible() -> CheckResult:
    q, k, v = (draw(1, 1, 6, 4, seed=i) for i in (1, 2, 3))
    _, aux = regard.attention(q, k, v, is_causal=True, return_aux=AuxRequest(kl=True, entropy=True))
    assert aux.kl is not None and aux.entropy is not None
    by_hand = torch.arange(1, 7).double().log() - aux.entropy[0, 0]
    p = regard.solve(q @ k.mT, Transport(prior=Causal())).weights
    outside = float(p.triu(1).abs().max())
    return judged(
        f"A causal plan has mass {outside:.0f} elsewhere, and its KL and log(number admissible) − entropy "
        f"{how_close(aux.kl[0, 0], by_hand)}.",
        outside == 0 and agree(aux.kl[0, 0], by_hand),
    )


@says("002", _KL_VIEW, "“π* ∝ exp(βz), which recovers softmax”")
def proportional_to_exp() -> CheckResult:
    s = draw(100, 5, seed=8, scale=2)
    null = Bias(torch.full((5,), -math.log(5), dtype=torch.float64))
    p = regard.solve(s, Transport(prior=null, temperature=1 / 1.7)).weights
    ratio = p / (1.7 * s).exp()
    flat = ratio / ratio.mean(-1, keepdim=True)
    return judged(
        f"p/exp(βz) is one number per row, for 100 rows: relative to their means they and 1 "
        f"{how_close(flat, torch.ones_like(flat))}.",
        agree(flat, torch.ones_like(flat)),
    )


@says("002", _INTERPRETATION, "“The KL term bounds distinguishability from a null hypothesis.”")
def kl_bounds_distinguishability() -> CheckResult:
    s, beta, n = draw(2000, 8, seed=9, scale=2), 1.5, 8
    p = weights(s, 1 / beta)
    kl = divergence(p, torch.full_like(p, 1 / n))
    variation = (p - 1 / n).abs().sum(-1) / 2
    bought = beta * ((p * s).sum(-1) - s.mean(-1))
    pinsker, paid = bool((variation <= (kl / 2).sqrt()).all()), bool((kl <= bought).all())
    return judged(
        f"2000 rows: no test tells the plan from the null by more than √(KL/2) in one draw {tick(pinsker)}, and KL is "
        f"at most β times the similarity gained {tick(paid)}. Telling them apart at level 5 % takes about log(20)/KL "
        f"draws, here {math.log(20) / float(kl.median()):.1f} in the median row.",
        pinsker and paid,
    )


@says("002", _INTERPRETATION, "“Large β allows sharper routing; small β enforces caution.”")
def beta_sharpens() -> CheckResult:
    kl = torch.stack([math.log(4) - entropy(weights(EXAMPLE, 1 / b)) for b in _BETAS])
    cautious = float(divergence(weights(EXAMPLE, 1e6), torch.full_like(EXAMPLE, 0.25)))
    return judged(
        f"KL to the null grows with β = {_BETAS[0]} … {_BETAS[-1]:.0f}: {show(kl, 2)} nats; as β → 0 it is "
        f"{cautious:.0f}.",
        increasing(kl) and abs(cautious) < 1e-9,
    )


CLAIMS = collect(globals())
