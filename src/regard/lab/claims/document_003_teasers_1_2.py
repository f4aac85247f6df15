"""Claims of document 003, a tutorial on softmax: brain teasers 1 (division by the sum) and 2 (no scale)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import regard

from ..numbers import agree, draw, show, tensor, tick
from ..variants import by_sum, naive_softmax
from .claim import NEEDS_TRAINING, CheckResult, all_match, collect, judged, prints, prints_and_says, says, untestable
from .rows import entropy, jacobian_norm, random_attention, softmax

_T1, _T2 = "Brain Teaser #1", "Brain Teaser #2"

# --- brain teaser 1 ---------------------------------------------------------------------------------------------------


@prints("003", _T1, "the sum of (3, −2, 1) is {}", "2")
def sum_of_the_row() -> Tensor:
    return tensor(3, -2, 1).sum(0, keepdim=True)


@prints("003", _T1, "(3, −2, 1)/sum = {}", "1.5 -1.0 0.5")
def simple_division() -> Tensor:
    return by_sum(tensor(3, -2, 1))


@prints("003", _T1, "“{} attention to a token”", "-100%")
def minus_hundred_percent() -> Tensor:
    return by_sum(tensor(3, -2, 1))[1:2]


@says("003", _T1, "negative weights mean “subtracting information instead of aggregating it”")
def subtracts() -> CheckResult:
    slope = by_sum(tensor(3, -2, 1)) @ torch.eye(3).double()
    plan = softmax(3, -2, 1)
    return judged(
        f"Raising value 2 by 1 changes the output by {slope[1]:.1f} (softmax: +{plan[1]:.3f}).",
        float(slope[1]) < 0 < float(plan[1]),
    )


@prints("003", _T1, "(10, 9, 8)/sum = {}", "0.37 0.33 0.30")
def scenario_a_by_sum() -> Tensor:
    return by_sum(tensor(10, 9, 8))


@prints("003", _T1, "(100, 9, 8)/sum = {}", "0.85 0.08 0.07")
def scenario_b_by_sum() -> Tensor:
    return by_sum(tensor(100, 9, 8))


@says("003", _T1, "with simple normalization “both scenarios look similar”")
def scenarios_look_similar() -> CheckResult:
    a, b = tensor(10, 9, 8), tensor(100, 9, 8)
    simple = float((by_sum(a) - by_sum(b)).abs().sum() / 2)
    exponential = float((regard.solve(a).weights - regard.solve(b).weights).abs().sum() / 2)
    return judged(
        f"They differ by {simple:.2f} in total variation, more than under softmax ({exponential:.2f}).",
        simple < exponential,
    )


@says("003", _T1, "simple normalization has “No relative emphasis”")
def no_emphasis() -> CheckResult:
    a = tensor(10, 9, 8)
    frozen = agree(by_sum(10 * a), by_sum(a))
    peaks = [float(regard.solve(c * a).weights.max()) for c in (1, 10)]
    return judged(
        f"It ignores the scale: ten times the scores give the same weights {tick(frozen)}, so there is no temperature; "
        f"the largest weight of softmax goes from {peaks[0]:.2f} to {peaks[1]:.2f}.",
        frozen and peaks[1] > peaks[0],
    )


@prints("003", _T1, "softmax(10, 9, 8) = {}", "0.47 0.33 0.20")
def scenario_a_softmax() -> Tensor:
    return softmax(10, 9, 8)


@prints("003", _T1, "softmax(100, 9, 8) = {}", "~1.0 ~0.0 ~0.0")
def scenario_b_softmax() -> Tensor:
    return softmax(100, 9, 8)


@says("003", _T1, "“emphasizing what's important while still maintaining gradient flow”")
def keeps_gradient_flow() -> CheckResult:
    a, b = jacobian_norm(tensor(10, 9, 8)), jacobian_norm(tensor(100, 9, 8))
    return judged(
        f"While gaps are moderate: the Jacobian's norm is {a:.2f} in scenario A, and {b:.0e} in scenario B, where "
        "no gradient flows.",
        min(a, b) > 1e-2,
        a > 1e-2,
    )


teams_remove_it = untestable(
    "003", _T1, "teams that remove the exponential “fail to train or produce mediocre results”", NEEDS_TRAINING
)

# --- brain teaser 2 ---------------------------------------------------------------------------------------------------


def _magnitudes(d: int) -> tuple[float, float, bool]:
    """Mean |q·k| and standard deviation for standard normal q, k in R^d, exact; and whether draws agree."""
    mean = math.sqrt(2 / math.pi) * math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    deviation = math.sqrt(d)
    dots = (draw(1000, d, seed=d) * draw(1000, d, seed=d + 1)).sum(-1)
    drawn = abs(float(dots.abs().mean()) / mean - 1) < 0.06 and abs(float(dots.std()) / deviation - 1) < 0.06
    return mean, deviation, drawn


@prints_and_says("003", _T2, "average dot product magnitude at d_k = 64, 512, 2048: ≈ {}", "8 23 45")
def average_magnitude(printed: tuple[str, ...]) -> CheckResult:
    means, deviations, drawn = zip(*(_magnitudes(d) for d in (64, 512, 2048)), strict=True)
    return judged(
        f"That is the standard deviation √d_k: {show(deviations, 1)}. The mean magnitude is √(2/π) of it: "
        f"{show(means, 1)} (1000 draws agree within 6 % {tick(all(drawn))}).",
        all_match(printed, means) and all(drawn),
        all_match(printed, deviations) and all(drawn),
    )


@prints("003", _T2, "softmax(45, 40, 35) = {}", "0.993 0.007 0.000")
def unscaled_softmax() -> Tensor:
    return softmax(45, 40, 35)


@prints("003", _T2, "softmax(5, 4.4, 3.9) = {}", "0.54 0.29 0.17")
def scaled_softmax() -> Tensor:
    return softmax(5, 4.4, 3.9)


@says("003", _T2, "near (1, 0, 0) “the gradient with respect to the inputs is nearly zero”")
def vanishing_gradient() -> CheckResult:
    norms = [jacobian_norm(s) for s in (tensor(5, 4.4, 3.9), tensor(45, 40, 35), tensor(450, 400, 350))]
    return judged(
        f"The Jacobian's norm is {norms[0]:.2f} at (5, 4.4, 3.9), {norms[1]:.3f} at (45, 40, 35), {norms[2]:.0e} at "
        "ten times that.",
        norms[0] > 10 * norms[1] > 0 and norms[2] < 1e-6,
    )


@says("003", _T2, "“there's no signal to optimize”")
def no_signal() -> CheckResult:
    q, k, v, g = (draw(1, 1, n, d, seed=i) for i, (n, d) in enumerate([(1, 4), (6, 4), (6, 3), (1, 3)]))
    for leaf in (q, k, v):
        leaf.requires_grad_()
    out = regard.attention(q, k, v, scale=20.0)
    slopes = [float(x.norm()) for x in torch.autograd.grad((out * g).sum(), (q, k, v))]
    return judged(
        f"None to queries and keys, but the values still learn: at scale 20 the gradient's norm is {slopes[0]:.0e} for "
        f"q, {slopes[1]:.0e} for k and {slopes[2]:.2f} for v.",
        max(slopes) < 1e-3,
        max(slopes[:2]) < 1e-3 < slopes[2],
    )


@says("003", _T2, "without scaling attention is “mostly one-hot”")
def mostly_one_hot() -> CheckResult:
    found = {d: (random_attention(d, 1.0), random_attention(d, None)) for d in (64, 512)}
    return judged(
        f"Random q, k, 128 keys: the mean largest weight is {found[64][0][0]:.2f} at d_k = 64 and "
        f"{found[512][0][0]:.2f} at 512; with scaling {found[64][1][0]:.2f} and {found[512][1][0]:.2f}.",
        all(plain[0] > 0.5 > scaled[0] for plain, scaled in found.values()),
    )


many_tokens = untestable(
    "003", _T2, "“Real language requires attending to multiple tokens”", "A statement on language; no measure is given."
)
slower_unscaled = untestable("003", _T2, "unscaled, a small transformer trains “3-5x slower”", NEEDS_TRAINING)
worse_unscaled = untestable("003", _T2, "unscaled, “10-20% worse perplexity”", NEEDS_TRAINING)
peaked_unscaled = untestable(
    "003", _T2, "unscaled, a trained model's patterns are “far too peaked”",
    "After training: needs an experiment. Before it, see the row on one-hot attention above.",
)  # fmt: skip


@says("003", _T2, "“If Q and K have unit variance, then QKᵀ has variance d_k”")
def variance_of_dot_products() -> CheckResult:
    d, n = 64, 40000
    q, k = draw(n, d, seed=1), draw(n, d, seed=2)
    centred = float((q * k).sum(-1).var())
    shifted = float(((q + 1) * (k + 1)).sum(-1).var())
    same = float((q * q).sum(-1).var())
    return judged(
        f"If they are independent and have mean 0: d_k = 64 gives {centred / d:.1f}·d_k. With means of 1 it is "
        f"{shifted / d:.1f}·d_k, with k = q {same / d:.1f}·d_k.",
        all(abs(x / d - 1) < 0.05 for x in (centred, shifted, same)),
        abs(centred / d - 1) < 0.05,
    )


@says("003", _T2, "“Dividing by sqrt(d_k) restores unit variance”")
def restores_unit_variance() -> CheckResult:
    found = [float(((draw(4000, d, seed=1) * draw(4000, d, seed=2)).sum(-1) / math.sqrt(d)).var()) for d in (64, 512)]
    return judged(
        f"Measured at d_k = 64 and 512: {show(found, 1)} (for independent q, k of mean 0).",
        all(abs(x - 1) < 0.1 for x in found),
    )


@says("003", _T2, "scaling is “keeping values in the stable range for softmax”")
def stable_range() -> CheckResult:
    s = (draw(64, 2048, seed=1) @ draw(2048, 128, seed=2)).float()
    scaled = s / math.sqrt(2048)
    textbook = [bool(naive_softmax(x).isfinite().all()) for x in (s, scaled)]
    shifted = [bool(regard.solve(x).weights.isfinite().all()) for x in (s, scaled)]
    return judged(
        f"For the textbook formula: in float32 at d_k = 2048 scores up to {s.max():.0f} overflow "
        f"{tick(not textbook[0])}, scaled ones, up to {scaled.max():.1f}, do not {tick(textbook[1])}. Shifted, softmax "
        f"is finite with both {tick(all(shifted))}: there, scaling only preserves the gradient.",
        not shifted[0] and shifted[1],
        not textbook[0] and textbook[1] and all(shifted),
    )


@says("003", _T2, "entropy “consistently below 1.0” indicates over-peaked attention")
def entropy_below_one() -> CheckResult:
    uniform = float(entropy(regard.solve(tensor(0, 0)).weights))
    half = torch.full((1024,), 0.5 / 1023, dtype=torch.float64)
    half[0] = 0.5
    h = float(entropy(half))
    share = h / math.log(1024)
    return judged(
        f"It depends on n and on the unit: the uniform plan of 2 keys has {uniform:.2f} nats (1 bit), so every "
        f"causal row of 2 is flagged; 1024 keys, half the mass on one, have {h:.2f}. Divided by log n: "
        f"{uniform / math.log(2):.0f} and {share:.2f}.",
        uniform >= 1 and h < 1,
        abs(uniform / math.log(2) - 1) < 1e-9 and share < 0.9,
    )


CLAIMS = collect(globals())
