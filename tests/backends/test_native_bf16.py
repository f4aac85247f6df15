"""bfloat16 on the native engine: processors that have dot products of it take other code (csrc/engine/bf16_tiles.h)."""

import math

import pytest
import torch

import regard
from regard import AuxRequest, Bias, Causal, Rows, Transport, Tsallis, Window
from support.native import (
    END,
    FACTOR,
    FLOOR,
    NAMES,
    PROBLEMS,
    Case,
    engine,
    error,
    normal,
    qkv,
    stock_attention,
    uniform,
)
from support.threads import with_threads

pytestmark = pytest.mark.usefixtures("isa", "poison")


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
