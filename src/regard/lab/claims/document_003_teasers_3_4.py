"""Claims of document 003, a tutorial on softmax: brain teasers 3 (no softmax) and 4 (masks alone)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import Causal, Transport, Tsallis

from ..numbers import agree, draw, how_close, multiply_adds, show, tensor, tick
from ..variants import by_relu, by_sum
from .claim import NEEDS_TRAINING, CheckResult, all_match, collect, judged, prints, prints_and_says, says, untestable
from .rows import INF, fully_masked_row, softmax

_T3, _T4 = "Brain Teaser #3", "Brain Teaser #4"

# --- brain teaser 3 ---------------------------------------------------------------------------------------------------


@says("003", _T3, "raw dot products: weights “can be negative”")
def raw_can_be_negative() -> CheckResult:
    share = float((draw(200, 32, seed=7) @ draw(32, 200, seed=8) < 0).double().mean())
    return judged(f"{share:.0%} of them are, for random q and k.", share > 0)


@says("003", _T3, "raw dot products: representations “become unbounded and explode”")
def raw_explodes() -> CheckResult:
    start = draw(1, 1, 32, 16, seed=9).float()
    raw, layers = start, 0
    while bool(raw.isfinite().all()) and layers < 50:
        raw, layers = raw + raw @ raw.mT @ raw, layers + 1
    averaged = start
    for _ in range(layers):
        averaged = averaged + regard.attention(averaged, averaged, averaged)
    growth = float(averaged.abs().max() / start.abs().max())
    return judged(
        f"x + (x xᵀ)x leaves float32's range in layer {layers}, before any training; x + attention(x) has grown "
        f"{growth:.0f}-fold by then, at most 2-fold per layer {tick(growth <= 2**layers)}.",
        layers < 50 and growth <= 2**layers,
    )


raw_does_not_work = untestable("003", _T3, "raw dot products “simply” do not “work in practice”", NEEDS_TRAINING)


@says("003", _T3, "normalized by row sum, “negative values still cause issues”")
def row_sum_negative() -> CheckResult:
    s = draw(1000, 8, seed=10)
    negative = float((by_sum(s) < 0).any(-1).double().mean())
    worst = by_sum(tensor(3, -2, -0.999)).abs().max()
    return judged(
        f"{negative:.0%} of 1000 random rows get a negative weight, and a sum near 0 any size: (3, −2, −0.999) "
        f"reaches {worst:.0f}.",
        negative > 0 and float(worst) > 1,
    )


@says("003", _T3, "normalized by row sum, “all attention patterns are too uniform”")
def row_sum_uniform() -> CheckResult:
    s = draw(1000, 16, seed=11)
    sharper = float((by_sum(s).abs().amax(-1) > regard.solve(s).weights.amax(-1)).double().mean())
    pair = float(by_sum(tensor(0.2, 0.1)).max()), float(softmax(0.2, 0.1).max())
    return judged(
        f"The largest weight exceeds softmax's in {sharper:.0%} of 1000 random rows; with positive scores, too: (0.2, "
        f"0.1) gives {pair[0]:.2f}, softmax {pair[1]:.2f}.",
        sharper == 0 and pair[0] <= pair[1],
    )


@says("003", _T3, "ReLU + normalization “actually works”")
def relu_works() -> CheckResult:
    s = draw(2000, 4, seed=12)
    broken = by_relu(s).isnan().any(-1)
    negative = (s <= 0).all(-1)
    return judged(
        f"Unless every score of a row is negative: then it is 0/0, NaN, in {float(broken.double().mean()):.0%} of "
        f"random rows of 4 keys, and in no others {tick(bool((broken == negative).all()))}.",
        not bool(broken.any()),
        bool((broken == negative).all()),
    )


@says("003", _T3, "ReLU(QKᵀ) with normalization is “Linear Attention”, “O(n) instead of O(n²)”")
def relu_is_linear() -> CheckResult:
    q, k, v = (draw(48, 4, seed=i) for i in (1, 2, 3))
    outside = int(torch.linalg.matrix_rank((q @ k.mT).relu()))
    inside = int(torch.linalg.matrix_rank(q.relu() @ k.relu().mT))
    both = (q.relu() @ k.relu().mT) @ v, q.relu() @ (k.relu().mT @ v)
    return judged(
        f"Not as printed: ReLU(QKᵀ) of 48 tokens, d = 4, has rank {outside}, so no product of thin factors replaces "
        f"its n² entries. With ReLU on q and k before the product the rank is {inside}, and (QKᵀ)V and Q(KᵀV) "
        f"{how_close(*both)}: that is O(n).",
        outside <= 4,
        inside <= 4 and agree(*both),
    )


relu_in_production = untestable("003", _T3, "ReLU attention “is used in some production systems”", "It names none.")
relu_degrades = untestable("003", _T3, "with ReLU “performance degrades 5-15% on most benchmarks”", NEEDS_TRAINING)


@says("003", _T3, "“ReLU causes sparsity (many exact zeros), losing information”")
def relu_is_sparse() -> CheckResult:
    zeros = float((by_relu(draw(500, 32, seed=13)) == 0).double().mean())
    soft = int((regard.solve(draw(500, 32, seed=13)).weights == 0).sum())
    near, far = tensor(3, 2, -0.1), tensor(3, 2, -5)
    blind = agree(by_relu(near), by_relu(far)) and not agree(regard.solve(near).weights, regard.solve(far).weights)
    return judged(
        f"{zeros:.0%} of the weights of random rows are exactly 0 (softmax: {soft}); (3, 2, −0.1) and (3, 2, −5) get "
        f"the same weights, with softmax they do not {tick(blind)}.",
        zeros > 0.1 and soft == 0 and blind,
    )


@says("003", _T3, "ReLU: “No exponential emphasis means weaker ability to focus sharply”")
def relu_focuses_less() -> CheckResult:
    positive, one = tensor(3, 2, 1), tensor(1, -1, -1)
    frozen = agree(by_relu(10 * positive), by_relu(positive))
    peaks = float(by_relu(positive).max()), float(regard.solve(10 * positive).weights.max())
    single = float(by_relu(one).max()), float(regard.solve(one).weights.max())
    return judged(
        f"Among positive scores: (3, 2, 1) at any scale {tick(frozen)} gives at most {peaks[0]:.2f}, softmax at scale "
        f"10 {peaks[1]:.2f}. But (1, −1, −1) gives {single[0]:.2f}, softmax {single[1]:.2f}.",
        frozen and peaks[0] < peaks[1] and single[0] < single[1],
        frozen and peaks[0] < peaks[1],
    )


relu_is_harder = untestable("003", _T3, "ReLU attention is “harder to train”", NEEDS_TRAINING)


@says("003", _T3, "Performers and Linear Transformers “achieve linear complexity”")
def linear_complexity() -> CheckResult:
    q, k, v = (draw(128, 8, seed=i) for i in (1, 2, 3))
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1

    def dense(n: int) -> Tensor:
        kernel = phi_q[:n] @ phi_k[:n].mT
        return kernel @ v[:n] / kernel.sum(-1, keepdim=True)

    def streamed(n: int) -> Tensor:
        return phi_q[:n] @ (phi_k[:n].mT @ v[:n]) / (phi_q[:n] @ phi_k[:n].sum(0)[:, None])

    growth = [multiply_adds(lambda: form(128)) / multiply_adds(lambda: form(64)) for form in (dense, streamed)]  # noqa: B023
    return judged(
        f"With weights ⟨φ(q), φ(k)⟩, φ = elu + 1, the form with an n × n matrix and the one without "
        f"{how_close(streamed(128), dense(128))}; twice the n takes {growth[0]:.0f} and {growth[1]:.0f} times the "
        "multiply-adds.",
        agree(streamed(128), dense(128)) and growth == [4, 2],
    )


@says("003", _T3, "softmax is “a differentiable, learnable routing mechanism”")
def differentiable_routing() -> CheckResult:
    q, k, v = (draw(1, 1, 4, 3, seed=i).requires_grad_() for i in (1, 2, 3))

    def slopes(temperature: float) -> list[float]:
        out = regard.attention(q, k, v, problem=Transport(temperature=temperature))
        return [float(x.norm()) for x in torch.autograd.grad(out.square().sum(), (q, k))]

    soft, hard = slopes(1.0), slopes(0.0)
    return judged(
        f"The gradient's norm to queries and keys is {show(soft, 2)}; hard routing (τ = 0) has {show(hard, 0)}.",
        min(soft) > 0 and max(hard) == 0,
    )


linear_underperforms = untestable(
    "003", _T3, "they “consistently underperform” on long range, precise selection, few-shot learning", NEEDS_TRAINING
)
right_bias = untestable("003", _T3, "the exponential is “the right inductive bias”", "No measure of right is given.")

# --- brain teaser 4 ---------------------------------------------------------------------------------------------------


@says("003", _T4, "“softmax(−∞) = 0”")
def softmax_of_minus_infinity() -> CheckResult:
    alone, beside = tensor(-INF).softmax(-1), softmax(-INF, 0.0)
    return judged(
        f"In a row with a finite score beside it: {show(beside[:1], 0)}. Alone it is {show(alone)}.",
        bool((alone == 0).all()),
        float(beside[0]) == 0,
    )


@says("003", _T4, "dividing by 2.8 + 1.2 − ∞ − ∞: “You can't divide by infinity. The math breaks immediately.”")
def division_by_infinity() -> CheckResult:
    p = by_sum(tensor(2.8, 1.2, -INF, -INF))
    return judged(
        f"It gives {show(p, 0)}: a number divided by infinity is 0, ∞/∞ is NaN. The result is not a row of weights.",
        bool(p.isnan().all()),
        bool(p.isnan().any()),
    )


@prints("003", _T4, "masked to zero, (2.8, 1.2, 0, 0)/sum = {}", "0.70 0.30 0 0")
def masked_to_zero() -> Tensor:
    return by_sum(tensor(2.8, 1.2, 0, 0))


@prints("003", _T4, "(−1, −2, 0, 0)/sum = {}", "-0.33 -0.67 0 0")
def negative_scores_by_sum() -> Tensor:
    return by_sum(tensor(-1, -2, 0, 0))


@says("003", _T4, "when past tokens have negative scores “you're back to the negative attention problem”")
def negative_scores_problem() -> CheckResult:
    all_negative, mixed = by_sum(tensor(-1, -2)), by_sum(tensor(3, -2))
    return judged(
        f"With scores of both signs: (3, −2) gives {show(mixed, 0)}. All negative, the sum is negative as well: (−1, "
        f"−2) gives {show(all_negative, 2)}, positive, but the worse key gets more.",
        bool((all_negative < 0).any()),
        bool((mixed < 0).any()) and float(all_negative[1]) > float(all_negative[0]) > 0,
    )


@says("003", _T4, "“this happens constantly during training”")
def happens_constantly() -> CheckResult:
    s = draw(2000, 8, seed=14)
    share = float((by_sum(s) < 0).any(-1).double().mean())
    as_said = False  # of scores during training nothing is computed here
    return judged(
        f"Before training: {share:.0%} of rows of 8 random scores get a negative weight. This does not show "
        "what happens during training.",
        as_said,
        share > 0.5,
    )


@says("003", _T4, "−∞ masking is “mathematically clean and handles all edge cases”")
def all_edge_cases() -> CheckResult:
    empty, defined = fully_masked_row()
    good = bool((softmax(-INF, 0.0, -INF) == tensor(0, 1, 0)).all())
    return judged(
        f"All but one: a row without any admissible key gives {show(empty)} (regard returns "
        f"{show(defined.abs().max()[None], 0)}). One key left is fine {tick(good)}.",
        bool(empty.isfinite().all()),
        good,
    )


@says("003", _T4, "masking works because “softmax's exponential converts −∞ to exactly 0”")
def exponential_masks() -> CheckResult:
    masked = tensor(2.8, 1.2, -INF, -INF)
    problem = Transport(Tsallis(2.0), temperature=3.0)
    p = regard.solve(masked, problem).weights
    good = regard.certify(masked, p, problem).holds(1e-9)
    soft = softmax(2.8, 1.2, -INF, -INF)
    return judged(
        f"Softmax's does {tick(bool((soft[2:] == 0).all()))}, but no exponential is needed: a mask is a prior of 0, "
        f"and p = 0 there for every regulariser. Sparsemax at τ = 3: {show(p, 2)} {tick(good)}.",
        bool((soft[2:] == 0).all()) and not (good and bool((p[2:] == 0).all())),
        bool((soft[2:] == 0).all()),
    )


@prints("003", _T4, "exp(−∞) = {}", "0")
def exp_of_minus_infinity() -> Tensor:
    return tensor(-INF).exp()


@prints_and_says("003", _T4, "exp(−100) ≈ {}", "0")
def exp_of_minus_hundred(printed: tuple[str, ...]) -> CheckResult:
    true = float(tensor(-100.0).exp())
    return judged(
        f"{true:.1e}. What counts is the distance to the row's best: softmax(−100, −100) = "
        f"{show(softmax(-100, -100), 1)}.",
        all_match(printed, [true]),
    )


@prints("003", _T4, "exp(0) = {}", "1")
def exp_of_zero() -> Tensor:
    return tensor(0.0).exp()


@prints("003", _T4, "exp(10) ≈ {}", "22k")
def exp_of_ten() -> Tensor:
    return tensor(10.0).exp()


@says("003", _T4, "one mechanism “handles both the causality constraint and the attention distribution”")
def two_birds() -> CheckResult:
    s = draw(6, 6, seed=15)
    as_prior = regard.solve(s, Transport(prior=Causal())).weights
    as_scores = s.masked_fill(torch.ones(6, 6).triu(1).bool(), -INF).softmax(-1)
    return judged(
        f"A prior that is 0 in the future and −∞ in the scores {how_close(as_prior, as_scores)}.",
        agree(as_prior, as_scores),
    )


CLAIMS = collect(globals())
