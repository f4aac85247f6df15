"""Priors with structure in decoding, with keys that no query reads, with both marginals; and their memory."""

import math
import subprocess
import sys

import pytest
import torch

import regard
from regard import (
    KL,
    AuxRequest,
    Bias,
    Blocks,
    ByKeys,
    Causal,
    Decay,
    Density,
    Documents,
    LowRank,
    Prefix,
    Relative,
    RowsAndColumns,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from support.memory import PEAK, reads_peak
from support.structured import attend, by_engine, double, draw, uniform
from support.tolerance import assert_close

pytestmark = pytest.mark.each_isa


# --- decoding, poison, both marginals ---------------------------------------------------------------------------------


def parts(T, H=4, dtype=torch.float32):
    """Name -> the prior of queries `rows` and keys 0 ... last, as a model with a cache would declare it."""
    table, a, b = draw(H, 7, dtype=dtype), draw(H, T, 3, dtype=dtype), draw(2, T, 3, seed=1, dtype=dtype)
    gates, density = uniform(-1, -0.1, H, T, dtype=dtype), uniform(0, 1, H, T, T, dtype=dtype)
    density[..., 3] = 0
    index = torch.randint(-1, T, (H, T, 5), generator=torch.Generator().manual_seed(0))
    index = torch.where(index > torch.arange(T)[:, None], -1, index)
    blocks = torch.rand(T, T, generator=torch.Generator().manual_seed(1)) < 0.5
    ids = torch.arange(T) // 9
    causal = Causal("bottom_right")
    return {
        "Relative": lambda rows, last: Relative(table, "bottom_right") * Causal(),
        "Relative.t5": lambda rows, last: Relative.t5(table[:, :6].mT, False, 9, "bottom_right") * Causal(),
        "LowRank": lambda rows, last: LowRank(a[:, rows], b[:, :last]) * causal,
        "Decay": lambda rows, last: Decay(gates[:, :last], "bottom_right"),
        "Density": lambda rows, last: Density(density[:, rows, :last]) * causal,
        "Selected": lambda rows, last: Selected(index[:, rows].clamp(max=last - 1)) * causal,
        "Prefix": lambda rows, last: (Prefix(4) | Window(3)) * causal,
        "Blocks": lambda rows, last: (Blocks(blocks[rows, :last], 1) | Window(2)) * causal,
        "Documents": lambda rows, last: (Documents(ids[rows], ids[:last]) | Prefix(2)) * causal,
    }


NAMES = tuple(parts(30))


@pytest.mark.parametrize("name", NAMES)
@by_engine
def test_decoding_is_prefill_row_by_row(name, backend):
    T = 30
    make = parts(T)[name]
    q, k, v = draw(2, 4, T, 8, dtype=torch.float32), draw(2, 2, T, 8, seed=1, dtype=torch.float32), draw(2, 2, T, 8)
    v = v.float()
    for temperature in (0.8, ByKeys(0.5, 0.4)):
        for regularizer in (KL(), Tsallis(1.5)):

            def rows(rows, last):
                problem = Transport(regularizer, prior=make(rows, last), temperature=temperature)  # noqa: B023
                return regard.attention(
                    q[:, :, rows], k[:, :, :last], v[:, :, :last], problem=problem, enable_gqa=True, backend=backend
                )

            whole = rows(slice(0, T), T)
            for i in (0, 1, 8, 17, T - 1):
                assert_close(rows(slice(i, i + 1), i + 1), whole[:, :, i : i + 1], torch.float32, 2, f"{name} {i}")
            assert_close(rows(slice(20, T), T), whole[:, :, 20:], torch.float32, 2, name)


@pytest.mark.parametrize("invalid", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["Decay", "Selected", "Prefix", "Blocks", "Documents"])
@pytest.mark.parametrize("regularizer", [KL(), Tsallis(1.5)], ids=repr)
@by_engine
def test_keys_that_no_query_reads_may_hold_anything(name, regularizer, backend, invalid):
    T, H = 70, 4
    unread = torch.zeros(T).bool()
    unread[[5, 6, 40, 69]] = True
    mask = ~unread.expand(T, T)
    index = torch.tensor([0, 7, 9, 41, 68, 12]).expand(T, -1)
    prior, read = {
        "Decay": (Decay(-uniform(0.1, 1, H, T).float(), "top_left") * Window(None, -1), torch.arange(T) < T - 1),
        "Selected": (Selected(index), None),
        "Prefix": (Prefix(65) | Window(1, -1) * Prefix(69), torch.arange(T) < 69),
        "Blocks": (Blocks(mask, 1), ~unread),
        "Documents": (Documents(torch.where(unread, -1, 0)) | Blocks(mask, 1), ~unread),
    }[name]
    if read is None:
        read = torch.zeros(T).bool().index_fill(0, index[0], True)
    tensors = [draw(1, h, T, 8, seed=n, dtype=torch.float32) for n, h in enumerate((H, 2, 2))]
    results = []
    for value in (0.5, invalid):
        leaves = [t.clone() for t in tensors]
        for t in leaves[1:]:
            t[:, :, ~read] = value
        leaves = [t.requires_grad_() for t in leaves]
        out, aux = attend(*leaves, prior, backend, regularizer, return_aux=AuxRequest(entropy=True, value_spread=True))
        results.append([out, aux.entropy, aux.value_spread, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert all(t.isfinite().all() for t in results[1])
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected, torch.float32)
    assert (results[1][4][:, :, ~read] == 0).all() and (results[1][5][:, :, ~read] == 0).all()


@pytest.mark.parametrize("regularizer", [KL(), Tsallis(1.5)], ids=repr)
@pytest.mark.parametrize("where", ["key", "value"])
@by_engine
def test_a_key_of_density_0_is_read(where, regularizer, backend):
    """NaN in it shows in the rows that read it; NaN in a key shows in no other row."""
    q, k, v = (draw(1, 2, 9, 8, seed=n, dtype=torch.float32) for n in range(3))
    (k if where == "key" else v)[:, :, 4] = math.nan
    density = torch.ones(9, 9)
    density[:, 4] = 0
    out = attend(q, k, v, Density(density) * Causal(), backend, regularizer)
    assert out[:, :, 4:].isnan().any(-1).all()
    if where == "key":
        assert out[:, :, :4].isfinite().all()


@pytest.mark.parametrize(
    "name", ["Relative", "LowRank", "Density", "Density with zeros", "Selected", "Prefix", "Blocks", "product"]
)
@by_engine
def test_both_marginals(name, backend):
    """A plan with both marginals equals the one of the same prior as a dense matrix, and so do its gradients."""
    Tq, Tk, H = 6, 8, 2
    i, j = torch.arange(Tq)[:, None] + 2, torch.arange(Tk)[None]
    table = draw(H, 5).requires_grad_()
    a, b = draw(H, Tq, 2).requires_grad_(), draw(1, Tk, 2, seed=1).requires_grad_()
    density = uniform(0.2, 1, Tq, Tk).requires_grad_()
    zeros = torch.ones(Tq, Tk, dtype=double)
    zeros[1, 2] = zeros[4, 5] = 0
    index = torch.tensor([[0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3], [1, 0, 2], [3, 0, 2]])
    chosen = torch.where((index[..., None] == torch.arange(Tk) // 2).any(1), 0.0, -math.inf).double()
    blocks = torch.tensor([[True, True, False, True], [True, False, True, True], [False, True, True, True]])
    of_blocks = torch.where(blocks.repeat_interleave(2, 0).repeat_interleave(2, 1), 0.0, -math.inf).double()
    by_table = table[:, (j - i).clamp(-2, 2) + 2]
    options = {
        "Relative": (Relative(table, "bottom_right"), by_table, [table]),
        "LowRank": (LowRank(a, b), a @ b.mT, [a, b]),
        "Density": (Density(density), density.log(), [density]),
        "Density with zeros": (Density(zeros) * Relative(table, "bottom_right"), zeros.log() + by_table, [table]),
        "Selected": (Selected(index, 2), chosen, []),
        "Prefix": (
            Prefix(3) | Window(2, 4, "bottom_right"),
            torch.where((j < 3) | ((j >= i - 2) & (j <= i + 4)), 0.0, -math.inf).double(),
            [],
        ),
        "Blocks": (Blocks(blocks, 2), of_blocks, []),
        "product": (
            Blocks(blocks, 2) * LowRank(a, b) * Relative(table, "bottom_right") * Density(density),
            of_blocks + a @ b.mT + by_table + density.log(),
            [a, b, table, density],
        ),
    }
    prior, dense, learned = options[name]
    leaves = [draw(2, H, Tq, 4).requires_grad_(), draw(2, H, Tk, 4, seed=1).requires_grad_(), *learned]
    v = draw(2, H, Tk, 3, seed=2)
    results = []
    for used in (prior, Bias(dense)):
        problem = Transport(prior=used, marginal=RowsAndColumns(tolerance=1e-12))
        out = regard.attention(*leaves[:2], v, problem=problem, backend=backend)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True)])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, atol=1e-8), (got - expected).abs().max()


def test_causal_priors_of_both_marginals_raise():
    q = draw(1, 2, 5, 4)
    for prior in (Decay(torch.zeros(5)), (Prefix(0) | Causal()), Selected(torch.arange(5)[:, None]) * Causal()):
        with pytest.raises(ValueError, match="causal"):
            regard.attention(q, q, q, problem=Transport(prior=prior, marginal=RowsAndColumns()))


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY = (
    PEAK
    + """
import sys, torch, regard
from regard import *
torch.set_num_threads(1)
T = 16384

def learned(*shape):
    return torch.rand(shape).requires_grad_()

def prior(name, T):
    return {
        "Relative": lambda: Causal() * Relative(learned(1, 257)),
        "LowRank": lambda: LowRank(learned(T, 8), learned(T, 8)) * Causal(),
        "Decay": lambda: Decay(-torch.rand(T).requires_grad_()),
        "Density": lambda: Density(learned(T)) * Causal(),
        "Selected": lambda: Selected(torch.randint(0, T // 64, (T, 16)), 64) * Causal(),
        "Union": lambda: (Prefix(100) | Window(512) | Documents(torch.arange(T) // 3000)) * Causal(),
        "Blocks": lambda: Blocks(torch.rand(T // 128, T // 128) < 0.2, 128) * Causal(),
        "ByKeys": lambda: (Prefix(100) | Window(512)) * Causal(),
    }[name]()

def step(T, name, backend):
    q, k, v = (torch.randn(1, 1, T, 32, requires_grad=True) for _ in range(3))
    temperature = ByKeys(learned(1), 0.2) if name == "ByKeys" else 1.0
    problem = Transport(prior=prior(name, T), temperature=temperature)
    regard.attention(q, k, v, problem=problem, backend=backend).sum().backward()

step(1024, sys.argv[1], sys.argv[2])
before = peak()
step(T, sys.argv[1], sys.argv[2])
print(peak() - before)
"""
)


@reads_peak
@pytest.mark.parametrize("name", ["Relative", "LowRank", "Decay", "Density", "Selected", "Union", "Blocks", "ByKeys"])
def test_memory_is_linear(name):
    """Forward and backward at T = 16384 on the native engine; one T x T buffer of float32 would take 1024 MiB, one of
    bytes 256."""
    pytest.importorskip("regard._native", reason="the native engine was not built")
    done = subprocess.run([sys.executable, "-c", MEMORY, name, "native"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 100, f"{done.stdout} MiB"


@reads_peak
def test_memory_of_the_reference():
    """The reference holds blocks of a few MiB, of every part of the prior too."""
    done = subprocess.run([sys.executable, "-c", MEMORY, "Union", "torch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 400, f"{done.stdout} MiB"
