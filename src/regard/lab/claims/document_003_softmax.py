"""Claims of document 003, a tutorial on softmax: scores, softmax and masking."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import regard
from regard import Causal, Transport, Tsallis

from ..numbers import agree, draw, how_close, show, tensor, tick
from ..variants import by_sum
from .claim import CheckResult, collect, judged, prints, says, untestable
from .rows import EXAMPLE, INF, fully_masked_row, softmax

_CONTENTS, _PROBLEM = "Table of Contents", "Raw Similarity Scores Are Meaningless"
_SOLUTION, _REALLY = "Converting Scores to Probabilities", "What Is Softmax, Really?"
_MASKING = "Causal Masking: The Elegant Trick"

brain_teaser_5 = untestable(
    "003",
    _CONTENTS,
    "“Brain Teaser #5”, “Practical Implications for AI Leaders”",
    "Listed in the contents, but not written. `regard lab teasers 5` supplies an answer.",
)

# --- scores and probabilities -----------------------------------------------------------------------------------------


@says("003", _PROBLEM, "scores “could be negative. They could sum to 47 or 0.3”")
def scores_are_arbitrary() -> CheckResult:
    sums = [47.0, 0.3]
    moved = torch.stack([EXAMPLE + (total - EXAMPLE.sum()) / 4 for total in sums])
    same = regard.solve(moved).weights
    expected = regard.solve(EXAMPLE).weights.expand_as(same)
    negative = float((draw(100, 16, seed=1) @ draw(16, 100, seed=2) < 0).double().mean())
    return judged(
        f"{negative:.0%} of random dot products are negative. Shifted to sum to 47 or to 0.3, the example's weights "
        f"{how_close(same, expected)}: a common offset means nothing.",
        0.4 < negative < 0.6 and agree(same, expected),
    )


@says("003", _PROBLEM, "“You can't feed these raw numbers into a weighted sum”")
def raw_scores_as_weights() -> CheckResult:
    raw = regard.certify(EXAMPLE, EXAMPLE)
    constant = float(EXAMPLE @ torch.ones(4, dtype=torch.float64))
    return judged(
        f"Values that are all 1 come back as {constant:.1f}: the row's mass is off by {float(raw.row_residual):.1f}.",
        float(raw.row_residual) > 1e-6 and abs(constant - 1) > 1e-6,
    )


@says("003", _PROBLEM, "“You need a probability distribution. You need softmax.”")
def needs_softmax() -> CheckResult:
    problem = Transport(Tsallis(1.5))
    p = regard.solve(EXAMPLE, problem).weights
    proper = bool((p >= 0).all()) and agree(p.sum(), tensor(1)[0])
    optimal = regard.certify(EXAMPLE, p, problem).holds(1e-9)
    return judged(
        f"A distribution need not be softmax: 1.5-entmax gives {show(p)}, which is one {tick(proper)} and the optimum "
        f"of its own problem {tick(optimal)}.",
        not (proper and optimal),
    )


@prints("003", _SOLUTION, "softmax(2.8, 1.2, 0.5, 3.1) = {}", "0.28 0.06 0.03 0.38")
def softmax_of_the_example() -> Tensor:
    return softmax(2.8, 1.2, 0.5, 3.1)


@says("003", _SOLUTION, "“All values are positive”")
def all_positive() -> CheckResult:
    moderate = regard.solve(draw(200, 8, seed=3, scale=3)).weights
    far = torch.tensor([0.0, -200.0])
    single = regard.solve(far).weights
    logs = far.log_softmax(-1)
    return judged(
        f"In exact arithmetic, for keys that are not masked. In float32 a key 200 below the best has weight "
        f"{single[1].item():.0f}, though its log-weight is {logs[1].item():.0f}.",
        bool((single > 0).all()),
        bool((moderate > 0).all()) and bool(logs.isfinite().all()),
    )


@says("003", _SOLUTION, "“They sum to 1.0”")
def sums_to_one() -> CheckResult:
    total = regard.solve(draw(200, 8, seed=3, scale=3)).weights.sum(-1)
    printed = 0.28 + 0.06 + 0.03 + 0.38
    return judged(
        f"200 rows: the sums and 1 {how_close(total, torch.ones_like(total))}. (The printed example sums to "
        f"{printed:.2f}.)",
        agree(total, torch.ones_like(total)),
    )


@prints("003", _SOLUTION, "“allocate {} of focus” to ‘the’ and to ‘cat’", "38% 28%")
def interpretable_shares() -> Tensor:
    return softmax(2.8, 1.2, 0.5, 3.1)[[3, 0]]


@says("003", _SOLUTION, "the exponential is “amplifying differences between values”")
def amplifies_differences() -> CheckResult:
    small, large = tensor(0.2, 0.1), tensor(10, 9)
    odds = [float(p[0] / p[1]) for p in (regard.solve(small).weights, regard.solve(large).weights)]
    ratios = [2.0, 10 / 9]
    s = draw(200, 5, seed=4, scale=3)
    p = regard.solve(s).weights
    exact = agree((p[:, 0] / p[:, 1]).log(), s[:, 0] - s[:, 1])
    return judged(
        f"It turns differences into odds, p_i/p_j = exp(s_i − s_j) {tick(exact)}. Against the ratio of scores that is "
        f"more for (10, 9), {odds[1]:.2f} against {ratios[1]:.2f}, and less for (0.2, 0.1), {odds[0]:.2f} against "
        f"{ratios[0]:.2f}.",
        all(o > r for o, r in zip(odds, ratios, strict=True)),
        exact,
    )


@says("003", _SOLUTION, "“while maintaining differentiability”")
def differentiable() -> CheckResult:
    s = draw(3, 5, seed=5).requires_grad_()
    fine = torch.autograd.gradcheck(lambda x: regard.solve(x).weights, (s,), raise_exception=False)
    return judged(f"Its derivative passes the check by finite differences {tick(fine)}.", fine)


# --- production softmax -----------------------------------------------------------------------------------------------


@says("003", _REALLY, "shift, exponentiate, normalise: the production code computes the textbook formula")
def production_softmax() -> CheckResult:
    s = draw(200, 8, seed=6, scale=5)
    shifted = (s - s.amax(-1, keepdim=True)).exp()
    production, textbook = shifted / shifted.sum(-1, keepdim=True), s.exp() / s.exp().sum(-1, keepdim=True)
    plan = regard.solve(s).weights
    return judged(
        f"Code and formula {how_close(production, textbook)}, and both with regard's plan "
        f"({how_close(plan, production)}).",
        agree(production, textbook) and agree(plan, production),
    )


naive_is_rare = untestable(
    "003", _REALLY, "“you'll almost never see this naive implementation”", "A remark on other people's code."
)


@says("003", _REALLY, "“Each step exists for a specific reason”")
def each_step_has_a_reason() -> CheckResult:
    s = torch.tensor([100.0, 99.0])
    unshifted = s.exp() / s.exp().sum()
    linear = by_sum(tensor(3, -2, 1))
    unnormalised = EXAMPLE.exp().sum()
    broken = [bool(unshifted.isnan().any()), bool((linear < 0).any()), abs(float(unnormalised) - 1) > 1e-6]
    return judged(
        f"Left out one by one: without the shift float32 scores (100, 99) give NaN {tick(broken[0])}, without the "
        f"exponential (3, −2, 1) gives a negative weight {tick(broken[1])}, without the division the example sums to "
        f"{float(unnormalised):.1f} {tick(broken[2])}.",
        all(broken),
    )


# --- masking ----------------------------------------------------------------------------------------------------------


@prints("003", _MASKING, "softmax(2.8, 1.2, −∞, −∞) = {}", "0.82 0.18 0.00 0.00")
def masked_example() -> Tensor:
    return softmax(2.8, 1.2, -INF, -INF)


@says("003", _MASKING, "masked positions “automatically receive zero attention weight”, exp(−∞) = 0")
def masked_weight_is_zero() -> CheckResult:
    p = softmax(2.8, 1.2, -INF, -INF)
    q, k, v = (draw(1, 1, 6, 4, seed=i) for i in (1, 2, 3))
    out = regard.attention(q, k, v, is_causal=True)
    later = regard.attention(q, k, v.clone().index_fill_(2, torch.tensor([5]), 1e6), is_causal=True)
    untouched = agree(out[:, :, :5], later[:, :, :5])
    return judged(
        f"exp(−∞) = {math.exp(-INF):.0f}; the masked weights are {show(p[2:], 0)} exactly, and a changed last value "
        f"reaches no earlier output {tick(untouched)}.",
        bool((p[2:] == 0).all()) and untouched,
    )


@says("003", _MASKING, "“No special-case code … the math takes care of the rest.”")
def no_special_case() -> CheckResult:
    empty, defined = fully_masked_row()
    p = regard.solve(EXAMPLE.expand(4, 4), Transport(prior=Causal())).weights
    good = agree(p.sum(-1), torch.ones(4, dtype=torch.float64)) and float(p.triu(1).abs().max()) == 0
    return judged(
        f"For rows with at least one key {tick(good)}. A row that is masked altogether (padding) gives softmax "
        f"{show(empty)}. It needs a convention; regard returns {show(defined.abs().max()[None], 0)}.",
        bool(empty.isfinite().all()),
        good,
    )


CLAIMS = collect(globals())
