"""The cases of `regard doctor --device`: problems of every kind, at sizes of more than one tile.

A case draws its tensors from a generator, so that the same numbers can be computed on the device and in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .priors import ALiBi, Bias, Causal, Documents, Window
from .problem import ByKeys, Free, Rows, Transport
from .regions import Blocks, Prefix
from .regularizers import FermiDirac, Tsallis
from .structured import Decay, Density, LowRank, Relative, Selected


@dataclass(frozen=True)
class Shape:
    """B batches, H query heads, Hkv heads of keys, Tq queries, Tk keys, sizes D and Dv of the heads."""

    B: int = 2
    H: int = 4
    Hkv: int = 2
    Tq: int = 300
    Tk: int = 300
    D: int = 64
    Dv: int = 64


@dataclass
class Drawn:
    """The tensors of a case on one device: those that need a gradient by name, and the call's other arguments.

    Inputs hold numbers that were rounded to `rounded`, whatever `dtype` they have."""

    shape: Shape
    rounded: torch.dtype
    device: torch.device
    generator: torch.Generator
    dtype: torch.dtype
    leaves: dict[str, Tensor] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> None:
        s = self.shape
        for name, H, T, D in (("query", s.H, s.Tq, s.D), ("key", s.Hkv, s.Tk, s.D), ("value", s.Hkv, s.Tk, s.Dv)):
            numbers = torch.randn(s.B, H, T, D, generator=self.generator).to(self.rounded)
            self.leaves[name] = numbers.to(self.device, self.dtype).requires_grad_()

    def normal(self, name: str, *shape: int) -> Tensor:
        return self._leaf(name, torch.randn(shape, generator=self.generator))

    def uniform(self, name: str, low: float, high: float, *shape: int) -> Tensor:
        return self._leaf(name, torch.rand(shape, generator=self.generator) * (high - low) + low)

    def chosen(self, share: float, *shape: int) -> Tensor:
        """Random bools: True for about this share."""
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)

    def index(self, below: int, *shape: int) -> Tensor:
        return torch.randint(-1, below, shape, generator=self.generator).to(self.device)

    def documents(self, T: int) -> Tensor:
        """Five documents, and padding at the end."""
        return torch.tensor([-1 if 20 * i > 19 * T else 5 * i // T for i in range(T)], device=self.device)

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        # Parameters of a problem are float32 beside half inputs, and float64 beside inputs in float64.
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.leaves[name] = tensor.to(self.device, dtype).requires_grad_()
        return self.leaves[name]


@dataclass(frozen=True)
class Case:
    """One problem at one shape and dtype. `sensitivity` says how much more than softmax the plan amplifies an error of
    the scores (steep links do, and sums over all queries)."""

    name: str
    problem: Callable[[Drawn], Transport]
    sensitivity: float = 1.0
    shape: Shape = Shape()
    dtype: torch.dtype = torch.float32

    @property
    def label(self) -> str:
        s = self.shape
        return f"{self.name} ({str(self.dtype).removeprefix('torch.')}, {s.Tq} x {s.Tk}, D {s.D})"

    def drawn(self, device: torch.device, dtype: torch.dtype | None = None) -> Drawn:
        """The tensors on a device. Another dtype holds the same numbers, those of the case's own dtype."""
        generator = torch.Generator().manual_seed(7)
        found = Drawn(self.shape, self.dtype, device, generator, dtype or self.dtype)
        found.inputs()
        found.arguments["problem"] = self.problem(found)
        found.arguments["enable_gqa"] = True
        return found


def _masked(draw: Drawn) -> Transport:
    s = draw.shape
    draw.arguments["attn_mask"] = draw.chosen(0.7, s.B, 1, s.Tq, s.Tk)
    return Transport()


def _biased(draw: Drawn) -> Transport:
    s = draw.shape
    draw.arguments["attn_mask"] = draw.normal("attn_mask", s.H, s.Tq, s.Tk)
    draw.arguments["softcap"] = 20.0
    return Transport(prior=Bias(draw.normal("key bias", s.B, 1, 1, s.Tk)))


def _heads(draw: Drawn, name: str, low: float, high: float) -> Tensor:
    return draw.uniform(name, low, high, draw.shape.H)


def _causal(regularizer: Any = None) -> Callable[[Drawn], Transport]:
    return lambda draw: Transport(regularizer, prior=Causal("bottom_right"))


PROBLEMS = (
    Case("softmax", lambda d: Transport()),
    Case("causal", _causal()),
    Case("bool mask", _masked),
    Case("float mask, key bias, softcap", _biased),
    Case(
        "window, ALiBi, sink",
        lambda d: Transport(
            prior=Causal("bottom_right") * Window(70) * ALiBi(_heads(d, "slopes", 0.02, 0.3)),
            marginal=Rows(sink=d.normal("sink", d.shape.H)),
        ),
        2.0,
    ),
    Case(
        "documents, temperature per head",
        lambda d: Transport(
            prior=Documents(d.documents(d.shape.Tq), d.documents(d.shape.Tk)),
            temperature=d.uniform("temperature", 0.5, 2, d.shape.H, 1, 1),
        ),
    ),
    Case(
        "relative table",
        lambda d: Transport(prior=Causal("bottom_right") * Relative(d.normal("table", d.shape.H, 65))),
    ),
    Case(
        "low rank",
        lambda d: Transport(
            prior=LowRank(
                d.uniform("query factor", -1, 1, d.shape.H, d.shape.Tq, 3),
                d.uniform("key factor", -1, 1, d.shape.Hkv, d.shape.Tk, 3),
            )
        ),
    ),
    Case(
        "decay",
        lambda d: Transport(prior=Decay(d.uniform("forget", -0.1, -0.001, 1, d.shape.H, d.shape.Tk), "bottom_right")),
    ),
    Case("density", lambda d: Transport(prior=Density(d.uniform("density", 0.2, 1, d.shape.Tq, d.shape.Tk)))),
    Case("selected keys", lambda d: Transport(prior=Selected(d.index(d.shape.Tk, d.shape.H, d.shape.Tq, 9)))),
    Case(
        "selected blocks",
        lambda d: Transport(prior=Selected(d.index(-(-d.shape.Tk // 32), d.shape.B, 1, d.shape.Tq, 3), block=32)),
    ),
    Case(
        "prefix or window",
        lambda d: Transport(prior=(Prefix(9) | Window(40)) * Causal("bottom_right")),
    ),
    Case(
        "blocks",
        lambda d: Transport(prior=Blocks(d.chosen(0.4, d.shape.H, -(-d.shape.Tq // 50), -(-d.shape.Tk // 50)), 50)),
    ),
    Case(
        "temperature by keys",
        lambda d: Transport(prior=Causal("bottom_right"), temperature=ByKeys(_heads(d, "slope", 0.2, 0.4), 0.3)),
    ),
    Case("relaxed", lambda d: Transport(marginal=Rows(relax=_heads(d, "relax", 0.5, 2)))),
    Case("free", lambda d: Transport(marginal=Free(offset=_heads(d, "offset", -6, -5)))),
    Case("entmax 1.5", _causal(Tsallis(1.5)), 3.0),
    Case("sparsemax", _causal(Tsallis(2.0)), 3.0),
    Case("entmax 1.1", _causal(Tsallis(1.1)), 3.0),
    Case(
        "alpha per head, sink",
        lambda d: Transport(
            Tsallis(d.uniform("alpha", 1.3, 1.8, d.shape.H, 1, 1)), marginal=Rows(sink=d.normal("sink", d.shape.H))
        ),
        4.0,
    ),
    Case("sigmoid", lambda d: Transport(FermiDirac(), marginal=Free(offset=-math.log(d.shape.Tk)))),
    Case("soft top-8", lambda d: Transport(FermiDirac(), marginal=Rows(mass=8.0)), 2.0),
)

_SHAPES = (
    Shape(B=1, H=8, Hkv=8, Tq=70, Tk=333, D=128, Dv=128),
    Shape(B=2, H=8, Hkv=2, Tq=1, Tk=517),
    Shape(B=1, H=3, Hkv=1, Tq=129, Tk=257, D=40, Dv=72),
    Shape(B=1, H=2, Hkv=2, Tq=150, Tk=150, D=256, Dv=256),
    Shape(B=1, H=2, Hkv=1, Tq=1029, Tk=1029),
)
_EVERY_SHAPE = ("softmax", "causal", "window, ALiBi, sink", "entmax 1.5", "sparsemax")
_SMALL = Shape(B=1, H=2, Hkv=1, Tq=70, Tk=70, D=16, Dv=16)  # more than one tile; for kernels that are interpreted


def cases(small: bool = False) -> Iterator[Case]:
    """Every problem in float32, and some of them in every shape and dtype. `small`: at one small shape."""
    if small:
        yield from (replace(case, shape=_SMALL) for case in PROBLEMS)
        return
    yield from PROBLEMS
    for case in PROBLEMS:
        if case.name in _EVERY_SHAPE:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                shapes = _SHAPES if dtype == torch.float32 else (case.shape, *_SHAPES)
                yield from (replace(case, shape=shape, dtype=dtype) for shape in shapes)
