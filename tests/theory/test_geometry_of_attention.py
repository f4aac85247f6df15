"""The geometry of a plan on queries and keys: each streaming function against its dense definition, and its memory."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard import KL, AuxRequest, Causal, Documents, FermiDirac, Free, Transport, Tsallis
from regard import geometry as geo
from regard.backends import BACKENDS, reference
from support.cases import CASES, build
from support.geometry import OWN, close, draw, every_problem, few, problems, seeds, tau_of
from support.memory import PEAK, reads_peak
from support.reference import truth

# --- on queries and keys ----------------------------------------------------------------------------------------------


def dense_scores(built):
    """Scores with all masks applied, keys for each query head, the scale and the problem."""
    arguments = dict(built.arguments)
    q, k = built.query.detach(), built.key.detach()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = arguments.get("scale") or 1 / math.sqrt(q.shape[-1])
    s = q @ k.mT * scale
    mask = arguments.get("attn_mask")
    if mask is not None:
        mask = mask.detach()
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if arguments.get("is_causal"):
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return s, k, scale, arguments.get("problem")


UNCAPPED = [c for c in CASES if not any(word in c.name for word in ("softcap", "cosine", "euclidean"))]


@pytest.mark.parametrize("case", UNCAPPED, ids=lambda c: c.name)
def test_products_equal_their_dense_definition(case):
    built = build(case)
    s, k, scale, problem = dense_scores(built)
    t = draw(5, *built.query.shape)
    hessian = geo.potential_hessian(s, problem)
    along = torch.einsum("bhjd,bhid->bhij", k, t)
    expected = scale**2 * torch.einsum("bhij,bhjd->bhid", torch.einsum("bhijl,bhil->bhij", hessian, along), k)
    found = geo.free_energy_hvp(built.query, built.key, t, **built.arguments)
    assert close(found, expected), case.name
    tau = truth(built.query, built.key, built.value, **built.arguments).tau
    assert close(geo.fisher_vector_product(built.query, built.key, t, **built.arguments), expected / tau), case.name


def test_products_use_the_native_engine(monkeypatch):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    calls = []
    backward = BACKENDS["native"].backward
    monkeypatch.setattr(
        BACKENDS["native"],
        "backward",
        lambda form, needed, *rest: (calls.append(needed), backward(form, needed, *rest))[1],
    )
    q, k, t = (draw(i, 1, 2, 6, 4).float() for i in range(3))
    for problem in (None, Transport(Tsallis(1.5), temperature=torch.full((2, 1, 1), 0.5))):
        geo.fisher_vector_product(q, k, t, problem, is_causal=True)
        geo.free_energy_hvp(q, k, t, problem)
    assert calls == [("query",)] * 4  # no other gradient is computed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_at_lower_precision(dtype):
    q, k, t = (draw(i, 2, 2, 9, 8, scale=1.0).to(dtype) for i in range(3))
    found = geo.fisher_vector_product(q, k, t, Transport(temperature=0.5))
    expected = geo.fisher_vector_product(q.double(), k.double(), t.double(), Transport(temperature=0.5))
    assert found.dtype == dtype
    assert close(found.double(), expected, 1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(
    "problem", [Transport(), Transport(Tsallis(1.5), temperature=0.6), Transport(marginal=Free(0.1))]
)
def test_the_hvp_is_that_of_the_free_energy(problem):
    q, k, t = draw(0, 1, 2, 3, 4, scale=1.0), draw(1, 1, 2, 5, 4, scale=1.0), draw(2, 1, 2, 3, 4)

    def free_energy(a):
        return regard.attention(a, k, k, problem=problem, return_aux=AuxRequest(value=True))[1].value.sum()

    _, expected = torch.func.jvp(torch.func.grad(free_energy), (q,), (t,))
    assert close(geo.free_energy_hvp(q, k, t, problem), expected, 1e-10)


def test_products_are_differentiable_and_keep_the_callers_shape():
    q, k, t = (draw(i, 3, 4).requires_grad_() for i in range(3))
    assert torch.autograd.gradcheck(lambda *a: geo.fisher_vector_product(*a), (q, k, t), fast_mode=True)
    five = [draw(i, 2, 3, 2, 4, 5) for i in range(3)]
    folded = [x.flatten(0, 1) for x in five]
    tau = draw(9, 6, 1, 4, 1).exp()
    for problem in (None, Transport(temperature=tau)):
        found = geo.fisher_vector_product(*five, problem)
        assert torch.equal(found.flatten(0, 1), geo.fisher_vector_product(*folded, problem))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_jvp_is_the_adjoint_of_the_gradient(case):
    """<g, J t> = <J^T g, t>, checked against the backward pass, which has a formula of its own."""
    built = build(case)
    tangents = [draw(i, *x.shape, scale=1.0) for i, x in enumerate((built.query, built.key, built.value))]
    inputs = [x.detach().requires_grad_() for x in (built.query, built.key, built.value)]
    expected = regard.attention(*inputs, **built.arguments)
    g = draw(8, *expected.shape, scale=1.0)
    gradients = torch.autograd.grad(expected, inputs, g)
    with torch.no_grad():
        out, tangent = geo.jvp(*inputs, tuple(tangents), **built.arguments)
        assert torch.equal(out, expected)  # from the same backend
        pairs = [(x * t).sum() for x, t in zip(gradients, tangents, strict=True)]
        assert close((g * tangent).sum(), sum(pairs), 1e-9)
        for i in range(3):
            one = [t if i == n else None for n, t in enumerate(tangents)]
            assert close((g * geo.jvp(*inputs, tuple(one), **built.arguments)[1]).sum(), pairs[i], 1e-9)


def test_jvp_without_tangents():
    q, k, v = (draw(i, 1, 2, 3, 4) for i in range(3))
    out, tangent = geo.jvp(q, k, v, (None, None, None))
    assert torch.equal(out, regard.attention(q, k, v)) and torch.equal(tangent, torch.zeros_like(out))


# --- natural attention ------------------------------------------------------------------------------------------------


def natural_scores(scores, utility, problem, damping):
    """What natural_attention gives to the scores: with one-hot keys the query is the scores."""
    n = scores.shape[-1]
    eye = torch.eye(n, dtype=scores.dtype).expand(*scores.shape[:-2], n, n)
    query = scores.clone().requires_grad_()
    out = geo.natural_attention(query, eye, eye, damping=damping, scale=1.0, problem=problem)
    return torch.autograd.grad(out, query, utility)[0]


@few
@given(problems(), seeds, st.floats(-4, 3))
def test_natural_attention_solves_the_damped_metric(problem, seed, log_damping):
    scores, utility, damping = draw(seed, 2, 3, 9), draw(seed + 1, 2, 3, 9), 10**log_damping
    hessian, gradient = geo.potential_hessian(scores, problem), geo.policy_gradient(scores, utility, problem)
    metric = hessian / tau_of(problem) + damping * torch.eye(9, dtype=torch.float64)
    expected = torch.linalg.solve(metric, gradient[..., None]).squeeze(-1)
    assert close(natural_scores(scores, utility, problem, damping), expected, 1e-8), problem


@every_problem
def test_natural_attention_at_large_and_small_damping(problem):
    scores, utility = draw(0, 1, 3, 6, scale=0.5), draw(1, 1, 3, 6)
    plain = geo.policy_gradient(scores, utility, problem)
    assert close(1e9 * natural_scores(scores, utility, problem, 1e9), plain, 1e-6)
    natural = geo.natural_gradient(scores, utility, problem)
    assert close(natural_scores(scores, utility, problem, 1e-20), natural, 1e-5)


@pytest.mark.parametrize("problem", [None, Transport(Tsallis(1.5), prior=Causal(), temperature=0.7)])
def test_natural_attention_passes_the_scores_gradient_on(problem):
    q, k, v = (draw(i, 2, 3, 7, 4, scale=1.0).requires_grad_() for i in range(3))
    g, damping = draw(5, 2, 3, 7, 4), 0.05
    out = geo.natural_attention(q, k, v, damping=damping, problem=problem)
    plain = regard.attention(q, k, v, problem=problem)
    assert torch.equal(out, plain)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    assert close(dv, torch.autograd.grad(plain, v, g)[0], 1e-12)
    scores = (q @ k.mT / 2).detach()
    ds = natural_scores(scores, g @ v.detach().mT, problem, damping)
    assert close(dq, ds @ k / 2, 1e-12) and close(dk, ds.mT @ q / 2, 1e-12)
    some = torch.autograd.grad(geo.natural_attention(q.detach(), k, v.detach(), damping=damping, problem=problem), k, g)
    assert close(some[0], dk, 1e-14)
    gradient = torch.func.grad(lambda a: (geo.natural_attention(a, k, v, damping=damping, problem=problem) * g).sum())
    assert close(gradient(q.detach()), dq, 1e-14)


def test_natural_attention_near_one_hot():
    """In float32, where 1 - p has no digits left, every key's result agrees with float64."""
    scores = torch.tensor([[[18.0, 0.0, 1.0, -3.0]]])
    utility = torch.tensor([[[0.3, 1.0, -0.7, 2.0]]])
    for damping in (1e-12, 1e-6, 1e-3, 1.0, 1e3):
        exact = natural_scores(scores.double(), utility.double(), None, damping)
        found = natural_scores(scores, utility, None, damping)
        assert ((found - exact).abs() <= 1e-5 * exact.abs()).all(), damping


def test_natural_attention_in_blocks(monkeypatch):
    q, k, v = (draw(i, 2, 2, 40, 4, scale=1.0).requires_grad_() for i in range(3))
    results = []
    for block in (2**21, 200):
        monkeypatch.setattr(reference, "BLOCK", block)
        out = geo.natural_attention(q, k, v, damping=0.1, is_causal=True)
        results.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    assert all(close(a, b, 1e-12) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("regularizer", [KL(), Tsallis(1.5), FermiDirac(), OWN], ids=lambda r: type(r).__name__)
def test_empty_rows_and_nan_in_masked_keys_do_not_spread(regularizer, dtype):
    """Query 5 has no admissible key; keys 4 and 5, which are masked for every query, hold NaN and inf."""
    problem = Transport(
        regularizer, prior=Documents(torch.tensor([0, 0, 0, 1, -1, -1]), torch.tensor([0, 0, 1, 1, 7, -1]))
    )
    q, k, v, t = (draw(i, 1, 2, 6, 4, scale=0.7).to(dtype) for i in range(4))
    q[:, :, 5] = math.nan
    for x in (k, v):
        x[:, :, 4], x[:, :, 5] = math.nan, math.inf
    products = [geo.fisher_vector_product(q, k, t, problem), geo.free_energy_hvp(q, k, t, problem)]
    dk, dv = t.clone(), t.clone()
    dk[:, :, 4:], dv[:, :, 4:] = math.nan, math.nan
    products.append(geo.jvp(q, k, v, (t, dk, dv), problem)[1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = geo.natural_attention(*leaves, damping=0.1, problem=problem)
    gradients = torch.autograd.grad(out.sum(), leaves)
    for found in (*products, out, *gradients):
        assert found.isfinite().all() and found[:, :, :2].abs().max() > 0
        assert (found[:, :, 5] == 0).all()


# --- errors, memory ---------------------------------------------------------------------------------------------------


def test_errors():
    s, q = torch.zeros(3, 4), torch.zeros(1, 2, 3, 4, requires_grad=True)
    hard = Transport(temperature=0.0)
    for wrong in (
        lambda: geo.policy_gradient(s, s, hard),
        lambda: geo.natural_gradient(s, s, hard),
        lambda: geo.potential_hessian(s, hard),
        lambda: geo.sampled_policy_gradient(s, s, hard),
        lambda: geo.fisher_vector_product(q, q, q, hard),
        lambda: geo.free_energy_hvp(q, q, q, hard),
        lambda: geo.natural_attention(q, q, q, damping=1.0, problem=hard),
        lambda: geo.fisher(s, 0.0),
        lambda: geo.fisher(s, torch.tensor(math.nan)),
    ):
        with pytest.raises(ValueError, match="temperature: expected"):
            wrong()
    for damping in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="damping: expected a positive"):
            geo.natural_attention(q, q, q, damping=damping)
    with pytest.raises(TypeError, match="damping: expected a number"):
        geo.natural_attention(q, q, q, damping=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="utility: expected a shape"):
        geo.policy_gradient(s, torch.zeros(5))
    with pytest.raises(TypeError, match="scores: expected a floating"):
        geo.policy_gradient(torch.zeros(3, dtype=torch.long), torch.zeros(3))
    with pytest.raises(TypeError, match="weights: expected a floating"):
        geo.advantage([1.0], s)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples: expected a positive int"):
        geo.sampled_policy_gradient(s, s, None, 0)
    with pytest.raises(ValueError, match="tangent: expected shape"):
        geo.fisher_vector_product(q, q, q[..., :2])
    with pytest.raises(ValueError, match=r"tangents\[1\]: expected shape"):
        geo.jvp(q, q, q, (None, q[:, :, :1], None))
    with pytest.raises(TypeError, match="tangents: expected"):
        geo.jvp(q, q, q, (q,))  # type: ignore[arg-type]
    learned = Transport(temperature=torch.ones((), requires_grad=True))
    with pytest.raises(NotImplementedError, match="temperature"):
        geo.natural_attention(q, q, q, damping=1.0, problem=learned)
    (gradient,) = torch.autograd.grad(geo.natural_attention(q, q, q, damping=1.0).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no derivative"):
        gradient.sum().backward()


MEMORY = (
    PEAK
    + """
import torch, regard
from regard import Causal, Transport, Tsallis, Window
torch.set_num_threads(1)
geo, T = regard.geometry, 16384
softmax, entmax = Transport(prior=Causal()), Transport(Tsallis(1.5), prior=Causal())
near = Transport(prior=Causal() * Window(1023))  # large enough that stored weights would show, and quick

def everything(*tensors):
    q, k, v, t = tensors
    with torch.no_grad():
        geo.fisher_vector_product(q, k, t, softmax)
        geo.free_energy_hvp(q, k, t, entmax)
        geo.jvp(q, k, v, (t, None, v), near)
    geo.natural_attention(q, k, v, damping=0.1, problem=near).sum().backward()

tensors = [torch.randn(1, 1, T, 16, requires_grad=True) for _ in range(4)]
everything(*(t[:, :, :256] for t in tensors))
before = peak()
everything(*tensors)
print(peak() - before)
"""
)


@reads_peak
def test_memory_of_16k_tokens():
    """The plan alone would take 1024 MiB, and an autograd graph of the windowed plan more than 400."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 200, f"{done.stdout} MiB"


def test_natural_attention_with_shared_key_heads():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    shared = regard.geometry.natural_attention(q, k, v, damping=0.1, enable_gqa=True)
    each = regard.geometry.natural_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), damping=0.1)
    weight = torch.randn_like(shared)
    for got, expected in zip(
        *(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (shared, each)), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_fisher_raises_for_a_wrong_temperature():
    with pytest.raises(ValueError, match="temperature"):
        regard.geometry.fisher(torch.rand(2, 3, 5), torch.ones(2))
