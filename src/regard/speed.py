"""How fast regard is on this machine, beside PyTorch's own attention: what `regard bench` measures.

Each case is first compared with its definition in float64. A case that is wrong is not timed. Then regard and PyTorch
take turns in one process (timing.py), and the ratio is that of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import attention, select_backend
from .problem import Transport
from .regularizers import Tsallis
from .statistics import AuxRequest
from .timing import Spread, interleave

_SOFTMAX = AuxRequest(lse=True, entropy=True, max_scores=True, score_variance=True)
# Relative errors far above rounding, and far below the error of a wrong result.
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_stock = F.scaled_dot_product_attention  # a user may put `attention` in its place later


@dataclass(frozen=True)
class Size:
    tokens: int = 1024
    heads: int = 8
    head_dim: int = 64
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Case:
    """One attention. PyTorch computes softmax of the same shape, without statistics."""

    name: str
    problem: Transport | None = None
    causal: bool = True
    train: bool = False
    decode: bool = False  # one query
    statistics: AuxRequest | None = None


CASES = (
    Case("softmax", causal=False, statistics=_SOFTMAX),
    Case("causal softmax", statistics=_SOFTMAX),
    Case("causal softmax, training", train=True, statistics=_SOFTMAX),
    Case("causal entmax, training", Transport(Tsallis(1.5)), train=True),
    Case("softmax, one new token", causal=False, decode=True, statistics=_SOFTMAX),
)


@dataclass(frozen=True)
class Measured:
    """One case: milliseconds of both, how many times as fast regard is, and the error of its output."""

    name: str
    backend: str  # that "auto" used
    error: float  # relative, against float64
    allowed: float
    regard_ms: Spread | None = None  # None: the result was wrong, so nothing was timed
    torch_ms: Spread | None = None
    ratio: Spread | None = None

    @property
    def right(self) -> bool:
        return self.error <= self.allowed


def measure(size: Size, seconds: float = 2.0, cases: tuple[Case, ...] = CASES) -> Iterator[Measured]:
    """Check and time each case, for about `seconds` of each."""
    for case in cases:
        yield _measured(case, size, seconds)


def _measured(case: Case, size: Size, seconds: float) -> Measured:
    inputs = _inputs(case, size)
    options: dict[str, Any] = {"problem": case.problem, "is_causal": case.causal, "return_aux": case.statistics}

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attention(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _stock(q, k, v, is_causal=case.causal)

    found = Measured(
        case.name, select_backend(*inputs, **options).backend, _error(case, inputs, ours), _ALLOWED[size.dtype]
    )
    if not found.right:
        return found
    times = interleave({"regard": _job(case, inputs, ours), "torch": _job(case, inputs, theirs)}, seconds)
    in_milliseconds = {name: Spread.of([1e3 * t for t in spent]) for name, spent in times.items()}
    ratio = Spread.of([b / a for a, b in zip(times["regard"], times["torch"], strict=True)])
    return replace(found, regard_ms=in_milliseconds["regard"], torch_ms=in_milliseconds["torch"], ratio=ratio)


def _inputs(case: Case, size: Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries = 1 if case.decode else size.tokens
    shapes = ((1, size.heads, T, size.head_dim) for T in (queries, size.tokens, size.tokens))
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    return [tensor.to(size.dtype).requires_grad_(case.train) for tensor in drawn]


def _job(case: Case, inputs: list[Tensor], function: Callable[..., Tensor]) -> Callable[[], object]:
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
    return lambda: _results(case, inputs, function, grad)


def _results(case: Case, inputs: list[Tensor], function: Callable[..., Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and for training the gradients."""
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad)] if case.train else [out]


def _error(case: Case, inputs: list[Tensor], function: Callable[..., Tensor]) -> float:
    """The largest relative error (in the mean square) of the results for the first head."""
    head = [tensor.detach()[:, :1].requires_grad_(case.train) for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_(case.train) for tensor in head]
    grad = torch.randn(head[0].shape, generator=torch.Generator().manual_seed(1)).to(head[0].dtype)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, problem=case.problem, is_causal=case.causal, backend="torch")

    found, expected = _results(case, head, function, grad), _results(case, exact, definition, grad.double())
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    return torch.stack(errors).max().item()  # NaN stays NaN
