"""The native engine against the definition in float64: every statistic, every gradient, on every instruction set here.

The tolerance is a multiple of the reference backend's own error in the same dtype, plus a few float32 units.
"""

import dataclasses
import math
import os
import random
import struct
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import ALiBi, AuxRequest, Bias, Causal, Documents, FermiDirac, Free, Rows, Transport, Tsallis, Window
from regard.backends import BACKENDS
from regard.backends.native import backend
from support.threads import with_threads

engine = pytest.importorskip("regard._native", reason="the native engine was not built")
pytestmark = pytest.mark.usefixtures("isa", "poison")

NAMES = regard.statistics.ROW_STATISTICS
stock_attention = F.scaled_dot_product_attention
FACTOR, FLOOR = 4.0, 4e-6


def error(found, truth, together=False):
    """Largest error, relative to 1 + |truth| of each entry, or with `together` of the largest entry. Equal infinities
    and NaN do not count."""
    found = found.double()
    same = (found == truth) | (found.isnan() & truth.isnan())
    size = truth.abs().max() if together and truth.numel() else truth.abs()
    gap = torch.where(same, 0.0, (found - truth).abs() / (1 + size))
    return gap.nan_to_num(nan=math.inf).max().item() if found.numel() else 0.0


def raised(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Case:
    """Tensors (leaves) by name, and a function that makes the arguments of a call from them."""

    def __init__(self, tensors, call, statistics=NAMES, **fixed):
        self.tensors, self.call, self.statistics, self.fixed = tensors, call, statistics, fixed

    def run(self, backend, dtype=None, gradients=True):
        tensors = {n: t.detach() if dtype is None else raised(t.detach(), dtype) for n, t in self.tensors.items()}
        learned = [t.requires_grad_() for t in tensors.values() if gradients and t.is_floating_point()]
        request = AuxRequest(**dict.fromkeys(self.statistics, True))
        arguments = dict(tensors)
        q, k, v = (arguments.pop(n) for n in ("q", "k", "v"))
        torch.manual_seed(11)
        out, aux = regard.attention(
            q, k, v, return_aux=request, backend=backend, enable_gqa=True, **self.call(**arguments), **self.fixed
        )
        results = {"out": out} | {n: getattr(aux, n) for n in self.statistics}
        if gradients:
            generator = torch.Generator().manual_seed(7)
            loss = 0.0
            for name in ("out", "lse", "entropy"):
                if name in results:
                    weight = torch.randn(results[name].shape, generator=generator).to(results[name].dtype)
                    finite = results[name].masked_fill(results[name].isinf(), 0.0)
                    loss = loss + (finite * weight).sum()
            found = torch.autograd.grad(loss, learned)
            names = [n for n, t in tensors.items() if t.is_floating_point()]
            results |= {f"grad {n}": g for n, g in zip(names, found, strict=True)}
        return {n: t.detach() for n, t in results.items()}

    def check(self, gradients=True):
        found = self.run("native", gradients=gradients)
        truth = self.run("torch", torch.float64, gradients)
        self.judge(found, truth, self.run("torch", gradients=gradients))

    differences: tuple[str, ...] = ("value_spread", "cost")  # differences of larger numbers, summed key by key
    many = 5  # how much more error they may have

    def judge(self, found, truth, plain, factor=FACTOR):
        half = self.tensors["q"].dtype in (torch.bfloat16, torch.float16)
        for name, value in found.items():
            total = max(1.0, truth[name].abs().nan_to_num(posinf=0).max().item()) if name.startswith("grad") else 1.0
            # Gradients of shared parameters are long sums, so the error is relative to the largest entry.
            shared = name.startswith("grad") and name not in ("grad q", "grad k", "grad v")
            lost = error(plain[name], truth[name], shared)
            floor = FLOOR * (20 if shared else 5 if total > 1 else self.many if name in self.differences else 1)
            if half:
                floor = (
                    torch.finfo(self.tensors["q"].dtype).eps if name == "out" or name.startswith("grad") else 5 * FLOOR
                )
            wrong = error(value, truth[name], shared)
            assert wrong <= factor * lost + floor, (name, wrong, lost, engine.isa())


def heads(generator, B, H, T, D, layout, dtype):
    """[B, H, T, D] in one of the memory layouts that models use."""
    if layout == "bhtd":
        return torch.randn(B, H, T, D, generator=generator).to(dtype)
    if layout == "bthd":
        return torch.randn(B, T, H, D, generator=generator).to(dtype).transpose(1, 2)
    if layout == "bhdt":  # last dimension strided
        return torch.randn(B, H, D, T, generator=generator).to(dtype).transpose(2, 3)
    return torch.randn(B, H, T, 3 * D + 1, generator=generator).to(dtype)[
        ..., D : 2 * D
    ]  # "cut" from a fused projection


def qkv(seed, B=2, H=4, Hkv=2, Tq=40, Tk=40, D=16, Dv=16, layout="bhtd", dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return {
        "q": heads(g, B, H, Tq, D, layout, dtype),
        "k": heads(g, B, Hkv, Tk, D, layout, dtype),
        "v": heads(g, B, Hkv, Tk, Dv, layout, dtype),
    }


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


END = "bottom_right"

PROBLEMS = {
    "plain": lambda H, Tq, Tk: ({}, dict),
    "causal": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Causal(END))}),
    "is_causal": lambda H, Tq, Tk: ({}, lambda: {"is_causal": True}),
    "window": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Window(9, 3, alignment=END))}),
    "strict past": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Window(9, -1, alignment=END))}),
    "alibi": lambda H, Tq, Tk: (
        {"slopes": uniform(1, H)},
        lambda slopes: {"problem": Transport(prior=Causal(END) * ALiBi(slopes))},
    ),
    "documents": lambda H, Tq, Tk: (
        {"ids": torch.arange(Tq) // 11 - 1, "key_ids": torch.arange(Tk) // 13 - 1},
        lambda ids, key_ids: {"problem": Transport(prior=Documents(ids, key_ids))},
    ),
    "mask": lambda H, Tq, Tk: ({"mask": uniform(2, 2, 1, Tq, Tk) > 0.7}, lambda mask: {"attn_mask": mask}),
    "padding": lambda H, Tq, Tk: ({"mask": uniform(3, 2, 1, 1, Tk) > 0.4}, lambda mask: {"attn_mask": mask}),
    "float mask": lambda H, Tq, Tk: (
        {
            "mask": normal(4, H, Tq, Tk).masked_fill(uniform(5, H, Tq, Tk) < 0.3, -math.inf),
            "tau": uniform(6, H, 1, 1) + 0.5,
        },
        lambda mask, tau: {"attn_mask": mask, "problem": Transport(temperature=tau)},
    ),
    "biases": lambda H, Tq, Tk: (
        {
            "a": normal(7, 2, 1, Tq, Tk),
            "b": normal(8, H, 1, Tk),
            "c": normal(9, H, Tq, 1),
            "tau": uniform(10, Tq, 1) + 0.5,
        },
        lambda a, b, c, tau: {"problem": Transport(prior=Bias(a) * Bias(b) * Bias(c), temperature=tau)},
    ),
    "sink": lambda H, Tq, Tk: (
        {"sink": normal(11, H), "tau": uniform(12, 1) + 0.5},
        lambda sink, tau: {"problem": Transport(prior=Causal(END), marginal=Rows(sink=sink), temperature=tau)},
    ),
    "sink, bias": lambda H, Tq, Tk: (
        {"sink": normal(11, H), "b": normal(8, H, 1, Tk)},
        lambda sink, b: {"problem": Transport(prior=Bias(b), marginal=Rows(sink=sink))},
    ),
    "relax": lambda H, Tq, Tk: (
        {"rho": uniform(13, H) + 1, "tau": uniform(14, H, 1, 1) + 0.5, "b": normal(15, Tk)},
        lambda rho, tau, b: {"problem": Transport(prior=Bias(b), marginal=Rows(relax=rho), temperature=tau)},
    ),
    "free": lambda H, Tq, Tk: (
        {"offset": normal(16, H) - math.log(Tk), "tau": uniform(17, 1) + 0.5},
        lambda offset, tau: {"problem": Transport(marginal=Free(offset=offset), temperature=tau)},
    ),
    "mass": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(marginal=Rows(mass=2.0))}),
    "softcap": lambda H, Tq, Tk: (
        {"slopes": uniform(18, H)},
        lambda slopes: {"softcap": 2.0, "problem": Transport(prior=ALiBi(slopes, alignment=END))},
    ),
}

SHAPES = [
    {"Tq": 2, "Tk": 2, "D": 1, "Dv": 1},
    {"Tq": 24, "Tk": 96, "D": 32, "Dv": 32},
    {"Tq": 53, "Tk": 53, "D": 17, "Dv": 9, "layout": "bthd"},
    {"Tq": 130, "Tk": 70, "D": 64, "Dv": 64, "layout": "cut", "Hkv": 4},
    {"Tq": 3, "Tk": 700, "D": 8, "Dv": 40, "layout": "bhdt"},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_the_definition(name, shape):
    tensors, call = PROBLEMS[name](4, shape["Tq"], shape["Tk"])
    Case(qkv(1, **shape) | tensors, call).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["plain", "causal", "biases", "sink", "mask"])
def test_dtypes(name, dtype):
    tensors, call = PROBLEMS[name](4, 50, 60)
    Case(qkv(2, Tq=50, Tk=60, dtype=dtype) | tensors, call).check()


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (80, 24), (33, 50)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_half_types(dtype, D, Dv):
    """Calls with few rows read keys and values in place, in another order."""
    for Tq, Tk in ((1, 75), (2, 1500)):
        tensors, call = PROBLEMS["causal"](4, Tq, Tk)
        Case(qkv(2, Hkv=1, Tq=Tq, Tk=Tk, D=D, Dv=Dv, dtype=dtype) | tensors, call).check()


# --- bfloat16: processors that have dot products of it take other code (csrc/engine/bf16_tiles.h) ---------------------

# Weights are rounded where they are computed, in a second pass where a statistic reads them, or not (value_spread).
REQUESTS = {
    "output": (),
    "telemetry": ("lse", "entropy", "max_scores", "score_variance"),
    "statistics": tuple(name for name in NAMES if name != "value_spread"),
}
HALF_SHAPES = [
    {"Tq": 53, "Tk": 67, "D": 17, "Dv": 9, "layout": "bthd"},  # odd: copied rows, half a pair at the end
    {"Tq": 130, "Tk": 300, "D": 64, "Dv": 64, "layout": "cut", "Hkv": 1},
    {"Tq": 60, "Tk": 1100, "D": 128, "Dv": 40, "layout": "bhdt"},  # keys in several parts
]


class PerMass(Case):
    """Outputs per mass of their row, which has no bound in relaxed and free rows: the error of a rounded weight is
    relative to the mass."""

    def run(self, backend, dtype=None, gradients=True):
        results = super().run(backend, dtype, gradients)
        named = Case(self.tensors, self.call, ("mass",), **self.fixed)
        mass = results["mass"] if "mass" in results else Case.run(named, backend, dtype, False)["mass"]
        return results | {"out": results["out"].double() / mass[..., None].clamp(min=1.0)}


@pytest.mark.parametrize("shape", HALF_SHAPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_bfloat16_products(name, shape):
    tensors, call = PROBLEMS[name](4, shape["Tq"], shape["Tk"])
    turn = list(PROBLEMS).index(name) + HALF_SHAPES.index(shape)
    request = list(REQUESTS)[turn % 3]
    dropout = 0.3 if turn % 4 == 3 else 0.0
    kind = PerMass if name in ("relax", "free") else Case
    kind(qkv(2, dtype=torch.bfloat16, **shape) | tensors, call, REQUESTS[request], dropout_p=dropout).check()


def test_bfloat16_with_any_number_of_queries():
    """Against twice the loss of PyTorch's own kernel, for each number of rows in a block, and various head sizes."""
    for Tq in range(1, 101):
        D = (64, 128, 40, 7, 96)[Tq % 5]
        tensors = qkv(Tq, B=1, H=2, Hkv=2, Tq=Tq, Tk=130, D=D, Dv=D, dtype=torch.bfloat16)
        inputs = [tensors[n] for n in "qkv"]
        truth = stock_attention(*(t.double() for t in inputs))
        lost = (stock_attention(*inputs) - truth).norm()
        wrong = (regard.attention(*inputs, backend="native") - truth).norm()
        assert wrong <= 2 * lost, (Tq, D, wrong, lost, engine.isa())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "D"), [(1000, 64), (700, 128)])
def test_bfloat16_loses_at_most_twice_what_pytorch_loses(T, D, causal):
    tensors = qkv(3, B=1, H=2, Tq=T, Tk=T, D=D, Dv=D, dtype=torch.bfloat16)
    grad = normal(4, 1, 2, T, D).bfloat16()

    def run(attention, dtype):
        leaves = [tensors[n].to(dtype).requires_grad_() for n in "qkv"]
        out = attention(*leaves, is_causal=causal, enable_gqa=True)
        return [t.detach().double() for t in (out, *torch.autograd.grad(out, leaves, grad.to(dtype)))]

    truth = run(stock_attention, torch.float64)
    plain = run(stock_attention, torch.bfloat16)
    found = run(lambda *inputs, **kind: regard.attention(*inputs, backend="native", **kind), torch.bfloat16)
    for name, right, stock, ours in zip(("out", "q", "k", "v"), truth, plain, found, strict=True):
        assert (ours - right).norm() <= 2 * (stock - right).norm(), name
        assert (ours - right).abs().max() <= 2 * (stock - right).abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prior", [None, Causal(), Window(40, 3)], ids=["full", "causal", "window"])
def test_a_score_is_the_same_number_in_every_pass(prior, dtype):
    """At exponents above 1e5, a score that differs in its last bit changes its weight by a hundredth. The weights that
    backward and the readout compute again from the price of the row sum to 1 all the same."""
    problem = Transport(prior=prior, temperature=1e-3)
    for D in (64, 17):
        query, key, value = qkv(3, H=2, Hkv=1, Tq=150, Tk=150, D=D, Dv=8, dtype=dtype).values()
        query = 100 * query
        arguments = {"problem": problem, "enable_gqa": True, "backend": "native"}
        _, aux = regard.attention(query, key, value, return_aux=AuxRequest(key_mass=True, max_scores=True), **arguments)
        assert aux.max_scores.max() > 100  # over the temperature: 1e5
        assert (aux.key_mass.sum(-1) - 150).abs().max() < 1e-3
        weights, _ = regard.topk(query, key, 150, problem=problem, enable_gqa=True)
        assert (weights.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("mass", [1.0, 2.5])
def test_bfloat16_gradients_of_parameters_are_not_rounded(mass):
    """The gradient of a bias per row is a sum of terms that cancel."""
    tensors = qkv(2, Tq=60, Tk=150, D=20, Dv=32, dtype=torch.bfloat16) | {
        "b": normal(4, 4, 60, 1),
        "tau": uniform(5, 1),
    }
    case = Case(
        tensors,
        lambda b, tau: {"problem": Transport(prior=Bias(b), marginal=Rows(mass=mass), temperature=tau + 0.5)},
        ("lse",),
    )
    found, truth, plain = case.run("native"), case.run("torch", torch.float64), case.run("torch")
    for name in ("grad b", "grad tau"):
        lost = error(plain[name], truth[name], True)
        assert error(found[name], truth[name], True) <= FACTOR * lost + 20 * FLOOR, name


@pytest.mark.parametrize("kind", ["padding", "window", "causal", "odd window"])
def test_invalid_values_in_masked_keys_of_pairs(kind):
    """Keys lie in pairs, of which one half may be masked."""
    T = 131
    tensors = qkv(6, Tq=T, Tk=T, D=20, Dv=12, dtype=torch.bfloat16)
    unread = torch.zeros(T, dtype=torch.bool)
    if kind == "padding":
        unread[[0, 3, 4, 50, 77, 130]] = True
        unread[97:] = True
        call = {"attn_mask": ~unread}
    elif kind == "causal":
        unread[61:] = True
        call, tensors["q"] = {"is_causal": True}, tensors["q"][:, :, :61]
    else:
        tensors["q"] = tensors["q"][:, :, -37:]
        left = 12 if kind == "window" else 13
        unread[: T - 37 - left] = True
        call = {"problem": Transport(prior=Window(left, 0, alignment=END))}
    for statistics in REQUESTS.values():
        clean = Case(tensors, lambda: call, statistics).run("native")
        for name in ("k", "v"):
            for invalid in (math.nan, math.inf):
                spoilt = tensors | {name: tensors[name].clone()}
                spoilt[name][:, :, unread] = invalid
                for n, value in Case(spoilt, lambda: call, statistics).run("native").items():
                    assert value.isfinite().all() and torch.equal(value, clean[n]), (n, name, invalid)


def test_a_block_of_rows_that_begins_with_half_a_pair():
    """With vectors of 16, eight heads of 13 queries are blocks of 48 rows. The last block has queries 5 ... 12 of the
    last head: its first key, 43, is the second half of a pair, and no row of the block reads the first."""
    tensors = qkv(6, B=1, H=8, Hkv=1, Tq=13, Tk=60, dtype=torch.bfloat16)
    call = {"problem": Transport(prior=Window(9, 0, alignment=END))}
    spoilt = tensors | {"v": tensors["v"].clone()}
    spoilt["v"][:, :, 42] = math.nan
    for statistics in REQUESTS.values():
        case = Case(tensors, lambda: call, statistics)
        case.check()
        if engine.isa().startswith("x86_64_v4"):
            clean = case.run("native", gradients=False)["out"]
            found = Case(spoilt, lambda: call, statistics).run("native", gradients=False)["out"]
            assert found[:, :, :5].isnan().all()
            assert torch.equal(found[:, 7, 5:], clean[:, 7, 5:])


@pytest.mark.parametrize("where", [("q", 7), ("k", 50), ("v", 66)])
def test_bfloat16_nan_is_visible(where):
    tensors = qkv(6, H=2, Hkv=2, Tq=53, Tk=67, D=20, Dv=12, dtype=torch.bfloat16)
    tensors[where[0]][0, 1, where[1], 3] = math.nan
    out = Case(tensors, dict, ()).run("native", gradients=False)["out"]
    reads = torch.zeros_like(out, dtype=torch.bool)
    reads[0, 1, 7 if where[0] == "q" else slice(None), 3 if where[0] == "v" else slice(None)] = True
    assert torch.equal(out.isnan(), reads)


@pytest.mark.parametrize("name", PROBLEMS)
def test_bfloat16_threads_do_not_change_a_bit(name):
    tensors, call = PROBLEMS[name](4, 200, 700)
    for statistics in REQUESTS.values():
        case = Case(qkv(9, Tq=200, Tk=700, dtype=torch.bfloat16) | tensors, call, statistics)
        one, *others = with_threads(lambda case=case: case.run("native"))
        for other in others:
            for n, value in other.items():
                assert torch.equal(value, one[n]), n


AMX = "has no kernels for AMX, which PyTorch uses for plain softmax in bfloat16"


def test_plain_bfloat16_is_left_to_pytorch_on_processors_with_amx(monkeypatch):
    """Only what PyTorch's own kernel serves, and only if no statistic is requested."""
    q = torch.randn(1, 2, 64, 16).bfloat16()
    plain = {"query": q, "key": q, "value": q}
    left = [{}, {"is_causal": True}, {"problem": Transport(prior=Causal())}]
    kept = [
        {"return_aux": AuxRequest(lse=True)},
        {"softcap": 2.0},
        {"dropout_p": 0.1},
        {"attn_mask": torch.ones(64, 64, dtype=torch.bool)},
        {"problem": Transport(prior=Window(9, 3))},
        {"problem": Transport(Tsallis(1.5))},
        {"problem": Transport(marginal=Rows(sink=0.0))},
        {"problem": Transport(temperature=torch.ones(2, 1, 1))},
        {"query": q[:, :, :8]},
        {"value": q[..., :8]},
        {"query": q.float(), "key": q.float(), "value": q.float()},
    ]
    for forced, chosen in (("1", "sdpa"), ("0", "native")):
        monkeypatch.setenv("REGARD_AMX", forced)
        for arguments in left:
            choice = regard.select_backend(**plain, **arguments)
            assert choice.backend == chosen, arguments
            assert choice.reasons.get("native") == (AMX if forced == "1" else None)
        for arguments in kept:
            assert regard.select_backend(**plain | arguments).backend == "native", (forced, arguments)
        assert regard.select_backend(**plain, backend="native").backend == "native"
    monkeypatch.setenv("REGARD_AMX", "yes")
    with pytest.raises(ValueError, match="REGARD_AMX: expected 0 or 1, got yes"):
        regard.select_backend(**plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("Tq", [1, 40])
def test_scores_at_the_edge_of_float32(Tq, dtype):
    """Up to 2.3e38, a score over its temperature is as good as in float64. Beyond, its row is NaN, never a number, and
    other rows do not change."""
    query = torch.ones(1, 1, Tq, 4).to(dtype)
    key = torch.zeros(1, 1, 5, 4)
    key[0, 0, :, 0] = torch.tensor([1.0, 0.5, 0.75, -1.0, 0.125])
    value = normal(1, 1, 1, 5, 3).to(dtype)
    request = AuxRequest(lse=True, entropy=True, max_scores=True)
    for size, temperature in ((2.2e38, None), (3.3e38, None), (1.0, 1e-37), (1.0, 5e-39), (1.0, 2e-39)):
        rows = torch.full((1, 1, Tq, 1), temperature or 1.0)
        rows[:, :, 1:] = 1.0 if temperature else 1e3
        out, aux = regard.attention(
            query, (size * key).to(dtype), value, scale=1.0, return_aux=request, backend="native",
            problem=Transport(temperature=rows),
        )  # fmt: skip
        over = size / (temperature or 1.0) > 2.36e38
        for result in (out[0, 0, 0], aux.lse[0, 0, 0], aux.entropy[0, 0, 0]):
            assert result.isnan().all() if over else result.isfinite().all(), (size, temperature)
        assert over or torch.equal(out[0, 0, 0], value[0, 0, 0])
        assert out[0, 0, 1:].isfinite().all() and aux.lse[0, 0, 1:].isfinite().all()


@pytest.mark.parametrize("seed", range(20))
def test_random_problems(seed):
    r = random.Random(seed)
    Hkv = r.choice([1, 2, 3])
    H = Hkv * r.choice([1, 1, 2, 4])
    Tq = r.choice([1, 2, 7, 23, 25, 64, 150])
    Tk = r.choice([1, 5, 47, 97, 200, 1500])
    shape = {"H": H, "Hkv": Hkv, "Tq": Tq, "Tk": Tk, "D": r.choice([1, 3, 16, 48, 80]), "Dv": r.choice([1, 5, 16, 33])}
    name = r.choice([n for n in PROBLEMS if n != "is_causal"])
    tensors, call = PROBLEMS[name](H, Tq, Tk)
    Case(qkv(seed, layout=r.choice(["bhtd", "bthd", "bhdt", "cut"]), **shape) | tensors, call).check()


@pytest.mark.parametrize("name", ["plain", "causal", "mask"])
def test_dropout_is_the_shared_mask(name):
    tensors, call = PROBLEMS[name](4, 40, 50)
    Case(qkv(3, Tq=40, Tk=50) | tensors, call, dropout_p=0.3).check()


def test_large_head_sizes():
    Case(qkv(4, H=2, Hkv=1, Tq=30, Tk=40, D=256, Dv=255), lambda: {"is_causal": False}).check()


def test_variances_survive_a_common_offset():
    tensors = qkv(5, Tq=40, Tk=60, D=16, Dv=8, dtype=torch.float32)
    tensors["q"] = torch.cat([tensors["q"], torch.ones(2, 4, 40, 1)], -1)
    tensors["k"] = torch.cat([tensors["k"], torch.full((2, 2, 60, 1), 2000.0)], -1)
    tensors["v"] = tensors["v"] + 1000
    for call in (dict, lambda: {"problem": Transport(prior=ALiBi(0.1, alignment=END))}):
        case = Case(tensors, call, ("score_variance", "entropy", "value_spread"))
        found, truth = case.run("native", gradients=False), case.run("torch", torch.float64, gradients=False)
        for name, bound in (("score_variance", 2e-3), ("entropy", 1e-3), ("value_spread", 5e-3)):
            assert error(found[name], truth[name]) < bound, name


@pytest.mark.parametrize("Tq", [1, 40])
@pytest.mark.parametrize("marginal", [Rows(), Rows(sink=20.0), Rows(relax=1.5)], ids=["rows", "sink", "relax"])
def test_scores_that_rise_along_the_keys(marginal, Tq):
    """Sums are rescaled only when scores have risen by more than a threshold. Here they rise by less, as much, and
    more."""
    tensors = qkv(8, H=2, Tq=Tq, Tk=600, D=8, Dv=8)
    rise = torch.tensor([0.0, 0.5, 2.0, 2.7, 2.8, 5.0])  # SLACK is 4 in base 2: 2.77
    tensors["q"][..., 0] = 8**0.5
    tensors["k"][..., 0] = rise.cumsum(0).repeat_interleave(100)
    Case(tensors, lambda: {"problem": Transport(marginal=marginal)}).check()


@pytest.mark.parametrize("kind", ["padding", "documents", "float", "causal"])
def test_invalid_values_in_masked_keys_have_no_effect(kind):
    T = 130
    tensors = qkv(6, Tq=T, Tk=T)
    unread = torch.zeros(T, dtype=torch.bool)
    unread[[3, 4, 50]] = True
    unread[97:] = True
    if kind == "padding":
        call = {"attn_mask": ~unread}
    elif kind == "documents":
        call = {"problem": Transport(prior=Documents(torch.zeros(T, dtype=torch.long), torch.where(unread, -1, 0)))}
    elif kind == "float":
        call = {"attn_mask": torch.where(unread, -math.inf, 0.5).expand(T, T)}
    else:
        unread[:] = False
        unread[60:] = True
        call = {"is_causal": True}
        tensors["q"] = tensors["q"][:, :, :60]
    case = Case(tensors, lambda: call)
    clean = case.run("native")
    for name in ("k", "v"):
        for invalid in (math.nan, math.inf, 1e4, -1e25):
            spoilt = dict(tensors)
            spoilt[name] = tensors[name].clone()
            spoilt[name][:, :, unread] = invalid
            found = Case(spoilt, lambda: call).run("native")
            for n, value in found.items():
                assert torch.equal(value, clean[n]), (n, invalid)


def test_rows_without_keys():
    tensors = qkv(7, Tq=50, Tk=50)
    mask = torch.ones(50, 50, dtype=torch.bool)
    mask[[0, 30]] = False
    for problem in (Transport(), Transport(marginal=Rows(sink=0.3)), Transport(marginal=Rows(relax=2.0))):
        Case(tensors, lambda problem=problem: {"attn_mask": mask, "problem": problem}).check()
    assert Case(tensors, lambda: {"attn_mask": mask}).run("native")["out"][:, :, 30].abs().max() == 0


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_empty(sizes):
    Case(qkv(8, Tq=sizes[0], Tk=sizes[1]), dict, ("lse", "entropy")).check(gradients=False)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "shape", [{"Tq": 200, "Tk": 200}, {"Tq": 2, "Tk": 3000}, {"Tq": 1000, "Tk": 1100, "H": 1, "Hkv": 1}]
)
def test_threads_do_not_change_a_bit(name, shape):
    H = shape.get("H", 4)
    tensors, call = PROBLEMS[name](H, shape["Tq"], shape["Tk"])
    case = Case(
        qkv(9, B=1 if H == 1 else 2, **shape) | tensors if H > 1 or name != "mask" else qkv(9, **shape) | tensors, call
    )
    if H == 1 and name in ("padding", "biases", "mask"):
        case = Case(qkv(9, **shape) | tensors, call)
    one, *others = with_threads(lambda: case.run("native"))
    for other in others:
        for n, value in other.items():
            assert torch.equal(value, one[n]), n


# --- Tsallis and Fermi-Dirac: the price is searched -------------------------------------------------------------------

each_isa = pytest.mark.parametrize("isa", ["each"], indirect=True)

# The orders 2 and 1.5 have their own kernels, and other numbers share one. Tensors differ by row and have a gradient.
# Orders near 1 are computed as a distance from KL; so is a whole tensor if one of its orders is near 1.
LINKS = {str(alpha): lambda H, alpha=alpha: ({}, lambda: Tsallis(alpha)) for alpha in (1.05, 1.3, 1.5, 1.8, 2.0, 2.5)}
LINKS |= {
    "per head": lambda H: ({"alpha": torch.linspace(1.3, 2.0, H)}, lambda alpha: Tsallis(alpha)),
    "per head, near 1": lambda H: ({"alpha": torch.linspace(1.1, 1.9, H)}, lambda alpha: Tsallis(alpha)),
    "fermi": lambda H: ({}, FermiDirac),
}


class Linked(Case):
    """A case with a regulariser other than KL. `check` compares each instruction set with one run of the definition."""

    differences = ("value_spread", "cost", "score_variance", "kl")
    many = 12  # they are measured from the best key, not from the mean, over a thousand keys and more

    def __init__(self, link, tensors, call, statistics=None, marginal=None, **fixed):
        own, regularizer = LINKS[link](tensors["q"].shape[1])
        names = tuple(own)

        def meant(given):  # Fermi-Dirac needs a free marginal: keep the parameter
            if marginal is not None or link != "fermi" or isinstance(given, Free):
                return marginal or given
            return Free(next((level for level in (given.sink, given.relax) if level is not None), -1.0))

        def made(**tensors):
            arguments = call(**{n: t for n, t in tensors.items() if n not in names})
            problem = arguments.get("problem") or Transport()
            own = regularizer(*(tensors[n] for n in names))
            return arguments | {
                "problem": dataclasses.replace(problem, regularizer=own, marginal=meant(problem.marginal))
            }

        super().__init__(tensors | own, made, statistics or tuple(n for n in NAMES if n != "lse"), **fixed)
        # For alpha >= 2 the weights y^(beta - 1) in the gradient do not vanish at the edge of the support. Above 2 they
        # grow without bound, and the gradient of the entropy contains log p. So the last bit of a score at the edge can
        # change the gradient by any amount, in the reference backend as well, but there at another key.
        self.jumps = link in ("2.0", "2.5", "per head")
        self.factor = 30 if self.jumps else FACTOR

    def check(self, gradients=True, support=True):
        truth, plain = self.run("torch", torch.float64, gradients), self.run("torch", gradients=gradients)
        for isa in engine.isas():
            engine.use(isa)
            found = self.run("native", gradients=gradients)
            # The last bit of the score decides whether a key at the edge of the support has weight.
            off, lost = ((x.pop("support").double() - truth["support"]).abs() for x in (found, dict(plain)))
            assert off.numel() == 0 or not support or off.max() <= 1 + 2 * lost.max(), ("support", off.max())
            if self.jumps and off.sum() + lost.sum() > 0:  # for alpha >= 2 the gradient jumps there
                found = {n: t for n, t in found.items() if not n.startswith("grad")}
            self.judge(found, truth, plain, self.factor)


@each_isa
@pytest.mark.parametrize("marginal", ["rows", "mass", "sink", "relax", "free"])
@pytest.mark.parametrize("link", [link for link in LINKS if link != "fermi"])
def test_links_with_every_marginal(link, marginal):
    least = LINKS[link](4)[1](*LINKS[link](4)[0].values()).alpha
    least = torch.as_tensor(least)
    tensors, call = {
        "rows": ({}, dict),
        "mass": ({}, lambda: {"problem": Transport(marginal=Rows(mass=2.5))}),
        "sink": ({"b": normal(1, 4)}, lambda b: {"problem": Transport(marginal=Rows(sink=b))}),
        "relax": ({"rho": uniform(2, 4) + 1}, lambda rho: {"problem": Transport(marginal=Rows(relax=rho))}),
        # a score of 0 has weight 1 at the offset 1/(alpha - 1)
        "free": ({"b": 1 / (least - 1) - uniform(3, 4)}, lambda b: {"problem": Transport(marginal=Free(b))}),
    }[marginal]
    Linked(link, qkv(1, Tq=50, Tk=70, D=17, Dv=9, layout="bthd") | tensors, call).check()


MORE = {
    "causal, top left": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Causal("top_left"))}),
    "dense bias": lambda H, Tq, Tk: (
        {"b": normal(20, H, Tq, Tk).masked_fill(uniform(21, H, Tq, Tk) < 0.2, -math.inf)},
        lambda b: {"problem": Transport(prior=Bias(b))},
    ),
    "row bias": lambda H, Tq, Tk: ({"b": normal(22, H, Tq, 1)}, lambda b: {"problem": Transport(prior=Bias(b))}),
    "score bias": lambda H, Tq, Tk: (
        {"mask": torch.where(uniform(23, 2, 1, Tq, Tk) < 0.4, torch.finfo(torch.float32).min, normal(24, Tq, Tk))},
        lambda mask: {"attn_mask": mask},
    ),
    "key score": lambda H, Tq, Tk: ({"mask": normal(25, H, 1, Tk)}, lambda mask: {"attn_mask": mask}),
    "tau per query": lambda H, Tq, Tk: (
        {"tau": uniform(26, Tq, 1) + 0.3},
        lambda tau: {"problem": Transport(prior=Causal(END), temperature=tau)},
    ),
}
ALL = PROBLEMS | MORE
TURNS = ["1.5", "per head", "2.0", "1.3", "fermi", "1.8", "1.05", "per head, near 1"]


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_links_agree_with_the_definition(name, shape):
    tensors, call = ALL[name](4, shape["Tq"], shape["Tk"])
    turn = list(ALL).index(name) + 2 * SHAPES.index(shape)
    for link in (TURNS[turn % 8], TURNS[(turn + 4) % 8]):
        # In free rows a weight is a power of the score itself. Near alpha = 1 all weights are almost 0.
        if not (name == "free" and link != "fermi"):
            # Such steep slopes bring the prior below 1e-38, which is 0 in the engine and a denormal number in PyTorch.
            Linked(link, qkv(1, **shape) | tensors, call).check(support=name != "softcap")


@each_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head", "per head, near 1", "fermi"])
def test_links_dtypes(link, dtype):
    for name in ("causal", "biases", "sink"):
        tensors, call = PROBLEMS[name](4, 50, 60)
        Linked(link, qkv(2, Tq=50, Tk=60, dtype=dtype, layout="cut") | tensors, call).check()


@each_isa
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "sink"])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "fermi"])
def test_links_dropout(name, link):
    tensors, call = PROBLEMS[name](4, 40, 50)
    Linked(link, qkv(3, Tq=40, Tk=50) | tensors, call, dropout_p=0.3).check()


def spread(seed, factor, **shape):
    """Queries times a factor. The larger the factor, the fewer keys have weight."""
    tensors = qkv(seed, **shape)
    tensors["q"] = tensors["q"] * (factor if isinstance(factor, float) else factor[:, None])
    return tensors


# The number of keys with weight decides the path: lists per row, a panel of all keys, or both for different rows.
PATHS = {
    "lists": 6.0,
    "panel": 0.01,
    "both": torch.logspace(-2, 1, 97),
    "alternating": torch.tensor([0.01, 8.0]).repeat(49)[:97],
}


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "2.5", "per head", "per head, near 1"])
@pytest.mark.parametrize("path", PATHS)
def test_links_paths(path, link):
    few = {"B": 1, "H": 2, "Hkv": 1, "Tq": 97, "Tk": 1000, "D": 8, "Dv": 12}
    tensors, call = PROBLEMS[{"1.5": "causal", "2.0": "sink", "per head": "sink, bias"}.get(link, "plain")](2, 97, 1000)
    Linked(link, spread(5, PATHS[path], **few) | tensors, call).check()


def kept(monkeypatch):
    """A list that collects the key lists (csrc/engine/sparse_rows.h) that later forward passes store."""
    found, forward = [], BACKENDS["native"].forward

    def noted(form, names):
        results = forward(form, names)
        found.extend(results[name] for name in names if name == "lists")
        return results

    monkeypatch.setattr(BACKENDS["native"], "forward", noted)
    return found


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head, near 1"])
@pytest.mark.parametrize("sizes", [(16, 32), (16, 10), (7, 16)])
def test_links_backward_from_lists(link, sizes, monkeypatch):
    """Rows with few keys store them for backward. Pairs are read in place, or padded for other sizes."""
    lists = kept(monkeypatch)
    shape = {"B": 2, "H": 2, "Hkv": 1, "Tq": 61, "Tk": 700, "D": sizes[0], "Dv": sizes[1]}
    tensors, call = PROBLEMS[{"1.5": "causal", "2.0": "sink"}.get(link, "plain")](2, 61, 700)
    factor = torch.linspace(4, 9, 61)
    factor[48:] = 1e-4  # a block of rows that has no lists, in the same call
    Linked(link, spread(5, factor, **shape) | tensors, call).check()
    heads = torch.stack([x.view(torch.int32)[:, :, [0, 48], 0] for x in lists if x.dtype == torch.float32])
    assert (heads[..., 0] != 0).any() and (heads[..., 1] == 0).any()


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0"])
@pytest.mark.parametrize("where", [("q", 7), ("k", 500), ("k", 699)])
def test_links_nan_is_not_lost_in_lists(link, where, monkeypatch):
    tensors = spread(5, 6.0, B=1, H=2, Hkv=1, Tq=61, Tk=700, D=16, Dv=16)
    tensors[where[0]][0, 0, where[1], 2] = math.nan
    case = Linked(link, tensors, dict)
    for isa in engine.isas():
        engine.use(isa)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_may_list", lambda form: False)
            plain = case.run("native")
        for name, value in case.run("native").items():
            assert torch.equal(value.isnan(), plain[name].isnan()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_links_backward_from_lists_in_other_types_and_with_dropout(dtype, monkeypatch):
    lists = kept(monkeypatch)
    tensors = {n: t.to(dtype) for n, t in spread(5, 6.0, B=1, H=2, Hkv=1, Tq=61, Tk=700, D=16, Dv=16).items()}
    case = Linked("1.5", tensors, dict, dropout_p=0.3)
    found = case.run("native")
    assert lists and (lists[0].view(torch.int32)[:, :, 0, 0] != 0).all()
    monkeypatch.setattr(backend, "_may_list", lambda form: False)
    for name, plain in case.run("native").items():
        assert error(found[name], plain.double()) < {torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype], name


def keys_times(factor):
    def change(tensors):
        tensors["k"] = tensors["k"] * factor(torch.arange(tensors["k"].shape[2])[:, None])

    return change


def zeros(tensors):
    tensors["q"][:, :, 58, 1:] = 0  # among the last rows: `were_screened` reads the first rows
    tensors["k"][:, :, 300:500] = 0


# The 16-bit prefilter (csrc/links/int16_prefilter.h): keys that make it coarse, and problems that it is combined with.
SCREENED = {
    "one large key": keys_times(lambda j: torch.where(j == 700, 20.0, 1.0)),
    "large keys here and there": keys_times(lambda j: torch.where(j % 200 == 3, 10.0, 1.0)),
    "a large dimension": keys_times(lambda j: torch.tensor([1.0, 30.0] + [1.0] * 14)),
    "blocks of many sizes": keys_times(lambda j: 10.0 ** -(j // 96 % 7)),
    "zeros": zeros,
    **dict.fromkeys(("plain", "causal", "sink", "mask", "padding", "mass", "end", "long document", "wide window")),
}
WIDE = {
    "end": lambda H, Tq, Tk: ({"mask": torch.arange(Tk) < Tk - 70}, lambda mask: {"attn_mask": mask}),
    "long document": lambda H, Tq, Tk: (
        {"ids": torch.ones(Tq, dtype=torch.long), "key_ids": (torch.arange(Tk) - 100).sign()},
        lambda ids, key_ids: {"problem": Transport(prior=Documents(ids, key_ids))},
    ),
    "wide window": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Window(1200, 7, alignment=END))}),
}


ROWS = 193  # enough rows of one head for the prefilter at any vector length


def were_screened(lists):
    """Whether the first rows of each head used the 16-bit prefilter in every pass."""
    return lists and all((x.view(torch.int32)[:, :, 0, 0] & 512 > 0).all() for x in lists)


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0"])
@pytest.mark.parametrize("kind", SCREENED)
def test_links_screened_keys(kind, link, monkeypatch):
    lists = kept(monkeypatch)
    tensors, call = (PROBLEMS | WIDE).get(kind, PROBLEMS["plain"])(2, 61, 1500)
    tensors |= spread(6, 6.0, B=1 if kind not in ("mask", "padding") else 2, H=2, Hkv=1, Tq=61, Tk=1500)
    if SCREENED[kind] is not None:
        SCREENED[kind](tensors)
    Linked(link, tensors, call).check()
    assert were_screened(lists)


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0"])
def test_links_screened_keys_without_room(link, monkeypatch):
    """Each key scores higher than those before it, so that every key is a candidate for some time."""
    lists = kept(monkeypatch)
    tensors = spread(6, 6.0, B=1, H=2, Hkv=1, Tq=61, Tk=1500)
    tensors["q"] = tensors["q"].abs()
    tensors["k"] = tensors["k"].abs() * 0.1 + torch.arange(1500)[:, None] * 1e-3
    Linked(link, tensors, dict).check()
    assert not were_screened(lists)


@each_isa
@pytest.mark.parametrize(
    "shape",
    [
        {"D": 7, "layout": "bhdt"},
        {"D": 33, "layout": "cut"},
        {"D": 16, "layout": "bthd", "dtype": torch.bfloat16},
        {"D": 20, "dtype": torch.float16},
        {"D": 256, "Tk": 4096, "Tq": ROWS, "H": 18, "Hkv": 18},  # more heads than the prefilter holds at a time
        {"D": 8, "Tk": 70000, "Tq": ROWS, "H": 1},  # more keys than 16 bits can number
    ],
    ids=str,
)
def test_links_screened_keys_of_every_shape(shape, monkeypatch):
    lists = kept(monkeypatch)
    shape = {"B": 1, "H": 2, "Hkv": 1, "Tq": 97, "Tk": 1000, "Dv": 8} | shape
    Linked("1.5", spread(7, 5.0, **shape), dict).check()
    assert were_screened(lists)


@pytest.mark.parametrize("masked", [5, 7, 1444, 1445])
def test_links_screened_keys_with_full_lists(masked):
    """Lists become full after the prefilter. Masked keys among the first keys must still be skipped."""
    q, k, v = (torch.zeros(1, 1, n, 16) for n in (ROWS, 1536, 1536))
    q[..., 0], k[..., 0], k[..., 5, 0], k[..., 960:, 0] = 40, -1, 1, 1
    v[..., 5, :], v[..., masked, :] = 1000, math.nan
    mask = torch.arange(1536) != masked
    problem = Transport(Tsallis(2.0))
    found = regard.attention(q, k, v, mask, problem=problem, backend="native")
    truth = regard.attention(q.double(), k.double(), v.double(), mask, problem=problem, backend="torch")
    assert error(found, truth) < 1e-5


@each_isa
@pytest.mark.parametrize("factor", [1.0, 100.0, 1000.0])
def test_links_other_passes_make_the_same_plan(factor):
    """Every pass computes a score to the same bits, because weights are differences of scores and a price."""
    q, k, v = spread(8, factor, B=1, H=1, Hkv=1, Tq=200, Tk=3000, D=64, Dv=8).values()
    problem = Transport(Tsallis(1.5))
    for isa in engine.isas():
        engine.use(isa)
        weights, _ = regard.topk(q, k, 400, problem=problem)
        assert (weights.sum(-1) - 1).abs().max() < 1e-6
        _, aux = regard.attention(q, k, v, problem=problem, backend="native", return_aux=AuxRequest(key_mass=True))
        assert abs(aux.key_mass.double().sum() / 200 - 1) < 1e-6
        assert (regard.block_mass(q, k, 50, problem=problem).double().sum(-1) - 1).abs().max() < 1e-6


@each_isa
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("what", [50.0, math.nan])
def test_links_later_keys_do_not_change_screened_rows(what, alpha):
    """Masked keys in the same block as keys that a row reads do not change a bit of the row."""
    q, k, v = spread(9, 4.0, B=1, H=2, Hkv=2, Tq=1200, Tk=1200).values()
    problem = Transport(Tsallis(alpha), prior=Causal())
    other = k.clone()
    other[:, :, 1008:] *= what  # in the block of 96 keys from 960 on
    for isa in engine.isas():
        engine.use(isa)
        one, two = (regard.attention(q, keys, v, problem=problem, backend="native") for keys in (k, other))
        assert torch.equal(one[:, :, :1008], two[:, :, :1008]) and not torch.equal(one, two)


@each_isa
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_links_rows_of_one_key_have_no_gradient(alpha):
    """If one key has all the weight of a row, its utility equals the baseline to the last bit."""
    q, k, v = (t.requires_grad_() for t in spread(10, 300.0, B=1, H=1, Hkv=1, Tq=ROWS, Tk=1000, Dv=64).values())
    for isa in engine.isas():
        engine.use(isa)
        out, aux = regard.attention(
            q, k, v, problem=Transport(Tsallis(alpha)), backend="native", return_aux=AuxRequest(support=True)
        )
        alone = aux.support[0, 0] == 1
        assert alone.sum() > 20
        dq, dk = torch.autograd.grad(out[0, 0, alone].square().sum(), (q, k))
        assert not dq.any() and not dk.any(), isa


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key", [95, 191, 192, 287, 383, 500, 1499])
def test_links_nan_in_a_key_reaches_every_row(key, dtype):
    q, k, v = spread(6, 6.0, B=1, H=1, Hkv=1, Tq=ROWS, Tk=1500).values()
    k[..., key, 2] = math.nan
    out = regard.attention(*(t.to(dtype) for t in (q, k, v)), problem=Transport(Tsallis(1.5)), backend="native")
    assert out.isnan().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("where", [("q", 7), ("k", 500), ("k", 1490)])
def test_links_screened_keys_with_invalid_values(where, bad, monkeypatch):
    """Rows that are not finite skip the prefilter. Other rows still use it, also beside a masked block that is not
    finite."""
    lists = kept(monkeypatch)
    name, at = where
    tensors = spread(6, 6.0, B=1, H=1, Hkv=1, Tq=ROWS, Tk=1500)
    tensors[name][0, 0, at, 2] = bad
    masked = {"attn_mask": torch.arange(1500) // 96 != at // 96} if name == "k" else {}
    problem = Transport(Tsallis(1.5))
    q, k, v = tensors.values()
    found = regard.attention(q.requires_grad_(), k, v, problem=problem, backend="native", **masked)
    truth = regard.attention(q.double(), k.double(), v.double(), problem=problem, backend="torch", **masked)
    rest = torch.arange(ROWS) != at if name == "q" else slice(None)
    assert error(found[:, :, rest], truth[:, :, rest]) < 1e-5
    if name == "k":
        assert were_screened(lists)
    elif not math.isfinite(bad):
        assert found[:, :, 7].isnan().all()


@pytest.mark.parametrize("mask", [None, torch.arange(1536) != 300], ids=["read", "unread"])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_links_screened_keys_whose_squares_are_too_large(alpha, mask):
    """The queries are exact in 16 bits, so the bound of their rounding error is 0 times infinity."""
    q, k, v = torch.zeros(1, 1, ROWS, 16), torch.zeros(1, 1, 1536, 16), normal(1, 1, 1, 1536, 4)
    q[..., 0], k[..., 0] = 179 / 4, uniform(2, 1536) * 2 - 1
    k[..., 300, 1], k[..., 300, 0], k[..., 310, 0], v[..., 310, :] = 1e20, -1, 3, 100
    problem = Transport(Tsallis(alpha))
    assert (regard.attention(q, k, v, mask, problem=problem, backend="native") - 100).abs().max() < 1e-3


@each_isa
@pytest.mark.parametrize("Tq", [1, 2, 5, 8])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head", "fermi"])
def test_links_decoding(link, Tq):
    for name in ("causal", "alibi"):
        tensors, call = PROBLEMS[name](8, Tq, 1300)
        shape = {"B": 2, "H": 8, "Hkv": 2, "Tq": Tq, "Tk": 1300, "D": 32, "Dv": 32}
        Linked(link, spread(6, 3.0, **shape) | tensors, call).check()


@each_isa
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("level", [-100.0, -300.0, -1e9])
def test_links_rows_whose_priors_underflow(level, alpha):
    """y overflows, or is so large that scores have no effect. Then the plan is proportional to the prior."""
    given = qkv(11, B=1, H=1, Hkv=1, Tq=70, Tk=130, D=8, Dv=5) | {"bias": normal(12, 70, 130)}
    q, k, v, bias = (t.requires_grad_() for t in given.values())
    far = torch.arange(70) % 3 != 1  # the other rows are ordinary
    log_prior = bias + torch.where(far[:, None], level / (alpha - 1), 0.0)  # at -1e9 rounding removes the bias
    problem = Transport(Tsallis(alpha), prior=Bias(log_prior), marginal=Rows(mass=2.0))
    expected = 2 * log_prior.double().softmax(-1)
    close = 1e-5 - 1e-7 * max(-300.0, level) / (alpha - 1)  # a large logarithm has fewer digits
    weight = normal(13, 70, 5)
    right = torch.autograd.grad((expected @ v[0, 0].double())[far].mul(weight[far]).sum(), (bias, v), retain_graph=True)
    for isa in engine.isas():
        engine.use(isa)
        out, aux = regard.attention(
            q, k, v, problem=problem, backend="native", return_aux=AuxRequest(entropy=True, support=True, key_mass=True)
        )
        assert error(out[0, 0, far].detach(), (expected @ v[0, 0].double())[far].detach()) < close
        assert out.isfinite().all() and (aux.support[0, 0] == 130)[far].all()
        assert abs(aux.key_mass.double().sum() / 140 - 1) < close
        distribution = torch.distributions.Categorical(logits=log_prior.detach().double())
        assert error(aux.entropy[0, 0, far].detach(), distribution.entropy()[far]) < close
        weights, _ = regard.topk(q, k, 130, problem=problem)
        assert error(weights[0, 0, far], expected.detach().sort(-1, descending=True).values[far]) < close
        found = torch.autograd.grad(out[0, 0, far].mul(weight[far]).sum(), (q, k, bias, v), retain_graph=True)
        assert found[0].abs().max() == found[1].abs().max() == 0
        assert error(found[2], right[0].double()) < close and error(found[3], right[1].double()) < close


@each_isa
@pytest.mark.parametrize(("alpha", "level", "mass"), [(10.0, -5.0, 1.0), (2.0, -48.6, 1e-25)])
def test_links_rows_of_small_priors_whose_scores_matter(alpha, level, mass):
    """With many keys or a small mass, the price at which a single key takes the mass is far from the price of the
    row."""
    q, k, v = qkv(16, B=1, H=1, Hkv=1, Tq=9, Tk=2000, D=8, Dv=5).values()
    for isa in engine.isas():
        engine.use(isa)
        found, truth = (
            regard.attention(
                *(t.to(dtype) for t in (q, k, v)),
                problem=Transport(Tsallis(alpha), prior=Bias(torch.full((9, 1), level)), marginal=Rows(mass=mass)),
                backend=backend,
            ).double()
            / mass
            for backend, dtype in (("native", torch.float32), ("torch", torch.float64))
        )
        assert error(found, truth) < (1e-5 if alpha < 3 else 1e-3)


@each_isa
@pytest.mark.parametrize("alpha", [1.3, 2.0, 2.5])
def test_links_a_row_of_one_key_has_no_entropy(alpha):
    """The entropy is exactly 0, because none of its sums is rounded."""
    q, k, v = qkv(17, B=1, H=1, Hkv=1, Tq=200, Tk=1, D=8, Dv=5).values()
    for marginal in (Rows(relax=0.7), Rows(mass=0.3), Free(4.0)):
        for isa in engine.isas():
            engine.use(isa)
            problem = Transport(Tsallis(alpha), marginal=marginal)
            _, aux = regard.attention(
                q.requires_grad_(), k, v, problem=problem, backend="native", return_aux=AuxRequest(entropy=True)
            )
            assert aux.entropy.abs().max() == 0
            assert torch.autograd.grad(aux.entropy.sum(), q)[0].abs().max() < 1e-5


@each_isa
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_links_a_sink_takes_the_mass_of_a_row_without_keys(alpha):
    """The other rows of the call store lists."""
    q, k, v = spread(18, 6.0, B=1, H=1, Hkv=1, Tq=20, Tk=1000, D=8, Dv=5).values()
    mask = torch.arange(20)[:, None] != 7
    for isa in engine.isas():
        engine.use(isa)
        sink = torch.tensor([0.5]).requires_grad_()
        out, aux = regard.attention(
            q, k, v, mask, problem=Transport(Tsallis(alpha), marginal=Rows(sink=sink)), backend="native",
            return_aux=AuxRequest(dual=True, mass=True, entropy=True, max_weight=True),
        )  # fmt: skip
        assert out[0, 0, 7].abs().max() == aux.mass[0, 0, 7] == aux.entropy[0, 0, 7] == 0
        assert aux.max_weight[0, 0, 7] == 1 and abs(aux.dual[0, 0, 7] - (0.5 - 1 / (alpha - 1))) < 1e-5
        assert torch.autograd.grad(out.sum() + aux.entropy.sum(), sink)[0].isfinite().all()


@each_isa
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 2.5, 3.0])
def test_links_relaxed_rows_of_little_mass(alpha, backend):
    """The mass is exp(price/rho), also where the prior makes it very small."""
    prior = Bias(torch.linspace(-70, 3, 90)[:, None])
    problem = Transport(Tsallis(alpha), prior=prior, marginal=Rows(relax=0.9))
    for isa in engine.isas() if backend == "native" else [engine.isa()]:
        engine.use(isa)
        for dtype in (torch.float32, torch.float64):
            q, k, v = (t.to(dtype) for t in qkv(14, B=1, H=1, Hkv=1, Tq=90, Tk=40, D=8, Dv=5).values())
            _, aux = regard.attention(
                q, k, v, problem=problem, backend=backend, return_aux=AuxRequest(dual=True, mass=True)
            )
            log_mass, price = aux.mass.double().log(), aux.dual.double() / 0.9
            assert (log_mass - price).abs().max() < (2e-5 if dtype == torch.float32 else 1e-9)


@each_isa
@pytest.mark.parametrize("link", LINKS)
def test_links_few_keys_and_rows_without(link):
    for Tk in (1, 2, 3):
        Linked(link, qkv(7, Tq=5, Tk=Tk), dict).check()
    mask = torch.ones(50, 60, dtype=torch.bool)
    mask[[0, 30]] = False
    for marginal in (Free(0.5),) if link == "fermi" else (Rows(), Rows(sink=0.3), Rows(relax=2.0)):
        case = Linked(link, qkv(7, Tq=50, Tk=60), lambda: {"attn_mask": mask}, marginal=marginal)
        case.check()
        assert case.run("native", gradients=False)["out"][:, :, 30].abs().max() == 0
    # Whole blocks of rows without keys, and long calls, in which the search of a row starts more than once.
    Linked(link, qkv(7, Tq=130, Tk=40), lambda: {"problem": Transport(prior=Causal(END))}).check()
    shape = {"B": 1, "H": 1, "Hkv": 1, "Tq": 9, "Tk": 900, "D": 4, "Dv": 4}
    mask = torch.arange(9)[:, None] % 3 != 1
    for prior in (None, Bias(normal(7, 900))):
        Linked(link, qkv(7, **shape), lambda p=prior: {"attn_mask": mask, "problem": Transport(prior=p)}).check()
    for sizes in ((0, 5), (5, 0)):
        Linked(link, qkv(8, Tq=sizes[0], Tk=sizes[1]), dict).check(gradients=False)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.7])
def test_priors_below_the_smallest_float32(alpha):
    """If the largest prior of a row is 2^-60, a key with prior 2^-130 is still in the support."""
    q, k, v = qkv(7, H=2, Tq=30, Tk=40).values()
    log_prior = -60 * math.log(2) - 70 * math.log(2) * (torch.arange(40) % 3 == 1)
    problem = Transport(Tsallis(alpha), prior=Bias(log_prior))
    request = regard.AuxRequest(support=True, mass=True)
    _, found = regard.attention(q, k, v, problem=problem, return_aux=request, backend="native")
    doubles = [t.double() for t in (q, k, v)]
    exact = Transport(Tsallis(alpha), prior=Bias(log_prior.double()))
    _, expected = regard.attention(*doubles, problem=exact, return_aux=request, backend="torch")
    assert torch.equal(found.support.double(), expected.support)
    torch.testing.assert_close(found.mass.double(), expected.mass, rtol=1e-5, atol=0)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    "shape", [{"Tq": 150, "Tk": 180}, {"Tq": 3, "Tk": 2500}, {"Tq": 300, "Tk": 1100, "B": 1}], ids=str
)
def test_links_threads_do_not_change_a_bit(link, shape):
    for name in ("sink", "biases") if shape["Tq"] == 150 else ("causal",):
        tensors, call = PROBLEMS[name](4, shape["Tq"], shape["Tk"])
        case = Linked(link, spread(9, 3.0, **shape) | tensors, call)
        one, *others = with_threads(lambda case=case: case.run("native"))
        for other in others:
            for n, value in other.items():
                assert torch.equal(value, one[n]), n


@pytest.mark.parametrize("T", [130, 1000])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head, near 1", "fermi"])
def test_links_invalid_values_in_masked_keys_have_no_effect(link, T):
    tensors = spread(10, 4.0, B=1, H=2, Hkv=1, Tq=30, Tk=T)
    unread = torch.zeros(T, dtype=torch.bool)
    unread[[3, 4, 50]] = True
    unread[97:129] = True
    for call in ({"attn_mask": ~unread}, {"attn_mask": torch.where(unread, -math.inf, 0.5).expand(30, T)}):
        clean = Linked(link, tensors, lambda call=call: call).run("native")
        for name in ("k", "v"):
            for invalid in (math.nan, math.inf, 1e4, -1e25):
                spoilt = dict(tensors)
                spoilt[name] = tensors[name].clone()
                spoilt[name][:, :, unread] = invalid
                found = Linked(link, spoilt, lambda call=call: call).run("native")
                for n, value in found.items():
                    assert torch.equal(value, clean[n]), (n, invalid)


@pytest.mark.parametrize("T", [60, 1000])
@pytest.mark.parametrize("link", LINKS)
def test_links_nan_stays_in_its_row(link, T):
    tensors = spread(11, 3.0, B=1, H=1, Hkv=1, Tq=30, Tk=T)
    spoilt = tensors | {"q": tensors["q"].clone()}
    spoilt["q"][0, 0, 7, 2] = math.nan
    rest = torch.arange(30) != 7
    case, other = (Linked(link, t, dict) for t in (tensors, spoilt))
    found = other.run("native", gradients=False)
    assert found["out"][0, 0, 7].isnan().all()
    runs = found, *(case.run("torch", dtype, gradients=False) for dtype in (torch.float64, None))
    case.judge(*({n: t[:, :, rest] for n, t in run.items() if n != "key_mass"} for run in runs), case.factor)
    if T == 60:  # among more keys the prefilter (csrc/links/int16_prefilter.h) may treat its neighbours differently
        clean = case.run("native", gradients=False)
        for name, value in found.items():
            if name != "key_mass":
                assert torch.allclose(value[:, :, rest], clean[name][:, :, rest], rtol=1e-5, atol=1e-6), name
    for key in (0, T // 2, T - 1):  # a NaN in a key reaches every row
        spoilt = tensors | {"k": tensors["k"].clone()}
        spoilt["k"][0, 0, key, 2] = math.nan
        assert Linked(link, spoilt, dict).run("native", gradients=False)["out"].isnan().all(), key


@pytest.mark.parametrize("T", [60, 1000])
@pytest.mark.parametrize("link", LINKS)
def test_links_nan_is_not_lost_in_a_gradient(link, T):
    tensors = spread(11, 3.0, B=1, H=1, Hkv=1, Tq=30, Tk=T)
    tensors["q"][0, 0, 7, 2] = math.nan
    unread = torch.arange(T) >= T - 5
    found = Linked(link, tensors, lambda: {"attn_mask": ~unread}).run("native")
    assert found["grad q"][0, 0, 7].isnan().all() and found["grad q"][0, 0, 8].isfinite().all()
    for name in ("grad k", "grad v"):
        assert found[name][0, 0, ~unread].isnan().any(-1).all()


@each_isa
@pytest.mark.parametrize("T", [60, 1000])
@pytest.mark.parametrize("link", ["1.05", "1.3", "1.5", "2.0"])
def test_links_common_offsets(link, T):
    """Scores and values around 1000. The plan does not depend on the offset of the scores, nor the spread on that of
    the values."""
    tensors = spread(12, 2.0, B=1, H=2, Hkv=1, Tq=20, Tk=T, D=16, Dv=8)
    tensors["q"] = torch.cat([tensors["q"], torch.ones(1, 2, 20, 1)], -1)
    tensors["k"] = torch.cat([tensors["k"], torch.full((1, 1, T, 1), 4000.0)], -1)
    tensors["v"] = tensors["v"] + 1000
    case = Linked(link, tensors, dict)
    truth = case.run("torch", torch.float64, gradients=False)
    # A score of 1000 has an error of 6e-5, which bounds the other errors: the slope of a weight is at most 1 here.
    bounds = {"out": 1e-3, "entropy": 1e-2, "collision": 1e-3, "max_weight": 1e-3, "value_spread": 2e-2, "mass": 1e-5}
    for isa in engine.isas():
        engine.use(isa)
        found = case.run("native", gradients=False)
        for name, bound in bounds.items():
            assert error(found[name], truth[name]) < bound, (name, error(found[name], truth[name]))


@pytest.mark.parametrize("link", [link for link in LINKS if link != "fermi"])
def test_links_huge_scores_pick_the_best_key(link):
    for T in (40, 900):
        tensors = qkv(13, B=1, H=2, Hkv=2, Tq=20, Tk=T)
        for size in (1e6, 1e15):
            spoilt = tensors | {"q": tensors["q"] * size}
            top, order = (spoilt["q"].double() @ tensors["k"].double().mT).topk(2)
            clear = top[..., 0] - top[..., 1] > 1e-5 * top[..., 0].abs()  # distinct in float32, too
            best = order[..., 0]
            found = Linked(link, spoilt, dict).run("native")
            expected = tensors["v"].gather(2, best[..., None].expand(-1, -1, -1, 16))
            assert clear.sum() > 30 and torch.allclose(found["out"][clear], expected[clear], atol=1e-6), (T, size)
            assert all(t.isfinite().all() for n, t in found.items() if n not in ("score_variance",)), (T, size)


def test_broadcast_parameters_are_not_expanded(monkeypatch):
    q, k, v = qkv(10, Tq=64, Tk=64).values()
    mask = torch.ones(1, 1, 1, 64, dtype=torch.bool)
    records = []
    make = backend.record_of
    monkeypatch.setattr(backend, "record_of", lambda form: records.append(make(form)) or records[-1])
    regard.attention(q, k, v, attn_mask=mask, enable_gqa=True, backend="native")
    (record,) = records
    for name, tensor in (("key", k), ("mask", mask)):
        (address,) = struct.unpack_from("=q", record.record, record.fields[name][1])
        assert address == tensor.data_ptr()


def test_from_several_python_threads():
    tensors = qkv(11, Tq=300, Tk=300)
    case = Case(tensors, lambda: {"is_causal": True})
    expected = case.run("native", gradients=False)["out"]
    failures = []

    def work():
        for _ in range(5):
            if not torch.equal(case.run("native", gradients=False)["out"], expected):
                failures.append(1)  # noqa: PERF401

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork():
    script = """
import os, torch, regard
q = torch.randn(2, 4, 200, 16)
torch.set_num_threads(2)
a = regard.attention(q, q, q, backend="native")
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(a, regard.attention(q, q, q, backend="native")) else 3)
import time
for _ in range(200):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
raise SystemExit("the child hangs")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_named_isa_is_used(isa):
    code = "import torch, regard._native as n; print(n.isa())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"REGARD_ISA": isa}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == isa


def test_an_unknown_isa_raises():
    code = "import torch, regard; q = torch.zeros(1, 1, 1, 8); regard.attention(q, q, q)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"REGARD_ISA": "z80"}, capture_output=True, text=True
    )
    assert found.returncode != 0
    assert "ValueError: REGARD_ISA: expected an instruction set of this machine (" in found.stderr, found.stderr
    assert found.stderr.rstrip().endswith("baseline), got z80")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Transport(temperature=0.0), "temperature 0"),
        (Transport(temperature=1e-38), "temperature below 1e-30"),
        (Transport(FermiDirac(), marginal=Rows(mass=2.0)), "free marginal only"),
        (Transport(prior=math.prod((Bias(torch.zeros(1)) for _ in range(4)), start=Bias(torch.zeros(1)))), "at most 4"),
    ],
)
def test_reasons(problem, reason):
    q, k, v = qkv(12).values()
    with pytest.raises(NotImplementedError, match=f"native.*{reason}"):
        regard.attention(q, k, v, enable_gqa=True, problem=problem, backend="native")


def test_the_check_detects_one_wrong_element(monkeypatch):
    case = Case(qkv(13), dict)
    case.check()
    plain = BACKENDS["native"].forward

    def wrong(form, names):
        results = plain(form, names)
        results["out"].view(-1)[17] += 1e-3
        return results

    monkeypatch.setattr(BACKENDS["native"], "forward", wrong)
    with pytest.raises(AssertionError):
        case.check()
