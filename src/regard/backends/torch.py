"""The definition: every one-sided problem in plain PyTorch, on any device, in blocks of queries.

For each row the plan is p_j = pi_j g((s_j - lambda)/tau), and lambda is the root of one monotone equation, the marginal.
`solve_rows` finds it (in closed form for KL, by safeguarded Newton otherwise) outside of autograd and then takes one more
Newton step inside: the step changes only rounding, but its derivative is the implicit function theorem,

    d lambda = sum_j w_j ds_j / (sum_j w_j + kappa),    so    dL/ds_j = (w_j/tau) (u_j - sum w u / (sum w + kappa)),

which is the gradient of every regulariser and every marginal: w = pi g' and kappa are all that changes. Two steps give the
derivatives up to the third. `forward` and `backward` walk over blocks of queries and keep only one block of the plan alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..form import Form, output_shapes
from ..problem import Regularizer, Scalar
from ..statistics import DIFFERENTIABLE, STATISTICS, Solution

BLOCK = 2**21  # weights alive at once (in a handful of buffers): 8 MiB each in float32


def unsupported(form: Form, names: tuple[str, ...]) -> str | None:
    """Why this backend cannot serve the problem: it serves all."""
    return None


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass
class Balance:
    """One row equation per query: what the keys (and the null key) take at price mu = lambda + tau * origin."""

    scores: Tensor  # [B, H, Tq, Tk]
    log_prior: Tensor | None
    admissible: Tensor | None
    temperature: Scalar
    level: Scalar
    regularizer: Regularizer
    form: Form

    def detached(self) -> Balance:
        def detach(x: Scalar) -> Scalar:
            return x.detach() if isinstance(x, Tensor) else x

        return replace(
            self,
            scores=self.scores.detach(),
            log_prior=None if self.log_prior is None else self.log_prior.detach(),
            temperature=detach(self.temperature),
            level=detach(self.level),
            regularizer=replace(self.form, alpha=detach(self.form.alpha)).regularizer,
        )

    def price(self, base: Tensor, step: Scalar) -> Tensor:
        """t = (s - mu)/tau, mu = base + step, for each key; 0 where the key is not admissible."""
        t = (self.scores - base - step) / self.temperature
        return t if self.admissible is None else torch.where(self.admissible, t, 0.0)

    def weights(self, base: Tensor, step: Scalar) -> Tensor:
        p = self.regularizer.weights(self.price(base, step), self.log_prior)
        return p if self.admissible is None else torch.where(self.admissible, p, 0.0)

    def null(self, base: Tensor, step: Scalar) -> Tensor | None:
        """The null key's weight: it has the prior 1."""
        if self.form.marginal != "sink":
            return None
        return self.regularizer.link((self.level - base - step) / self.temperature)

    def sides(self, base: Tensor, step: Scalar) -> tuple[Tensor, Tensor, Tensor]:
        """Mass taken, mass to be taken, and sum(w) + kappa, each [B, H, Tq, 1]."""
        t = self.price(base, step)
        p = self.regularizer.weights(t, self.log_prior)
        w = self.regularizer.weight_slopes(t, self.log_prior)
        if self.admissible is not None:
            p, w = torch.where(self.admissible, p, 0.0), torch.where(self.admissible, w, 0.0)
        taken, slope = p.sum(-1, keepdim=True), w.sum(-1, keepdim=True)
        target = torch.full_like(taken, self.form.mass)
        if self.form.marginal == "sink":
            t = (self.level - base - step) / self.temperature
            taken, slope = taken + self.regularizer.link(t), slope + self.regularizer.slope(t)
        elif self.form.marginal == "relax":
            dual = base + step - self.temperature * self.regularizer.origin
            target = (dual / self.level).exp()
            slope = slope + self.temperature * target / self.level
        return taken, target, slope

    def top(self) -> Tensor:
        """The largest score of each row, the null key's included; -inf in a row without keys."""
        scores = self.scores if self.admissible is None else torch.where(self.admissible, self.scores, -math.inf)
        top = scores.amax(-1, keepdim=True)
        return torch.clamp(top, min=self.level) if self.form.marginal == "sink" else top


def solve_rows(form: Form, scores: Tensor, dual: Tensor | None = None, order: int = 1) -> Solution:
    """The optimal rows for these scores. A known dual saves the search; `order` (1 or 2) derivatives are exact."""
    B, H, Tq, Tk = scores.shape
    device = scores.device
    admissible = form.admissible(Tq, Tk, device)
    log_prior = form.log_prior(Tq, Tk, scores.dtype, device)
    if Tk == 0:  # as one key that is not admissible: no special case below
        scores, log_prior = scores.new_zeros(B, H, Tq, 1), None
        admissible = torch.zeros(1, dtype=torch.bool, device=device)
    if admissible is not None:
        scores = torch.where(admissible, scores, 0.0)
        log_prior = None if log_prior is None else torch.where(admissible, log_prior, 0.0)

    temperature, hard = form.temperature, None
    if form.hard:
        hard = torch.as_tensor(temperature, dtype=scores.dtype, device=device) == 0
        temperature = torch.where(hard, 1.0, temperature)
    rows = Balance(scores, log_prior, admissible, temperature, form.level, form.regularizer, form)
    fixed = rows.detached()
    origin = rows.temperature * rows.regularizer.origin
    top = fixed.top()
    full = _full_rows(fixed)
    idle = top == -math.inf if full is None else (top == -math.inf) | full  # no price makes a difference

    step: Scalar = 0.0
    if form.marginal == "free":
        base = torch.zeros_like(top) - form.level + origin
        result = base - origin
    else:
        if dual is not None:
            base = dual + fixed.temperature * fixed.regularizer.origin
        else:
            base = _closed_form(fixed, top) if form.family == "kl" else _search(fixed, top, idle)
        base = torch.where(idle, 0.0, base)
        for _ in range(order):
            taken, target, slope = rows.sides(base, step)
            slope = slope.detach() if order == 1 else slope  # it multiplies taken - target = 0
            moves = (slope > 0) & ~idle
            step = step + torch.where(moves, rows.temperature * (taken - target) / torch.where(moves, slope, 1.0), 0.0)
        result = torch.where(idle, -math.inf, base + step - origin)

    p, null = rows.weights(base, step), rows.null(base, step)
    if full is not None:
        prior = torch.ones_like(p) if log_prior is None else log_prior.exp().expand_as(p)
        p = torch.where(full, prior if admissible is None else torch.where(admissible, prior, 0.0), p)
    if hard is not None:
        p, null, result = _hard_rows(rows, hard, top, p, null, result)
    return Solution(form, rows.regularizer, temperature, scores, p, result, log_prior, admissible, null)


def _full_rows(rows: Balance) -> Tensor | None:
    """Rows whose keys cannot take more than the mass (Fermi-Dirac, early causal rows): there p = pi."""
    if rows.regularizer.ceiling == math.inf or rows.form.marginal != "rows":
        return None
    prior = torch.ones_like(rows.scores) if rows.log_prior is None else rows.log_prior.exp().expand_as(rows.scores)
    if rows.admissible is not None:
        prior = torch.where(rows.admissible, prior, 0.0)
    return prior.sum(-1, keepdim=True) * rows.regularizer.ceiling <= rows.form.mass


def _closed_form(rows: Balance, top: Tensor) -> Tensor:
    """lambda for KL."""
    top = torch.where(top == -math.inf, 0.0, top)
    x = (rows.scores - top) / rows.temperature
    if rows.log_prior is not None:
        x = x + rows.log_prior
    if rows.admissible is not None:
        x = torch.where(rows.admissible, x, -math.inf)
    lse = x.logsumexp(-1, keepdim=True)
    if rows.form.marginal == "sink":
        lse = torch.logaddexp(lse, (rows.level - top) / rows.temperature)
    potential = top + rows.temperature * (lse - math.log(rows.form.mass))
    if rows.form.marginal == "relax":
        return potential * (rows.level / (rows.temperature + rows.level))
    return potential


def _search(rows: Balance, top: Tensor, idle: Tensor) -> Tensor:
    """mu for any link: bracket the root by doubling, then Newton on log(taken/target), with bisection as a net."""
    start = torch.where(idle, 0.0, top)
    low, high = start, start
    if rows.form.marginal == "relax":  # the root lies between 0 and the root of the rows
        low, high = start.clamp(max=0), start.clamp(min=0)
    width = torch.zeros_like(start) + rows.temperature
    for _ in range(128):
        taken, target, _ = rows.sides(low, 0.0)
        too_high = (taken < target) & ~idle
        taken, target, _ = rows.sides(high, 0.0)
        too_low = (taken > target) & ~idle
        if _settled(~(too_high | too_low)):
            break
        low = torch.where(too_high, low - width, low)
        high = torch.where(too_low, high + width, high)
        width = width * 2

    mu = low
    epsilon = 2 * torch.finfo(start.dtype).eps
    for iteration in range(100):
        taken, target, slope = rows.sides(mu, 0.0)
        low, high = torch.where(taken >= target, mu, low), torch.where(taken <= target, mu, high)
        newton = mu + rows.temperature * (taken / target).log() * taken / slope
        inside = (newton > low) & (newton < high) if iteration < 30 or iteration % 2 else torch.zeros_like(idle)
        following = torch.where(inside, newton, (low + high) / 2)
        done = idle | (taken == target) | ((following - mu).abs() <= epsilon * (mu.abs() + rows.temperature))
        mu = torch.where(done, mu, following)
        if _settled(done):
            break
    return mu


def _settled(rows: Tensor) -> bool:
    """All rows done? Under vmap or on fake tensors nobody can tell: then the loop runs its full course."""
    try:
        return bool(rows.all())
    except RuntimeError:
        return False


def _hard_rows(
    rows: Balance, hard: Tensor, top: Tensor, p: Tensor, null: Tensor | None, dual: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """At temperature 0 the best keys share the mass equally."""
    best = rows.scores == top
    if rows.admissible is not None:
        best = best & rows.admissible
    null_best = None if null is None else torch.as_tensor(rows.level, dtype=p.dtype, device=p.device) == top
    count = best.sum(-1, keepdim=True) + (0 if null_best is None else null_best.to(p.dtype))
    mass = torch.full_like(top, rows.form.mass)
    if rows.form.marginal == "relax":
        level = torch.as_tensor(rows.level, dtype=p.dtype, device=p.device)
        mass = torch.where(hard, top / level, 0.0).exp()
    share = mass / count.clamp(min=1)
    p = torch.where(hard, best * share, p)
    if null is not None and null_best is not None:
        null = torch.where(hard, null_best * share, null)
    return p, null, torch.where(hard, top, dual)


# --- attention --------------------------------------------------------------------------------------------------------


def scores_of(form: Form) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Tq, Tk] and values [B, Hkv, Tk, Dv] in the compute dtype, safe against rubbish in masked keys."""
    assert form.query is not None and form.key is not None and form.value is not None
    B, H, Tq, Tk = form.shape
    Hkv = form.key.shape[1]
    query, key, value = (t.to(form.dtype) for t in (form.query, form.key, form.value))
    admissible = form.admissible(Tq, Tk, query.device)
    if admissible is not None:
        # A key that no query here may read can hold NaN, and 0 * NaN is NaN: it is read as zeros.
        read = admissible.expand(*torch.broadcast_shapes(admissible.shape, (1, 1, 1, 1))).any(2)  # [B|1, H|1, Tk|1]
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


def attend(form: Form, names: tuple[str, ...], dual: Tensor | None = None, order: int = 1) -> dict[str, Tensor]:
    """Output and statistics of a whole form, densely: differentiable, and all of the plan in memory."""
    scores, value = scores_of(form)
    rows = solve_rows(form, scores, dual, order)
    results = {}
    if "out" in names or "value_spread" in names:
        rows.values, rows.output = value, _transport(rows.weights, value)
    for name in names:
        if name == "out":
            results[name] = rows.output if form.dropout_key is None else _transport(_dropped(rows), value)
        elif name == "key_mass":
            results[name] = STATISTICS[name](rows)[..., : value.shape[2]]
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
    kept = form.kept(*rows.weights.shape[2:], rows.weights.device)
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
                yield slice(b, min(B, b + batch)), slice(h, min(H, h + heads)), rows, form.key_range(rows)


def forward(form: Form, names: tuple[str, ...], order: int = 1) -> dict[str, Tensor]:
    """Output and statistics, block by block; `order` derivatives may be taken of the result."""
    B, H, Tq, Tk = form.shape
    assert form.query is not None
    if 0 in (B, H, Tq):
        return {n: form.query.new_zeros(s, dtype=form.dtype) for n, s in output_shapes(form, names).items()}
    # Nested lists of blocks are concatenated from the inside out (writing into a buffer would break transforms).
    batches: list[dict[str, Tensor]] = []
    heads: list[dict[str, Tensor]] = []
    parts: list[dict[str, Tensor]] = []
    with _full_precision(form):
        for b, h, i, j in blocks(form):
            part = attend(form.cut(b, h, i, j), names, order=order)
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


def _join(parts: list[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    if len(parts) == 1:
        return parts[0]
    joined = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        # key_mass has no query dimension: blocks of queries add up.
        joined[name] = torch.stack(pieces).sum(0) if name == "key_mass" and dim == 2 else torch.cat(pieces, dim)
    return joined


def backward(
    form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the needed slots, from the forward's outputs (`dual` among them) and the gradients of some of them."""
    tensors = form.tensors()
    totals = {name: torch.zeros_like(tensors[name], dtype=form.dtype) for name in needed}
    names = tuple(name for name in DIFFERENTIABLE if name in grads)
    with _full_precision(form), torch.enable_grad():
        for where in blocks(form):
            block = form.cut(*where)
            leaves = {n: t.detach().to(form.dtype).requires_grad_() for n, t in block.tensors().items() if n in needed}
            dual = form.cut_slot("dual", outputs["dual"][..., None], *where).detach()
            results = attend(block.with_tensors(leaves), names, dual)
            incoming = [grads[n][where[:3]].to(form.dtype) for n in names]
            found = torch.autograd.grad([results[n] for n in names], list(leaves.values()), incoming, allow_unused=True)
            for name, grad in zip(leaves, found, strict=True):
                if grad is not None:
                    form.cut_slot(name, totals[name], *where).add_(grad)
    return {name: total.to(tensors[name].dtype) for name, total in totals.items()}


def _full_precision(form: Form) -> torch.autocast:
    """The compute dtype is chosen already: autocast must not touch what happens inside."""
    assert form.query is not None
    return torch.autocast(form.query.device.type, enabled=False)
