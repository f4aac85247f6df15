"""The geometry of a plan: its gradient as an advantage, its metric, and what follows from both.

A score s_j moves its own weight at the rate w_j/tau (w = pi g'), and the row's price moves with it. So with the utility
u of each key to a loss (u = dL/dp), and b the baseline that the marginal puts there,

    dL/ds_j = (w_j/tau) (u_j - b),    b = sum w u / (sum w + kappa)                            (policy_gradient)
    dp/ds = tau M,    M = tau^-2 (diag w - w w^T / (sum w + kappa))                            (potential_hessian)

M is the metric of the row: for KL the Fisher information of its scores, and dL/ds = tau M u for every regulariser and
marginal (kappa = 0 where the rows must sum to their mass, infinite where they are free). The functions on scores
[..., Tk] (or [..., H, Tq, Tk], as `regard.solve`) store the plan. Those on queries and keys never do: O(T) memory.
At temperature 0 the plan does not move, and there is no geometry: they raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import dispatch, operator
from ._validate import Scalar, check_scalar, check_values, describe, is_integer, number, positive
from .autograd.batched import one_by_one
from .backends import reference, row_equation
from .form import Form
from .lowering import lower, lower_scores
from .problem import Budget, Transport

# --- on scores and weights --------------------------------------------------------------------------------------------


def advantage(weights: Tensor, utility: Tensor) -> Tensor:
    """u - b, how much better a key is than the row's average b = sum w u / sum w; both [..., Tk].

    For weights that sum to 1, b is the expected utility. A row without weight has b = 0.
    """
    weights, utility = _floating("weights", weights), _like("utility", utility, "weights", weights)
    total = weights.sum(-1, keepdim=True)
    spent = (weights * torch.where(weights == 0, 0.0, utility)).sum(-1, keepdim=True)
    return utility - torch.where(total == 0, 0.0, spent / torch.where(total == 0, 1.0, total))


def policy_gradient(scores: Tensor, utility: Tensor, problem: Transport | None = None) -> Tensor:
    """dL/ds [..., Tk] where u = dL/dp, exactly, from the closed form: (w/tau) (u - sum w u / (sum w + kappa)).

    Its rows sum to 0 exactly where kappa = 0, that is where the rows of the plan must sum to their mass.
    """
    utility = _like("utility", utility, "scores", _floating("scores", scores))
    rows = _rows(scores, problem)
    return (rows.rates * row_equation.centred(rows.rates, rows.slack, utility)).to(scores.dtype)


def sampled_policy_gradient(
    scores: Tensor,
    utility: Tensor,
    problem: Transport | None = None,
    samples: int = 1024,
    baseline: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The score-function (REINFORCE) estimate of `policy_gradient` from sampled keys: (gradient, variance).

    A key J is drawn with probability rho = w / (sum w + kappa) (KL rows: the plan itself), what is left being the
    chance of no key: the null key's, or the slack of relaxed rows, with utility 0. One draw estimates

        (sum w + kappa)/tau * (u_J - b) * (e_J - rho)          (KL rows: (u_J - b) times the gradient of log p_J)

    without bias for any b; `baseline=False` has b = 0, otherwise it is the exact gradient's own. Free rows are no
    distribution, have no baseline, and are estimated by (sum w)/tau * u_J e_J with rho = w / sum w.

    gradient [..., Tk] is the mean over the samples. variance [...] is that of one draw, measured over the samples and
    summed over the keys: the gradient's own is smaller by the number of samples (NaN if there is one only).
    """
    utility = _like("utility", utility, "scores", _floating("scores", scores))
    if not is_integer(samples) or samples < 1:
        raise ValueError(f"samples: expected a positive int, got {describe(samples)}")
    if not isinstance(baseline, bool):
        raise TypeError(f"baseline: expected a bool, got {describe(baseline)}")
    rows = _rows(scores, problem)
    rates, slack = rows.rates, rows.slack
    free = slack is None
    slack = torch.zeros_like(rates[..., :1]) if slack is None else slack
    utility = torch.where(rates > 0, utility, 0.0)
    total = rates.sum(-1, keepdim=True) + slack  # (sum w + kappa)/tau
    moves = total > 0
    chances = torch.cat([rates, slack], -1) / torch.where(moves, total, 1.0)
    b = (chances[..., :-1] * utility).sum(-1, keepdim=True) if baseline and not free else torch.zeros_like(total)
    gains = total * (torch.cat([utility, torch.zeros_like(b)], -1) - b)  # of each outcome, the last is no key

    # A row that does not move has gains of 0, whatever is drawn.
    drawable = torch.where(moves, chances, 1.0).reshape(-1, chances.shape[-1])
    drawn = torch.multinomial(drawable, samples, replacement=True, generator=generator)
    counts = torch.zeros_like(drawable).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=rates.dtype))
    shares = counts.view_as(chances) / samples
    hits, rho = (shares * gains)[..., :-1], chances[..., :-1]
    if free:
        gradient, square = hits, (hits * gains[..., :-1]).sum(-1)
    else:
        gradient = hits - rho * (shares * gains).sum(-1, keepdim=True)
        # |e_j - rho|^2 over the keys; the last outcome has no e.
        norms = torch.cat([1 - 2 * rho, torch.zeros_like(b)], -1) + rho.square().sum(-1, keepdim=True)
        square = (shares * gains.square() * norms).sum(-1)
    spread = (square - gradient.square().sum(-1)).clamp(min=0)
    variance = spread * (samples / (samples - 1)) if samples > 1 else torch.full_like(spread, torch.nan)
    return gradient.to(scores.dtype), variance.to(scores.dtype)


def fisher(weights: Tensor, temperature: Scalar = 1.0) -> Tensor:
    """Fisher information of the scores of a softmax row, tau^-2 (diag p - p p^T): [..., Tk] -> [..., Tk, Tk].

    Weights that sum to less than 1 leave the rest to a null key. `temperature`, if a tensor, broadcasts to [..., 1].
    """
    weights = _floating("weights", weights)
    if weights.dim() < 1:
        raise ValueError(f"weights: expected shape [..., Tk], got {list(weights.shape)}")
    check_scalar("temperature", temperature, "a positive, finite number", positive)
    check_values("temperature", temperature, "temperature > 0", lambda tau: (tau > 0) & tau.isfinite())
    if isinstance(temperature, Tensor) and temperature.dim():
        try:
            temperature = temperature.expand(*weights.shape[:-1], 1)[..., None]
        except RuntimeError:
            raise ValueError(
                f"temperature: expected a shape that broadcasts to {[*weights.shape[:-1], 1]}, "
                f"got {list(temperature.shape)}"
            ) from None
    off = -weights[..., :, None] * weights[..., None, :]
    matrix = torch.diagonal_scatter(off, weights * (1 - weights), 0, -2, -1)
    return (matrix / temperature**2).to(weights.dtype)


def potential_hessian(scores: Tensor, problem: Transport | None = None) -> Tensor:
    """The Hessian of the potential F, which is dp/ds = tau times the metric: [..., Tk] -> [..., Tk, Tk].

    (diag w - w w^T / (sum w + kappa))/tau. For KL rows it is tau times `fisher`, which is the Hessian of F/tau = lse.
    """
    rows = _rows(_floating("scores", scores), problem)
    rates, slack = rows.rates, rows.slack
    if slack is None:
        return torch.diag_embed(rates).to(scores.dtype)
    total = rates.sum(-1, keepdim=True) + slack
    shares = rates / torch.where(total > 0, total, 1.0)
    off = torch.diagonal_scatter(-rates[..., :, None] * shares[..., None, :], torch.zeros_like(rates), 0, -2, -1)
    # The diagonal from the sum of the others: w (1 - w/sum w) would lose its digits in a row near one-hot.
    return torch.diagonal_scatter(off, shares * slack - off.sum(-1), 0, -2, -1).to(scores.dtype)


def natural_gradient(scores: Tensor, utility: Tensor, problem: Transport | None = None) -> Tensor:
    """M^+ dL/ds = tau u on the support, 0 elsewhere: the steepest ascent in the plan's own metric, [..., Tk].

    Where the rows must sum to their mass the metric does not see a common shift of the scores, and M^+ (Moore and
    Penrose's) gives tau (u - the plain mean of u over the support). Other marginals do see it: there it is tau u.
    It does not vanish where the plan saturates. Under KL and Fermi-Dirac the support is all that is admissible.
    """
    utility = _like("utility", utility, "scores", _floating("scores", scores))
    rows = _rows(scores, problem)
    strict = rows.form.family in ("kl", "fermi_dirac")  # every admissible key has some weight, if too small to see
    support = rows.admissible if strict else rows.rates > 0
    support = support & (rows.rates > 0).any(-1, keepdim=True)
    utility = torch.where(support, utility, 0.0)
    if rows.slack is not None:
        singular = rows.form.marginal == "rows" if strict else rows.slack == 0
        count = support.sum(-1, keepdim=True).clamp(min=1)
        utility = utility - torch.where(support & singular, utility.sum(-1, keepdim=True) / count, 0.0)
    return (rows.temperature * utility).to(scores.dtype)


@dataclass
class _Rows:
    """Solved rows in the caller's shape."""

    form: Form
    rates: Tensor  # [..., Tk], w/tau
    slack: Tensor | None  # [..., 1], kappa/tau; None: infinite
    temperature: Scalar  # a number or [..., 1]
    admissible: Tensor  # [..., Tk]


def _rows(scores: Tensor, problem: Transport | None) -> _Rows:
    form, folded = lower_scores(scores, Transport() if problem is None else problem)
    _refuse(problem, form)
    rows = row_equation.solve_rows(form, folded, order=2, rates=True)
    rates, slack, temperature, admissible = rows.rates, rows.slack, rows.temperature, rows.admissible
    assert rates is not None and admissible is not None  # a score of -inf forbids, so there is a mask
    lead, Tk = scores.shape[:-1], scores.shape[-1]
    if slack is not None:
        slack = slack.reshape(*lead, 1)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(*folded.shape[:3], 1).reshape(*lead, 1)
    admissible = admissible.expand(rates.shape)[..., :Tk].reshape(scores.shape)
    return _Rows(form, rates[..., :Tk].reshape(scores.shape), slack, temperature, admissible)


# --- on queries and keys ----------------------------------------------------------------------------------------------


def fisher_vector_product(
    query: Tensor,
    key: Tensor,
    tangent: Tensor,
    problem: Transport | None = None,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """The metric of each query times a tangent of the queries' shape: (scale/tau)^2 Cov_w(k) t, [..., H, Tq, D].

    Cov_w(k) = sum w k k^T - (sum w k)(sum w k)^T / (sum w + kappa). No new kernel: with values k and the output's
    gradient t the utility of key j is <k_j, t>, so the query's gradient is tau/scale times the product, and a backward
    pass of whichever backend serves the problem gives it.
    """
    form = lower(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, problem)
    _refuse(problem, form)
    product = _hessian_product(form, query, key, tangent)
    return dispatch.unfold(product / form.temperature, query, key, key).to(query.dtype)


def free_energy_hvp(
    query: Tensor,
    key: Tensor,
    tangent: Tensor,
    problem: Transport | None = None,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """The Hessian of F, as a function of each query, times a tangent: tau times `fisher_vector_product`."""
    form = lower(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, problem)
    _refuse(problem, form)
    return dispatch.unfold(_hessian_product(form, query, key, tangent), query, key, key).to(query.dtype)


def _hessian_product(form: Form, query: Tensor, key: Tensor, tangent: Tensor) -> Tensor:
    """scale^2/tau Cov_w(k) t, [B, H, Tq, D] in the compute dtype."""
    assert form.query is not None
    shape = dispatch.unfold(form.query, query, key, key).shape
    _check_tangent("tangent", tangent, shape, query.device)

    def attended(q: Tensor) -> Tensor:
        return dispatch.compute(form.with_tensors({"query": q}), ("out",))["out"]

    # In the compute dtype: half would round the sum before its last factor.
    wide = form.query.to(form.dtype)
    if wide.dtype != form.query.dtype:
        assert form.key is not None
        form.key = form.value = form.key.to(form.dtype)
    out, pull = torch.func.vjp(attended, wide)  # type: ignore[misc]
    (found,) = pull(tangent.reshape(out.shape).to(out.dtype))
    return form.scale * found


def jvp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    problem: Transport | None = None,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of `attention` and its tangent, for tangents (dq, dk, dv) of query, key and value; None is 0.

    The output is that of the backend `attention` would choose. The tangent is made block by block, never storing the
    plan (unless something requires a gradient, which then keeps it).
    """
    inputs = {"query": query, "key": key, "value": value}
    if not isinstance(tangents, tuple | list) or len(tangents) != 3:
        raise TypeError(f"tangents: expected (dq, dk, dv), got {describe(tangents)}")
    moving = {}
    for i, ((name, tensor), tangent) in enumerate(zip(inputs.items(), tangents, strict=True)):
        if tangent is not None and isinstance(tensor, Tensor):
            _check_tangent(f"tangents[{i}]", tangent, tensor.shape, tensor.device)
            moving[name] = tangent.to(tensor.dtype)

    def attended(moved: dict[str, Tensor]) -> Any:
        q, k, v = (inputs | moved).values()
        return operator.attention(
            q, k, v, attn_mask, 0.0, is_causal, scale, enable_gqa, problem=problem, softcap=softcap
        )

    if not moving:
        out = attended({})
        return out, torch.zeros_like(out)
    return torch.func.jvp(attended, ({name: inputs[name] for name in moving},), (moving,))  # type: ignore[return-value]


# --- attention whose backward is preconditioned -----------------------------------------------------------------------


def natural_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    damping: float,
    scale: float | None = None,
    is_causal: bool = False,
    problem: Transport | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`attention` whose backward pass hands the scores the damped natural gradient (M + damping)^-1 dL/ds of each row.

    What it gives query and key is therefore not the gradient; what it gives value is. With e = damping tau^2 and
    w' = w e/(w + e), the inverse (Sherman and Morrison's) collapses to the policy gradient with w' for w, scaled:

        (M + damping)^-1 dL/ds_j = w'_j/(damping tau) (u_j - sum w' u / (sum w' + kappa))

    in which nothing cancels. Large damping: 1/damping times the plain gradient. Small: `natural_gradient`.
    Tensors of the problem may not require a gradient here, and there is no second derivative.
    """
    damping = number("damping", damping, "a positive, finite number", positive)
    form = lower(query, key, value, None, 0.0, is_causal, scale, enable_gqa, problem)
    _refuse(problem, form)
    for slot, tensor in form.tensors().items():
        if tensor.requires_grad and slot not in ("query", "key", "value"):
            raise NotImplementedError(
                f"problem: natural_attention has gradients for query, key and value only, "
                f"got a {slot} that requires one (detach it)"
            )
    fixed = form.with_tensors(dict.fromkeys(("query", "key", "value")))  # type: ignore[arg-type]
    assert form.query is not None
    out = _Natural.apply(fixed, damping, form.query, form.key, form.value)
    return dispatch.unfold(out.to(form.query.dtype), query, key, value)  # type: ignore[union-attr]


class _Natural(torch.autograd.Function):
    """apply(form, damping, query, key, value) -> output."""

    @staticmethod
    def forward(form: Form, damping: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            return dispatch.compute(form.with_tensors({"query": query, "key": key, "value": value}), ("out",))["out"]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.form, ctx.damping, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        needed = tuple(n for n, need in zip(("query", "key", "value"), ctx.needs_input_grad[2:], strict=True) if need)
        how, saved = (ctx.form, ctx.damping, needed), ctx.saved_tensors
        found = one_by_one(lambda grad: _NaturalBackward.apply(*how, grad, *saved), (grad,))
        by_name = dict(zip(needed, found, strict=True))
        return None, None, *(by_name.get(name) for name in ("query", "key", "value"))


class _NaturalBackward(torch.autograd.Function):
    """Its own Function, so that a transform hands it plain tensors."""

    @staticmethod
    def forward(form: Form, damping: float, needed: tuple, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        form = form.with_tensors(dict(zip(("query", "key", "value"), tensors, strict=True)))
        totals = {name: torch.zeros_like(form.tensors()[name], dtype=form.dtype) for name in needed}
        if 0 in form.shape:
            return tuple(totals[name].to(grad.dtype) for name in needed)
        with reference.full_precision(form):
            for where in reference.blocks(form):
                block = form.cut(*where)
                if not block.shape[3]:
                    continue
                for name, part in _natural_block(block, damping, needed, grad[where[:3]].to(form.dtype)).items():
                    form.cut_slot(name, totals[name], *where).add_(part)
        return tuple(totals[name].to(form.tensors()[name].dtype) for name in needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        raise NotImplementedError("natural_attention: what its backward gives has no derivative of its own")


def _natural_block(form: Form, damping: float, needed: tuple, grad: Tensor) -> dict[str, Tensor]:
    """What a block of rows [B, H, Tq, Dv] hands to query, key and value."""
    leaves = {n: t.detach().to(form.dtype).requires_grad_() for n, t in form.tensors().items() if n in needed}
    with torch.enable_grad():
        scores, value = reference.scores_of(form.with_tensors(leaves))
    with torch.no_grad():
        rows = row_equation.solve_rows(form, scores.detach(), rates=True)
        assert rows.rates is not None
        B, H, Tq, Tk = scores.shape
        utility = (grad.reshape(B, value.shape[1], -1, value.shape[3]) @ value.mT).view(B, H, Tq, Tk)
        heat = damping * rows.temperature
        damped = rows.rates * heat / (rows.rates + heat)  # w'/tau
        natural = damped / damping * row_equation.centred(damped, rows.slack, utility)
    with torch.enable_grad():
        out = reference.transport(rows.weights, value)
        pairs = [(y, g) for y, g in ((scores, natural), (out, grad)) if y.requires_grad]
        found = torch.autograd.grad([y for y, _ in pairs], list(leaves.values()), [g for _, g in pairs])
    return dict(zip(leaves, found, strict=True))


# --- checks -----------------------------------------------------------------------------------------------------------


def _floating(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {describe(tensor)}")
    return tensor


def _like(name: str, tensor: Tensor, other: str, model: Tensor) -> Tensor:
    """The tensor in the shape (and compute dtype) of another that it broadcasts to."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(tensor)}")
    try:
        return tensor.expand(model.shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {other}' {list(model.shape)}, got {list(tensor.shape)}"
        ) from None


def _check_tangent(name: str, tangent: Tensor, shape: torch.Size, device: torch.device) -> None:
    _floating(name, tangent)
    if tangent.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tangent.shape)}")
    if tangent.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tangent.device}")


def _refuse(problem: Transport | None, form: Form) -> None:
    if problem is not None and isinstance(problem.temperature, Budget):
        raise ValueError(
            f"temperature: expected a number or a tensor (the metric is that of a fixed temperature), "
            f"got {problem.temperature!r}"
        )
    if form.known_hard:
        raise ValueError("temperature: expected temperature > 0 (at 0 the plan does not move), got 0")
