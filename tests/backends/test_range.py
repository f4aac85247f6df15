"""Scores and temperatures at the end of float32's range: the native engine agrees with the definition in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import Bias, Causal, FermiDirac, Free, Rows, Transport, Tsallis, Window

pytest.importorskip("regard._native", reason="the native engine was not built")
pytestmark = pytest.mark.usefixtures("isa", "poison")

# (query, key, temperature): the sizes of their numbers, powers of two, so that scores are exact in every order of
# additions and ties are ties. Scores have the size query * key.
SIZES = [
    (1.0, 2.0**126, 1.0),
    (2.0**63, 2.0**64, 1.0),
    (2.0**80, 2.0**83, 1.0),
    (1.0, 1.0, 2.0**-126),
    (1.0, 1.0, 2.0**-148),
    (2.0**33, 2.0**33, 2.0**-100),
]
PROBLEMS = {
    "softmax": lambda tau: Transport(temperature=tau),
    "causal": lambda tau: Transport(temperature=tau, prior=Causal("bottom_right")),
    "window": lambda tau: Transport(temperature=tau, prior=Window(5, 2, alignment="bottom_right")),
    "sink": lambda tau: Transport(temperature=tau, marginal=Rows(sink=torch.tensor([0.5, -(2.0**100)]))),
    "mass": lambda tau: Transport(temperature=tau, marginal=Rows(mass=2.0)),
    "prior": lambda tau: Transport(temperature=tau, prior=Bias(torch.tensor([-math.inf, *[0.0] * 8]))),
    "entmax 1.5": lambda tau: Transport(Tsallis(1.5), temperature=tau, prior=Causal("bottom_right")),
    "sparsemax": lambda tau: Transport(Tsallis(2.0), temperature=tau),
    "entmax 1.7": lambda tau: Transport(Tsallis(1.7), temperature=tau),
    "entmax 1.1": lambda tau: Transport(Tsallis(1.1), temperature=tau),
    "sigmoid": lambda tau: Transport(FermiDirac(), temperature=tau, marginal=Free(offset=0.25)),
}
STATISTICS = ("dual", "entropy", "max_scores", "max_weight", "collision", "support", "first_key_mass", "mass")


def inputs(query_size, key_size, Tq, sign=1.0):
    """Nine keys, of which 1 and 7 are equal. Every query of the first head prefers them, so they share its mass."""
    generator = torch.Generator().manual_seed(Tq)
    query = torch.randint(1, 32, (1, 2, Tq, 4), generator=generator) / 32
    key = torch.randint(0, 256, (1, 2, 9, 4), generator=generator) / 1024
    key[:, 0, 1] = 300 / 1024 if sign > 0 else 0.5 / 1024
    key[:, :, 7] = key[:, :, 1]
    value = torch.randn(1, 2, 9, 3, generator=generator)
    return [t.requires_grad_() for t in (query * query_size, sign * key * key_size, value)]


def results(tensors, problem, tau, backend):
    q, k, v = tensors
    request = regard.AuxRequest(**dict.fromkeys((*STATISTICS, "key_mass"), True))
    given = {"scale": 1.0, "problem": problem}
    out, aux = regard.attention(q, k, v, **given, return_aux=request, backend=backend)
    weight = torch.linspace(0.1, 0.2, out.numel()).reshape(out.shape).to(out.dtype)
    learned = [*tensors, *([tau] if isinstance(tau, torch.Tensor) else [])]
    grads = torch.autograd.grad((out * weight).sum(), learned)
    found = {"out": out} | {n: getattr(aux, n) for n in (*STATISTICS, "key_mass")}
    return found | {f"grad {n}": g for n, g in zip(("query", "key", "value", "tau"), grads, strict=False)}


def assert_same(name, found, truth, term):
    """Equal up to rounding, relative to the largest entry and to the terms of its sum. What float32 cannot hold is
    inf."""
    narrow = truth.detach().to(torch.float32).double()
    found = found.detach().double()
    infinite = narrow.isinf()
    assert torch.equal(found[infinite], narrow[infinite]), (name, found, truth)
    size = float(narrow[~infinite].abs().amax()) if not infinite.all() else 0.0
    error = (found - narrow)[~infinite].abs()
    assert (error <= 2e-5 * size + 2e-6 * term).all(), (name, found, truth)  # NaN fails


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("Tq", [1, 33])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_end_of_the_range(name, Tq, sign):
    for query_size, key_size, temperature in SIZES:
        tau = torch.full((2, 1, 1), temperature).requires_grad_()
        tensors = inputs(query_size, key_size, Tq, sign=sign)
        found = results(tensors, PROBLEMS[name](tau), tau, "native")
        exact = [t.detach().double().requires_grad_() for t in tensors]
        wide = tau.detach().double().requires_grad_()
        truth = results(exact, PROBLEMS[name](wide), wide, "torch")
        terms = {
            "grad query": key_size / temperature,
            "grad key": Tq * query_size / temperature,
            "grad tau": Tq * query_size * key_size / temperature**2,
        }
        for what, value in found.items():
            if (name, what) == ("sigmoid", "dual"):  # the definition takes it from s - tau t, and loses it
                continue
            where = what, query_size, key_size, temperature
            assert value.isnan().sum() == 0, where
            if terms.get(what, 0.0) < 1e38:  # else the terms of the sum exceed float32, if not the sum itself
                assert_same(where, value, truth[what], terms.get(what, 1.0))


@pytest.mark.parametrize("problem", [None, Transport(Tsallis(1.5))])
def test_parts_of_the_plan(problem):
    query, key, _ = inputs(2.0**80, 2.0**83, 33)
    given = {"scale": 1.0, "problem": problem}
    single, exact = [query.detach(), key.detach()], [query.detach().double(), key.detach().double()]
    index = torch.arange(9).expand(1, 2, 33, 9)
    plan = regard.weights_at(*exact, index, **given)
    assert (plan.sum(-1) - 1).abs().max() < 1e-6
    assert torch.allclose(regard.weights_at(*single, index, **given).double(), plan)
    weights, _ = regard.topk(*single, 1, **given)
    assert torch.allclose(weights.double(), plan.amax(-1, keepdim=True))
    blocks = regard.block_mass(*single, 4, **given)
    assert torch.allclose(blocks.double(), regard.block_mass(*exact, 4, **given), atol=1e-6)


def test_a_tiny_number_as_temperature():
    q, k, v = (t.detach() for t in inputs(1.0, 1.0, 33))
    for temperature in (1e-38, 1e-60):
        problem = Transport(temperature=temperature)
        out = regard.attention(q, k, v, problem=problem, backend="native")
        truth = regard.attention(q.double(), k.double(), v.double(), problem=problem, backend="torch")
        assert torch.allclose(out.double(), truth, atol=1e-6)


def test_pytorchs_own_attention():
    query, key, value = inputs(2.0**80, 2.0**83, 64)
    with regard.accelerated() as calls:
        before = calls.forward, calls.backward
        big = [t.detach().repeat(1, 8, 1 if t is query else 8, 8).requires_grad_() for t in (query, key, value)]
        big[2] = torch.randn(1, 16, 72, 32).requires_grad_()
        out = F.scaled_dot_product_attention(*big, scale=1.0)
        grads = torch.autograd.grad(out.sum(), big)
        assert (calls.forward, calls.backward) == (before[0] + 1, before[1] + 1)
    exact = [t.detach().double().requires_grad_() for t in big]
    truth = regard.attention(*exact, scale=1.0, backend="torch")
    assert torch.allclose(out.double(), truth, atol=1e-6)
    for grad in grads:
        assert grad.isfinite().all()
    assert torch.allclose(grads[2].double(), torch.autograd.grad(truth.sum(), exact[2])[0], atol=1e-5)
