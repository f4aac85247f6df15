"""NaN and infinity propagate: every output, statistic and gradient that depends on one is NaN, and no other changes.

The table lists the rows of the plan that one NaN reaches. `oracle` (autograd through the softmax formula in float64)
must agree with the table, and so must every regulariser and marginal on each backend and instruction set.
"""

import dataclasses
import math
import struct

import pytest
import torch

import regard
from regard import KL, AuxRequest, Bias, Causal, FermiDirac, Free, Rows, Transport, Tsallis
from regard.backends import fused_statistics
from regard.backends.native import engine

pytestmark = pytest.mark.each_isa

BACKENDS = ["torch", *(["native"] if engine.extension()[0] is not None else [])]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
H, T, D = 2, 6, 4
STATISTICS = tuple(name for name in fused_statistics() if name != "key_mass")


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors():
    """Small scores, so that every admissible key has weight under every regulariser."""
    return {
        "query": 0.3 * normal(0, 1, H, T, D),
        "key": 0.3 * normal(1, 1, H, T, D),
        "value": normal(2, 1, H, T, D),
        "mask": 0.1 * normal(3, T, T),
        "prior": 0.1 * normal(4, H, T, T),
        "key_prior": 0.1 * normal(5, H, 1, T),
        "temperature": normal(6, H, T, 1).abs() + 2,
        "level": 0.1 * normal(7, H) + 0.5,
        "grad": normal(8, 1, H, T, D),
    }


@dataclasses.dataclass
class Reach:
    """How far a NaN at `at` of a tensor reaches under a causal mask."""

    at: tuple[int, ...]
    rows: tuple[int, ...]  # the rows of head 1 that read it
    plan: bool = True  # whether their weights become NaN; if not, only `gradients` do
    output: bool = True
    heads: tuple[int, ...] = (1,)
    gradients: tuple[str, ...] = ("query", "key", "value", "mask", "prior", "key_prior", "temperature")
    query: bool = True  # whether gradients of other queries stay; if not, they hold 0 * NaN, as in PyTorch
    unmoved: tuple[str, ...] = ()  # statistics that do not depend on it


LAST = tuple(range(2, T))
TABLE = {
    "query": Reach((0, 1, 2, 3), (2,)),
    "key": Reach((0, 1, 2, 3), LAST, query=False),
    "value": Reach((0, 1, 2, 3), LAST, plan=False, query=False, gradients=("query", "key", "prior", "temperature")),
    "mask": Reach((2, 1), (2,), heads=(0, 1)),
    "prior": Reach((1, 2, 1), (2,), unmoved=("max_scores",)),
    "key_prior": Reach((1, 0, 2), LAST, unmoved=("max_scores",)),
    "grad": Reach((0, 1, 2, 3), (2,), plan=False, output=False),
}
REGULARIZERS = {
    "kl": KL(),
    "1.1": Tsallis(1.1),
    "1.3": Tsallis(1.3),
    "1.5": Tsallis(1.5),
    "2": Tsallis(2.0),
    "fermi": FermiDirac(),
}
MARGINALS = {
    "rows": lambda level: Rows(),
    "mass": lambda level: Rows(mass=0.7),
    "sink": lambda level: Rows(sink=level),
    "relax": lambda level: Rows(relax=level + 1),
    "free": lambda level: Free(offset=level),
}


def call(backend, regularizer, marginal, given, losses=("out",)):
    """Output, statistics and gradients ("d query" ...) by name, detached."""
    given = {name: tensor.clone() for name, tensor in given.items()}
    grad = given.pop("grad")
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    names = [name for name in STATISTICS if name != "lse" or regularizer == "kl"]
    problem = Transport(
        REGULARIZERS[regularizer],
        prior=Causal() * Bias(leaves["prior"]) * Bias(leaves["key_prior"]),
        marginal=MARGINALS[marginal](leaves["level"]),
        temperature=leaves["temperature"],
    )
    out, aux = regard.attention(
        *(leaves[name] for name in ("query", "key", "value", "mask")),
        problem=problem,
        return_aux=AuxRequest(**dict.fromkeys(names, True)),
        backend=backend,
    )
    results = {"out": out} | {name: getattr(aux, name) for name in names}
    weights = {"out": grad, "lse": 1.0, "entropy": 1.0}
    loss = sum((results[name] * weights[name]).sum() for name in losses)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results |= {f"d {name}": g for name, g in zip(leaves, found, strict=True) if g is not None}
    return {name: tensor.detach() for name, tensor in results.items()}


def spoilt(name, bad=math.nan):
    given = tensors()
    given[name][TABLE[name].at] = bad
    return given


def oracle(given):
    """Output and gradients of the softmax rows by PyTorch alone."""
    given = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    scores = given["query"] @ given["key"].mT / D**0.5 + given["mask"]
    x = scores / given["temperature"] + given["prior"] + given["key_prior"]
    x = x.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    out = x.softmax(-1) @ given["value"]
    names = [name for name in given if name not in ("grad", "level")]
    found = torch.autograd.grad((out * given["grad"]).sum(), [given[name] for name in names])
    return {"out": out.detach()} | {f"d {name}": g for name, g in zip(names, found, strict=True)}


def nearly(a, b):
    """Equal up to rounding. A search for prices treats the rows of a block together, so the last bits may differ."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def check(name, found, clean, equal=torch.equal):
    """Compare `found` (with NaN) and `clean` (without), results of `call` or `oracle`, with the table. `equal` compares
    the entries that the NaN does not reach."""
    reach = TABLE[name]
    hit = torch.zeros(H, T, dtype=torch.bool)
    hit[[[head] for head in reach.heads], list(reach.rows)] = True
    if reach.output:
        bad = found["out"][0, hit] if reach.plan else found["out"][0, hit, reach.at[-1]]
        assert bad.isnan().all(), "out"
    assert found["d query"][0, hit].isnan().all(), "d query"
    for gradient in reach.gradients:
        assert found[f"d {gradient}"].isnan().any(), gradient
    for statistic in STATISTICS:
        if statistic not in found:
            continue
        if reach.plan and statistic not in reach.unmoved:
            assert found[statistic][0, hit].isnan().all(), statistic
        if reach.plan:
            assert equal(found[statistic][0, ~hit], clean[statistic][0, ~hit]), statistic
        elif statistic != "value_spread" or not reach.output:
            assert equal(found[statistic], clean[statistic]), statistic
    if reach.plan or not reach.output:
        assert equal(found["out"][0, ~hit], clean["out"][0, ~hit])
    if reach.query:
        assert equal(found["d query"][0, ~hit], clean["d query"][0, ~hit])
    for gradient in ("key", "value", "prior", "temperature") if reach.heads == (1,) else ():  # not in head 0
        mine, before = (run[f"d {gradient}"].reshape(H, -1)[0] for run in (found, clean))
        assert equal(mine, before), gradient


@pytest.mark.parametrize("name", TABLE)
def test_the_table_agrees_with_pytorch(name):
    check(name, oracle(spoilt(name)), oracle(tensors()))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("marginal", MARGINALS)
@by_backend
def test_a_nan_reaches_the_rows_that_read_it(backend, marginal, name):
    for regularizer in REGULARIZERS:
        if backend == "native" and regularizer == "fermi" and marginal != "free":
            continue  # declined
        clean, found = (call(backend, regularizer, marginal, given) for given in (tensors(), spoilt(name)))
        if marginal == "free":  # the price of free rows is given
            del found["dual"], clean["dual"]
        check(name, found, clean, torch.equal if backend == "native" or regularizer == "kl" else nearly)
        if marginal != "rows" and marginal != "mass":
            assert found["d level"][1].isnan() and (TABLE[name].heads != (1,) or found["d level"][0].isfinite())


@pytest.mark.parametrize("name", ["query", "key", "mask", "prior", "key_prior"])
@pytest.mark.parametrize("loss", ["lse", "entropy"])
@by_backend
def test_in_the_gradient_of_statistics(backend, loss, name):
    for regularizer in REGULARIZERS if loss == "entropy" else ("kl",):
        if backend == "native" and regularizer == "fermi":
            continue
        found = call(backend, regularizer, "sink", spoilt(name), losses=(loss,))
        assert found["d query"][0, 1, list(TABLE[name].rows)].isnan().all(), regularizer


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [False, True])
@by_backend
def test_a_query_that_is_not_finite(backend, causal, bad):
    """The rows are NaN, as in softmax: in blocks of many rows and keys, with a single key, for scores of both signs.

    (PyTorch's attention gives 0 where all scores are -inf.)
    """
    T = 70
    q, k, v, grad = (normal(seed, 1, 2, T, 8) for seed in range(4))
    k[:, :, 0, 0] = torch.tensor([1.0, -1.0])
    rows = [0, 3, 69]
    spoilt = q.clone()
    spoilt[:, :, rows, 0] = bad
    for problem in (Transport(), Transport(Tsallis(1.5)), Transport(Tsallis(2.0)), Transport(Tsallis(1.3))):
        for key in (k, k.abs(), -k.abs()):  # scores of both signs, of one sign

            def run(function, query, key=key):
                leaves = [t.clone().requires_grad_() for t in (query, key, v)]
                out = function(*leaves, is_causal=causal)
                return out.detach(), torch.autograd.grad(out, leaves, grad)[0]

            def ours(*given, problem=problem, **named):
                return regard.attention(*given, problem=problem, backend=backend, **named)

            def softmax(query, key, value, is_causal):
                hidden = torch.ones(T, T, dtype=torch.bool).triu(1) & is_causal
                return (query @ key.mT).masked_fill(hidden, -math.inf).softmax(-1) @ value

            runs = [run(ours, spoilt), run(softmax, spoilt)]
            rest = torch.arange(T)[~torch.isin(torch.arange(T), torch.tensor(rows))]
            for found in runs:
                assert all(t[:, :, rows].isnan().all() for t in found)
            same = torch.equal if problem == Transport() else nearly
            for mine, before in zip(runs[0], run(ours, q), strict=True):
                assert same(mine[:, :, rest], before[:, :, rest])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000])
@by_backend
def test_every_bit_pattern_of_nan_stays_nan(backend, bits):
    """An exponential that is computed from bits must not turn some NaN into a number."""
    (bad,) = struct.unpack("=f", struct.pack("=I", bits))
    q, k, v = (normal(seed, 1, 1, 40, 8) for seed in range(3))
    q[0, 0, 5] = torch.tensor([bits - 2**32 if bits >= 2**31 else bits], dtype=torch.int32).view(torch.float32)
    assert math.isnan(bad) and q[0, 0, 5].isnan().all()
    for regularizer in (KL(), Tsallis(1.3), Tsallis(1.5)):
        out = regard.attention(q, k, v, problem=Transport(regularizer), backend=backend)
        assert out[0, 0, 5].isnan().all() and out[0, 0, 6].isfinite().all()


def test_at_temperature_0():
    q, k, v = (normal(seed, 1, 1, 5, 8).requires_grad_() for seed in range(3))
    with torch.no_grad():
        q[0, 0, 2, 1] = math.nan
    out = regard.attention(q, k, v, problem=Transport(temperature=0.0))
    (dq,) = torch.autograd.grad(out.sum(), q)
    for found in (out[0, 0], dq[0, 0]):
        assert found[2].isnan().all() and found[[0, 1, 3, 4]].isfinite().all()


@by_backend
def test_in_forward_mode(backend):
    given = spoilt("query")
    query, rest = given["query"], (given["key"], given["value"])
    for regularizer in REGULARIZERS.values():
        marginal = Free(0.5) if isinstance(regularizer, FermiDirac) else Rows()
        problem = Transport(regularizer, marginal=marginal)

        def function(query, problem=problem):
            return regard.attention(query, *rest, problem=problem, backend=backend)

        _, tangent = torch.autograd.functional.jvp(function, query, torch.ones_like(query), strict=False)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
            forward = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
        for found in (tangent, forward):
            assert found[0, 1, 2].isnan().all() and found[0, 0].isfinite().all()


@by_backend
def test_parameters_that_are_nan_raise(backend):
    q, k, v = (normal(seed, 1, 2, 5, 8) for seed in range(3))
    bad = torch.tensor([1.5, math.nan])
    for make in (
        lambda: Transport(temperature=bad.view(2, 1, 1)),
        lambda: Transport(Tsallis(bad)),
        lambda: Transport(marginal=Rows(sink=bad)),
        lambda: Transport(marginal=Rows(relax=bad)),
        lambda: Transport(marginal=Free(bad)),
    ):
        with pytest.raises(ValueError, match=r"expected .*, got nan"):
            regard.attention(q, k, v, problem=make(), backend=backend)
