"""Batches of gradients: is_grads_batched, jacobian(vectorize=True), gradcheck's batched modes."""

import functools

import pytest
import torch

import regard
from regard import AuxRequest, Causal, FermiDirac, Rows, Transport, Tsallis
from regard.autograd import batched
from regard.backends import BACKENDS
from support.cases import CASES, SOME_NAMES, build, by_backend, by_case, skip_unless_served
from support.tolerance import assert_close, stock_attention


def compare_batched(results, leaves, samples=3, dtype=torch.float64):
    """Compare one backward pass for a batch of gradients with one pass per sample, and return the batch."""
    incoming = [torch.randn(samples, *r.shape, dtype=torch.float64).to(r.dtype) for r in results]
    how = {"retain_graph": True, "allow_unused": True}
    got = torch.autograd.grad(results, leaves, incoming, is_grads_batched=True, **how)
    one = [torch.autograd.grad(results, leaves, [g[i] for g in incoming], **how) for i in range(samples)]
    for n, (leaf, batch) in enumerate(zip(leaves, got, strict=True)):
        if batch is None:
            assert all(sample[n] is None for sample in one)
        else:
            assert batch.shape == (samples, *leaf.shape) and batch.dtype == leaf.dtype
            assert_close(batch, torch.stack([sample[n] for sample in one]), dtype)
    return got


@by_backend
@by_case
def test_batched_gradients(case, backend):
    """Of the output, of lse and of entropy, for every tensor of every problem."""
    built = build(case)
    problem = built.arguments.get("problem")
    request = None
    if backend != "sdpa":
        request = AuxRequest(entropy=True, lse=problem is None or isinstance(problem.regularizer, regard.KL))
    skip_unless_served(backend, built)
    found = regard.attention(
        built.query, built.key, built.value, **built.arguments, backend=backend, return_aux=request
    )
    results = [found] if request is None else [t for t in (found[0], found[1].entropy, found[1].lse) if t is not None]
    results = [r for r in results if r.requires_grad]
    assert any(g is not None and g.abs().max() > 1e-3 for g in compare_batched(results, list(built.leaves.values())))
    if request is not None:  # one output alone, without gradients of the others
        compare_batched(results[1:2], list(built.leaves.values()))


@pytest.mark.parametrize("backend", ["native", "sdpa", "torch"])
def test_vectorized_jacobian_equals_pytorch(backend):
    if backend == "native":
        pytest.importorskip("regard._native", reason="the native engine was not built")
    inputs = tuple(torch.randn(1, 2, 4, 8, dtype=torch.float64) for _ in range(3))
    function = functools.partial(regard.attention, is_causal=True, backend=backend)
    stock = functools.partial(stock_attention, is_causal=True)
    jacobian = torch.autograd.functional.jacobian
    expected = jacobian(stock, inputs)
    for strategy in ("reverse-mode", "forward-mode"):
        for got, wanted in zip(jacobian(function, inputs, vectorize=True, strategy=strategy), expected, strict=True):
            assert_close(got, wanted, torch.float64)


@pytest.mark.parametrize("name", ["softmax", *SOME_NAMES])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_gradcheck_in_batches(name, backend):
    case = next(c for c in CASES if c.name == name)
    built = build(case)
    skip_unless_served(backend, built)
    inputs = (built.query, built.key, built.value)
    function = functools.partial(regard.attention, **built.arguments, backend=backend)
    assert torch.autograd.gradcheck(
        function,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        fast_mode=True,
        atol=1e-4,
        rtol=1e-3,
    )
    assert torch.autograd.gradgradcheck(function, inputs, check_batched_grad=True, fast_mode=True, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_batched_gradients_of_second_order(backend):
    """A vectorized Hessian, and a derivative of a vectorized Jacobian."""
    if backend == "native":
        pytest.importorskip("regard._native", reason="the native engine was not built")
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3))

    def function(x):
        return regard.attention(x, k, v, problem=Transport(Tsallis(1.5)), backend=backend).sin()

    functional = torch.autograd.functional
    hessian = functional.hessian(lambda x: function(x).sum(), q)
    assert hessian.abs().max() > 1e-3
    assert torch.allclose(functional.hessian(lambda x: function(x).sum(), q, vectorize=True), hessian)
    leaf = q.clone().requires_grad_()
    jacobians = [functional.jacobian(function, leaf, vectorize=v, create_graph=True) for v in (True, False)]
    got, expected = (torch.autograd.grad(j.cos().sum(), leaf)[0] for j in jacobians)
    assert torch.allclose(got, expected) and expected.abs().max() > 1e-3


@pytest.mark.parametrize("together", [batched._TOGETHER, 1], ids=["together", "one by one"])
def test_batched_gradients_stay_on_the_backend(together, monkeypatch):
    """The engine computes all samples in one pass, or as many as the memory limit allows."""
    pytest.importorskip("regard._native", reason="the native engine was not built")
    passes = []
    backward = BACKENDS["native"].backward
    monkeypatch.setattr(
        BACKENDS["native"], "backward", lambda form, *rest: passes.append(form.shape[0]) or backward(form, *rest)
    )
    monkeypatch.setattr(batched, "_TOGETHER", together)
    q, k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = regard.attention(q, k, v, is_causal=True, backend="native")
    torch.autograd.grad(out, (q, k, v), torch.randn(3, *out.shape).double(), is_grads_batched=True, retain_graph=True)
    assert passes == ([6] if together > 1 else [2, 2, 2])
    compare_batched([out], [q, k, v])


BATCHED = {
    "dropout": {"dropout_p": 0.3},
    "float mask": {"attn_mask": torch.randn(5, 6)},
    "budget": {"problem": Transport(prior=Causal("bottom_right"), temperature=regard.MatchEntropy(0.7))},
}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (3, 2, 4)], ids=["2-D", "3-D", "5-D"])
def test_batched_gradients_of_any_call(name, dtype, lead):
    leaves = [torch.randn(*lead, T, 4).to(dtype).requires_grad_() for T in (5, 6, 6)]
    compare_batched([regard.attention(*leaves, **BATCHED[name])], leaves, dtype=dtype)


def test_batched_gradients_of_natural_attention():
    leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    compare_batched([regard.geometry.natural_attention(*leaves, damping=0.1)], leaves)


@pytest.mark.parametrize("temperature", [1.0, regard.MatchEntropy(0.7)], ids=["softmax", "budget"])
def test_batched_gradients_of_a_compiled_call(temperature, fresh_compiler):
    leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    function = functools.partial(regard.attention, problem=Transport(temperature=temperature))
    # Dynamo of PyTorch 2.8 cannot trace the solver of a budget: the graph breaks there (docs/versions.md).
    fullgraph = temperature == 1.0 or torch.__version__ >= (2, 9)
    compiled = torch.compile(function, fullgraph=fullgraph, backend="aot_eager")
    incoming = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    got = torch.autograd.grad(compiled(*leaves), leaves, incoming, is_grads_batched=True)
    expected = torch.autograd.grad(function(*leaves), leaves, incoming, is_grads_batched=True)
    assert all(map(torch.allclose, got, expected))


def test_batched_gradients_under_checkpointing():
    from torch.utils.checkpoint import checkpoint

    leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    incoming = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    outputs = regard.attention(*leaves), checkpoint(regard.attention, *leaves, use_reentrant=False)
    found = [torch.autograd.grad(out, leaves, incoming, is_grads_batched=True) for out in outputs]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_mixed_second_derivative(backend):
    """The gradient of the query depends on the key, too, under every transform."""
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3))

    def loss(a, b):
        return regard.attention(a, b, v, backend=backend).sin().sum()

    found = torch.func.grad(lambda b: torch.func.grad(loss)(q, b).cos().sum())(k)
    a, b = q.clone().requires_grad_(), k.clone().requires_grad_()
    (inner,) = torch.autograd.grad(loss(a, b), a, create_graph=True)
    assert torch.allclose(found, torch.autograd.grad(inner.cos().sum(), b)[0]) and found.abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_pullback_outlives_its_transform(backend):
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3))
    out, pull = torch.func.vjp(lambda a: regard.attention(a, k, v, backend=backend), q)
    with torch.no_grad():
        (found,) = pull(torch.ones_like(out))
    assert torch.allclose(found, torch.func.grad(lambda a: regard.attention(a, k, v, backend=backend).sum())(q))


def test_a_temperature_under_grad_and_jvp_is_known_to_be_positive():
    """Its values can be read under these transforms, so the native engine serves the call."""
    pytest.importorskip("regard._native", reason="the native engine was not built")
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3))
    tau = torch.tensor(0.7, dtype=torch.float64)

    def loss(tau, backend="native"):
        return regard.attention(q, k, v, problem=Transport(temperature=tau), backend=backend).sin().sum()

    expected = torch.func.grad(lambda x: loss(x, "torch"))(tau)
    assert torch.allclose(torch.func.grad(loss)(tau), expected)
    assert torch.allclose(torch.func.jvp(loss, (tau,), (torch.ones_like(tau),))[1], expected)


def test_third_derivative():
    s = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64)
    for problem in (Transport(), Transport(Tsallis(1.5)), Transport(FermiDirac(), marginal=Rows(mass=1.5))):

        def loss(x, problem=problem):
            return (regard.solve(x, problem).weights * torch.arange(4.0, dtype=torch.float64)).sum()

        def second(x, loss=loss):
            return torch.func.grad(lambda y: torch.func.grad(loss)(y).sin().sum())(x).sum()

        third = torch.func.grad(second)(s)
        h, numeric = 1e-5, []
        for j in range(4):
            e = h * torch.nn.functional.one_hot(torch.tensor(j), 4)
            numeric.append((second(s + e) - second(s - e)) / (2 * h))
        assert torch.allclose(third, torch.stack(numeric), atol=1e-6), problem
