"""The claims of document 003, a tutorial on softmax in attention, each with its check. Many are printed numbers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import AuxRequest, Causal, Free, Transport, Tsallis

from .teasers import by_relu, by_sum, naive
from .verdicts import (
    Finding,
    agree,
    all_match,
    collect,
    distance,
    draw,
    how_close,
    increasing,
    judged,
    multiply_adds,
    prints,
    prints_and_says,
    says,
    show,
    tensor,
    tick,
    untestable,
)

_PROBLEM, _SOLUTION, _REALLY, _MASKING = (
    "Raw Similarity Scores Are Meaningless",
    "Converting Scores to Probabilities",
    "What Is Softmax, Really?",
    "Causal Masking: The Elegant Trick",
)
_T1, _T2, _T3, _T4 = "Brain Teaser #1", "Brain Teaser #2", "Brain Teaser #3", "Brain Teaser #4"
_KNOB, _TOGETHER, _AHA, _CONTENTS = (
    "The Temperature Knob",
    "Putting It All Together",
    "“Aha” Moment",
    "Table of Contents",
)
_NO_SOURCE = "It carries no source, and only training can tell: a hypothesis that needs an experiment."

EXAMPLE = tensor(2.8, 1.2, 0.5, 3.1)  # cat, sat, on, the
INF = math.inf


def softmax(*scores: float, temperature: float = 1.0) -> Tensor:
    return regard.solve(tensor(*scores), Transport(temperature=temperature)).weights


def entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def jacobian_norm(s: Tensor) -> float:
    """Largest singular value of ∂ softmax / ∂ s."""
    found = torch.autograd.functional.jacobian(lambda x: regard.solve(x).weights, s)
    assert isinstance(found, Tensor)
    return float(torch.linalg.matrix_norm(found, 2))


brain_teaser_5 = untestable(
    "003",
    _CONTENTS,
    "“Brain Teaser #5”, “Practical Implications for AI Leaders”",
    "Listed in the contents, never written. `regard lab teasers 5` shows what #5 would have had to say.",
)

# --- scores and probabilities -----------------------------------------------------------------------------------------


@says("003", _PROBLEM, "scores “could be negative. They could sum to 47 or 0.3”")
def scores_are_arbitrary() -> Finding:
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
def raw_scores_as_weights() -> Finding:
    raw = regard.certify(EXAMPLE, EXAMPLE)
    constant = float(EXAMPLE @ torch.ones(4, dtype=torch.float64))
    return judged(
        f"Values that are all 1 come back as {constant:.1f}: the row's mass is off by {float(raw.row_residual):.1f}.",
        float(raw.row_residual) > 1e-6 and abs(constant - 1) > 1e-6,
    )


@says("003", _PROBLEM, "“You need a probability distribution. You need softmax.”")
def needs_softmax() -> Finding:
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
def all_positive() -> Finding:
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
def sums_to_one() -> Finding:
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
def amplifies_differences() -> Finding:
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
def differentiable() -> Finding:
    s = draw(3, 5, seed=5).requires_grad_()
    fine = torch.autograd.gradcheck(lambda x: regard.solve(x).weights, (s,), raise_exception=False)
    return judged(f"Its derivative passes the check by finite differences {tick(fine)}.", fine)


# --- production softmax -----------------------------------------------------------------------------------------------


@says("003", _REALLY, "shift, exponentiate, normalise: the production code computes the textbook formula")
def production_softmax() -> Finding:
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
def each_step_has_a_reason() -> Finding:
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
def masked_weight_is_zero() -> Finding:
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


def _fully_masked() -> tuple[Tensor, Tensor]:
    """A row in which every key is masked: softmax's answer, and regard's output."""
    q, k, v = (draw(1, 1, 2, 4, seed=i) for i in (1, 2, 3))
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    return tensor(-INF, -INF).softmax(-1), regard.attention(q, k, v, attn_mask=nothing)


@says("003", _MASKING, "“No special-case code … the math takes care of the rest.”")
def no_special_case() -> Finding:
    empty, defined = _fully_masked()
    p = regard.solve(EXAMPLE.expand(4, 4), Transport(prior=Causal())).weights
    good = agree(p.sum(-1), torch.ones(4, dtype=torch.float64)) and float(p.triu(1).abs().max()) == 0
    return judged(
        f"For rows with at least one key {tick(good)}. A row that is masked altogether (padding) gives softmax "
        f"{show(empty)}; it needs a rule, in regard output {show(defined.abs().max()[None], 0)}.",
        bool(empty.isfinite().all()),
        good,
    )


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
def subtracts() -> Finding:
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
def scenarios_look_similar() -> Finding:
    a, b = tensor(10, 9, 8), tensor(100, 9, 8)
    simple = float((by_sum(a) - by_sum(b)).abs().sum() / 2)
    exponential = float((regard.solve(a).weights - regard.solve(b).weights).abs().sum() / 2)
    return judged(
        f"They differ by {simple:.2f} in total variation, more than under softmax ({exponential:.2f}).",
        simple < exponential,
    )


@says("003", _T1, "simple normalization has “No relative emphasis”")
def no_emphasis() -> Finding:
    a = tensor(10, 9, 8)
    frozen = agree(by_sum(10 * a), by_sum(a))
    peaks = [float(regard.solve(c * a).weights.max()) for c in (1, 10)]
    return judged(
        f"It is blind to scale: ten times the scores give the same weights {tick(frozen)}, so there is no temperature; "
        f"softmax's largest goes from {peaks[0]:.2f} to {peaks[1]:.2f}.",
        frozen and peaks[1] > peaks[0],
    )


@prints("003", _T1, "softmax(10, 9, 8) = {}", "0.47 0.33 0.20")
def scenario_a_softmax() -> Tensor:
    return softmax(10, 9, 8)


@prints("003", _T1, "softmax(100, 9, 8) = {}", "~1.0 ~0.0 ~0.0")
def scenario_b_softmax() -> Tensor:
    return softmax(100, 9, 8)


@says("003", _T1, "“emphasizing what's important while still maintaining gradient flow”")
def keeps_gradient_flow() -> Finding:
    a, b = jacobian_norm(tensor(10, 9, 8)), jacobian_norm(tensor(100, 9, 8))
    return judged(
        f"While gaps are moderate: the Jacobian's norm is {a:.2f} in scenario A, and {b:.0e} in scenario B, where "
        "nothing flows.",
        min(a, b) > 1e-2,
        a > 1e-2,
    )


teams_remove_it = untestable(
    "003", _T1, "teams that remove the exponential “fail to train or produce mediocre results”", _NO_SOURCE
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
def average_magnitude(printed: tuple[str, ...]) -> Finding:
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
def vanishing_gradient() -> Finding:
    norms = [jacobian_norm(s) for s in (tensor(5, 4.4, 3.9), tensor(45, 40, 35), tensor(450, 400, 350))]
    return judged(
        f"The Jacobian's norm is {norms[0]:.2f} at (5, 4.4, 3.9), {norms[1]:.3f} at (45, 40, 35), {norms[2]:.0e} at "
        "ten times that.",
        norms[0] > 10 * norms[1] > 0 and norms[2] < 1e-6,
    )


@says("003", _T2, "“there's no signal to optimize”")
def no_signal() -> Finding:
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


def _at_random(d: int, scale: float | None) -> tuple[float, float]:
    """Mean largest weight and mean entropy over 128 keys, for standard normal queries and keys."""
    q, k = draw(1, 1, 256, d, seed=d), draw(1, 1, 128, d, seed=d + 1)
    _, aux = regard.attention(q, k, k, scale=scale, return_aux=AuxRequest(max_weight=True, entropy=True))
    assert aux.max_weight is not None and aux.entropy is not None
    return float(aux.max_weight.mean()), float(aux.entropy.mean())


@says("003", _T2, "without scaling attention is “mostly one-hot”")
def mostly_one_hot() -> Finding:
    found = {d: (_at_random(d, 1.0), _at_random(d, None)) for d in (64, 512)}
    return judged(
        f"Random q, k, 128 keys: the mean largest weight is {found[64][0][0]:.2f} at d_k = 64 and "
        f"{found[512][0][0]:.2f} at 512; with scaling {found[64][1][0]:.2f} and {found[512][1][0]:.2f}.",
        all(plain[0] > 0.5 > scaled[0] for plain, scaled in found.values()),
    )


many_tokens = untestable(
    "003", _T2, "“Real language requires attending to multiple tokens”", "A statement on language; no measure is given."
)
slower_unscaled = untestable("003", _T2, "unscaled, a small transformer trains “3-5x slower”", _NO_SOURCE)
worse_unscaled = untestable("003", _T2, "unscaled, “10-20% worse perplexity”", _NO_SOURCE)
peaked_unscaled = untestable(
    "003", _T2, "unscaled, a trained model's patterns are “far too peaked”",
    "After training: needs an experiment. Before it, see the row on one-hot attention above.",
)  # fmt: skip


@says("003", _T2, "“If Q and K have unit variance, then QKᵀ has variance d_k”")
def variance_of_dot_products() -> Finding:
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
def restores_unit_variance() -> Finding:
    found = [float(((draw(4000, d, seed=1) * draw(4000, d, seed=2)).sum(-1) / math.sqrt(d)).var()) for d in (64, 512)]
    return judged(
        f"Measured at d_k = 64 and 512: {show(found, 1)} (for independent q, k of mean 0).",
        all(abs(x - 1) < 0.1 for x in found),
    )


@says("003", _T2, "scaling is “keeping values in the stable range for softmax”")
def stable_range() -> Finding:
    s = (draw(64, 2048, seed=1) @ draw(2048, 128, seed=2)).float()
    scaled = s / math.sqrt(2048)
    textbook = [bool(naive(x).isfinite().all()) for x in (s, scaled)]
    shifted = [bool(regard.solve(x).weights.isfinite().all()) for x in (s, scaled)]
    return judged(
        f"For the textbook formula: in float32 at d_k = 2048 scores up to {s.max():.0f} overflow "
        f"{tick(not textbook[0])}, scaled ones, up to {scaled.max():.1f}, do not {tick(textbook[1])}. Shifted, softmax "
        f"is finite with both {tick(all(shifted))}: what scaling saves there is the gradient.",
        not shifted[0] and shifted[1],
        not textbook[0] and textbook[1] and all(shifted),
    )


@says("003", _T2, "entropy “consistently below 1.0” indicates over-peaked attention")
def entropy_below_one() -> Finding:
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


# --- brain teaser 3 ---------------------------------------------------------------------------------------------------


@says("003", _T3, "raw dot products: weights “can be negative”")
def raw_can_be_negative() -> Finding:
    share = float((draw(200, 32, seed=7) @ draw(32, 200, seed=8) < 0).double().mean())
    return judged(f"{share:.0%} of them are, for random q and k.", share > 0)


@says("003", _T3, "raw dot products: representations “become unbounded and explode”")
def raw_explodes() -> Finding:
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


raw_does_not_work = untestable("003", _T3, "raw dot products “simply” do not “work in practice”", _NO_SOURCE)


@says("003", _T3, "normalized by row sum, “negative values still cause issues”")
def row_sum_negative() -> Finding:
    s = draw(1000, 8, seed=10)
    negative = float((by_sum(s) < 0).any(-1).double().mean())
    worst = by_sum(tensor(3, -2, -0.999)).abs().max()
    return judged(
        f"{negative:.0%} of 1000 random rows get a negative weight, and a sum near 0 any size: (3, −2, −0.999) "
        f"reaches {worst:.0f}.",
        negative > 0 and float(worst) > 1,
    )


@says("003", _T3, "normalized by row sum, “all attention patterns are too uniform”")
def row_sum_uniform() -> Finding:
    s = draw(1000, 16, seed=11)
    sharper = float((by_sum(s).abs().amax(-1) > regard.solve(s).weights.amax(-1)).double().mean())
    pair = float(by_sum(tensor(0.2, 0.1)).max()), float(softmax(0.2, 0.1).max())
    return judged(
        f"The largest weight exceeds softmax's in {sharper:.0%} of 1000 random rows; with positive scores, too: (0.2, "
        f"0.1) gives {pair[0]:.2f}, softmax {pair[1]:.2f}.",
        sharper == 0 and pair[0] <= pair[1],
    )


@says("003", _T3, "ReLU + normalization “actually works”")
def relu_works() -> Finding:
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
def relu_is_linear() -> Finding:
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


relu_in_production = untestable("003", _T3, "ReLU attention “is used in some production systems”", "Names none.")
relu_degrades = untestable("003", _T3, "with ReLU “performance degrades 5-15% on most benchmarks”", _NO_SOURCE)


@says("003", _T3, "“ReLU causes sparsity (many exact zeros), losing information”")
def relu_is_sparse() -> Finding:
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
def relu_focuses_less() -> Finding:
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


relu_is_harder = untestable("003", _T3, "ReLU attention is “harder to train”", _NO_SOURCE)


@says("003", _T3, "Performers and Linear Transformers “achieve linear complexity”")
def linear_complexity() -> Finding:
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
def differentiable_routing() -> Finding:
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
    "003", _T3, "they “consistently underperform” on long range, precise selection, few-shot learning", _NO_SOURCE
)
right_bias = untestable("003", _T3, "the exponential is “the right inductive bias”", "No measure of right is given.")

# --- brain teaser 4 ---------------------------------------------------------------------------------------------------


@says("003", _T4, "“softmax(−∞) = 0”")
def softmax_of_minus_infinity() -> Finding:
    alone, beside = tensor(-INF).softmax(-1), softmax(-INF, 0.0)
    return judged(
        f"In a row with a finite score beside it: {show(beside[:1], 0)}. Alone it is {show(alone)}.",
        bool((alone == 0).all()),
        float(beside[0]) == 0,
    )


@says("003", _T4, "dividing by 2.8 + 1.2 − ∞ − ∞: “You can't divide by infinity. The math breaks immediately.”")
def division_by_infinity() -> Finding:
    p = by_sum(tensor(2.8, 1.2, -INF, -INF))
    return judged(
        f"It gives {show(p, 0)}: a number divided by infinity is 0, ∞/∞ is NaN. Either way no row.",
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
def negative_scores_problem() -> Finding:
    all_negative, mixed = by_sum(tensor(-1, -2)), by_sum(tensor(3, -2))
    return judged(
        f"With scores of both signs: (3, −2) gives {show(mixed, 0)}. All negative, the sum is negative as well: (−1, "
        f"−2) gives {show(all_negative, 2)}, positive, but the worse key gets more.",
        bool((all_negative < 0).any()),
        bool((mixed < 0).any()) and float(all_negative[1]) > float(all_negative[0]) > 0,
    )


@says("003", _T4, "“this happens constantly during training”")
def happens_constantly() -> Finding:
    s = draw(2000, 8, seed=14)
    share = float((by_sum(s) < 0).any(-1).double().mean())
    as_said = False  # of scores during training nothing is computed here
    return judged(
        f"Before training: {share:.0%} of rows of 8 random scores get a negative weight. Of training this says "
        "nothing.",
        as_said,
        share > 0.5,
    )


@says("003", _T4, "−∞ masking is “mathematically clean and handles all edge cases”")
def all_edge_cases() -> Finding:
    empty, defined = _fully_masked()
    good = bool((softmax(-INF, 0.0, -INF) == tensor(0, 1, 0)).all())
    return judged(
        f"All but one: a row without any key gives {show(empty)} (regard returns "
        f"{show(defined.abs().max()[None], 0)}). One key left is fine {tick(good)}.",
        bool(empty.isfinite().all()),
        good,
    )


@says("003", _T4, "masking works because “softmax's exponential converts −∞ to exactly 0”")
def exponential_masks() -> Finding:
    masked = tensor(2.8, 1.2, -INF, -INF)
    problem = Transport(Tsallis(2.0), temperature=3.0)
    p = regard.solve(masked, problem).weights
    good = regard.certify(masked, p, problem).holds(1e-9)
    soft = softmax(2.8, 1.2, -INF, -INF)
    return judged(
        f"Softmax's does {tick(bool((soft[2:] == 0).all()))}, but it takes no exponential: a mask is a prior of 0, and "
        f"p = 0 there for every regulariser. Sparsemax at τ = 3: {show(p, 2)} {tick(good)}.",
        bool((soft[2:] == 0).all()) and not (good and bool((p[2:] == 0).all())),
        bool((soft[2:] == 0).all()),
    )


@prints("003", _T4, "exp(−∞) = {}", "0")
def exp_of_minus_infinity() -> Tensor:
    return tensor(-INF).exp()


@prints_and_says("003", _T4, "exp(−100) ≈ {}", "0")
def exp_of_minus_hundred(printed: tuple[str, ...]) -> Finding:
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
def two_birds() -> Finding:
    s = draw(6, 6, seed=15)
    as_prior = regard.solve(s, Transport(prior=Causal())).weights
    as_scores = s.masked_fill(torch.ones(6, 6).triu(1).bool(), -INF).softmax(-1)
    return judged(
        f"A prior that is 0 in the future and −∞ in the scores {how_close(as_prior, as_scores)}.",
        agree(as_prior, as_scores),
    )


# --- the temperature knob ---------------------------------------------------------------------------------------------


@says("003", _KNOB, "temperature-scaled softmax is softmax(x / temperature)")
def temperature_divides() -> Finding:
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
def temperature_orders() -> Finding:
    plans = torch.stack([softmax(3, 2, 1, temperature=t) for t in (0.5, 1.0, 2.0)])
    return judged(
        f"Entropy at T = 0.5, 1, 2: {show(entropy(plans), 2)} nats of {math.log(3):.2f}.", increasing(entropy(plans))
    )


@says("003", _KNOB, "“Higher temperature = more creative/diverse outputs”, lower “more focused”")
def temperature_diversity() -> Finding:
    logits = draw(100, 50, seed=17, scale=2)
    plans = torch.stack([regard.solve(logits, Transport(temperature=t)).weights for t in (0.25, 0.5, 1.0, 2.0, 4.0)])
    rises = bool((entropy(plans).diff(dim=0) > 0).all())
    return judged(
        f"Diverse as measured by the entropy of what is sampled: it rises with T in each of 100 rows {tick(rises)}. "
        "(That is the temperature of the output layer, not of attention.)",
        rises,
    )


@says("003", _KNOB, "temperatures per head allow heads “to have different sharpness”, and can be learned")
def temperature_per_head() -> Finding:
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
def temperature_reveals() -> Finding:
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


chatgpt = untestable("003", _KNOB, "“This is why ChatGPT has a temperature parameter”", "A product's reasons.")
layers_differ = untestable(
    "003", _KNOB, "lower layers “learn higher temperatures”, upper layers “lower temperatures”", _NO_SOURCE
)
small_gain = untestable(
    "003", _KNOB, "learned temperatures: “improvements of 1-3% on complex reasoning tasks”", _NO_SOURCE
)

# --- putting it all together ------------------------------------------------------------------------------------------


@says("003", _TOGETHER, "attention is similarity, scaling, masking, softmax, weighted sum")
def five_steps() -> Finding:
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
def without_scaling() -> Finding:
    slopes = []
    for scale in (None, 1.0):
        q, k, v = (draw(1, 1, n, 2048, seed=i) for i, n in enumerate((16, 64, 64)))
        mask = torch.zeros(16, 64, dtype=torch.float64, requires_grad=True)
        out = regard.attention(q, k, v, attn_mask=mask, scale=scale)
        (slope,) = torch.autograd.grad((out * draw(16, 2048, seed=9)).sum(), mask)
        slopes.append(float(slope.norm(dim=-1).median()))
    peaked = _at_random(2048, 1.0)[0], _at_random(2048, None)[0]
    return judged(
        f"d_k = 2048, random: the median gradient to a row's scores shrinks to {slopes[1] / slopes[0]:.0e} of its "
        f"size; mean largest weight {peaked[0]:.2f} instead of {peaked[1]:.2f}.",
        slopes[1] < 0.1 * slopes[0] and peaked[0] > 0.5 > peaked[1],
    )


@says("003", _TOGETHER, "“No exponential → negative weights, weak emphasis”")
def without_exponential() -> Finding:
    simple = by_sum(tensor(3, -2, 1))
    sparse = regard.solve(torch.stack([tensor(3, -2, 1), tensor(10, 9, 8)]), Transport(Tsallis(2.0))).weights
    sound = bool((sparse >= 0).all()) and bool((sparse.amax(-1) >= 0.99).all())
    return judged(
        f"True of s/Σs ({show(simple, 1)}). Sparsemax has no exponential either: (3, −2, 1) gives {show(sparse[0], 0)} "
        f"and (10, 9, 8) {show(sparse[1], 0)}, no sign and sharper than softmax.",
        bool((simple < 0).any()) and not sound,
        bool((simple < 0).any()),
    )


@says("003", _TOGETHER, "“No normalization → unbounded outputs”")
def without_normalization() -> Finding:
    masses = [float(regard.solve(c * EXAMPLE, Transport(marginal=Free())).weights.sum()) for c in (1, 2, 4)]
    longer = float(regard.solve(EXAMPLE.repeat(8), Transport(marginal=Free())).weights.sum())
    return judged(
        f"exp(s) without a sum (a free marginal): values of 1 come back as {masses[0]:.0f}, {masses[1]:.0f}, "
        f"{masses[2]:.0f} at 1, 2, 4 times the scores, and {longer / masses[0]:.0f}-fold with 8 times the keys.",
        increasing(masses) and masses[-1] > 1e3 and longer > 7 * masses[0],
    )


@says("003", _TOGETHER, "“No masking → information leakage from future tokens”")
def without_masking() -> Finding:
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
