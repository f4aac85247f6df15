"""What a function and the definition give for a case, and whether they agree.

The allowed error is not a constant. `solve_plainly` computes the same attention by plain operations in the function's
dtype, and its distance from the definition is what that arithmetic loses on these inputs. A function may lose `ALLOWED`
times as much. To this a floor is added for results that the plain operations get exactly by luck: a few roundings of
the terms that are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._validate import describe
from .calls import Call, Solved, peaks, solve_exactly, solve_plainly, weights_of
from .cases import Case, Leaves
from .conventions import Convention
from .hypotheses import Change

ALLOWED = 3.0  # times the loss of plain operations
FLOOR = {torch.float64: 64.0, torch.float32: 2.0}  # roundings of the sum of absolute terms; half precision: 1
Parts = dict[str, Tensor]  # "output", "lse", and "gradient of <leaf>"


@dataclass(frozen=True)
class Outcome:
    """The results of one case: float64, on the CPU."""

    parts: Parts
    has_lse: bool
    has_gradients: bool
    notes: tuple[str, ...] = ()  # names of findings that need no comparison
    refusal: str | None = None  # why there are no gradients


class WrongShape(Exception):
    """The function returned another shape than the definition."""


# --- the function -----------------------------------------------------------------------------------------------------


def run_function(
    function: Callable[..., Any], convention: Convention, case: Case, device: torch.device, gradients: bool
) -> Outcome:
    """Call the function once, and differentiate what it returned. What the function raises, this raises."""

    def made(requires_grad: bool) -> Leaves:
        leaves = {}
        for name, tensor in case.leaves.items():
            own = case.learned.get(name)
            leaves[name] = tensor.to(device, case.dtype) if own is None else own
            if own is None and requires_grad:
                leaves[name] = leaves[name].clone().requires_grad_()
        return leaves

    refusal = None
    leaves = made(gradients)
    try:
        found = _called(function, convention, case, leaves)
    except Exception as error:
        if not gradients:
            raise
        leaves = made(False)
        with torch.no_grad():
            found = _called(function, convention, case, leaves)
        refusal = f"with gradients it raises {_said(error)}"
    out, lse, notes = found
    parts = {"output": _plain(out)}
    if lse is not None:
        parts["lse"] = _plain_lse(lse)
    if gradients and refusal is None:
        try:
            parts |= _gradients_of_function(case, leaves, out, lse)
        except Exception as error:
            refusal = f"its gradient raises {_said(error)}"
    _cut(case, parts)
    return Outcome(parts, lse is not None, gradients and refusal is None, notes, refusal)


def _called(
    function: Callable[..., Any], convention: Convention, case: Case, leaves: Leaves
) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    inputs = case.inputs(leaves)
    args, kwargs = convention.arguments(inputs)
    before = {name: tensor.detach().clone() for name, tensor in leaves.items()}
    out, lse = convention.results(function(*args, **kwargs), inputs)
    expected = (*inputs.query.shape[:3], inputs.value.shape[-1])
    if out.shape != expected:
        raise WrongShape(f"the output is {describe(out)}, expected the shape {list(expected)}")
    notes = []
    if any(not _same(leaves[name].detach(), kept) for name, kept in before.items()):
        notes.append("inputs-changed")
    if out.dtype != inputs.query.dtype:
        notes.append("output-dtype")
    return out, lse, tuple(notes)


def _gradients_of_function(case: Case, leaves: Leaves, out: Tensor, lse: Tensor | None) -> Parts:
    weights = cotangents(case, out, lse)
    outputs = [(o, w) for o, w in zip((out, lse), weights, strict=True) if o is not None and w is not None]
    outputs = [(o, w.to(o.device, o.dtype)) for o, w in outputs if o.requires_grad]
    if not out.requires_grad:
        raise RuntimeError("the output does not require grad")
    names = list(leaves)
    found = torch.autograd.grad(
        [o for o, _ in outputs], [leaves[n] for n in names], [w for _, w in outputs], allow_unused=True
    )
    return {
        f"gradient of {name}": _plain(torch.zeros_like(leaves[name]) if gradient is None else gradient)
        for name, gradient in zip(names, found, strict=True)
    }


def cotangents(case: Case, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The derivatives of the loss by the output and by lse, in float64."""
    draw = case.generator(" loss")
    weights = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(case.dtype).double()
    of_lse = None
    if case.reads_lse and lse is not None:
        of_lse = torch.randn(lse.shape, generator=draw, dtype=torch.float64).to(case.dtype).double()
    if case.head is not None:
        weights[:, [h for h in range(weights.shape[1]) if h != case.head]] = 0
    if case.lengths is not None:
        weights = weights.where((torch.arange(out.shape[2]) < case.lengths[:, None])[:, None, :, None], 0.0)
    return weights, of_lse


def _cut(case: Case, parts: Parts) -> None:
    """Set rows beyond the lengths to 0: they have no meaning."""
    if case.lengths is None:
        return
    for name in ("output", "lse"):
        if name in parts:
            real = (torch.arange(parts[name].shape[2]) < case.lengths[:, None])[:, None]
            parts[name] = parts[name].where(real if name == "lse" else real[..., None], 0.0)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _plain_lse(lse: Tensor) -> Tensor:
    """A row of nothing but lowest numbers has an lse below every number that float32 can hold, or none at all."""
    found = _plain(lse)
    return found.where((found > -1e30) | found.isnan(), -math.inf)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _said(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


# --- the definition ---------------------------------------------------------------------------------------------------


def definition(
    case: Case,
    like: Outcome,
    change: Change | None = None,
    *,
    plain: bool = False,
    forward_only: bool = False,
    dtype: torch.dtype | None = None,
    reweighted: Callable[[Tensor], Tensor] | None = None,
) -> Parts | None:
    """The same parts as `like`, by the definition. None if `change` does not apply to the case.

    `plain`: by plain operations in the case's dtype (or in `dtype`). `reweighted` changes the derivative of the loss
    by the output.
    """
    kind = (dtype or case.dtype) if plain else torch.float64
    gradients = like.has_gradients and not forward_only
    leaves = {name: tensor.to(kind).requires_grad_(gradients) for name, tensor in case.leaves.items()}
    solve: Callable[[Call], Solved] = solve_plainly if plain else solve_exactly
    with torch.set_grad_enabled(gradients):
        call: Call | None = case.call(leaves)
        if change is not None:
            call = change(call)
            if call is None:
                return None
        out, lse = solve(call)
    parts = {"output": _plain(out)}
    if like.has_lse and lse is not None:
        parts["lse"] = _plain_lse(lse)
    if gradients:
        weights, of_lse = cotangents(case, out, lse if like.has_lse else None)
        weights = weights if reweighted is None else reweighted(weights)
        outputs = [(o, w) for o, w in ((out, weights), (lse, of_lse)) if o is not None and w is not None]
        outputs = [(o, w.to(o.dtype)) for o, w in outputs if o.requires_grad]
        names = list(leaves)
        found = (
            torch.autograd.grad(
                [o for o, _ in outputs], [leaves[n] for n in names], [w for _, w in outputs], allow_unused=True
            )
            if outputs
            else [None] * len(names)
        )
        for name, gradient in zip(names, found, strict=True):
            own = case.leaves[name] if gradient is None else gradient
            parts[f"gradient of {name}"] = torch.zeros_like(own) if gradient is None else _plain(gradient)
    _cut(case, parts)
    return parts


def allowances(
    case: Case, like: Outcome, truth: Parts, change: Change | None = None, *, dtype: torch.dtype | None = None
) -> Parts:
    """How far the entries of each part may be from `truth`, which is the definition under `change`."""
    plain = definition(case, like, change, plain=True, dtype=dtype)
    assert plain is not None
    kind = dtype or case.dtype
    eps = torch.finfo(kind).eps
    floors = _magnitudes(case, like, change)
    found = {}
    for name, expected in truth.items():
        error = _errors(plain[name], expected)
        loss = float(error[error.isfinite()].max()) if error.isfinite().any() else 0.0
        floor = float(floors[name].abs().max() if name in floors else expected.abs().max()) + 1e-30
        found[name] = torch.full_like(expected, ALLOWED * loss + FLOOR.get(kind, 1.0) * eps * floor)
    return found


def _magnitudes(case: Case, like: Outcome, change: Change | None) -> Parts:
    """Sums of absolute terms: what a rounding of each term changes in each part, in units of the dtype's eps.

    A rounding of the largest score of a row changes its weights by that score times eps, so terms count that often."""
    leaves = {name: tensor.nan_to_num(0, 0, 0).requires_grad_() for name, tensor in case.leaves.items()}
    call = case.call(leaves)
    changed = None if change is None else change(call)
    call = call if changed is None or changed.compute is not None else changed
    q, k, v = (t.detach().abs() for t in (call.query, call.key, call.value))
    k, v = call.repeated(k), call.repeated(v)
    scores = call.scores().detach().abs()
    largest = 1 + peaks(call)  # [B, H, Tq]
    plan = weights_of(call).abs() * largest[..., None]
    found = {"output": plan @ v, "lse": scores.amax(-1) + largest}
    if not like.has_gradients:
        return found
    tau = call.problem.temperature
    steep = float(torch.as_tensor(tau).detach().min()) if isinstance(tau, int | float | Tensor) else 1.0
    weights, of_lse = cotangents(case, found["output"], found["lse"] if like.has_lse else None)
    utility = weights.abs() @ v.mT  # [B, H, Tq, Tk]
    slope = plan * (utility + (plan / largest[..., None] * utility).sum(-1, keepdim=True)) / max(steep, 1e-6)
    if of_lse is not None:
        slope = slope + plan * of_lse.abs()[..., None]
    scaled = slope * abs(call.scale_factor)
    group = call.query.shape[1] // call.key.shape[1]
    shared = (*call.key.shape[:2], group)
    terms = [
        (call.query, scaled @ k),
        (call.key, (scaled.mT @ q).unflatten(1, shared[1:]).sum(2)),
        (call.value, (plan.mT @ weights.abs()).unflatten(1, shared[1:]).sum(2)),
    ]
    if call.mask is not None and call.mask.requires_grad:
        terms.append(
            (
                call.mask,
                slope.sum_to_size(call.mask.shape if call.mask.dim() == 4 else _lead(call.mask)).view_as(call.mask),
            )
        )
    surrogate = sum(
        ((argument * bound).nan_to_num(0, 0, 0).sum() for argument, bound in terms), torch.zeros(()).double()
    )
    names = list(leaves)
    pulled = torch.autograd.grad(surrogate, [leaves[n] for n in names], allow_unused=True)
    everything = float((slope * (1 + scores)).sum())  # for parameters: every term of their gradient
    for name, gradient in zip(names, pulled, strict=True):
        found[f"gradient of {name}"] = (
            torch.full_like(leaves[name], everything).detach() if gradient is None else gradient
        )
    if "sink" in leaves:
        found["gradient of sink"] = (plan * utility).sum((0, 2, 3)).expand_as(leaves["sink"])
        if of_lse is not None:
            found["gradient of sink"] = found["gradient of sink"] + of_lse.abs().sum((0, 2))
    return found


def _lead(mask: Tensor) -> tuple[int, ...]:
    return (1,) * (4 - mask.dim()) + tuple(mask.shape)


# --- agreement --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disagreement:
    """A part that is wrong: its largest error, and the most that is allowed in this part."""

    part: str
    error: float
    allowed: float
    where: Tensor  # bool


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    equal = (found == expected) | (found.isnan() & expected.isnan())
    return torch.where(equal, 0.0, (found - expected).abs().nan_to_num(math.inf, math.inf))


def disagreements(found: Parts, expected: Parts, allowed: Parts) -> list[Disagreement]:
    """The parts of `found` that are further from `expected` than allowed."""
    wrong = []
    for name, truth in expected.items():
        if name not in found:
            continue
        errors = _errors(found[name], truth)
        where = errors > allowed[name]
        if bool(where.any()):
            wrong.append(Disagreement(name, float(errors[where].max()), float(allowed[name].max()), where))
    return wrong


def agrees(found: Parts, expected: Parts, allowed: Parts) -> bool:
    return not disagreements(found, expected, allowed)
