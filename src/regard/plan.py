"""The plan itself: small problems solved in full with proof (`solve`, `certify`), and windows on plans too large to
store (`weights_at`, `topk`, `block_mass`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .backends import native
from .backends import torch as definition
from .budget import match, match_scores
from .checks import check_type, concrete
from .form import Form, compute_dtype, lower, lower_problem
from .parts import Scalar, describe, is_integer
from .problem import Budget, RowsAndColumns, Transport
from .sinkhorn import Marginals, from_scores, one_sided, reduce
from .statistics import STATISTICS, Solution, primal

# --- solve and certify ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Certificate:
    """Evidence, in float64, that a plan is (or is not) the optimum. One number per row, [..., Tq].

    primal          what the plan achieves: <p, s> - tau D(p || pi), with D computed from f
    dual            an upper bound on what any plan can achieve: the dual function at the solver's price lambda
    gap             dual - primal: how much better a plan could be, at most
    row_residual    how far the row is from its marginal (and from p >= 0, unless the regulariser is signed)
    stationarity    largest distance of a weight from the solver's own plan, pi g((s - lambda)/tau)
    column_residual how far each column is from its marginal, [..., Tk]: RowsAndColumns only

    What is proven: primal <= dual for every plan that meets its marginals, so no plan is better by more than the gap.
    The proof needs f (convex) and any price; it trusts neither the solver nor, for an `FDivergence`, its link and
    slope: f* is bounded from above with tangents of f. Where f* has no finite bound at this price the dual is inf and
    the certificate does not hold. All of it is float64 arithmetic, so a gap is known to rounding.

    The rows of a plan with both marginals are one problem: there primal, dual and gap are one number per plan, [...].
    """

    primal: Tensor
    dual: Tensor
    gap: Tensor
    row_residual: Tensor
    stationarity: Tensor
    column_residual: Tensor | None = None

    def worst(self) -> dict[str, float]:
        """The largest absolute gap, residuals and stationarity over all rows (NaN counts as the largest)."""
        residuals = {"gap": self.gap, "row_residual": self.row_residual, "stationarity": self.stationarity}
        if self.column_residual is not None:
            residuals["column_residual"] = self.column_residual
        return {n: float(r.abs().max()) if r.numel() else 0.0 for n, r in residuals.items()}

    def holds(self, tolerance: float = 1e-5) -> bool:
        """Whether every row is optimal within the tolerance (the gap relative to the size of the optimum)."""
        scale = 1 + self.dual.abs().nan_to_num(posinf=0.0)
        good = [self.gap.abs() <= tolerance * scale, self.row_residual <= tolerance, self.stationarity <= tolerance]
        if self.column_residual is not None:
            good.append(self.column_residual <= tolerance)
        return all(bool(part.all()) for part in good)

    def __str__(self) -> str:
        n = self.row_residual.numel()
        lines = [f"Certificate of {n} row{'s' if n != 1 else ''} (worst row)"]
        worst = self.worst()
        width = 13 if self.column_residual is None else 15
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in worst:
                lines.append(f"  {f.name:<{width}} {worst[f.name]:.3e}")
            elif value is not None and value.numel() == 1:
                lines.append(f"  {f.name:<{width}} {float(value):.9g}")
            elif value is not None and value.numel():
                lines.append(f"  {f.name:<{width}} {float(value.min()):.9g} to {float(value.max()):.9g}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Plan:
    """A solved problem: `weights` [..., Tk] or [..., Tq, Tk] and one dual variable per row, both differentiable.

    With both marginals `column_dual` [..., Tk] has the keys' prices (each document's mean 0, unless relaxed)."""

    weights: Tensor
    dual: Tensor
    scores: Tensor
    problem: Transport
    column_dual: Tensor | None = None

    def certificate(self) -> Certificate:
        """Proof of optimality."""
        return certify(self.scores, self.weights, self.problem)

    def __repr__(self) -> str:
        return f"Plan(weights={describe(self.weights)}, dual={describe(self.dual)}, {self.problem!r})"


def solve(scores: Tensor, problem: Transport | None = None) -> Plan:
    """The optimal plan for scores [..., Tk] or [..., H, Tq, Tk], with its dual. Differentiable; stores the plan."""
    problem = Transport() if problem is None else problem
    form, folded = _lower_scores(scores, problem)
    if isinstance(problem.marginal, RowsAndColumns):
        columns = _solve_columns(form, folded, problem.marginal)
        shapes = {"weights": scores.shape, "dual": scores.shape[:-1], "column_dual": _by_key(scores)}
        found = {name: getattr(columns, name).reshape(shape) for name, shape in shapes.items()}
        found["weights"] = found["weights"].to(scores.dtype)
        return Plan(**found, scores=scores, problem=problem)
    if isinstance(problem.temperature, Budget):
        form, hard = match_scores(form, folded, problem.temperature)
        rows = definition.solve_rows(form, folded, order=2)
        rows.weights, rows.dual = (torch.where(hard, t.detach(), t) for t in (rows.weights, rows.dual))  # they stay
    else:
        rows = definition.solve_rows(form, folded, order=2)
    weights = rows.weights[..., : scores.shape[-1]].reshape(scores.shape)
    return Plan(weights.to(scores.dtype), rows.dual.reshape(scores.shape[:-1]), scores, problem)


def certify(scores: Tensor, weights: Tensor, problem: Transport | None = None) -> Certificate:
    """Judge anybody's weights for these scores, against the best dual found in float64."""
    problem = Transport() if problem is None else problem
    if not isinstance(scores, Tensor) or not isinstance(weights, Tensor) or weights.shape != scores.shape:
        raise ValueError(
            f"weights: expected a tensor of the scores' shape, got {describe(weights)} for {describe(scores)}"
        )
    with torch.no_grad():
        # float64 lives on the CPU for sure.
        on_cpu = pytree.tree_map(lambda t: t.detach().cpu(), problem)
        form, folded = _lower_scores(scores.detach().cpu(), on_cpu, torch.float64)
        if isinstance(on_cpu.marginal, RowsAndColumns):
            p = weights.detach().cpu().reshape(folded.shape).double()
            # Not at the problem's own tolerance: any prices give a bound, and here the best are wanted.
            closely = replace(on_cpu.marginal, iterations=None, tolerance=1e-10, strict=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                best = _solve_columns(form, folded, closely)
            return _judge_columns(best, p, scores)
        if isinstance(problem.temperature, Budget):
            form, _ = match_scores(form, folded, on_cpu.temperature)
        best = definition.solve_rows(form, folded, order=2)
        p = weights.detach().cpu().reshape(folded.shape).double()
        # Rows without any key are solved as one key that is not admissible.
        p = torch.nn.functional.pad(p, (0, best.weights.shape[-1] - p.shape[-1]))
        return Certificate(**{name: part.reshape(scores.shape[:-1]) for name, part in _judge(best, p).items()})


def _lower_scores(scores: Tensor, problem: Transport, dtype: torch.dtype | None = None) -> tuple[Form, Tensor]:
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores: expected a floating-point tensor, got {describe(scores)}")
    check_type("scores", scores)
    if scores.dim() < 1:
        raise ValueError(f"scores: expected shape [..., Tk] or [..., Tq, Tk], got {list(scores.shape)}")
    dtype = dtype or (torch.float64 if scores.dtype == torch.float64 else torch.float32)
    shape = (1,) * (4 - scores.dim()) + tuple(scores.shape)
    form = lower_problem(problem, shape[:-2], shape[-2], shape[-1], dtype, scores.device)
    folded = scores.reshape(shape).flatten(0, -4).to(dtype)
    form.mask = folded != -math.inf  # a score of -inf forbids the key
    return form, torch.where(form.mask, folded, 0.0)


def _judge(best: Solution, p: Tensor) -> dict[str, Tensor]:
    """Primal of p, dual at best's lambda, and the residuals, each [B, H, Tq]."""
    form, price = best.form, best.dual.squeeze(-1)
    mass = p.sum(-1)
    signed = best.regularizer.signed
    null = (1 - mass if signed else (1 - mass).clamp(min=0))[..., None] if form.marginal == "sink" else None
    achieved = primal(best, p if signed else p.clamp(min=0), null)
    # A row that no price moves (no admissible key, or all keys full) has one plan only, and that is its bound.
    fixed = price == -math.inf
    if best.regularizer.ceiling == math.inf:  # only the keys decide: a price of -inf may also be a search gone wrong
        fixed = fixed & (best.where_admissible(torch.ones_like(p), 0.0).sum(-1) == 0)
    bound = torch.where(fixed, primal(best, best.weights, best.null), _dual_value(best))
    row_residual = torch.zeros_like(mass) if signed else (-p).clamp(min=0).sum(-1)
    if form.marginal == "rows":
        row_residual = row_residual + (mass - torch.where(fixed, best.weights.sum(-1), form.mass)).abs()
    elif form.marginal == "sink" and not signed:
        row_residual = row_residual + (mass - 1).clamp(min=0)
    return {
        "primal": achieved,
        "dual": bound,
        "gap": bound - achieved,
        "row_residual": row_residual,
        "stationarity": (p - best.weights).abs().amax(-1),
    }


@dataclass(frozen=True)
class _Columns:
    """A solved plan with both marginals, in full."""

    rows: Solution  # of the one-sided problem at the keys' prices
    marginals: Marginals
    temperature: Scalar  # number or [B|1, H|1, 1]
    relax: Scalar | None
    weights: Tensor  # [B, H, Tq, Tk]
    dual: Tensor  # f [B, H, Tq]
    column_dual: Tensor  # g [B, H, Tk]


def _solve_columns(form: Form, scores: Tensor, settings: RowsAndColumns) -> _Columns:
    form = from_scores(form, scores)
    solved = reduce("native" if _native_serves(one_sided(form)) else "torch", form, settings)
    rows = definition.solve_rows(solved.form, scores.to(solved.form.dtype), order=2)
    a = solved.marginals.row.to(rows.dual.dtype)
    tau, rho = (t.squeeze(3) if isinstance(t, Tensor) else t for t in (form.temperature, form.level))
    weights = rows.weights[..., : scores.shape[3]] * (a / solved.form.mass)[..., None]
    dual = rows.dual.squeeze(-1)
    dual = torch.where(a > 0, dual + tau * (math.log(solved.form.mass) - torch.where(a > 0, a, 1.0).log()), dual)
    relax = rho if isinstance(rho, Tensor) or rho > 0 else None
    narrow = {"weights": weights, "dual": dual, "column_dual": solved.gamma * tau}
    return _Columns(rows, solved.marginals, tau, relax, **{n: t.to(scores.dtype) for n, t in narrow.items()})


def _judge_columns(best: _Columns, p: Tensor, scores: Tensor) -> Certificate:
    """The same evidence where all rows are one problem: <p, s> - tau sum p log(p/pi), less rho KL(columns || b)."""
    tau, a, b = best.temperature, best.marginals.row, best.marginals.column
    f, g = torch.where(a > 0, best.dual, 0.0), best.column_dual
    received = p.sum(-2)
    ratio = torch.xlogy(p.clamp(min=0), p.clamp(min=0))
    user = best.rows.form.log_priors[:-1]  # the last are the keys' prices
    for prior in user:
        ratio = ratio - torch.where(p > 0, p * prior, 0.0)
    if best.rows.form.slopes is not None:
        distance = best.rows.form.distance(p.shape[2], p.shape[3], p.device).abs()
        ratio = ratio + p * best.rows.form.slopes * distance
    allowed = best.rows.where_admissible(torch.ones_like(p), 0.0) if p.numel() else p
    allowed = allowed * (a > 0)[..., None] * (b > 0)[:, :, None]
    ratio = torch.where((allowed == 0) & (p > 0), math.inf, ratio)  # mass where there may be none
    t = torch.as_tensor(tau, dtype=p.dtype)
    achieved = (p * best.rows.scores).sum((-1, -2)) - (t * ratio.sum(-1)).sum(-1)
    bound = (a * f).sum(-1)
    if best.relax is None:
        bound = bound + (b * g).sum(-1)
        column_residual = (received - b).abs()
    else:
        rho = torch.as_tensor(best.relax, dtype=p.dtype)
        bound = bound + (rho * b * torch.expm1(g / rho)).sum(-1)
        spread = torch.xlogy(received, received / torch.where(b > 0, b, 1.0)) - received + b
        achieved = achieved - (rho * torch.where(b > 0, spread, torch.where(received > 0, math.inf, 0.0))).sum(-1)
        column_residual = torch.zeros_like(b)
    lead, by_row = scores.shape[:-2], scores.shape[:-1]
    return Certificate(
        primal=achieved.reshape(lead),
        dual=bound.reshape(lead),
        gap=(bound - achieved).reshape(lead),
        row_residual=((-p).clamp(min=0).sum(-1) + (p.sum(-1) - a).abs()).reshape(by_row),
        stationarity=(p - best.weights).abs().amax(-1).reshape(by_row) if p.numel() else torch.zeros(by_row),
        column_residual=column_residual.reshape(_by_key(scores)),
    )


def _by_key(scores: Tensor) -> tuple[int, ...]:
    return (*scores.shape[:-2], scores.shape[-1])


def _dual_value(best: Solution) -> Tensor:
    """lambda m + tau sum_j pi_j f*((s_j - lambda)/tau), an upper bound at any lambda (relaxed: see theory).

    The built-in regularisers have exact conjugates. Of an FDivergence the conjugate is bounded from above by f alone.
    """
    form, regularizer = best.form, best.regularizer
    price = torch.where(best.dual == -math.inf, 0.0, best.dual)  # any price bounds; rows without keys need none
    level = best.null_score

    def conjugate(scores: Tensor) -> Tensor:
        return regularizer.conjugate((scores - price) / best.temperature - regularizer.origin)

    prior = torch.ones_like(best.scores) if best.log_prior is None else best.log_prior.exp().expand_as(best.scores)
    prior = best.where_admissible(prior, 0.0)
    if form.family == "kl":  # pi exp(t) in one exponential, as in the plan
        t = best.where_admissible((best.scores - price) / best.temperature, 0.0)
        spread = best.where_admissible(regularizer.weights(t, best.log_prior), 0.0) - prior
    else:
        spread = prior * best.where_admissible(conjugate(best.scores), 0.0)
    total = spread.sum(-1, keepdim=True)
    if form.marginal == "sink":
        total = total + conjugate(level)
    if form.family == "kl" and form.marginal in ("rows", "sink"):  # the constant that their primal drops, too
        total = total + prior.sum(-1, keepdim=True) + (form.marginal == "sink") - form.mass
    tau = torch.as_tensor(form.temperature, dtype=total.dtype)
    total = torch.where(tau == 0, 0.0, total * tau)  # hard routing: the divergence costs nothing, even if infinite
    if form.marginal == "relax":
        total = total + level * torch.expm1(price / level)
    elif form.marginal != "free":
        total = total + price * form.mass
    return total.squeeze(-1)


# --- the path along the temperature -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Path:
    """What becomes of rows as they cool or warm: each field [n, ...rows], one slice per temperature (itself [n]).

    expected_score  sum_j p_j s_j
    entropy, kl     of the plan, and to the normalised prior
    variance        Var_p(s/tau): for KL rows the slope of kl in -log tau, and of entropy in log tau if the prior is 0/1
    value           the optimum F, a soft maximum of the scores
    """

    temperature: Tensor
    expected_score: Tensor
    entropy: Tensor
    kl: Tensor
    variance: Tensor
    value: Tensor


def path(scores: Tensor, temperatures: Tensor | Sequence[float], problem: Transport | None = None) -> Path:
    """The plans of scores [..., Tk] or [..., H, Tq, Tk] at each of n temperatures (0 is hard routing, where the problem
    has it), which replace the problem's own. Differentiable in the scores; stores one plan at a time."""
    problem = Transport() if problem is None else problem
    if not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport, got {describe(problem)}")
    if isinstance(problem.marginal, RowsAndColumns):
        raise NotImplementedError(f"problem: path follows rows one by one, got {problem.marginal!r}")
    try:
        given = torch.as_tensor(temperatures, dtype=None if isinstance(temperatures, Tensor) else torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"temperatures: expected n numbers, [n], got {describe(temperatures)}") from None
    if given.dim() != 1 or given.dtype == torch.bool or given.is_complex():
        raise ValueError(f"temperatures: expected n numbers, [n], got {describe(temperatures)}")
    given = given if given.is_floating_point() else given.double()
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores: expected a floating-point tensor, got {describe(scores)}")
    names = {f.name: f.name for f in fields(Path) if f.name != "temperature"}
    names |= {"expected_score": "cost", "variance": "score_variance"}
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for temperature in given.to(scores.device).unbind():
        form, folded = _lower_scores(scores, replace(problem, temperature=temperature))
        rows = definition.solve_rows(form, folded, order=2)
        for name, statistic in names.items():
            measured = STATISTICS[statistic](rows).reshape(scores.shape[:-1])
            found[name].append(-measured if statistic == "cost" else measured)
    empty = scores.new_zeros((0, *scores.shape[:-1]))
    return Path(given, **{name: torch.stack(parts) if parts else empty for name, parts in found.items()})


# --- the plan without the matrix --------------------------------------------------------------------------------------


def weights_at(
    query: Tensor,
    key: Tensor,
    index: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    problem: Transport | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    """The weights of chosen keys: integers that broadcast to [..., H, Tq, n] -> [..., H, Tq, n]. Not differentiable."""
    form, lead, row = _lower_plan(query, key, attn_mask, is_causal, scale, enable_gqa, problem, softcap, key_scale)
    B, H, Tq, Tk = form.shape
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"index: expected an integer tensor, got {describe(index)}")
    if index.device != query.device:
        raise ValueError(f"index: expected a tensor on {query.device}, as query, got one on {index.device}")
    n = index.shape[-1] if index.dim() else 1
    try:
        index = index.expand(*lead, Tq, n).reshape(B, H, Tq, n).long()
    except RuntimeError:
        raise ValueError(
            f"index: expected a shape that broadcasts to {[*lead, Tq, n]}, got {list(index.shape)}"
        ) from None
    if bool(((index < 0) | (index >= Tk)).any()):
        raise ValueError(f"index: expected keys in [0, {Tk}), got {int(index.min())} to {int(index.max())}")
    if _native_serves(form):
        found = native.weights_at(form, index)
    else:
        found = torch.zeros(B, H, Tq, n, dtype=form.dtype, device=query.device)
        for b, h, i, j, weights in _weight_blocks(form):
            local = index[b, h, i] - j.start
            inside = (local >= 0) & (local < weights.shape[-1])
            if weights.shape[-1]:
                found[b, h, i] = torch.where(inside, weights.gather(-1, torch.where(inside, local, 0)), 0.0)
    return _shipped(found, row, query).reshape(*lead, Tq, n)


def topk(
    query: Tensor,
    key: Tensor,
    n: int,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    problem: Transport | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The n largest weights of each row and their keys: (weights, indices), [..., H, Tq, n]. Not differentiable.

    Where a row has fewer than n keys with mass, the rest of its weights are 0 and their indices any other keys.
    """
    form, lead, row = _lower_plan(query, key, attn_mask, is_causal, scale, enable_gqa, problem, softcap, key_scale)
    B, H, Tq, Tk = form.shape
    if not is_integer(n) or not 0 <= n <= Tk:
        raise ValueError(f"n: expected an int from 0 to Tk={Tk}, got {describe(n)}")
    n = int(n)
    if _native_serves(form):
        weights, indices = native.topk(form, n)
    else:
        weights = torch.zeros(B, H, Tq, n, dtype=form.dtype, device=query.device)
        indices = torch.zeros(B, H, Tq, n, dtype=torch.long, device=query.device)
        for b, h, i, j, block in _weight_blocks(form, at_least=n):
            weights[b, h, i], found = block.topk(n, -1)
            indices[b, h, i] = found + j.start
    return _shipped(weights, row, query).reshape(*lead, Tq, n), indices.reshape(*lead, Tq, n)


def block_mass(
    query: Tensor,
    key: Tensor,
    block: int,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    problem: Transport | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
) -> Tensor:
    """The plan pooled to blocks: the mean over a block's queries of the mass sent to each block of keys.

    [..., H, ceil(Tq/block), ceil(Tk/block)]; a row sums to its queries' mean mass, 1 for plain rows. No gradient.
    """
    form, lead, row = _lower_plan(query, key, attn_mask, is_causal, scale, enable_gqa, problem, softcap, key_scale)
    if not is_integer(block) or block < 1:
        raise ValueError(f"block: expected a positive int, got {describe(block)}")
    block = int(block)
    B, H, Tq, Tk = form.shape
    rows, columns = -(-Tq // block), -(-Tk // block)
    if _native_serves(form) and row is None:
        pooled = native.block_sums(form, block)
    else:
        pooled = torch.zeros(B, H, rows, columns, dtype=form.dtype, device=query.device)
        for b, h, i, j, weights in _weight_blocks(form):
            weights = weights if row is None else weights * row[b, h, i, None]
            padded = torch.nn.functional.pad(weights, (j.start, columns * block - j.stop))
            by_key = padded.unflatten(-1, (columns, block)).sum(-1)
            owner = torch.arange(i.start, i.stop, device=query.device) // block
            pooled[b, h] = pooled[b, h].index_add(2, owner, by_key)
    sizes = torch.full((rows,), block, device=query.device)
    if rows:
        sizes[-1] = Tq - (rows - 1) * block
    return _narrow(pooled / sizes[:, None], query).reshape(*lead, rows, columns)


def _lower_plan(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    problem: Transport | None,
    softcap: float | None,
    key_scale: Tensor | None,
) -> tuple[Form, tuple[int, ...], Tensor | None]:
    """The form of a plan whose values nobody asks for, the caller's leading dimensions, and what each row is to be
    multiplied by."""
    form = lower(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, problem, softcap, key_scale)
    if problem is not None and isinstance(problem.temperature, Budget):
        with torch.no_grad():
            form, _ = match("native" if _native_serves(form) else "torch", form, problem.temperature)
    row = None
    if problem is not None and isinstance(problem.marginal, RowsAndColumns):
        with torch.no_grad():
            solved = reduce("native" if _native_serves(one_sided(form)) else "torch", form, problem.marginal)
        form, row = solved.form, None if solved.row is None else solved.row.to(solved.form.dtype)
    rank = max(query.dim(), key.dim())
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    return form, (*batch, form.shape[1]) if rank > 2 else (), row


def _shipped(weights: Tensor, row: Tensor | None, query: Tensor) -> Tensor:
    """The weights [B, H, Tq, n] of rows that do not all ship the same."""
    return _narrow(weights if row is None else weights * row[..., None], query)


def _narrow(weights: Tensor, query: Tensor) -> Tensor:
    """Back from float64, where a plan had to be found in it."""
    return weights if weights.dtype == compute_dtype(query.dtype) else weights.to(compute_dtype(query.dtype))


def _native_serves(form: Form) -> bool:
    """Whether the native engine can make this plan's windows: it reads memory, which traced tensors do not have."""
    return all(map(concrete, form.tensors().values())) and native.unsupported(form, ()) is None


def _weight_blocks(form: Form, at_least: int = 0) -> Iterator[tuple[slice, slice, slice, slice, Tensor]]:
    """The plan block by block, each over at least so many keys."""
    Tk = form.shape[3]
    with torch.no_grad():
        for b, h, i, j in definition.blocks(form):
            start = max(0, min(j.start, Tk - at_least))
            j = slice(start, max(j.stop, start + at_least))
            yield b, h, i, j, definition.attend(form.cut(b, h, i, j), ("weights",))["weights"]
