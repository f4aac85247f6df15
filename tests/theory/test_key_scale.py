"""`key_scale`, the multiplier of each key: against scaled keys, in every function that takes it."""

import inspect
import math

import pytest
import torch

import regard
from regard import Transport, Tsallis
from support.cases import build, by_backend, by_case, skip_unless_served
from support.reference import truth
from support.tolerance import assert_close

double = torch.float64


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=double)


@by_case
@by_backend
def test_key_scale_multiplies_the_scores_of_keys(case, backend):
    built = build(case)
    skip_unless_served(backend, built)
    multiplier = normal(case.B, case.H, case.Tk, seed=1)
    group = case.H // case.Hkv
    expected = truth(built.query, built.key, built.value, **built.arguments, key_scale=multiplier)
    if "score" not in built.arguments:  # a dot product with a scaled key
        keys = built.key.repeat_interleave(group, 1) * multiplier[..., None]
        same = truth(built.query, keys, built.value.repeat_interleave(group, 1), **built.arguments)
        assert_close(same.out, expected.out, double)
    out = regard.attention(
        built.query, built.key, built.value, **built.arguments, key_scale=multiplier, backend=backend
    )
    assert_close(out, expected.out, double, 10 * case.sensitivity)


@pytest.mark.parametrize(
    "shape", [(), (1,), (6,), (2, 6), (4, 6), (4, 1), (2, 2, 6), (2, 4, 6), (1, 4, 6), (2, 1, 6), (2, 4, 1)], ids=str
)
def test_key_scale_shapes(shape):
    """One for each query head or key/value head, and shapes that broadcast to either."""
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    multiplier = normal(*shape, seed=3)
    full = multiplier.repeat_interleave(2, -2) if len(shape) > 1 and shape[-2] == 2 else multiplier
    expected = regard.attention(
        q, k.repeat_interleave(2, 1) * full.expand(2, 4, 6)[..., None], v.repeat_interleave(2, 1)
    )
    assert torch.allclose(regard.attention(q, k, v, enable_gqa=True, key_scale=multiplier), expected, atol=1e-12)


def test_key_scale_follows_the_callers_dimensions():
    q, k, multiplier = normal(3, 2, 4, 5, 8), normal(3, 1, 4, 5, 8, seed=1), normal(3, 1, 4, 5, seed=2)
    expected = regard.attention(q, k * multiplier[..., None], k)
    assert torch.allclose(regard.attention(q, k, k, key_scale=multiplier), expected, atol=1e-12)
    flat = regard.attention(q[0, 0, 0], k[0, 0, 0], k[0, 0, 0], key_scale=multiplier[0, 0, 0])
    assert torch.allclose(flat, expected[0, 0, 0], atol=1e-12)
    assert regard.attention(q, k[..., :0, :], k[..., :0, :], key_scale=torch.ones(0)).count_nonzero() == 0


@by_backend
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_key_scale_gradient(backend, heads):
    tensors = [normal(1, 4, 2, 2), normal(1, 2, 4, 2, seed=1), normal(1, 2, 4, 1, seed=2), normal(1, heads, 4, seed=3)]
    tensors = [t.requires_grad_() for t in tensors]

    def attend(q, k, v, multiplier):
        return regard.attention(q, k, v, is_causal=True, enable_gqa=True, key_scale=multiplier, backend=backend)

    assert torch.autograd.gradcheck(attend, tensors)
    if backend != "sdpa":
        problem = Transport(Tsallis(1.5), temperature=0.7)
        assert torch.autograd.gradcheck(
            lambda q, k, v, m: regard.attention(
                q, k, v, enable_gqa=True, problem=problem, key_scale=m, backend=backend
            ),
            tensors,
        )


def test_key_scale_in_functions_that_read_a_plan():
    q, k, multiplier = normal(2, 4, 6, 8), normal(2, 2, 6, 8, seed=1), normal(4, 6, seed=2)
    scaled = k.repeat_interleave(2, 1) * multiplier[..., None]
    arguments = {"is_causal": True, "problem": Transport(temperature=0.5)}
    index = torch.tensor([0, 3])
    for window in (
        lambda k, **more: regard.weights_at(q, k, index, **arguments, **more),
        lambda k, **more: regard.topk(q, k, 1, **arguments, **more)[0],
        lambda k, **more: regard.block_mass(q, k, 4, **arguments, **more),
        lambda k, **more: regard.evidence(q, k, **arguments, **more).kl,
        lambda k, **more: regard.estimate(q, k, k[..., :3] * 0 + 1, **arguments, **more).value,
    ):
        assert torch.allclose(window(k, enable_gqa=True, key_scale=multiplier), window(scaled), atol=1e-12)
    assert regard.select_backend(q, k, k, enable_gqa=True, key_scale=multiplier).backend in ("native", "sdpa")


@by_backend
def test_nan_in_masked_keys_does_not_spread(backend):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    mask = torch.arange(6) != 3
    results = []
    for masked in (0.0, math.nan, math.inf):
        key = torch.where(mask[:, None], k, masked).requires_grad_()
        multiplier = normal(4, 6, seed=3).requires_grad_()
        arguments = {"attn_mask": mask, "enable_gqa": True, "backend": backend}
        out = regard.attention(q, key, v, key_scale=multiplier, **arguments)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (key, multiplier))])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_key_scale_compiles_and_transforms():
    q, k, v, multiplier = (
        normal(2, 4, 5, 8),
        normal(2, 4, 5, 8, seed=1),
        normal(2, 4, 5, 3, seed=2),
        normal(4, 5, seed=3),
    )
    function = lambda m: regard.attention(q, k, v, key_scale=m).sin().sum()  # noqa: E731
    multiplier.requires_grad_()
    (expected,) = torch.autograd.grad(function(multiplier), multiplier)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(multiplier)
    assert torch.allclose(torch.autograd.grad(compiled, multiplier)[0], expected)
    torch._dynamo.reset()
    assert torch.allclose(torch.func.grad(function)(multiplier.detach()), expected)
    several = torch.stack([multiplier.detach(), 2 * multiplier.detach()])
    assert torch.allclose(torch.vmap(function)(several)[1], function(several[1]))


def test_key_scale_keeps_the_dtype():
    q, k, v, multiplier = (normal(1, 2, 5, 8, seed=n).float() for n in range(4))
    multiplier = multiplier[..., 0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = regard.attention(q, k, v, key_scale=multiplier)
    half = [t.bfloat16() for t in (q, k, v)]
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, regard.attention(*half, key_scale=multiplier))
    (gradient,) = torch.autograd.grad(mixed.float().sum(), multiplier)
    assert gradient.dtype == torch.float32
    # The product is computed in float32 and rounded once.
    once = (half[1].float() * multiplier[..., None]).bfloat16()
    assert torch.equal(mixed, regard.attention(half[0], once, half[2]))


def test_key_scale_is_keyword_only():
    functions = (regard.attention, regard.select_backend, regard.weights_at, regard.topk, regard.block_mass)
    for function in (*functions, regard.estimate, regard.evidence):
        parameter = inspect.signature(function).parameters["key_scale"]
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None


# --- bad input --------------------------------------------------------------------------------------------------------

q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)


def attend(multiplier):
    return lambda: regard.attention(q, k, v, enable_gqa=True, key_scale=multiplier)


ERRORS = {
    "number": (attend(2.0), TypeError, "key_scale: expected a floating-point tensor, got 2.0"),
    "integers": (
        attend(torch.ones(6).int()),
        TypeError,
        "key_scale: expected a floating-point tensor, got Tensor.int32",
    ),
    "keys": (attend(torch.ones(5)), ValueError, r"key_scale: expected.*\[2, 4, 6\] or \[2, 2, 6\], got \[5\]"),
    "heads": (attend(torch.ones(3, 6)), ValueError, r"key_scale: expected.*got \[3, 6\]"),
    "rank": (attend(torch.ones(1, 2, 4, 6)), ValueError, r"key_scale: expected.*got \[1, 2, 4, 6\]"),
    "nan": (attend(torch.tensor([1.0, math.nan, 1, 1, 1, 1])), ValueError, "key_scale: expected finite.*got nan"),
    "device": (attend(torch.ones(6, device="meta")), ValueError, "key_scale: expected a tensor on cpu"),
    "windows": (
        lambda: regard.topk(q, k, 1, enable_gqa=True, key_scale=torch.ones(5)),
        ValueError,
        "key_scale: expected",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
