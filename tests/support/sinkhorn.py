"""Plain Sinkhorn on a stored matrix, and what several tests of two-sided plans share."""

import pytest
import torch

import regard
from regard import RowsAndColumns
from regard.backends.native import engine

F64 = torch.float64
BACKENDS = ["torch", *(["native"] if engine.extension()[0] is not None else [])]
by_backend = pytest.mark.parametrize("backend", BACKENDS)


def draw(*shape, seed=0, dtype=F64, grad=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)
    return values.requires_grad_(grad)


def tight(**more):
    return RowsAndColumns(tolerance=1e-12, max_iterations=5000, **more)


def call(**more):
    q = draw(1, 2, 5, 4)
    return regard.attention(q, q, q, **more)


def dense(scores, tau=1.0, row=None, column=None, relax=None, steps=20000):
    """Plain Sinkhorn on a stored matrix [..., Tq, Tk], log pi included in scores/tau by the caller."""
    y = scores / tau
    row = torch.ones(scores.shape[:-1], dtype=F64) if row is None else row
    column = (
        row.sum(-1, keepdim=True).expand(*scores.shape[:-2], scores.shape[-1]) / scores.shape[-1]
        if column is None
        else column
    )
    g = torch.zeros_like(column)
    damp = 1.0 if relax is None else relax / (relax + tau)
    for _ in range(steps):
        f = (y - g[..., None, :]).logsumexp(-1) - row.log()
        new = damp * ((y - f[..., None]).logsumexp(-2) - column.log())
        if bool((new - g).abs().max() < 1e-15):
            break
        g = new
    f = (y - g[..., None, :]).logsumexp(-1) - row.log()
    return (y - f[..., None] - g[..., None, :]).exp()
