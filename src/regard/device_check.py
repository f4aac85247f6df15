"""The first run of a backend on a device: `regard doctor --device`.

Every case of device_cases.py is computed twice on the device. Output, statistics and gradients are compared with the
definition in float64 on the CPU, and the two runs with each other, to the last bit. The allowed error is a multiple of
what PyTorch's plain operations lose on the same device, at the same shape and dtype: softmax attention for every
result, and beyond that the reference backend for this result (sums over many rows lose more).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .device_cases import Case, Drawn, Shape
from .operator import attention
from .priors import Causal
from .problem import Transport
from .regularizers import Tsallis
from .statistics import AuxRequest
from .timing import Spread, interleave

ALLOWED = 2.0  # times the error of PyTorch
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checked:
    """One case. `error` and `allowed` are those of the result that is closest to its limit or farthest beyond it."""

    case: str
    result: str = ""
    error: float = math.nan
    allowed: float = math.nan
    same_bits: bool = False
    raised: str | None = None
    declined: str | None = None  # the backend names a reason: no mistake

    @property
    def passed(self) -> bool:
        return self.declined is not None or (self.raised is None and self.same_bits and self.error <= self.allowed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def check(device: torch.device, backend: str, cases: list[Case]) -> Iterator[Checked]:
    """Check a backend case by case."""
    for case in cases:
        yield _checked(case, device, backend)


def _checked(case: Case, device: torch.device, backend: str) -> Checked:
    try:
        found = _results(case.drawn(device), backend)
        again = _results(case.drawn(device), backend)
    except NotImplementedError as error:
        return Checked(case.label, declined=str(error))
    except Exception as error:  # whatever a kernel or its compiler raises is a finding
        return Checked(case.label, raised=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    exact = _results(case.drawn(CPU, torch.float64), "torch")
    same_bits = all(_same(found[name], again[name]) for name in found)
    errors = {name: _error(found[name], truth) for name, truth in exact.items()}
    allowed = {name: _allowed(case, found[name].dtype, truth, device) for name, truth in exact.items()}
    if any(not errors[name] <= allowed[name] for name in errors):
        plain = _results(case.drawn(device), "torch")
        for name, truth in exact.items():
            lost = _error(plain[name], truth)
            allowed[name] += ALLOWED * lost if lost < math.inf else 0.0
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    return Checked(case.label, worst, errors[worst], allowed[worst], same_bits)


def _results(drawn: Drawn, backend: str) -> dict[str, Tensor]:
    """Output, statistics, and the gradients of a loss of the output, by name."""
    problem = drawn.arguments["problem"]
    names = ("query", "key", "value")
    out, aux = attention(
        *(drawn.leaves[name] for name in names), **drawn.arguments, return_aux=AuxRequest.all(problem), backend=backend
    )
    loss = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(drawn.rounded)
    grads = torch.autograd.grad(out, list(drawn.leaves.values()), loss.to(out))
    statistics = {name: value for name, value in vars(aux).items() if value is not None}
    found = {"out": out} | statistics | {f"gradient of {n}": g for n, g in zip(drawn.leaves, grads, strict=True)}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest error; infinite for a NaN, and where infinities differ."""
    found, infinite = found.double(), exact.isinf()
    if not torch.equal(found[infinite], exact[infinite]):
        return math.inf
    gap = (found - exact)[~infinite].abs().nan_to_num(nan=math.inf)
    return float(gap.max()) if gap.numel() else 0.0


def _allowed(case: Case, dtype: torch.dtype, exact: Tensor, device: torch.device) -> float:
    finite = exact[~exact.isinf()].abs()
    size = max(1.0, float(finite.max())) if finite.numel() else 1.0
    unit = max(pytorch_loss(case.shape, dtype, device), torch.finfo(dtype).eps)
    return case.sensitivity * ALLOWED * unit * size


@cache
def pytorch_loss(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative error of softmax attention in plain PyTorch operations, over output and gradients."""
    results = []
    for place, cast in ((device, dtype), (CPU, torch.float64)):
        drawn = Drawn(shape, dtype, place, torch.Generator().manual_seed(3), cast)
        drawn.inputs()
        q, k, v = drawn.leaves.values()
        group = shape.H // shape.Hkv
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = ((q @ keys.mT) / math.sqrt(shape.D)).softmax(-1) @ values
        loss = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), loss.to(out))])
    gaps = ((a.cpu().double() - b).abs().max() / b.abs().max() for a, b in zip(*results, strict=True))
    return max(float(gap) for gap in gaps)


# --- timing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """One call beside a peer's: milliseconds, and how many times as fast ours is. `note`: why it was not timed."""

    case: str
    peer: str
    ours_ms: Spread | None = None
    theirs_ms: Spread | None = None
    ratio: Spread | None = None
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_STATISTICS = AuxRequest(lse=True, entropy=True, max_scores=True)
_PROBLEMS = {"softmax": Transport(prior=Causal()), "entmax 1.5": Transport(Tsallis(1.5), prior=Causal())}


def timing_size(device: torch.device) -> tuple[int, torch.dtype]:
    """Tokens and dtype of the calls that are timed."""
    return (4096, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)


def timings(device: torch.device, backend: str, report: Callable[[str, int, int], None]) -> Iterator[Timed]:
    """Time causal calls of 8 heads beside PyTorch's own softmax, on a GPU also beside FlexAttention.

    Our softmax computes statistics as well."""
    T, dtype = timing_size(device)
    peers = {"SDPA": _sdpa} | ({"FlexAttention": _flex} if device.type == "cuda" else {})
    settings = [(name, D, train) for name in _PROBLEMS for D in (64, 128) for train in (False, True)]
    for number, (name, D, train) in enumerate(settings):
        label = f"{name}, {'training' if train else 'forward'}, D {D}"
        report(label, number, len(settings))
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(1, 8, T, D, generator=generator).to(device, dtype).requires_grad_(train) for _ in "qkv"]

        def ours(q: Tensor, k: Tensor, v: Tensor, name: str = name) -> Tensor:
            aux = _STATISTICS if name == "softmax" else None
            found = attention(q, k, v, problem=_PROBLEMS[name], return_aux=aux, backend=backend)
            return found[0] if isinstance(found, tuple) else found

        for peer, function in peers.items():
            try:
                jobs = {"ours": _job(ours, inputs, train), "theirs": _job(function, inputs, train)}
                times = interleave(jobs, budget=1.0)
            except Exception as error:  # a peer may fail in any way; that is no mistake of the kernels
                first = str(error).strip().splitlines()[:1]
                yield Timed(label, peer, note=f"{type(error).__name__}: {''.join(first)}")
                continue
            ratio = Spread.of([b / a for a, b in zip(times["ours"], times["theirs"], strict=True)])
            in_ms = {side: Spread.of([1e3 * t for t in spent]) for side, spent in times.items()}
            yield Timed(label, peer, in_ms["ours"], in_ms["theirs"], ratio)


def _job(function: Callable[..., Tensor], inputs: list[Tensor], train: bool) -> Callable[[], object]:
    def job() -> None:
        out = function(*inputs)
        if train:
            torch.autograd.grad(out, inputs, torch.ones_like(out))
        if out.is_cuda:
            torch.cuda.synchronize(out.device)

    return job


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@cache
def _compiled_flex(T: int, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=str(device))
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _compiled_flex(q.shape[2], q.device)(q, k, v)
