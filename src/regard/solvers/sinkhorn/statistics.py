"""Output and statistics of a plan with both marginals, from those of its rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ... import autograd
from ...backends import BACKENDS, Backend
from ...form import Form
from ...statistics import COLUMN_STATISTICS, DIFFERENTIABLE
from .reduction import ReducedToRows, reduce_to_rows
from .views import one_sided, own_head, per_head, plan_only

_SCALED = ("max_weight", "first_key_mass", "mass", "cost")  # proportional to what a row sends


def attend(backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics (defined in `statistics`), computed from those of the one-sided plan."""
    solved = reduce_to_rows(backend, form)
    rows, a = solved.form, solved.row
    needed = set(names) - {"lse", "value", "kl", *COLUMN_STATISTICS}
    if a is not None:
        needed -= {"key_mass"}
        if "value_spread" in names:
            needed |= {"out"}
    if "value" in names:
        needed |= {"dual"}
    if "kl" in names:
        needed |= {"cost", "support"}
    found = autograd.run(backend, rows, tuple(sorted(needed))) if needed else {}
    results = {name: found[name] for name in names if name in found}
    if a is not None:
        scale = a.to(rows.dtype)
        if "value_spread" in results:  # a sum p |v|^2 - |a o|^2
            results["value_spread"] = scale * found["value_spread"] + (scale - scale**2) * (found["out"] ** 2).sum(-1)
        for name in results:
            if name in _SCALED:
                results[name] = results[name] * scale
        if "out" in results:
            results["out"] = results["out"] * scale[..., None]
        if "collision" in results:
            results["collision"] = results["collision"] * scale**2
    with torch.no_grad():
        results |= _others(backend, form, names, solved, found)
    if "lse" in names:  # of the scores and the prior alone
        results["lse"] = autograd.run(backend, one_sided(plan_only(form)), ("lse",))["lse"]
    return {n: (r if n in DIFFERENTIABLE else r.detach()).to(form.dtype) for n, r in results.items()}


def _column_sums(engine: Backend, rows: Form, a: Tensor) -> Tensor:
    """What each key receives, sum_i a_i p_ij [B, H, Tk], summed over the plan's own weights.

    exp(L - gamma) would be the same number, but has no correct digits where prices are large. The sum is computed as
    the gradient of sum_ij a_i p_ij x_j in the values x."""
    B, H, _, Tk = rows.shape
    group = rows.group
    with torch.no_grad():
        rows = dataclasses.replace(rows, value=per_head(rows, a.new_zeros(B, H, Tk)))
        own = torch.eye(group, dtype=rows.dtype, device=a.device).repeat(H // group, 1)  # [H, group]: one-hot
        incoming = {"out": a.to(rows.dtype)[..., None] * own[:, None]}
        outputs = engine.forward(rows, ("out", *(n for n in engine.saved(rows, ("out",)) if n != "out")))
        found = engine.backward(rows, ("value",), outputs, incoming)["value"]  # [B, Hkv, Tk, group]
    return found.mT.reshape(B, H, Tk).double()


def _others(
    backend: str, form: Form, names: tuple[str, ...], solved: ReducedToRows, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The statistics that the one-sided plan does not have or computes with another prior."""
    engine, rows, marginals = BACKENDS[backend], plan_only(solved.form), solved.marginals.detached()
    rows = rows.detached()
    gamma, a = solved.gamma.detach().double(), marginals.row
    tau: Any = solved.form.temperature
    tau = tau.detach().squeeze(3) if isinstance(tau, Tensor) else tau
    none = found.get("dual", a) == -math.inf
    results = {}
    price = found.get("dual", a) + tau * (math.log(solved.form.mass) - torch.where(a > 0, a, 1.0).log())  # f
    if "dual" in names:
        results["dual"] = torch.where(none, found["dual"], price)
    if "value" in names or "kl" in names:  # the sum of the prices of a row's keys, for a row of mass 1
        keys = per_head(rows, gamma)
        paid = own_head(rows, engine.forward(dataclasses.replace(rows, value=keys), ("out",))["out"])
        if "value" in names:
            results["value"] = torch.where(none, -math.inf, a * (torch.where(none, 0.0, price) + tau * paid))
        if "kl" in names:
            lse = engine.forward(rows, ("lse",))["lse"]
            bare = one_sided(plan_only(form).without_scores())
            prior = found["support"].log() if not form.weighted else engine.forward(bare, ("lse",))["lse"]
            mean = -found["cost"] / (solved.form.mass * tau)
            total = mean - paid - lse + prior
            results["kl"] = torch.where(found["support"] > 0, total, 0.0).clamp(min=0)
    if ("key_mass" in names and solved.row is not None) or "column_residual" in names:
        mass = _column_sums(engine, rows, a)
        if "key_mass" in names and solved.row is not None:
            results["key_mass"] = mass
        if "column_residual" in names:
            results["column_residual"] = (mass - marginals.target(gamma)).abs()
    if "column_dual" in names:
        results["column_dual"] = gamma * tau
    if "iterations" in names:
        results["iterations"] = solved.iterations
    return results
