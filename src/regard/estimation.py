"""Attention as statistics: an estimate with its error bar, temperatures fitted to observed choices, evidence per row.

`estimate` reads a query's values as noisy observations of one vector, v_i ~ N(v, 1/(beta theta_i)), where the precision
theta_i = pi_i exp(s_i/tau) is what softmax weighs with: attention's output is the maximum-likelihood v, and the spread
of the values around it says how far to trust it. `calibrate` fits p_j ~ exp(beta s_j) to what was chosen. `evidence`
measures how far a plan is from "no key is special". `estimate` and `evidence` are one fused pass; no plan is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._validate import concrete, describe, is_integer, is_number, may_be_zero, number
from .operator import attention
from .problem import Budget, Rows, RowsAndColumns, Transport
from .regularizers import KL
from .statistics import AuxRequest

# --- estimate ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Estimate:
    """What `estimate` found: one row per query, in the caller's leading dimensions (written here as B, H).

    value             [B, H, Tq, Dv], attention's output: the maximum-likelihood v
    variance          [B, H, Tq], of each coordinate of value (maximum likelihood: too small for few keys, see interval)
    log_precision     [B, H, Tq], lse + log precision_scale = -log variance
    precision_scale   [B, H, Tq], the maximum-likelihood beta
    keys              [B, H, Tq], how many keys were admissible

    All but value have the compute dtype. With fewer than two admissible keys there is no spread to learn from:
    variance, log_precision and precision_scale are NaN there (and value is 0 without any key).
    """

    value: Tensor
    variance: Tensor
    log_precision: Tensor
    precision_scale: Tensor
    keys: Tensor

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """(low, high), each [B, H, Tq, Dv]: each coordinate of v lies between them with probability `level`.

        Student's t with (keys - 1) Dv degrees of freedom and the unbiased variance, exact for every number of keys from
        two; NaN below. Holds for each coordinate by itself, not for all at once.
        """
        level = _check_level(level)
        extra = (self.keys - 1).clamp(min=1)
        freedom, place = (extra.double() * self.value.shape[-1]).cpu().unique(return_inverse=True)
        width = student_quantile(level, freedom)[place].to(self.variance)
        half = (width * (self.variance * self.keys / extra).sqrt())[..., None]
        value = self.value.to(half.dtype)
        return value - half, value + half


def estimate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    problem: Transport | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    backend: str = "auto",
) -> Estimate:
    """The attended value as a maximum-likelihood estimate, with its variance; arguments as for `attention`.

    The model: v_i ~ N(v, I/(beta theta_i)) with theta_i = pi_i exp(s_i/tau), so a prior and a float mask count as
    precision, too. It exists for KL with rows that sum to 1; another problem raises. With n admissible keys,

        beta = n Dv / sum_i theta_i |v_i - value|^2,    variance = 1/(beta sum_i theta_i) = value_spread / (n Dv).

    `value` is differentiable, the other fields are not (nor is the width of an interval).
    A spread below the rounding of |v_i|^2 (one key has nearly all weight) is not resolved.
    """
    problem = _transport(problem)
    if not isinstance(problem.regularizer, KL) or problem.marginal != Rows():
        raise ValueError(f"problem: expected KL() with Rows() (weights as precisions of an average), got {problem!r}")
    if _known_zero(problem.temperature):
        raise ValueError("problem: expected temperature > 0 (at 0 all precision is infinite), got temperature 0")
    out, aux = attention(
        query,
        key,
        value,
        attn_mask,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        problem=problem,
        softcap=softcap,
        key_scale=key_scale,
        return_aux=AuxRequest(lse=True, support=True, value_spread=True),
        backend=backend,
    )
    assert aux.lse is not None and aux.support is not None and aux.value_spread is not None
    keys, lse = aux.support, aux.lse.detach()
    enough = keys >= 2
    spread = torch.where(enough, aux.value_spread.detach().clamp(min=0), math.nan)
    variance = spread / (keys * value.shape[-1])
    return Estimate(out, variance, -variance.log(), (-lse - variance.log()).exp(), keys)


_SERIES = 1000  # degrees of freedom up to which the distribution is summed in full


def student_quantile(level: float, freedom: Tensor) -> Tensor:
    """t with P(|T| <= t) = level for whole degrees of freedom, a float64 vector on the CPU.

    With t = sqrt(freedom) tan(angle) the probability is a finite sum (Abramowitz and Stegun 26.7.3-4), concave and
    rising in the angle: Newton's method from 0 rises to the root and never passes it. Where the sum would be long,
    the normal quantile's expansion in 1/freedom (26.7.5) has less than rounding left to correct.
    """
    z = math.sqrt(2) * float(torch.tensor(level, dtype=torch.float64).erfinv())
    corrections = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    quantile = torch.full_like(freedom, z)
    for k, c in enumerate(corrections):
        quantile += c / freedom ** (k + 1)
    few = freedom <= _SERIES
    quantile[few] = _student_series(level, freedom[few])
    return quantile


def _student_series(level: float, freedom: Tensor) -> Tensor:
    n, k = freedom[:, None], torch.arange(_SERIES // 2, dtype=torch.float64)
    odd = n % 2
    # sum_k c_k cos^(2k) (odd: cos^(2k+1)), where c_k / c_(k-1) = (2k - 1)/(2k) (odd: 2k/(2k + 1)) and c_0 = 1
    ratios = torch.where(k > 0, (2 * k - 1 + odd) / (2 * k + odd).clamp(min=1), 1.0)
    terms = torch.where(k < n // 2, ratios.cumprod(-1), 0.0)
    rise = 2 * (torch.lgamma((n + 1) / 2) - torch.lgamma(n / 2)).exp() / math.sqrt(math.pi)
    angle = torch.zeros_like(n)
    for _ in range(100):
        cos = angle.cos()
        total = angle.sin() * (terms * cos ** (2 * k + odd)).sum(-1, keepdim=True)
        probability = torch.where(odd == 1, (angle + total) * (2 / math.pi), total)
        step = ((level - probability) / (rise * cos ** (n - 1))).clamp(min=0)
        angle = angle + step
        if not bool((step > 1e-16 * angle).any()):
            break
    return (n.sqrt() * angle.tan()).squeeze(-1)


# --- evidence ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evidence:
    """How far each row's plan is from the null hypothesis that no key is special; both fields [B, H, Tq].

    kl      KL divergence of the plan from the uniform plan over the row's admissible keys, in nats: log n - entropy
    draws   keys to be drawn from the plan before a likelihood-ratio test tells it from the null with an error of
            `level` (Stein): log(1/level)/kl, a number on average and to first order; inf where kl is 0
    """

    kl: Tensor
    draws: Tensor
    level: float


def evidence(
    query: Tensor,
    key: Tensor,
    *,
    level: float = 0.05,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    problem: Transport | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    backend: str = "auto",
) -> Evidence:
    """Evidence of each row against "no key is special"; arguments as for `attention`, without values.

    Of a plan whose mass is not 1 (sink, relaxed, free, Rows(mass)) it judges the plan divided by its mass, over the
    real keys; a sink is served for KL only, where that plan is softmax. The null is uniform even where the prior is
    not (the statistic `kl` measures from the prior). A kl too small for the compute dtype to tell from 0 is 0. A row
    that ships nothing, or has one admissible key or none, has kl 0 and draws inf. For KL, `kl` is differentiable.
    """
    level = _check_level(level)
    problem = _transport(problem)
    if isinstance(problem.marginal, RowsAndColumns):
        raise ValueError(f"problem: expected rows that are judged one by one, got {problem!r}")
    exponential = isinstance(problem.regularizer, KL)
    if exponential:  # divided by their mass, the rows of every marginal are softmax
        problem = Transport(problem.regularizer, prior=problem.prior, temperature=problem.temperature)
    elif isinstance(problem.marginal, Rows) and problem.marginal.sink is not None:
        raise ValueError(f"problem: expected no sink (KL may have one: it leaves softmax), got {problem!r}")
    given = problem.temperature
    every_key_counts = exponential and not isinstance(given, Budget) and not may_be_zero(given)
    _, aux = attention(
        query,
        key,
        _narrow(key),
        attn_mask,
        0.0,
        is_causal,
        scale,
        enable_gqa,
        problem=problem,
        softcap=softcap,
        key_scale=key_scale,
        return_aux=AuxRequest(entropy=True, support=every_key_counts, mass=not every_key_counts),
        backend=backend,
    )
    assert aux.entropy is not None
    ships: Tensor | bool = True
    keys = aux.support
    if not every_key_counts:
        assert aux.mass is not None
        ships, keys = aux.mass > 0, _count_keys(query, key, attn_mask, is_causal, enable_gqa, problem, backend)
    assert keys is not None
    most = keys.clamp(min=1).log()
    kl = most - aux.entropy
    kl = torch.where((kl > 16 * torch.finfo(kl.dtype).eps * (1 + most)) & ships, kl, 0.0)
    return Evidence(kl, math.log(1 / level) / kl.detach(), level)


@torch.no_grad()
def _count_keys(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    problem: Transport,
    backend: str,
) -> Tensor | None:
    """Admissible keys per row: all that softmax gives mass, in a pass over heads of size 1 that costs little."""
    query, key = _narrow(query), _narrow(key)
    prior, request = Transport(prior=problem.prior), AuxRequest(support=True)
    arguments = (attn_mask, 0.0, is_causal, 1.0, enable_gqa)
    return attention(query, key, key, *arguments, problem=prior, return_aux=request, backend=backend)[1].support


def _narrow(tensor: Tensor) -> Tensor:
    """Zeros for a tensor [..., T, D], with D = 1. (What is no such tensor goes to `attention`, which says so.)"""
    return tensor.new_zeros(*tensor.shape[:-1], 1) if isinstance(tensor, Tensor) and tensor.dim() > 1 else tensor


# --- calibrate --------------------------------------------------------------------------------------------------------

_CONVERGED = 1e-9  # of the size of the scores: what a moment may miss by
_SPECIAL = {
    "separable": "all targets have their rows' highest scores: the likelihood has no maximum, it grows with beta for"
    " ever (temperature 0)",
    "anticorrelated": "targets score no better than the mean of their rows: the best beta >= 0 is 0 (temperature inf)",
    "uninformative": "no row has scores that differ: every beta is as likely, it stays 1",
}
_SPECIAL_KEYS = {
    "separable": "the likelihood has no maximum: it grows as the multiplier goes to inf or -inf (a ridge stops it)",
    "uninformative": "its score is 0 (or has no rival) in every row: every multiplier is as likely, it stays 1",
}


@dataclass(frozen=True, eq=False)
class Calibration:
    """What `calibrate` fitted: tensors of shape [] ("global"), [H] ("head") or [Tk] ("key"); float64, on the CPU.

    beta                    inverse temperatures; for "key" the multipliers, to be used as `key_scale`
    residual                the certificate, |E_target[s] - E_model[s]| (less the ridge's pull): 0 at the maximum
    separable               the maximum lies at infinity: beta is inf ("key": inf or -inf)
    anticorrelated          the maximum lies below 0: beta is 0, the best that is a temperature (never for "key")
    uninformative           the data do not depend on beta: it stays 1
    log_likelihood          mean log-likelihood of a row at beta (its supremum, if separable); for "key" of shape []
    log_likelihood_before   the same for the scores as they came, beta = 1
    converged               whether every residual vanishes that should (all but those of anticorrelated)
    iterations              Newton steps taken
    rows                    observations used
    """

    per: str
    beta: Tensor
    residual: Tensor
    separable: Tensor
    anticorrelated: Tensor
    uninformative: Tensor
    log_likelihood: Tensor
    log_likelihood_before: Tensor
    converged: bool
    iterations: int
    rows: int

    @property
    def temperature(self) -> Tensor:
        """1/beta: 0 where separable, inf where anticorrelated. Per head, `Transport(temperature=t.view(H, 1, 1))`.
        (The inverse of a key's multiplier is no temperature of the plan: use `beta` as key_scale.)"""
        return 1 / self.beta

    def __str__(self) -> str:
        def span(x: Tensor) -> str:
            low, high = float(x.min()), float(x.max())
            return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"

        keys, many = self.per == "key", self.beta.numel() > 1
        lines = [f"Calibration per {self.per}" if self.per != "global" else "Calibration, one temperature"]
        lines[0] += f" from {self.rows} row{'s' if self.rows != 1 else ''}"
        if self.beta.numel():
            name, shown = ("multiplier", self.beta) if keys else ("temperature", self.temperature)
            lines.append(f"  {name:<16}{span(shown)}")
            before, after = span(self.log_likelihood_before), span(self.log_likelihood)
            lines.append(f"  {'log-likelihood':<16}{before} -> {after} per row")
            checked = self.residual[~self.anticorrelated]
            if checked.numel():
                lines.append(f"  {'moments match':<16}within {float(checked.max()):.1e}")
        steps = f"{self.iterations} step{'s' if self.iterations != 1 else ''}"
        lines.append(f"  {'converged':<16}{'in' if self.converged else 'NO, after'} {steps}")
        for name, reason in (_SPECIAL_KEYS if keys else _SPECIAL).items():
            found = getattr(self, name).reshape(-1).nonzero().flatten().tolist()
            if found:
                first = ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
                where = f"{self.per} {first}: " if many else ""
                lines.append(f"  {name:<16}{where}{reason}")
        return "\n".join(lines)


@torch.no_grad()
def calibrate(
    scores: Tensor,
    targets: Tensor,
    *,
    per: Literal["global", "head", "key"] = "global",
    ridge: float = 0.0,
    max_iterations: int = 100,
) -> Calibration:
    """Fit inverse temperatures to observed choices by maximum likelihood: p_j ~ exp(beta s_j), beta >= 0.

    scores [..., Tk], where -inf is not admissible (nor what masks hold: less than half the dtype's lowest number);
    targets are chosen keys, integers [...], or distributions over keys [..., Tk]. A row is left out where its target is
    negative, or a distribution of zeros.

        per="global"   one beta
        per="head"     one for each head of scores [..., H, Tq, Tk] (the third dimension from the end)
        per="key"      one multiplier for each key, p_j ~ exp(lambda_j s_j), of either sign

    The likelihood is concave and its maximum is where the moments match, E_target[s] = E_model[s] ("key": for each key
    by itself): Newton's method in float64, with a bracket or a line search. Where there is no maximum, or none for
    beta >= 0, the result says so: see `Calibration`. `ridge` subtracts ridge/2 (beta - 1)^2 from the mean
    log-likelihood, which then always has a maximum. "key" stores a Tk x Tk matrix, and there a direction to infinity
    in which several keys move together is found numerically, not proven.
    """
    if per not in ("global", "head", "key"):
        raise ValueError(f'per: expected "global", "head" or "key", got {describe(per)}')
    ridge = number("ridge", ridge, "a finite number >= 0", lambda x: 0 <= x < math.inf)
    if not is_integer(max_iterations) or max_iterations < 1:
        raise ValueError(f"max_iterations: expected a positive int, got {describe(max_iterations)}")
    s, admissible, t = _observations(scores, targets)
    Tk = s.shape[-1]
    if per == "head":
        if s.dim() < 3:
            raise ValueError(f'scores: expected shape [..., H, Tq, Tk] for per="head", got {list(scores.shape)}')
        s, admissible, t = (x.movedim(-3, 0).flatten(1, -2) for x in (s, admissible, t))
    else:
        s, admissible, t = (x.reshape(1, -1, Tk) for x in (s, admissible, t))
    if per == "key":
        return _fit_keys(s[0], admissible[0], t[0], ridge, max_iterations)
    return _fit_groups(per, s, admissible, t, ridge, max_iterations)


def _observations(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., Tk]: scores (0 if not admissible), which are admissible, targets as distributions (0 in rows left out)."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores: expected a floating-point tensor, got {describe(scores)}")
    if scores.dim() < 1 or scores.shape[-1] == 0:
        raise ValueError(f"scores: expected shape [..., Tk] with Tk > 0, got {list(scores.shape)}")
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or targets.is_complex():
        raise TypeError(f"targets: expected integers or floating-point distributions, got {describe(targets)}")
    s, Tk = scores.detach().cpu().double(), scores.shape[-1]
    if bool((s.isnan() | (s == math.inf)).any()):
        raise ValueError("scores: expected finite numbers or -inf, got NaN or inf")
    distributions = targets.is_floating_point()
    shape = scores.shape if distributions else scores.shape[:-1]
    if targets.shape != shape:
        kind = "distributions" if distributions else "integers"
        raise ValueError(f"targets: expected {kind} of shape {list(shape)}, got {describe(targets)}")
    t = targets.detach().cpu()
    if distributions:
        t = t.double()
        total = t.sum(-1, keepdim=True)
        exact = 1e-3 if targets.dtype in (torch.float32, torch.float64) else 2e-2
        good = ((total - 1).abs() <= exact) | (t == 0).all(-1, keepdim=True)
        if not bool(good.all()) or bool((t < 0).any()):
            raise ValueError("targets: expected rows >= 0 that sum to 1 (or are all 0, to be left out), got others")
        t = t / torch.where(total > 0, total, 1.0)
    else:
        if bool((t >= Tk).any()):
            raise ValueError(f"targets: expected keys below Tk={Tk} (negative: left out), got {int(t.max())}")
        t = torch.zeros_like(s).scatter(-1, t.clamp(min=0).long()[..., None], (t >= 0).double()[..., None])
    admissible = s > torch.finfo(scores.dtype).min / 2  # what masks hold
    if bool(((t > 0) & ~admissible).any()):
        raise ValueError("targets: expected admissible keys, got one whose score is -inf (or a mask's lowest number)")
    return torch.where(admissible, s, 0.0), admissible, t


def _log_weights(logits: Tensor, admissible: Tensor) -> Tensor:
    """log p over the admissible keys, -inf at the others (0 in a row without any)."""
    logits = torch.where(admissible, logits, -math.inf)
    return torch.where(admissible.any(-1, keepdim=True), logits, 0.0).log_softmax(-1)


def _fit_groups(per: str, s: Tensor, admissible: Tensor, t: Tensor, ridge: float, max_iterations: int) -> Calibration:
    """One beta for each group of rows [G, R, Tk]: the root of a falling function of one number."""
    used = (t > 0).any(-1)  # [G, R]
    rows = used.sum(-1).clamp(min=1)
    top = torch.where(admissible, s, -math.inf).amax(-1, keepdim=True)
    x = torch.where(admissible, s - top, 0.0)  # from the row's best key: a shift of a row is none of beta's business
    spread = torch.where(used, -x.amin(-1), 0.0).sum(-1) / rows  # [G]
    target = (t * x).sum((-2, -1)) / rows

    uninformative = spread == 0
    separable = ~uninformative & ~((t > 0) & (x < 0)).any(-1).any(-1)
    if ridge > 0:
        separable = torch.zeros_like(separable)

    def mean(per_row: Tensor) -> Tensor:
        return torch.where(used, per_row, 0.0).sum(-1) / rows

    def gap(beta: Tensor) -> tuple[Tensor, Tensor]:
        """The slope of the mean log-likelihood, and minus its own slope, at finite beta."""
        p = _log_weights(beta[:, None, None] * x, admissible).exp()
        expected = (p * x).sum(-1, keepdim=True)
        variance = (p * (x - expected) ** 2).sum(-1)
        return target - mean(expected.squeeze(-1)) - ridge * (beta - 1), mean(variance) + ridge

    def log_likelihood(beta: Tensor) -> Tensor:
        hard = (beta == math.inf)[:, None, None]
        logits = torch.where(hard, torch.where(x < 0, -math.inf, 0.0), beta.clamp(max=1e300)[:, None, None] * x)
        return mean(torch.where(t > 0, t * _log_weights(logits, admissible), 0.0).sum(-1))

    beta = torch.zeros_like(spread)
    slope, _ = gap(beta)
    anticorrelated = ~uninformative & ~separable & (slope <= 1e-15 * spread)
    settled = uninformative | separable | anticorrelated
    low, high, iteration = torch.zeros_like(beta), torch.full_like(beta, math.inf), 0
    for iteration in range(max_iterations + 1):
        slope, curvature = gap(beta)
        low, high = torch.where(slope >= 0, beta, low), torch.where(slope <= 0, beta, high)
        newton = beta + slope / curvature
        small = (slope.abs() <= 1e-15 * spread) | ((newton - beta).abs() <= 1e-13 * beta)
        done = settled | small | (high - low <= 4e-16 * low)
        if bool(done.all()) or iteration == max_iterations:
            break
        wild = ~((newton > low) & (newton < high))  # NaN, too
        if iteration >= 30 and iteration % 2:
            wild = wild | high.isfinite()
        middle = torch.where(high.isfinite(), (low + high) / 2, 2 * beta + 1 / spread)
        beta = torch.where(done, beta, torch.where(wild, middle, newton))
    beta = torch.where(separable, math.inf, torch.where(uninformative, 1.0, beta))
    residual = torch.where(separable, target.abs(), torch.where(uninformative, 0.0, slope.abs()))
    converged = bool((anticorrelated | (residual <= _CONVERGED * spread)).all())

    def shaped(x: Tensor) -> Tensor:
        return x[0] if per == "global" else x

    return Calibration(
        per,
        beta=shaped(beta),
        residual=shaped(residual),
        separable=shaped(separable),
        anticorrelated=shaped(anticorrelated),
        uninformative=shaped(uninformative),
        log_likelihood=shaped(log_likelihood(beta)),
        log_likelihood_before=shaped(log_likelihood(torch.ones_like(beta))),
        converged=converged,
        iterations=iteration,
        rows=int(used.sum()),
    )


def _fit_keys(s: Tensor, admissible: Tensor, t: Tensor, ridge: float, max_iterations: int) -> Calibration:
    """One multiplier for each key from rows [R, Tk]: a concave function of Tk numbers.

    Where it has no maximum, there is a direction d along which no target's d_j s_j falls behind its row's largest, and
    other keys' do. In the limit those keys have no mass in that row: they are struck out, and what remains is fitted.
    """
    used = (t > 0).any(-1)
    s, admissible, t = s[used], admissible[used], t[used]
    (R, Tk), rows = s.shape, max(1, s.shape[0])
    choice = admissible & (admissible.sum(-1, keepdim=True) > 1)
    uninformative = ~(choice & (s != 0)).any(0)
    size = s.abs().sum(0) / rows  # [Tk]
    infinite = torch.zeros(Tk, dtype=torch.float64)  # -1, 0 or 1
    beta = torch.ones(Tk, dtype=torch.float64)

    def log_likelihood(beta: Tensor, admissible: Tensor) -> Tensor:
        return torch.where(t > 0, t * _log_weights(beta * s, admissible), 0.0).sum() / rows

    def objective(beta: Tensor) -> Tensor:
        return log_likelihood(beta, admissible) - ridge / 2 * ((beta - 1) ** 2).sum()

    before = log_likelihood(beta, admissible)
    while ridge == 0:  # single keys that go to infinity, told exactly
        direction = _receding_keys(s, admissible, t)
        gaps = _gaps(direction * s, admissible)
        if not bool((gaps > 0).any()):
            break
        infinite = torch.where(infinite == 0, direction, infinite)
        admissible = admissible & (gaps == 0)

    gradient, done, iteration = torch.zeros_like(beta), False, 0
    for iteration in range(max_iterations + 1):
        p = _log_weights(beta * s, admissible).exp() if R else s
        gradient = ((t - p) * s).sum(0) / rows - ridge * (beta - 1)
        if done or iteration == max_iterations:
            break
        moments = p * s
        hessian = torch.diag((moments * s).sum(0)) - moments.mT @ moments
        step = _newton_step(hessian / rows + ridge * torch.eye(Tk, dtype=torch.float64), gradient)
        move = float(_gaps(step * s, admissible).amax()) if R else 0.0  # of a logit, against others of its row
        if ridge == 0 and move > 0.1 and bool((gradient.abs() <= 1e-6 * size).all()):
            # The slope is gone and yet it is far to the top: is there a direction to infinity?
            found = _receding_direction((step, beta), s, admissible, t)
            if found is not None:
                direction, admissible = found
                infinite = torch.where(infinite == 0, direction, infinite)
                continue
        done = move <= 1e-9  # Newton squares it
        length, now, rise = 1.0, float(objective(beta)), float(gradient @ step)
        rounding = 1e-14 * (1 + abs(now))
        while length > 1e-10 and not objective(beta + length * step) >= now + 1e-4 * length * rise - rounding:
            length /= 2
        beta = beta + length * step
    residual = gradient.abs()
    converged = done and bool((residual <= _CONVERGED * size).all())
    after = log_likelihood(beta, admissible)
    beta = torch.where(infinite != 0, infinite * math.inf, beta)
    return Calibration(
        "key",
        beta=beta,
        residual=residual,
        separable=infinite != 0,
        anticorrelated=torch.zeros(Tk, dtype=torch.bool),
        uninformative=uninformative,
        log_likelihood=after,
        log_likelihood_before=before,
        converged=converged,
        iterations=iteration,
        rows=R,
    )


def _gaps(z: Tensor, admissible: Tensor) -> Tensor:
    """How far each admissible key is below its row's largest; 0 for the others."""
    top = torch.where(admissible, z, -math.inf).amax(-1, keepdim=True)
    return torch.where(admissible, top - z, 0.0)


def _receding_keys(s: Tensor, admissible: Tensor, t: Tensor) -> Tensor:
    """1 or -1 for each key whose multiplier may grow, or fall, for ever at no target's expense; [Tk]."""
    rival = admissible & (admissible.sum(-1, keepdim=True) > 1)

    def harmless(s: Tensor) -> Tensor:
        harm = torch.where(t >= 1, s < 0, torch.where(t <= 0, s > 0, s != 0))
        return ~(rival & harm).any(0) & (rival & (s != 0)).any(0)

    return harmless(s).double() - harmless(-s).double()


def _receding_direction(
    directions: tuple[Tensor, ...], s: Tensor, admissible: Tensor, t: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The signs of the first of these directions in which no target falls behind and other keys do (within rounding),
    and the keys that do not fall behind."""
    for direction in directions:
        z = torch.where(admissible, direction * s, 0.0)
        gaps, reach = _gaps(z, admissible), z.abs().amax(-1, keepdim=True)
        behind = gaps > 1e-5 * reach + 1e-8 * reach.amax()
        if bool(behind.any()) and not bool((behind & (t > 0)).any()):
            moving = z.abs().amax(0) > 1e-5 * reach.amax()
            return torch.where(moving, direction.sign(), 0.0), admissible & ~behind
    return None


def _newton_step(hessian: Tensor, gradient: Tensor) -> Tensor:
    """hessian^-1 gradient for a matrix that may be singular: as if each unit of its diagonal were a little larger."""
    unit = hessian.diagonal().clamp(min=0).sqrt()
    unit = torch.where(unit > 0, unit, 1.0)
    scaled, identity = hessian / unit / unit[:, None], torch.eye(len(unit), dtype=torch.float64)
    for damping in (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2):
        factor, failed = torch.linalg.cholesky_ex(scaled + damping * identity)
        if not int(failed):
            return torch.cholesky_solve((gradient / unit)[:, None], factor)[:, 0] / unit
    return gradient / unit**2


# --- shared -----------------------------------------------------------------------------------------------------------


def _transport(problem: Transport | None) -> Transport:
    if problem is None:
        return Transport()
    if not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport, got {describe(problem)}")
    return problem


def _known_zero(temperature: object) -> bool:
    if isinstance(temperature, Tensor):
        return concrete(temperature) and bool((temperature == 0).any())
    return is_number(temperature) and temperature == 0


def _check_level(level: float) -> float:
    return number("level", level, "a probability strictly between 0 and 1", lambda x: 0 < x < 1)
