"""The cases, the implementations that are compared, and the check of each one against float64."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import AuxRequest, Causal, Transport, Tsallis, Window

TELEMETRY = AuxRequest(lse=True, entropy=True, max_scores=True, score_variance=True)
BACKEND = "native"  # of "regard" in the table; on a GPU "triton"
DEVICE = torch.device("cpu")
ALPHAS = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One problem at one size. Inputs are standard normal, queries times `sharpness`."""

    name: str
    T: int  # keys
    H: int = 8
    D: int = 64
    Tq: int = 0  # queries; 0: as many as keys
    Hkv: int = 0  # key/value heads; 0: as many as query heads
    kind: str = "full"  # full, causal or window (256 keys, causal)
    family: str = "softmax"
    train: bool = False  # forward and backward
    telemetry: bool = False
    half: bool = False  # bfloat16 instead of float32
    sharpness: float = 1.0
    peers: tuple[str, ...] = ("SDPA",)

    @property
    def queries(self) -> int:
        return self.Tq or self.T

    @property
    def pairs(self) -> int:
        """Admissible pairs of query and key, over all heads."""
        rows = range(self.queries)
        if self.kind == "full":
            return self.H * self.queries * self.T
        return self.H * sum(min(i + 1, WINDOW if self.kind == "window" else self.T) for i in rows)

    @property
    def operations(self) -> int:
        """Operations in the matrix products: two forward, and five backward, where scores are computed again."""
        return self.pairs * self.D * 2 * (7 if self.train else 2)

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.T + self.D)
        dtype = torch.bfloat16 if self.half else torch.float32
        shapes = ((1, self.H, self.queries, self.D), *((1, self.Hkv or self.H, self.T, self.D),) * 2)
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        return [t.to(DEVICE, dtype).requires_grad_(self.train) for t in (q * self.sharpness, k, v)]


WINDOW = 256


class Skip(Exception):
    """Why an implementation does not take part in a case."""


# --- the implementations: each gives an attention for a case, or raises Skip ------------------------------------------


def problem_of(case: Case) -> Transport:
    prior = {"full": None, "causal": Causal(), "window": Causal() * Window(WINDOW - 1)}[case.kind]
    return Transport(None if case.family == "softmax" else Tsallis(ALPHAS[case.family]), prior=prior)


def ours(case: Case) -> Attention:
    arguments: dict[str, Any] = {"problem": problem_of(case), "enable_gqa": bool(case.Hkv), "backend": BACKEND}
    if case.telemetry:
        wanted = TELEMETRY if case.family == "softmax" else replace(TELEMETRY, lse=False)
        arguments["return_aux"] = wanted
    q = torch.zeros(1, case.H, 2, case.D, device=DEVICE)
    k = torch.zeros(1, case.Hkv or case.H, 2, case.D, device=DEVICE)
    try:
        regard.select_backend(q, k, k, **arguments)
    except NotImplementedError as error:
        raise Skip(f"not served: {str(error).partition(': ')[2]}") from None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = regard.attention(q, k, v, **arguments)
        return result[0] if isinstance(result, tuple) else result

    return attention


def sdpa(case: Case) -> Attention:
    if case.kind == "window":
        _room_for(case.T * case.queries * 5, "a mask")  # bool, and float inside
        mask = _allowed(case.queries, case.T, "window")
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=case.kind == "causal", enable_gqa=bool(case.Hkv)
    )


def eager(case: Case) -> Attention:
    """Attention written in PyTorch operations, with the whole matrix of weights."""
    _room_for(case.H * case.queries * case.T * 4 * (6 if case.train else 3), "the scores")
    mask = None if case.kind == "full" else ~_allowed(case.queries, case.T, case.kind)
    normalize = _weights(case.family)
    if case.family != "softmax" and case.T > 4096:
        raise Skip("takes minutes beyond T = 4096")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        return normalize(scores) @ v

    return attention


def flex(case: Case) -> Attention:
    if case.train and DEVICE.type == "cpu":
        raise Skip("FlexAttention has no backward on the CPU")
    from torch.nn.attention.flex_attention import create_block_mask

    mask = None
    if case.kind != "full":
        _room_for(8 * case.queries * case.T, "FlexAttention's block mask")  # it is built from 64-bit counts
        left = case.T if case.kind == "causal" else WINDOW - 1
        mask = create_block_mask(
            lambda b, h, i, j: (j <= i) & (j >= i - left), None, None, case.queries, case.T, device=str(DEVICE)
        )
    compiled = _compiled_flex()
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=bool(case.Hkv))


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # type: ignore[return-value]


def x_transformers(case: Case) -> Attention:
    _installed("x_transformers", "x-transformers")
    from x_transformers.attend import Attend  # pyright: ignore[reportMissingImports]  # a peer, installed for benchmarks only

    attend = Attend(flash=True, causal=case.kind == "causal")
    return lambda q, k, v: attend(q, k, v)[0]


def adasplash(case: Case) -> Attention:
    """Entmax by the kernels of the package adasplash, for GPUs."""
    if DEVICE.type == "cpu":
        raise Skip("adasplash has kernels for GPUs only")
    _installed("adasplash", "adasplash")
    from adasplash import adasplash as attend  # pyright: ignore[reportMissingImports]  # installed by hand, on a GPU

    return lambda q, k, v: attend(
        q * case.D**-0.5, k, v, alpha=ALPHAS[case.family], niter=10, is_causal=case.kind == "causal"
    )


IMPLEMENTATIONS: dict[str, tuple[Callable[[Case], Attention], dict[str, Any]]] = {
    # name: the function that makes it, and where its problem differs from the case's
    "regard": (ours, {}),
    "SDPA": (sdpa, {"family": "softmax", "telemetry": False}),
    "eager": (eager, {"telemetry": False}),
    "FlexAttention": (flex, {"telemetry": False}),
    "x-transformers": (x_transformers, {"telemetry": False}),
    "adasplash": (adasplash, {"telemetry": False}),
    "regard causal": (ours, {"kind": "causal"}),
}


def enter(name: str, case: Case) -> tuple[Attention, Case]:
    """The implementation's attention, and the case that it is checked against."""
    make, instead = IMPLEMENTATIONS[name]
    case = replace(case, **instead)
    return make(case), case


def _installed(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Skip(f"{package} is not installed")


def _room_for(size: int, what: str) -> None:
    if DEVICE.type == "cuda":
        free = torch.cuda.mem_get_info(DEVICE)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > free / 2:
        raise Skip(f"{what} would take {size / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


def _weights(family: str) -> Callable[[Tensor], Tensor]:
    if family == "softmax":
        return lambda scores: scores.softmax(-1)
    _installed("entmax", "entmax")
    import entmax

    return {"entmax15": entmax.entmax15, "sparsemax": entmax.sparsemax}[family]


def _allowed(Tq: int, Tk: int, kind: str, rows: Tensor | None = None) -> Tensor:
    i = (torch.arange(Tq, device=DEVICE) if rows is None else rows)[:, None]
    j = torch.arange(Tk, device=DEVICE)
    if kind == "full":
        return torch.ones(len(i), Tk, dtype=torch.bool, device=DEVICE)
    return (j <= i) if kind == "causal" else (j <= i) & (j > i - WINDOW)


# --- running and checking ---------------------------------------------------------------------------------------------


def run(attention: Attention, inputs: list[Tensor], grad: Tensor | None) -> list[Tensor]:
    """The output, and with `grad` also the gradients."""
    q, k, v = inputs
    if grad is None:
        with torch.no_grad():
            return [attention(q, k, v)]
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def runner(attention: Attention, case: Case, inputs: list[Tensor]) -> Callable[[], object]:
    """A job that ends when the device has the results."""
    grad = torch.randn_like(inputs[0]) if case.train else None
    if DEVICE.type != "cuda":
        return lambda: run(attention, inputs, grad)

    def job() -> None:
        run(attention, inputs, grad)
        torch.cuda.synchronize(DEVICE)

    return job


ROWS = 128  # queries that are checked, chosen at random, so that float64 fits into memory at T = 65536


def error(attention: Attention, case: Case, inputs: list[Tensor]) -> float:
    """The largest error against float64, relative to the largest element.

    For gradients of sparse rows it is the error in the mean square, because rounding decides whether a key at the very
    edge of the support has weight. Only some rows of queries are checked; the output's gradient is 0 in the others.
    """
    torch.manual_seed(0)
    rows = torch.randperm(case.queries)[:ROWS].sort().values.to(DEVICE)
    weight = torch.zeros(1, case.H, case.queries, case.D, dtype=inputs[0].dtype, device=DEVICE)
    weight[:, :, rows] = torch.randn(1, case.H, len(rows), case.D).to(weight)
    found = run(attention, inputs, weight if case.train else None)
    found[0] = found[0][:, :, rows]

    exact = [t.detach().double().requires_grad_(case.train) for t in inputs]
    group = case.H // (case.Hkv or case.H)
    q, k, v = exact[0][:, :, rows], *(t.repeat_interleave(group, 1) for t in exact[1:])
    blocked = ~_allowed(case.queries, case.T, case.kind, rows)
    truth = _weights(case.family)((q @ k.mT * case.D**-0.5).masked_fill(blocked, -math.inf)) @ v
    expected = [truth.detach()]
    if case.train:
        expected += torch.autograd.grad(truth, exact, weight[:, :, rows].double())
    worst = 0.0
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        gap = (a.double() - b).abs().nan_to_num(nan=math.inf)
        if n and case.family != "softmax":
            worst = max(worst, float(gap.norm() / b.norm()))
        else:
            worst = max(worst, float(gap.max() / b.abs().max().clamp(min=1e-6)))
    return worst


def tolerance(case: Case) -> float:
    """Far above rounding errors, far below the error of a wrong implementation."""
    if case.half:
        return 2e-2
    return 1e-3 if case.train and case.family != "softmax" else 1e-4


def density(case: Case, inputs: list[Tensor]) -> float:
    """The share of admissible keys whose weight is not 0."""
    q, k, v = (t.detach() for t in inputs)
    with torch.no_grad():
        _, aux = regard.attention(
            q, k, v, problem=problem_of(case), backend=BACKEND, return_aux=AuxRequest(support=True)
        )
    return float(aux.support.sum()) / case.pairs
