"""One table of cases for the tests of every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import regard
from regard import (
    ALiBi,
    Bias,
    Blocks,
    ByKeys,
    Causal,
    Decay,
    Density,
    Documents,
    FDivergence,
    FermiDirac,
    Free,
    Prefix,
    Relative,
    Rows,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from regard.backends import BACKENDS
from regard.backends.triton import launch
from regard.lowering import lower
from regard.priors import Prior

from .divergences import divergence
from .maker import Case, Maker


def custom() -> FDivergence:
    """Pearson's chi-squared: its plan is sparsemax's."""
    return FDivergence(lambda x: (x - 1) ** 2 / 2, lambda eta: 1 + eta, torch.ones_like, lower=-1.0)


def shifted_inf_mask(make: Maker) -> dict:
    mask = make.normal("attn_mask", make.case.Tq, make.case.Tk).detach()
    return {"attn_mask": mask.masked_fill(~make.mask(make.case.Tq, make.case.Tk), -math.inf)}


def every_structure(make: Maker, heads: int) -> Prior:
    """Every prior with structure at once, for Tq = 5 queries that end with the last of Tk = 9 keys."""
    return (
        Relative(make.normal("table", 4, 7), "bottom_right")
        * Decay(make.uniform("forget", -1, -0.1, 2, 1, 9))
        * make.factors((4, 5, 2), (2, heads, 9, 2))
        * Density(make.uniform("density", 0.3, 1, 5, 9))
        * make.silent(9)
        * Selected(make.index(5, 4, 5, 4), block=2)
        * (Prefix(3) | Window(5))
        * Bias(make.normal("bias", 2, 1, 5, 9))
    )


def head_and_distance(make: Maker) -> Prior:
    """A slope per head, a squared table by distance and a number per key, whose derivatives differ."""
    slopes, table, keys = make.uniform("slopes", 0.1, 1, 4), make.normal("table", 4, 40), make.normal("per key", 2, 40)

    def log_prior(b, h, i, j):
        # In float64: PyTorch would compute these terms in half precision, where regard computes them in float32.
        near = table.double()[h, (i - j).clamp(-9, 9) + 9]
        return -slopes.double()[h] * (i - j).abs() + 0.3 * near.square() + torch.tanh(keys.double()[b, j])

    return regard.prior(log_prior)


def masked_function(make: Maker) -> Prior:
    """Masks by documents, and a term that two tensors share."""
    ids, width = make.index(2, 2, 40), make.uniform("width", 0.5, 2)

    def log_prior(b, h, i, j):
        allowed = (ids[b, i] == ids[b, j]) | (j <= 1)
        return torch.where(allowed, -(((i - j) / (2 * width.double())) ** 2) * (1 + h), -math.inf)

    return regard.prior(log_prior)


STRUCTURED = [
    Case("function", lambda m: Transport(prior=head_and_distance(m))),
    Case(
        "function, causal, GQA",
        lambda m: Transport(prior=Causal() * head_and_distance(m), temperature=0.7),
        lambda m: {"enable_gqa": True},
        Hkv=2,
    ),
    Case(
        "function, bottom-right, entmax",
        lambda m: Transport(Tsallis(1.5), prior=head_and_distance(m) * Causal("bottom_right")),
        lambda m: {"attn_mask": m.mask(5, 9)},
        Tq=5,
        Tk=9,
        sensitivity=3,
    ),
    Case(
        "function, sigmoid",
        lambda m: Transport(FermiDirac(), prior=head_and_distance(m), marginal=Free(m.normal("offset", 4))),
    ),
    Case("masked function", lambda m: Transport(prior=masked_function(m), marginal=Rows(sink=m.normal("sink", 4)))),
    Case(
        "two functions and ALiBi, entmax",
        lambda m: Transport(
            Tsallis(1.3), prior=masked_function(m) * ALiBi(m.uniform("alibi", 0.1, 1, 4)) * head_and_distance(m)
        ),
        sensitivity=3,
    ),
    Case("table", lambda m: Transport(prior=Causal() * Relative(m.normal("table", 4, 5)))),
    Case(
        "table, bottom-right",
        lambda m: Transport(prior=Relative(m.normal("table", 9), "bottom_right"), temperature=0.6),
        Tq=5,
        Tk=9,
    ),
    Case(
        "table, more queries, entmax sink",
        lambda m: Transport(
            Tsallis(1.5), prior=Relative(m.normal("table", 4, 3), "top_left"), marginal=Rows(sink=m.normal("sink", 4))
        ),
        Tq=9,
        Tk=5,
        sensitivity=2,
    ),
    Case(
        "two tables, soft top-m",
        lambda m: Transport(
            FermiDirac(),
            prior=Relative(m.normal("one", 4, 3)) * Relative(m.normal("two", 1, 7)),
            marginal=Rows(mass=1.5),
        ),
    ),
    Case("factors", lambda m: Transport(prior=m.factors((2, 4, 7, 3), (2, 4, 7, 3)))),
    Case(
        "factors, gqa, entmax",
        lambda m: Transport(Tsallis(1.5), prior=Causal("bottom_right") * m.factors((2, 1, 5, 3), (2, 9, 3))),
        lambda m: {"enable_gqa": True},
        Hkv=2,
        Tq=5,
        Tk=9,
        sensitivity=2,
    ),
    Case(
        "many factors, ALiBi",
        lambda m: Transport(
            prior=m.factors((7, 17), (4, 7, 17))
            * ALiBi(m.uniform("slopes", 0.1, 1, 4))
            * m.factors((7, 2), (7, 2), "2"),
            temperature=m.uniform("temperature", 0.5, 2, 4, 1, 1),
        ),
        lambda m: {"attn_mask": m.normal("attn_mask", 2, 1, 7, 7), "is_causal": True},
    ),
    Case("decay", lambda m: Transport(prior=Decay(m.uniform("forget", -1, -0.1, 2, 4, 7)))),
    Case(
        "decay, more queries, sink",
        lambda m: Transport(
            prior=Decay(m.uniform("forget", -1, -0.1, 4, 5), "top_left"), marginal=Rows(sink=m.normal("sink", 4))
        ),
        Tq=9,
        Tk=5,
    ),
    Case(
        "decay, empty rows, relaxed",
        lambda m: Transport(
            prior=Decay(m.uniform("forget", -1, -0.1, 5), "bottom_right"),
            marginal=Rows(relax=m.uniform("relax", 0.5, 2, 4)),
        ),
        Tq=9,
        Tk=5,
    ),
    Case("density", lambda m: Transport(prior=Density(m.uniform("density", 0.1, 1, 2, 4, 7, 7)), temperature=0.7)),
    Case(
        "density, zeros",
        lambda m: Transport(
            prior=Causal()
            * Density(m.uniform("density", 0.1, 1, 2, 1, 1, 7))
            * m.silent(4, 7, 7)
            * m.silent(2, 1, 7, 1)
        ),
    ),
    Case(
        "density, sigmoid",
        lambda m: Transport(
            FermiDirac(),
            prior=Density(m.uniform("density", 0.1, 1, 4, 7, 1)) * m.silent(7),
            marginal=Free(m.normal("offset", 4)),
        ),
    ),
    Case(
        "density, relaxed entmax",
        lambda m: Transport(
            Tsallis(m.uniform("alpha", 1.3, 1.8)),
            prior=Density(m.uniform("density", 0.1, 1, 4, 1, 7)) * m.silent(7, 7),
            marginal=Rows(relax=0.9),
        ),
        sensitivity=2,
    ),
    Case("selected", lambda m: Transport(prior=Selected(m.index(7, 4, 7, 3)))),
    Case(
        "selected blocks, gqa, entmax",
        lambda m: Transport(
            Tsallis(1.5), prior=Selected(m.index(3, 2, 1, 5, 4), block=4) * Causal("bottom_right"), temperature=0.5
        ),
        lambda m: {"enable_gqa": True},
        Hkv=2,
        Tq=5,
        Tk=9,
        sensitivity=2,
    ),
    Case("prefix or causal", lambda m: Transport(prior=Prefix(torch.tensor([2, 5])) | Causal())),
    Case(
        "prefix or window, entmax",
        lambda m: Transport(Tsallis(1.5), prior=(Prefix(2) | Window(2)) * Causal("bottom_right")),
        Tq=5,
        Tk=9,
        sensitivity=2,
    ),
    Case(
        "blocks, sink",
        lambda m: Transport(prior=Blocks(m.mask(4, 3, 3), 3), marginal=Rows(sink=m.normal("sink", 4))),
        lambda m: {"attn_mask": m.normal("attn_mask", 7, 7)},
    ),
    Case(
        "union over tiles",
        lambda m: Transport(
            prior=(Prefix(3) | Window(20, alignment="bottom_right") | Blocks(m.mask(2, 7, 7), 10) * Causal())
            * Relative(m.normal("table", 2, 9))
        ),
        B=1,
        H=2,
        Hkv=1,
        Tq=66,
        Tk=70,
        arguments=lambda m: {"enable_gqa": True},
    ),
    Case(
        "by keys",
        lambda m: Transport(
            prior=Causal(), temperature=ByKeys(m.uniform("slope", 0.5, 1, 4), m.uniform("offset", 0.3, 0.5, 4))
        ),
    ),
    Case(
        "by keys, entmax, documents",
        lambda m: Transport(
            Tsallis(1.5),
            prior=Window(3, 1) * Documents(torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, -1]])),
            temperature=ByKeys(
                m.uniform("slope", 0.5, 1), m.uniform("offset", 0.3, 0.5, 4, 1, 1), m.uniform("power", 0.8, 1.5, 4)
            ),
        ),
        lambda m: {"attn_mask": m.mask(2, 1, 1, 7)},
        sensitivity=2,
    ),
    Case(
        "by keys, sink, density",
        lambda m: Transport(
            prior=(Prefix(2) | Causal("top_left")) * m.silent(2, 1, 5, 9),
            marginal=Rows(sink=m.normal("sink", 4)),
            temperature=ByKeys(m.uniform("slope", 0.5, 1, 2, 1, 1, 1), 0.4),
        ),
        Tq=5,
        Tk=9,
    ),
    Case(
        "every structure",
        lambda m: Transport(prior=every_structure(m, 2), temperature=m.uniform("temperature", 0.5, 2, 4, 1, 1)),
        lambda m: {"enable_gqa": True, "attn_mask": m.normal("attn_mask", 2, 1, 1, 9)},
        Hkv=2,
        Tq=5,
        Tk=9,
    ),
    Case(
        "every structure, entmax sink, softcap",
        lambda m: Transport(
            Tsallis(m.uniform("alpha", 1.3, 1.7)),
            prior=every_structure(m, 4),
            marginal=Rows(sink=m.normal("sink", 4)),
            temperature=ByKeys(m.uniform("slope", 0.5, 1, 4), 0.5),
        ),
        lambda m: {"softcap": 3.0},
        Tq=5,
        Tk=9,
        sensitivity=2,
    ),
    Case(
        "every structure, one query",
        lambda m: Transport(
            prior=Decay(m.uniform("forget", -1, -0.1, 2, 4, 13), "bottom_right")
            * Relative(m.normal("table", 4, 9))
            * m.factors((4, 1, 3), (2, 13, 3))
            * Density(m.uniform("density", 0.1, 1, 2, 1, 1, 13))
            * Selected(m.index(5, 2, 1, 1, 3), block=3)
        ),
        lambda m: {"enable_gqa": True},
        Hkv=2,
        Tq=1,
        Tk=13,
    ),
]

CASES = [
    Case("softmax"),
    Case("scale", arguments=lambda m: {"scale": 0.9}),
    Case("causal", arguments=lambda m: {"is_causal": True}),
    Case("causal, fewer queries", arguments=lambda m: {"is_causal": True}, Tq=5, Tk=9),
    Case("causal, more queries", arguments=lambda m: {"is_causal": True}, Tq=9, Tk=5),
    Case("bottom-right", lambda m: Transport(prior=Causal("bottom_right")), Tq=5, Tk=9),
    Case("bottom-right, empty rows", lambda m: Transport(prior=Causal("bottom_right")), Tq=9, Tk=5),
    Case("bool mask", arguments=lambda m: {"attn_mask": m.mask(m.case.Tq, m.case.Tk)}),
    Case("bool mask per key", arguments=lambda m: {"attn_mask": m.mask(m.case.B, 1, 1, m.case.Tk)}),
    Case("bool mask per head", arguments=lambda m: {"attn_mask": m.mask(m.case.H, m.case.Tq, m.case.Tk)}),
    Case("bool mask per query", arguments=lambda m: {"attn_mask": m.mask(m.case.Tq, 1)}),
    Case("mask and causal", arguments=lambda m: {"attn_mask": m.mask(m.case.Tq, m.case.Tk), "is_causal": True}),
    Case("float mask", arguments=lambda m: {"attn_mask": m.normal("attn_mask", m.case.Tq, m.case.Tk)}),
    Case("float mask, broadcast", arguments=lambda m: {"attn_mask": m.normal("attn_mask", m.case.H, 1, m.case.Tk)}),
    Case("float mask with -inf", arguments=shifted_inf_mask),
    Case("float mask, temperature", lambda m: Transport(temperature=0.5), shifted_inf_mask),
    Case("gqa", arguments=lambda m: {"enable_gqa": True}, Hkv=2),
    Case("mqa, causal", arguments=lambda m: {"enable_gqa": True, "is_causal": True}, Hkv=1),
    Case("gqa, mask per head", None, lambda m: {"enable_gqa": True, "attn_mask": m.mask(4, 7, 7)}, Hkv=2),
    Case("odd sizes", D=5, Dv=3, H=3, Hkv=3, Tq=6, Tk=11),
    Case("one query", Tq=1, Tk=13, Hkv=2, arguments=lambda m: {"enable_gqa": True}),
    Case("one key", Tq=5, Tk=1),
    Case("[B, T, H, D] views", strided=True, arguments=lambda m: {"is_causal": True, "enable_gqa": True}, Hkv=2),
    Case("softcap", arguments=lambda m: {"softcap": 1.5, "scale": 1.0}),
    Case("softcap, mask", arguments=lambda m: {"softcap": 1.5, "attn_mask": m.normal("attn_mask", 7, 7)}),
    Case("cosine", arguments=lambda m: {"score": "cosine", "scale": 4.0}),
    Case("cosine, gqa, causal", None, lambda m: {"score": "cosine", "is_causal": True, "enable_gqa": True}, Hkv=2),
    Case("cosine, softcap", arguments=lambda m: {"score": "cosine", "softcap": 0.5}),
    Case("euclidean", arguments=lambda m: {"score": "euclidean"}),
    Case(
        "euclidean, gqa, empty rows",
        None,
        lambda m: {"score": "euclidean", "attn_mask": m.mask(4, 9, 5), "enable_gqa": True},
        Hkv=2,
        Tq=9,
        Tk=5,
    ),
    Case(
        "euclidean, sink",
        lambda m: Transport(marginal=Rows(sink=m.normal("sink", 4)), prior=Causal()),
        lambda m: {"score": "euclidean", "scale": 0.5},
    ),
    Case(
        "euclidean, free",
        lambda m: Transport(marginal=Free(m.uniform("offset", 1, 2, 4))),
        lambda m: {"score": "euclidean"},
    ),
    Case(
        "euclidean, entmax",
        lambda m: Transport(Tsallis(1.5), prior=Bias(m.normal("bias", 7)), temperature=0.7),
        lambda m: {"score": "euclidean", "softcap": 5.0},
    ),
    Case("temperature", lambda m: Transport(temperature=0.3)),
    Case("temperature per head", lambda m: Transport(temperature=m.uniform("temperature", 0.5, 2, m.case.H, 1, 1))),
    Case(
        "temperature per query", lambda m: Transport(temperature=m.uniform("temperature", 0.5, 2, 2, 1, m.case.Tq, 1))
    ),
    Case("window", lambda m: Transport(prior=Window(2, 1))),
    Case("window, causal", lambda m: Transport(prior=Causal("bottom_right") * Window(3)), Tq=5, Tk=9),
    Case("window, past only", lambda m: Transport(prior=Window(3, -1))),
    Case("window, open left", lambda m: Transport(prior=Window(None, 1, "top_left")), Tq=4, Tk=8),
    Case("window, open right", lambda m: Transport(prior=Window(1, None))),
    Case("documents", lambda m: Transport(prior=Causal() * Documents(torch.tensor([0, 0, 0, 1, 1, 2, 2])))),
    Case(
        "documents, padded batch",
        lambda m: Transport(prior=Documents(torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, -1]]))),
    ),
    Case(
        "documents, cross",
        lambda m: Transport(prior=Documents(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 1, 2]))),
        Tq=3,
        Tk=5,
    ),
    Case("ALiBi", lambda m: Transport(prior=Causal() * ALiBi(m.uniform("slopes", 0.1, 1, m.case.H)))),
    Case(
        "ALiBi, bottom-right",
        lambda m: Transport(prior=ALiBi(m.uniform("slopes", 0.1, 1, 4), "bottom_right")),
        Tq=5,
        Tk=9,
    ),
    Case("bias per key", lambda m: Transport(prior=Bias(m.normal("bias", m.case.Tk)))),
    Case("bias per head", lambda m: Transport(prior=Bias(m.normal("bias", m.case.H, 1, m.case.Tk)))),
    Case("bias per query", lambda m: Transport(Tsallis(1.5), prior=Bias(m.normal("bias", m.case.Tq, 1)))),
    Case("bias, dense", lambda m: Transport(prior=Bias(m.normal("bias", 2, 4, 7, 7)), temperature=0.7)),
    Case("bias product", lambda m: Transport(prior=Bias(m.normal("one", 2, 1, 7, 1)) * Bias(m.normal("two", 4, 1, 7)))),
    Case(
        "all priors",
        lambda m: Transport(
            prior=Causal("bottom_right")
            * Window(5)
            * ALiBi(m.uniform("slopes", 0.1, 1, 4))
            * Bias(m.normal("bias", 9)),
            temperature=m.uniform("temperature", 0.5, 2, 4, 1, 1),
        ),
        lambda m: {"attn_mask": m.normal("attn_mask", 2, 1, 1, 9), "enable_gqa": True},
        Hkv=2,
        Tq=5,
        Tk=9,
    ),
    Case("sink", lambda m: Transport(marginal=Rows(sink=0.5))),
    Case("sink per head", lambda m: Transport(marginal=Rows(sink=m.normal("sink", 4))), lambda m: {"is_causal": True}),
    Case(
        "sink, no keys",
        lambda m: Transport(marginal=Rows(sink=m.normal("sink", 4)), prior=Causal("bottom_right")),
        Tq=9,
    ),
    Case("sink, temperature", lambda m: Transport(marginal=Rows(sink=m.normal("sink", 4)), temperature=0.5)),
    Case("relaxed rows", lambda m: Transport(marginal=Rows(relax=0.7), prior=Causal())),
    Case(
        "relaxed rows, learned",
        lambda m: Transport(marginal=Rows(relax=m.uniform("relax", 0.5, 2, 4)), temperature=0.6),
    ),
    Case("mass", lambda m: Transport(marginal=Rows(mass=2.5), prior=Causal())),
    Case("free", lambda m: Transport(marginal=Free(m.normal("offset", 4)), prior=Causal())),
    Case("sigmoid", lambda m: Transport(FermiDirac(), marginal=Free(-math.log(7)))),
    Case("sigmoid, learned", lambda m: Transport(FermiDirac(), marginal=Free(m.normal("offset", 4)), temperature=0.7)),
    Case("soft top-m", lambda m: Transport(FermiDirac(), marginal=Rows(mass=3), prior=Causal())),
    Case(
        "soft top-m, prior", lambda m: Transport(FermiDirac(), marginal=Rows(mass=1.5), prior=Bias(m.normal("bias", 7)))
    ),
    Case("Fermi-Dirac sink", lambda m: Transport(FermiDirac(), marginal=Rows(sink=m.normal("sink", 4)))),
    Case("Fermi-Dirac relaxed", lambda m: Transport(FermiDirac(), marginal=Rows(relax=0.8))),
    Case("entmax 1.5", lambda m: Transport(Tsallis(1.5))),
    Case("entmax 1.5, causal", lambda m: Transport(Tsallis(1.5), prior=Causal(), temperature=0.3), sensitivity=2),
    Case("sparsemax", lambda m: Transport(Tsallis(2.0), prior=Causal("bottom_right")), Tq=5, Tk=9, sensitivity=2),
    Case("entmax 1.2", lambda m: Transport(Tsallis(1.2), prior=Window(3, 3))),
    Case("entmax 1.01", lambda m: Transport(Tsallis(1.01))),
    Case("entmax 3", lambda m: Transport(Tsallis(3.0)), sensitivity=10),
    Case("learned alpha", lambda m: Transport(Tsallis(m.uniform("alpha", 1.2, 1.9))), sensitivity=2),
    Case("learned alpha per head", lambda m: Transport(Tsallis(m.uniform("alpha", 1.2, 1.9, 4)), prior=Causal())),
    Case(
        "entmax, every parameter",
        lambda m: Transport(
            Tsallis(m.uniform("alpha", 1.3, 1.7)),
            prior=Causal() * ALiBi(m.uniform("slopes", 0.1, 1, 4)) * Bias(m.normal("bias", 4, 1, 7)),
            marginal=Rows(sink=m.normal("sink", 4)),
            temperature=m.uniform("temperature", 0.5, 2, 4, 1, 1),
        ),
        lambda m: {"attn_mask": m.normal("attn_mask", 2, 1, 7, 7)},
        sensitivity=2,
    ),
    Case("entmax relaxed", lambda m: Transport(Tsallis(1.5), marginal=Rows(relax=m.uniform("relax", 0.5, 2)))),
    Case("entmax relaxed, alpha", lambda m: Transport(Tsallis(m.uniform("alpha", 1.2, 1.9)), marginal=Rows(relax=0.9))),
    Case("entmax mass", lambda m: Transport(Tsallis(1.5), marginal=Rows(mass=2.0), prior=Bias(m.normal("bias", 7)))),
    Case("ReLU", lambda m: Transport(Tsallis(2.0), marginal=Free(m.normal("offset", 4)))),
    Case(
        "free entmax, alpha",
        lambda m: Transport(Tsallis(m.uniform("alpha", 1.2, 1.9)), marginal=Free(0.5), temperature=0.8),
        sensitivity=2,
    ),
    Case("your own", lambda m: Transport(custom(), prior=Causal()), sensitivity=2),
    Case("your own, sink", lambda m: Transport(custom(), marginal=Rows(sink=m.normal("sink", 4)), temperature=0.8)),
    Case(
        "your own, free", lambda m: Transport(divergence("huber"), marginal=Free(m.normal("offset", 4))), sensitivity=2
    ),
    *STRUCTURED,
]

# Cases that together use every part of a problem, for tests that are too slow for all of them.
SOME_NAMES = [
    "all priors",
    "sink per head",
    "entmax, every parameter",
    "soft top-m",
    "sigmoid, learned",
    "relaxed rows, learned",
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# The kernels for GPUs take part if Triton interprets them (`make test-gpu-kernels`).
by_backend = pytest.mark.parametrize("backend", [n for n in BACKENDS if n != "triton" or launch.interpreting()])


@dataclass
class Built:
    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict
    leaves: dict[str, Tensor]  # all tensors that may need a gradient; query, key and value first


def build(case: Case, dtype: torch.dtype = torch.float64) -> Built:
    """The tensors and arguments of a case; the same numbers, rounded, for every dtype."""
    make = Maker(case, dtype, torch.Generator().manual_seed(sum(map(ord, case.name))))

    def draw(name: str, H: int, T: int, D: int) -> Tensor:
        if not case.strided:
            return make.normal(name, case.B, H, T, D)
        return make.normal(name, case.B, T, H, D).transpose(1, 2)

    query = draw("query", case.H, case.Tq, case.D)
    key = draw("key", case.Hkv, case.Tk, case.D)
    value = draw("value", case.Hkv, case.Tk, case.Dv)
    arguments = case.arguments(make)
    if case.problem is not None:
        arguments["problem"] = case.problem(make)
    return Built(query, key, value, arguments, make.leaves)


def skip_unless_served(backend: str, built: Built, names: tuple[str, ...] = ()) -> None:
    reason = BACKENDS[backend].unsupported(
        lower(built.query, built.key, built.value, **built.arguments), ("out", *names)
    )
    if reason is not None:
        pytest.skip(reason)


def run(built: Built, backend: str, **more):
    return regard.attention(built.query, built.key, built.value, **built.arguments, backend=backend, **more)


def substitute(built, old, new):
    """Replace a tensor by another one everywhere in a case."""
    view = (
        new.transpose(1, 2)
        if built.query.dim() == 4 and any(t is not old and t._base is old for t in views(built))
        else new
    )
    for name in ("query", "key", "value"):
        tensor = getattr(built, name)
        if tensor is old or tensor._base is old:
            setattr(built, name, view)
    built.arguments = pytree.tree_map(lambda t: new if t is old else t, built.arguments)


def views(built):
    return [built.query, built.key, built.value]
