"""Comparison with other libraries and with closed forms."""

import itertools
import math

import entmax
import pytest
import torch

import regard
from regard import KL, AuxRequest, Bias, Causal, FermiDirac, Free, Rows, Transport, Tsallis
from support.tolerance import assert_close, stock_attention

B, H, Tq, Tk, D = 2, 4, 6, 8, 8


def inputs(dtype=torch.float64, Hkv=H, Tq=Tq, Tk=Tk, Dv=D):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


MASKS = {
    "none": None,
    "causal": None,
    "bool": torch.rand(Tq, Tk, generator=torch.Generator().manual_seed(1)) < 0.7,
    "bool per batch": torch.rand(B, 1, 1, Tk, generator=torch.Generator().manual_seed(2)) < 0.7,
    "float": torch.randn(H, Tq, Tk, generator=torch.Generator().manual_seed(3), dtype=torch.float64),
    "float with -inf": torch.zeros(Tq, Tk, dtype=torch.float64).masked_fill(torch.eye(Tq, Tk) > 0, -math.inf),
    "empty row": torch.arange(Tq)[:, None].expand(Tq, Tk) != 2,
}


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("scale", "gqa", "Dv"), list(itertools.product([None, 0.3], [0, 1], [D, 5])))
def test_every_argument_of_sdpa(mask, scale, gqa, Dv, backend):
    causal = mask == "causal"  # PyTorch takes a mask or is_causal
    q, k, v = inputs(Hkv=2 if gqa else H, Dv=Dv)
    arguments = {"attn_mask": MASKS[mask], "is_causal": causal, "scale": scale, "enable_gqa": bool(gqa)}
    got, expected = regard.attention(q, k, v, **arguments, backend=backend), stock_attention(q, k, v, **arguments)
    assert_close(got, expected, torch.float64)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for g, e in zip(
        torch.autograd.grad(got, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True
    ):
        assert_close(g, e, torch.float64)


@pytest.mark.parametrize("shape", [(Tk, D), (H, Tk, D), (2, 3, H, Tk, D)], ids=["2-D", "3-D", "5-D"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_any_number_of_leading_dimensions(shape, backend):
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(*shape[:-2], Tk, Tk, dtype=torch.float64)
    for arguments in (
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": mask > 0},
        {"attn_mask": mask[..., :1, :]},
    ):
        expected = stock_attention(q, k, v, **arguments)
        assert_close(regard.attention(q, k, v, **arguments, backend=backend), expected, torch.float64)
    out, aux = regard.attention(q, k, v, return_aux=AuxRequest(lse=True, key_mass=True))
    assert out.shape == shape and aux.lse.shape == shape[:-1] and aux.key_mass.shape == shape[:-1]
    assert torch.allclose(aux.lse, (q @ k.mT / math.sqrt(D)).logsumexp(-1))


@pytest.mark.parametrize("shapes", [((1, H), (B, H)), ((B, H), (1, H)), ((B, H), (B, 1)), ((B, 1), (B, H))])
def test_leading_dimensions_broadcast(shapes):
    q = torch.randn(*shapes[0], Tq, D, dtype=torch.float64)
    k, v = (torch.randn(*shapes[1], Tk, D, dtype=torch.float64) for _ in range(2))
    for backend in ("torch", "auto"):
        assert_close(regard.attention(q, k, v, backend=backend), stock_attention(q, k, v), torch.float64)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_torch_flex_lse(backend):
    """`return_aux` accepts PyTorch's AuxRequest."""
    from torch.nn.attention.flex_attention import AuxRequest as TorchRequest

    q, k, v = inputs()
    _, aux = regard.attention(q, k, v, return_aux=TorchRequest(lse=True, max_scores=True), backend=backend)
    scores = q @ k.mT / math.sqrt(D)
    assert torch.allclose(aux.lse, scores.logsumexp(-1)) and torch.allclose(aux.max_scores, scores.amax(-1))
    assert aux.entropy is None


# --- the entmax package -----------------------------------------------------------------------------------------------

SCORES = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize(
    ("alpha", "oracle"), [(1.5, entmax.entmax15), (2.0, entmax.sparsemax)], ids=["entmax15", "sparsemax"]
)
def test_entmax_exact(alpha, oracle):
    mine, theirs = (SCORES.clone().requires_grad_() for _ in range(2))
    got, expected = regard.solve(mine, Transport(Tsallis(alpha))).weights, oracle(theirs, dim=-1)
    assert torch.allclose(got, expected, atol=1e-12)
    assert torch.equal(got > 0, expected > 0), "the zeros are not the same"
    weight = torch.randn_like(got)
    assert torch.allclose(
        *(torch.autograd.grad(p, s, weight)[0] for p, s in ((got, mine), (expected, theirs))), atol=1e-12
    )


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.8, 2.0, 2.5])
def test_entmax_bisect_and_its_gradient_in_alpha(alpha):
    results = []
    for mine in (True, False):
        s = SCORES.clone().requires_grad_()
        a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        p = regard.solve(s, Transport(Tsallis(a))).weights if mine else entmax.entmax_bisect(s, a, n_iter=80)
        weight = torch.randn(p.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        results.append((p, *torch.autograd.grad(p, (s, a), weight)))
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, atol=1e-7), (got - expected).abs().max()


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_entmax_through_the_native_engine(alpha, spread):
    """Output and gradients (also of alpha) in float32 over a thousand keys, few or many of which have weight."""
    pytest.importorskip("regard._native", reason="the native engine was not built")
    generator = torch.Generator().manual_seed(7)
    q, k, v, g = (torch.randn(1, 2, T, 16, generator=generator) for T in (60, 1000, 1000, 60))
    results = []
    for mine in (True, False):
        leaves = [t.clone() if mine else t.double() for t in (spread * q, k, v, torch.tensor(alpha))]
        q_, k_, v_, a = (t.requires_grad_() for t in leaves)
        if mine:
            exact = regard.attention(q_, k_, v_, problem=Transport(Tsallis(alpha)), backend="native")
            out = regard.attention(q_, k_, v_, problem=Transport(Tsallis(a)), backend="native")
            assert torch.allclose(out, exact, atol=1e-5), "a number and a tensor are not the same"
        else:
            s = q_ @ k_.mT / 4
            exact_of = {1.5: entmax.entmax15, 2.0: entmax.sparsemax}.get(alpha)
            weights = entmax.entmax_bisect(s, a, n_iter=80)
            if exact_of is not None:
                assert torch.allclose(weights, exact_of(s, dim=-1), atol=1e-7)
            out = weights @ v_
        results.append((out, *torch.autograd.grad(out, leaves, g.to(out.dtype))))
    for name, got, expected in zip(("out", "q", "k", "v", "alpha"), *results, strict=True):
        wrong = (got - expected).abs().max() / (1 + expected.abs().max())
        assert wrong < (2e-5 if name == "out" else 2e-4), (name, wrong)


# --- closed forms -----------------------------------------------------------------------------------------------------


def softmax_and_lse(q, k, v):
    scores = q @ k.mT / math.sqrt(D)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True), scores


def test_sink_closed_form():
    """out = sigmoid(lse - b/tau) * softmax-out."""
    q, k, v = inputs()
    b = torch.randn(H, dtype=torch.float64)
    soft, lse, _ = softmax_and_lse(q, k, v)
    out = regard.attention(q, k, v, problem=Transport(marginal=Rows(sink=b)))
    assert torch.allclose(out, torch.sigmoid(lse - b.view(-1, 1, 1)) * soft)


def test_sink_is_a_key_with_a_zero_value():
    """gpt-oss: concatenate the sink to the logits, drop its column."""
    q, k, v = inputs()
    b = torch.randn(H, dtype=torch.float64)
    scores = torch.cat([q @ k.mT / math.sqrt(D), b.view(1, H, 1, 1).expand(B, H, Tq, 1)], -1)
    expected = scores.softmax(-1)[..., :-1] @ v
    assert torch.allclose(regard.attention(q, k, v, problem=Transport(marginal=Rows(sink=b))), expected)


def test_relaxed_mass():
    """mass = Z^(tau / (tau + rho))."""
    q, k, v = inputs()
    tau, rho = 0.6, 1.7
    scores = q @ k.mT / math.sqrt(D)
    log_z = (scores / tau).logsumexp(-1)
    problem = Transport(marginal=Rows(relax=rho), temperature=tau)
    out, aux = regard.attention(q, k, v, problem=problem, return_aux=AuxRequest(mass=True, lse=True))
    assert torch.allclose(aux.mass, (log_z * tau / (tau + rho)).exp())
    assert torch.allclose(aux.lse, log_z)
    assert torch.allclose(out, aux.mass[..., None] * ((scores / tau).softmax(-1) @ v))


def test_free_rows():
    q, k, v = inputs()
    scores = q @ k.mT / math.sqrt(D)
    for regularizer, expected in (
        (KL(), (scores - 0.5).exp()),
        (Tsallis(2.0), (scores - 0.5).relu()),
        (FermiDirac(), (scores - 0.5).sigmoid()),
    ):
        out = regard.attention(q, k, v, problem=Transport(regularizer, marginal=Free(-0.5)))
        assert torch.allclose(out, expected @ v)


def test_softmax_with_prior():
    """KL to a prior: softmax(s/tau + log pi)."""
    q, k, v = inputs()
    log_prior = torch.randn(Tk, dtype=torch.float64)
    expected = (q @ k.mT / math.sqrt(D) / 0.7 + log_prior).softmax(-1) @ v
    assert torch.allclose(
        regard.attention(q, k, v, problem=Transport(prior=Bias(log_prior), temperature=0.7)), expected
    )


def test_scaling_the_prior():
    """A factor of the prior has no effect on KL rows. For Tsallis rows it is tau -> tau * c^(1 - alpha)."""
    s, c, alpha = SCORES, 2.5, 1.5
    constant = Bias(torch.full((40,), math.log(c), dtype=torch.float64))
    assert torch.allclose(regard.solve(s, Transport(prior=constant)).weights, s.softmax(-1))
    scaled = regard.solve(s, Transport(Tsallis(alpha), prior=constant)).weights
    assert torch.allclose(scaled, regard.solve(s, Transport(Tsallis(alpha), temperature=c ** (1 - alpha))).weights)


def test_flash_attention_alignment():
    """Bottom-right: the last query sees every key."""
    q, k, v = inputs(Tq=3)
    mask = torch.ones(3, Tk, dtype=torch.bool).tril(Tk - 3)
    got = regard.attention(q, k, v, problem=Transport(prior=Causal("bottom_right")))
    assert torch.allclose(got, stock_attention(q, k, v, attn_mask=mask))
