"""The definition: every one-sided problem in plain PyTorch, on any device, in blocks of queries.

For each row the plan is p_j = pi_j g((s_j - lambda)/tau), and lambda is the root of one monotone equation, the
marginal. `solve_rows` finds it (in closed form for KL, by safeguarded Newton otherwise) outside of autograd and then
takes the derivative of one more Newton step inside, whose value is 0: that is the implicit function theorem,

    d lambda = sum_j w_j ds_j / (sum_j w_j + kappa),    so    dL/ds_j = (w_j/tau) (u_j - sum w u / (sum w + kappa)),

which is the gradient of every regulariser and every marginal: w = pi g' and kappa are all that changes. Two steps give
the derivatives up to the third. `forward` and `backward` walk over blocks of queries, one block of the plan at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..form import Form, output_shapes
from ..parts import Scalar
from ..regularizers import Regularizer
from ..statistics import STATISTICS, Solution

BLOCK = 2**21  # weights alive at once (in a handful of buffers): 8 MiB each in float32


def unsupported(form: Form, names: tuple[str, ...]) -> str | None:
    """Why this backend cannot serve the problem: it serves all."""
    return None


def saved(form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
    """What backward wants from forward besides the caller's statistics."""
    return ("mu",)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass
class Balance:
    """One equation per row: what the keys (and the null key) take at the price mu = lambda + tau * origin is the mass.

    Scores and prices are measured from `anchor`, the score of the row's best key: differences there lose no digits.
    """

    scores: Tensor  # [B, H, Tq, Tk]
    anchor: Tensor  # [B, H, Tq, 1]
    log_prior: Tensor | None
    admissible: Tensor | None
    temperature: Scalar
    level: Scalar
    regularizer: Regularizer
    form: Form
    shift: Scalar = 0.0  # lambda = anchor + mu - origin + shift
    null_log_prior: Tensor | None = None  # of the null key: 0, less what was taken out of the prior

    @property
    def origin(self) -> Scalar:
        return self.temperature * self.regularizer.origin

    def detached(self) -> Balance:
        def detach(x: Scalar) -> Scalar:
            return x.detach() if isinstance(x, Tensor) else x

        return replace(
            self,
            scores=self.scores.detach(),
            log_prior=None if self.log_prior is None else self.log_prior.detach(),
            temperature=detach(self.temperature),
            level=detach(self.level),
            shift=detach(self.shift),
            regularizer=replace(self.form, alpha=detach(self.form.alpha)).regularizer,
        )

    def without_common_prior(self) -> Balance:
        """The same rows with the largest prior of each at 1, where the regulariser has another place for the factor."""
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
        return self.masked(self.regularizer.weights(self.price(self.scores, mu), self.log_prior), 0.0)

    def null(self, mu: Tensor) -> Tensor | None:
        """The null key's weight: it has the prior 1."""
        if self.form.marginal != "sink":
            return None
        return self.regularizer.weights(self.price(self.level - self.anchor, mu), self.null_log_prior)

    def sides(self, mu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mass taken, mass to be taken, and sum(w) + kappa, each [B, H, Tq, 1]."""
        p, w = self.regularizer.weights_and_slopes(self.price(self.scores, mu), self.log_prior)
        taken, slope = self.masked(p, 0.0).sum(-1, keepdim=True), self.masked(w, 0.0).sum(-1, keepdim=True)
        target = torch.full_like(taken, self.form.mass)
        if self.form.marginal == "sink":
            p, w = self.regularizer.weights_and_slopes(self.price(self.level - self.anchor, mu), self.null_log_prior)
            taken, slope = taken + p, slope + w
        elif self.form.marginal == "relax":
            target = (self.dual(mu) / self.level).exp()
            slope = slope + self.temperature * target / self.level
        return taken, target, slope

    def rates(self, mu: Tensor) -> tuple[Tensor, Tensor | None]:
        """w/tau [B, H, Tq, Tk] and kappa/tau [B, H, Tq, 1] (None: infinite). A prior's common factor leaves them be."""
        _, w = self.regularizer.weights_and_slopes(self.price(self.scores, mu), self.log_prior)
        slack = None if self.form.marginal == "free" else torch.zeros_like(mu)
        if self.form.marginal == "sink":
            _, w0 = self.regularizer.weights_and_slopes(self.price(self.level - self.anchor, mu), self.null_log_prior)
            slack = w0 / self.temperature
        elif self.form.marginal == "relax":
            slack = (self.dual(mu) / self.level).exp() / self.level
        return self.masked(w, 0.0) / self.temperature, slack

    def prior(self) -> Tensor:
        prior = torch.ones_like(self.scores) if self.log_prior is None else self.log_prior.exp().expand_as(self.scores)
        return self.masked(prior, 0.0)


def solve_rows(form: Form, scores: Tensor, mu: Tensor | None = None, order: int = 1, rates: bool = False) -> Solution:
    """The optimal rows for these scores. A known mu (the price, from the anchor) saves the search; as many derivatives
    as `order` (1 or 2) are exact. `rates` also fills the solution's rates and slack: the geometry of the rows."""
    if form.marginal == "columns":
        raise NotImplementedError("RowsAndColumns: its rows depend on one another and cannot be solved one by one here")
    B, H, Tq, Tk = scores.shape
    device = scores.device
    admissible = form.admissible(Tq, Tk, device)
    log_prior = form.log_prior(Tq, Tk, scores.dtype, device)
    if Tk == 0:  # as one key that is not admissible: no special case below
        scores, log_prior = scores.new_zeros(B, H, Tq, 1), None
        admissible = torch.zeros(1, dtype=torch.bool, device=device)
    if admissible is not None and log_prior is not None:
        log_prior = torch.where(admissible, log_prior, 0.0)
    temperature, cold = form.temperature, None
    if form.hard:
        cold = torch.as_tensor(temperature, dtype=scores.dtype, device=device) == 0
        temperature = torch.where(cold, 1.0, temperature)

    no_anchor = scores.new_zeros(B, H, Tq, 1)
    rows = Balance(scores, no_anchor, log_prior, admissible, temperature, form.level, form.regularizer, form)
    full = _full_rows(rows.detached())
    rows = rows.without_common_prior()
    anchor, first_price = _anchor(rows.detached())
    if form.marginal == "rows":  # keys to read, and no score above -inf: 0/0
        read = torch.ones_like(anchor, dtype=torch.bool) if admissible is None else admissible.any(-1, keepdim=True)
        anchor = torch.where((anchor == -math.inf) & read, math.nan, anchor)
    idle = anchor == -math.inf if full is None else (anchor == -math.inf) | full  # no price makes a difference
    rows.anchor = torch.where(idle, 0.0, anchor)
    # Not below what a temperature can divide: a mask of the lowest number must not meet 0 * inf in a derivative.
    # (Not clamp, whose derivative at NaN is 0.)
    lowest, rows.scores = -torch.finfo(scores.dtype).max * 1e-10, scores - rows.anchor
    rows.scores = torch.where(rows.scores < lowest, lowest, rows.scores)

    if form.marginal == "free":
        mu = rows.origin - form.level - rows.anchor - rows.shift
    elif mu is None:
        fixed = rows.detached()
        mu = _closed_form(fixed) if form.family == "kl" else _search(fixed, first_price - anchor, idle)
        mu = torch.where(idle, 0.0, mu)
    if admissible is not None:  # where a key is not admissible t = 0: no infinity may enter a derivative there
        rows.scores = torch.where(admissible, rows.scores, mu.detach())
    start = mu.detach()
    for _ in range(order if form.marginal != "free" else 0):
        taken, target, slope = rows.sides(mu)
        slope = slope.detach() if order == 1 else slope  # it multiplies taken - target = 0
        slope = torch.where(taken.isnan(), math.nan, slope)  # a row with a NaN: so is its derivative
        moves = ~((slope <= 0) | slope.isinf() | taken.isinf() | target.isinf() | idle)
        step = torch.where(moves, rows.temperature * (taken - target) / torch.where(moves, slope, 1.0), 0.0)
        mu = mu + (step - step.detach())  # only its derivative: the search has gone as far as rounding allows

    p, null = rows.weights(mu), rows.null(mu)
    # What rounding of the price left over is shared in proportion. One NaN makes the row's share NaN, and so all of its
    # weights and their derivatives: a link's own derivative there may be a number.
    taken = p.detach().sum(-1, keepdim=True) + (0.0 if null is None else null.detach())
    exact = (taken <= 0) | taken.isinf() | idle if form.marginal in ("rows", "sink") else ~taken.isnan()
    share = torch.where(exact, 1.0, form.mass / taken)
    p, null = p * share, None if null is None else null * share
    dual = rows.dual(mu)
    if form.marginal != "free":
        dual = torch.where(idle, -math.inf, dual)
    if full is not None:
        p = torch.where(full, rows.prior(), p)
    scores = scores if admissible is None else torch.where(admissible, scores, 0.0)
    solution = Solution(form, rows.regularizer, temperature, scores, p, dual, start, log_prior, admissible, null)
    if rates:  # 0 where the plan cannot move: no keys, all keys full, hard routing
        w, slack = rows.rates(mu)
        still = idle if cold is None else idle | cold
        solution.rates = torch.where(still, 0.0, torch.where(taken.isnan(), taken, w))
        solution.slack = None if slack is None else torch.where(still, 0.0, slack)
    return solution if cold is None else _hard_rows(solution, cold)


def centred(rates: Tensor, slack: Tensor | None, utility: Tensor) -> Tensor:
    """u - sum r u / (sum r + slack) where r > 0, measured from the heaviest key: in a row near one-hot its baseline is
    almost that key's utility, and their difference would have no digits."""
    utility = torch.where(rates > 0, utility, 0.0)
    if slack is None or not rates.shape[-1]:
        return utility
    reference = utility.gather(-1, rates.detach().argmax(-1, keepdim=True))
    rest = utility - reference
    total = rates.sum(-1, keepdim=True) + slack
    total = torch.where(total > 0, total, 1.0)
    return rest - (rates * rest).sum(-1, keepdim=True) / total + reference * (slack / total)


def _anchor(rows: Balance) -> tuple[Tensor, Tensor]:
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
        null_price = rows.level - rows.temperature * rows.regularizer.inverse(null) + torch.zeros_like(price)
        anchor = torch.where(null_price > price, rows.level, anchor)
        price = torch.maximum(price, null_price)
    return anchor, price


def _relaxed_price(rows: Balance, anchor: Tensor, log_prior: Tensor) -> Tensor:
    """The price at which a key alone takes the mass that a relaxed row has at that price. Where the prior is
    tiny so is this mass, and a search that began at the full one would begin out of reach."""
    low, high = torch.full_like(anchor, -1e4), torch.zeros_like(anchor)  # of the mass's logarithm
    for _ in range(40):
        middle = (low + high) / 2
        price = anchor - rows.temperature * rows.regularizer.inverse(middle - log_prior)
        above = rows.dual(price - rows.anchor) / rows.level > middle
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (anchor - rows.temperature * rows.regularizer.inverse(high - log_prior)).clamp(
        min=torch.finfo(anchor.dtype).min
    )


def _full_rows(rows: Balance) -> Tensor | None:
    """Rows whose keys cannot take more than the mass (Fermi-Dirac, early causal rows): there p = pi."""
    if rows.regularizer.ceiling == math.inf or rows.form.marginal != "rows":
        return None
    return rows.prior().sum(-1, keepdim=True) * rows.regularizer.ceiling <= rows.form.mass


def _closed_form(rows: Balance) -> Tensor:
    """mu for KL."""
    x = rows.scores / rows.temperature
    if rows.log_prior is not None:
        x = x + rows.log_prior
    lse = rows.masked(x, -math.inf).logsumexp(-1, keepdim=True)
    if rows.form.marginal == "sink":
        null = (rows.level - rows.anchor) / rows.temperature
        lse = torch.logaddexp(lse, null if rows.null_log_prior is None else null + rows.null_log_prior)
    mu = rows.temperature * (lse - math.log(rows.form.mass))
    if rows.form.marginal == "relax":
        fixed = rows.anchor + rows.shift
        return (fixed + mu) * (rows.level / (rows.temperature + rows.level)) - fixed
    return mu


def _search(rows: Balance, start: Tensor, idle: Tensor) -> Tensor:
    """mu for any link: Newton on a power of taken/target in which the equation is nearly straight, inside a bracket
    that grows where it is open and is halved where Newton leaves it."""
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
            slope = slope + tau * (taken - target) / rows.level  # of the ratio's logarithm, whose target moves too
        straight = ratio.log() if isinstance(gamma, float) and gamma == 0 else (gamma * ratio.log()).expm1() / gamma
        newton = mu + tau * straight * ratio ** (1 - gamma) * target / slope
        bracketed = low.isfinite() & high.isfinite()
        farthest = torch.where(taken > target, torch.minimum(high, mu + width), torch.maximum(low, mu - width))
        inside = ((newton - mu).abs() < (farthest - mu).abs()) & (newton != mu)  # false for NaN
        if iteration >= 30 and iteration % 2:
            inside = inside & ~bracketed
        following = torch.where(inside, newton, torch.where(bracketed, (low + high) / 2, farthest))
        width = torch.where(inside | bracketed, width, 4 * width)
        # A step this small squares the error, where the equation is as straight as the second condition says.
        last = ((newton - mu).abs() <= eps**0.75 * tau) & ((ratio - 1).abs() < 0.1 * eps**0.5)
        following = torch.where(last, newton, following)
        done = idle | last | (taken == target) | (high - low <= 2 * eps * mu.abs()) | taken.isnan() | target.isnan()
        mu = torch.where(idle | (taken == target), mu, following)
        if _settled(done):
            break
    return mu


def _settled(rows: Tensor) -> bool:
    """All rows done? Under vmap or on fake tensors nobody can tell: then the loop runs its full course."""
    try:
        return bool(rows.all())
    except RuntimeError:
        return False


def _hard_rows(rows: Solution, cold: Tensor) -> Solution:
    """At temperature 0 the best keys share the mass equally."""
    scores, level = rows.scores.detach(), rows.null_score.detach()
    top = rows.where_admissible(scores, -math.inf).amax(-1, keepdim=True)
    if rows.null is not None:
        top = torch.maximum(top, level)
    cold = cold & ~top.isnan()  # such a row stays NaN
    best = rows.where_admissible((scores == top).to(scores.dtype), 0.0)
    count = best.sum(-1, keepdim=True)
    mass = torch.full_like(top, rows.form.mass)
    if rows.null is not None:
        count = count + (level == top)
    elif rows.form.marginal == "relax":
        mass = torch.where(cold, top / level, 0.0).exp()
    share = mass / count.clamp(min=1)
    null = None if rows.null is None else torch.where(cold, (level == top) * share, rows.null)
    weights = torch.where(cold, best * share, rows.weights)
    return replace(rows, weights=weights, null=null, dual=torch.where(cold, top, rows.dual))


# --- attention --------------------------------------------------------------------------------------------------------


def scores_of(form: Form) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Tq, Tk] and values [B, Hkv, Tk, Dv] in the compute dtype, safe against rubbish in masked keys."""
    assert form.query is not None and form.key is not None and form.value is not None
    B, H, Tq, Tk = form.shape
    Hkv = form.key.shape[1]
    query, key, value = (t.to(form.dtype) for t in (form.query, form.key, form.value))
    admissible = form.admissible(Tq, Tk, query.device)
    if admissible is not None:
        # A key that no query here may read can hold NaN, and 0 * NaN is NaN: it is read as zeros. So is a query that
        # may read nothing.
        admissible = admissible.expand(*torch.broadcast_shapes(admissible.shape, (1, 1, 1, 1)))
        query = torch.where(admissible.any(3, keepdim=True), query, 0.0)
        read = admissible.any(2)  # [B|1, H|1, Tk|1]
        if read.shape[1] > 1:
            read = read.unflatten(1, (Hkv, form.group)).any(2)
        key = torch.where(read[..., None], key, 0.0)
        value = torch.where(read[..., None], value, 0.0)
    grouped = query.reshape(B, Hkv, form.group * Tq, query.shape[-1])
    scores = (grouped @ key.mT).view(B, H, Tq, Tk) * form.scale
    if form.softcap is not None:
        scores = form.softcap * (scores / form.softcap).tanh()
    if form.score_bias is not None:
        scores = scores + form.score_bias.to(form.dtype)
    return scores, value


def attend(form: Form, names: tuple[str, ...], mu: Tensor | None = None, order: int = 1) -> dict[str, Tensor]:
    """Output and statistics of a whole form, densely: differentiable, and all of the plan in memory."""
    scores, value = scores_of(form)
    rows = solve_rows(form, scores, mu, order)
    results = {}
    if "out" in names or "value_spread" in names:
        rows.values, rows.output = value, _transport(rows.weights, value)
    for name in names:
        if name == "out":
            results[name] = rows.output if form.dropout_key is None else _transport(_dropped(rows), value)
        elif name == "key_mass":
            results[name] = STATISTICS[name](rows)[..., : value.shape[2]]
        elif name == "mu":
            results[name] = rows.mu.squeeze(-1)
        elif name == "weights":
            results[name] = rows.weights[..., : value.shape[2]]
        else:
            results[name] = STATISTICS[name](rows)
    return results


def _transport(weights: Tensor, value: Tensor) -> Tensor:
    B, H, Tq = weights.shape[:3]
    Hkv, Tk, Dv = value.shape[1:]
    grouped = weights[..., :Tk].reshape(B, Hkv, H // max(1, Hkv) * Tq, Tk)
    return (grouped @ value).view(B, H, Tq, Dv)


def _dropped(rows: Solution) -> Tensor:
    form = rows.form
    kept = form.kept(rows.weights.shape[2], rows.weights.shape[3], rows.weights.device)
    scale = 1 / (1 - form.dropout_p) if form.dropout_p < 1 else 0.0
    return torch.where(kept, rows.weights * scale, 0.0)


def blocks(form: Form) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Blocks of about BLOCK weights: whole batches and heads while they fit, then ranges of queries.

    Yielded with queries innermost, then heads, then batch; keys are those the band lets the queries reach.
    """
    B, H, Tq, Tk = form.shape
    rows_wanted = min(Tq, 64)  # fewer rows a block would re-read all keys too often
    group, room = max(1, form.group), BLOCK // max(1, Tk)
    heads = min(H, max(1, room // max(1, rows_wanted * group)) * group)
    batch = max(1, room // max(1, rows_wanted * H)) if heads == H else 1
    queries = max(1, room // max(1, heads * min(B, batch)))
    for b in range(0, B, batch):
        for h in range(0, H, max(1, heads)):
            for i in range(0, Tq, queries):
                rows = slice(i, min(Tq, i + queries))
                keys = _rounded(form.key_range(rows), Tk)
                yield slice(b, min(B, b + batch)), slice(h, min(H, h + heads)), rows, keys


def _rounded(keys: slice, Tk: int) -> slice:
    """A little longer, to one of few lengths: buffers of ever new sizes would fragment the allocator."""
    length = keys.stop - keys.start
    grid = max(64, 2 ** (length.bit_length() - 3))
    start = max(0, min(keys.start, Tk - -(-length // grid) * grid))
    return slice(start, min(Tk, start + -(-(keys.stop - start) // grid) * grid))


def forward(form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics, block by block, with nothing recorded for a gradient."""
    assert form.query is not None
    results = {n: form.query.new_zeros(s, dtype=form.dtype) for n, s in output_shapes(form, names).items()}
    with torch.no_grad(), _full_precision(form):
        for b, h, i, j in blocks(form):
            for name, part in attend(form.cut(b, h, i, j), names).items():
                if name == "key_mass":
                    results[name][b, h, j] += part
                else:
                    results[name][b, h, i] = part
    return results


def differentiable(form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The same as plain operations that autograd, forward mode and vmap see through; right up to third derivatives."""
    B, H, Tq, Tk = form.shape
    if 0 in (B, H, Tq):
        return forward(form, names)
    # Nested lists of blocks are joined from the inside out: writing into a buffer would break transforms.
    batches: list[dict[str, Tensor]] = []
    heads: list[dict[str, Tensor]] = []
    parts: list[dict[str, Tensor]] = []
    with _full_precision(form):
        for b, h, i, j in blocks(form):
            part = attend(form.cut(b, h, i, j), names, order=2)
            if "key_mass" in part:
                part["key_mass"] = torch.nn.functional.pad(part["key_mass"], (j.start, Tk - j.stop))
            parts.append(part)
            if i.stop == Tq:
                heads.append(_join(parts, 2))
                parts = []
                if h.stop == H:
                    batches.append(_join(heads, 1))
                    heads = []
        return _join(batches, 0)


def tangents(form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The tangents of outputs, where tensors of the form are dual: block by block into one buffer, first order only."""
    slots = {name for name, t in form.tensors().items() if forward_ad.unpack_dual(t).tangent is not None}
    direct = names == ("out",) and slots <= {"query", "key", "value", "score_bias"}
    results: dict[str, Tensor] = {}
    shapes = output_shapes(form, names)
    if 0 in form.shape[:3]:
        return {name: torch.zeros(shape, dtype=form.dtype) for name, shape in shapes.items()}
    with _full_precision(form):
        for where in blocks(form):
            block = form.cut(*where)
            if direct:
                parts = {"out": _output_tangent(block)}
            else:
                duals = {name: forward_ad.unpack_dual(dual) for name, dual in attend(block, names).items()}
                parts = {n: torch.zeros_like(d.primal) if d.tangent is None else d.tangent for n, d in duals.items()}
            for name, part in parts.items():
                if name not in results:
                    results[name] = part.new_zeros(shapes[name])
                results[name][where[:3]] = part
    return results


def _output_tangent(form: Form) -> Tensor:
    """sum_j dp_j v_j + p_j dv_j with dp = r (x - sum r x / (sum r + slack)), r = w/tau and x the scores' tangent."""
    (scores, x), (value, value_tangent) = (forward_ad.unpack_dual(dual) for dual in scores_of(form))
    rows = solve_rows(form, scores, rates=True)
    weights = rows.weights if form.dropout_key is None else _dropped(rows)
    result = scores.new_zeros(*scores.shape[:3], value.shape[3])
    if value_tangent is not None:
        result = result + _transport(weights, value_tangent)
    if x is not None and x.shape[3]:
        assert rows.rates is not None
        moved = replace(rows, weights=rows.rates * centred(rows.rates, rows.slack, x))
        result = result + _transport(moved.weights if form.dropout_key is None else _dropped(moved), value)
    return result


def _join(parts: list[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    joined = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        # key_mass has no query dimension: blocks of queries add up.
        joined[name] = torch.stack(pieces).sum(0) if name == "key_mass" and dim == 2 else torch.cat(pieces, dim)
    return joined


def backward(
    form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the needed slots, from forward's outputs (`saved` among them) and the gradients of some."""
    names = tuple(grads)
    # Inference mode would record nothing here, and every gradient would be 0.
    with torch.inference_mode(False), _full_precision(form), torch.enable_grad():
        tensors, outputs, grads = (_recordable(given) for given in (form.tensors(), outputs, grads))
        form = form.with_tensors(tensors)
        totals = {name: torch.zeros_like(tensors[name], dtype=form.dtype) for name in needed}
        for where in blocks(form):
            block = form.cut(*where)
            leaves = {n: t.detach().to(form.dtype).requires_grad_() for n, t in block.tensors().items() if n in needed}
            mu = outputs["mu"][where[:3]].detach()[..., None]
            results = attend(block.with_tensors(leaves), names, mu)
            varied = [n for n in names if results[n].requires_grad]  # without keys, lse and entropy are constants
            if not varied:
                continue
            incoming = [grads[n][where[:3]].to(form.dtype) for n in varied]
            sources = list(leaves.values())
            found = torch.autograd.grad([results[n] for n in varied], sources, incoming, allow_unused=True)
            for name, grad in zip(leaves, found, strict=True):
                if grad is not None:
                    form.cut_slot(name, totals[name], *where).add_(grad)
        return {name: total.to(tensors[name].dtype) for name, total in totals.items()}


def _recordable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that were made in inference mode, which autograd does not take."""
    return {name: t.clone() if t.is_inference() else t for name, t in tensors.items()}


def _full_precision(form: Form) -> AbstractContextManager:
    """The compute dtype is chosen already: autocast must not touch what happens inside."""
    assert form.query is not None
    device = form.query.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
