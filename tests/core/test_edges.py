"""Edge cases: empty rows, invalid values in masked keys, huge scores, empty tensors, dropout, memory."""

import math
import subprocess
import sys

import entmax
import pytest
import torch

import regard
from regard import AuxRequest, Causal, Documents, FermiDirac, Free, Rows, Transport, Tsallis, Window
from support.cases import by_backend, skip_unless_served
from support.memory import PEAK, reads_peak
from support.tolerance import stock_attention

PROBLEMS = {
    "softmax": Transport(),
    "entmax": Transport(Tsallis(1.5)),
    "sparsemax": Transport(Tsallis(2.0)),
    "top-m": Transport(FermiDirac(), marginal=Rows(mass=3)),
    "sigmoid": Transport(FermiDirac(), marginal=Free(-1.0)),
    "sink": Transport(marginal=Rows(sink=0.3)),
    "relaxed": Transport(marginal=Rows(relax=0.5)),
    "hard": Transport(temperature=0.0),
}
by_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(Tq=6, Tk=8, H=4, Hkv=2, dtype=torch.float64):
    shapes = [(2, H, Tq, 8), (2, Hkv, Tk, 8), (2, Hkv, Tk, 8)]
    return [draw(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]


class Built:
    def __init__(self, query, key, value, arguments):
        self.query, self.key, self.value, self.arguments = query, key, value, arguments


@by_backend
@by_problem
def test_rows_without_keys(problem, backend):
    q, k, v = inputs()
    mask = torch.ones(6, 8, dtype=torch.bool)
    mask[2] = False
    arguments = {"attn_mask": mask, "enable_gqa": True, "problem": problem}
    skip_unless_served(backend, Built(q, k, v, arguments))
    out = regard.attention(q, k, v, **arguments, backend=backend)
    assert (out[:, :, 2] == 0).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients) and (gradients[0][:, :, 2] == 0).all()


@by_problem
def test_statistics_of_rows_without_keys(problem):
    q, k, v = inputs(Tq=9, Tk=5)
    request = AuxRequest.all(problem)
    prior = Transport(
        problem.regularizer, prior=Causal("bottom_right"), marginal=problem.marginal, temperature=problem.temperature
    )
    out, aux = regard.attention(q, k, v, enable_gqa=True, problem=prior, return_aux=request)
    empty = slice(0, 4)
    assert (out[:, :, empty] == 0).all()
    for name in ("kl", "score_variance", "support", "first_key_mass", "mass", "cost", "value_spread"):
        if getattr(aux, name) is not None:
            assert (getattr(aux, name)[:, :, empty] == 0).all(), name
    if problem != PROBLEMS["sink"]:
        assert (aux.entropy[:, :, empty] == 0).all() and (aux.max_weight[:, :, empty] == 0).all()
        if aux.lse is not None:
            assert (aux.lse[:, :, empty] == -math.inf).all()
            (aux.lse[:, :, 4:].sum() + aux.entropy.sum()).backward()
            assert all(t.grad.isfinite().all() for t in (q, k))
            assert (q.grad[:, :, empty] == 0).all()


@by_backend
@by_problem
@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["mask", "mask per batch", "float mask", "causal", "window", "documents"])
def test_invalid_values_in_masked_keys_have_no_effect(problem, backend, invalid, how):
    """Keys 5, 6 and 7 are masked for every query. Output and gradients do not depend on their values."""
    parts = {"regularizer": problem.regularizer, "marginal": problem.marginal, "temperature": problem.temperature}
    mask = torch.arange(8) < 5
    arguments = {
        "mask": {"attn_mask": mask.expand(6, 8), "problem": problem},
        "mask per batch": {"attn_mask": mask.expand(2, 1, 1, 8), "problem": problem},
        "float mask": {"attn_mask": torch.zeros(8).masked_fill(~mask, -math.inf), "problem": problem},
        "causal": {"is_causal": True, "problem": problem},
        "window": {"problem": Transport(**parts, prior=Window(1, 0, "top_left"))},
        "documents": {"problem": Transport(**parts, prior=Documents(torch.zeros(6).long(), torch.where(mask, 0, -1)))},
    }[how] | {"enable_gqa": True}
    first_bad = 6 if how in ("causal", "window") else 5
    results = []
    for filling in (0.0, invalid):
        q, k, v = inputs()
        with torch.no_grad():
            k[:, :, first_bad:], v[:, :, first_bad:] = filling, filling
        skip_unless_served(backend, Built(q, k, v, arguments))
        out = regard.attention(q, k, v, **arguments, backend=backend)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        results.append([out, gradients[0], gradients[1][:, :, :first_bad], gradients[2][:, :, :first_bad]])
        assert all((g[:, :, first_bad:] == 0).all() for g in gradients[1:])
    for clean, dirty in zip(*results, strict=True):
        assert torch.allclose(clean, dirty, atol=1e-12)


@by_backend
@by_problem
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores_stay_finite(problem, backend, dtype, size):
    if problem == PROBLEMS["relaxed"]:
        problem = Transport(marginal=Rows(relax=1e4))  # with relax = 0.5 the true mass is e^10000
    q, k, v = (draw(1, 2, 7, 4, dtype=dtype, seed=i) for i in range(3))
    q, k = q * 100, k * size / 100
    for t in (q, k, v):
        t.requires_grad_()
    arguments = {"problem": problem, "scale": 1.0, "is_causal": True}
    skip_unless_served(backend, Built(q, k, v, arguments))
    out = regard.attention(q, k, v, **arguments, backend=backend)
    gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert out.isfinite().all() and all(g.isfinite().all() for g in gradients)
    if problem == PROBLEMS["softmax"]:
        exact = stock_attention(*(t.detach().double() for t in (q, k, v)), scale=1.0, is_causal=True)
        assert (out - exact).abs().max() < 0.05


@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_the_lowest_finite_number(backend, dtype):
    """The lowest finite number is not -inf: a row that has no other entries is uniform."""
    q, k, v = (draw(1, 2, 6, 8, dtype=dtype, seed=i).requires_grad_() for i in range(3))
    mask = torch.zeros(6, 6, dtype=dtype)
    mask[2], mask[3, 3:], mask[4] = torch.finfo(dtype).min, torch.finfo(dtype).min, -1e9
    skip_unless_served(backend, Built(q, k, v, {"attn_mask": mask}))
    results = []
    for fused in (False, True):
        if fused:
            out = regard.attention(q, k, v, attn_mask=mask, backend=backend)
        else:
            out = ((q @ k.mT / math.sqrt(8)).float() + mask).softmax(-1).to(dtype) @ v
        results.append([out, *torch.autograd.grad(out.float().sin().sum(), (q, k, v))])
    if backend == "sdpa":  # PyTorch's fused kernel loses that row's gradient
        results = [[out] for out, *_ in results]
    for got, expected in zip(results[1], results[0], strict=True):
        assert torch.allclose(got, expected, atol=0.03 if dtype == torch.bfloat16 else 2e-6)


def test_rows_sum_to_one_at_huge_scores():
    """The row sum must not carry the rounding of a dual near 10^4."""
    s = 1e4 + torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    for problem in (Transport(), Transport(Tsallis(1.5)), Transport(Tsallis(2.0))):
        assert (regard.solve(s, problem).weights.sum(-1) - 1).abs().max() < 1e-6


@by_backend
@pytest.mark.parametrize("sizes", [(0, 4, 3, 5), (2, 4, 0, 5), (2, 4, 3, 0), (2, 0, 3, 5), (2, 4, 0, 0)], ids=str)
@pytest.mark.parametrize(
    "problem", [Transport(), Transport(Tsallis(1.5), prior=Causal("top_left"))], ids=["softmax", "entmax"]
)
def test_empty_tensors(backend, sizes, problem):
    B, H, Tq, Tk = sizes
    q, k, v = (torch.randn(B, H, T, 8, requires_grad=True) for T in (Tq, Tk, Tk))
    skip_unless_served(backend, Built(q, k, v, {"problem": problem}))
    out = regard.attention(q, k, v, problem=problem, backend=backend)
    assert out.shape == (B, H, Tq, 8) and (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True) if g is not None)
    if backend == "torch":
        _, aux = regard.attention(q, k, v, problem=problem, return_aux=AuxRequest.all(problem))
        assert aux.key_mass.shape == (B, H, Tk) and aux.entropy.shape == (B, H, Tq)
    weights, _ = regard.topk(q, k, 0, problem=problem)
    assert weights.shape == (B, H, Tq, 0)


def test_inputs_are_not_changed():
    q, k, v = inputs()
    before = [t.detach().clone() for t in (q, k, v)]
    regard.attention(q, k, v, enable_gqa=True, problem=PROBLEMS["entmax"]).sum().backward()
    assert all(map(torch.equal, (q, k, v), before))


def test_expanded_inputs():
    """Stride-0 inputs, as broadcasting makes them."""
    q, k, v = (draw(1, 1, 6, 8, seed=i).expand(2, 4, 6, 8) for i in range(3))
    assert torch.allclose(regard.attention(q, k, v, backend="torch"), stock_attention(q, k, v))


@by_backend
@pytest.mark.parametrize("problem", [Transport(), Transport(Tsallis(1.5))], ids=["softmax", "entmax"])
def test_gradient_of_a_temperature_under_a_mask_of_the_lowest_finite_number(backend, problem):
    """Hugging Face's masks hold finfo.min; divided by a temperature below 1 they overflow."""
    q, k, v = (draw(1, 2, 6, 8, dtype=torch.float32, seed=i) for i in range(3))
    gradients = []
    for low in (torch.finfo(torch.float32).min, -math.inf):
        mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), low)
        tau = torch.tensor(0.5, requires_grad=True)
        arguments = {"attn_mask": mask, "problem": Transport(problem.regularizer, temperature=tau)}
        skip_unless_served(backend, Built(q, k, v, arguments))
        regard.attention(q, k, v, **arguments, backend=backend).sum().backward()
        gradients.append(float(tau.grad))
    assert math.isclose(*gradients, rel_tol=1e-4)


@by_backend
def test_invalid_values_in_queries_without_keys_have_no_effect(backend):
    q, k, v = inputs(Hkv=4)
    with torch.no_grad():
        q[:, :, 2] = math.nan
    mask = torch.ones(6, 8, dtype=torch.bool)
    mask[2] = False
    skip_unless_served(backend, Built(q, k, v, {"attn_mask": mask}))
    out = regard.attention(q, k, v, attn_mask=mask, backend=backend)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out[:, :, 2] == 0).all() and (gradients[0][:, :, 2] == 0).all()
    assert out.isfinite().all() and all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("alpha", [3.0, 4.0, 5.0, 8.0])
def test_steep_links_lose_no_more_than_the_entmax_package(alpha):
    """At the edge of the support the slope of p is unbounded. Rows still sum to one."""
    s = draw(200, 50, dtype=torch.float32)
    exact = entmax.entmax_bisect(s.double(), alpha, n_iter=100)
    weights = regard.solve(s, Transport(Tsallis(alpha))).weights
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert (weights - exact).abs().max() <= (entmax.entmax_bisect(s, alpha) - exact).abs().max()


@pytest.mark.parametrize("distance", [1e-5, 1e-7, 1e-9])
def test_alpha_near_one_in_float32(distance):
    s = draw(100, 64, dtype=torch.float32)
    weights = regard.solve(s, Transport(Tsallis(1 + distance))).weights
    assert (weights - s.softmax(-1)).abs().max() < 1e-6 + 10 * distance


@pytest.mark.parametrize("size", [-1e4, -100.0, 60.0])
@pytest.mark.parametrize("regularizer", [regard.KL(), Tsallis(1.1), Tsallis(1.5), FermiDirac()], ids=repr)
def test_strong_priors(regularizer, size):
    """A prior is never normalised. Rows sum to one for a prior of any size (Fermi-Dirac: if the keys can take it)."""
    if (size < -1e3 and not isinstance(regularizer, regard.KL)) or (size < 0 and isinstance(regularizer, FermiDirac)):
        return
    s = draw(3, 5, dtype=torch.float32)
    plan = regard.solve(s, Transport(regularizer, prior=regard.Bias(torch.full((5,), size))))
    assert (plan.weights.sum(-1) - 1).abs().max() < 1e-6
    if not isinstance(regularizer, FermiDirac):
        assert (regard.certify(s, plan.weights, plan.problem).stationarity < 1e-5).all()


def test_an_overflow_is_infinite_not_nan():
    """relax = 1 at a score of 300: the mass is e^150."""
    weights = regard.solve(torch.tensor([300.0, 0.0]), Transport(marginal=Rows(relax=1.0))).weights
    assert weights[0] == math.inf


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropped(p, seed=0, problem=None, **arguments):
    """The dropped plan, read by means of identity values."""
    q, k, _ = inputs(Tq=40, Tk=60, Hkv=4)
    v = torch.eye(60, dtype=torch.float64).expand(2, 4, 60, 60)
    torch.manual_seed(seed)
    return regard.attention(q, k, v, dropout_p=p, problem=problem, backend="torch", **arguments).detach()


def test_dropout_is_seeded_by_torch():
    assert torch.equal(dropped(0.3, 1), dropped(0.3, 1)) and not torch.equal(dropped(0.3, 1), dropped(0.3, 2))
    torch.manual_seed(0)
    draws = torch.rand(3)
    torch.manual_seed(0)
    q, k, v = inputs()
    regard.select_backend(q, k, v, enable_gqa=True, dropout_p=0.5)
    assert torch.equal(torch.rand(3), draws), "select_backend drew random numbers"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_and_rescales(p):
    whole, thinned = dropped(0.0), dropped(p)
    kept = thinned != 0
    assert torch.allclose(thinned[kept], whole[kept] / (1 - p))
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    # The mask has no structure: rows, columns, heads and batches keep equal shares, and neighbours are independent.
    for dim in range(4):
        share = kept.double().mean([d for d in range(4) if d != dim])
        assert (share - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / (kept.numel() / kept.shape[dim]))
        rolled = kept.roll(1, dim).double() - (1 - p)
        correlation = ((kept.double() - (1 - p)) * rolled).mean() / (p * (1 - p))
        assert correlation.abs() < 6 / math.sqrt(kept.numel())


def test_dropout_mask_is_a_function_of_position(monkeypatch):
    """The mask does not depend on blocks: any block size gives the same mask, in forward and in backward."""
    whole = dropped(0.5, is_causal=True)
    monkeypatch.setattr("regard.backends.reference.BLOCK", 100)
    blocked = dropped(0.5, is_causal=True)
    assert torch.equal(whole == 0, blocked == 0) and torch.allclose(whole, blocked)
    q, k, v = inputs()

    def function(*a):
        torch.manual_seed(3)
        return regard.attention(*a, enable_gqa=True, dropout_p=0.4, problem=PROBLEMS["entmax"])

    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)


def test_dropout_everything():
    assert (dropped(1.0) == 0).all()


def test_dropout_leaves_statistics_alone():
    q, k, v = inputs()
    request = AuxRequest(entropy=True, value_spread=True)
    _, with_dropout = regard.attention(q, k, v, enable_gqa=True, dropout_p=0.5, return_aux=request)
    _, without = regard.attention(q, k, v, enable_gqa=True, return_aux=request)
    assert torch.equal(with_dropout.entropy, without.entropy)
    assert torch.allclose(with_dropout.value_spread, without.value_spread)


def test_dropout_hash_is_pinned():
    """The mask is a contract between backends and versions: these bits must never change."""
    from regard._dropout import dropout_keys, hash_with

    key = dropout_keys(torch.full((1, 1, 1, 1), 123456789012345), 2, 3)
    bits = hash_with(hash_with(key, torch.tensor(7)), torch.tensor([0, 1, 65536]))
    assert key.flatten().tolist() == KEYS and bits[1, 2, 0].tolist() == BITS


KEYS = [2257943964, 2790238629, 3684600141, 472485101, 1902722103, 829442055]
BITS = [2850260320, 494837990, 3399499212]


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY = (
    PEAK
    + """
import sys, torch, regard
from regard import *
torch.set_num_threads(1)
T = 16384
problems = {"softmax": Transport(prior=Causal()), "entmax": Transport(Tsallis(1.5), prior=Causal() * Window(1023))}
problem = problems[sys.argv[1]]
q, k, v = (torch.randn(1, 1, T, 32, requires_grad=True) for _ in range(3))
small = [t[:, :, :256] for t in (q, k, v)]
regard.attention(*small, problem=problem, backend="torch").sum().backward()
before = peak()
request = AuxRequest(entropy=True, key_mass=True)
out, aux = regard.attention(q, k, v, problem=problem, backend="torch", return_aux=request)
(out.sum() + aux.entropy.sum()).backward()
print(peak() - before)
"""
)


@reads_peak
@pytest.mark.parametrize("name", ["softmax", "entmax"])
def test_memory_of_16k_tokens(name):
    """Forward and backward at T = 16384 stay under 400 MiB; the plan alone would take 1024."""
    done = subprocess.run([sys.executable, "-c", MEMORY, name], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 400, f"{done.stdout} MiB"


# --- inference mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["backward", "incoming", "nothing"])
@by_backend
def test_a_backward_pass_in_inference_mode_has_the_same_gradient(backend, inside):
    """Inference mode records nothing, so a backward pass that recomputes with autograd there would return 0."""
    q, k, v = leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = regard.attention(q, k, v, is_causal=True, backend=backend)
    weight = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    expected = torch.autograd.grad(out, leaves, weight, retain_graph=True)
    with torch.inference_mode(inside != "nothing"):
        incoming = weight * 1 if inside == "incoming" else weight  # a tensor made in inference mode
        found = torch.autograd.grad(out, leaves, incoming)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and bool(b.any())
