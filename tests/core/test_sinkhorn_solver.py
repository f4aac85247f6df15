"""The solver finds a two-sided plan wherever one exists. Linear programming decides that for random problems. The
solver's parts have tests of their own."""

import math
import re
import warnings

import pytest
import torch

import convergence
import regard
from regard import AuxRequest, Bias, Documents, RowsAndColumns, Transport
from regard.backends.native import engine
from regard.lowering import lower
from regard.solvers.sinkhorn import anderson, feasibility, newton
from regard.solvers.sinkhorn.marginals import Marginals
from regard.solvers.sinkhorn.stage import Laplacian, Stage

F64 = torch.float64
BACKENDS = ["torch", *(["native"] if engine.extension()[0] is not None else [])]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.each_isa


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# --- random problems --------------------------------------------------------------------------------------------------


@by_backend
@pytest.mark.parametrize("temperature", convergence.TEMPERATURES)
def test_random_problems_converge_or_have_no_plan(temperature, backend):
    """Every combination of parts once (`make converge` runs a thousand problems)."""
    for seed in range(24):
        verdict = convergence.judge(convergence.problem(seed), temperature, backend)
        assert not verdict.failure, (seed, verdict)


# Earlier versions of the solver stopped at a wrong plan here, because they left rungs of the ladder early or took
# Newton steps of a fixed length. Mass must move between groups of queries and keys that exchange nothing at the start.
@by_backend
@pytest.mark.parametrize(("seed", "temperature"), [(6, 1e-2), (11, 3e-3), (46, 3e-3), (20, 1e-3), (35, 1e-3)])
def test_hard_problems(seed, temperature, backend):
    verdict = convergence.judge(convergence.problem(seed), temperature, backend)
    assert not verdict.failure and not verdict.proof, verdict


@by_backend
@pytest.mark.parametrize("relax", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("temperature", [1e-1, 1e-3])
def test_relaxed_problems(temperature, relax, backend):
    """A relaxed problem always has a plan, also at small temperatures. The plan is certified."""
    for seed in range(0, 12, 3):
        given = convergence.problem(seed)
        problem = Transport(
            marginal=RowsAndColumns(row=given.row, column=given.column, relax=relax, strict=True, tolerance=1e-9),
            temperature=temperature,
        )
        regard.attention(given.query, given.key, given.key, scale=given.scale, problem=problem, backend=backend)
        assert regard.solve(given.scores, problem).certificate().holds(1e-7)


def test_the_judge_reports_wrong_plans(monkeypatch):
    """Slightly wrong prices, a plan where none exists, and a missing proof are failures."""
    given = convergence.problem(0)
    right = regard.attention

    def off(*args, **kwargs):
        out, aux = right(*args, **kwargs)
        aux.column_dual[..., 0] += 1e-5
        return out, aux

    assert not convergence.judge(given, 1e-1, "torch").failure
    monkeypatch.setattr(regard, "attention", off)
    assert "wrong" in convergence.judge(given, 1e-1, "torch").failure
    monkeypatch.setattr(regard, "attention", right)
    seed = next(s for s in range(4, 400, 6) if convergence.linear_program(convergence.problem(s)) is None)
    assert convergence.judge(convergence.problem(seed), 1e-1, "torch").proof
    monkeypatch.setattr(feasibility.Infeasibility, "_test_order", lambda *_: None)
    assert convergence.judge(convergence.problem(seed), 1e-1, "torch").failure == "no plan, and no proof"


# --- the reported share -----------------------------------------------------------------------------------------------


def test_the_reported_share_is_the_mass_in_a_wrong_column():
    """Mass that one column has in excess is missing in another. It counts once."""
    q, k = draw(1, 2, 9, 4), draw(1, 2, 7, 4, seed=1)
    problem = Transport(marginal=RowsAndColumns(max_iterations=2), temperature=0.3)
    with pytest.warns(UserWarning, match="in a wrong column") as raised:
        _, aux = regard.attention(q, k, k, problem=problem, return_aux=AuxRequest(key_mass=True))
    [reported] = re.findall(r"iterations (\S+) of the mass", str(raised[0].message))
    too_much = (aux.key_mass - 9 / 7).clamp(min=0).sum(-1) / 9
    assert math.isclose(float(reported), float(too_much.max()), rel_tol=5e-3)


def test_iterations_stay_within_the_limit():
    """The iterations at higher temperatures on the ladder count, too."""
    q, k = draw(1, 1, 24, 4), draw(1, 1, 24, 4, seed=1)
    for limit in (1, 2, 5, 40):
        problem = Transport(marginal=RowsAndColumns(max_iterations=limit), temperature=1e-3)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            _, aux = regard.attention(q, k, k, problem=problem, return_aux=AuxRequest(iterations=True))
        assert 1 <= int(aux.iterations.max()) <= limit and (raised or limit == 40)


@by_backend
def test_each_head_has_iterations_of_its_own(backend):
    """A head that cannot be solved uses no iterations of other heads, and only this head is reported."""
    q, k = draw(1, 3, 16, 4), draw(1, 3, 16, 4, seed=1)
    problem = Transport(marginal=RowsAndColumns(max_iterations=600), temperature=1e-2)
    request = AuxRequest(iterations=True, column_residual=True)
    _, alone = regard.attention(q, k, k, problem=problem, backend=backend, return_aux=request)
    mask = torch.ones(3, 16, 16, dtype=torch.bool)
    mask[1, :2, 1:] = False  # two queries for one key
    with pytest.warns(UserWarning, match="in 1 of 3 heads: there is no plan: in head 1 of batch 0"):
        _, aux = regard.attention(q, k, k, mask, problem=problem, backend=backend, return_aux=request)
    assert bool((aux.column_residual[0, [0, 2]].sum(-1) / 2 / 16 <= 1e-6).all())
    q[0, 1, 3, 0] = math.nan
    enough = int(alone.iterations[0, [0, 2]].max()) + newton.TRIES + 3  # a Newton step needs this many iterations
    problem = Transport(marginal=RowsAndColumns(max_iterations=enough), temperature=1e-2)
    with pytest.warns(UserWarning, match="in 1 of 3 heads: .* NaN or inf"):
        _, aux = regard.attention(q, k, k, problem=problem, backend=backend, return_aux=request)
    assert torch.equal(aux.iterations[0, [0, 2]], alone.iterations[0, [0, 2]])


def test_a_proof_is_not_reported_for_other_heads():
    q, k = draw(1, 2, 16, 4), draw(1, 2, 16, 4, seed=1)
    mask = torch.ones(2, 16, 16, dtype=torch.bool)
    mask[0, :2, 1:] = False
    problem = Transport(marginal=RowsAndColumns(max_iterations=20), temperature=1e-2)
    with pytest.warns(
        UserWarning, match="in 2 of 2 heads: there is no plan: in head 0 .*; in 1 others, the temperature"
    ):
        regard.attention(q, k, k, mask, problem=problem)


@by_backend
def test_nan_and_inf_propagate(backend):
    q, k = draw(1, 1, 5, 4), draw(1, 1, 5, 4, seed=1)
    q[0, 0, 2, 1] = math.nan
    bias = torch.zeros(5, 5, dtype=F64)
    bias[2, 3] = math.nan
    for query, prior in ((q, None), (k, Bias(bias))):
        problem = Transport(prior=prior, marginal=RowsAndColumns())
        with pytest.warns(UserWarning, match="contain NaN or inf"):
            out = regard.attention(query, k, k, problem=problem, backend=backend)
        assert out.isnan().all()  # every row depends on the keys' prices


@by_backend
def test_shapes_without_heads_queries_or_keys(backend):
    for B, H, T in ((0, 2, 3), (2, 0, 3), (2, 2, 0)):
        x, problem = torch.ones(B, H, T, 4), Transport(marginal=RowsAndColumns())
        assert regard.attention(x, x, x, problem=problem, backend=backend).shape == (B, H, T, 4)
        ids = torch.zeros(B, T, dtype=torch.long)
        packed = Transport(prior=Documents(ids), marginal=RowsAndColumns())
        assert regard.attention(x, x, x, problem=packed, backend=backend).shape == (B, H, T, 4)


# --- the solver's parts -----------------------------------------------------------------------------------------------


def stage(backend, temperature=0.5, relax=None, group=1, **more):
    q, k = draw(1, 2, 6, 3), draw(1, 2 // group, 5, 3, seed=1)
    row = draw(2, 6, seed=2).exp()
    problem = Transport(marginal=RowsAndColumns(row=row, relax=relax), temperature=temperature)
    form = lower(q, k, k, more.get("mask"), 0.0, False, None, group > 1, problem, None, None)
    return Stage(backend, form, Marginals.of(backend, form), True), q @ k.repeat_interleave(group, 1).mT / math.sqrt(3)


@by_backend
@pytest.mark.parametrize("relax", [None, 0.7])
@pytest.mark.parametrize("group", [1, 2])
def test_laplacian_is_the_second_derivative_of_the_dual(backend, relax, group):
    """Product and diagonal against the Hessian of the dual, which autograd computes in full."""
    tau = 0.5
    passes, scores = stage(backend, tau, relax, group)
    a, b = passes.marginals.row, passes.marginals.column

    def dual(gamma):
        phi = (scores / tau - gamma[:, :, None]).logsumexp(-1) - a.log()
        kappa = 0.0 if relax is None else tau / relax
        price = b * gamma if relax is None else b * torch.expm1(kappa * gamma) / kappa
        return (a * phi).sum() + price.sum()

    gamma = 0.3 * draw(1, 2, 5, seed=3)
    state = passes.at(gamma)
    assert math.isclose(float(state.dual.sum()), float(dual(gamma)), rel_tol=1e-12)
    (gradient,) = torch.autograd.grad(dual(g := gamma.clone().requires_grad_()), g)
    assert (gradient + state.residual).abs().max() < 1e-12
    hessian = torch.autograd.functional.hessian(dual, gamma).reshape(10, 10)
    laplacian = Laplacian(passes, state)
    x = draw(1, 2, 5, seed=4)
    assert (laplacian.product(x).flatten() - hessian @ x.flatten()).abs().max() < 1e-12
    assert (laplacian.jacobi.flatten() - hessian.diagonal()).abs().max() < 1e-12
    rhs = laplacian.product(x)
    found = laplacian.solve(rhs, 1e-13, 100)
    assert (laplacian.product(found.x) - rhs).abs().max() < 1e-11 and bool((found.products <= 10).all())


@by_backend
@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_newton_alone_solves_a_problem(backend, temperature):
    """Without a ladder, from prices 0."""
    passes, _ = stage(backend, temperature)
    done = torch.zeros(1, 2, dtype=torch.bool)
    gamma = torch.zeros(1, 2, 5, dtype=F64)
    limit = torch.full((1, 2), 500)
    found = newton.newton(passes, gamma, 1e-10, limit, done, feasibility.Infeasibility(passes))
    assert bool(found.arrived.all()) and float(found.state.share.max()) <= 1e-10
    assert bool((passes.at(found.state.gamma).share <= 2e-10).all())
    # A head that is done does not change.
    one = torch.tensor([[True, False]])
    found = newton.newton(passes, gamma, 1e-10, limit, one, feasibility.Infeasibility(passes))
    assert not found.state.gamma[0, 0].any() and int(found.iterations[0, 0]) == 0 and bool(found.arrived[0, 1])


@by_backend
def test_the_iteration_stops_early_where_it_is_too_slow(backend):
    passes, _ = stage(backend, 1e-4)
    gamma = torch.zeros(1, 2, 5, dtype=F64)
    limit = torch.full((1, 2), 10_000)
    found = anderson.iterate(passes, gamma, 1e-10, limit, feasibility.Infeasibility(passes))
    assert bool((found.iterations < 500).all())


def test_no_warning_at_the_default_tolerance_in_float32():
    q, k = (draw(1, 2, 40, 8, seed=n).float() for n in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (1e-1, 1e-2, 1e-3):
            problem = Transport(marginal=RowsAndColumns(), temperature=temperature)
            regard.attention(q, k, k, problem=problem)
