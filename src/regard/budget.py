"""Temperatures that meet a budget (`MatchKL`, `MatchEntropy`): one number per row, found in a few passes over the keys.

With beta = 1/tau the divergence of a KL row from its prior rises from 0 to that of the hard plan, and

    d KL(p || pi) / d ln beta = Var_p(y),    y = s/tau,

both of which a pass of any backend gives for all rows at once. So beta is found by Newton's method inside a bracket,
without ever storing the plan; an entropy h over n equal keys is the budget log n - h. The gradient is the implicit
function's: where KL(tau, theta) = c, d tau = (tau / Var_p(y)) (d_theta KL - dc).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops
from .backends import native
from .backends import torch as definition
from .checks import check_values, concrete, row_parameter
from .form import Form
from .problem import Budget
from .statistics import DIFFERENTIABLE, STATISTICS

MEASURED = ("kl", "score_variance")  # what each pass measures
_INSIDE, _FIXED, _HARD = 0, 1, 2  # a row that meets its budget; one whose plan is its prior's; one at the hard limit
_PASSES = 40  # never reached but by rows that rounding keeps from any goal


def _hottest(dtype: torch.dtype) -> float:
    """A temperature that stands for infinity: the plan is the prior to rounding."""
    return 1e100 if dtype == torch.float64 else 1e15


def _coldest(dtype: torch.dtype) -> float:
    """No temperature is below this: squares of s/tau are still numbers."""
    return 1e-100 if dtype == torch.float64 else 1e-15


# --- the search -------------------------------------------------------------------------------------------------------

# measure(temperature, rows, exact) -> KL, Var_p(y); all [B, H, rows]; exact: in float64
Measure = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]


def _search(
    measure: Measure,
    hardest: Callable[[slice], Tensor],  # KL of the hard plan of these rows, in float64
    budget: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """ln beta of each row [B, H, Tq], and what became of it (_INSIDE, _FIXED or _HARD); all in float64.

    Newton is done on the logarithm of KL / (KL_hard - KL) in ln beta: nearly straight near either end. The hard plan's
    KL is measured for the rows alone that four passes did not carry over their budget; those that cannot meet it are
    sent as near to the hard plan as rounding can tell, and no colder: backward passes make the plan again. A tolerance
    bounds the last step of Newton: what it leaves is its square.
    """
    x = torch.zeros_like(budget)
    most = torch.full_like(budget, math.inf)  # KL of the hard plan, where it is known
    state = torch.where(budget <= 0, _FIXED, _INSIDE)
    looked = False
    negligible = 1e-9 if dtype == torch.float64 else 1e-8  # of the hard plan's KL
    # (in float64?, tolerance, passes): a float32 pass knows a KL to about 1e-6, so the last one is in float64.
    stages = [(True, 1e-5, _PASSES)] if dtype == torch.float64 else [(False, 2e-2, 8), (True, 1e-3, _PASSES)]
    for stage, (exact, tolerance, passes) in enumerate(stages):
        noise = 1e-13 if exact else 3e-6
        low, high = torch.full_like(x, -math.inf), torch.full_like(x, math.inf)
        active = state != _FIXED
        for number in range(passes):
            rows = _span(active)
            if rows is None:
                break
            kl, variance = measure((-x[:, :, rows]).exp(), rows, exact)
            part = _Newton(x[:, :, rows], low[:, :, rows], high[:, :, rows], budget[:, :, rows], most[:, :, rows])
            going = active[:, :, rows]
            following, settled = part.step(kl.double(), variance.double(), noise, tolerance)
            arrived = (state[:, :, rows] == _HARD) & (kl >= part.most * (1 - 30 * negligible))
            x[:, :, rows] = torch.where(going & ~arrived & ~kl.isnan(), following, x[:, :, rows])
            active[:, :, rows] = going & ~settled & ~arrived & ~kl.isnan()
            doubtful = active & (high == math.inf)
            if (number >= 3 or stage) and not looked and (rows := _span(doubtful)) is not None:
                looked = True
                most[:, :, rows] = hardest(rows)
                nearest = most * (1 - negligible)
                beyond = doubtful & (budget >= nearest)
                state = torch.where(beyond, torch.where(most <= 1e-9, _FIXED, _HARD), state)
                budget = torch.where(state == _HARD, nearest, budget)
                active = active & (state != _FIXED)
    x = torch.where((state == _FIXED) & (budget > 0), 0.0, x)  # one key, or all alike: any temperature will do
    return x, state


def _span(rows: Tensor) -> slice | None:
    """The queries [B, H, Tq] from the first to the last that is True somewhere."""
    found = rows.any(0).any(0).nonzero()
    return slice(int(found[0]), int(found[-1]) + 1) if found.numel() else None


@dataclasses.dataclass
class _Newton:
    """One step of all rows; `low` and `high` bracket the root and are narrowed in place."""

    x: Tensor  # ln beta
    low: Tensor
    high: Tensor
    budget: Tensor
    most: Tensor

    def step(self, kl: Tensor, variance: Tensor, noise: float, tolerance: float) -> tuple[Tensor, Tensor]:
        """The next ln beta, and whether it is the last."""
        x, low, high, budget, most = self.x, self.low, self.high, self.budget, self.most
        low.copy_(torch.where(kl < budget, torch.maximum(low, x), low))
        high.copy_(torch.where(kl > budget, torch.minimum(high, x), high))
        known = most < math.inf
        room = torch.where(known, torch.maximum(most - kl, 1e-12 * most), 1.0)
        wanted = torch.where(known, torch.maximum(most - budget, 1e-12 * most), 1.0)
        near = torch.where(kl < noise, torch.maximum(kl, variance / 2), kl).clamp(
            min=1e-300
        )  # KL = Var/2 near beta = 0
        slope = variance * (1 / near + torch.where(known, 1 / room, 0.0))
        newton = ((budget.clamp(min=1e-300) / near).log() + (room / wanted).log()) / slope
        unsure = ~newton.isfinite() | ((newton == 0) & (kl != budget))
        newton = torch.where(unsure, torch.where(kl < budget, 2.0, -2.0), newton)
        following = x + newton.clamp(-3.0, 3.0)
        bracketed = low.isfinite() & high.isfinite()
        outside = bracketed & ((following <= low) | (following >= high))
        following = torch.where(outside, (low + high) / 2, following)
        aim = torch.minimum(budget, torch.where(known, wanted, math.inf))
        close = (kl - budget).abs() <= 1e-2 * aim + noise
        settled = (close & ~outside & (newton.abs() <= tolerance)) | (kl == budget)
        settled = settled | (bracketed & (high - low <= tolerance**2))
        return torch.where(kl == budget, x, following), settled


def _cold(like: Tensor) -> Tensor:
    return torch.full_like(like, _coldest(torch.float64))


def _finish(x: Tensor, state: Tensor, budget: Tensor, dtype: torch.dtype) -> Tensor:
    """Temperatures [B, H, Tq, 1] in the compute dtype."""
    temperature = (-x).exp().clamp(_coldest(dtype), _hottest(dtype))
    return torch.where((state == _FIXED) & (budget <= 0), _hottest(dtype), temperature).to(dtype)[..., None]


# --- scores in memory -------------------------------------------------------------------------------------------------


def match_scores(form: Form, scores: Tensor, budget: Budget) -> tuple[Form, Tensor]:
    """The form of rows whose scores [B, H, Tq, Tk] are at hand, with the temperatures that meet the budget, and where
    [B, H, Tq, 1] they stand for 0. Differentiable (once)."""
    B, H, Tq, Tk = scores.shape
    form = dataclasses.replace(form, hard=False)
    target = _row_budget(form, budget, B, H, Tq, scores.dtype, scores.device)
    if not all(map(concrete, (scores, target, *form.tensors().values()))):
        raise NotImplementedError(f"{budget!r}: solve and certify search in eager mode only, outside of transforms")
    bias = [t.detach() for t in form.log_priors]
    fixed = dataclasses.replace(
        form, log_priors=bias, slopes=None if form.slopes is None else form.slopes.detach().double()
    )

    def measure(temperature: Tensor, rows: slice, exact: bool) -> tuple[Tensor, Tensor]:
        everything = (slice(0, B), slice(0, H), rows, slice(0, Tk))
        part = dataclasses.replace(fixed.cut(*everything), temperature=temperature[..., None])
        solved = definition.solve_rows(part, scores.detach()[:, :, rows].double())
        return STATISTICS["kl"](solved), STATISTICS["score_variance"](solved)

    with torch.no_grad():
        admissible = form.admissible(Tq, Tk, scores.device)
        count = (
            torch.full((), Tk, device=scores.device) if admissible is None else admissible.expand(B, H, Tq, Tk).sum(-1)
        )
        wanted = _as_kl(budget.statistic, target.double(), count).expand(B, H, Tq).clone()
        x, state = _search(
            measure, lambda rows: measure(_cold(wanted[:, :, rows]), rows, True)[0], wanted, torch.float64
        )
        temperature = _finish(x, state, wanted, scores.dtype)
        _, variance = measure((-x).exp(), slice(0, Tq), True)
    inside, hard = (state == _INSIDE)[..., None], (state == _HARD)[..., None]
    if torch.is_grad_enabled():
        # One more step of Newton: its value is 0, its derivative that of the root.
        sign = -1.0 if budget.statistic == "entropy" else 1.0
        solved = definition.solve_rows(dataclasses.replace(form, temperature=temperature), scores, order=2)
        off = sign * (STATISTICS[budget.statistic](solved)[..., None] - target)
        rate = torch.where(inside, temperature.double() / variance[..., None], 0.0).to(scores.dtype)
        moved = temperature + torch.where(inside, off - off.detach(), 0.0) * rate
        temperature = torch.where(inside, moved, temperature)
    return dataclasses.replace(form, temperature=temperature), hard


def _row_budget(
    form: Form, budget: Budget, B: int, H: int, Tq: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The budget as [B|1, H|1, Tq|1, 1]."""
    name = f"{type(budget).__name__}(budget)"
    value = budget.budget
    if not isinstance(value, Tensor):
        value = torch.full((1, 1, 1, 1), float(value), dtype=dtype, device=device)
    target = row_parameter(name, value, B, H, Tq, dtype, device, per_head=False)
    check_values(name, target, "finite numbers", torch.isfinite)
    if budget.statistic == "entropy":
        for bias in form.log_priors:
            if concrete(bias) and bool(((bias != 0) & (bias != -math.inf)).any()):
                raise ValueError(
                    "temperature: MatchEntropy expects a prior of 0 and 1 (log_prior 0 or -inf), got a weighted Bias "
                    "(MatchKL takes any prior)"
                )
    assert isinstance(target, Tensor)
    return target


def _as_kl(statistic: str, target: Tensor, count: Tensor) -> Tensor:
    """The budget as a divergence [B|1, H|1, Tq|1]; an entropy among `count` equal keys is log(count) less it."""
    target = target.squeeze(-1)
    if statistic == "kl":
        return target
    return torch.where(count > 0, count.double().clamp(min=1).log() - target, 0.0)


# --- scores that stream -----------------------------------------------------------------------------------------------


def run(backend: str, form: Form, names: tuple[str, ...], budget: Budget) -> dict[str, Tensor]:
    """Output and statistics by a backend, at the temperatures that meet the budget."""
    form, hard = match(backend, form, budget)
    if form.weighted and backend == "native" and form.dtype != torch.float64:
        # Cold rows add log pi to a large s/tau: float32 has no digits left for it.
        assert isinstance(form.temperature, Tensor)
        wide = dataclasses.replace(_doubled(form), temperature=form.temperature.double())
        return {name: result.to(form.dtype) for name, result in _run(backend, wide, hard, names).items()}
    return _run(backend, form, hard, names)


def _run(backend: str, form: Form, hard: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    results = ops.run(backend, form, names)
    recording = torch.is_grad_enabled() and any(result.requires_grad for result in results.values())
    if not recording and not torch._C._are_functorch_transforms_active():
        return results
    # The plan of a hard row does not move, but rounding divided by a temperature near 0 would: its gradient is cut, and
    # the values' is taken from a second run over these rows.
    rows = slice(0, form.shape[2])
    if concrete(hard):
        found = _span(hard.squeeze(-1))
        if found is None:
            return results
        rows = found if form.dropout_key is None else rows
    for name in DIFFERENTIABLE:
        if name in results and name != "out":
            results[name] = torch.where(hard.squeeze(-1), results[name].detach(), results[name])
    if "out" in results:
        frozen = form.with_tensors({n: t.detach() for n, t in form.tensors().items() if n != "value"})
        still = ops.run(backend, _rows_of(frozen, rows), ("out",))["out"]
        out = results["out"]
        pieces = [
            out[:, :, : rows.start],
            torch.where(hard[:, :, rows], still, out[:, :, rows]),
            out[:, :, rows.stop :],
        ]
        results["out"] = torch.cat(pieces, 2)
    return results


def match(backend: str, form: Form, budget: Budget) -> tuple[Form, Tensor]:
    """The form with the temperatures that meet the budget, and where [B, H, Tq, 1] they stand for 0."""
    assert form.key is not None
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(f"{budget!r} has no forward mode: use reverse mode, or a temperature of your own")
    B, H, Tq, _ = form.shape
    target = _row_budget(form, budget, B, H, Tq, form.dtype, form.key.device)
    # A plan that nobody sends values through.
    narrow = dataclasses.replace(
        form, value=form.key.detach()[..., :0], temperature=1.0, dropout_p=0.0, dropout_key=None
    )
    if torch.compiler.is_compiling():
        temperature, state = torch.ops.regard.match(backend, budget.statistic, target, *ops._to_arguments(narrow))
    else:
        slots = narrow.tensors() | {"budget": target}
        outcome = Match.apply(ops._skeleton(narrow), tuple(slots), backend, budget.statistic, *slots.values())
        temperature, state = outcome  # type: ignore[misc]
    return dataclasses.replace(form, temperature=temperature, hard=False), state == _HARD


def _rows_of(form: Form, rows: slice) -> Form:
    """The plan of a range of queries, as a whole plan: dropout's mask would know the difference."""
    B, H, _, Tk = form.shape
    part = form.cut(slice(0, B), slice(0, H), rows, slice(0, Tk))
    part.offset, part.first_query = part.offset + part.first_query, 0
    return part


def _doubled(form: Form) -> Form:
    """The same in float64; masks and log-priors are read in any dtype."""
    assert form.query is not None and form.key is not None and form.value is not None
    slopes = None if form.slopes is None else form.slopes.double()
    return dataclasses.replace(
        form, query=form.query.double(), key=form.key.double(), value=form.value.double(), slopes=slopes
    )


def _temperatures(backend: str, statistic: str, budget: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The rows' temperatures and what became of each, [B, H, Tq, 1]."""
    solver = ops.BACKENDS[backend]
    assert form.query is not None
    B, H, Tq, _ = form.shape
    if 0 in (B, H, Tq):
        nothing = form.query.new_ones((B, H, Tq, 1), dtype=form.dtype)
        return nothing, nothing.long()
    # log pi is added to s/tau: in float32 a cold row under a weighted prior has no digits left for it.
    weighted = form.weighted
    forms = {False: form}

    def doubled() -> Form:
        if True not in forms:
            forms[True] = form if form.dtype == torch.float64 else _doubled(form)
        return forms[True]

    def measure(temperature: Tensor, rows: slice, exact: bool) -> tuple[Tensor, Tensor]:
        whole = doubled() if exact or weighted else form
        part = dataclasses.replace(_rows_of(whole, rows), temperature=temperature[..., None].to(whole.dtype))
        found = solver.forward(part, MEASURED)
        return found["kl"], found["score_variance"]

    def hardest(rows: slice) -> Tensor:
        cold = _cold(torch.empty(B, H, rows.stop - rows.start, dtype=torch.float64, device=budget.device))
        if weighted:
            # A common offset of the scores costs digits: as cold as the row's own scale asks, and as it allows.
            found = solver.forward(_rows_of(doubled(), rows), ("max_scores", "score_variance"))
            best, own = found["max_scores"].abs(), found["score_variance"].sqrt()
            cold = torch.maximum(1e-10 * best, torch.minimum(1e-6 * own, 1e-6 * best))
            cold = torch.where(best.isfinite(), cold, 1.0).clamp(min=1e-100)
        return measure(cold, rows, True)[0]

    with torch.no_grad():
        count = torch.full((), 2, device=budget.device)
        if statistic == "entropy" or weighted:
            count = solver.forward(form.without_scores(), ("support",))["support"]
        wanted = _as_kl(statistic, budget.double(), count).expand(B, H, Tq).clone()
        wanted = torch.where(count < 2, 0.0, wanted) if weighted else wanted  # one key: there is nothing to meet
        x, state = _search(measure, hardest, wanted, form.dtype)
        return _finish(x, state, wanted, form.dtype), state[..., None].clone()


def _gradients(
    backend: str, statistic: str, needed: tuple[str, ...], form: Form, grad: Tensor, state: Tensor, budget: Tensor
) -> dict[str, Tensor]:
    """From dL/dtau those of the form's slots and of the budget: dtau = (tau/Var) (d KL - dc)."""
    solver = ops.BACKENDS[backend]
    if form.weighted and backend == "native" and form.dtype != torch.float64:  # as the search, for the same reason
        assert isinstance(form.temperature, Tensor)
        tensors = form.tensors() | {"budget": budget}
        wide = dataclasses.replace(_doubled(form), temperature=form.temperature.double())
        found = _gradients(backend, statistic, needed, wide, grad.double(), state, budget)
        return {slot: gradient.to(tensors[slot].dtype) for slot, gradient in found.items()}
    names = ("entropy", "score_variance")
    outputs = solver.forward(form, (*names, *solver.saved(form, names)))
    variance = outputs["score_variance"][..., None]
    moves = (state == _INSIDE) & (variance > 0)
    assert isinstance(form.temperature, Tensor)
    rate = torch.where(moves, grad * form.temperature / torch.where(moves, variance, 1.0), 0.0)  # dL/dKL
    found = {}
    if "budget" in needed:
        found["budget"] = (rate if statistic == "entropy" else -rate).sum_to_size(budget.shape).to(budget.dtype)
    slots = tuple(slot for slot in needed if slot != "budget")
    if not slots:
        return found
    rate = rate.squeeze(-1)
    if statistic == "entropy" or not form.weighted:  # KL is log n less the entropy
        return found | solver.backward(form, slots, outputs, {"entropy": -rate})
    if backend == "native" and form.softcap is None and form.score_bias is None:
        return found | _linear_gradients(form, slots, rate)
    mu = definition.forward(form, ("mu",))
    return found | definition.backward(form, slots, mu, {"kl": rate})


def _linear_gradients(form: Form, slots: tuple[str, ...], rate: Tensor) -> dict[str, Tensor]:
    """dKL under a weighted prior, by the native engine: with y_j = scale <q, k_j> / tau it is

        sum_j dp_j y_j  -  sum_j p_j dlog pi_j  +  dlog sum_j pi_j,

    the change of an output whose values are the keys, and of two lse (the second of the prior alone).
    """
    assert form.query is not None and form.key is not None and isinstance(form.temperature, Tensor)
    with_keys = dataclasses.replace(form, value=form.key)
    outputs = native.forward(with_keys, ("out", "lse", *native.saved(form, ("out",))))
    along = (rate[..., None] * form.scale / form.temperature) * form.query
    found = native.backward(with_keys, slots, outputs, {"out": along})
    priors = tuple(slot for slot in slots if slot == "slopes" or slot.startswith("log_priors"))
    if priors:
        bare = form.without_scores()
        of_prior = native.forward(bare, ("lse", *native.saved(bare, ("lse",))))
        for plan, given, sign in ((form, outputs, -1.0), (bare, of_prior, 1.0)):
            for slot, part in native.backward(plan, priors, given, {"lse": sign * rate}).items():
                found[slot] = found[slot] + part
    return found


# In eager mode an autograd Function, which also serves torch.func.grad.

_NO_VMAP = "MatchKL, MatchEntropy: vmap is not served; fold its dimension into the batch instead"


class Match(torch.autograd.Function):
    """apply(form, slots, backend, statistic, *tensors) -> temperatures, states; the tensors fill the form's slots, and
    "budget"."""

    @staticmethod
    def forward(form: Form, slots: tuple, backend: str, statistic: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        by_slot = dict(zip(slots, tensors, strict=True))
        return _temperatures(backend, statistic, by_slot.pop("budget"), form.with_tensors(by_slot))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.form, ctx.slots, ctx.backend, ctx.statistic, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple:  # type: ignore[override]
        needed = tuple(s for s, need in zip(ctx.slots, ctx.needs_input_grad[4:], strict=True) if need)
        how = (ctx.form, ctx.slots, ctx.backend, ctx.statistic, needed)
        saved = ctx.saved_tensors
        gradients = ops.one_by_one(lambda grad: MatchBackward.apply(how, grad, *saved), (grad,))
        found = dict(zip(needed, gradients, strict=True))
        return (None,) * 4 + tuple(found.get(slot) for slot in ctx.slots)

    @staticmethod
    def vmap(*_: Any) -> tuple:  # type: ignore[override]
        raise NotImplementedError(_NO_VMAP)


class MatchBackward(torch.autograd.Function):
    """apply(how, gradient, *slots, temperatures, states) -> gradients of the slots needed."""

    @staticmethod
    def forward(how: tuple, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        form, slots, backend, statistic, needed = how
        *given, temperature, state = tensors
        by_slot = dict(zip(slots, given, strict=True))
        budget = by_slot.pop("budget")
        form = dataclasses.replace(form.with_tensors(by_slot), temperature=temperature)
        found = _gradients(backend, statistic, needed, form, grad, state, budget)
        return tuple(found[slot] for slot in needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        raise NotImplementedError("MatchKL, MatchEntropy: a temperature that meets a budget is differentiated once")

    @staticmethod
    def vmap(*_: Any) -> tuple:  # type: ignore[override]
        raise NotImplementedError(_NO_VMAP)


# While compiling, an operator: the search is opaque to the compiler.


@torch.library.custom_op(
    "regard::match",
    mutates_args=(),
    schema=f"(str backend, str statistic, Tensor budget, {ops._SCHEMA}) -> (Tensor, Tensor)",
)
def match_op(backend: str, statistic: str, budget: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _temperatures(backend, statistic, budget, ops._from_arguments(arguments))


@match_op.register_fake
def _(backend: str, statistic: str, budget: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    form = ops._from_arguments(arguments)
    assert form.query is not None
    shape = (*form.shape[:3], 1)
    return form.query.new_empty(shape, dtype=form.dtype), form.query.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op(
    "regard::match_backward",
    mutates_args=(),
    schema="(str backend, str statistic, str needed, Tensor grad, Tensor matched, Tensor state, Tensor budget, "
    f"{ops._SCHEMA}) -> Tensor[]",
)
def match_backward_op(
    backend: str,
    statistic: str,
    needed: str,
    grad: Tensor,
    matched: Tensor,
    state: Tensor,
    budget: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    wanted = tuple(needed.split(","))
    form = dataclasses.replace(ops._from_arguments(arguments), temperature=matched)
    with ops.autograd_inside():
        found = _gradients(backend, statistic, wanted, form, grad, state, budget)
    return [found[slot] for slot in wanted]


@match_backward_op.register_fake
def _(
    backend: str,
    statistic: str,
    needed: str,
    grad: Tensor,
    matched: Tensor,
    state: Tensor,
    budget: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    tensors = ops._from_arguments(arguments).tensors() | {"budget": budget}
    return [torch.empty_like(tensors[slot], memory_format=torch.contiguous_format) for slot in needed.split(",")]


ops.batch_by_loop(torch.ops.regard.match_backward.default)


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.backend, ctx.statistic, budget, *arguments = inputs
    form = ops._from_arguments(tuple(arguments))
    tensors = form.tensors() | {"budget": budget}
    ctx.slots = tuple(tensors)
    ctx.needed = tuple(slot for slot, tensor in tensors.items() if tensor.requires_grad)
    ctx.form = ops._skeleton(form)
    ctx.save_for_backward(*tensors.values(), *output)


def _pull(ctx: Any, grad: Tensor, _: Any) -> tuple:
    *tensors, temperature, state = ctx.saved_tensors
    by_slot = dict(zip(ctx.slots, tensors, strict=True))
    budget = by_slot.pop("budget")
    form = ctx.form.with_tensors(by_slot)
    arguments = ops._to_arguments(form)
    gradients = torch.ops.regard.match_backward(
        ctx.backend, ctx.statistic, ",".join(ctx.needed), grad, temperature, state, budget, *arguments
    )
    found = dict(zip(ctx.needed, gradients, strict=True))
    return (None, None, found.pop("budget", None), *ops.by_argument(form, found))


match_op.register_autograd(_pull, setup_context=_setup)
