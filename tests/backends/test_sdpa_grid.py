"""A sweep over the calls in PyTorch's own tests of `F.scaled_dot_product_attention`, with that function as the oracle.

A point of the grid is one choice for each axis: mask, dtype, shape, memory layout, gradient, backend. The exact answer
is PyTorch's MATH kernel in float64. The error of a result may be twice that of PyTorch at the dtype.

`make test` runs a sample, the same each time. `make grid` (REGARD_GRID=all) runs every point.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import regard
from regard import acceleration
from regard.backends.native import engine
from support.tolerance import ALLOWED, pytorch_loss, stock_attention

WHOLE = os.environ.get("REGARD_GRID") == "all"
SAMPLE = 40  # points for each mask and dtype

# --- the axes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    lead: tuple[int, ...]  # of the queries
    Tq: int
    Tk: int
    D: int = 8
    Dv: int = 8
    kv_lead: tuple[int, ...] | None = None  # of keys and values, where it differs
    scale: float | None = None

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        kv_lead = self.lead if self.kv_lead is None else self.kv_lead
        return {
            "query": (*self.lead, self.Tq, self.D),
            "key": (*kv_lead, self.Tk, self.D),
            "value": (*kv_lead, self.Tk, self.Dv),
        }

    @property
    def grouped(self) -> bool:
        return self.kv_lead is not None and self.kv_lead[-1] not in (1, self.lead[-1])


SHAPES = {
    "square": Shape((2, 3), 17, 17),
    "one batch, one head": Shape((1, 1), 9, 9),
    "no batch": Shape((0, 3), 5, 7),
    "no queries": Shape((2, 3), 0, 7),
    "no keys": Shape((2, 3), 7, 0),
    "odd sizes": Shape((3, 5), 13, 29, 5, 3),
    "wide values": Shape((2, 2), 11, 12, 4, 9, scale=0.9),
    "fewer queries": Shape((2, 3), 5, 19),
    "more queries": Shape((2, 3), 19, 5),
    "one query": Shape((2, 4), 1, 33, 16, 16),
    "one key": Shape((2, 2), 6, 1),
    "several tiles": Shape((1, 2), 70, 133, 64, 64),
    "grouped heads": Shape((2, 6), 7, 11, kv_lead=(2, 2)),
    "one key head": Shape((2, 4), 7, 11, kv_lead=(2, 1)),
    "one batch of keys": Shape((3, 2), 7, 11, kv_lead=(1, 2)),
    "2-D": Shape((), 7, 11),
    "3-D": Shape((3,), 7, 11),
    "5-D": Shape((2, 2, 3), 7, 11),
}


def expanded(shape: tuple[int, ...], make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    leaf = make(*(min(1, size) for size in shape[:-2]), *shape[-2:])
    return leaf, leaf.expand(shape)


def transposed(shape: tuple[int, ...], make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """[B, T, H, D] in memory, as the projections of a model produce it."""
    if len(shape) < 3:
        return plain(shape, make)
    leaf = make(*shape[:-3], shape[-2], shape[-3], shape[-1])
    return leaf, leaf.transpose(-3, -2)


def plain(shape: tuple[int, ...], make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    leaf = make(*shape)
    return leaf, leaf


def sliced(shape: tuple[int, ...], make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    leaf = make(*shape[:-2], shape[-2] + 3, shape[-1] + 4)
    return leaf, leaf[..., 2:-1, 1:-3]


def stepped(shape: tuple[int, ...], make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Every second row and every second column of a matrix."""
    leaf = make(*shape[:-2], 2 * shape[-2], 2 * shape[-1])
    return leaf, leaf[..., ::2, ::2]


def column_major(shape: tuple[int, ...], make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    leaf = make(*shape[:-2], shape[-1], shape[-2])
    return leaf, leaf.mT


LAYOUTS = {f.__name__: f for f in (plain, transposed, sliced, stepped, column_major, expanded)}


@dataclass(frozen=True)
class Mask:
    """How a call gives its mask: a `kind`, and for a tensor its `shape` and `layout`."""

    kind: str = "none"
    shape: Callable[[Shape], tuple[int, ...]] = lambda s: (s.Tq, s.Tk)
    layout: str = "plain"
    learned: bool = False
    dtype: torch.dtype | None = None  # if it differs from the query's


def full(s: Shape) -> tuple[int, ...]:
    return (*s.lead, s.Tq, s.Tk)


def per_key(s: Shape) -> tuple[int, ...]:
    return (*s.lead[:1], *(1,) * len(s.lead[1:]), 1, s.Tk)


def per_head(s: Shape) -> tuple[int, ...]:
    return (*s.lead[-1:], s.Tq, s.Tk)


MASKS = {
    "none": Mask(),
    "causal": Mask("causal"),
    "causal_upper_left": Mask("upper left"),
    "causal_lower_right": Mask("lower right"),
    "bool": Mask("bool"),
    "bool, full": Mask("bool", full),
    "bool, per key": Mask("bool", per_key),
    "bool, per head": Mask("bool", per_head),
    "bool, per query": Mask("bool", lambda s: (s.Tq, 1)),
    "bool, column-major": Mask("bool", full, "column_major"),
    "bool, expanded": Mask("bool", full, "expanded"),
    "bool, empty rows": Mask("bool, empty rows", full),
    "float": Mask("float"),
    "float, full": Mask("float", full),
    "float, per key": Mask("float", per_key),
    "float, one number": Mask("float", lambda s: (1, 1)),
    "float, column-major": Mask("float", full, "column_major"),
    "float, sliced": Mask("float", layout="sliced"),
    "float, -inf": Mask("-inf", full),
    "float, -inf rows": Mask("-inf rows", full),
    "float, lowest number": Mask("lowest", full),
    "float, in float32": Mask("float", full, dtype=torch.float32),
    "learned": Mask("float", learned=True),
    "learned, full": Mask("float", full, "column_major", learned=True),
    "learned, per key": Mask("float", per_key, learned=True),
    "learned, expanded": Mask("float", full, "expanded", learned=True),
    "learned, -inf": Mask("-inf", full, learned=True),
}

# Which of query, key and value need a gradient, and the layout of the incoming gradient.
GRADIENTS = {
    "no gradient": ((), "plain"),
    "all": (("query", "key", "value"), "plain"),
    "all, transposed": (("query", "key", "value"), "transposed"),
    "all, a sum's": (("query", "key", "value"), "sum"),
    "query, column-major": (("query",), "column_major"),
    "key": (("key",), "transposed"),
    "value, stepped": (("value",), "stepped"),
    "key and value": (("key", "value"), "sliced"),
}
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
BACKENDS = ["native", "torch", "sdpa"]


@dataclass(frozen=True)
class Point:
    mask: str
    dtype: str
    shape: str
    layout: str
    gradient: str
    backend: str

    @property
    def stock(self) -> bool:
        """Whether to call PyTorch at the point's own dtype. Its half kernels for larger sizes use AMX, which ends the
        process on virtual machines that report AMX but do not allow it."""
        return not (self.shape == "several tiles" and DTYPES[self.dtype].itemsize == 2)


def points(mask: str, dtype: str, whole: bool = WHOLE) -> list[Point]:
    """All points with this mask and dtype, or a sample in which each value of each other axis is as frequent as any."""
    axes = (SHAPES, LAYOUTS, GRADIENTS, BACKENDS)
    if whole:
        choices = list(itertools.product(*axes))
    else:
        draw = random.Random(f"{mask}, {dtype}")
        repeated = [[v for _ in range(math.ceil(SAMPLE / len(a))) for v in draw.sample(list(a), len(a))] for a in axes]
        choices = list(zip(*(values[:SAMPLE] for values in repeated), strict=True))
    every = [Point(mask, dtype, *choice) for choice in choices]
    return [point for point in every if point.stock or point.backend != "sdpa"]


# --- one point --------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """The tensors of a point, drawn once; `made(dtype)` gives them in a dtype, with fresh leaves."""

    point: Point

    def made(self, dtype: torch.dtype) -> tuple[dict, dict[str, Tensor]]:
        """The arguments in this dtype, and the leaves that need a gradient, by name; the numbers are
        rounded to the point's own dtype in every dtype."""
        shape, layout = SHAPES[self.point.shape], LAYOUTS[self.point.layout]
        needs, _ = GRADIENTS[self.point.gradient]
        generator = torch.Generator().manual_seed(sum(map(ord, repr(self.point))))
        own = DTYPES[self.point.dtype]

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(own).to(dtype)

        arguments: dict = {}
        leaves: dict[str, Tensor] = {}
        for name, size in shape.sizes.items():
            leaf, view = layout(size, draw)
            if name in needs:
                leaves[name] = leaf.requires_grad_()
                view = self._again(layout, size, leaf)
            arguments[name] = view
        arguments |= {"enable_gqa": shape.grouped, "scale": shape.scale}
        self._add_mask(arguments, leaves, shape, dtype, generator)
        return arguments, leaves

    @staticmethod
    def _again(layout: Callable, size: tuple[int, ...], leaf: Tensor) -> Tensor:
        """The same view of a leaf, recorded by autograd."""
        return layout(size, lambda *_: leaf)[1]

    def _add_mask(
        self, arguments: dict, leaves: dict[str, Tensor], shape: Shape, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        mask = MASKS[self.point.mask]
        if mask.kind == "none":
            return
        if mask.kind == "causal":
            arguments["is_causal"] = True
            return
        if mask.kind in ("upper left", "lower right"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of rows without keys
                make = causal_upper_left if mask.kind == "upper left" else causal_lower_right
                arguments["attn_mask"] = make(shape.Tq, shape.Tk)
            return
        size = mask.shape(shape)
        own = mask.dtype or DTYPES[self.point.dtype]
        target = own if dtype == DTYPES[self.point.dtype] else dtype  # the oracle's

        def draw(*size: int) -> Tensor:
            kept = torch.rand(size, generator=generator) < 0.7
            if size[-1] > 1 and "rows" not in mask.kind:
                kept[..., -1] = True  # at least one key for each query
            if "rows" in mask.kind:
                kept[..., ::2, :] = False
            if mask.kind.startswith("bool"):
                return kept
            numbers = torch.randn(size, generator=generator, dtype=torch.float64).to(own)
            if mask.kind == "lowest":
                numbers = numbers.masked_fill(~kept, torch.finfo(own).min)
            elif mask.kind != "float":
                numbers = numbers.masked_fill(~kept, -math.inf)
            return numbers.to(target)

        leaf, view = LAYOUTS[mask.layout](size, draw)
        if mask.learned:
            leaves["attn_mask"] = leaf.requires_grad_()
            view = self._again(LAYOUTS[mask.layout], size, leaf)
        arguments["attn_mask"] = view

    def incoming(self, out: Tensor) -> Tensor:
        """The gradient of the output, in its layout; the same numbers for every dtype."""
        _, layout = GRADIENTS[self.point.gradient]
        generator = torch.Generator().manual_seed(1)
        if layout == "sum":
            return torch.ones((), dtype=out.dtype).expand(out.shape)

        def draw(*size: int) -> Tensor:
            own = DTYPES[self.point.dtype]
            return torch.randn(size, generator=generator, dtype=torch.float64).to(own).to(out.dtype)

        return LAYOUTS[layout](tuple(out.shape), draw)[1]


def results(attention: Callable, call: Call, dtype: torch.dtype, **more) -> dict[str, Tensor]:
    """The output, and the gradients by leaf."""
    arguments, leaves = call.made(dtype)
    out = attention(**arguments, **more)
    found = {"out": out.detach()}
    if leaves:
        gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if out.requires_grad:  # PyTorch's result without queries or batch does not depend on a mask
            how = {"allow_unused": True, "materialize_grads": True}
            gradients = torch.autograd.grad(out, list(leaves.values()), call.incoming(out), **how)
        found |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return found


def exact(**arguments) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return stock_attention(**arguments)


def folded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **arguments) -> Tensor:
    """PyTorch's function on [B, H, T, D], as the sdpa backend calls it. For other ranks PyTorch uses another kernel,
    which is more accurate in half types."""
    lead = query.shape[:-2]
    if len(lead) == 2:
        return stock_attention(query, key, value, attn_mask, **arguments)

    def fold(t: Tensor) -> Tensor:
        return t.flatten(0, -4) if t.dim() > 4 else t[(None,) * (4 - t.dim())]

    if attn_mask is not None and not isinstance(attn_mask, CausalBias):
        attn_mask = fold(attn_mask.expand(*lead, *attn_mask.shape[-2:]))
    return stock_attention(fold(query), fold(key), fold(value), attn_mask, **arguments).view(
        *lead, query.shape[-2], value.shape[-1]
    )


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def failures(
    point: Point, attention: Callable = regard.attention, under: Callable[[], AbstractContextManager] = nullcontext
) -> list[str]:
    """What is wrong at a point of the grid. Only `attention` and its gradients run in the context `under`."""
    call, dtype = Call(point), DTYPES[point.dtype]
    try:
        with under():
            got = results(attention, call, dtype, backend=point.backend)
    except Exception as error:
        return [f"{point}: {type(error).__name__}: {error}"]
    expected = results(exact, call, torch.float64)
    same = folded if point.backend == "sdpa" else stock_attention
    stock = results(same, call, dtype) if point.stock else {}
    found = []
    for name, truth in expected.items():
        mine = got[name]
        if mine.shape != truth.shape or mine.dtype != dtype:
            found.append(f"{point}: {name} is {mine.dtype} {list(mine.shape)}, expected {list(truth.shape)}")
            continue
        lost = largest((stock[name].double() - truth).nan_to_num()) if name in stock else 0.0
        unit = 1e-11 if dtype == torch.float64 else max(pytorch_loss(dtype), torch.finfo(dtype).eps)
        # The last term is for gradients that are 0 (a row with one key): they are a difference in the compute dtype.
        left = 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        allowed = ALLOWED * (lost + unit * largest(truth)) + left
        error = (mine.double() - truth).abs()
        if not bool((error <= allowed).all()):
            found.append(f"{point}: {name} is off by {largest(error.nan_to_num(math.inf)):.2e}, allowed {allowed:.2e}")
    return found


# --- the sweep --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_grid(mask, dtype):
    built = engine.extension()[0] is not None
    wrong = [line for p in points(mask, dtype) if built or p.backend != "native" for line in failures(p)]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])


def through_pytorch(backend: str, **arguments) -> Tensor:
    """PyTorch's function, whatever the backend of the point."""
    return stock_attention(**arguments)


@pytest.mark.skipif(engine.extension()[0] is None, reason="the native engine is not built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_grid_of_pytorch_on_the_engine(mask, dtype, monkeypatch):
    """PyTorch's own function while regard has the place of its CPU kernel."""
    monkeypatch.setattr(acceleration, "small", lambda *_, **__: False)
    # Without `stock` nothing says what PyTorch loses in half types, where it uses other kernels for some of the points.
    sample = [replace(p, backend="torch") for p in points(mask, dtype) if p.stock]
    wrong = [line for p in sample[:: 1 if WHOLE else 3] for line in failures(p, through_pytorch, regard.accelerated)]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])


def test_the_grid_of_pytorch_reaches_the_engine(monkeypatch):
    monkeypatch.setattr(acceleration, "small", lambda *_, **__: False)
    before = acceleration.calls.forward, acceleration.calls.backward
    point = Point("float, full", "float32", "grouped heads", "transposed", "all", "torch")
    assert failures(point, through_pytorch, regard.accelerated) == []
    assert (acceleration.calls.forward, acceleration.calls.backward) == (before[0] + 1, before[1] + 1)


def test_the_sample_has_every_pair_of_values():
    sample = [point for mask in MASKS for dtype in DTYPES for point in points(mask, dtype, whole=False)]
    axes = {
        "mask": MASKS,
        "dtype": DTYPES,
        "shape": SHAPES,
        "layout": LAYOUTS,
        "gradient": GRADIENTS,
        "backend": BACKENDS,
    }
    for one, other in itertools.combinations(axes, 2):
        met = {(getattr(point, one), getattr(point, other)) for point in sample}
        missing = set(itertools.product(axes[one], axes[other])) - met
        assert not missing, f"{one} and {other}: {sorted(missing)[:5]}"


def without_mask(attn_mask=None, **arguments):
    return regard.attention(**arguments)


def grouped_the_other_way(key, value, **arguments):
    """Query head h reads key head h % Hkv."""
    if arguments["enable_gqa"]:
        group = arguments["query"].shape[-3] // key.shape[-3]
        key, value = (t.repeat(*(1,) * (t.dim() - 3), group, 1, 1) for t in (key, value))
    return regard.attention(key=key, value=value, **arguments)


def one_wrong_element(**arguments):
    out = regard.attention(**arguments)
    return out + torch.nn.functional.one_hot(torch.tensor(out.numel() // 2), out.numel()).view_as(out).to(out.dtype) / 9


class OneWrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[reportIncompatibleMethodOverride]
        grad = grad.contiguous().clone()
        grad.view(-1)[-1] *= 1.1
        return grad


def wrong_gradient(query, **arguments):
    return regard.attention(query=OneWrongGradient.apply(query), **arguments)


@pytest.mark.parametrize(
    ("attention", "choice"),
    [
        (without_mask, {"mask": "causal_lower_right"}),
        (without_mask, {"mask": "bool, per key", "layout": "expanded"}),
        (without_mask, {"mask": "float, sliced", "gradient": "key"}),
        (grouped_the_other_way, {"shape": "grouped heads"}),
        (one_wrong_element, {"layout": "column_major"}),
        (wrong_gradient, {"gradient": "all, a sum's"}),
        (lambda **a: regard.attention(**a).double(), {}),
        (lambda **a: regard.attention(**a)[..., :-1], {}),
    ],
)
def test_a_wrong_function_is_found(attention, choice):
    right = {
        "mask": "none",
        "dtype": "float32",
        "shape": "odd sizes",
        "layout": "plain",
        "gradient": "all",
        "backend": "torch",
    }
    point = Point(**(right | choice))
    assert failures(point) == [] and failures(point, attention)
