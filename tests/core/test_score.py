"""`score="cosine"` and `score="euclidean"`: every problem of the case table, gradients, statistics, precision."""

import functools
import inspect
import math

import pytest
import torch

import regard
from regard import AuxRequest, Causal, FermiDirac, Free, MatchKL, Rows, RowsAndColumns, Transport
from support.cases import CASES, build, by_backend, skip_unless_served
from support.reference import scores_of, truth
from support.tolerance import assert_close

double = torch.float64
SCORES = ("cosine", "euclidean")
by_score = pytest.mark.parametrize("score", SCORES)
by_dot_case = pytest.mark.parametrize(
    "case", [c for c in CASES if not c.name.startswith(SCORES)], ids=lambda case: case.name
)


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=double)


@by_dot_case
@by_backend
@by_score
def test_every_problem(case, backend, score):
    built = build(case)
    built.arguments["score"] = score
    skip_unless_served(backend, built)
    out = regard.attention(built.query, built.key, built.value, **built.arguments, backend=backend)
    expected = truth(built.query, built.key, built.value, **built.arguments)
    assert_close(out, expected.out, double, 10 * case.sensitivity)
    dot = truth(built.query, built.key, built.value, **(built.arguments | {"score": "dot"}))
    assert case.Tk == 1 or (dot.out - expected.out).abs().max() > 1e-4  # a test of the test


@by_score
def test_the_default_scale(score):
    q, k, v = normal(1, 2, 5, 16), normal(1, 2, 5, 16, seed=1), normal(1, 2, 5, 3, seed=2)
    scale = 1.0 if score == "cosine" else 0.25
    assert torch.equal(regard.attention(q, k, v, score=score), regard.attention(q, k, v, score=score, scale=scale))
    assert not torch.equal(regard.attention(q, k, v, score=score), regard.attention(q, k, v, score=score, scale=0.3))


@by_backend
@by_score
def test_gradcheck(backend, score):
    tensors = [normal(1, 4, 3, 2), normal(1, 2, 4, 2, seed=1), normal(1, 2, 4, 1, seed=2)]
    tensors = [t.requires_grad_() for t in tensors]
    arguments = {"enable_gqa": True, "score": score, "backend": backend}

    def attend(q, k, v):
        if backend == "sdpa":
            return regard.attention(q, k, v, is_causal=True, **arguments)
        problem = Transport(prior=Causal("bottom_right"), marginal=Rows(sink=0.3), temperature=0.7)
        out, aux = regard.attention(
            q, k, v, problem=problem, softcap=3.0, return_aux=AuxRequest(lse=True, entropy=True), **arguments
        )
        return out, aux.lse, aux.entropy

    assert torch.autograd.gradcheck(attend, tensors)
    if backend != "sdpa":
        sigmoid = Transport(FermiDirac(), marginal=Free(0.2))  # the row term of the score does not cancel
        assert torch.autograd.gradcheck(
            lambda q, k, v: regard.attention(q, k, v, problem=sigmoid, **arguments), tensors
        )
        assert torch.autograd.gradgradcheck(
            lambda q, k, v: regard.attention(q, k, v, problem=sigmoid, **arguments), tensors
        )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", [double, torch.float32, torch.bfloat16], ids=str)
@by_score
def test_statistics_are_those_of_the_true_score(backend, dtype, score):
    q, k, v = (normal(2, 4, 7, 8, seed=n).to(dtype) for n in range(3))
    s = scores_of(q.double(), k.double(), score, None)
    request = AuxRequest(lse=True, dual=True, value=True, cost=True, max_scores=True, entropy=True, score_variance=True)
    problem = Transport(temperature=0.6)
    out, aux = regard.attention(q, k, v, score=score, problem=problem, return_aux=request, backend=backend)
    p, lse = (s / 0.6).softmax(-1), (s / 0.6).logsumexp(-1)
    mean = (p * s).sum(-1)
    variance = (p * (s - mean[..., None]).square()).sum(-1) / 0.36
    entropy = lse - mean / 0.6
    expected = [lse, 0.6 * lse, 0.6 * lse, -mean, s.amax(-1), entropy, variance]
    names = ("lse", "dual", "value", "cost", "max_scores", "entropy", "score_variance")
    for name, exact in zip(names, expected, strict=True):
        found = getattr(aux, name)
        assert found.dtype == (double if dtype == double else torch.float32)
        # Half inputs are computed in float32, from norms in float32.
        assert_close(found, exact, double if dtype == double else torch.float32, 4, name)
    assert out.dtype == dtype
    assert_close(out, p @ v.double(), dtype)


@by_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@by_score
def test_half_precision(backend, dtype, score):
    """Output and gradients lose no more than those of the dot product do: norms are not rounded to half precision."""
    q, k, v = (normal(2, 4, 33, 64, seed=n).to(dtype).requires_grad_() for n in range(3))
    weight = normal(2, 4, 33, 64, seed=4).to(dtype)
    options = {"score": score, "scale": 20.0 if score == "cosine" else 2.0, "is_causal": True}
    results = []
    for cast, used in ((dtype, backend), (double, "torch")):
        leaves = [t.detach().to(cast).requires_grad_() for t in (q, k, v)]
        out = regard.attention(*leaves, **options, backend=used)
        results.append([out, *torch.autograd.grad(out, leaves, weight.to(cast))])
    for name, got, exact in zip(("out", "query", "key", "value"), *results, strict=True):
        assert got.dtype == dtype
        assert_close(got, exact, dtype, 1 if name == "out" else 4, name)


@pytest.mark.parametrize("backend", ["native", "sdpa", "torch"])
@pytest.mark.parametrize("offset", [0.0, 1000.0, 1e5])
def test_a_common_offset_costs_no_digits(backend, offset):
    """Distances do not change if queries and keys move together."""
    # A grid, so that the moved tensors are exact in float32.
    q, k = ((normal(2, 4, 40, 16, seed=n) * 64).round() / 64 for n in range(2))
    v = normal(2, 4, 40, 16, seed=2)
    exact = truth(q, k[:, :2], v[:, :2], score="euclidean", scale=0.5)
    moved = [(t + offset).float() for t in (q, k[:, :2])]
    assert torch.equal(moved[0].double() - offset, q)
    leaves = [moved[0].requires_grad_(), moved[1].requires_grad_()]
    out = regard.attention(*leaves, v[:, :2].float(), score="euclidean", scale=0.5, enable_gqa=True, backend=backend)
    assert_close(out, exact.out, torch.float32, 4)
    grads = torch.autograd.grad(out.sin().sum(), leaves)
    plain = [q.clone().requires_grad_(), k[:, :2].clone().requires_grad_()]
    expected = regard.attention(*plain, v[:, :2], score="euclidean", scale=0.5, enable_gqa=True, backend="torch")
    for got, right in zip(grads, torch.autograd.grad(expected.sin().sum(), plain), strict=True):
        assert_close(got, right, torch.float32, 8)


@by_backend
@by_score
def test_nan_in_masked_keys_does_not_spread(backend, score):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[:, 3] = False
    mask[2] = False  # a query without keys
    keep = mask.any(0)[:, None]
    results = []
    for masked in (0.0, math.nan, math.inf, 1e30):
        key = torch.where(keep, k, masked).float().requires_grad_()
        query = torch.where(mask.any(1)[:, None], q, 0.5 if masked in (0.0, 1e30) else masked).float().requires_grad_()
        out = regard.attention(query, key, v.float(), attn_mask=mask, enable_gqa=True, score=score, backend=backend)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (query, key))])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert torch.allclose(got, expected, atol=1e-6) and got.isfinite().all()
    assert all(map(torch.equal, results[0], results[3]))  # the numbers in a masked key play no part at all
    mask = torch.ones(2, 1, 5, 6, dtype=torch.bool)
    mask[1] = False  # no query of the second sequence has keys
    query, key = q.clone(), k.clone().requires_grad_()
    query[1] = math.nan
    out = regard.attention(query, key, v, attn_mask=mask, enable_gqa=True, score=score, backend=backend)
    (gradient,) = torch.autograd.grad(out.sum(), key)
    assert out[0].isfinite().all() and (out[1] == 0).all() and (gradient[1] == 0).all() and gradient.isfinite().all()
    poisoned = torch.where(keep, k, math.nan)
    assert regard.attention(q, poisoned, v, enable_gqa=True, score=score, backend=backend).isnan().all()


def test_a_zero_vector_has_cosine_zero():
    q, k, v = normal(1, 1, 3, 4), normal(1, 1, 5, 4, seed=1), normal(1, 1, 5, 2, seed=2)
    k[:, :, 2] = 0
    q[:, :, 1] = 0
    _, aux = regard.attention(q, k, v, score="cosine", return_aux=AuxRequest(lse=True))
    assert float(aux.lse[0, 0, 1]) == pytest.approx(math.log(5))
    weights = regard.weights_at(q, k, torch.arange(5), score="cosine")
    expected = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    assert torch.allclose(weights, expected.softmax(-1), atol=1e-12)


@pytest.mark.parametrize("backend", ["native", "torch"])
@by_score
def test_both_marginals(backend, score):
    q, k, v = normal(2, 4, 6, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    problem = Transport(marginal=RowsAndColumns(tolerance=1e-10))
    s = scores_of(q, k.repeat_interleave(2, 1), score, None)
    plan = regard.solve(s, problem)
    leaves = [t.requires_grad_() for t in (q, k)]
    out = regard.attention(*leaves, v, enable_gqa=True, score=score, problem=problem, backend=backend)
    assert torch.allclose(out, plan.weights @ v.repeat_interleave(2, 1), atol=1e-8)
    small = [normal(1, 1, 3, 2).requires_grad_(), normal(1, 1, 3, 2, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda q, k: regard.attention(q, k, v[:1, :1, :3], score=score, problem=problem, backend=backend), small
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
@by_score
def test_budgets(backend, score):
    q, k, v = normal(2, 4, 6, 8, scale=2.0), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    problem = Transport(temperature=MatchKL(0.4))
    plan = regard.solve(scores_of(q, k.repeat_interleave(2, 1), score, None), problem)
    request = AuxRequest(kl=True)
    options = {"enable_gqa": True, "score": score, "problem": problem, "backend": backend}
    out, aux = regard.attention(q, k, v, **options, return_aux=request)
    assert torch.allclose(out, plan.weights @ v.repeat_interleave(2, 1), atol=1e-7)
    assert torch.allclose(aux.kl, torch.full_like(aux.kl, 0.4), atol=1e-7)
    small = [normal(1, 2, 3, 2, scale=2.0).requires_grad_(), normal(1, 2, 4, 2, seed=1).requires_grad_()]
    value = normal(1, 2, 4, 2, seed=2)
    options["enable_gqa"] = False
    assert torch.autograd.gradcheck(lambda q, k: regard.attention(q, k, value, **options), small, atol=1e-4)


@by_score
def test_functions_that_read_a_plan(score):
    q, k, v = normal(2, 4, 6, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 3, seed=2)
    options = {"is_causal": True, "enable_gqa": True, "score": score, "problem": Transport(temperature=0.5)}
    plan = truth(q, k, v, **options).weights
    assert torch.allclose(regard.weights_at(q, k, torch.arange(6), **options), plan)
    weights, keys = regard.topk(q, k, 2, **options)
    assert torch.allclose(weights, plan.topk(2).values) and torch.allclose(plan.gather(-1, keys), weights)
    blocks = regard.block_mass(q, k, 3, **options)
    assert torch.allclose(blocks[..., 1, 0], plan[:, :, 3:, :3].sum(-1).mean(-1))
    found = regard.estimate(q, k, v, **options)
    assert torch.allclose(found.value, truth(q, k, v, **options).out)
    expected = torch.xlogy(plan, plan * torch.arange(1, 7)[:, None]).sum(-1)
    assert torch.allclose(regard.evidence(q, k, **options).kl, expected, atol=1e-12)
    assert regard.select_backend(q, k, v, **options).backend in ("native", "sdpa")
    tangents = (normal(2, 4, 6, 8, seed=3), None, None)
    options.pop("problem")
    _, tangent = regard.geometry.jvp(q, k, v, tangents, **options)
    step = 1e-6
    ahead, behind = (regard.attention(q + h * tangents[0], k, v, **options) for h in (step, -step))
    assert torch.allclose(tangent, (ahead - behind) / (2 * step), atol=1e-7)


@by_score
def test_compile_and_transforms(score):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 5, 8, seed=1), normal(2, 2, 5, 3, seed=2)
    attend = functools.partial(regard.attention, enable_gqa=True, is_causal=True, score=score)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = attend(*leaves)
    gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    for dynamic in (None, True):
        torch._dynamo.reset()
        out = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*leaves)
        found = torch.autograd.grad(out.sin().sum(), leaves)
        assert torch.allclose(out, expected) and all(map(torch.allclose, found, gradients))
    torch._dynamo.reset()
    plain = [t.detach() for t in leaves]
    assert all(
        map(torch.allclose, torch.func.grad(lambda *t: attend(*t).sin().sum(), argnums=(0, 1, 2))(*plain), gradients)
    )
    each = torch.vmap(attend)(*plain)
    assert torch.allclose(each, expected)
    mixed = torch.vmap(attend, in_dims=(0, None, None))(plain[0], plain[1][0], plain[2][0])
    assert torch.allclose(mixed[0], expected[0]) and not torch.allclose(mixed[1], expected[1])
    per_sample = torch.vmap(torch.func.grad(lambda *t: attend(*t).sin().sum()))(*plain)
    assert torch.allclose(per_sample, gradients[0])


@by_score
def test_compiled_half_precision_keeps_its_dtype(score):
    q, k, v = (normal(1, 2, 5, 8, seed=n).bfloat16() for n in range(3))
    attend = functools.partial(regard.attention, score=score)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    torch._dynamo.reset()
    assert compiled.dtype == torch.bfloat16 and torch.equal(compiled, attend(q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend(q.float(), k.float(), v.float())
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, attend(q, k, v))


@by_score
def test_shapes_and_empty_inputs(score):
    q, k = normal(3, 2, 4, 5, 8), normal(3, 1, 4, 6, 8, seed=1)
    out = regard.attention(q, k, k, score=score)
    assert torch.allclose(out[1, 1, 2], regard.attention(q[1, 1, 2], k[1, 0, 2], k[1, 0, 2], score=score))
    shared = regard.attention(q, k[:, :, :1], k[:, :, :1], score=score)  # one key head for all
    assert torch.allclose(shared[0, 0, 3], regard.attention(q[0, 0, 3], k[0, 0, 0], k[0, 0, 0], score=score))
    assert regard.attention(q, k[..., :0, :], k[..., :0, :], score=score).count_nonzero() == 0
    assert regard.attention(q[..., :0, :], k, k, score=score).shape == (3, 2, 4, 0, 8)
    assert regard.attention(q[:0], k[:0], k[:0], score=score).shape == (0, 2, 4, 5, 8)
    assert regard.attention(q[..., :0], k[..., :0], k, score=score).isfinite().all()


def test_score_is_keyword_only_and_checked():
    functions = (regard.attention, regard.select_backend, regard.weights_at, regard.topk, regard.block_mass)
    for function in (*functions, regard.estimate, regard.evidence):
        parameter = inspect.signature(function).parameters["score"]
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default == "dot"
    q = torch.randn(1, 1, 3, 4)
    for wrong in ("manhattan", None, 2, torch.ones(1), ["dot"]):
        with pytest.raises(ValueError, match=r'score: expected "dot", "cosine" or "euclidean", got'):
            regard.attention(q, q, q, score=wrong)
        with pytest.raises(ValueError, match="score: expected"):
            regard.topk(q, q, 1, score=wrong)


def test_the_tolerance_would_notice_norms_in_half_precision():
    """A test of `test_half_precision`: the appended norms, rounded to bfloat16, miss the tolerance by far."""
    q, k, v = (normal(2, 4, 33, 64, seed=n).bfloat16() for n in range(3))
    exact = truth(q, k, v, score="euclidean", scale=2.0, is_causal=True).out
    norms = [-t.float().square().sum(-1, keepdim=True) / 2 for t in (q, k)]
    one = torch.ones_like(q[..., :1])
    wide = torch.cat([q, norms[0].bfloat16(), one], -1), torch.cat([k, one, norms[1].bfloat16()], -1)
    with pytest.raises(AssertionError, match="error"):
        assert_close(regard.attention(*wide, v, scale=2.0, is_causal=True), exact, torch.bfloat16)
