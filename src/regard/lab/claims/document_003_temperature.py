"""Claims of document 003, a tutorial on softmax: the temperature, and the summary."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import AuxRequest, Free, Transport, Tsallis

from ..numbers import agree, distance, draw, how_close, increasing, show, tensor, tick
from ..variants import by_sum
from .claim import NEEDS_TRAINING, CheckResult, collect, judged, prints, says, untestable
from .rows import EXAMPLE, INF, entropy, random_attention, softmax

_KNOB, _TOGETHER, _AHA = "The Temperature Knob", "Putting It All Together", "“Aha” Moment"

# --- the temperature knob ---------------------------------------------------------------------------------------------


@says("003", _KNOB, "temperature-scaled softmax is softmax(x / temperature)")
def temperature_divides() -> CheckResult:
    s, taus = draw(50, 6, seed=16, scale=3), (0.5, 1.0, 2.0)
    solved = torch.stack([regard.solve(s, Transport(temperature=t)).weights for t in taus])
    formula = torch.stack([(s / t).softmax(-1) for t in taus])
    return judged(f"It and the plan at temperature τ {how_close(solved, formula)}.", agree(solved, formula))


@prints("003", _KNOB, "softmax(3, 2, 1) at T = 1.0: {}", "0.67 0.24 0.09")
def temperature_one() -> Tensor:
    return softmax(3, 2, 1)


@prints("003", _KNOB, "softmax(3, 2, 1) at T = 0.5: {}", "0.84 0.14 0.02")
def temperature_half() -> Tensor:
    return softmax(3, 2, 1, temperature=0.5)


@prints("003", _KNOB, "softmax(3, 2, 1) at T = 2.0: {}", "0.49 0.32 0.19")
def temperature_two() -> Tensor:
    return softmax(3, 2, 1, temperature=2.0)


@says("003", _KNOB, "T = 0.5 is “more peaked”, T = 2.0 “more uniform”")
def temperature_orders() -> CheckResult:
    plans = torch.stack([softmax(3, 2, 1, temperature=t) for t in (0.5, 1.0, 2.0)])
    return judged(
        f"Entropy at T = 0.5, 1, 2: {show(entropy(plans), 2)} nats of {math.log(3):.2f}.", increasing(entropy(plans))
    )


@says("003", _KNOB, "“Higher temperature = more creative/diverse outputs”, lower “more focused”")
def temperature_diversity() -> CheckResult:
    logits = draw(100, 50, seed=17, scale=2)
    plans = torch.stack([regard.solve(logits, Transport(temperature=t)).weights for t in (0.25, 0.5, 1.0, 2.0, 4.0)])
    rises = bool((entropy(plans).diff(dim=0) > 0).all())
    return judged(
        f"Diverse as measured by the entropy of what is sampled: it rises with T in each of 100 rows {tick(rises)}. "
        "(That is the temperature of the output layer, not of attention.)",
        rises,
    )


@says("003", _KNOB, "temperatures per head allow heads “to have different sharpness”, and can be learned")
def temperature_per_head() -> CheckResult:
    q, k, v = (
        draw(1, 1, 5, 8, seed=1).expand(1, 3, 5, 8),
        draw(1, 1, 7, 8, seed=2).expand(1, 3, 7, 8),
        draw(1, 3, 7, 2, seed=3),
    )
    tau = tensor(0.5, 1, 2).reshape(3, 1, 1).requires_grad_()
    out, aux = regard.attention(q, k, v, problem=Transport(temperature=tau), return_aux=AuxRequest(entropy=True))
    assert aux.entropy is not None
    h = aux.entropy.mean((0, 2)).detach()
    (slope,) = torch.autograd.grad(out.square().sum(), tau)
    return judged(
        f"Three heads with the same q, k and τ = 0.5, 1, 2: entropy {show(h, 2)}; each τ has a gradient "
        f"{tick(bool((slope != 0).all()))}.",
        increasing(h) and bool((slope != 0).all()) and bool(slope.isfinite().all()),
    )


@says("003", _KNOB, "attention at different temperatures reveals whether it “genuinely relies on specific tokens”")
def temperature_reveals() -> CheckResult:
    def response(s: Tensor) -> tuple[float, float, float]:
        step = 1e-4
        hot, cold = (entropy(regard.solve(s, Transport(temperature=math.exp(d))).weights) for d in (step, -step))
        p = regard.solve(s).weights
        variance = (p * s**2).sum() - (p * s).sum() ** 2
        return float((hot - cold) / (2 * step)), float(variance), float(entropy(p))

    committed, hedging, between = (response(s) for s in (tensor(40, 0, 0), tensor(1, 1, 1), tensor(2, 1, 0)))
    identity = all(abs(r[0] - r[1]) < 1e-6 for r in (committed, hedging, between))
    return judged(
        f"Only beside the entropy: dH/d ln τ is the variance of the scores under p {tick(identity)}, and 0 both for a "
        f"committed row ({committed[0]:.2f}, H = {committed[2]:.2f}) and a uniform one ({hedging[0]:.2f}, H = "
        f"{hedging[2]:.2f}).",
        abs(committed[0] - hedging[0]) > 1e-3,
        identity and abs(committed[2] - hedging[2]) > 1,
    )


chatgpt = untestable(
    "003",
    _KNOB,
    "“This is why ChatGPT has a temperature parameter”",
    "The reasons behind a product; there is nothing to compute.",
)
layers_differ = untestable(
    "003", _KNOB, "lower layers “learn higher temperatures”, upper layers “lower temperatures”", NEEDS_TRAINING
)
small_gain = untestable(
    "003", _KNOB, "learned temperatures: “improvements of 1-3% on complex reasoning tasks”", NEEDS_TRAINING
)

# --- putting it all together ------------------------------------------------------------------------------------------


@says("003", _TOGETHER, "attention is similarity, scaling, masking, softmax, weighted sum")
def five_steps() -> CheckResult:
    q, k, v = (draw(2, 2, 6, 8, seed=i) for i in (1, 2, 3))
    s = q @ k.mT / math.sqrt(8)
    s = s.masked_fill(torch.ones(6, 6).triu(1).bool(), -INF)
    by_hand = s.softmax(-1) @ v
    ours, stock = regard.attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return judged(
        f"The five steps, regard.attention and PyTorch's SDPA {how_close(ours, by_hand)}.",
        agree(ours, by_hand) and agree(stock, by_hand),
    )


@says("003", _TOGETHER, "“No scaling → vanishing gradients, over-peaked attention”")
def without_scaling() -> CheckResult:
    slopes = []
    for scale in (None, 1.0):
        q, k, v = (draw(1, 1, n, 2048, seed=i) for i, n in enumerate((16, 64, 64)))
        mask = torch.zeros(16, 64, dtype=torch.float64, requires_grad=True)
        out = regard.attention(q, k, v, attn_mask=mask, scale=scale)
        (slope,) = torch.autograd.grad((out * draw(16, 2048, seed=9)).sum(), mask)
        slopes.append(float(slope.norm(dim=-1).median()))
    peaked = random_attention(2048, 1.0)[0], random_attention(2048, None)[0]
    return judged(
        f"d_k = 2048, random: the median gradient to a row's scores shrinks to {slopes[1] / slopes[0]:.0e} of its "
        f"size; mean largest weight {peaked[0]:.2f} instead of {peaked[1]:.2f}.",
        slopes[1] < 0.1 * slopes[0] and peaked[0] > 0.5 > peaked[1],
    )


@says("003", _TOGETHER, "“No exponential → negative weights, weak emphasis”")
def without_exponential() -> CheckResult:
    simple = by_sum(tensor(3, -2, 1))
    sparse = regard.solve(torch.stack([tensor(3, -2, 1), tensor(10, 9, 8)]), Transport(Tsallis(2.0))).weights
    sound = bool((sparse >= 0).all()) and bool((sparse.amax(-1) >= 0.99).all())
    return judged(
        f"True of s/Σs ({show(simple, 1)}). Sparsemax has no exponential either: (3, −2, 1) gives {show(sparse[0], 0)} "
        f"and (10, 9, 8) {show(sparse[1], 0)}, without negative weights, and sharper than softmax.",
        bool((simple < 0).any()) and not sound,
        bool((simple < 0).any()),
    )


@says("003", _TOGETHER, "“No normalization → unbounded outputs”")
def without_normalization() -> CheckResult:
    masses = [float(regard.solve(c * EXAMPLE, Transport(marginal=Free())).weights.sum()) for c in (1, 2, 4)]
    longer = float(regard.solve(EXAMPLE.repeat(8), Transport(marginal=Free())).weights.sum())
    return judged(
        f"exp(s) without a sum (a free marginal): values of 1 come back as {masses[0]:.0f}, {masses[1]:.0f}, "
        f"{masses[2]:.0f} at 1, 2, 4 times the scores, and {longer / masses[0]:.0f}-fold with 8 times the keys.",
        increasing(masses) and masses[-1] > 1e3 and longer > 7 * masses[0],
    )


@says("003", _TOGETHER, "“No masking → information leakage from future tokens”")
def without_masking() -> CheckResult:
    q, k, v = (draw(1, 1, 6, 4, seed=i) for i in (1, 2, 3))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 5], v2[:, :, 5] = 1.0, -1.0
    leak = [
        distance(regard.attention(q, k2, v2, is_causal=c)[:, :, :5], regard.attention(q, k, v, is_causal=c)[:, :, :5])
        for c in (False, True)
    ]
    return judged(
        f"Another last token changes the earlier outputs by up to {leak[0]:.2f}; with the mask by {leak[1]:.0f}.",
        leak[0] > 1e-3 and leak[1] == 0,
    )


crucial = untestable(
    "003",
    _AHA,
    "papers that replace softmax have “usually” not tested “where softmax's properties … matter”",
    "A remark on papers; none is named.",
)

CLAIMS = collect(globals())
