"""`topk`, `weights_at` and `block_mass` of the native engine against the definition in float64, on every instruction
set.

The tolerance is a multiple of the reference backend's own error in the same dtype, plus a few float32 units.
"""

import contextlib
import math
import os
import subprocess
import sys

import pytest
import torch

import regard
from regard import ALiBi, Bias, Causal, Documents, FermiDirac, Free, Rows, Transport, Tsallis, Window
from regard.backends import BACKENDS, reference
from regard.backends.native import engine
from support.memory import PEAK, reads_peak
from support.threads import with_threads

pytest.importorskip("regard._native", reason="the native engine was not built")
pytestmark = pytest.mark.usefixtures("isa", "poison")

FACTOR, FLOOR = 4.0, 4e-6
END = "bottom_right"


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def raised(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def native_only():
    """Without the reference backend's blocks, to which a readout that the engine does not serve would fall back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_weight_blocks", None)
        yield


class Case:
    """Query, key and the other arguments of a readout. `arguments` makes these in the case's dtype or in float64."""

    def __init__(self, arguments, B=2, H=4, Hkv=2, Tq=40, Tk=40, D=16, dtype=torch.float32, seed=0):
        self.arguments = arguments
        self.query = normal(seed, B, Tq, H, D).to(dtype).transpose(1, 2)
        self.key = normal(seed + 1, B, Hkv, Tk, 2 * D).to(dtype)[..., D:]

    def call(self, function, *more, as_double=False):
        change = raised if as_double else lambda x: x
        query, key = change(self.query), change(self.key)
        return function(query, key, *more, enable_gqa=True, **self.arguments(change))

    def plan(self, as_double):
        """The whole plan by the reference backend."""
        every = torch.arange(self.key.shape[2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BACKENDS["native"], "unsupported", lambda form, names: "not in this comparison")
            return self.call(regard.weights_at, every, as_double=as_double).double()

    def check(self):
        truth, plain = self.plan(True), self.plan(False)
        with native_only():
            self.compare(truth, plain)

    def compare(self, truth, plain):
        Tk = truth.shape[-1]
        allowed = FACTOR * (plain - truth).abs().max().item() + FLOOR if truth.numel() else 0.0

        def close(found, expected, factor=1):
            assert found.shape == expected.shape
            gap = (found.double() - expected).abs()
            assert not gap.numel() or gap.max().item() <= factor * allowed, (gap.max().item(), allowed)

        generator = torch.Generator().manual_seed(1)
        index = torch.randint(max(1, Tk), (*truth.shape[:3], 3 if Tk else 0), generator=generator)
        close(self.call(regard.weights_at, index), truth.gather(-1, index))
        for n in {0, min(1, Tk), min(5, Tk), min(60, Tk), Tk}:
            weights, keys = self.call(regard.topk, n)
            close(weights, truth.topk(n, -1).values)
            close(truth.gather(-1, keys), weights.double())
            assert (weights.diff(dim=-1) <= 0).all()
            ordered = keys.sort(-1).values
            assert n < 2 or (ordered.diff(dim=-1) > 0).all()  # each key once
            ties = (weights[..., 1:] == weights[..., :-1]) & (weights[..., 1:] > 0)
            assert (keys[..., 1:] > keys[..., :-1])[ties].all()
            if n == Tk:  # both functions give the same bits
                assert torch.equal(self.call(regard.weights_at, keys), weights)
        for block in (1, 7, 32, 1000):
            sums = torch.nn.functional.pad(truth, (0, -Tk % block, 0, -truth.shape[2] % block))
            rows, columns = sums.shape[2] // block, sums.shape[3] // block
            pooled = sums.reshape(*truth.shape[:2], rows, block, columns, block).sum((3, 5))
            count = torch.full((rows, 1), block).clamp(max=truth.shape[2])
            count[-1:] = truth.shape[2] - (rows - 1) * block
            close(self.call(regard.block_mass, block), pooled / count, factor=min(block, max(1, Tk)))


REGULARIZERS = {
    "KL": {},
    "entmax 1.5": {"regularizer": Tsallis(1.5)},
    "sparsemax": {"regularizer": Tsallis(2.0)},
    "alpha 1.3": {"regularizer": Tsallis(1.3)},
    "alpha 1.1": {"regularizer": Tsallis(1.1)},
    "sigmoid": {"regularizer": FermiDirac(), "marginal": Free(-2.0)},
}
# The rest of a problem besides the regulariser, and arguments, for H heads. `to` converts tensors to the dtype.
TERMS = {
    "plain": lambda to, H, Tq, Tk: ({}, {}),
    "causal": lambda to, H, Tq, Tk: ({"prior": Causal(END)}, {}),
    "window": lambda to, H, Tq, Tk: ({"prior": Window(9, 3, alignment=END)}, {}),
    "documents": lambda to, H, Tq, Tk: (
        {"prior": Documents(torch.arange(Tq) // 11 - 1, torch.arange(Tk) // 13 - 1)},
        {},
    ),
    "alibi": lambda to, H, Tq, Tk: ({"prior": Causal(END) * ALiBi(to(uniform(1, H)))}, {}),
    "bias": lambda to, H, Tq, Tk: (
        {"prior": Bias(to(normal(2, H, 1, Tk))), "temperature": to(uniform(3, H, 1, 1) + 0.5)},
        {"attn_mask": to(normal(4, Tq, Tk).masked_fill(uniform(5, Tq, Tk) < 0.3, -math.inf)), "softcap": 3.0},
    ),
    "mask": lambda to, H, Tq, Tk: ({}, {"attn_mask": uniform(6, 1, Tq, Tk) > 0.7}),
    "sink": lambda to, H, Tq, Tk: ({"prior": Causal(END), "marginal": Rows(sink=to(normal(7, H)))}, {}),
    "relax": lambda to, H, Tq, Tk: ({"marginal": Rows(relax=to(uniform(8, H) + 1))}, {}),
    "mass": lambda to, H, Tq, Tk: ({"marginal": Rows(mass=2.0)}, {}),
}
SHAPES = [
    {"Tq": 40, "Tk": 40},
    {"Tq": 130, "Tk": 70, "H": 2, "D": 9},
    {"Tq": 3, "Tk": 300, "H": 6},
    {"Tq": 70, "Tk": 260, "H": 2, "Hkv": 1},
    {"Tq": 1, "Tk": 150, "B": 3},
]


def case(regularizer, term, **shape):
    sizes = (shape.get("H", 4), shape["Tq"], shape["Tk"])

    def arguments(to):
        parts, more = TERMS[term](to, *sizes)
        return {"problem": Transport(**(parts | REGULARIZERS[regularizer])), **more}

    return Case(arguments, **shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_agrees_with_the_definition(regularizer, term, shape):
    if regularizer == "sigmoid" and term in ("sink", "relax", "mass"):
        pytest.skip("the native engine has Fermi-Dirac with a free marginal only")
    case(regularizer, term, **shape).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("regularizer", ["KL", "entmax 1.5", "sigmoid"])
def test_dtypes(regularizer, dtype):
    case(regularizer, "causal", Tq=50, Tk=60, dtype=dtype).check()


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_empty(regularizer, sizes):
    case(regularizer, "plain", Tq=sizes[0], Tk=sizes[1]).check()


def readouts(query, key, n=9, block=16, **arguments):
    """The results of all three functions."""
    with native_only():
        weights, keys = regard.topk(query, key, n, enable_gqa=True, **arguments)
        every = torch.arange(key.shape[2]).flip(0)
        return [
            *(weights, keys),
            regard.weights_at(query, key, every, enable_gqa=True, **arguments),
            regard.block_mass(query, key, block, enable_gqa=True, **arguments),
        ]


@pytest.mark.parametrize("invalid", [math.nan, math.inf])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_invalid_values_in_masked_keys_have_no_effect(regularizer, invalid):
    query, key = normal(0, 2, 4, 130, 16), normal(1, 2, 2, 130, 16)
    unread = torch.zeros(130, dtype=torch.bool)
    unread[[0, 3, 4, 50]] = True
    unread[97:] = True
    spoilt = key.masked_fill(unread[:, None], invalid)
    arguments = {"attn_mask": ~unread, "problem": Transport(**REGULARIZERS[regularizer])}
    for clean, found in zip(readouts(query, key, **arguments), readouts(query, spoilt, **arguments), strict=True):
        assert torch.equal(clean, found)


def test_rows_without_keys():
    query, key = normal(0, 1, 2, 40, 8), normal(1, 1, 2, 40, 8)
    query[:, :, 30] = math.nan  # this query has no keys
    mask = torch.ones(40, 40, dtype=torch.bool)
    mask[[0, 30]] = False
    for parts in REGULARIZERS.values():
        weights, keys, chosen, _ = readouts(query, key, attn_mask=mask, problem=Transport(**parts))
        assert (weights[:, :, [0, 30]] == 0).all() and (chosen[:, :, [0, 30]] == 0).all()
        assert torch.equal(keys[0, 0, 30], torch.arange(9))
        assert (weights[:, :, 1] > 0).any() and weights.isfinite().all()


def test_nan_ranks_first():
    query, key = normal(0, 1, 1, 30, 8), normal(1, 1, 1, 200, 8)
    query[:, :, 7] = math.nan
    weights, keys, chosen, _ = readouts(query, key)
    assert weights[0, 0, 7].isnan().all() and chosen[0, 0, 7].isnan().all()
    assert torch.equal(keys[0, 0, 7], torch.arange(9))
    assert weights[0, 0, [6, 8]].isfinite().all()


def test_ties_are_ordered_by_key():
    key = normal(1, 1, 1, 10, 8).repeat(1, 1, 50, 1)  # each key occurs fifty times
    weights, keys = regard.topk(normal(0, 1, 1, 30, 8), key, 75)
    assert (weights[..., :50] == weights[..., :1]).all() and (weights[..., 50:] < weights[..., :1]).all()
    assert (keys.unflatten(-1, (3, 25)).diff(dim=-1) == 10).all()
    assert (keys[..., 50] < 10).all()


@pytest.mark.parametrize("order", ["rising", "falling", "random"])
def test_long_lists(order):
    """Weights in any order, lists of any length, against a sort."""
    T = 2000
    scores = torch.linspace(0, 8, T)
    scores = {"rising": scores, "falling": scores.flip(0), "random": scores[torch.randperm(T)]}[order]
    query, key = torch.ones(1, 1, 3, 1), scores[None, None, :, None]
    for n in (1, 2, 47, 48, 49, 1000, T - 1, T):
        for dtype in (torch.float32, torch.float64):
            weights, keys = regard.topk(query.to(dtype), key.to(dtype), n, scale=1.0)
            expected = scores.to(dtype).softmax(0)
            assert torch.equal(keys[0, 0, 1], scores.argsort(descending=True)[:n])
            assert torch.allclose(weights[0, 0, 1], expected.sort(descending=True).values[:n], rtol=1e-5)


@pytest.mark.parametrize(
    "shape", [{"Tq": 200, "Tk": 300}, {"Tq": 2, "Tk": 3000}, {"Tq": 600, "Tk": 600, "H": 1, "Hkv": 1}]
)
@pytest.mark.parametrize("term", ["causal", "documents", "bias"])
@pytest.mark.parametrize("regularizer", ["KL", "entmax 1.5", "alpha 1.1"])
def test_threads_do_not_change_a_bit(regularizer, term, shape):
    read = case(regularizer, term, **shape)

    def everything():
        pooled = [read.call(regard.block_mass, block) for block in (5, 64)]
        return [*read.call(regard.topk, 20), *pooled, read.call(regard.weights_at, torch.arange(shape["Tk"]))]

    one, *others = with_threads(everything)
    for other in others:
        assert all(map(torch.equal, other, one))


def test_traced_tensors_use_the_reference_backend():
    query, key = normal(0, 1, 2, 20, 8), normal(1, 1, 2, 20, 8)

    def loss(query):
        weights, _ = regard.topk(query, key, 3)
        return (query**2).sum() + weights.sum()

    assert torch.equal(torch.func.grad(loss)(query), 2 * query)


def test_index_is_not_copied(monkeypatch):
    """A broadcast index is read in place."""
    seen = []
    plain = engine.Record.tensor
    monkeypatch.setattr(engine.Record, "tensor", lambda self, n, t: (seen.append((n, t)), plain(self, n, t))[1])
    index = torch.arange(5)
    regard.weights_at(normal(0, 2, 3, 7, 8), normal(1, 2, 3, 9, 8), index)
    assert dict(seen)["index"].data_ptr() == index.data_ptr()


@reads_peak
def test_memory_does_not_grow_with_the_plan(isa):
    script = (
        PEAK
        + """
import torch, regard
T = 16384
q, k = torch.randn(1, 1, T, 8), torch.randn(1, 1, T, 8)
index = torch.arange(4)
def read(T, problem):
    a, b = q[:, :, :T], k[:, :, :T]
    regard.topk(a, b, 4, problem=problem), regard.weights_at(a, b, index, problem=problem)
    regard.block_mass(a, b, 512, problem=problem)
problems = regard.Transport(), regard.Transport(regard.Tsallis(1.5))
for problem in problems:
    read(512, problem)
before = peak()
for problem in problems:
    read(T, problem)
print(peak() - before)
"""
    )
    environment = os.environ | {"REGARD_ISA": isa, "OMP_NUM_THREADS": "2"}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 64, found.stdout  # MB; the plan has 1024
