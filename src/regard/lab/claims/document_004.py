"""The claims of document 004, a paper that derives softmax by maximum likelihood and by maximum entropy.

The names α, β, θ, v and v_i are those of the paper; its equations are numbered as there.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import AuxRequest, Transport, Tsallis

from ..numbers import agree, draw, how_close, increasing, multiply_adds, show, tensor, tick
from .claim import CheckResult, collect, judged, prints, says, untestable
from .rows import entropy, tangents, weights

_SOFTMAX, _FIGURE, _LIKELIHOOD = "Estimation of Softmax Function", "Figure 1", "Maximum Likelihood Estimation"
_ENTROPY, _CONCLUSION, _APPENDIX = "Maximum Entropy Approach", "Conclusion", "Appendix A"

ALPHA, BETA = 0.6, 2.5
_Q, _K, _V = draw(4, seed=1), draw(5, 4, seed=2), draw(5, 3, seed=3)


def _precision() -> Tensor:
    """θ of Eq. 3."""
    return (ALPHA * _K @ _Q).exp()


def _log_density(observed: Tensor, v: Tensor, theta: Tensor) -> Tensor:
    """log g of Eq. 2."""
    return 0.5 * (theta * BETA / (2 * math.pi)).log() - theta * BETA / 2 * (v - observed) ** 2


def _attention(scale: float = ALPHA, values: Tensor = _V) -> Tensor:
    return regard.attention(_Q[None, None, None], _K[None, None], values[None, None], scale=scale)[0, 0, 0]


def _integral(density: Tensor, at: Tensor) -> float:
    return float(torch.trapezoid(density, at))


@says("004", "Title", "“Deriving the Scaled-Dot-Function”")
def scale_is_not_derived() -> CheckResult:
    alphas = (0.1, 1 / math.sqrt(4), 2.0)
    estimates, outputs = [], []
    for alpha in alphas:
        theta = (alpha * _K @ _Q).exp()
        estimates.append((theta[:, None] * _V).sum(0) / theta.sum())
        outputs.append(_attention(alpha))
    likely = agree(torch.stack(estimates), torch.stack(outputs))
    return judged(
        f"The form, not the scale: for α = 0.1, 1/√d and 2 alike the estimate and attention with scale α "
        f"{how_close(torch.stack(estimates), torch.stack(outputs))}; the derivation does not single out 1/√d.",
        not likely,
        likely,
    )


@says("004", "Abstract, Conclusion", "values, keys “and the query vector” are modelled as Gaussian")
def only_values_are_random() -> CheckResult:
    at = torch.linspace(-60, 60, 200001, dtype=torch.float64)
    theta = tensor(0.8)
    over_values = _integral(_log_density(at, tensor(2.0), theta).exp(), at)
    # one-dimensional key, q = 1, α = 1, and v − v_i = 2
    over_keys = _integral(_log_density(tensor(0.0), tensor(2.0), at.clamp(max=40).exp()).exp(), at)
    return judged(
        f"Only the values: Eq. 2 integrates to {over_values:.3f} over v_i, but over k_i (at |v − v_i| = 2) to "
        f"{over_keys:.3f}. Keys and query are given.",
        abs(over_values - 1) < 1e-6 and abs(over_keys - 1) < 1e-3,
        abs(over_values - 1) < 1e-6,
    )


@says("004", _SOFTMAX, "“v, q, and k all reside in” R^d")
def values_share_the_dimension() -> CheckResult:
    wide = draw(5, 9, seed=4)
    p = weights(ALPHA * _K @ _Q)
    try:
        found = _attention(values=wide)
    except (ValueError, RuntimeError) as refused:
        return judged(f"Values of another dimension are refused: {refused}", True)
    return judged(
        f"Only q and k must: with d = 4 and values in R^{wide.shape[1]} attention and Σ w v "
        f"{how_close(found, p @ wide)}.",
        False,
        agree(found, p @ wide),
    )


@says("004", _SOFTMAX, "q, k and v are “low-dimensional projections” of x, R^d a subspace of R^m")
def projections() -> CheckResult:
    w, x = draw(3, 10, seed=12), draw(10, 50, seed=13)
    onto = torch.linalg.pinv(w) @ w  # the orthogonal projection on the subspace that w sees
    seen = int(torch.linalg.matrix_rank(onto))
    return judged(
        f"A map from R^10 to R^3 sees x through a projection on a subspace of dimension {seen}: W x and W P x "
        f"{how_close(w @ x, w @ onto @ x)}, and P P and P {how_close(onto @ onto, onto)}.",
        seen == 3 and agree(w @ x, w @ onto @ x) and agree(onto @ onto, onto),
    )


@says("004", _SOFTMAX, "the score is “the cross-correlation value, which is the inner product”")
def cross_correlation() -> CheckResult:
    full = F.conv1d(_Q[None, None], _K[:1, None], padding=3)[0, 0]
    inner = _K[0] @ _Q
    return judged(
        f"The cross-correlation at lag 0, one of its {len(full)} values: it and q·k = {inner:.3f} "
        f"{how_close(full[3], inner)}.",
        agree(full[3], inner),
    )


@says("004", _FIGURE, "the output is “the weighted summation of the value vectors”, sequence length 3")
def figure_one() -> CheckResult:
    w = (ALPHA * _K[:3] @ _Q).softmax(-1)
    by_hand = sum((w[i] * _V[i] for i in range(3)), torch.zeros(3, dtype=torch.float64))
    out = regard.attention(_Q[None, None, None], _K[None, None, :3], _V[None, None, :3], scale=ALPHA)[0, 0, 0]
    return judged(f"w1 v1 + w2 v2 + w3 v3 and attention {how_close(by_hand, out)}.", agree(by_hand, out))


@prints("004", _SOFTMAX, "e is “approximately equal to {}”", "2.71828")
def number_e() -> Tensor:
    return tensor(1.0).exp()


@says("004", _SOFTMAX, "Eq. 1, α “a positive scaling factor”")
def equation_1() -> CheckResult:
    w = (ALPHA * _K @ _Q).exp() / (ALPHA * _K @ _Q).exp().sum()
    read = _attention(values=torch.eye(5).double())
    return judged(f"Eq. 1 and attention with scale = α {how_close(read, w)}.", agree(read, w))


@says("004", _SOFTMAX, "a larger α gives weights “more concentrated”, a smaller “more uniform”")
def alpha_concentrates() -> CheckResult:
    alphas = (0.1, 0.3, 1.0, 3.0)
    spread = torch.stack([_attention(a, torch.eye(5).double()) for a in alphas])
    h = entropy(spread)
    return judged(
        f"Entropy at α = 0.1 … 3: {show(h, 2)} (uniform: {math.log(5):.2f}); largest weight "
        f"{show(spread.amax(-1), 2)}.",
        increasing(-h) and increasing(spread.amax(-1)),
    )


@says("004", _SOFTMAX, "“positive weights w that sum to 1”")
def positive_and_normalised() -> CheckResult:
    far = tensor(0, -1000)
    w, logs = weights(far), bool(far.log_softmax(-1).isfinite().all())
    total = weights(draw(100, 9, seed=5, scale=3)).sum(-1)
    return judged(
        f"The sums and 1 {how_close(total, torch.ones_like(total))}. Positive in exact arithmetic only: scores (0, "
        f"−1000) give {show(w, 0)} even in float64, while the log-weights are finite {tick(logs)}.",
        bool((w > 0).all()),
        logs and agree(total, torch.ones_like(total)),
    )


@says("004", _SOFTMAX, "“amplifying the weights of key vectors that are most similar”, suppressing others")
def amplifies_the_similar() -> CheckResult:
    s = draw(500, 7, seed=6)
    p = weights(s)
    ordered = bool((s.argsort(-1) == p.argsort(-1)).all())
    ends = bool((p.amax(-1) > 1 / 7).all()) and bool((p.amin(-1) < 1 / 7).all())
    return judged(
        f"500 rows: weights are ordered as the scores {tick(ordered)}, the most similar key has more and the least "
        f"similar less than the uniform share 1/n {tick(ends)}.",
        ordered and ends,
    )


@says("004", _SOFTMAX, "goal: “to derive the softmax function” from maximum likelihood")
def exponential_is_assumed() -> CheckResult:
    linear = tensor(3.0, 2.0, 1.0)  # θ = s in place of Eq. 3
    v = draw(3, seed=7)

    def slope(theta: Tensor, at: Tensor) -> Tensor:
        return -(BETA * theta * (at - v)).sum()

    simple = (linear / linear.sum()) @ v
    exponential = linear.softmax(-1) @ v
    both = max(abs(float(slope(linear, simple))), abs(float(slope(linear.exp(), exponential)))) < 1e-10
    return judged(
        f"Weights θ/Σθ are derived, for any θ; the exponential is an assumption of Eq. 3. With θ = s = (3, 2, 1) the "
        f"same argument yields s/Σs = {show(linear / linear.sum())} (both stationary {tick(both)}).",
        not both,
        both,
    )


@says("004", _LIKELIHOOD, "drop the coordinate index “without loss of generality”")
def coordinates_decouple() -> CheckResult:
    theta = _precision()
    one_by_one = torch.stack([(theta * _V[:, j]).sum() / theta.sum() for j in range(3)])
    joint = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    likelihood = _log_density(_V, joint, theta[:, None]).sum()
    (g,) = torch.autograd.grad(likelihood, joint)
    newton = g / (BETA * theta.sum())  # exact: the likelihood is quadratic
    return judged(
        f"Maximising over all coordinates at once and one by one {how_close(newton, one_by_one)}. (An estimate of β "
        "does need all n·d of them.)",
        agree(newton, one_by_one),
    )


@says("004", _LIKELIHOOD, "Eq. 2 is a Gaussian with variance exp(−α q·k)/β")
def equation_2() -> CheckResult:
    at = torch.linspace(-60, 60, 200001, dtype=torch.float64)
    theta, v = _precision()[0], tensor(0.4)
    g = _log_density(at, v, theta).exp()
    mass, mean = _integral(g, at), _integral(at * g, at)
    spread = _integral((at - mean) ** 2 * g, at)
    variance = math.exp(-ALPHA * float(_K[0] @ _Q)) / BETA
    return judged(
        f"By quadrature: integral {mass:.4f}, variance {spread:.4f}; exp(−α q·k)/β = {variance:.4f}.",
        abs(mass - 1) < 1e-8 and abs(spread - variance) < 1e-8,
    )


def _means() -> tuple[float, float]:
    """The mean of Eq. 2 as a density of v_i (at v = 0.4), and as one of v (at v_i = −1.1)."""
    at = torch.linspace(-60, 60, 200001, dtype=torch.float64)
    theta = _precision()[0]
    of_observed = _integral(at * _log_density(at, tensor(0.4), theta).exp(), at)
    of_v = _integral(at * _log_density(tensor(-1.1), at, theta).exp(), at)
    return of_observed, of_v


@says("004", _LIKELIHOOD, "“v is the mean value of the Gaussian distribution”")
def mean_is_v() -> CheckResult:
    mean, _ = _means()
    return judged(f"By quadrature at v = 0.4, the mean of v_i is {mean:.4f}.", abs(mean - 0.4) < 1e-8)


@says("004", _LIKELIHOOD, "“The mean value of the Gaussian distribution is v_i*”")
def mean_is_observed() -> CheckResult:
    mean, swapped = _means()
    return judged(
        f"At v = 0.4, v_i = −1.1 the mean of the density of v_i is {mean:.4f}. v_i is the mean only if the same "
        f"formula is read as a density of v ({swapped:.4f}), which is not Eq. 2.",
        abs(mean + 1.1) < 1e-8,
        abs(swapped + 1.1) < 1e-8,
    )


@says("004", _LIKELIHOOD, "the variance “doesn't depend on the index coordinate index i”")
def variance_depends_on_i() -> CheckResult:
    variances = 1 / (_precision() * BETA)
    spread = float(variances.max() - variances.min())
    return judged(
        f"i is the time index, and the variance does depend on it: {show(variances, 2)} for five keys. It has no "
        "coordinate index (j) to depend on.",
        spread < 1e-12,
        spread > 0.01 and variances.shape == (5,),
    )


@says("004", _LIKELIHOOD, "Eq. 4: the joint density is a product, its log a sum")
def equation_4() -> CheckResult:
    v, theta = tensor(0.4), _precision()
    product = _log_density(_V[:, 0], v, theta).exp().prod().log()
    reference = torch.distributions.Normal(v, (theta * BETA).rsqrt()).log_prob(_V[:, 0]).sum()
    return judged(
        f"log Π g and Σ log g of torch's own normal distribution {how_close(product, reference)}.",
        agree(product, reference),
    )


@says("004", _LIKELIHOOD, "Eq. 5–6: ∂ log g/∂v = −βθ(v − v_i)")
def equation_6() -> CheckResult:
    v, theta = tensor(0.4).requires_grad_(), _precision()
    (found,) = torch.autograd.grad(_log_density(_V[:, 0], v, theta).sum(), v)
    formula = (-BETA * theta * (v - _V[:, 0])).sum()[None]
    return judged(f"Autograd and the formula, summed over i: {how_close(found, formula)}.", agree(found, formula))


@says("004", _LIKELIHOOD, "Eq. 7–9: v = Σ θ v_i / Σ θ maximises the likelihood")
def equation_9() -> CheckResult:
    theta = _precision()
    best = ((theta * _V[:, 0]).sum() / theta.sum())[None]

    def likelihood(v: Tensor) -> Tensor:
        return _log_density(_V[:, 0], v[:, None], theta).sum(-1)

    around = best + torch.linspace(-3, 3, 601, dtype=torch.float64)
    top = float(around[likelihood(around).argmax()])
    return judged(
        f"Eq. 9 gives {best.item():.3f}; the likelihood on a grid of 601 points around it is largest at {top:.3f}, and "
        f"nowhere above {tick(bool((likelihood(around) <= likelihood(best) + 1e-12).all()))}.",
        abs(top - best.item()) < 1e-9 and bool((likelihood(around) <= likelihood(best) + 1e-12).all()),
    )


@says("004", _LIKELIHOOD, "Eq. 10–11: these weights are softmax, the estimate is attention's output")
def equation_11() -> CheckResult:
    theta = _precision()
    p = theta / theta.sum()
    estimate = p @ _V
    return judged(
        f"θ/Σθ and regard's plan {how_close(p, weights(ALPHA * _K @ _Q))}; Σ w v and attention "
        f"{how_close(estimate, _attention())}.",
        agree(p, weights(ALPHA * _K @ _Q)) and agree(estimate, _attention()),
    )


@says("004", _LIKELIHOOD, "“exp(α q·k) represents the inverse of variance σ²”")
def inverse_variance() -> CheckResult:
    theta = _precision()
    variance = 1 / (theta * BETA)
    return judged(
        f"Up to β: with β = {BETA}, 1/σ² is {float((1 / variance / theta)[0]):.1f} times exp(α q·k).",
        agree(1 / variance, theta),
        agree(1 / variance, BETA * theta),
    )


@says("004", _LIKELIHOOD, "Eq. 12: θ = 1/(σ²β)")
def equation_12() -> CheckResult:
    # σ² from the density itself: twice the drop of log g one unit from its top is 1/σ².
    theta = _precision()
    drop = _log_density(tensor(0.0), tensor(0.0), theta) - _log_density(tensor(0.0), tensor(1.0), theta)
    variance = 1 / (2 * drop)
    return judged(
        f"θ and 1/(σ²β), with σ² measured on Eq. 2, {how_close(1 / (variance * BETA), theta)}.",
        agree(1 / (variance * BETA), theta),
    )


@says("004", _LIKELIHOOD, "softmax weights by the inverse variance, “β can be canceled”")
def beta_cancels() -> CheckResult:
    plans = []
    for beta in (0.1, 1.0, 40.0):
        precision = beta * _precision()
        plans.append(precision / precision.sum())
    found = torch.stack(plans)
    p = weights(ALPHA * _K @ _Q).expand_as(found)
    return judged(f"(1/σ²)/Σ(1/σ²) at β = 0.1, 1, 40 and regard's plan {how_close(found, p)}.", agree(found, p))


@says("004", _LIKELIHOOD, "w_i is “the contribution of each value vector v_i to the final output”")
def contribution() -> CheckResult:
    jacobian = torch.autograd.functional.jacobian(lambda v: _attention(values=v), _V)
    assert isinstance(jacobian, Tensor)
    p = weights(ALPHA * _K @ _Q)
    expected = torch.eye(3).double()[:, None, :] * p[None, :, None]
    return judged(f"∂o/∂v_i and w_i times the identity {how_close(jacobian, expected)}.", agree(jacobian, expected))


@says("004", _LIKELIHOOD, "“weighting factors may be sparse”, a “sparsity property”")
def softmax_is_not_sparse() -> CheckResult:
    s = draw(1, 1, 1, 64, seed=8, scale=0.7)
    v, eye = torch.ones(1, 1, 64, 1, dtype=torch.float64), torch.eye(64).double()[None, None]
    supports, taking_part = [], []
    for problem in (Transport(), Transport(Tsallis(1.5))):
        _, aux = regard.attention(
            s, eye, v, scale=1.0, problem=problem, return_aux=AuxRequest(support=True, collision=True)
        )
        assert aux.support is not None and aux.collision is not None
        supports.append(int(aux.support))
        taking_part.append(1 / float(aux.collision))
    return judged(
        f"Concentrated, not sparse: of 64 keys {supports[0]} have a positive weight, though only {taking_part[0]:.1f} "
        f"take part (1/Σw²). Exact zeros need another regulariser: 1.5-entmax keeps {supports[1]}.",
        supports[0] < 64,
        taking_part[0] < 16 and supports[1] < 64,
    )


@says("004", _LIKELIHOOD, "sparsity is “achieved through the use of the Gaussian modeling”")
def gaussian_does_not_concentrate() -> CheckResult:
    s = tensor(6, 5, 1, 0.5)
    linear, exponential = s / s.sum(), weights(s)
    counts = [float(1 / (p * p).sum()) for p in (linear, exponential)]
    return judged(
        f"Through Eq. 3: the same Gaussian model with θ = s lets {counts[0]:.1f} of 4 keys take part, with θ = exp(s) "
        f"{counts[1]:.1f}.",
        abs(counts[0] - counts[1]) < 0.1,
        counts[1] < counts[0],
    )


def _multiplications(queries: int, keys: int, d: int) -> int:
    return multiply_adds(lambda: torch.ones(queries, d) @ torch.ones(d, keys))


@says("004", _LIKELIHOOD, "the weights of one query cost “O(T)”")
def cost_of_one_query() -> CheckResult:
    base, longer, wider = _multiplications(1, 512, 64), _multiplications(1, 1024, 64), _multiplications(1, 512, 128)
    return judged(
        f"O(T·d): T = 512, d = 64 takes {base} multiply-adds, {longer / base:.0f} times as many at twice the T and "
        f"{wider / base:.0f} times at twice the d.",
        longer == 2 * base and wider == base,
        longer == 2 * base and wider == 2 * base,
    )


@says("004", "Maximum Likelihood Estimation, Conclusion", "all weights cost O(T·T), “a quadratic dependence” on T")
def cost_of_all_queries() -> CheckResult:
    base, longer = _multiplications(512, 512, 64), _multiplications(1024, 1024, 64)
    return judged(
        f"Twice the T takes {longer / base:.0f} times the multiply-adds (a factor d beside it).", longer == 4 * base
    )


@says("004", _ENTROPY, "Eq. 13–16: substituting the features gives exp(λ_i q·k_i)/Σ exp(λ_j q·k_j)")
def equation_16() -> CheckResult:
    s, multipliers = _K @ _Q, draw(5, seed=9)
    features = torch.diag(s)  # f_i(y): row i, column y
    p = (multipliers @ features).softmax(-1)
    formula = (multipliers * s).exp() / (multipliers * s).exp().sum()
    scaled = regard.attention(
        _Q[None, None, None], (multipliers[:, None] * _K)[None, None], torch.eye(5).double()[None, None], scale=1.0
    )[0, 0, 0]
    return judged(
        f"Both sides {how_close(p, formula)}. λ_i scales key i: attention with keys λ_i k_i and Eq. 16 "
        f"{how_close(scaled, formula)}.",
        agree(p, formula) and agree(scaled, formula),
    )


@says("004", _ENTROPY, "with λ_i = α “Eq. 16 is the same as Eq. 1”")
def equal_multipliers() -> CheckResult:
    s = _K @ _Q
    sixteen = (ALPHA * torch.ones_like(s) * s).softmax(-1)
    one = _attention(values=torch.eye(5).double())
    return judged(f"They {how_close(sixteen, one)}.", agree(sixteen, one))


@says("004", _ENTROPY, "softmax follows from “the maximum entropy approach” with the features of Eq. 15")
def maximum_entropy() -> CheckResult:
    s = _K @ _Q
    total = torch.ones(1, 5, dtype=torch.float64)
    own = tangents(torch.cat([torch.diag(s), total]))
    shared = tangents(torch.cat([s[None], total]))
    p = weights(s, 1 / ALPHA)
    moved = torch.stack([p + sign * 0.01 * d for d in shared.T for sign in (1, -1)])
    largest = bool((entropy(moved) < entropy(p)).all())
    return judged(
        f"With a feature per key their means fix one query's weights: {own.shape[1]} directions are left for entropy "
        f"to choose from. With the single feature q·k_y {shared.shape[1]} are left, and softmax has the largest "
        f"entropy {tick(largest)}.",
        own.shape[1] > 0,
        shared.shape[1] == 3 and largest,
    )


@says("004", _APPENDIX, "a1, a2 and the cosine")
def appendix_vectors() -> CheckResult:
    x, y = _K[0], _K[1]
    inner = (x * y).sum()
    cosine = inner / ((x * x).sum().sqrt() * (y * y).sum().sqrt())
    reference = F.cosine_similarity(x, y, dim=0)
    found = torch.stack([x @ y, y @ x, x.norm() ** 2, reference])
    expected = torch.stack([inner, inner, (x * x).sum(), cosine])
    return judged(
        f"The formulas and PyTorch's dot, norm and cosine {how_close(found, expected)}.", agree(found, expected)
    )


@says("004", _APPENDIX, "log g = ½ log(θβ/2π) − (θβ/2)(v − v_i)²")
def appendix_log_density() -> CheckResult:
    v, theta = tensor(0.4), _precision()
    printed = _log_density(_V[:, 0], v, theta)
    reference = torch.distributions.Normal(v, (theta * BETA).rsqrt()).log_prob(_V[:, 0])
    return judged(
        f"It and torch's normal distribution {how_close(printed, reference)} (read its left side as log g(v_i | v, "
        "q)).",
        agree(printed, reference),
    )


@says("004", _APPENDIX, "the definition of softmax")
def appendix_softmax() -> CheckResult:
    s = draw(50, 6, seed=11, scale=3)
    formula = s.exp() / s.exp().sum(-1, keepdim=True)
    return judged(f"It and regard's plan {how_close(weights(s), formula)}.", agree(weights(s), formula))


new_explanation = untestable(
    "004", "Abstract, Conclusion", "“may lead to a better understanding”", "A hope; nothing to compute."
)

CLAIMS = collect(globals())
