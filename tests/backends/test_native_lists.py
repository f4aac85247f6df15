"""Rows with few keys on the native engine: stored lists of keys, and the 16-bit prefilter before them."""

import math

import pytest
import torch

import regard
from regard import AuxRequest, Causal, Documents, Transport, Tsallis, Window
from regard.backends.native import backend
from support.native import END, PROBLEMS, Linked, each_isa, engine, error, kept, normal, spread, uniform

pytestmark = pytest.mark.usefixtures("isa", "poison")


# The number of keys with weight decides the path: lists per row, a panel of all keys, or both for different rows.
PATHS = {
    "lists": 6.0,
    "panel": 0.01,
    "both": torch.logspace(-2, 1, 97),
    "alternating": torch.tensor([0.01, 8.0]).repeat(49)[:97],
}


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "2.5", "per head", "per head, near 1"])
@pytest.mark.parametrize("path", PATHS)
def test_links_paths(path, link):
    few = {"B": 1, "H": 2, "Hkv": 1, "Tq": 97, "Tk": 1000, "D": 8, "Dv": 12}
    tensors, call = PROBLEMS[{"1.5": "causal", "2.0": "sink", "per head": "sink, bias"}.get(link, "plain")](2, 97, 1000)
    Linked(link, spread(5, PATHS[path], **few) | tensors, call).check()


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head, near 1"])
@pytest.mark.parametrize("sizes", [(16, 32), (16, 10), (7, 16)])
def test_links_backward_from_lists(link, sizes, monkeypatch):
    """Rows with few keys store them for backward. Pairs are read in place, or padded for other sizes."""
    lists = kept(monkeypatch)
    shape = {"B": 2, "H": 2, "Hkv": 1, "Tq": 61, "Tk": 700, "D": sizes[0], "Dv": sizes[1]}
    tensors, call = PROBLEMS[{"1.5": "causal", "2.0": "sink"}.get(link, "plain")](2, 61, 700)
    factor = torch.linspace(4, 9, 61)
    factor[48:] = 1e-4  # a block of rows that has no lists, in the same call
    Linked(link, spread(5, factor, **shape) | tensors, call).check()
    heads = torch.stack([x.view(torch.int32)[:, :, [0, 48], 0] for x in lists if x.dtype == torch.float32])
    assert (heads[..., 0] != 0).any() and (heads[..., 1] == 0).any()


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0"])
@pytest.mark.parametrize("where", [("q", 7), ("k", 500), ("k", 699)])
def test_links_nan_is_not_lost_in_lists(link, where, monkeypatch):
    tensors = spread(5, 6.0, B=1, H=2, Hkv=1, Tq=61, Tk=700, D=16, Dv=16)
    tensors[where[0]][0, 0, where[1], 2] = math.nan
    case = Linked(link, tensors, dict)
    for isa in engine.isas():
        engine.use(isa)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_may_list", lambda form: False)
            plain = case.run("native")
        for name, value in case.run("native").items():
            assert torch.equal(value.isnan(), plain[name].isnan()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_links_backward_from_lists_in_other_types_and_with_dropout(dtype, monkeypatch):
    lists = kept(monkeypatch)
    tensors = {n: t.to(dtype) for n, t in spread(5, 6.0, B=1, H=2, Hkv=1, Tq=61, Tk=700, D=16, Dv=16).items()}
    case = Linked("1.5", tensors, dict, dropout_p=0.3)
    found = case.run("native")
    assert lists and (lists[0].view(torch.int32)[:, :, 0, 0] != 0).all()
    monkeypatch.setattr(backend, "_may_list", lambda form: False)
    for name, plain in case.run("native").items():
        assert error(found[name], plain.double()) < {torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype], name


def keys_times(factor):
    def change(tensors):
        tensors["k"] = tensors["k"] * factor(torch.arange(tensors["k"].shape[2])[:, None])

    return change


def zeros(tensors):
    tensors["q"][:, :, 58, 1:] = 0  # among the last rows: `were_screened` reads the first rows
    tensors["k"][:, :, 300:500] = 0


# The 16-bit prefilter (csrc/links/int16_prefilter.h): keys that make it coarse, and problems that it is combined with.
SCREENED = {
    "one large key": keys_times(lambda j: torch.where(j == 700, 20.0, 1.0)),
    "large keys here and there": keys_times(lambda j: torch.where(j % 200 == 3, 10.0, 1.0)),
    "a large dimension": keys_times(lambda j: torch.tensor([1.0, 30.0] + [1.0] * 14)),
    "blocks of many sizes": keys_times(lambda j: 10.0 ** -(j // 96 % 7)),
    "zeros": zeros,
    **dict.fromkeys(("plain", "causal", "sink", "mask", "padding", "mass", "end", "long document", "wide window")),
}
WIDE = {
    "end": lambda H, Tq, Tk: ({"mask": torch.arange(Tk) < Tk - 70}, lambda mask: {"attn_mask": mask}),
    "long document": lambda H, Tq, Tk: (
        {"ids": torch.ones(Tq, dtype=torch.long), "key_ids": (torch.arange(Tk) - 100).sign()},
        lambda ids, key_ids: {"problem": Transport(prior=Documents(ids, key_ids))},
    ),
    "wide window": lambda H, Tq, Tk: ({}, lambda: {"problem": Transport(prior=Window(1200, 7, alignment=END))}),
}


ROWS = 193  # enough rows of one head for the prefilter at any vector length


def were_screened(lists):
    """Whether the first rows of each head used the 16-bit prefilter in every pass."""
    return lists and all((x.view(torch.int32)[:, :, 0, 0] & 512 > 0).all() for x in lists)


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0"])
@pytest.mark.parametrize("kind", SCREENED)
def test_links_screened_keys(kind, link, monkeypatch):
    lists = kept(monkeypatch)
    tensors, call = (PROBLEMS | WIDE).get(kind, PROBLEMS["plain"])(2, 61, 1500)
    tensors |= spread(6, 6.0, B=1 if kind not in ("mask", "padding") else 2, H=2, Hkv=1, Tq=61, Tk=1500)
    if SCREENED[kind] is not None:
        SCREENED[kind](tensors)
    Linked(link, tensors, call).check()
    assert were_screened(lists)


@each_isa
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0"])
def test_links_screened_keys_without_room(link, monkeypatch):
    """Each key scores higher than those before it, so that every key is a candidate for some time."""
    lists = kept(monkeypatch)
    tensors = spread(6, 6.0, B=1, H=2, Hkv=1, Tq=61, Tk=1500)
    tensors["q"] = tensors["q"].abs()
    tensors["k"] = tensors["k"].abs() * 0.1 + torch.arange(1500)[:, None] * 1e-3
    Linked(link, tensors, dict).check()
    assert not were_screened(lists)


@each_isa
@pytest.mark.parametrize(
    "shape",
    [
        {"D": 7, "layout": "bhdt"},
        {"D": 33, "layout": "cut"},
        {"D": 16, "layout": "bthd", "dtype": torch.bfloat16},
        {"D": 20, "dtype": torch.float16},
        {"D": 256, "Tk": 4096, "Tq": ROWS, "H": 18, "Hkv": 18},  # more heads than the prefilter holds at a time
        {"D": 8, "Tk": 70000, "Tq": ROWS, "H": 1},  # more keys than 16 bits can number
    ],
    ids=str,
)
def test_links_screened_keys_of_every_shape(shape, monkeypatch):
    lists = kept(monkeypatch)
    shape = {"B": 1, "H": 2, "Hkv": 1, "Tq": 97, "Tk": 1000, "Dv": 8} | shape
    Linked("1.5", spread(7, 5.0, **shape), dict).check()
    assert were_screened(lists)


@pytest.mark.parametrize("masked", [5, 7, 1444, 1445])
def test_links_screened_keys_with_full_lists(masked):
    """Lists become full after the prefilter. Masked keys among the first keys must still be skipped."""
    q, k, v = (torch.zeros(1, 1, n, 16) for n in (ROWS, 1536, 1536))
    q[..., 0], k[..., 0], k[..., 5, 0], k[..., 960:, 0] = 40, -1, 1, 1
    v[..., 5, :], v[..., masked, :] = 1000, math.nan
    mask = torch.arange(1536) != masked
    problem = Transport(Tsallis(2.0))
    found = regard.attention(q, k, v, mask, problem=problem, backend="native")
    truth = regard.attention(q.double(), k.double(), v.double(), mask, problem=problem, backend="torch")
    assert error(found, truth) < 1e-5


@each_isa
@pytest.mark.parametrize("factor", [1.0, 100.0, 1000.0])
def test_links_other_passes_make_the_same_plan(factor):
    """Every pass computes a score to the same bits, because weights are differences of scores and a price."""
    q, k, v = spread(8, factor, B=1, H=1, Hkv=1, Tq=200, Tk=3000, D=64, Dv=8).values()
    problem = Transport(Tsallis(1.5))
    for isa in engine.isas():
        engine.use(isa)
        weights, _ = regard.topk(q, k, 400, problem=problem)
        assert (weights.sum(-1) - 1).abs().max() < 1e-6
        _, aux = regard.attention(q, k, v, problem=problem, backend="native", return_aux=AuxRequest(key_mass=True))
        assert abs(aux.key_mass.double().sum() / 200 - 1) < 1e-6
        assert (regard.block_mass(q, k, 50, problem=problem).double().sum(-1) - 1).abs().max() < 1e-6


@each_isa
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("what", [50.0, math.nan])
def test_links_later_keys_do_not_change_screened_rows(what, alpha):
    """Masked keys in the same block as keys that a row reads do not change a bit of the row."""
    q, k, v = spread(9, 4.0, B=1, H=2, Hkv=2, Tq=1200, Tk=1200).values()
    problem = Transport(Tsallis(alpha), prior=Causal())
    other = k.clone()
    other[:, :, 1008:] *= what  # in the block of 96 keys from 960 on
    for isa in engine.isas():
        engine.use(isa)
        one, two = (regard.attention(q, keys, v, problem=problem, backend="native") for keys in (k, other))
        assert torch.equal(one[:, :, :1008], two[:, :, :1008]) and not torch.equal(one, two)


@each_isa
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_links_rows_of_one_key_have_no_gradient(alpha):
    """If one key has all the weight of a row, its utility equals the baseline to the last bit."""
    q, k, v = (t.requires_grad_() for t in spread(10, 300.0, B=1, H=1, Hkv=1, Tq=ROWS, Tk=1000, Dv=64).values())
    for isa in engine.isas():
        engine.use(isa)
        out, aux = regard.attention(
            q, k, v, problem=Transport(Tsallis(alpha)), backend="native", return_aux=AuxRequest(support=True)
        )
        alone = aux.support[0, 0] == 1
        assert alone.sum() > 20
        dq, dk = torch.autograd.grad(out[0, 0, alone].square().sum(), (q, k))
        assert not dq.any() and not dk.any(), isa


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key", [95, 191, 192, 287, 383, 500, 1499])
def test_links_nan_in_a_key_reaches_every_row(key, dtype):
    q, k, v = spread(6, 6.0, B=1, H=1, Hkv=1, Tq=ROWS, Tk=1500).values()
    k[..., key, 2] = math.nan
    out = regard.attention(*(t.to(dtype) for t in (q, k, v)), problem=Transport(Tsallis(1.5)), backend="native")
    assert out.isnan().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("where", [("q", 7), ("k", 500), ("k", 1490)])
def test_links_screened_keys_with_invalid_values(where, bad, monkeypatch):
    """Rows that are not finite skip the prefilter. Other rows still use it, also beside a masked block that is not
    finite."""
    lists = kept(monkeypatch)
    name, at = where
    tensors = spread(6, 6.0, B=1, H=1, Hkv=1, Tq=ROWS, Tk=1500)
    tensors[name][0, 0, at, 2] = bad
    masked = {"attn_mask": torch.arange(1500) // 96 != at // 96} if name == "k" else {}
    problem = Transport(Tsallis(1.5))
    q, k, v = tensors.values()
    found = regard.attention(q.requires_grad_(), k, v, problem=problem, backend="native", **masked)
    truth = regard.attention(q.double(), k.double(), v.double(), problem=problem, backend="torch", **masked)
    rest = torch.arange(ROWS) != at if name == "q" else slice(None)
    assert error(found[:, :, rest], truth[:, :, rest]) < 1e-5
    if name == "k":
        assert were_screened(lists)
    elif not math.isfinite(bad):
        assert found[:, :, 7].isnan().all()


@pytest.mark.parametrize("mask", [None, torch.arange(1536) != 300], ids=["read", "unread"])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_links_screened_keys_whose_squares_are_too_large(alpha, mask):
    """The queries are exact in 16 bits, so the bound of their rounding error is 0 times infinity."""
    q, k, v = torch.zeros(1, 1, ROWS, 16), torch.zeros(1, 1, 1536, 16), normal(1, 1, 1, 1536, 4)
    q[..., 0], k[..., 0] = 179 / 4, uniform(2, 1536) * 2 - 1
    k[..., 300, 1], k[..., 300, 0], k[..., 310, 0], v[..., 310, :] = 1e20, -1, 3, 100
    problem = Transport(Tsallis(alpha))
    assert (regard.attention(q, k, v, mask, problem=problem, backend="native") - 100).abs().max() < 1e-3
