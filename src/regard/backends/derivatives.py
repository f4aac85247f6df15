"""The reference backend as plain operations. It serves the derivatives that no kernel computes: transforms, forward
mode, and second derivatives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..form import Form
from .reference import Reference, attend, blocks, dropped, full_precision, scores_of, transport
from .row_equation import centred, solve_rows


def differentiable(form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics as plain operations, which autograd, forward mode and vmap can follow: exact up to third
    derivatives."""
    B, H, Tq, Tk = form.shape
    if 0 in (B, H, Tq):
        return Reference().forward(form, names)
    # Nested lists of blocks are joined from the inside out: writing into a buffer would break transforms.
    batches: list[dict[str, Tensor]] = []
    heads: list[dict[str, Tensor]] = []
    parts: list[dict[str, Tensor]] = []
    with full_precision(form):
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
    shapes = Reference().output_shapes(form, names)
    if 0 in form.shape[:3]:
        return {name: torch.zeros(shape, dtype=form.dtype) for name, shape in shapes.items()}
    with full_precision(form):
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
    weights = rows.weights if form.dropout_key is None else dropped(rows)
    result = scores.new_zeros(*scores.shape[:3], value.shape[3])
    if value_tangent is not None:
        result = result + transport(weights, value_tangent)
    if x is not None and x.shape[3]:
        assert rows.rates is not None
        moved = replace(rows, weights=rows.rates * centred(rows.rates, rows.slack, x))
        result = result + transport(moved.weights if form.dropout_key is None else dropped(moved), value)
    return result


def _join(parts: list[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    joined = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        # key_mass has no query dimension: blocks of queries add up.
        joined[name] = torch.stack(pieces).sum(0) if name == "key_mass" and dim == 2 else torch.cat(pieces, dim)
    return joined
