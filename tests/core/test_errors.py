"""Bad input: the error names the argument, what was expected and what was given."""

import math

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

import regard
from regard import (
    KL,
    ALiBi,
    AuxRequest,
    Bias,
    Causal,
    Documents,
    FDivergence,
    FermiDirac,
    Free,
    Rows,
    RowsAndColumns,
    Transport,
    Tsallis,
    Window,
)
from regard.backends.native import engine

q = torch.randn(2, 4, 5, 8)
k = torch.randn(2, 4, 5, 8)
long = torch.randn(2, 4, 9, 8)
nan = math.nan


class Subclass(torch.Tensor):
    """A tensor type of another library."""


def attend(*tensors, **arguments):
    return lambda: regard.attention(*(tensors or (q, k, k)), **arguments)


def problem(*a, **kw):
    return attend(problem=Transport(*a, **kw))


ERRORS = {
    # tensors
    "not a tensor": (attend([1.0], k, k), TypeError, "query: expected a tensor, got"),
    "integers": (attend(q.int(), k.int(), k.int()), TypeError, "query: expected float16.*got Tensor.int32"),
    "dtypes differ": (attend(q, k.double(), k), TypeError, "key: expected torch.float32.*got torch.float64"),
    "one dimension": (attend(q, k, torch.randn(5)), ValueError, r"value: expected shape \[..., T, D\], got \[5\]"),
    "head size": (attend(q, k[..., :4], k), ValueError, "key: expected head size D=8.*got"),
    "value length": (attend(q, k, long), ValueError, "value: expected Tk=5 rows.*got"),
    "batch": (
        attend(q, torch.randn(3, 4, 5, 8), torch.randn(3, 4, 5, 8)),
        ValueError,
        "key: expected batch dimensions",
    ),
    "heads without gqa": (attend(q, k[:, :2], k[:, :2]), ValueError, "key: expected 4 heads.*enable_gqa"),
    "head ratio": (
        attend(q, k[:, :3], k[:, :3], enable_gqa=True),
        ValueError,
        "key: expected a number of heads that divides",
    ),
    "value heads": (attend(q, k, k[:, :2]), ValueError, "value: expected 4 heads"),
    "device": (attend(q, k.to("meta"), k), ValueError, "key: expected a tensor on cpu.*got one on meta"),
    # arguments
    "mask type": (attend(attn_mask="causal"), TypeError, "attn_mask: expected a tensor, got 'causal'"),
    "mask dtype": (attend(attn_mask=torch.zeros(5, 5).int()), TypeError, "attn_mask: expected a bool or floating"),
    "mask shape": (
        attend(attn_mask=torch.zeros(5, 4)),
        ValueError,
        r"attn_mask: expected a shape.*\[2, 4, 5, 5\], got \[5, 4\]",
    ),
    "mask subclass": (
        attend(attn_mask=torch.zeros(5, 5).as_subclass(Subclass)),
        TypeError,
        "attn_mask: expected a plain tensor, got a Subclass",
    ),
    "bool mask subclass": (
        attend(attn_mask=torch.ones(5, 5).bool().as_subclass(Subclass)),
        TypeError,
        "attn_mask: expected a plain tensor, got a Subclass",
    ),
    "bias subclass": (
        problem(prior=Bias(causal_upper_left(5, 5))),
        TypeError,
        r"Bias\(log_prior\): expected a plain tensor, got a CausalBias",
    ),
    "temperature subclass": (
        problem(temperature=torch.ones(4, 1, 1).as_subclass(Subclass)),
        TypeError,
        "temperature: expected a plain tensor, got a Subclass",
    ),
    "key_scale subclass": (
        attend(key_scale=torch.ones(4, 5).as_subclass(Subclass)),
        TypeError,
        "key_scale: expected a plain tensor, got a Subclass",
    ),
    "documents subclass": (
        problem(prior=Documents(torch.zeros(5).long().as_subclass(Subclass))),
        TypeError,
        r"Documents\(query_ids\): expected a plain tensor, got a Subclass",
    ),
    "wrapper mask, plain query": (
        attend(attn_mask=TwoTensor(torch.zeros(5, 5), torch.zeros(5, 5))),
        TypeError,
        "attn_mask: expected a plain tensor, or a Tensor as query, got a TwoTensor",
    ),
    "wrapper sink, plain query": (
        problem(marginal=Rows(sink=TwoTensor(torch.zeros(4), torch.zeros(4)))),
        TypeError,
        "problem: expected a plain tensor, or a Tensor as query, got a TwoTensor",
    ),
    "CausalBias of other lengths": (
        attend(attn_mask=causal_lower_right(5, 9)),
        ValueError,
        r"attn_mask: expected causal_lower_right\(Tq=5, Tk=5\), got causal_lower_right\(5, 9\)",
    ),
    "CausalBias after an operation": (
        attend(attn_mask=causal_upper_left(5, 5).to(torch.bool)),
        TypeError,
        "attn_mask: expected a CausalBias as causal_upper_left",
    ),
    "CausalBias and is_causal": (
        attend(attn_mask=causal_lower_right(5, 5), is_causal=True),
        ValueError,
        "alignment: expected one for the whole prior",
    ),
    "CausalBias and a prior": (
        attend(attn_mask=causal_upper_left(5, 5), problem=Transport(prior=Window(2, alignment="bottom_right"))),
        ValueError,
        "alignment: expected one for the whole prior",
    ),
    "CausalBias and columns": (
        attend(attn_mask=causal_upper_left(5, 5), problem=Transport(marginal=RowsAndColumns())),
        ValueError,
        "RowsAndColumns does not allow a causal prior",
    ),
    "mask rank": (attend(attn_mask=torch.zeros(1, 2, 4, 5, 5)), ValueError, "attn_mask: expected a shape"),
    "mask device": (
        attend(attn_mask=torch.zeros(5, 5, device="meta")),
        ValueError,
        "attn_mask: expected a tensor on cpu",
    ),
    "dropout": (attend(dropout_p=1.5), ValueError, r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
    "dropout nan": (attend(dropout_p=nan), ValueError, "dropout_p"),
    "dropout type": (attend(dropout_p="half"), TypeError, "dropout_p: expected a number, got 'half'"),
    "is_causal": (attend(is_causal=1), TypeError, "is_causal: expected a bool, got 1"),
    "enable_gqa": (attend(enable_gqa="yes"), TypeError, "enable_gqa: expected a bool, got 'yes'"),
    "scale": (attend(scale=math.inf), ValueError, "scale: expected a finite number, got inf"),
    "scale type": (attend(scale=torch.tensor(1.0)), TypeError, "scale: expected a number, got Tensor"),
    "softcap": (attend(softcap=0.0), ValueError, "softcap: expected a positive"),
    "problem": (attend(problem=KL()), TypeError, r"problem: expected a Transport, got KL\(\)"),
    "return_aux": (attend(return_aux=("lse",)), TypeError, "return_aux: expected an AuxRequest"),
    "unknown aux": (lambda: AuxRequest(rank=True), TypeError, "rank"),
    "backend": (attend(backend="cuda"), ValueError, "backend: expected one of \"auto\".*got 'cuda'"),
    # problems
    "regularizer": (
        lambda: Transport("softmax"),
        TypeError,
        r"Transport\(regularizer\): expected a regularizer, got 'softmax'",
    ),
    "class, not instance": (lambda: Transport(KL), TypeError, r"did you mean KL\(\)"),
    "marginal": (lambda: Transport(marginal=1.0), TypeError, r"Transport\(marginal\)"),
    "prior": (lambda: Transport(prior=torch.ones(3)), TypeError, r"Transport\(prior\)"),
    "temperature": (lambda: Transport(temperature=-0.5), ValueError, "temperature.*expected.*got -0.5"),
    "temperature nan": (lambda: Transport(temperature=nan), ValueError, "temperature.*got nan"),
    "temperature type": (lambda: Transport(temperature="hot"), TypeError, "temperature.*got 'hot'"),
    "temperature int tensor": (lambda: Transport(temperature=torch.ones(2).int()), TypeError, "temperature"),
    "temperature tensor": (
        problem(temperature=torch.tensor([1.0, -1.0, 1, 1]).view(4, 1, 1)),
        ValueError,
        "temperature.*got -1",
    ),
    "temperature tensor nan": (problem(temperature=torch.tensor(nan)), ValueError, "temperature: expected.*got nan"),
    "temperature shape": (
        problem(temperature=torch.ones(4)),
        ValueError,
        r"temperature: expected.*\[H, 1, 1\].*got \[4\]",
    ),
    "alpha": (lambda: Tsallis(1.0), ValueError, "alpha > 1.*got 1.0"),
    "alpha tensor": (problem(Tsallis(torch.tensor(0.9))), ValueError, r"Tsallis\(alpha\): expected alpha > 1, got 0.8"),
    "alpha shape": (problem(Tsallis(torch.full((3,), 1.5))), ValueError, r"Tsallis\(alpha\): expected.*got \[3\]"),
    "sink shape": (
        problem(marginal=Rows(sink=torch.ones(3))),
        ValueError,
        r"Rows\(sink\): expected.*\[H=4\].*got \[3\]",
    ),
    "sink and relax": (lambda: Rows(sink=0.0, relax=1.0), ValueError, "exclude one another"),
    "sink and mass": (lambda: Rows(mass=2, sink=0.0), ValueError, "exclude one another"),
    "mass": (lambda: Rows(mass=0), ValueError, r"Rows\(mass\): expected a positive.*got 0"),
    "mass tensor": (lambda: Rows(mass=torch.ones(())), TypeError, r"Rows\(mass\): expected a number"),
    "relax": (lambda: Rows(relax=-1.0), ValueError, r"Rows\(relax\): expected a positive.*got -1.0"),
    "relax tensor": (
        problem(marginal=Rows(relax=torch.tensor(0.0))),
        ValueError,
        r"Rows\(relax\): expected relax > 0, got 0.0",
    ),
    "offset": (lambda: Free(math.inf), ValueError, r"Free\(offset\): expected a finite number, got inf"),
    "hard and free": (
        problem(marginal=Free(), temperature=0.0),
        ValueError,
        "temperature: 0 .hard routing. has no meaning",
    ),
    "hard Fermi-Dirac, relaxed": (
        problem(FermiDirac(), marginal=Rows(relax=0.5), temperature=0.0),
        ValueError,
        "temperature: 0",
    ),
    "hard Fermi-Dirac, prior": (
        problem(FermiDirac(), prior=Bias(torch.zeros(5)), temperature=0.0),
        ValueError,
        "temperature: 0",
    ),
    "nested": (attend(torch.nested.nested_tensor([q[0], q[0]]), k, k), TypeError, "query: expected a dense tensor"),
    "sparse": (attend(q, k.to_sparse(), k), TypeError, "key: expected a dense tensor"),
    "infinite temperature": (problem(temperature=torch.tensor(math.inf)), ValueError, "temperature: expected.*got inf"),
    "nan sink": (problem(marginal=Rows(sink=torch.tensor(nan))), ValueError, r"Rows\(sink\): expected finite.*got nan"),
    "nan slopes": (problem(prior=ALiBi(torch.tensor([0, 0, 0, nan]))), ValueError, r"ALiBi\(slopes\): expected finite"),
    "aux that does not exist": (
        lambda: regard.select_backend(q, k, k, problem=Transport(Tsallis(1.5)), return_aux=AuxRequest(lse=True)),
        ValueError,
        "lse is defined for KL only",
    ),
    "hard top-m": (problem(FermiDirac(), marginal=Rows(mass=3), temperature=0.0), ValueError, "temperature: 0"),
    "own, not callable": (
        lambda: FDivergence(1, torch.exp, torch.exp),
        TypeError,
        r"FDivergence\(f\): expected a callable, got 1",
    ),
    "own, lower": (lambda: FDivergence(torch.exp, torch.exp, torch.exp, nan), ValueError, r"FDivergence\(lower\)"),
    # priors
    "alignment": (lambda: Causal("left"), ValueError, r"Causal\(alignment\): expected.*got 'left'"),
    "no alignment": (
        attend(q, long, long, problem=Transport(prior=Causal())),
        ValueError,
        'alignment: expected "top_left" or "bottom_right".*Tq=5, Tk=9',
    ),
    "alignments conflict": (
        problem(prior=Causal("top_left") * Window(3, alignment="bottom_right")),
        ValueError,
        "alignment: expected one",
    ),
    "is_causal conflicts": (
        attend(q, long, long, is_causal=True, problem=Transport(prior=Causal("bottom_right"))),
        ValueError,
        "alignment: expected one.*is_causal",
    ),
    "window type": (lambda: Window(2.5), TypeError, r"Window\(left\): expected an int or None, got 2.5"),
    "window empty": (lambda: Window(2, -3), ValueError, "Window: expected right >= -left"),
    "slopes": (problem(prior=ALiBi(torch.ones(3))), ValueError, r"ALiBi\(slopes\): expected.*\[H=4\], got \[3\]"),
    "slopes type": (lambda: ALiBi("steep"), TypeError, r"ALiBi\(slopes\)"),
    "bias type": (lambda: Bias(torch.ones(3).bool()), TypeError, r"Bias\(log_prior\): expected a floating-point"),
    "bias shape": (
        problem(prior=Bias(torch.ones(4, 4))),
        ValueError,
        r"Bias\(log_prior\): expected a shape.*got \[4, 4\]",
    ),
    "documents type": (
        lambda: Documents(torch.ones(5)),
        TypeError,
        r"Documents\(query_ids\): expected an integer tensor",
    ),
    "documents rank": (
        lambda: Documents(torch.ones(1, 1, 5).long()),
        ValueError,
        r"Documents\(query_ids\): expected shape",
    ),
    "documents length": (
        problem(prior=Documents(torch.zeros(4).long())),
        ValueError,
        r"Documents\(query_ids\): expected shape \[5\]",
    ),
    "documents keys": (
        attend(q, long, long, problem=Transport(prior=Documents(torch.zeros(5).long()))),
        ValueError,
        r"Documents\(key_ids\): expected key ids where Tq != Tk",
    ),
    "cu_seqlens": (lambda: Documents.from_cu_seqlens(torch.tensor([1, 3])), ValueError, "start at 0 and never fall"),
    "cu_seqlens type": (lambda: Documents.from_cu_seqlens(torch.ones(3)), TypeError, "expected an integer tensor"),
    "prior times number": (lambda: Causal() * 2, TypeError, "unsupported operand"),
    # functions around the operator
    "scores": (lambda: regard.solve([1.0]), TypeError, "scores: expected a floating-point tensor"),
    "scores subclass": (lambda: regard.solve(causal_upper_left(3, 3)), TypeError, "scores: expected a plain tensor"),
    "scalar scores": (lambda: regard.solve(torch.tensor(1.0)), ValueError, "scores: expected shape"),
    "weights": (
        lambda: regard.certify(torch.ones(3), torch.ones(4)),
        ValueError,
        "weights: expected a tensor of the scores' shape",
    ),
    "index dtype": (lambda: regard.weights_at(q, k, torch.ones(1)), TypeError, "index: expected an integer tensor"),
    "index range": (
        lambda: regard.weights_at(q, k, torch.tensor([5])),
        ValueError,
        r"index: expected keys in \[0, 5\), got 5",
    ),
    "index negative": (lambda: regard.weights_at(q, k, torch.tensor([-1])), ValueError, "index: expected keys"),
    "index shape": (lambda: regard.weights_at(q, k, torch.ones(3, 1).long()), ValueError, "index: expected a shape"),
    "topk": (lambda: regard.topk(q, k, 6), ValueError, "n: expected an int from 0 to Tk=5, got 6"),
    "block": (lambda: regard.block_mass(q, k, 0), ValueError, "block: expected a positive int, got 0"),
    "aux for": (lambda: AuxRequest.all("softmax"), TypeError, "problem: expected a Transport"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    function, kind, pattern = ERRORS[name]
    with pytest.raises(kind, match=pattern):
        function()


@pytest.mark.parametrize(
    "arguments",
    [
        {"problem": Transport(Tsallis(1.5))},
        {"problem": Transport(marginal=Rows(sink=0.0))},
        {"problem": Transport(temperature=0.0)},
        {"softcap": 5.0},
        {"dropout_p": 0.1},
        {"return_aux": AuxRequest(lse=True)},
    ],
    ids=repr,
)
def test_an_explicit_backend_never_falls_back(arguments):
    with pytest.raises(NotImplementedError, match='backend "sdpa" cannot serve'):
        regard.attention(q, k, k, **arguments, backend="sdpa")
    choice = regard.select_backend(q, k, k, **arguments)
    assert choice.backend != "sdpa" and (choice.backend == "native" or choice.reasons["sdpa"])
    with pytest.raises(NotImplementedError):
        regard.select_backend(q, k, k, **arguments, backend="sdpa")


def test_native_declines_tensors_without_memory():
    """A wrapper subclass holds other tensors and no numbers itself. Reading its memory would crash."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    wrapped = [TwoTensor(t, 2 * t) for t in (q, k, v)]
    choice = regard.select_backend(*wrapped)
    assert choice.backend == "sdpa" and "native" in choice.reasons
    out = regard.attention(*wrapped)
    assert torch.allclose(out.a, regard.attention(q, k, v), atol=1e-6)
    assert torch.allclose(out.b, regard.attention(2 * q, 2 * k, 2 * v), atol=1e-6)
    mask = torch.randn(5, 5)
    masked = regard.attention(*wrapped, attn_mask=TwoTensor(mask, -mask))  # the type of the query
    assert torch.allclose(masked.b, regard.attention(2 * q, 2 * k, 2 * v, attn_mask=-mask), atol=1e-6)
    with pytest.raises(NotImplementedError, match='backend "native" cannot serve'):
        regard.attention(*wrapped, backend="native")


def test_select_backend():
    choice = regard.select_backend(q, k, k, is_causal=True)
    assert choice.backend not in choice.reasons
    assert choice.backend == ("sdpa" if "native" in choice.reasons else "native")
    choice = regard.select_backend(q, k, k, problem=Transport(temperature=0.0))
    assert choice.backend == "torch" and list(choice.reasons) == ["native", "triton", "sdpa"]
    assert regard.select_backend(q, k, k, backend="torch").backend == "torch"


def test_auto_avoids_large_masks(monkeypatch):
    monkeypatch.setattr(engine, "_loaded", (None, "disabled for this test"))
    q = torch.randn(1, 1, 5000, 4)
    choice = regard.select_backend(q, q, q, problem=Transport(prior=Window(10)))
    assert choice.backend == "torch" and "mask" in choice.reasons["sdpa"]
    narrow = torch.randn(1, 1, 5000, 2)
    assert "store" in regard.select_backend(q, q, narrow).reasons["sdpa"]
