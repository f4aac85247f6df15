"""Each statistic against its formula, written out on the true plan in float64."""

import math

import pytest
import torch

import regard
from regard import KL, AuxRequest, Free, Rows, Transport, Tsallis
from regard.statistics import ROW_STATISTICS
from support.cases import CASES, build, by_backend, by_case, run, skip_unless_served
from support.reference import f_and_link, truth
from support.tolerance import assert_close


def expected_statistics(built) -> dict[str, torch.Tensor]:
    t = truth(built.query, built.key, built.value, **built.arguments)
    problem = built.arguments.get("problem") or Transport()
    marginal, p, tau = problem.marginal, t.weights, t.tau
    sink = marginal.sink if isinstance(marginal, Rows) else None
    admissible = t.log_prior > -math.inf
    log_prior = torch.where(admissible, t.log_prior, 0.0)
    y = t.scores / tau
    B, H, Tq, _ = p.shape

    def with_null(keys, null):
        return torch.cat([keys, null.expand(B, H, Tq, 1)], -1) if sink is not None else keys

    b = torch.zeros(1, dtype=torch.float64)
    if sink is not None:
        b = torch.as_tensor(sink, dtype=torch.float64).detach()
        b = b.view(1, -1, 1, 1) if b.dim() else b
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    all_p = with_null(p, t.null[..., None])
    all_y = with_null(y, (b / tau).expand(B, H, Tq, 1))
    all_log_prior = with_null(t.log_prior, zero)
    mass = all_p.sum(-1, keepdim=True)
    normal = all_p / torch.where(mass > 0, mass, 1)
    has_mass = mass.squeeze(-1) > 0
    mean_y = (normal * all_y).sum(-1, keepdim=True)
    finite_prior = torch.where(all_log_prior > -math.inf, all_log_prior, 0.0)
    kl = (torch.xlogy(normal, normal) - normal * finite_prior).sum(-1) + all_log_prior.logsumexp(-1)
    v = built.value.detach().double().repeat_interleave(H // built.value.shape[1], 1)
    values = {
        "dual": t.dual,
        "entropy": -torch.xlogy(normal, normal).sum(-1),
        "kl": torch.where(has_mass, kl, 0.0),
        "max_scores": torch.where(admissible, t.scores, -math.inf).amax(-1),
        "max_weight": all_p.amax(-1),
        "score_variance": (normal * (all_y - mean_y) ** 2).sum(-1),
        "collision": (all_p**2).sum(-1),
        "support": (p > 0).double().sum(-1),
        "first_key_mass": p[..., 0],
        "mass": p.sum(-1),
        "cost": -(p * t.scores).sum(-1),
        "value_spread": (p * (v**2).sum(-1)[:, :, None]).sum(-1) - (t.out**2).sum(-1),
        "key_mass": p.sum(-2),
        "value": expected_value(problem, t, p, log_prior, admissible, b, sink),
    }
    if isinstance(problem.regularizer, KL):
        values["lse"] = (all_y + all_log_prior).logsumexp(-1)
    return values


def expected_value(problem, t, p, log_prior, admissible, b, sink):
    """Section 2: <p, s> - tau D, without the constant of KL rows."""
    f, _ = f_and_link(problem.regularizer)
    tau, marginal = t.tau.squeeze(-1), problem.marginal
    prior = torch.where(admissible, log_prior.exp(), 0.0)
    if isinstance(problem.regularizer, KL) and isinstance(marginal, Rows) and marginal.relax is None:
        spread = (torch.xlogy(p, p) - p * log_prior).sum(-1) + torch.xlogy(t.null, t.null)
    else:
        ratio = torch.where(admissible, p / torch.where(admissible, prior, 1), 1.0)
        spread = (prior * f(ratio)).sum(-1) + (f(t.null) if sink is not None else 0)
    value = (p * t.scores).sum(-1) - tau * spread
    mass = p.sum(-1)
    if isinstance(marginal, Free):
        offset = torch.as_tensor(marginal.offset, dtype=torch.float64).detach()
        value = value + mass * (offset.view(1, -1, 1) if offset.dim() else offset)
    elif marginal.relax is not None:
        rho = torch.as_tensor(marginal.relax, dtype=torch.float64).detach()
        value = value - (rho.view(1, -1, 1) if rho.dim() else rho) * (torch.xlogy(mass, mass) - mass + 1)
    elif sink is not None:
        value = value + t.null * (b.squeeze(-1) if b.dim() > 1 else b)
    elif not isinstance(problem.regularizer, regard.FermiDirac):
        value = torch.where(admissible.any(-1), value, -math.inf)
    return value


@by_case
@by_backend
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
def test_statistics(case, backend, dtype):
    built = build(case, dtype)
    expected = expected_statistics(built)
    skip_unless_served(backend, built, tuple(expected))
    _, aux = run(built, backend, return_aux=AuxRequest(**dict.fromkeys(expected, True)))
    for name, value in expected.items():
        got = getattr(aux, name)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # Statistics are computed in float32 for half types too; a variance doubles a relative error, entropy adds it.
        assert_close(got, value, got.dtype, 8 * case.sensitivity, name)
    assert all(getattr(aux, name) is None for name in ROW_STATISTICS if name not in expected)


def test_statistics_not_requested_are_none():
    q = torch.randn(1, 2, 3, 4)
    _, aux = regard.attention(q, q, q, return_aux=AuxRequest())
    assert all(getattr(aux, name) is None for name in ROW_STATISTICS)


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (Transport(Tsallis(1.5)), "lse"),
        (Transport(regard.FermiDirac(), marginal=Free()), "lse"),
        (Transport(temperature=0.0), "lse"),
        (Transport(temperature=0.0), "score_variance"),
        (Transport(temperature=torch.tensor([1.0, 0.0]).view(2, 1, 1)), "lse"),
    ],
)
def test_undefined_statistics_raise(problem, name):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=name):
        regard.attention(q, q, q, problem=problem, return_aux=AuxRequest(**{name: True}))


@pytest.mark.parametrize("problem", [Transport(), Transport(Tsallis(1.5)), Transport(temperature=0.0)])
def test_request_all(problem):
    q = torch.randn(1, 2, 3, 4)
    _, aux = regard.attention(q, q, q, problem=problem, return_aux=AuxRequest.all(problem))
    assert aux.entropy is not None and aux.key_mass is not None


@by_backend
@pytest.mark.parametrize("problem", [Transport(), Transport(Tsallis(1.5))], ids=["softmax", "entmax"])
def test_variances_survive_a_common_offset(backend, problem):
    """Scores near 1000, values near 100: second moments must not be differences of huge numbers."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=generator) for _ in range(3))
    q[..., 0], k[..., 0] = 50.0, 50.0
    v += 100.0
    names = ("score_variance", "value_spread", "entropy")
    built = type("Built", (), {"query": q, "key": k, "value": v, "arguments": {"problem": problem}})
    skip_unless_served(backend, built, names)
    _, aux = run(built, backend, return_aux=AuxRequest(**dict.fromkeys(names, True)))
    expected = expected_statistics(built)
    scores = q.double() @ k.double().mT / math.sqrt(8)
    assert scores.mean() > 800
    for name in names:
        error = (getattr(aux, name) - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 2e-3, f"{name}: {error}"  # float32 scores near 1000 carry 6e-5 each


@by_backend
@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_value_spread_under_a_large_offset(backend, offset):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 16, generator=generator) for _ in range(3))
    v = v + offset
    built = type("Built", (), {"query": q, "key": k, "value": v, "arguments": {}})
    skip_unless_served(backend, built, ("value_spread",))
    _, aux = run(built, backend, return_aux=AuxRequest(value_spread=True))
    centred = truth(q, k, v.double() - offset)
    squares = ((v.double() - offset) ** 2).sum(-1)[:, :, None]
    expected = (centred.weights * squares).sum(-1) - (centred.out**2).sum(-1)
    assert (aux.value_spread - expected).abs().max() < 1e-6 * offset


def test_only_lse_and_entropy_are_differentiable():
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    _, aux = regard.attention(q, k, v, return_aux=AuxRequest.all())
    for name in ROW_STATISTICS:
        assert getattr(aux, name).requires_grad == (name in ("lse", "entropy")), name


def test_null_entropy_of_a_causal_mask():
    """The uniform plan's mean entropy under a causal mask is log(T!)/T."""
    T = 50
    q = torch.zeros(1, 1, T, 4, dtype=torch.float64)
    _, aux = regard.attention(q, q, q, is_causal=True, return_aux=AuxRequest(entropy=True))
    assert math.isclose(float(aux.entropy.mean()), math.lgamma(T + 1) / T, rel_tol=1e-12)


def test_identities_of_the_theory():
    """Section 5: H = lse - E[x]; Var_p(y) = dKL/d ln(beta); entropy from any kernel by appending K to V."""
    case = next(c for c in CASES if c.name == "bias, dense")
    built = build(case)
    names = ("lse", "entropy", "kl", "score_variance", "cost")
    problem = built.arguments["problem"]
    out, aux = run(built, "torch", return_aux=AuxRequest(**dict.fromkeys(names, True)))

    def kl_at(tau):
        hotter = Transport(prior=problem.prior, temperature=tau)
        _, at = regard.attention(built.query, built.key, built.value, problem=hotter, return_aux=AuxRequest(kl=True))
        return at.kl

    h = 1e-5
    slope = (kl_at(problem.temperature * math.exp(-h)) - kl_at(problem.temperature * math.exp(h))) / (2 * h)
    assert torch.allclose(slope, aux.score_variance, atol=1e-7)

    q, k, v = built.query, built.key, built.value
    wide = regard.attention(q, k, torch.cat([v, k], -1), problem=problem)
    mean_score = (wide[..., v.shape[-1] :] * q).sum(-1) / math.sqrt(q.shape[-1])
    assert torch.allclose(-aux.cost, mean_score) and torch.allclose(wide[..., : v.shape[-1]], out)
