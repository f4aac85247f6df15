"""A user's regulariser on the native engine: its formulas, compiled, against the definition in float64."""

import math
import os
import subprocess
import sys

import pytest
import torch

import regard
from regard import AuxRequest, Bias, Causal, FDivergence, Free, Rows, Selected, Transport, Tsallis, Window
from regard.compiled.library import Unavailable, compiler
from support.divergences import DIVERGENCES, Mixture, Order, divergence
from support.threads import with_threads

engine = pytest.importorskip("regard._native", reason="the native engine was not built")
try:
    compiler()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)
pytestmark = pytest.mark.usefixtures("poison")

D = torch.float64
NAMES = tuple(name for name in regard.statistics.ROW_STATISTICS if name != "lse")
FACTOR, FLOOR = 4.0, 4e-6  # as in test_native.py: times the error of the reference in the same dtype, and a floor
# Plans of steep links amplify an error of the scores: a link that is infinitely steep at 0, one with a pole at t = 1.
STEEP = {"exponential": 100, "alpha 3": 10, "le cam": 10, "hellinger": 30, "reverse kl": 10}
MARGINALS = {
    "rows": lambda x: Rows(),
    "mass": lambda x: Rows(mass=2.5),
    "sink": lambda x: Rows(sink=x["level"]),
    "relax": lambda x: Rows(relax=x["level"].exp()),
    "free": lambda x: Free(x["level"] - 4),
}


def error(found, truth):
    """Largest error, relative to 1 + the largest entry. Equal infinities and NaN do not count."""
    found = found.double()
    same = (found == truth) | (found.isnan() & truth.isnan())
    size = truth.abs().nan_to_num(posinf=0).max() if truth.numel() else 0.0
    gap = torch.where(same, 0.0, (found - truth).abs() / (1 + size))
    return gap.nan_to_num(nan=math.inf).max().item() if found.numel() else 0.0


def tensors(dtype, B=1, H=4, Hkv=2, Tq=21, Tk=21, Dv=6, scale=1.0):
    g = torch.Generator().manual_seed(3)
    shapes = {"q": (B, H, Tq, 8), "k": (B, Hkv, Tk, 8), "v": (B, Hkv, Tk, Dv), "level": (H,), "bias": (H, Tq, Tk)}
    drawn = {name: torch.randn(shape, generator=g) * (scale if name == "q" else 1) for name, shape in shapes.items()}
    drawn["tau"] = torch.rand(H, 1, 1, generator=g) + 0.7
    rounded = torch.float32 if dtype == D else dtype
    return {name: x.to(rounded).to(dtype).requires_grad_() for name, x in drawn.items()}


def solve(backend, dtype, regularizer, marginal="rows", prior=None, names=NAMES, own=(), **more):
    """Output, statistics and gradients. `prior(x)` and `regularizer(x)` may use the tensors."""
    x = tensors(dtype, **{k: more.pop(k) for k in ("B", "Tq", "Tk", "Dv", "scale") if k in more})
    for name, values in dict(own).items():
        x[name] = torch.tensor(values).to(dtype).requires_grad_()
    marginal_of = MARGINALS[marginal](x)
    priors = {} if prior is None else {"prior": prior(x)}
    problem = Transport(regularizer(x), marginal=marginal_of, temperature=x["tau"], **priors)
    request = AuxRequest(**dict.fromkeys(names, True))
    torch.manual_seed(11)
    out, aux = regard.attention(
        x["q"], x["k"], x["v"], problem=problem, enable_gqa=True, return_aux=request, backend=backend, **more
    )
    results = {"out": out} | {name: getattr(aux, name) for name in names}
    g = torch.Generator().manual_seed(5)
    loss = (out * torch.randn(out.shape, generator=g).to(dtype)).sum()
    if "entropy" in names:
        loss = loss + (aux.entropy * torch.randn(aux.entropy.shape, generator=g).to(dtype)).sum()
    found = torch.autograd.grad(loss, list(x.values()), allow_unused=True)
    results |= {f"grad {name}": grad for name, grad in zip(x, found, strict=True) if grad is not None}
    return {name: t.detach() for name, t in results.items()}


def compare(dtype, *args, steep=1.0, skip=(), **more):
    truth, found = solve("torch", D, *args, **more), solve("native", dtype, *args, **more)
    plain = truth if dtype == D else solve("torch", dtype, *args, **more)
    assert found.keys() == truth.keys()
    for name, value in found.items():
        if name in skip:
            continue
        floor = (
            2e-9
            if dtype == D
            else FLOOR * (5 if name.startswith("grad") else 1)
            + (torch.finfo(dtype).eps if dtype != torch.float32 else 0.0)
        )
        wrong, lost = error(value, truth[name]), error(plain[name], truth[name])
        assert wrong <= FACTOR * lost + steep * floor, (name, wrong, lost, engine.isa())


def on(name):
    own = divergence(name)
    return lambda x: own


# --- every divergence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("marginal", MARGINALS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_output_statistics_and_gradients(name, marginal, dtype):
    if marginal == "free" and divergence(name).upper < math.inf:
        pytest.skip("some weights would be infinite")
    for prior in (lambda x: Causal(), lambda x: Causal() * Bias(x["bias"])):
        compare(dtype, on(name), marginal, prior, steep=STEEP.get(name, 1))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_plans_have_certificates(name):
    own, scores = divergence(name), 2 * torch.randn(4, 9, 9, dtype=D)
    plan = regard.solve(scores, Transport(own, prior=Causal(), temperature=0.8))
    assert plan.certificate().holds(1e-9)
    # The engine finds the same plan: its output on the identity is the plan.
    identity = torch.eye(9, dtype=D).expand(4, 9, 9)
    out = regard.attention(
        identity, scores.mT.contiguous(), identity, scale=1.0, backend="native",
        problem=Transport(own, prior=Causal(), temperature=0.8),
    )  # fmt: skip
    assert torch.allclose(out, plan.weights, atol=1e-9)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["entmax 1.5", "jensen-shannon", "fermi-dirac"])
@pytest.mark.parametrize("marginal", MARGINALS)
def test_on_each_instruction_set(name, marginal):
    if marginal == "free" and name == "jensen-shannon":
        marginal = "rows"
    compare(torch.float32, on(name), marginal, lambda x: Causal() * Bias(x["bias"]), Tq=50, Tk=50)
    compare(D, on(name), marginal, lambda x: Window(7, 2), B=2, Tq=50, Tk=50)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["chi-squared", "squared plus entropy", "huber"])
def test_half_types(name, dtype):
    compare(dtype, on(name), "sink", lambda x: Causal() * Bias(x["bias"]))


@pytest.mark.parametrize("name", ["chi-squared", "reverse kl", "entmax 1.5"])
def test_decoding_and_dropout(name):
    for Tq in (1, 3):
        compare(torch.float32, on(name), "rows", Tq=Tq, Tk=70)
    compare(torch.float32, on(name), "sink", lambda x: Causal(), dropout_p=0.3)


@pytest.mark.parametrize("name", ["chi-squared", "squared plus entropy"])
def test_many_keys(name):
    """Beyond the sample and the first stage of the search; sparse plans turn to lists."""
    listed = tuple(name for name in NAMES if name != "value")  # the value counts keys without weight, too: no lists
    for scale, names in ((0.2, NAMES), (6.0, NAMES), (6.0, listed)):
        compare(torch.float32, on(name), "rows", lambda x: Causal(), Tq=700, Tk=700, scale=scale, names=names, steep=4)
    compare(D, on(name), "rows", lambda x: Bias(x["bias"]), Tq=20, Tk=900)


def test_threads_do_not_change_a_result():
    run = lambda: solve("native", torch.float32, on("chi-squared"), "sink", Tq=200, Tk=700)  # noqa: E731
    one, *others = with_threads(run)
    assert all(torch.equal(one[name], other[name]) for other in others for name in one)


def test_selected_keys():
    chosen = torch.randint(0, 300, (4, 300, 9), generator=torch.Generator().manual_seed(0))
    for name in ("chi-squared", "squared plus entropy", "fermi-dirac"):
        compare(torch.float32, on(name), "rows", lambda x: Selected(chosen), Tq=300, Tk=300)


def test_selected_keys_at_the_ceiling():
    """Keys at the ceiling have weight and no slope: they count in the gradient of the values."""
    chosen = torch.randint(0, 300, (4, 300, 9), generator=torch.Generator().manual_seed(0))
    flat = FDivergence(
        lambda x: torch.where(x <= 1, x * x / 2, math.inf), lambda t: t.clamp(max=1), lambda t: (t < 1).to(t.dtype), 0.0
    )
    for own in (flat, divergence("fermi-dirac")):
        for mass in (3.0, 20.0):
            x = [t.requires_grad_() for t in torch.randn(3, 1, 4, 300, 8, dtype=D)]
            problem = Transport(own, prior=Selected(chosen), marginal=Rows(mass=mass))
            results = []
            for backend in ("native", "torch"):
                out = regard.attention(*x, problem=problem, backend=backend)
                results.append([out, *torch.autograd.grad(out.square().sum(), x)])
            assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(*results, strict=True))


def test_it_equals_the_built_in_of_the_same_kind():
    built_in, own = (
        solve("native", torch.float32, lambda x: Tsallis(1.5), "sink", lambda x: Causal()),
        solve("native", torch.float32, on("entmax 1.5"), "sink", lambda x: Causal()),
    )
    for name, value in own.items():
        assert error(value, built_in[name].double()) < 2e-6, name


def test_parts_of_the_plan():
    q, k = torch.randn(2, 1, 2, 64, 8)
    index = torch.randint(0, 64, (1, 2, 64, 5))
    for name in ("chi-squared", "jensen-shannon", "fermi-dirac"):
        problem = Transport(divergence(name), prior=Window(9, 3))
        assert regard.select_backend(q, k, k, problem=problem).backend == "native"
        plan = regard.solve(q.double() @ k.double().mT / math.sqrt(8), problem).weights
        weights, keys = regard.topk(q, k, 4, problem=problem)
        assert torch.allclose(weights.double(), plan.topk(4).values, atol=2e-6)
        assert torch.allclose(plan.gather(-1, keys), weights.double(), atol=2e-6)
        assert torch.allclose(
            regard.weights_at(q, k, index, problem=problem).double(), plan.gather(-1, index), atol=2e-6
        )
        blocks = plan.unflatten(-1, (4, 16)).sum(-1).unflatten(-2, (4, 16)).mean(-2)
        assert torch.allclose(regard.block_mass(q, k, 16, problem=problem).double(), blocks, atol=2e-5)


# --- rows at the edge -------------------------------------------------------------------------------------------------


def test_rows_that_cannot_take_the_mass():
    """A bounded link: the first causal rows have too few keys, and are full."""
    own = divergence("fermi-dirac")
    assert own.ceiling == 1
    q, k, v = torch.randn(3, 1, 1, 8, 4, dtype=D)
    request = AuxRequest(dual=True, mass=True, value=True)
    problem = Transport(own, prior=Causal(), marginal=Rows(mass=3.0))
    results = [regard.attention(q, k, v, problem=problem, return_aux=request, backend=b) for b in ("native", "torch")]
    (out, aux), (expected, truth) = results
    assert torch.allclose(out, expected, atol=1e-10) and torch.allclose(aux.value, truth.value, atol=1e-10)
    assert aux.mass[0, 0].tolist() == pytest.approx([1, 2, *[3] * 6]) and aux.dual[0, 0, :3].tolist() == [-math.inf] * 3
    assert regard.FermiDirac().ceiling == own.ceiling
    built_in = Transport(regard.FermiDirac(), prior=Causal(), marginal=Rows(mass=3.0))
    assert torch.allclose(out, regard.attention(q, k, v, problem=built_in), atol=1e-10)


def test_masked_keys_may_hold_anything():
    q, k, v = torch.randn(3, 1, 2, 30, 8)
    k[..., 20:, :], v[..., 20:, :] = math.nan, math.inf
    mask = torch.arange(30) < 20
    mask = mask & (torch.arange(30) != 3)[:, None]  # row 3 has no key
    for name in ("chi-squared", "jensen-shannon", "squared plus entropy"):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        out = regard.attention(*x, attn_mask=mask, problem=Transport(divergence(name)), backend="native")
        grads = torch.autograd.grad(out.sum(), x)
        assert out.isfinite().all() and not out[..., 3, :].any()
        assert all(g[..., :20, :].isfinite().all() for g in grads) and not grads[1][..., 20:, :].any()


def test_nan_stays_visible():
    q, k, v = torch.randn(3, 1, 1, 9, 4)
    q[..., 4, 0] = math.nan
    for name in ("chi-squared", "reverse kl"):
        out = regard.attention(q, k, v, problem=Transport(divergence(name)), backend="native")
        assert out.isnan().any(-1).flatten().tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize("size", [-60.0, 60.0])
def test_extreme_priors(size):
    prior = lambda x: Bias(size * x["bias"][:, :1].sigmoid())  # noqa: E731
    for name in ("squared plus entropy", *(("chi-squared",) if size < 0 else ())):  # 1 + t > 0 is at least 2^-52
        compare(D, on(name), "rows", prior, names=("dual", "entropy"), steep=100, skip=("grad bias",))


# --- parameters -------------------------------------------------------------------------------------------------------

ORDERS = (1.3, 1.5, 1.8, 2.5)


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("marginal", MARGINALS)
def test_parameters_get_gradients(marginal, dtype):
    for prior in (lambda x: Causal(), lambda x: Causal() * Bias(x["bias"])):
        compare(dtype, lambda x: Order(x["order"]), marginal, prior, own={"order": ORDERS}, steep=2)
        own = {"stiffness": [0.7, 1.1, 2.0, 0.5], "shift": 0.3}
        compare(dtype, lambda x: Mixture(x["stiffness"], x["shift"]), marginal, prior, own=own, steep=2)
    compare(dtype, lambda x: Mixture(x["stiffness"]), marginal, own={"stiffness": 0.8})  # a parameter and a number


def test_parameters_pass_gradcheck():
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=D)

    def attend(q, order, sink):
        problem = Transport(Order(order), prior=Causal(), marginal=Rows(sink=sink), temperature=1.7)
        return regard.attention(q, k, v, problem=problem, backend="native")

    inputs = [q.requires_grad_(), *(torch.tensor(x, dtype=D, requires_grad=True) for x in ([1.4, 1.7], [0.1, -0.3]))]
    assert torch.autograd.gradcheck(attend, inputs)


def test_a_tensor_that_a_function_holds_is_read_at_each_call():
    held = torch.tensor(1.5)
    own = FDivergence(
        lambda x: x**held / (held * (held - 1)), lambda t: ((held - 1) * t) ** (1 / (held - 1)), None, 0.0
    )
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    for order in (1.5, 1.8):
        held.fill_(order)
        out = regard.attention(q, k, v, problem=Transport(own), backend="native")
        assert torch.allclose(out, regard.attention(q, k, v, problem=Transport(Tsallis(order))), atol=1e-6)


# --- compilation ------------------------------------------------------------------------------------------------------


def test_compiled_with_torch():
    order = torch.tensor([1.4, 1.9], requires_grad=True)
    own, bound = divergence("chi-squared"), divergence("fermi-dirac")
    request = AuxRequest(entropy=True)
    for regularizer, leaves, T in (
        (lambda: own, (), 12),
        (lambda: own, (), 520),  # lists are saved
        (lambda: bound, (), 12),
        (lambda: Order(order), (order,), 12),
    ):
        q, k, v = torch.randn(3, 1, 2, T, 8)

        def attend(q, k, v):
            problem = Transport(regularizer(), prior=Causal())  # noqa: B023
            out, aux = regard.attention(q, k, v, problem=problem, backend="native", return_aux=request)
            return out * aux.entropy[..., None]

        x = [t.clone().requires_grad_() for t in (q, k, v)]
        results = [function(*x) for function in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(out.sin().sum(), [*x, *leaves]) for out in results]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def reason(regularizer):
    q = torch.randn(1, 1, 4, 4)
    choice = regard.select_backend(q, q, q, problem=Transport(regularizer))
    assert choice.backend == "torch"
    regard.attention(q, q, q, problem=Transport(regularizer))
    return choice.reasons["native"]


def test_what_cannot_be_compiled_is_told():
    signed = FDivergence(lambda x: x * x / 2, lambda t: t, torch.ones_like)
    assert "a signed plan" in reason(signed)

    def reads(t):
        return t + 1 if bool((t > -math.inf).all()) else t

    branches = FDivergence(lambda x: (x - 1) ** 2 / 2, reads, None, -1.0)
    assert "cannot compile the regulariser: link: " in reason(branches)
    odd = FDivergence(lambda x: (x - 1) ** 2 / 2, lambda t: 1 + t + 0 * torch.lgamma(t + 9), torch.ones_like, -1.0)
    assert "torch.lgamma" in reason(odd)

    class Centred(Order):
        family = "order from 1"

        @property
        def origin(self):
            return 1.0

        def link(self, t):
            return super().link(t)

    assert "origin" in reason(Centred(1.5))
    q = torch.randn(1, 1, 4, 4)
    with pytest.raises(NotImplementedError, match=r"native.*signed plan"):
        regard.attention(q, q, q, problem=Transport(signed), backend="native")


def test_f_that_cannot_be_compiled_costs_only_the_value():
    own = FDivergence(lambda x: (x - 1) ** 2 / 2 + 0 * torch.lgamma(x + 1), lambda t: t + 1, torch.ones_like, -1.0)
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    problem = Transport(own)
    assert regard.select_backend(q, k, v, problem=problem).backend == "native"
    choice = regard.select_backend(q, k, v, problem=problem, return_aux=AuxRequest(value=True))
    assert choice.backend == "torch" and "lgamma" in choice.reasons["native"]


def test_without_a_compiler_the_reference_serves(tmp_path):
    code = """
import torch, regard
q = torch.randn(1, 1, 4, 4)
own = regard.FDivergence(lambda x: (x - 1) ** 2 / 2, lambda t: t + 1, torch.ones_like, -1.0)
choice = regard.select_backend(q, q, q, problem=regard.Transport(own))
assert choice.backend == "torch" and "C++ compiler" in choice.reasons["native"], choice
regard.attention(q, q, q, problem=regard.Transport(own))
"""
    environment = os.environ | {"CXX": str(tmp_path / "none"), "REGARD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
