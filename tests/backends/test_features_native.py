"""Attention by features on the native engine: against the definition, gradients, threads, instruction sets, declined
calls."""

import math

import pytest
import torch
from torch import Tensor

from regard import AuxRequest
from regard.backends.native import engine, features
from regard.features import Features, LinearAttention, Performer, ReLUFeatures
from support.features import MAPS, D, close, definition, seeded, tensors
from support.threads import with_threads

pytestmark = [
    pytest.mark.skipif(engine.extension()[0] is None, reason="the native engine was not built"),
    pytest.mark.usefixtures("isa", "poison"),
]

# Tq, Tk, H, Hkv, Dv: one chunk (48 rows), several chunks, several blocks (384), more keys than rows, fewer, odd sizes
SHAPES = [(5, 5, 2, 2, 6), (100, 100, 4, 2, 7), (50, 450, 2, 1, 17), (130, 50, 2, 2, 1), (900, 900, 1, 1, 8)]


def grads_of(module: Features, given: list[Tensor], grad: Tensor, causal: bool, **kwargs) -> list[Tensor]:
    given = [t.detach().clone().requires_grad_() for t in given]
    out = module(*given, causal, enable_gqa=True, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]


def like(t: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded(5), dtype=torch.float64).to(t.dtype)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_equal_to_the_definition(name, causal):
    module = MAPS[name]()
    for Tq, Tk, H, Hkv, Dv in SHAPES:
        q, k, v = tensors(Tq, Tk, H=H, Hkv=Hkv, Dv=Dv)
        grad = like(v, 2, H, Tq, Dv)
        for masked in (False, True):
            mask = torch.rand(2, Tk, generator=seeded(2)) < 0.7 if masked else None
            alignment = "bottom_right" if Tq < Tk else "top_left"
            offset = Tk - Tq if Tq < Tk else 0
            kwargs = {"scale": 0.7, "key_mask": mask, "alignment": alignment}
            out, *found = grads_of(module, [q, k, v], grad, causal, backend="native", **kwargs)
            close(out, definition(module, q, k, v, causal, 0.7, mask, offset)[0], 1e-11)
            _, *expected = grads_of(module, [q, k, v], grad, causal, backend="torch", **kwargs)
            for a, b in zip(found, expected, strict=True):
                close(a, b, 1e-10)  # test_features.py checks the gradients of this backend


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_not_larger_than_pytorch(name, dtype):
    """Output and gradients against float64, compared with the error of PyTorch's operations at the same dtype."""
    module = MAPS[name]()
    for Tq, Tk, H, Hkv, Dv in SHAPES[1:]:
        given = tensors(Tq, Tk, H=H, Hkv=Hkv, Dv=Dv, dtype=dtype)
        grad = like(given[2], 2, H, Tq, Dv)
        for causal in (False, True):
            exact = grads_of(module, [t.double() for t in given], grad.double(), causal, backend="torch")
            ours, theirs = (grads_of(module, given, grad, causal, backend=b) for b in ("native", "torch"))
            for a, b, c in zip(ours, theirs, exact, strict=True):
                assert a.dtype == dtype
                off, usual = (float((t.double() - c).abs().max()) for t in (a, b))
                assert off <= 4 * usual + 8 * torch.finfo(torch.float32).eps * float(c.abs().max())


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_number_of_threads_does_not_matter(name, causal, monkeypatch):
    """Bit by bit, whether threads share a head or have heads of their own."""
    monkeypatch.setattr(features, "SMALL", 0)
    module = MAPS[name]()
    for H, Hkv in ((1, 1), (4, 2), (3, 3)):
        given = tensors(1000, 900, B=1, H=H, Hkv=Hkv, dtype=torch.float32)
        grad = like(given[2], 1, H, 1000, 6)
        first, *others = with_threads(lambda: grads_of(module, given, grad, causal, backend="native"))  # noqa: B023
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", MAPS)
def test_any_strides(name):
    module = MAPS[name]()
    given = tensors(100, dtype=torch.float32)
    grad = like(given[2], 2, 4, 100, 6)
    expected = grads_of(module, given, grad, True, backend="native")
    heads_last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    every_other = [torch.stack([t, t.new_full((), math.nan).expand(t.shape)], -1)[..., 0] for t in given]
    for inputs in (heads_last, every_other):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = module(*leaves, True, backend="native")
        found = [out, *torch.autograd.grad(out, leaves, grad.transpose(2, 3).contiguous().transpose(2, 3))]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    one = [given[0], given[1][:1, :1].requires_grad_(), given[2][:1, :1]]  # keys and values shared by all heads
    out = module(*one, True, backend="native")
    close(out, module(*one, True, backend="torch"), 1e-5)
    (found,), (expected,) = (
        torch.autograd.grad(module(*one, True, backend=b).sum(), one[1]) for b in ("native", "torch")
    )
    close(found, expected, 1e-4)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients(name, causal):
    q, k, v = (t.requires_grad_() for t in tensors(5, B=1, H=2, Hkv=1, Dv=2))
    module = MAPS[name]()

    def call(q, k, v):
        return module(q, k, v, causal, enable_gqa=True, backend="native")

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v), fast_mode=True)  # PyTorch computes the second order
    v.requires_grad_(False)
    assert torch.autograd.gradcheck(lambda k: call(q, k, v), k, check_batched_grad=True)


def test_keys_of_very_different_sizes():
    """exp(-|k|^2/2) is far below float32's smallest number, before and after ordinary keys. Output and gradients are
    right."""
    q, k, v = tensors(130, dtype=torch.float32)
    k[:, :, :5] *= 12
    k[:, :, 9] *= 25
    k[:, :, 60:64] *= 15
    module = MAPS["favor"]()
    grad = like(v, 2, 4, 130, 6)
    for causal in (False, True):
        exact = definition(module, q.double(), k.double(), v.double(), causal)[0]
        out, *found = grads_of(module, [q, k, v], grad, causal, backend="native")
        close(out.double(), exact, 1e-4)
        expected = grads_of(module, [t.double() for t in (q, k, v)], grad.double(), causal, backend="torch")[1:]
        for a, b in zip(found, expected, strict=True):
            close(a.double(), b, 1e-4 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("name", MAPS)
def test_later_keys_do_not_change_causal_rows(name):
    q, k, v = tensors(130, dtype=torch.float32)
    module = MAPS[name]()
    out = module(q, k, v, True, backend="native")
    k[:, :, 60:] *= 30.0
    v[:, :, 60:] *= 1e6
    assert torch.equal(module(q, k, v, True, backend="native")[:, :, :60], out[:, :, :60])


def test_empty_and_rows_without_keys():
    q, k, v = (t.requires_grad_() for t in tensors(9))
    for module in (LinearAttention(), MAPS["favor"]()):
        assert module(q[:, :, :0], k, v, backend="native").shape == (2, 4, 0, 6)
        for causal in (False, True):
            out = module(q, k[:, :, :0], v[:, :, :0], causal, backend="native")
            assert out.shape == (2, 4, 9, 6) and not out.any()
            masked = module(q, k, v, causal, key_mask=torch.zeros(9, dtype=torch.bool), backend="native")
            assert not masked.any() and not any(g.any() for g in torch.autograd.grad(masked.sum(), (q, k, v)))


def test_a_redraw_before_backward_changes_nothing():
    q, k, v = (t.requires_grad_() for t in tensors(9))
    module = Performer(D, 16)
    out = module(q, k, v, True, backend="native")
    expected = torch.autograd.grad(out.sin().sum(), (q, k, v), retain_graph=True)
    module.redraw()
    for create_graph in (False, True):
        found = torch.autograd.grad(out.sin().sum(), (q, k, v), retain_graph=True, create_graph=create_graph)
        for a, b in zip(found, expected, strict=True):
            close(a, b, 1e-12)


class Softplus(LinearAttention):
    def features(self, x, scale):
        return torch.nn.functional.softplus(x), None


def test_a_named_backend_raises_for_what_it_declines():
    q, k, v = tensors(9)
    module = LinearAttention()
    with pytest.raises(NotImplementedError, match='backend "native" cannot serve this problem: computes no statistics'):
        module(q, k, v, return_aux=AuxRequest(lse=True), backend="native")
    with pytest.raises(NotImplementedError, match="no kernel for the features of Softplus"):
        Softplus()(q, k, v, backend="native")
    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        torch.func.vmap(lambda q: module(q, k[0], v[0], backend="native"))(q)
    with pytest.raises(NotImplementedError, match="plain CPU tensors"):
        module(*(t.to("meta") for t in (q, k, v)), backend="native")
    with pytest.raises(ValueError, match='backend: expected "auto", "native" or "torch"'):
        module(q, k, v, backend="sdpa")
    weights = torch.nn.functional.softplus(q) @ torch.nn.functional.softplus(k).mT
    close(Softplus()(q, k, v), weights / weights.sum(-1, keepdim=True) @ v)
    assert module(*(t.to("meta") for t in (q, k, v))).shape == v.shape


def test_auto_chooses_the_native_engine(monkeypatch):
    seen = []
    monkeypatch.setattr(features, "forward", lambda *a: seen.append(a[0].map) or real(*a))
    q, k, v = tensors(9, dtype=torch.float32)
    for module in (LinearAttention(), ReLUFeatures(), ReLUFeatures(D, 20), Performer(D, 20)):
        module(q, k, v, True)
        module(q, k, v, True, backend="torch")
    assert seen == ["elu", "relu", "relu", "exp"]


real = features.forward


def test_tracing_records_the_computation():
    from torch.fx.experimental.proxy_tensor import make_fx

    module = LinearAttention()
    q, k, v, other = (torch.randn(1, 2, 70, 8) for _ in range(4))
    graph = make_fx(lambda q, k, v: module(q, k, v, True))(q, k, v)
    torch.testing.assert_close(graph(other, k, v), module(other, k, v, True), rtol=1e-5, atol=1e-6)
