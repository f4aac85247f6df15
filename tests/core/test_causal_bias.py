"""PyTorch's mask type `CausalBias` (`causal_upper_left`, `causal_lower_right`) is served as the prior it stands for.

A CausalBias is a tensor over uninitialised memory. Code that reads it as a float mask gets different numbers each time.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left

import regard
from regard import ALiBi, AuxRequest, Causal, Transport, Tsallis
from regard.backends import BACKENDS
from regard.backends.native import engine
from support.tolerance import assert_close, stock_attention

LENGTHS = [(23, 23), (7, 19), (19, 7), (1, 9)]
ALIGNMENT = {"causal_upper_left": "top_left", "causal_lower_right": "bottom_right"}
by_lengths = pytest.mark.parametrize(("Tq", "Tk"), LENGTHS)
by_variant = pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right], ids=lambda make: make.__name__)


def bias(make, Tq, Tk) -> CausalBias:
    """A CausalBias whose memory holds NaN, so that reading it fails a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that rows without keys become NaN (on a CPU they are 0)
        mask = make(Tq, Tk)
    mask.as_subclass(torch.Tensor).fill_(torch.nan)
    assert isinstance(mask.variant, CausalVariant)
    return mask


def inputs(Tq, Tk, dtype=torch.float64):
    return [torch.randn(2, 4, T, 8, dtype=dtype) for T in (Tq, Tk, Tk)]


@by_variant
@by_lengths
@pytest.mark.parametrize("backend", ["auto", *(name for name in BACKENDS if name != "triton")])
def test_output_and_gradients_equal_pytorch(make, Tq, Tk, backend):
    if backend == "native" and engine.extension()[0] is None:
        pytest.skip("the native engine was not built")
    leaves = [t.requires_grad_() for t in inputs(Tq, Tk)]
    incoming = torch.randn(2, 4, Tq, 8, dtype=torch.float64)
    out = regard.attention(*leaves, attn_mask=bias(make, Tq, Tk), backend=backend)
    expected = stock_attention(*leaves, attn_mask=bias(make, Tq, Tk))
    assert_close(out, expected, torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(out, leaves, incoming), torch.autograd.grad(expected, leaves, incoming), strict=True
    ):
        assert_close(got, wanted, torch.float64)


def test_rows_without_keys_are_zero():
    q, k, v = inputs(5, 3)
    out, aux = regard.attention(
        q, k, v, attn_mask=bias(causal_lower_right, 5, 3), return_aux=AuxRequest(lse=True, entropy=True)
    )
    assert not out[:, :, :2].any() and out[:, :, 2:].abs().amin() > 0
    assert (aux.lse[:, :, :2] == -torch.inf).all() and not aux.entropy[:, :, :2].any()


CALLS = {
    "topk": lambda q, k, v, **how: torch.cat(regard.topk(q, k, 3, **how), -1),
    "weights_at": lambda q, k, v, **how: regard.weights_at(q, k, torch.arange(k.shape[2]), **how),
    "block_mass": lambda q, k, v, **how: regard.block_mass(q, k, 4, **how),
    "estimate": lambda q, k, v, **how: regard.estimate(q, k, v, **how).variance,
    "evidence": lambda q, k, v, **how: regard.evidence(q, k, **how).kl,
    "fisher_vector_product": lambda q, k, v, **how: regard.geometry.fisher_vector_product(q, k, q, **how),
    "free_energy_hvp": lambda q, k, v, **how: regard.geometry.free_energy_hvp(q, k, q, **how),
    "jvp": lambda q, k, v, **how: regard.geometry.jvp(q, k, v, (q, k, v), **how)[1],
    "budget": lambda q, k, v, attn_mask=None, problem=None: regard.attention(
        q, k, v, attn_mask, problem=Transport(prior=problem and problem.prior, temperature=regard.MatchEntropy(0.5))
    ),
    "entmax": lambda q, k, v, attn_mask=None, problem=None: regard.attention(
        q, k, v, attn_mask, problem=Transport(Tsallis(1.5), prior=problem and problem.prior)
    ),
}


@by_variant
@pytest.mark.parametrize("name", CALLS)
def test_every_function_with_a_mask_accepts_it(name, make):
    q, k, v = inputs(7, 12)
    expected = CALLS[name](q, k, v, problem=Transport(prior=Causal(ALIGNMENT[make.__name__])))
    got = CALLS[name](q, k, v, attn_mask=bias(make, 7, 12))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)  # one key has no variance
    assert not torch.allclose(CALLS[name](q, k, v), expected)


@by_variant
def test_it_multiplies_into_the_prior(make):
    q, k, v = inputs(7, 12)
    alignment = ALIGNMENT[make.__name__]
    slopes = ALiBi(torch.rand(4, dtype=torch.float64))  # uses the mask's alignment
    got = regard.attention(q, k, v, attn_mask=bias(make, 7, 12), problem=Transport(prior=slopes))
    expected = regard.attention(q, k, v, problem=Transport(prior=Causal(alignment) * slopes))
    assert torch.equal(got, expected)
    again = regard.attention(q, k, v, problem=Transport(prior=Causal(alignment)), attn_mask=bias(make, 7, 12))
    assert torch.equal(again, regard.attention(q, k, v, attn_mask=bias(make, 7, 12)))


def test_with_is_causal():
    q, k, v = inputs(7, 12)
    got = regard.attention(q, k, v, attn_mask=bias(causal_upper_left, 7, 12), is_causal=True)
    assert torch.equal(got, regard.attention(q, k, v, is_causal=True))


@by_variant
def test_in_place_of_pytorchs_function(make, monkeypatch):
    q, k, v = inputs(7, 12)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias(make, 7, 12))
    monkeypatch.setattr(F, "scaled_dot_product_attention", regard.attention)
    for backend in ("auto", "sdpa"):
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=bias(make, 7, 12), backend=backend)
        assert_close(got, expected, torch.float64)


def test_select_backend_sees_the_prior():
    q, k, v = inputs(7, 7)
    choice = regard.select_backend(q, k, v, attn_mask=bias(causal_upper_left, 7, 7))
    assert choice == regard.select_backend(q, k, v, is_causal=True)


def test_compiled_code_does_not_fix_its_value():
    torch._dynamo.reset()
    q, k, v = inputs(7, 12)
    regard.attention(q, k, v)

    def function(q, k, v, mask):
        return regard.attention(q, k, v, attn_mask=mask)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mask in (bias(causal_lower_right, 7, 12), bias(causal_upper_left, 7, 12), torch.randn(7, 12).double()):
        assert torch.allclose(compiled(q, k, v, mask), function(q, k, v, mask))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    with pytest.raises(Exception, match=r"attn_mask: expected causal_lower_right\(Tq=7, Tk=12\)"):
        compiled(q, k, v, bias(causal_lower_right, 7, 11))
    torch._dynamo.reset()


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, torch.nn.Buffer], ids=["parameter", "buffer"])
def test_parameters_and_buffers_are_plain_masks(wrap):
    q, k, v = inputs(7, 12)
    mask = torch.randn(7, 12, dtype=torch.float64)
    assert torch.equal(regard.attention(q, k, v, attn_mask=wrap(mask)), regard.attention(q, k, v, attn_mask=mask))
