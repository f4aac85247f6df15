"""One rule for the tolerance of each result: a multiple of what PyTorch loses at the same dtype."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

stock_attention = F.scaled_dot_product_attention
ALLOWED = 2.0  # times the error of plain PyTorch at the dtype


@functools.cache
def pytorch_loss(dtype: torch.dtype) -> float:
    """Relative error of PyTorch's own attention at this dtype against float64: the largest over output and gradients of
    a few draws."""
    worst = 0.0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(2, 4, 16, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
        results = []
        for cast in (dtype, torch.float64):
            q, k, v, g = (t.to(cast) for t in inputs)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out = stock_attention(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, g)])
        for mine, exact in zip(*results, strict=True):
            worst = max(worst, float((mine.double() - exact).abs().max() / exact.abs().max()))
    return worst


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, sensitivity: float = 1.0, what: str = "") -> None:
    """Assert that the error is at most ALLOWED times that of PyTorch, relative to the largest expected entry.
    Infinities must agree."""
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}"
    infinite = expected.isinf()
    assert torch.equal(got[infinite], expected[infinite]), f"{what}: infinities differ"
    got, expected = got[~infinite], expected[~infinite]
    if expected.numel() == 0:
        return
    assert got.isfinite().all(), f"{what}: {int((~got.isfinite()).sum())} values are not finite"
    unit = max(pytorch_loss(dtype), torch.finfo(dtype).eps) if dtype != torch.float64 else 1e-11
    allowed = sensitivity * ALLOWED * unit * max(1.0, float(expected.abs().max()))
    error = float((got - expected).abs().max())
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def assert_as_good(what: str, got: Tensor, stock: Tensor, exact: Tensor) -> None:
    """Assert that the error is at most ALLOWED times that of PyTorch for the same numbers, or for one attention."""
    assert (got.shape, got.dtype) == (stock.shape, stock.dtype), what
    dtype, exact = got.dtype, exact.detach().double()
    error, lost = (float((t.detach().double() - exact).abs().max()) for t in (got, stock))
    unit = max(pytorch_loss(dtype), torch.finfo(dtype).eps) if dtype != torch.float64 else 1e-11
    allowed = ALLOWED * (lost + unit * float(exact.abs().max()))
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"  # also fails for NaN
