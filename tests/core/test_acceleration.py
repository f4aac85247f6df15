"""Regard in the place of PyTorch's CPU kernel: `accelerated` and `activate_flash_attention_impl("regard")`.

The sweep over masks, dtypes, shapes and layouts is in tests/backends/test_sdpa_grid.py, whole models are in
tests/hf/test_accelerated_models.py.
"""

import math
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import acceleration
from regard.acceleration import BACKWARD, FORWARD, calls
from regard.backends.native import engine
from support.operators import groups_heads
from support.tolerance import assert_as_good, assert_close, pytorch_loss

pytestmark = pytest.mark.skipif(engine.extension()[0] is None, reason="the native engine is not built")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
for dtype in DTYPES:
    pytorch_loss(dtype)  # measured here, where PyTorch's kernel is in its place
HKV = 2 if groups_heads() else 4
registry = pytest.mark.skipif(
    not hasattr(nn.attention, "activate_flash_attention_impl"), reason="this PyTorch has no registry of implementations"
)


@pytest.fixture
def always(monkeypatch):
    """Serve small calls, too."""
    monkeypatch.setattr(acceleration, "small", lambda *_, **__: False)


def counts():
    return calls.forward, calls.backward, calls.stock.total()


class Served:
    """A context in which regard is active and must serve this many calls, forward and backward."""

    def __init__(self, forward=1, backward=0, stock=0):
        self.expected = forward, backward, stock

    def __enter__(self):
        self.context, self.before = regard.accelerated(), counts()
        self.context.__enter__()

    def __exit__(self, *exception):
        self.context.__exit__(*exception)
        if exception[0] is None:
            assert tuple(b - a for a, b in zip(self.before, counts(), strict=True)) == self.expected


def check(what, got, expected, dtype):
    assert_close(got, expected, dtype, what=what)


def operator(name):
    return getattr(torch.ops.aten, name).default


def dispatch():
    """Everything that PyTorch's dispatcher knows about the two operators."""
    names = (f"aten::{FORWARD}", f"aten::{BACKWARD}")
    return [show(name) for name in names for show in (torch._C._dispatch_dump, torch._C._dispatch_dump_table)]


def inputs(B=2, H=4, Hkv=HKV, Tq=37, Tk=41, D=16, dtype=torch.float32, layout="plain", grad=False):
    def draw(H, T):
        if layout == "transposed":
            return torch.randn(B, T, H, D, dtype=dtype).transpose(1, 2)
        if layout == "packed":  # part of one projection
            return torch.randn(B, T, 3 * H, D, dtype=dtype).transpose(1, 2)[:, H : 2 * H]
        if layout == "expanded":
            return torch.randn(1, H, T, D, dtype=dtype).expand(B, -1, -1, -1)
        return torch.randn(B, H, T, D, dtype=dtype)

    return [draw(heads, T).requires_grad_(grad) for heads, T in ((H, Tq), (Hkv, Tk), (Hkv, Tk))]


def mask(kind, Tq=37, Tk=41, dtype=torch.float32):
    """The arguments (is_causal, attn_mask) of the operator."""
    if kind in ("none", "causal"):
        return kind == "causal", None
    shape = {"2-D": (Tq, Tk), "keys": (2, 1, 1, Tk), "full": (2, 4, Tq, Tk), "queries": (1, 1, Tq, 1)}.get(
        kind, (Tq, Tk)
    )
    found = torch.randn(shape)
    if kind == "empty rows":
        found = found.masked_fill(torch.rand(shape) < 0.3, -math.inf)
        found[::5] = -math.inf
    if kind == "lowest rows":
        found[::5] = torch.finfo(dtype).min
    return False, found.to(dtype if kind != "keys" else torch.float32)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "causal", "2-D", "keys", "full", "queries", "empty rows"])
@pytest.mark.parametrize("layout", ["plain", "transposed", "packed", "expanded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_as_pytorch_has_them(dtype, layout, kind, always):
    """Both operators: values, dtypes, shapes and strides, logsumexp included."""
    q, k, v = inputs(dtype=dtype, layout=layout)
    causal, attn_mask = mask(kind, dtype=dtype)
    incoming = torch.randn_like(q)

    def results(q, k, v, incoming, attn_mask):
        options = {"attn_mask": attn_mask, "scale": 0.3}
        out, lse = operator(FORWARD)(q, k, v, 0.0, causal, **options)
        return [out, lse, *operator(BACKWARD)(incoming, q, k, v, out, lse, 0.0, causal, **options)]

    stock = results(q, k, v, incoming, attn_mask)
    with Served(1, 1):
        mine = results(q, k, v, incoming, attn_mask)
    exact = results(*(t if t is None else t.double() for t in (q, k, v, incoming, attn_mask)))
    for what, a, b, truth in zip(("out", "lse", "dq", "dk", "dv"), mine, stock, exact, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), what
        assert_as_good(what, a, b, truth)
        if what in ("out", "lse"):
            check(what, a, truth, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_at_the_lowest_number(dtype, always):
    """A row whose mask is the lowest number everywhere averages all values. The logsumexp of PyTorch has no digits left
    for the number of keys, so its gradient is taken from the engine's own."""
    q, k, v = inputs(dtype=dtype, grad=True)
    _, attn_mask = mask("lowest rows", dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*wide, attn_mask.double(), enable_gqa=True)
    # In float64 the digits of the scores are not lost beside the lowest number of float32.
    uniform = wide[2].mean(2, keepdim=True).repeat_interleave(4 // HKV, 1).expand(expected.shape)
    expected = torch.where((torch.arange(37) % 5 == 0)[:, None], uniform, expected)
    with Served(1, 1):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True)
        (found,) = torch.autograd.grad(out, v, torch.ones_like(out))
    check("out", out, expected, dtype)
    check("dv", found, torch.autograd.grad(expected.sum(), wide[2])[0], dtype)


@pytest.mark.parametrize("threads", [1, 2])
def test_results_repeat(threads, always):
    """Bitwise, whatever the number of threads."""
    q, k, v = inputs(Tq=300, Tk=300, grad=True)

    def results():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out.sin().sum(), (q, k, v))]

    before = torch.get_num_threads()
    with regard.accelerated():
        first = results()
        torch.set_num_threads(threads)
        try:
            again = results()
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_nan_stays_visible(always):
    q, k, v = inputs(grad=True)
    with torch.no_grad():
        q[0, 0, 3, 2] = math.nan
    with Served(1, 1):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        (dv,) = torch.autograd.grad(out.sum(), v)
    assert out[0, 0, 3].isnan().all() and out.isnan().sum() == 16
    assert dv[0, 0].isnan().all() and not dv[1].isnan().any()


# --- calls that go on to PyTorch's kernel -----------------------------------------------------------------------------


def test_small_calls_are_left_to_pytorch():
    q, k, v = inputs(Tq=5, Tk=5, grad=True)
    plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    gradients = torch.autograd.grad(plain.sum(), (q, k, v))
    with Served(0, 0, 2):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        found = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.equal(out, plain) and all(map(torch.equal, found, gradients))
    assert calls.stock["small"] >= 2


@pytest.mark.parametrize(
    ("Tq", "Tk", "dtype", "forward", "backward"),
    [
        (16, 16, torch.float32, False, False),
        (64, 64, torch.float32, True, True),
        (1, 128, torch.float32, False, False),
        (1, 8192, torch.float32, True, False),
        (16, 16, torch.bfloat16, True, True),
        (1, 512, torch.bfloat16, True, False),
    ],
)
def test_what_counts_as_small(Tq, Tk, dtype, forward, backward):
    q, k, _ = inputs(1, 12, 12, Tq, Tk, 64, dtype)
    assert acceleration.small(q, k, backward=False) != forward
    assert acceleration.small(q, k, backward=True) != backward


def test_a_mask_and_causal_together(always):
    q, k, v = inputs()
    options = (q, k, v, 0.0, True)
    plain = operator(FORWARD)(*options, attn_mask=torch.zeros(37, 41))
    with Served(0, 0, 1):
        found = operator(FORWARD)(*options, attn_mask=torch.zeros(37, 41))
    assert all(map(torch.equal, plain, found))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: ((q, k, v, 0.5), {}),
        lambda q, k, v: ((q, k, v[..., :8]), {}),
        lambda q, k, v: ((q, k.double(), v.double()), {}),
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(37, 41, dtype=torch.bool)}),
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(37, 41).double()}),
        lambda q, k, v: ((q[0], k[0], v[0]), {}),
    ],
)
def test_errors_are_those_of_pytorch(change, always):
    arguments, options = change(*inputs())
    plain = message(lambda: operator(FORWARD)(*arguments, **options))
    with Served(0, 0, 1):
        found = message(lambda: operator(FORWARD)(*arguments, **options))
    assert isinstance(plain, str) and found == plain


def test_dropout_is_that_of_pytorch(always):
    q, k, v = inputs()
    results = []
    for context in (torch.enable_grad(), regard.accelerated()):
        with context:
            torch.manual_seed(1)
            results.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True))
    assert torch.equal(*results)


# --- activation -------------------------------------------------------------------------------------------------------


@registry
def test_activated_by_name_and_restored(always):
    plain, before = F.scaled_dot_product_attention(*inputs(Hkv=4)), dispatch()
    assert "regard" in nn.attention.list_flash_attention_impls()
    nn.attention.activate_flash_attention_impl("regard")
    try:
        assert nn.attention.current_flash_attention_impl() == "regard" and dispatch() != before
        served = calls.forward
        F.scaled_dot_product_attention(*inputs(Hkv=4))
        assert calls.forward == served + 1
        nn.attention.activate_flash_attention_impl("regard")  # again: the first one is replaced
        F.scaled_dot_product_attention(*inputs(Hkv=4))
        assert calls.forward == served + 2
    finally:
        nn.attention.restore_flash_attention_impl()
    assert nn.attention.current_flash_attention_impl() is None and dispatch() == before
    torch.manual_seed(0)
    assert torch.equal(F.scaled_dot_product_attention(*inputs(Hkv=4)), plain) and calls.forward == served + 2


def test_contexts_nest(always):
    before = dispatch()
    with regard.accelerated() as one:
        with regard.accelerated() as other:
            assert one is other is calls
            inside = dispatch()
        assert dispatch() == inside != before
        F.scaled_dot_product_attention(*inputs(Hkv=4))
    assert dispatch() == before
    with pytest.raises(KeyError), regard.accelerated():
        raise KeyError
    assert dispatch() == before


@registry
def test_a_context_does_not_end_an_activation():
    before = dispatch()
    nn.attention.activate_flash_attention_impl("regard")
    active = dispatch()
    with regard.accelerated():
        pass
    assert dispatch() == active
    with regard.accelerated():
        nn.attention.restore_flash_attention_impl()
        assert dispatch() == active
    assert dispatch() == before


def test_threads(always):
    """Contexts of several threads overlap; every result is right, and the last one that ends restores PyTorch's."""
    before, wrong = dispatch(), []
    q, k, v = inputs(Tq=64, Tk=64)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def work(n):
        for _ in range(20):
            with regard.accelerated():
                out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            if not torch.allclose(out, expected, atol=1e-5):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and dispatch() == before


def test_no_warning():
    code = "import warnings; warnings.simplefilter('error'); import regard\nwith regard.accelerated(): pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_without_the_engine(monkeypatch):
    monkeypatch.setattr(engine, "_loaded", (None, "the native engine was not built"))
    before = dispatch()
    with pytest.raises(RuntimeError, match="place of PyTorch's attention kernel: the native engine was not built"):
        regard.accelerated().__enter__()
    if hasattr(nn.attention, "activate_flash_attention_impl"):
        with pytest.raises(RuntimeError, match=r"not built. Install a C\+\+17 compiler"):
            nn.attention.activate_flash_attention_impl("regard")
        assert nn.attention.current_flash_attention_impl() is None
    assert dispatch() == before


# --- PyTorch around the kernel ----------------------------------------------------------------------------------------


def attend(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(when, dynamic, always):
    """A graph calls the operator, so one that was compiled earlier is served, too. Its strides are those that the
    compiler assumed."""
    q, k, v = inputs(layout="transposed", Hkv=4, grad=True)

    def step(q, k, v):
        out = attend(q * 2, k, v, is_causal=True)
        return (out.transpose(1, 2).flatten(2) * 3).sin()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    expected = step(q, k, v)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    if when == "before":
        torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    with Served(1, 1):
        out = compiled(q, k, v)
        found = torch.autograd.grad(out.sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = step(*wide)
    exact = (exact, *torch.autograd.grad(exact.sum(), wide))
    for a, b, truth in zip((out, *found), (expected, *gradients), exact, strict=True):
        assert_as_good("compiled", a, b, truth)


def test_exported(always):
    class Model(nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, is_causal=True)

    q, k, v = inputs(Hkv=4)
    expected = Model()(q, k, v)
    program = torch.export.export(Model(), (q, k, v))
    with Served(1):
        out = program.module()(q, k, v)
        again = torch.export.export(Model(), (q, k, v))
    check("exported", out, expected, torch.float32)
    assert torch.equal(again.module()(q, k, v), expected)
    with Served(0):  # PyTorch's decompositions leave products and a softmax
        program.run_decompositions().module()(q, k, v)


def test_transforms(always):
    q, k, v = inputs(Hkv=4)
    batched = torch.func.vmap(attend)
    expected = batched(q[:, None], k[:, None], v[:, None])

    def loss(q):
        return attend(q, k, v).sin().sum()

    with Served(2):  # PyTorch has no batching rule for its kernel: one call for each sample
        check("vmap", batched(q[:, None], k[:, None], v[:, None]), expected, torch.float32)
    gradient = torch.func.grad(loss)(q)
    with Served(1, 1):
        check("grad", torch.func.grad(loss)(q), gradient, torch.float32)


def message(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def test_what_pytorch_does_not_differentiate(always):
    """Forward mode and second derivatives end as they do with PyTorch's kernel."""
    q, k, v = inputs(Hkv=4, grad=True)

    def tangent():
        return torch.func.jvp(lambda q: attend(q, k, v), (q.detach(),), (q.detach(),))[1]

    def second():
        (first,) = torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)
        return torch.autograd.grad(first.sum(), q)[0]

    for call in (tangent, second):
        plain = message(call)
        with regard.accelerated():
            found = message(call)
        assert isinstance(plain, str) and found == plain


def test_modes(always):
    q, k, v = inputs(Hkv=4)
    expected = attend(q, k, v)
    with Served(1), torch.inference_mode():
        out = attend(q, k, v)
    assert out.is_inference()
    check("inference", out, expected, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = attend(q, k, v)
        with Served(1):
            out = attend(q, k, v)
    assert out.dtype == rounded.dtype == torch.bfloat16
    check("autocast", out, expected, torch.bfloat16)


def test_tensors_without_memory(always):
    """Meta and fake tensors do not reach the engine, and have the strides of real results."""
    q, k, v = inputs(layout="transposed")
    with Served(1, 1):
        real = operator(FORWARD)(q, k, v)
        real += operator(BACKWARD)(torch.ones_like(real[0]), q, k, v, *real, 0.0, False)
    with Served(0):
        meta = [t.to("meta") for t in (q, k, v)]
        found = operator(FORWARD)(*meta)
        found += operator(BACKWARD)(torch.ones_like(found[0]), *meta, *found, 0.0, False)
    assert [(t.shape, t.stride(), t.dtype) for t in found] == [(t.shape, t.stride(), t.dtype) for t in real]
    with Served(1):
        torch.library.opcheck(operator(FORWARD), (q, k, v), test_utils=("test_faketensor",))


@pytest.mark.parametrize("backend", ["sdpa", "native", "torch", "auto"])
def test_backends_of_regard(backend, always):
    """`backend="sdpa"` calls PyTorch's function, which then calls the engine."""
    q, k, v = inputs(grad=True)
    options = {"is_causal": True, "enable_gqa": True, "backend": backend}
    expected = regard.attention(q, k, v, **options)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    with Served(*((1, 1) if backend == "sdpa" else (0, 0))):
        out = regard.attention(q, k, v, **options)
        found = torch.autograd.grad(out.sum(), (q, k, v))
    for a, b in zip((out, *found), (expected, *gradients), strict=True):
        check(backend, a, b, torch.float32)


# --- PyTorch's modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("training", "fast"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder(training, fast, padded, always, monkeypatch):
    """In evaluation its layers take PyTorch's fast path, which computes attention without the operator."""
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", fast)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(3, 20, 32)
    padding = torch.arange(20) >= torch.tensor([[20], [13], [7]]) if padded else None

    def results():
        if not training:
            with torch.no_grad():
                return [model(x, src_key_padding_mask=padding)]
        model.zero_grad()
        out = model(x, src_key_padding_mask=padding)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, before = results(), counts()
        with regard.accelerated():
            found = results()
    served = [b - a for a, b in zip(before, counts(), strict=True)]
    assert served == ([2, 2, 0] if training else [0, 0, 0] if fast else [2, 0, 0])
    model, x, fast = model.double(), x.double(), False
    for a, b, truth in zip(found, plain, results(), strict=True):
        assert_as_good("encoder", a, b, truth)


def test_multihead_attention(always):
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 20, 32)
    expected, _ = module(x, x, x, need_weights=False)
    with Served(1):
        out, _ = module(x, x, x, need_weights=False)
    check("module", out, expected, torch.float32)
    with Served(0):
        module(x, x, x)  # PyTorch computes the weights that it returns by plain operations
