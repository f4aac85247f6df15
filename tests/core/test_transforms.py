"""The features of PyTorch that attention works with: compile, export, opcheck, autocast, torch.func, forward mode,
double backward."""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

import regard
from regard import ALiBi, AuxRequest, Bias, Causal, FermiDirac, Free, Rows, Transport, Tsallis, Window
from regard.autograd import library
from regard.backends.native import engine
from regard.lowering import lower
from support.cases import CASES, SOME_NAMES, build, skip_unless_served

SOME = [next(c for c in CASES if c.name == name) for name in SOME_NAMES]
pytestmark = pytest.mark.usefixtures("fresh_compiler")
by_some = pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)


def call(built, **more):
    return regard.attention(built.query, built.key, built.value, **built.arguments, backend="torch", **more)


class Module(torch.nn.Module):
    """Every learnable part of a problem, declared in forward."""

    def __init__(self, H: int = 4):
        super().__init__()
        self.sink = torch.nn.Parameter(torch.randn(H, dtype=torch.float64))
        self.temperature = torch.nn.Parameter(torch.ones(H, 1, 1, dtype=torch.float64))
        self.alpha = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.slopes = torch.nn.Parameter(torch.rand(H, dtype=torch.float64))

    def forward(self, q, k, v):
        problem = Transport(
            Tsallis(self.alpha),
            prior=Causal("bottom_right") * Window(255) * ALiBi(self.slopes),
            marginal=Rows(sink=self.sink),
            temperature=self.temperature,
        )
        request = AuxRequest(entropy=True, dual=True)
        out, aux = regard.attention(q, k, v, enable_gqa=True, problem=problem, return_aux=request)
        return out, aux.entropy, aux.dual


def module_inputs(Tq=5, Tk=6, grad=True):
    shapes = [(2, 4, Tq, 3), (2, 2, Tk, 3), (2, 2, Tk, 2)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=grad) for s in shapes]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compile_module(dynamic):
    module = Module()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for Tq, Tk in ((5, 6), (3, 9)):
        inputs = module_inputs(Tq, Tk)
        results = [f(*inputs) for f in (compiled, module)]
        leaves = [*inputs, *module.parameters()]
        gradients = [torch.autograd.grad(o.sin().sum() + e.sum(), leaves) for o, e, _ in results]
        assert all(map(torch.allclose, *results)) and all(map(torch.allclose, *gradients))
        assert not any(dual.requires_grad for _, _, dual in results)


@by_some
def test_compile(case):
    built = build(case)
    function = functools.partial(regard.attention, **built.arguments, backend="torch")
    inputs = (built.query, built.key, built.value)
    results = [f(*inputs) for f in (torch.compile(function, fullgraph=True), function)]
    gradients = [torch.autograd.grad(out.sin().sum(), list(built.leaves.values())) for out in results]
    assert torch.allclose(*results) and all(map(torch.allclose, *gradients))


@pytest.mark.parametrize(
    "arguments", [{}, {"is_causal": True}, {"attn_mask": torch.ones(5, 5).tril().bool()}], ids=repr
)
def test_compile_auto(arguments):
    q = torch.randn(2, 4, 5, 8)
    function = functools.partial(regard.attention, **arguments)
    assert torch.allclose(torch.compile(function, fullgraph=True)(q, q, q), function(q, q, q), atol=1e-6)


def test_compile_own_regularizer():
    own = regard.FDivergence(lambda x: x * x / 2, torch.relu, lambda t: (t > 0).to(t.dtype), lower=0.0)
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    out = torch.compile(functools.partial(regard.attention, problem=Transport(own)), fullgraph=True)(q, k, v)
    expected = regard.attention(q, k, v, problem=Transport(Tsallis(2.0)))
    assert torch.allclose(out, expected, atol=1e-6)
    gradients = [torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, expected)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_compile_dropout_draws_a_new_mask():
    q = torch.randn(2, 4, 16, 8)
    compiled = torch.compile(functools.partial(regard.attention, dropout_p=0.5), fullgraph=True)
    assert not torch.equal(compiled(q, q, q), compiled(q, q, q))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export(strict):
    module, inputs = Module(), module_inputs(grad=False)
    exported = torch.export.export(module, tuple(inputs), strict=strict).module()
    assert all(map(torch.allclose, exported(*inputs), module(*inputs)))


def test_export_of_both_marginals_raises_with_the_reason():
    class Call(torch.nn.Module):
        def forward(self, x):
            return regard.attention(x, x, x, problem=Transport(marginal=regard.RowsAndColumns()))

    with pytest.raises(NotImplementedError, match=r"expected a marginal that torch\.export can trace"):
        torch.export.export(Call(), (torch.randn(1, 2, 8, 4),), strict=False)


def test_export_with_dynamic_lengths_and_a_problem_as_input(tmp_path):
    class Call(torch.nn.Module):
        def forward(self, q, k, v, problem):
            return regard.attention(q, k, v, enable_gqa=True, problem=problem)

    q, k, v = module_inputs(grad=False)
    problem = Transport(Tsallis(1.3), prior=Causal("bottom_right") * Bias(torch.randn(4, 1, 1, dtype=torch.float64)))
    exported = torch.export.export(Call(), (q, k, v, problem))
    torch.export.save(exported, tmp_path / "call.pt2")
    loaded = torch.export.load(tmp_path / "call.pt2").module()
    assert torch.allclose(loaded(q, k, v, problem), Call()(q, k, v, problem))

    dim = torch.export.Dim
    shapes = ({2: dim("tq")}, {2: dim("tk")}, {2: dim("tk")})
    longer = module_inputs(7, 9, grad=False)
    module = Module()
    exported = torch.export.export(module, (q, k, v), dynamic_shapes=shapes).module()
    assert all(map(torch.allclose, exported(*longer), module(*longer)))


@by_some
def test_opcheck(case):
    built = build(case)
    form = lower(built.query, built.key, built.value, **built.arguments)
    arguments = ("torch", "out,entropy,mu", *library.to_arguments(form))
    assert set(opcheck(library.attend_op, arguments).values()) == {"SUCCESS"}


@by_some
def test_double_backward_and_forward_mode(case):
    from support.cases import substitute

    built = build(case)
    names = list(built.leaves)

    def function(*leaves):
        fresh = build(case)
        for name, leaf in zip(names, leaves, strict=True):
            substitute(fresh, fresh.leaves[name], leaf)
        return call(fresh)

    leaves = list(built.leaves.values())
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True, atol=1e-4, rtol=1e-3)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("backend", ["native", "sdpa", "torch", "auto"])
@pytest.mark.parametrize(
    "name", ["softmax", "temperature per head", "bias, dense", *SOME_NAMES, "learned alpha per head"]
)
def test_forward_mode_on_every_backend(name, backend):
    """<g, J t> = <J^T g, t> over every tensor of the problem, for output, entropy and lse. The output is the
    backend's."""
    from support.cases import substitute

    case = next(c for c in CASES if c.name == name)
    built = build(case)
    if backend != "auto":
        skip_unless_served(backend, built)
    kl = "problem" not in built.arguments or isinstance(built.arguments["problem"].regularizer, regard.KL)
    request = None if backend == "sdpa" else AuxRequest(entropy=True, lse=kl)
    tangents = {name: torch.randn_like(leaf) for name, leaf in built.leaves.items()}

    copies = iter([build(case) for _ in range(4)])

    def function(leaves):
        fresh = next(copies)
        for name, leaf in leaves.items():
            substitute(fresh, fresh.leaves[name], leaf)
        return regard.attention(
            fresh.query, fresh.key, fresh.value, **fresh.arguments, backend=backend, return_aux=request
        )

    def flat(result):
        return (
            [result]
            if request is None
            else [result[0], *(t for t in (result[1].entropy, result[1].lse) if t is not None)]
        )

    expected = flat(function(built.leaves))
    incoming = [torch.randn_like(t) for t in expected]
    gradients = torch.autograd.grad(expected, list(built.leaves.values()), incoming, materialize_grads=True)
    product = sum((g * t).sum() for g, t in zip(gradients, tangents.values(), strict=True))
    fixed = {name: leaf.detach() for name, leaf in built.leaves.items()}
    plain = flat(function(fixed))
    outputs, moved = torch.func.jvp(lambda leaves: flat(function(leaves)), (fixed,), (tangents,))
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(leaf, tangents[name]) for name, leaf in fixed.items()}
        unpacked = [forward_ad.unpack_dual(t) for t in flat(function(duals))]
    for got, change in ((outputs, moved), ([u.primal for u in unpacked], [u.tangent for u in unpacked])):
        assert all(map(torch.allclose if backend in ("torch", "auto") else torch.equal, got, plain))
        total = sum((g * t).sum() for g, t in zip(incoming, change, strict=True))
        assert torch.allclose(total, product, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("backend", ["native", "sdpa", "torch"])
def test_orders_and_modes_nest(backend):
    """Forward over forward, reverse over forward, forward over reverse, batches of tangents: against the definition."""
    q, k, v, t = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(4))
    if backend == "native":
        pytest.importorskip("regard._native", reason="the native engine was not built")

    def function(backend):
        return lambda a: regard.attention(a, k, v, is_causal=True, backend=backend)

    def loss(f):
        return lambda a: f(a).sin().sum()

    def push(f):
        return lambda a: torch.func.jvp(f, (a,), (t,))[1]

    mine, definition = function(backend), function("torch")
    double = torch.autograd.functional.hessian(loss(definition), q)  # by reverse mode twice
    curvature = (double.flatten(0, 3).flatten(1) @ t.flatten()).view_as(q)
    assert torch.allclose(torch.func.hessian(loss(mine))(q), double)
    assert torch.allclose(push(torch.func.grad(loss(mine)))(q), curvature)
    assert torch.allclose(torch.func.grad(push(loss(mine)))(q), curvature)
    assert torch.allclose(push(push(loss(mine)))(q), (curvature * t).sum())
    assert torch.allclose(torch.func.jacfwd(mine)(q), torch.func.jacrev(definition)(q))
    leaf = q.clone().requires_grad_()
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(loss(mine)(dual := forward_ad.make_dual(leaf, t)), dual)
        assert torch.allclose(forward_ad.unpack_dual(gradient).tangent, curvature)
        (gradient,) = torch.autograd.grad(
            forward_ad.unpack_dual(loss(mine)(forward_ad.make_dual(leaf, t))).tangent, leaf
        )
        assert torch.allclose(gradient, curvature)


FUNCTIONS = {
    "softmax": functools.partial(regard.attention, enable_gqa=True, backend="torch"),
    "auto": functools.partial(regard.attention, enable_gqa=True, is_causal=True),
    "entmax": functools.partial(regard.attention, enable_gqa=True, problem=Transport(Tsallis(1.5))),
    "top-m": functools.partial(
        regard.attention, enable_gqa=True, problem=Transport(FermiDirac(), marginal=Rows(mass=2))
    ),
    "free": functools.partial(regard.attention, enable_gqa=True, problem=Transport(Tsallis(1.7), marginal=Free(0.2))),
    "biased": functools.partial(
        regard.attention,
        enable_gqa=True,
        problem=Transport(prior=Causal("bottom_right") * Bias(torch.randn(2, 1, 5, 6, dtype=torch.float64))),
        attn_mask=torch.randn(2, 1, 1, 6, dtype=torch.float64),
    ),
}
by_function = pytest.mark.parametrize("name", FUNCTIONS)


@by_function
def test_func_grad_and_vmap(name):
    function = FUNCTIONS[name]
    q, k, v = (t.detach() for t in module_inputs())
    gradient = torch.func.grad(lambda *a: function(*a).sin().sum(), argnums=(0, 1, 2))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(function(*leaves).sin().sum(), leaves)
    assert all(map(torch.allclose, gradient(q, k, v), expected))

    many_q, many_k = torch.stack([q, 2 * q, q / 2]), torch.stack([k, k + 1, 1.5 * k], 1)
    got = torch.func.vmap(function, (0, 1, None))(many_q, many_k, v)
    assert torch.allclose(got, torch.stack([function(a, b, v) for a, b in zip(many_q, many_k.unbind(1), strict=True)]))

    per_sample = torch.func.vmap(gradient, (0, None, None))(many_q, k, v)
    singly = [gradient(a, k, v) for a in many_q]
    assert all(torch.allclose(per_sample[i], torch.stack([s[i] for s in singly])) for i in range(3))


@by_function
def test_func_jvp_and_hessian(name):
    function = FUNCTIONS[name]
    q, k, v = (t.detach() for t in module_inputs())
    tangent, h = torch.randn_like(q), 1e-6
    _, got = torch.func.jvp(lambda a: function(a, k, v), (q,), (tangent,))
    numeric = (function(q + h * tangent, k, v) - function(q - h * tangent, k, v)) / (2 * h)
    assert torch.allclose(got, numeric, atol=1e-6) and got.abs().max() > 1e-3

    def loss(a):
        return function(a, k, v).sin().sum()

    assert torch.allclose(torch.func.hessian(loss)(q), torch.autograd.functional.hessian(loss, q), atol=1e-8)


def test_vmap_over_a_parameter_of_the_problem():
    q, k, v = (t.detach() for t in module_inputs())
    taus = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def function(tau):
        return regard.attention(q, k, v, enable_gqa=True, problem=Transport(Tsallis(1.5), temperature=tau)).sum()

    expected = [torch.func.grad(function)(tau) for tau in taus]
    assert torch.allclose(torch.func.vmap(torch.func.grad(function))(taus), torch.stack(expected))


def test_forward_mode_is_never_silently_zero():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        for problem in (None, Transport(Tsallis(1.5))):
            out = regard.attention(dual, k, v, problem=problem)
            assert torch.autograd.forward_ad.unpack_dual(out).tangent.abs().max() > 0

    def compiled_jvp(x):
        function = functools.partial(regard.attention, problem=Transport(Tsallis(1.5)))
        return torch.func.jvp(lambda a: function(a, k, v), (x,), (torch.ones_like(x),))[1]

    # PyTorch 2.8 shows the type of the error in place of its message.
    shown = r"forward mode under torch\.compile" if torch.__version__ >= (2, 9) else "NotImplementedError"
    with pytest.raises(Exception, match=shown):
        torch.compile(compiled_jvp, fullgraph=True)(q)


@pytest.mark.parametrize("problem", [None, Transport(Tsallis(1.5))], ids=["softmax", "entmax"])
def test_autocast(problem):
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, aux = regard.attention(q, k, v, problem=problem, return_aux=AuxRequest(entropy=True))
        wide = regard.attention(q.double(), k.double(), v.double(), problem=problem)
    assert out.dtype == torch.bfloat16 and aux.entropy.dtype == torch.float32 and wide.dtype == torch.float64
    (out.float().sum() + aux.entropy.sum()).backward()
    assert q.grad.dtype == torch.float32
    # Only the inputs are rounded to bfloat16; the computation is in float32.
    rounded = [t.detach().bfloat16().double() for t in (q, k, v)]
    exact, exact_aux = regard.attention(*rounded, problem=problem, return_aux=AuxRequest(entropy=True))
    assert (aux.entropy - exact_aux.entropy).abs().max() < 1e-5
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_saved_tensors_are_released():
    """A context must not hold the inputs twice. The memory of the graph is released with the output."""
    import gc
    import weakref

    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    out = regard.attention(q, k, v, problem=Transport(Tsallis(1.5)))
    ref = weakref.ref(out.grad_fn)
    del out
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(backend, reentrant):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def function(q, k, v):
        return regard.attention(q, k, v, dropout_p=0.2, backend=backend)

    gradients = []
    for run in (function, lambda *a: checkpoint(function, *a, use_reentrant=reentrant)):
        torch.manual_seed(0)
        for t in (q, k, v):
            t.grad = None
        run(q, k, v).sin().sum().backward()
        gradients.append([t.grad for t in (q, k, v)])
    assert all(map(torch.allclose, *gradients))


def test_vmap_over_a_problem_and_out_of_an_aux():
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    alphas = torch.tensor([1.5, 2.0], dtype=torch.float64)
    got = torch.vmap(lambda p: regard.attention(q, k, v, problem=p))(Transport(Tsallis(alphas)))
    expected = [regard.attention(q, k, v, problem=Transport(Tsallis(float(a)))) for a in alphas]
    assert torch.allclose(got, torch.stack(expected))
    _, aux = torch.vmap(lambda a: regard.attention(a, k, v, return_aux=AuxRequest(lse=True, kl=True)))(
        torch.stack([q, q])
    )
    assert aux.lse.shape == (2, 1, 2, 8) and aux.entropy is None


def test_transforms_of_statistics_are_right():
    """Statistics that have no gradient in eager mode have one under a transform, where a zero would not be noticed."""
    q, k, v, tangent = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(4))

    def kl(a):
        return regard.attention(a, k, v, return_aux=AuxRequest(kl=True))[1].kl.sum()

    h = 1e-6
    numeric = (kl(q + h * tangent) - kl(q - h * tangent)) / (2 * h)
    assert torch.allclose(torch.func.jvp(kl, (q,), (tangent,))[1], numeric, atol=1e-6)
    assert torch.allclose((torch.func.grad(kl)(q) * tangent).sum(), numeric, atol=1e-6)

    def output(a):
        return regard.attention(a, k, v, return_aux=AuxRequest(kl=True))[0]

    assert torch.equal(
        torch.func.jvp(output, (q,), (tangent,))[0], regard.attention(q, k, v)
    )  # the backend that auto chooses


def test_compile_with_other_numbers():
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    functions = {
        "scale": lambda q, x: regard.attention(q, k, v, scale=x),
        "sink": lambda q, x: regard.attention(q, k, v, problem=Transport(marginal=Rows(sink=x))),
        "offset": lambda q, x: regard.attention(q, k, v, problem=Transport(Tsallis(2.0), marginal=Free(x))),
        "temperature": lambda q, x: regard.attention(q, k, v, problem=Transport(temperature=x)),
    }
    for function in functions.values():
        compiled = torch.compile(function, fullgraph=True)
        for x in (0.5, 0.6, 0.7):
            assert torch.allclose(compiled(q, x), function(q, x), atol=1e-6)


def test_export_returning_an_aux():
    class Call(torch.nn.Module):
        def forward(self, q, k, v):
            return regard.attention(q, k, v, return_aux=AuxRequest(entropy=True))

    inputs = tuple(torch.randn(1, 2, 8, 4) for _ in range(3))
    _, aux = torch.export.export(Call(), inputs).module()(*inputs)
    assert torch.allclose(aux.entropy, Call()(*inputs)[1].entropy)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_softmax_has_a_second_derivative(backend):
    """On every backend that auto chooses. (PyTorch's own function, chosen without the native engine, has none.)"""
    inputs = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    if regard.select_backend(*inputs, is_causal=True, backend=backend).backend == "sdpa":
        pytest.skip("PyTorch's own function serves this call")
    function = functools.partial(regard.attention, is_causal=True, backend=backend)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_tracing_sees_an_operator_and_fake_tensors_are_never_read(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    if backend == "native" and engine.extension()[0] is None:
        pytest.skip("no native engine")

    def both(q, k, v):
        out, aux = regard.attention(q, k, v, return_aux=regard.AuxRequest(entropy=True), backend=backend)
        return out, aux.entropy

    with FakeTensorMode() as mode:
        q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
        out, entropy = both(q, k, v)
        assert out.shape == q.shape and entropy.shape == (1, 2, 40) and out.fake_mode is mode
        given = [t.requires_grad_() for t in (q, k, v)]
        assert [g.shape for g in torch.autograd.grad(both(*given)[0].sum(), given)] == [q.shape] * 3
    q, k, v, other = (torch.randn(1, 2, 40, 16) for _ in range(4))
    for how in ("real", "fake", "symbolic"):
        graph = make_fx(both, tracing_mode=how)(q, k, v)
        assert any("regard" in str(node.target) for node in graph.graph.nodes)
        for found, expected in zip(graph(other, k, v), both(other, k, v), strict=True):  # not fixed to the traced value
            assert torch.equal(found, expected)
