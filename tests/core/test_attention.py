"""Every case on every backend at every dtype: output and gradients."""

import pytest
import torch

import regard
from regard import AuxRequest
from support.cases import build, by_backend, by_case, run, skip_unless_served, substitute
from support.reference import truth
from support.tolerance import assert_close

by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d).removeprefix("torch.")
)


@by_case
@by_backend
@by_dtype
def test_output(case, backend, dtype):
    built = build(case, dtype)
    skip_unless_served(backend, built)
    out = run(built, backend)
    assert out.dtype == dtype
    expected = truth(built.query, built.key, built.value, **built.arguments)
    assert_close(out, expected.out, dtype, case.sensitivity, "out")


@by_case
def test_gradcheck(case):
    """The gradients of the reference backend in every differentiable tensor, against finite differences."""
    built = build(case)
    names = list(built.leaves)
    lse = "problem" not in built.arguments or isinstance(built.arguments["problem"].regularizer, regard.KL)

    def function(*leaves):
        fresh = build(case)  # the problem holds its tensors, so the perturbed values need a new problem
        for name, leaf in zip(names, leaves, strict=True):
            substitute(fresh, fresh.leaves[name], leaf)
        out, aux = run(fresh, "torch", return_aux=AuxRequest(entropy=True, lse=lse))
        results = [out, aux.entropy]
        if lse:
            results.append(torch.where(aux.lse.isinf(), 0.0, aux.lse))
        return tuple(results)

    assert torch.autograd.gradcheck(
        function, list(built.leaves.values()), eps=1e-6, atol=2e-5, rtol=1e-4, fast_mode=True
    )


@by_case
@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients(case, backend, dtype):
    """Every backend's gradients at lower precision, against the definition in float64 (which test_gradcheck checks)."""
    built = build(case, dtype)
    skip_unless_served(backend, built)
    exact = build(case, dtype)
    out = run(built, backend)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    got = torch.autograd.grad(out, list(built.leaves.values()), weight, allow_unused=True)

    upcast = {name: leaf.detach().double().requires_grad_() for name, leaf in exact.leaves.items()}
    for name, leaf in upcast.items():
        substitute(exact, exact.leaves[name], leaf)
    expected = torch.autograd.grad(run(exact, "torch"), list(upcast.values()), weight.double(), allow_unused=True)
    for name, g, e in zip(built.leaves, got, expected, strict=True):
        if e is None:
            continue
        assert g is not None and g.dtype == dtype
        assert_close(g, e, dtype, 4 * case.sensitivity, f"gradient of {name}")
