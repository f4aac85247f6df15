"""Temperatures by passes of a backend over queries and keys, and their gradient by the implicit function theorem."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...backends import BACKENDS, REFERENCE, Backend
from ...form import PRIOR_SLOTS, Form
from .search import INSIDE, as_kl, coldest_like, search, temperatures_from

MEASURED = ("kl", "score_variance")  # the statistics of each pass


def split(form: Form) -> tuple[Form, str, Tensor]:
    """The problem at temperature 1 without its budget, the statistic to match, and the budget."""
    assert form.matched is not None and form.budget is not None
    return dataclasses.replace(form, matched=None, budget=None), form.matched, form.budget


def rows_of(form: Form, rows: slice) -> Form:
    """The plan of a range of queries, as a whole plan (without dropout, whose mask depends on the position)."""
    B, H, _, Tk = form.shape
    part = form.cut(slice(0, B), slice(0, H), rows, slice(0, Tk))
    part.offset, part.first_query = part.offset + part.first_query, 0
    return part


def find_temperatures(backend: str, form: Form) -> tuple[Tensor, Tensor]:
    """The rows' temperatures and their states, [B, H, Tq, 1]."""
    solver, form, statistic, budget = BACKENDS[backend], *split(form)
    assert form.query is not None
    B, H, Tq, _ = form.shape
    if 0 in (B, H, Tq):
        nothing = form.query.new_ones((B, H, Tq, 1), dtype=form.dtype)
        return nothing, nothing.long()
    # log pi is added to s/tau. In float32 a row at a low temperature would lose it to rounding.
    weighted = form.weighted
    forms = {False: form}

    def doubled() -> Form:
        if True not in forms:
            forms[True] = form.widened()
        return forms[True]

    def measure(temperature: Tensor, rows: slice, exact: bool) -> tuple[Tensor, Tensor]:
        whole = doubled() if exact or weighted else form
        part = dataclasses.replace(rows_of(whole, rows), temperature=temperature[..., None].to(whole.dtype))
        found = solver.forward(part, MEASURED)
        return found["kl"], found["score_variance"]

    def hardest(rows: slice) -> Tensor:
        cold = coldest_like(torch.empty(B, H, rows.stop - rows.start, dtype=torch.float64, device=budget.device))
        if weighted:
            # A common offset of the scores costs digits. The temperature is as low as the spread needs and the offset
            # allows.
            found = solver.forward(rows_of(doubled(), rows), ("max_scores", "score_variance"))
            best, own = found["max_scores"].abs(), found["score_variance"].sqrt()
            cold = torch.maximum(1e-10 * best, torch.minimum(1e-6 * own, 1e-6 * best))
            cold = torch.where(best.isfinite(), cold, 1.0).clamp(min=1e-100)
        return measure(cold, rows, True)[0]

    with torch.no_grad():
        count = torch.full((), 2, device=budget.device)
        if statistic == "entropy" or weighted:
            count = solver.forward(form.without_scores(), ("support",))["support"]
        target = as_kl(statistic, budget.double(), count).expand(B, H, Tq).clone()
        if weighted:  # with one key every temperature gives the same plan
            target = torch.where(count < 2, 0.0, target)
        x, state = search(measure, hardest, target, form.dtype)
        return temperatures_from(x, state, target, form.dtype), state[..., None].clone()


def gradients_of(
    backend: str, needed: tuple[str, ...], form: Form, temperature: Tensor, state: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    """From dL/dtau the gradients of the form's slots, the budget among them: dtau = (tau/Var) (d KL - dc)."""
    solver = BACKENDS[backend]
    if form.weighted and solver.rounds_cold_priors and form.dtype != torch.float64:  # as in the search
        tensors = form.tensors()
        found = gradients_of(backend, needed, form.widened(), temperature.double(), state, grad.double())
        return {slot: gradient.to(tensors[slot].dtype) for slot, gradient in found.items()}
    form, statistic, budget = split(form)
    form = dataclasses.replace(form, temperature=temperature)
    names = ("entropy", "score_variance")
    outputs = solver.forward(form, (*names, *solver.saved(form, names)))
    variance = outputs["score_variance"][..., None]
    moves = (state == INSIDE) & (variance > 0)
    rate = torch.where(moves, grad * temperature / torch.where(moves, variance, 1.0), 0.0)  # dL/dKL
    found = {}
    if "budget" in needed:
        found["budget"] = (rate if statistic == "entropy" else -rate).sum_to_size(budget.shape).to(budget.dtype)
    slots = tuple(slot for slot in needed if slot != "budget")
    if not slots:
        return found
    rate = rate.squeeze(-1)
    if statistic == "entropy" or not form.weighted:  # KL is log n minus the entropy
        return found | solver.backward(form, slots, outputs, {"entropy": -rate})
    if "kl" not in solver.differentiable and form.softcap is None and form.score_bias is None:
        return found | _linear_gradients(solver, form, slots, rate)
    mu = REFERENCE.forward(form, ("mu",))
    return found | REFERENCE.backward(form, slots, mu, {"kl": rate})


def _linear_gradients(solver: Backend, form: Form, slots: tuple[str, ...], rate: Tensor) -> dict[str, Tensor]:
    """dKL under a weighted prior, by a backend that does not compute it: with y_j = scale <q, k_j> / tau it is

        sum_j dp_j y_j  -  sum_j p_j dlog pi_j  +  dlog sum_j pi_j,

    the change of an output whose values are the keys, and of two lse (the second of the prior alone).
    """
    assert form.query is not None and form.key is not None and isinstance(form.temperature, Tensor)
    with_keys = dataclasses.replace(form, value=form.key)
    outputs = solver.forward(with_keys, ("out", "lse", *solver.saved(form, ("out",))))
    along = (rate[..., None] * form.scale / form.temperature) * form.query
    found = solver.backward(with_keys, slots, outputs, {"out": along})
    priors = tuple(slot for slot in slots if slot in PRIOR_SLOTS or slot.startswith(("log_priors", "captured")))
    if priors:
        bare = form.without_scores()
        of_prior = solver.forward(bare, ("lse", *solver.saved(bare, ("lse",))))
        for plan, given, sign in ((form, outputs, -1.0), (bare, of_prior, 1.0)):
            for slot, part in solver.backward(plan, priors, given, {"lse": sign * rate}).items():
                found[slot] = found[slot] + part
    return found
