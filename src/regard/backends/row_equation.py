"""One row of a plan: the equation for its price, the search for the root, and its derivative.

The plan of a row is p_j = pi_j g((s_j - lambda)/tau), and the price lambda is the root of one monotone equation, the
marginal. `solve_rows` finds it outside of autograd, in closed form for KL and by safeguarded Newton otherwise. Then it
takes one more Newton step inside of autograd: its value is 0, and its derivative is the implicit function theorem,

    d lambda = sum_j w_j ds_j / (sum_j w_j + kappa),    so    dL/ds_j = (w_j/tau) (u_j - sum w u / (sum w + kappa)).

This is the gradient of every regulariser and every marginal: only w = pi g' and kappa change. Two steps give the
derivatives up to the third.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._validate import Scalar
from ..form import Form
from ..regularizers import Regularizer
from ..statistics import Solution


@dataclass
class RowEquation:
    """One equation per row: the keys (and the null key) take the row's mass at the price mu = lambda + tau * origin.

    Scores and prices are measured from `anchor`, the score of the row's best key, so that differences stay exact.
    """

    scores: Tensor  # [B, H, Tq, Tk]
    anchor: Tensor  # [B, H, Tq, 1]
    log_prior: Tensor | None
    admissible: Tensor | None
    temperature: Scalar
    marginal_parameter: Scalar
    regularizer: Regularizer
    form: Form
    shift: Scalar = 0.0  # lambda = anchor + mu - origin + shift
    null_log_prior: Tensor | None = None  # of the null key: 0, minus the common factor taken out of the prior
    silent: Tensor | None = None  # the density where it is 0 and the key is read, 0 elsewhere; None without a density
    silent_scores: Tensor | None = None  # the scores of those keys, which `scores` does not hold

    @property
    def origin(self) -> Scalar:
        return self.temperature * self.regularizer.origin

    def detached(self) -> RowEquation:
        def detach(x: Scalar) -> Scalar:
            return x.detach() if isinstance(x, Tensor) else x

        return replace(
            self,
            scores=self.scores.detach(),
            log_prior=None if self.log_prior is None else self.log_prior.detach(),
            temperature=detach(self.temperature),
            marginal_parameter=detach(self.marginal_parameter),
            shift=detach(self.shift),
            silent=None,  # of value 0
            regularizer=replace(self.form, parameters=[detach(x) for x in self.form.parameters]).regularizer,
        )

    def without_common_prior(self) -> RowEquation:
        """The same rows with the largest prior of each row scaled to 1, if the regulariser can absorb the factor."""
        if self.log_prior is None:
            return self
        top = self.masked(self.log_prior.detach().expand_as(self.scores), -math.inf).amax(-1, keepdim=True)
        absorbed = self.regularizer.absorb(torch.where(top == -math.inf, 0.0, top), self.temperature)
        if absorbed is None:
            return self
        taken_out, temperature, shift = absorbed
        log_prior = self.log_prior - taken_out
        return replace(self, log_prior=log_prior, temperature=temperature, shift=shift, null_log_prior=-taken_out)

    def dual(self, mu: Tensor) -> Tensor:
        return self.anchor + mu - self.origin + self.shift

    def price(self, scores: Tensor, mu: Tensor) -> Tensor:
        """t = (s - mu)/tau."""
        t = scores - mu
        return t / self.temperature if isinstance(self.temperature, Tensor) or self.temperature != 1 else t

    def masked(self, x: Tensor, other: float) -> Tensor:
        return x if self.admissible is None else torch.where(self.admissible, x, other)

    def weights(self, mu: Tensor) -> Tensor:
        return self.masked(self.regularizer.weights(self.price(self.scores, mu), self.log_prior), 0.0) + self.silence(
            mu
        )

    def silence(self, mu: Tensor) -> Tensor | float:
        """The weights of keys of density 0: their values are 0, their derivatives by the density are not."""
        if self.silent is None or self.silent_scores is None:
            return 0.0
        t = self.price(self.silent_scores, mu)
        # link(t) of such a key may overflow, because its score has no part in the price: 0 * inf would be NaN.
        over = self.regularizer.weights(t.detach(), self.log_prior).isinf()
        ratio = self.regularizer.weights(torch.where(over, 0.0, t), self.log_prior)
        return self.silent * torch.where(over, torch.finfo(t.dtype).max, ratio)

    def null(self, mu: Tensor) -> Tensor | None:
        """The null key's weight: it has the prior 1."""
        if self.form.marginal != "sink":
            return None
        return self.regularizer.weights(self.price(self.marginal_parameter - self.anchor, mu), self.null_log_prior)

    def sides(self, mu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mass taken, mass to be taken, and sum(w) + kappa, each [B, H, Tq, 1]."""
        p, w = self.regularizer.weights_and_slopes(self.price(self.scores, mu), self.log_prior)
        taken, slope = self.masked(p, 0.0).sum(-1, keepdim=True), self.masked(w, 0.0).sum(-1, keepdim=True)
        if self.silent is not None:
            taken = taken + torch.as_tensor(self.silence(mu)).sum(-1, keepdim=True)
        target = torch.full_like(taken, self.form.mass)
        if self.form.marginal == "sink":
            p, w = self.regularizer.weights_and_slopes(
                self.price(self.marginal_parameter - self.anchor, mu), self.null_log_prior
            )
            taken, slope = taken + p, slope + w
        elif self.form.marginal == "relax":
            target = (self.dual(mu) / self.marginal_parameter).exp()
            slope = slope + self.temperature * target / self.marginal_parameter
        return taken, target, slope

    def rates(self, mu: Tensor) -> tuple[Tensor, Tensor | None]:
        """w/tau [B, H, Tq, Tk] and kappa/tau [B, H, Tq, 1] (None: infinite). A common factor of the prior cancels."""
        _, w = self.regularizer.weights_and_slopes(self.price(self.scores, mu), self.log_prior)
        slack = None if self.form.marginal == "free" else torch.zeros_like(mu)
        if self.form.marginal == "sink":
            _, w0 = self.regularizer.weights_and_slopes(
                self.price(self.marginal_parameter - self.anchor, mu), self.null_log_prior
            )
            slack = w0 / self.temperature
        elif self.form.marginal == "relax":
            slack = (self.dual(mu) / self.marginal_parameter).exp() / self.marginal_parameter
        return self.masked(w, 0.0) / self.temperature, slack

    def prior(self) -> Tensor:
        prior = torch.ones_like(self.scores) if self.log_prior is None else self.log_prior.exp().expand_as(self.scores)
        return self.masked(prior, 0.0)


def solve_rows(form: Form, scores: Tensor, mu: Tensor | None = None, order: int = 1, rates: bool = False) -> Solution:
    """The optimal rows for these scores. A given `mu` (the price, from the anchor) skips the search. Derivatives up
    to `order` (1 or 2) are exact. `rates` also fills the solution's rates and slack."""
    if form.marginal == "columns":
        raise NotImplementedError("RowsAndColumns: its rows depend on one another and cannot be solved one by one here")
    B, H, Tq, Tk = scores.shape
    device = scores.device
    read = admissible = form.admissible(Tq, Tk, device)
    log_prior = form.log_prior(Tq, Tk, scores.dtype, device, with_density=False)
    silent = silent_scores = None
    if form.density is not None and Tk > 0:
        # log(density) joins the log-prior where the density is positive; elsewhere the key is masked, but for `silent`.
        density = form.density.to(scores.dtype)
        positive = density > 0
        terms = torch.where(positive, density, 1.0).log()
        log_prior = terms if log_prior is None else log_prior + terms
        heard = positive if read is None else positive | ~read
        silent, silent_scores = torch.where(heard, 0.0, density), torch.where(heard, 0.0, scores)
        admissible = positive if read is None else read & positive
    if Tk == 0:  # solve one masked key in place of no key
        scores, log_prior = scores.new_zeros(B, H, Tq, 1), None
        read = admissible = torch.zeros(1, dtype=torch.bool, device=device)
    if read is not None and log_prior is not None:
        log_prior = torch.where(read, log_prior, 0.0)
    temperature, cold = form.temperature, None
    if form.hard:
        cold = torch.as_tensor(temperature, dtype=scores.dtype, device=device) == 0
        temperature = torch.where(cold, 1.0, temperature)

    no_anchor = scores.new_zeros(B, H, Tq, 1)
    rows = RowEquation(
        scores, no_anchor, log_prior, admissible, temperature, form.marginal_parameter, form.regularizer, form
    )
    full = _full_rows(rows.detached())
    rows = rows.without_common_prior()
    anchor, first_price = _anchor(rows.detached())
    if form.marginal == "rows":  # admissible keys whose scores are all -inf: 0/0
        some = torch.ones_like(anchor, dtype=torch.bool) if admissible is None else admissible.any(-1, keepdim=True)
        anchor = torch.where((anchor == -math.inf) & some, math.nan, anchor)
    # Idle rows are those whose plan does not depend on the price.
    idle = anchor == -math.inf if full is None else (anchor == -math.inf) | full
    rows.anchor = torch.where(idle, 0.0, anchor)
    if silent is not None:  # a row without a price has no derivative
        rows.silent = silent if form.marginal == "free" else torch.where(idle, 0.0, silent)
    # A temperature divides the scores: a mask entry at the lowest finite number would overflow, and derivatives would
    # contain 0 * inf. (clamp is not used, because its derivative at NaN is 0.)
    lowest, rows.scores = -torch.finfo(scores.dtype).max * 1e-10, scores - rows.anchor
    rows.scores = torch.where(rows.scores < lowest, lowest, rows.scores)

    if form.marginal == "free":
        mu = rows.origin - form.marginal_parameter - rows.anchor - rows.shift
    elif mu is None:
        fixed = rows.detached()
        mu = _closed_form(fixed) if form.family == "kl" else _search(fixed, first_price - anchor, idle)
        mu = torch.where(idle, 0.0, mu)
    if read is not None:  # t = 0 where a key is not admissible: an infinity would make derivatives NaN
        rows.scores = torch.where(read, rows.scores, mu.detach())
    if silent is not None and admissible is not None:  # the same for keys of density 0, whose scores may be the largest
        rows.silent_scores, rows.scores = rows.scores, torch.where(admissible, rows.scores, mu.detach())
    start = mu.detach()
    for _ in range(order if form.marginal != "free" else 0):
        taken, target, slope = rows.sides(mu)
        slope = slope.detach() if order == 1 else slope  # it multiplies taken - target = 0
        slope = torch.where(taken.isnan(), math.nan, slope)  # a row with a NaN has a NaN derivative
        moves = ~((slope <= 0) | slope.isinf() | taken.isinf() | target.isinf() | idle)
        step = torch.where(moves, rows.temperature * (taken - target) / torch.where(moves, slope, 1.0), 0.0)
        mu = mu + (step - step.detach())  # only the derivative: the search has reached rounding

    p, null = rows.weights(mu), rows.null(mu)
    # Rescale the row, which distributes the rounding error of the price. One NaN makes the whole row and its
    # derivatives NaN; without this, the derivative of a link at NaN could be a number.
    taken = p.detach().sum(-1, keepdim=True) + (0.0 if null is None else null.detach())
    exact = (taken <= 0) | taken.isinf() | idle if form.marginal in ("rows", "sink") else ~taken.isnan()
    share = torch.where(exact, 1.0, form.mass / taken)
    p, null = p * share, None if null is None else null * share
    dual = rows.dual(mu)
    if form.marginal != "free":
        dual = torch.where(idle, -math.inf, dual)
    if full is not None:
        p = torch.where(full, rows.regularizer.ceiling * rows.prior(), p)
    scores = scores if admissible is None else torch.where(admissible, scores, 0.0)
    solution = Solution(form, rows.regularizer, temperature, scores, p, dual, start, log_prior, admissible, null)
    solution.silent, solution.silent_scores = silent, silent_scores
    if rates:  # 0 where the plan is constant: no keys, all keys full, hard routing
        w, slack = rows.rates(mu)
        still = idle if cold is None else idle | cold
        solution.rates = torch.where(still, 0.0, torch.where(taken.isnan(), taken, w))
        solution.slack = None if slack is None else torch.where(still, 0.0, slack)
    return solution if cold is None else _hard_rows(solution, cold)


def centred(rates: Tensor, slack: Tensor | None, utility: Tensor) -> Tensor:
    """u - sum r u / (sum r + slack) where r > 0, measured from the heaviest key. In a row near one-hot the baseline is
    almost that key's utility, and their plain difference would lose all digits."""
    utility = torch.where(rates > 0, utility, 0.0)
    if slack is None or not rates.shape[-1]:
        return utility
    reference = utility.gather(-1, rates.detach().argmax(-1, keepdim=True))
    rest = utility - reference
    total = rates.sum(-1, keepdim=True) + slack
    total = torch.where(total > 0, total, 1.0)
    return rest - (rates * rest).sum(-1, keepdim=True) / total + reference * (slack / total)


def _anchor(rows: RowEquation) -> tuple[Tensor, Tensor]:
    """The score of each row's best key (-inf if there is none), and the price at which it alone would take the mass."""
    log_mass = torch.full((), math.log(rows.form.mass), dtype=rows.scores.dtype, device=rows.scores.device)
    if rows.log_prior is None:
        anchor = rows.masked(rows.scores, -math.inf).amax(-1, keepdim=True)
        price = anchor - rows.temperature * rows.regularizer.inverse(log_mass)
    else:
        prices = rows.scores - rows.temperature * rows.regularizer.inverse(log_mass - rows.log_prior)
        prices = prices.clamp(min=torch.finfo(prices.dtype).min)  # -inf is for keys that are not admissible
        price, best = rows.masked(prices, -math.inf).max(-1, keepdim=True)
        anchor = torch.where(price == -math.inf, -math.inf, rows.scores.gather(-1, best))
        if rows.form.marginal == "relax" and rows.form.family != "kl":
            log_prior = rows.log_prior.expand_as(rows.scores).gather(-1, best)
            price = torch.where(price == -math.inf, price, _relaxed_price(rows, anchor, log_prior))
    if rows.form.marginal == "sink":
        null = log_mass if rows.null_log_prior is None else log_mass - rows.null_log_prior
        null_price = (
            rows.marginal_parameter - rows.temperature * rows.regularizer.inverse(null) + torch.zeros_like(price)
        )
        anchor = torch.where(null_price > price, rows.marginal_parameter, anchor)
        price = torch.maximum(price, null_price)
    return anchor, price


def _relaxed_price(rows: RowEquation, anchor: Tensor, log_prior: Tensor) -> Tensor:
    """The price at which a single key takes the mass that a relaxed row has at that price. A tiny prior means a tiny
    mass, and a search that begins at the full mass would begin too far away."""
    low, high = torch.full_like(anchor, -1e4), torch.zeros_like(anchor)  # of the mass's logarithm
    for _ in range(40):
        middle = (low + high) / 2
        price = anchor - rows.temperature * rows.regularizer.inverse(middle - log_prior)
        above = rows.dual(price - rows.anchor) / rows.marginal_parameter > middle
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (anchor - rows.temperature * rows.regularizer.inverse(high - log_prior)).clamp(
        min=torch.finfo(anchor.dtype).min
    )


def _full_rows(rows: RowEquation) -> Tensor | None:
    """Rows whose keys together can take at most the mass (Fermi-Dirac, early causal rows): there p = ceiling * pi."""
    if rows.regularizer.ceiling == math.inf or rows.form.marginal != "rows":
        return None
    return rows.prior().sum(-1, keepdim=True) * rows.regularizer.ceiling <= rows.form.mass


def _closed_form(rows: RowEquation) -> Tensor:
    """mu for KL."""
    x = rows.scores / rows.temperature
    if rows.log_prior is not None:
        x = x + rows.log_prior
    lse = rows.masked(x, -math.inf).logsumexp(-1, keepdim=True)
    if rows.form.marginal == "sink":
        null = (rows.marginal_parameter - rows.anchor) / rows.temperature
        lse = torch.logaddexp(lse, null if rows.null_log_prior is None else null + rows.null_log_prior)
    mu = rows.temperature * (lse - math.log(rows.form.mass))
    if rows.form.marginal == "relax":
        fixed = rows.anchor + rows.shift
        return (fixed + mu) * (rows.marginal_parameter / (rows.temperature + rows.marginal_parameter)) - fixed
    return mu


def _search(rows: RowEquation, start: Tensor, idle: Tensor) -> Tensor:
    """mu for any link: Newton on a power of taken/target, in which the equation is nearly linear. A bracket grows
    while it is open, and is halved where Newton leaves it."""
    tau, eps = rows.temperature, torch.finfo(start.dtype).eps
    gamma = 0.0 if rows.form.marginal == "relax" else rows.regularizer.power
    mu = torch.where(idle, 0.0, start)
    low, high = torch.full_like(mu, -math.inf), torch.full_like(mu, math.inf)
    width = torch.zeros_like(mu) + 16 * tau
    for iteration in range(200):
        taken, target, slope = rows.sides(mu)
        low, high = torch.where(taken >= target, mu, low), torch.where(taken <= target, mu, high)
        ratio = taken / target
        if rows.form.marginal == "relax":
            # The slope of the logarithm of the ratio: the target depends on the price, too.
            slope = slope + tau * (taken - target) / rows.marginal_parameter
        linear = ratio.log() if isinstance(gamma, float) and gamma == 0 else (gamma * ratio.log()).expm1() / gamma
        newton = mu + tau * linear * ratio ** (1 - gamma) * target / slope
        bracketed = low.isfinite() & high.isfinite()
        farthest = torch.where(taken > target, torch.minimum(high, mu + width), torch.maximum(low, mu - width))
        inside = ((newton - mu).abs() < (farthest - mu).abs()) & (newton != mu)  # false for NaN
        if iteration >= 30 and iteration % 2:
            inside = inside & ~bracketed
        following = torch.where(inside, newton, torch.where(bracketed, (low + high) / 2, farthest))
        width = torch.where(inside | bracketed, width, 4 * width)
        # A Newton step this small squares the error if the equation is linear, which the second condition ensures.
        last = ((newton - mu).abs() <= eps**0.75 * tau) & ((ratio - 1).abs() < 0.1 * eps**0.5)
        following = torch.where(last, newton, following)
        done = idle | last | (taken == target) | (high - low <= 2 * eps * mu.abs()) | taken.isnan() | target.isnan()
        mu = torch.where(idle | (taken == target), mu, following)
        if _settled(done):
            break
    return mu


def _settled(rows: Tensor) -> bool:
    """Whether all rows are done. Under vmap and on fake tensors this is unknown, and the loop makes all its
    iterations."""
    try:
        return bool(rows.all())
    except RuntimeError:
        return False


def _hard_rows(rows: Solution, cold: Tensor) -> Solution:
    """At temperature 0 the best keys share the mass equally."""
    scores, null_score = rows.scores.detach(), rows.null_score.detach()
    top = rows.where_admissible(scores, -math.inf).amax(-1, keepdim=True)
    if rows.null is not None:
        top = torch.maximum(top, null_score)
    cold = cold & ~top.isnan()  # a row with NaN stays NaN
    best = rows.where_admissible((scores == top).to(scores.dtype), 0.0)
    count = best.sum(-1, keepdim=True)
    mass = torch.full_like(top, rows.form.mass)
    if rows.null is not None:
        count = count + (null_score == top)
    elif rows.form.marginal == "relax":
        mass = torch.where(cold, top / null_score, 0.0).exp()
    share = mass / count.clamp(min=1)
    null = None if rows.null is None else torch.where(cold, (null_score == top) * share, rows.null)
    weights = torch.where(cold, best * share, rows.weights)
    return replace(rows, weights=weights, null=null, dual=torch.where(cold, top, rows.dual))
