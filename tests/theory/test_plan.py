"""`solve` and `certify`, and the functions that read single weights of plans too large to store."""

import math

import pytest
import torch

import regard
from regard import KL, ALiBi, Bias, Causal, Documents, FDivergence, FermiDirac, Free, Rows, Transport, Tsallis
from support.cases import CASES, build, by_case
from support.reference import truth

WINDOW_ARGUMENTS = ("attn_mask", "is_causal", "scale", "enable_gqa", "problem", "softcap", "score")


def scores(*shape, dtype=torch.float64):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 5, 7), (2, 3, 5, 7), (2, 2, 3, 5, 7), (0,), (4, 0)])
@pytest.mark.parametrize("regularizer", [KL(), Tsallis(1.5), FermiDirac()], ids=repr)
def test_shapes(shape, regularizer):
    plan = regard.solve(scores(*shape), Transport(regularizer))
    assert plan.weights.shape == shape and plan.dual.shape == shape[:-1]
    certificate = plan.certificate()
    assert certificate.gap.shape == shape[:-1] and certificate.holds(1e-9)


def test_solve_uses_the_prior():
    s = scores(2, 4, 6, 6)
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    prior = Causal() * ALiBi(torch.rand(4, dtype=torch.float64)) * Documents(ids) * Bias(scores(6))
    plan = regard.solve(s, Transport(Tsallis(1.5), prior=prior))
    masked = (ids[:, None] != ids) | ~torch.ones(6, 6).tril().bool()
    assert (plan.weights[..., masked] == 0).all() and plan.certificate().holds(1e-9)


def test_weights_are_differentiable():
    s = scores(3, 6).requires_grad_()
    tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    function = lambda s, tau: regard.solve(s, Transport(Tsallis(1.4), temperature=tau)).weights  # noqa: E731
    assert torch.autograd.gradcheck(function, (s, tau)) and torch.autograd.gradgradcheck(function, (s, tau))


def test_the_potential_has_the_plan_as_gradient():
    """grad F = p, for every regulariser: F through the differentiable dual of KL, and by finite differences."""
    s = scores(1, 6)
    for problem in (Transport(), Transport(Tsallis(1.5)), Transport(FermiDirac(), marginal=Rows(mass=2))):
        plan, h = regard.solve(s, problem), 1e-6
        for j in range(6):
            up, down = s.clone(), s.clone()
            up[0, j] += h
            down[0, j] -= h
            values = [regard.solve(x, problem).certificate().dual for x in (up, down)]
            assert torch.allclose((values[0] - values[1]) / (2 * h), plan.weights[:, j], atol=1e-6)


def test_a_score_of_minus_infinity_masks():
    s = torch.tensor([1.0, 2.0, -math.inf])
    for regularizer in (KL(), Tsallis(1.5), FermiDirac()):
        plan = regard.solve(s, Transport(regularizer))
        assert plan.weights[2] == 0 and plan.certificate().holds()
        assert not regard.certify(s, torch.tensor([0.2, 0.3, 0.5]), Transport(regularizer)).holds()


def test_float32_certificate():
    for problem in (
        Transport(),
        Transport(Tsallis(1.5)),
        Transport(Tsallis(2.0)),
        Transport(FermiDirac(), marginal=Rows(3)),
    ):
        assert regard.solve(scores(50, 200, dtype=torch.float32), problem).certificate().holds(1e-5)


def test_certificate_reads_well():
    text = str(regard.solve(scores(5, 7)).certificate())
    for name in ("primal", "dual", "gap", "row_residual", "stationarity"):
        assert name in text
    assert "5 rows" in text and "1 row " in str(regard.solve(scores(7)).certificate())
    assert max(map(len, text.splitlines())) < 80


WRONG = {
    "uniform": lambda p: torch.full_like(p, 1 / p.shape[-1]),
    "too much": lambda p: p * 1.01,
    "too little": lambda p: p * 0.99,
    "one hot": lambda p: torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p),
    "shifted": lambda p: p.roll(1, -1),
    "nan": lambda p: p * math.nan,
    "one entry": lambda p: p + 1e-3 * (torch.arange(p.shape[-1]) == 2),
    "negative": lambda p: torch.where(p == p.amax(-1, keepdim=True), -p, p),
}
PROBLEMS = {
    "softmax": Transport(),
    "entmax": Transport(Tsallis(1.5)),
    "sparsemax": Transport(Tsallis(2.0), temperature=0.5),
    "sink": Transport(marginal=Rows(sink=0.3)),
    "relaxed": Transport(marginal=Rows(relax=0.8)),
    "free": Transport(FermiDirac(), marginal=Free(-1.0)),
    "top-m": Transport(FermiDirac(), marginal=Rows(mass=2)),
    "hard": Transport(temperature=0.0),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_plan_is_not_certified(problem, wrong):
    s = scores(4, 7)
    p = regard.solve(s, problem).weights
    if wrong == "one hot" and problem.temperature == 0.0:
        return  # this plan is right
    assert regard.certify(s, p, problem).holds(1e-9)
    certificate = regard.certify(s, WRONG[wrong](p), problem)
    assert not certificate.holds(1e-5), f"{wrong} passed: {certificate}"


def test_mass_on_a_masked_key_has_an_infinite_gap():
    s = scores(4, 4)
    certificate = regard.certify(s, s.softmax(-1), Transport(prior=Causal()))
    assert certificate.gap[:3].isinf().all() and not certificate.holds()


def test_seed_003_normalisers_are_not_optima():
    """s / sum(s) and ReLU(s) / sum ReLU(s) solve no problem of the family. The certificate distinguishes sparsemax from
    softmax."""
    s = scores(3, 6).abs() + 0.1
    assert not regard.certify(s, s / s.sum(-1, keepdim=True), Transport(Tsallis(2.0))).holds()
    assert not regard.certify(s, s.softmax(-1), Transport(Tsallis(2.0))).holds()
    assert regard.certify(s, s.softmax(-1)).holds()


def test_ties_are_shared():
    s = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    plan = regard.solve(s, Transport(temperature=0.0))
    assert torch.equal(plan.weights, torch.tensor([[0, 0.5, 0.5, 0], [0.25] * 4]))
    with_sink = regard.solve(s, Transport(temperature=0.0, marginal=Rows(sink=3.0)))
    assert torch.allclose(with_sink.weights.sum(-1), torch.tensor([2 / 3, 0.0]))


def test_temperatures_of_zero_among_others():
    q, k, v = (scores(1, 2, 5, 4) for _ in range(3))
    tau = torch.tensor([0.0, 0.7], dtype=torch.float64).view(2, 1, 1).requires_grad_()
    mixed = regard.attention(q, k, v, problem=Transport(temperature=tau))
    assert torch.allclose(mixed[:, :1], regard.attention(q, k, v, problem=Transport(temperature=0.0))[:, :1])
    assert torch.allclose(mixed[:, 1:], regard.attention(q, k, v, problem=Transport(temperature=0.7))[:, 1:])
    (gradient,) = torch.autograd.grad(mixed.sum(), tau)
    assert gradient[0] == 0 and gradient[1] != 0


# --- readout ----------------------------------------------------------------------------------------------------------


def readouts(case):
    built = build(case)
    arguments = {k: v for k, v in built.arguments.items() if k in WINDOW_ARGUMENTS}
    return built, arguments, truth(built.query, built.key, built.value, **built.arguments).weights


@by_case
def test_weights_at(case):
    built, arguments, plan = readouts(case)
    Tk = plan.shape[-1]
    generator = torch.Generator().manual_seed(0)
    for shape in ((3,), (case.Tq, 2), (case.B, 1, case.Tq, 4), (case.H, 1, 1)):
        index = torch.randint(Tk, shape, generator=generator)
        expected = plan.gather(-1, index.expand(*plan.shape[:3], shape[-1]))
        assert torch.allclose(regard.weights_at(built.query, built.key, index, **arguments), expected, atol=1e-9)


@by_case
def test_topk(case):
    built, arguments, plan = readouts(case)
    for n in {0, 1, min(3, plan.shape[-1]), plan.shape[-1]}:
        weights, indices = regard.topk(built.query, built.key, n, **arguments)
        assert torch.allclose(weights, plan.topk(n, -1).values, atol=1e-9)
        assert torch.allclose(plan.gather(-1, indices), weights, atol=1e-9)


@by_case
@pytest.mark.parametrize("block", [1, 3, 100])
def test_block_mass(case, block):
    built, arguments, plan = readouts(case)
    got = regard.block_mass(built.query, built.key, block, **arguments)
    rows, columns = math.ceil(case.Tq / block), math.ceil(case.Tk / block)
    assert got.shape == (case.B, case.H, rows, columns)
    for i in range(rows):
        for j in range(columns):
            piece = plan[:, :, i * block : (i + 1) * block, j * block : (j + 1) * block]
            assert torch.allclose(got[:, :, i, j], piece.sum(-1).mean(-1), atol=1e-9)


def test_readout_across_blocks(monkeypatch):
    """Many small blocks, a window that leaves most keys out, leading dimensions other than four."""
    monkeypatch.setattr("regard.backends.reference.BLOCK", 256)
    q, k = scores(3, 200, 4), scores(3, 200, 4).flip(1)
    problem = Transport(Tsallis(1.5), prior=Causal() * regard.Window(20))
    plan = regard.solve(q @ k.mT / 2, problem).weights
    weights, indices = regard.topk(q, k, 40, problem=problem)
    assert weights.shape == (3, 200, 40) and torch.allclose(weights, plan.topk(40, -1).values)
    assert torch.allclose(plan.gather(-1, indices), weights)
    index = torch.arange(200)[:, None] - torch.arange(4)
    assert torch.allclose(
        regard.weights_at(q, k, index.clamp(min=0), problem=problem),
        plan.gather(-1, index.clamp(min=0).expand(3, -1, -1)),
    )
    mass = regard.block_mass(q, k, 7, problem=problem)
    assert torch.allclose(mass.sum(-1), torch.ones(3, 29, dtype=torch.float64))


def test_blocks_cover_the_plan_once(monkeypatch):
    """The blocked result is the same for any block size, forward and backward."""
    case = next(c for c in CASES if c.name == "all priors")
    results = []
    for size in (2**21, 64, 1):
        monkeypatch.setattr("regard.backends.reference.BLOCK", size)
        built = build(case)
        out, aux = regard.attention(
            built.query, built.key, built.value, **built.arguments, return_aux=regard.AuxRequest.all(), backend="torch"
        )
        gradients = torch.autograd.grad(out.sum() + aux.entropy.sin().sum(), list(built.leaves.values()))
        results.append([out, aux.key_mass, aux.first_key_mass, *gradients])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.allclose(one, two, atol=1e-12)


def test_a_link_may_return_its_argument():
    """f = x^2/2 without p >= 0: the plan is s/tau shifted so that it sums to the mass, with negative weights."""
    squared = FDivergence(lambda x: x * x / 2, lambda t: t, torch.ones_like)
    scores = torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64, requires_grad=True)
    plan = regard.solve(scores, Transport(squared))
    torch.testing.assert_close(plan.weights, scores - scores.mean() + 1 / 3)
    assert torch.autograd.gradcheck(lambda s: regard.solve(s, Transport(squared)).weights, scores)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(([1.0], KL()), "problem"), ((1.0,), "temperatures"), (("warm",), "temperatures"), (([[1.0]],), "temperatures")],
)
def test_path_errors_name_the_argument(arguments, name):
    with pytest.raises((TypeError, ValueError), match=name):
        regard.path(scores(4), *arguments)
    assert regard.path(scores(4), torch.tensor([1, 2])).entropy.shape == (2,)


def test_path_of_both_marginals_raises():
    for temperatures in ([], [0.0, 1.0], [1.0]):
        with pytest.raises(NotImplementedError, match="problem: path follows rows one by one"):
            regard.path(torch.zeros(3, 3), temperatures, Transport(marginal=regard.RowsAndColumns()))
