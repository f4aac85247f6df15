"""What the host adds to a backward pass: the numbers of each row, and gradients of tensors that need single pairs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...form import Form
from ..row_gradient import row_value
from .statistics import LN2


class RowTerms(NamedTuple):
    """Of each row: G = w (u - a - b log2 p), and what `RowGradient` calls row_dot: <dL/dout, out> for KL, else the
    baseline. [B, H, Tq]"""

    a: Tensor
    b: Tensor
    dot: Tensor


def row_terms(form: Form, outputs: dict[str, Tensor], grads: dict[str, Tensor]) -> RowTerms:
    """The numbers of each row for a backward pass from these gradients."""
    return _terms_kl(form, outputs, grads) if form.family == "kl" else _terms_link(form, outputs, grads)


def _terms_link(form: Form, outputs: dict[str, Tensor], grads: dict[str, Tensor]) -> RowTerms:
    """The baseline is <dL/dout, baseline value>. A gradient h of the entropy H adds -h (log q + H)/mass to the utility
    of a key, where q is the plan over its mass."""
    zero = torch.zeros_like(outputs["peak"])
    level = row_value(form.marginal_parameter)
    free = form.marginal == "free"
    base = zero
    if "out" in grads and not free:
        base = (grads["out"].to(form.dtype) * outputs["baseline_value"]).sum(-1)
    add = b = zero
    if "entropy" in grads:
        log_mass = zero + math.log(form.mass)
        if form.marginal == "relax":
            log_mass = outputs["dual"] / level
        elif free or form.family == "fermi_dirac":  # such a row may not be able to send the mass
            log_mass = outputs["mass"].log()
        per_mass = torch.where(log_mass == -torch.inf, 0.0, (-log_mass).exp())
        h = grads["entropy"].to(form.dtype) * per_mass
        if not free:
            base = base - h * outputs["baseline_log"]
        add = h * (outputs["entropy"] - torch.where(log_mass == -torch.inf, 0.0, log_mass))
        b = h * LN2
    idle = outputs["peak"] == -torch.inf
    invalid = torch.where(outputs["peak"].isnan(), math.nan, 0.0)  # w alone need not show it (kernels/links.py)
    return RowTerms(*(torch.where(idle, 0.0, t).contiguous() for t in (base + add + invalid, b, base)))


def _terms_kl(form: Form, outputs: dict[str, Tensor], grads: dict[str, Tensor]) -> RowTerms:
    """With mu = (mass of the plan)/(mass of the distribution), the baseline <dL/dout, out>/mu, and gradients g of lse
    and h of the entropy H: dL/ds = (p/tau) [u - baseline + (g - h (log p - log mu + H))/mu]."""
    tau, level = row_value(form.temperature), row_value(form.marginal_parameter)
    zero = torch.zeros_like(outputs["peak"])
    dot = (grads["out"].to(form.dtype) * outputs["out"]).sum(-1) if "out" in grads else zero
    base, log_mu = dot, zero
    if form.marginal == "rows" and form.mass != 1:
        log_mu = zero + math.log(form.mass)
        base = dot / form.mass
    elif form.marginal == "relax":
        log_mu = outputs["dual"] / level
        base = dot * (-log_mu).exp() * (level / (level + tau))
    elif form.marginal == "free":
        base = zero
        if "lse" in outputs:
            log_mu = outputs["lse"] + level / tau
    per_mass = torch.where(log_mu == -torch.inf, 0.0, (-log_mu).exp())
    add = grads["lse"].to(form.dtype) if "lse" in grads else zero
    b = zero
    if "entropy" in grads:
        h = grads["entropy"].to(form.dtype)
        add = add - h * (outputs["entropy"] - torch.where(log_mu == -torch.inf, 0.0, log_mu))
        b = h * per_mass * LN2
    a = torch.where(log_mu == -torch.inf, 0.0, base - add * per_mass)
    idle = outputs["peak"] == -torch.inf
    return RowTerms(*(torch.where(idle, 0.0, t).contiguous() for t in (a, b, dot)))


def from_pairs(form: Form, slot: str, pairs: Tensor, first: int, results: dict[str, Tensor]) -> None:
    """Add the part of n queries from `first` on to the gradient of a slot. `pairs` [B, H, n, Tk] is dL/dlog(pi), or
    dL/ds for a float mask."""
    tensor = form.tensors()[slot]
    n = pairs.shape[2]
    if slot not in results:
        wide = torch.float64 if slot == "relative" else form.dtype
        results[slot] = torch.zeros(tensor.shape, dtype=wide, device=pairs.device)
    total = results[slot]
    if slot == "relative":
        total += _by_distance(pairs, tensor.shape[3] // 2, first + form.offset).sum_to_size(tensor.shape)
    elif slot == "query_factor":
        assert form.key_factor is not None
        part = pairs @ form.key_factor.to(pairs.dtype)
        total[:, :, first : first + n] += part.sum_to_size((*tensor.shape[:2], n, tensor.shape[3]))
    elif slot == "key_factor":
        assert form.query_factor is not None
        part = pairs.mT @ form.query_factor[:, :, first : first + n].to(pairs.dtype)
        total += part.sum_to_size(tensor.shape)
    else:
        cut = total[:, :, first : first + n] if tensor.shape[2] > 1 else total
        cut += pairs.sum_to_size(cut.shape)


def _by_distance(pairs: Tensor, reach: int, position: int) -> Tensor:
    """Pairs [B, H, n, Tk] summed by distance, [B, H, 1, 2 reach + 1]; `position` is that of the first query.

    Rows are shifted so that pairs of one distance are in one column. Sums in float64, in a fixed order."""
    n, Tk = pairs.shape[2:]
    width = Tk + n - 1
    flipped = torch.nn.functional.pad(pairs.double().flip(2), (0, n)).flatten(2)
    columns = flipped[..., : n * width].unflatten(2, (n, width)).sum(2)  # column c: distance c - (n - 1) - position
    nearest = n - 1 + position  # the column of distance 0
    low, high = nearest - reach, nearest + reach + 1
    inner = columns[..., max(0, low) : max(0, min(width, high))]
    table = torch.nn.functional.pad(inner, (max(0, -low), max(0, high - max(low, width))))
    table = table[..., : 2 * reach + 1].clone()
    table[..., 0] += columns[..., : max(0, min(width, low))].sum(-1)
    table[..., -1] += columns[..., max(0, min(width, high)) :].sum(-1)
    return table[:, :, None]
