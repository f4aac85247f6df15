"""`regard.prior`: functions as priors, on every backend against a dense Bias."""

import copy
import math
import pickle

import pytest
import torch

import regard
from regard import (
    ALiBi,
    AuxRequest,
    Bias,
    ByKeys,
    Causal,
    FermiDirac,
    Free,
    MatchEntropy,
    MatchKL,
    Prefix,
    Rows,
    RowsAndColumns,
    Transport,
    Tsallis,
    Window,
)
from regard.backends import BACKENDS
from regard.backends.native import backend as native_backend
from support import functions
from support.tolerance import assert_close

pytestmark = pytest.mark.each_isa
by_backend = pytest.mark.parametrize("backend", ["torch", "native"])
B, H, T, D = 2, 4, 130, 16


def index(B=B, H=H, Tq=T, Tk=T, offset=0):
    found = [torch.arange(n).view([n if m == at else 1 for m in range(4)]) for at, n in enumerate((B, H, Tq, Tk))]
    found[2] = found[2] + offset
    return found


def tensors(Tq=T, Tk=T, Hkv=H, dtype=torch.float32, grad=False):
    shapes = ((B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, D))
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


class Learned:
    """A function with parameters of several shapes, and masks."""

    def __init__(self, dtype=torch.float64):
        self.slopes = torch.nn.Parameter(torch.rand(H, dtype=dtype))
        self.table = torch.nn.Parameter(torch.randn(H, 2 * T, dtype=dtype))
        self.keys = torch.nn.Parameter(torch.randn(B, T, dtype=dtype))
        self.scalar = torch.nn.Parameter(torch.tensor(0.3, dtype=dtype))
        self.ids = torch.arange(T) // 40

    def __call__(self, b, h, i, j):
        near = self.table[h, (i - j).clamp(-T, T - 1) + T] ** 2
        found = (
            -self.slopes[h] * (i - j).abs() * self.scalar + 0.2 * near + torch.tanh(self.keys[b, j] * self.slopes[h])
        )
        return torch.where((self.ids[i] == self.ids[j]) | (j < 9), found, -math.inf)

    @property
    def parameters(self):
        return [self.slopes, self.table, self.keys, self.scalar]


def served(backend, *args, **kwargs):
    if backend == "native":
        choice = regard.select_backend(*args, **kwargs)
        if choice.backend != "native":
            pytest.skip(choice.reasons["native"])


def compare(backend, make, arguments, dtype=torch.float32, statistics=(), **options):
    """Output, statistics and gradients by a function and by its dense Bias in float64."""
    learned = Learned()
    query, key, value = arguments
    Tq, Tk = query.shape[2], key.shape[2]
    results = []
    for dense in (False, True):
        prior = regard.prior(learned)
        if dense:
            offset = Tk - Tq if make(prior).prior.leaves()[-1].alignment == "bottom_right" else 0
            prior = Bias(learned(*index(Tq=Tq, Tk=Tk, offset=offset)))
        leaves = [t.detach().to(torch.float64 if dense else dtype).requires_grad_() for t in (query, key, value)]
        torch.manual_seed(1)
        request = AuxRequest(**dict.fromkeys(statistics, True)) if statistics else None
        problem = make(prior)
        if not dense:
            served(backend, *leaves, problem=problem, **options)
        out = regard.attention(
            *leaves, problem=problem, backend="torch" if dense else backend, return_aux=request, **options
        )
        out, aux = out if statistics else (out, None)
        found = {"out": out} | {name: getattr(aux, name) for name in statistics}
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        parameters = [*leaves, *learned.parameters]
        found |= {f"grad {n}": g for n, g in enumerate(torch.autograd.grad((out * weights).sum(), parameters))}
        results.append(found)
    for name in results[0]:
        assert_close(results[0][name], results[1][name], dtype, 4, name)


PROBLEMS = {
    "softmax": lambda prior: Transport(prior=prior),
    "causal": lambda prior: Transport(prior=prior * Causal()),
    "temperature": lambda prior: Transport(prior=prior * Window(50, 3), temperature=0.7),
    "sink": lambda prior: Transport(prior=prior, marginal=Rows(sink=0.5)),
    "relax": lambda prior: Transport(prior=prior, marginal=Rows(relax=0.9)),
    "entmax": lambda prior: Transport(Tsallis(1.5), prior=prior * ALiBi(0.1)),
    "sparsemax": lambda prior: Transport(Tsallis(2.0), prior=prior * Causal()),
    "entmax sink": lambda prior: Transport(Tsallis(1.3), prior=prior, marginal=Rows(sink=0.0)),
    "sigmoid": lambda prior: Transport(FermiDirac(), prior=prior, marginal=Free(-1.0)),
    "by keys": lambda prior: Transport(prior=prior * Causal(), temperature=ByKeys(0.3, 0.4)),
}


@by_backend
@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(name, backend):
    compare(backend, PROBLEMS[name], tensors())


@by_backend
def test_float64(backend):
    compare(backend, PROBLEMS["causal"], tensors(), torch.float64)
    compare(backend, PROBLEMS["entmax"], tensors(), torch.float64)


@by_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half(dtype, backend):
    query, key, value = (t.to(dtype) for t in tensors())
    compare(backend, PROBLEMS["causal"], (query, key, value), dtype)


@by_backend
def test_statistics_dropout_softcap_and_mask(backend):
    statistics = ("lse", "entropy", "kl", "max_weight", "score_variance", "mass", "key_mass")
    compare(backend, PROBLEMS["causal"], tensors(), statistics=statistics)
    compare(backend, PROBLEMS["causal"], tensors(), dropout_p=0.3)
    mask = torch.rand(T, T) < 0.8
    compare(backend, PROBLEMS["softmax"], tensors(), softcap=5.0, attn_mask=mask)


@by_backend
def test_shared_key_heads(backend):
    compare(backend, PROBLEMS["causal"], tensors(Hkv=2), enable_gqa=True)
    decoding = lambda prior: Transport(Tsallis(1.5), prior=prior * Causal("bottom_right"))  # noqa: E731
    compare(backend, decoding, tensors(Tq=3, Hkv=1), enable_gqa=True)


@by_backend
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("Tq", [1, 3, 40])
def test_other_lengths(Tq, alignment, backend):
    compare(backend, lambda prior: Transport(prior=prior * Causal(alignment)), tensors(Tq=Tq))


def test_alignment_is_adopted_or_missing():
    query, key, value = tensors(Tq=5)
    prior = regard.prior(lambda b, h, i, j: -(i - j).abs() * 0.1)
    with pytest.raises(ValueError, match="alignment"):
        regard.attention(query, key, value, problem=Transport(prior=prior))
    own = regard.prior(lambda b, h, i, j: -(i - j).abs() * 0.1, alignment="bottom_right")
    adopted = regard.attention(query, key, value, problem=Transport(prior=prior * Causal("bottom_right")))
    torch.testing.assert_close(adopted, regard.attention(query, key, value, problem=Transport(prior=own * Causal())))
    with pytest.raises(ValueError, match="alignment"):
        regard.attention(query, key, value, problem=Transport(prior=own * Causal("top_left")))
    with pytest.raises(ValueError, match=r"prior\(alignment\)"):
        regard.prior(lambda b, h, i, j: i, alignment="left")


@by_backend
def test_decoding_agrees_with_prefill(backend):
    query, key, value = tensors()
    problem = Transport(prior=regard.prior(Learned(), alignment="bottom_right") * Causal())
    served(backend, query, key, value, problem=problem)
    whole = regard.attention(query, key, value, problem=problem, backend=backend)
    for t in (0, 7, T - 1):
        one = regard.attention(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1], problem=problem)
        torch.testing.assert_close(one, whole[:, :, t : t + 1], rtol=1e-4, atol=1e-5)


@by_backend
def test_gradcheck(backend):
    query, key, value = (torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes, table = torch.rand(2, dtype=torch.float64), torch.randn(2, 9, dtype=torch.float64)
    slopes.requires_grad_(), table.requires_grad_()

    def call(query, key, value, slopes, table):
        prior = regard.prior(lambda b, h, i, j: torch.exp(slopes[h]) * table[b, i - j + 4] ** 3 + slopes[b] * j)
        return regard.attention(query, key, value, problem=Transport(prior=prior * Causal()), backend=backend)

    served(backend, query, key, value, problem=Transport(prior=regard.prior(lambda b, h, i, j: i * 0.5)))
    inputs = (query, key, value, slopes, table)
    assert torch.autograd.gradcheck(call, inputs, check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


@by_backend
def test_reading_the_plan(backend):
    query, key, value = tensors()
    learned = Learned(torch.float32)
    problem, dense = (Transport(prior=p * Causal()) for p in (regard.prior(learned), Bias(learned(*index()))))
    served(backend, query, key, value, problem=problem)
    top, _ = regard.topk(query, key, 5, problem=problem)
    expected, where = regard.topk(query, key, 5, problem=dense)
    torch.testing.assert_close(top, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(regard.weights_at(query, key, where, problem=problem), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        regard.block_mass(query, key, 32, problem=problem), regard.block_mass(query, key, 32, problem=dense)
    )
    scores = torch.randn(B, H, T, T)
    one, other = regard.solve(scores, problem), regard.solve(scores, dense)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-6)
    assert one.certificate().gap.abs().max() < 1e-4


def test_budgets_and_both_marginals():
    query, key, value = tensors(Tq=24, Tk=24)
    learned = Learned(torch.float32)
    prior = regard.prior(learned)
    for make in (
        lambda prior: Transport(prior=prior, temperature=MatchKL(0.5)),
        lambda prior: Transport(prior=prior, marginal=RowsAndColumns(relax=1.0)),
    ):
        dense = Bias(learned(*index(Tq=24, Tk=24)))
        one, other = (regard.attention(query, key, value, problem=make(p)) for p in (prior, dense))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        grads = [torch.autograd.grad(out.square().sum(), learned.slopes)[0] for out in (one, other)]
        torch.testing.assert_close(*grads, rtol=5e-3, atol=1e-3)
    mask = regard.prior(lambda b, h, i, j: (i - j).abs() < 9)
    out = regard.attention(query, key, value, problem=Transport(prior=mask, temperature=MatchEntropy(1.0)))
    same = Transport(prior=Window(8, 8), temperature=MatchEntropy(1.0))
    torch.testing.assert_close(out, regard.attention(query, key, value, problem=same), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="MatchEntropy"):
        Transport(prior=prior, temperature=MatchEntropy(1.0))


def test_unions_of_masks():
    query, key, value = tensors()
    even = regard.prior(lambda b, h, i, j: (j % 2 == 0) & (h < 2))
    union = Transport(prior=(even | Window(3)) * Causal())
    mask = (((index()[3] % 2 == 0) & (index()[1] < 2)) | ((index()[2] - index()[3]).abs() <= 3)).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(regard.attention(query, key, value, problem=union), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="priors of 0 and 1"):
        Prefix(3) | regard.prior(lambda b, h, i, j: i * 0.5)


@by_backend
def test_nan_is_visible_where_the_pair_may_be_read(backend):
    query, key, value = tensors(Tq=20, Tk=20)

    def future(b, h, i, j):  # NaN ahead of the query, and in row 3 of head 1
        return torch.sqrt(i - j) + torch.where((h == 1) & (i == 3), math.nan, 0.0)

    problem = Transport(prior=regard.prior(future) * Causal())
    served(backend, query, key, value, problem=problem)
    out = regard.attention(query, key, value, problem=problem, backend=backend)
    bad = out.isnan().any(-1)
    assert bad[:, 1, 3].all() and bad.sum() == B
    out = regard.attention(query, key, value, problem=Transport(prior=regard.prior(future)), backend=backend)
    assert out[:, :, :-1].isnan().any(-1).all()


@by_backend
def test_an_index_outside_of_a_table_is_nan_unless_it_is_masked(backend):
    query, key, value = tensors(Tq=20, Tk=20)
    table = torch.randn(6)
    prior = regard.prior(lambda b, h, i, j: table[i - j])
    served(backend, query, key, value, problem=Transport(prior=prior * Window(5)))
    out = regard.attention(query, key, value, problem=Transport(prior=prior * Window(5)), backend=backend)
    dense = torch.where((index()[2] - index()[3]).abs() < 6, table[(index()[2] - index()[3]).clamp(0, 5)], 0.0)
    expected = Transport(prior=Bias(dense[..., :20, :20]) * Window(5))
    torch.testing.assert_close(out, regard.attention(query, key, value, problem=expected, backend="torch"))
    out = regard.attention(query, key, value, problem=Transport(prior=prior * Window(6)), backend=backend)
    assert out[:, :, 6:].isnan().all() and out[:, :, :6].isfinite().all()


@by_backend
def test_captured_tensors_count_as_they_are(backend):
    query, key, value = tensors(Tq=20, Tk=20)
    slopes = torch.nn.Parameter(torch.ones(H))
    problem = Transport(prior=regard.prior(lambda b, h, i, j: -slopes.exp()[h] * (i - j).abs()))
    served(backend, query, key, value, problem=problem)
    with torch.no_grad():
        slopes.fill_(0.1)
    out = regard.attention(query, key, value, problem=problem, backend=backend)
    expected = regard.attention(query, key, value, problem=Transport(prior=ALiBi(slopes.exp())), backend=backend)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), slopes)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_large_tables_share_their_sums(monkeypatch):
    query, key, value = tensors(Tq=600, Tk=600, grad=True)
    table = torch.nn.Parameter(torch.randn(H, 1200))
    problem = Transport(prior=regard.prior(lambda b, h, i, j: table[h, i - j + 600]) * Causal())
    served("native", query, key, value, problem=problem)
    expected = None
    for room in (2**24, 10_000, 1):
        monkeypatch.setattr(native_backend, "_CAPTURED_SUMS", room)
        out = regard.attention(query, key, value, problem=problem, backend="native")
        (found,) = torch.autograd.grad(out.square().sum(), table)
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_threads_do_not_change_results(isa):
    query, key, value = tensors(Tq=700, Tk=700, grad=True)
    table = torch.nn.Parameter(torch.randn(1400))
    problem = Transport(prior=regard.prior(lambda b, h, i, j: table[i - j + 700]) * Causal())
    served("native", query, key, value, problem=problem)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = regard.attention(query, key, value, problem=problem, backend="native")
            found.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value, table))))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# --- functions that cannot be traced ----------------------------------------------------------------------------------


def test_the_reference_serves_what_cannot_be_traced():
    pytest.importorskip("regard._native")
    query, key, value = tensors(Tq=20, Tk=20)
    slopes = torch.nn.Parameter(torch.rand(H))

    def function(b, h, i, j):
        return -slopes[h] * torch.cumsum(torch.ones_like(j), 3) * 0.1

    problem = Transport(prior=regard.prior(function) * Causal())
    choice = regard.select_backend(query, key, value, problem=problem)
    assert choice.backend == "torch" and "torch.cumsum" in choice.reasons["native"]
    out = regard.attention(query, key, value, problem=problem)
    expected = Transport(prior=Bias(function(*index(Tq=20, Tk=20))) * Causal())
    torch.testing.assert_close(out, regard.attention(query, key, value, problem=expected, backend="torch"))
    (grad,) = torch.autograd.grad(out.sum(), slopes)
    assert grad.abs().sum() > 0
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=r"native.*torch\.cumsum"):
        regard.attention(query, key, value, problem=problem, backend="native")


def test_broadcast_tensors_work_on_the_reference():
    pytest.importorskip("regard._native")
    query, key, value = tensors(Tq=20, Tk=20)
    slopes = torch.rand(H, 1, 1)
    problem = Transport(prior=regard.prior(lambda b, h, i, j: -slopes * (i - j).abs()))
    assert "whole tensor" in regard.select_backend(query, key, value, problem=problem).reasons["native"]
    expected = regard.attention(query, key, value, problem=Transport(prior=ALiBi(slopes.flatten())))
    torch.testing.assert_close(regard.attention(query, key, value, problem=problem), expected)


def test_broken_functions():
    query, key, value = tensors(Tq=20, Tk=20)

    def call(function):
        return regard.attention(query, key, value, problem=Transport(prior=regard.prior(function)))

    def raises(b, h, i, j):
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        call(raises)
    with pytest.raises(ValueError, match=r"broadcasts to \[B, H, Tq, Tk\]"):
        call(lambda b, h, i, j: torch.zeros(3))
    with pytest.raises(TypeError, match="returns a tensor of real numbers"):
        call(lambda b, h, i, j: None)
    held = torch.zeros(1)
    with pytest.raises(ValueError, match=r"torch\.add_ writes to a captured tensor in place"):
        regard.prior(lambda b, h, i, j: held.add_(1) * (i - j))
    assert held == 0
    with pytest.raises(TypeError, match=r"prior\(function\): expected a callable"):
        regard.prior(3.0)


def test_a_constant_and_a_truth_value():
    query, key, value = tensors(Tq=20, Tk=20)
    plain = regard.attention(query, key, value)
    for function in (lambda b, h, i, j: 0.5, lambda b, h, i, j: 2, lambda b, h, i, j: True):
        out = regard.attention(query, key, value, problem=Transport(prior=regard.prior(function)))
        torch.testing.assert_close(out, plain)
    none = regard.attention(query, key, value, problem=Transport(prior=regard.prior(lambda b, h, i, j: False)))
    assert (none == 0).all()


def test_without_a_compiler(monkeypatch):
    pytest.importorskip("regard._native")
    query, key, value = tensors(Tq=20, Tk=20)
    problem = Transport(prior=regard.prior(lambda b, h, i, j: -(i - j).abs() * 0.123))
    monkeypatch.setenv("CXX", "no-such-compiler")
    choice = regard.select_backend(query, key, value, problem=problem)
    assert choice.backend == "torch" and "no C++ compiler was found (CXX=no-such-compiler)" in choice.reasons["native"]
    out = regard.attention(query, key, value, problem=problem)
    torch.testing.assert_close(out, regard.attention(query, key, value, problem=Transport(prior=ALiBi(0.123))))


# --- transforms, torch.compile, parts ---------------------------------------------------------------------------------


def test_transforms():
    query, key, value = (torch.randn(2, H, 9, D) for _ in range(3))
    slopes = torch.rand(H)

    def call(query, slopes):
        prior = regard.prior(lambda b, h, i, j: -slopes[h] * (i - j).abs() + b * (j > i))
        return regard.attention(query, key, value, problem=Transport(prior=prior)).square().sum()

    expected = torch.autograd.grad(call(query, slopes.requires_grad_()), slopes)[0]
    torch.testing.assert_close(torch.func.grad(call, 1)(query, slopes.detach()), expected)
    many = torch.randn(3, 2, H, 9, D)
    batched = torch.func.vmap(call, (0, None))(many, slopes.detach())
    torch.testing.assert_close(batched, torch.stack([call(q, slopes.detach()) for q in many]))
    outside = Transport(prior=regard.prior(lambda b, h, i, j: -slopes[h] * (i - j).abs() + b * (j > i)))

    def closed(query):
        return regard.attention(query, key, value, problem=outside).square().sum()

    torch.testing.assert_close(torch.func.vmap(closed)(many), batched)


@by_backend
def test_compile(backend):
    query, key, value = tensors(Tq=40, Tk=40, grad=True)
    learned = Learned(torch.float32)
    raw = torch.nn.Parameter(torch.rand(H))
    prior = regard.prior(learned) * regard.prior(
        lambda b, h, i, j: -torch.nn.functional.softplus(raw)[h] * (i - j).abs()
    )
    problem = Transport(prior=prior * Causal())
    served(backend, query, key, value, problem=problem)

    def call(query, key, value):
        return regard.attention(query, key, value, problem=problem, backend=backend).square()

    inputs = (query, key, value, raw, *learned.parameters)
    expected = torch.autograd.grad(call(query, key, value).sum(), inputs)
    torch._dynamo.reset()
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(query, key, value)
    torch.testing.assert_close(out, call(query, key, value))
    for found, grad in zip(torch.autograd.grad(out.sum(), inputs), expected, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-5)


def test_compile_with_a_prior_made_inside():
    query, key, value = tensors(Tq=40, Tk=40)
    slopes = torch.nn.Parameter(torch.rand(H))

    def call(query, key, value):
        prior = regard.prior(lambda b, h, i, j: -slopes[h] * (i - j).abs())
        return regard.attention(query, key, value, problem=Transport(prior=prior * Causal()))

    torch._dynamo.reset()
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(query, key, value)
    expected = call(query, key, value)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), slopes)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_parts():
    learned = Learned(torch.float32)
    prior = regard.prior(learned, alignment="top_left")
    assert prior == regard.prior(learned, "top_left") != regard.prior(learned)
    assert hash(prior) == hash(regard.prior(learned, "top_left"))
    assert repr(regard.prior(functions.near)) == "prior(near)"
    assert repr(prior) == "prior(Learned, alignment='top_left')"
    leaves, tree = torch.utils._pytree.tree_flatten(prior)
    assert {id(p) for p in learned.parameters} <= {id(leaf) for leaf in leaves}
    moved = torch.utils._pytree.tree_unflatten([leaf.double() for leaf in leaves], tree)
    query, key, value = tensors(dtype=torch.float64)
    out = regard.attention(query, key, value, problem=Transport(prior=moved))
    torch.testing.assert_close(out, regard.attention(query, key, value, problem=Transport(prior=prior)))
    module, slopes = torch.nn.Module(), torch.nn.Parameter(torch.rand(H))
    module.slopes = slopes
    module.problem = Transport(prior=regard.prior(lambda b, h, i, j: -slopes[h] * (i - j).abs()))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.slopes.mul_(2)
    expected = Transport(prior=ALiBi(twin.slopes.double()))
    torch.testing.assert_close(
        regard.attention(query, key, value, problem=twin.problem),
        regard.attention(query, key, value, problem=expected),
    )


def test_serialization():
    prior = regard.prior(functions.near, "bottom_right") * regard.from_flex(mask_mod=functions.recent)
    text = Transport(prior=prior).to_json()
    assert "support.functions:near" in text
    with pytest.raises(ValueError, match="allow_imports"):
        Transport.from_json(text)
    assert Transport.from_json(text, allow_imports=True).prior == prior
    with pytest.raises(ValueError, match="from module import name"):
        Transport(prior=regard.prior(lambda b, h, i, j: i)).to_json()
    same = pickle.loads(pickle.dumps(regard.prior(functions.near)))
    query, key, value = tensors()
    torch.testing.assert_close(
        regard.attention(query, key, value, problem=Transport(prior=same)),
        regard.attention(query, key, value, problem=Transport(prior=regard.prior(functions.near))),
    )


def test_captured_tensors_are_checked():
    query, key, value = tensors()
    table = torch.zeros(H, device="meta")
    prior = regard.prior(lambda b, h, i, j: table[h])
    with pytest.raises((ValueError, TypeError), match=r"prior\("):
        regard.attention(query, key, value, problem=Transport(prior=prior))


def test_one_wrong_element_is_noticed(monkeypatch):
    """A test of the tests: a gradient of a captured tensor that is off by a thousandth."""
    plain = BACKENDS["torch"].backward

    def wrong(form, needed, outputs, grads):
        found = plain(form, needed, outputs, grads)
        return {n: g * 1.001 if n.startswith("captured") else g for n, g in found.items()}

    monkeypatch.setattr(BACKENDS["torch"], "backward", wrong)
    with pytest.raises(AssertionError, match="grad"):
        compare("torch", PROBLEMS["softmax"], tensors())
