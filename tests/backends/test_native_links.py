"""Tsallis and Fermi-Dirac on the native engine: every marginal, shape, dtype and path; values that are not finite."""

import math

import pytest
import torch

import regard
from regard import Bias, Causal, Free, Rows, Transport, Tsallis
from support.native import (
    ALL,
    END,
    LINKS,
    PROBLEMS,
    SHAPES,
    Linked,
    each_isa,
    engine,
    error,
    normal,
    qkv,
    spread,
    uniform,
)
from support.threads import with_threads

pytestmark = pytest.mark.usefixtures("isa", "poison")


@each_isa
@pytest.mark.parametrize("marginal", ["rows", "mass", "sink", "relax", "free"])
@pytest.mark.parametrize("link", [link for link in LINKS if link != "fermi"])
def test_links_with_every_marginal(link, marginal):
    least = LINKS[link](4)[1](*LINKS[link](4)[0].values()).alpha
    least = torch.as_tensor(least)
    tensors, call = {
        "rows": ({}, dict),
        "mass": ({}, lambda: {"problem": Transport(marginal=Rows(mass=2.5))}),
        "sink": ({"b": normal(1, 4)}, lambda b: {"problem": Transport(marginal=Rows(sink=b))}),
        "relax": ({"rho": uniform(2, 4) + 1}, lambda rho: {"problem": Transport(marginal=Rows(relax=rho))}),
        # a score of 0 has weight 1 at the offset 1/(alpha - 1)
        "free": ({"b": 1 / (least - 1) - uniform(3, 4)}, lambda b: {"problem": Transport(marginal=Free(b))}),
    }[marginal]
    Linked(link, qkv(1, Tq=50, Tk=70, D=17, Dv=9, layout="bthd") | tensors, call).check()


TURNS = ["1.5", "per head", "2.0", "1.3", "fermi", "1.8", "1.05", "per head, near 1"]


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_links_agree_with_the_definition(name, shape):
    tensors, call = ALL[name](4, shape["Tq"], shape["Tk"])
    turn = list(ALL).index(name) + 2 * SHAPES.index(shape)
    for link in (TURNS[turn % 8], TURNS[(turn + 4) % 8]):
        # In free rows a weight is a power of the score itself. Near alpha = 1 all weights are almost 0.
        if not (name == "free" and link != "fermi"):
            # Such steep slopes bring the prior below 1e-38, which is 0 in the engine and a denormal number in PyTorch.
            Linked(link, qkv(1, **shape) | tensors, call).check(support=name != "softcap")


@each_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head", "per head, near 1", "fermi"])
def test_links_dtypes(link, dtype):
    for name in ("causal", "biases", "sink"):
        tensors, call = PROBLEMS[name](4, 50, 60)
        Linked(link, qkv(2, Tq=50, Tk=60, dtype=dtype, layout="cut") | tensors, call).check()


@each_isa
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "sink"])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "fermi"])
def test_links_dropout(name, link):
    tensors, call = PROBLEMS[name](4, 40, 50)
    Linked(link, qkv(3, Tq=40, Tk=50) | tensors, call, dropout_p=0.3).check()


@each_isa
@pytest.mark.parametrize("Tq", [1, 2, 5, 8])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head", "fermi"])
def test_links_decoding(link, Tq):
    for name in ("causal", "alibi"):
        tensors, call = PROBLEMS[name](8, Tq, 1300)
        shape = {"B": 2, "H": 8, "Hkv": 2, "Tq": Tq, "Tk": 1300, "D": 32, "Dv": 32}
        Linked(link, spread(6, 3.0, **shape) | tensors, call).check()


@each_isa
@pytest.mark.parametrize("link", LINKS)
def test_links_few_keys_and_rows_without(link):
    for Tk in (1, 2, 3):
        Linked(link, qkv(7, Tq=5, Tk=Tk), dict).check()
    mask = torch.ones(50, 60, dtype=torch.bool)
    mask[[0, 30]] = False
    for marginal in (Free(0.5),) if link == "fermi" else (Rows(), Rows(sink=0.3), Rows(relax=2.0)):
        case = Linked(link, qkv(7, Tq=50, Tk=60), lambda: {"attn_mask": mask}, marginal=marginal)
        case.check()
        assert case.run("native", gradients=False)["out"][:, :, 30].abs().max() == 0
    # Whole blocks of rows without keys, and long calls, in which the search of a row starts more than once.
    Linked(link, qkv(7, Tq=130, Tk=40), lambda: {"problem": Transport(prior=Causal(END))}).check()
    shape = {"B": 1, "H": 1, "Hkv": 1, "Tq": 9, "Tk": 900, "D": 4, "Dv": 4}
    mask = torch.arange(9)[:, None] % 3 != 1
    for prior in (None, Bias(normal(7, 900))):
        Linked(link, qkv(7, **shape), lambda p=prior: {"attn_mask": mask, "problem": Transport(prior=p)}).check()
    for sizes in ((0, 5), (5, 0)):
        Linked(link, qkv(8, Tq=sizes[0], Tk=sizes[1]), dict).check(gradients=False)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.7])
def test_priors_below_the_smallest_float32(alpha):
    """If the largest prior of a row is 2^-60, a key with prior 2^-130 is still in the support."""
    q, k, v = qkv(7, H=2, Tq=30, Tk=40).values()
    log_prior = -60 * math.log(2) - 70 * math.log(2) * (torch.arange(40) % 3 == 1)
    problem = Transport(Tsallis(alpha), prior=Bias(log_prior))
    request = regard.AuxRequest(support=True, mass=True)
    _, found = regard.attention(q, k, v, problem=problem, return_aux=request, backend="native")
    doubles = [t.double() for t in (q, k, v)]
    exact = Transport(Tsallis(alpha), prior=Bias(log_prior.double()))
    _, expected = regard.attention(*doubles, problem=exact, return_aux=request, backend="torch")
    assert torch.equal(found.support.double(), expected.support)
    torch.testing.assert_close(found.mass.double(), expected.mass, rtol=1e-5, atol=0)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    "shape", [{"Tq": 150, "Tk": 180}, {"Tq": 3, "Tk": 2500}, {"Tq": 300, "Tk": 1100, "B": 1}], ids=str
)
def test_links_threads_do_not_change_a_bit(link, shape):
    for name in ("sink", "biases") if shape["Tq"] == 150 else ("causal",):
        tensors, call = PROBLEMS[name](4, shape["Tq"], shape["Tk"])
        case = Linked(link, spread(9, 3.0, **shape) | tensors, call)
        one, *others = with_threads(lambda case=case: case.run("native"))
        for other in others:
            for n, value in other.items():
                assert torch.equal(value, one[n]), n


@pytest.mark.parametrize("T", [130, 1000])
@pytest.mark.parametrize("link", ["1.3", "1.5", "2.0", "per head, near 1", "fermi"])
def test_links_invalid_values_in_masked_keys_have_no_effect(link, T):
    tensors = spread(10, 4.0, B=1, H=2, Hkv=1, Tq=30, Tk=T)
    unread = torch.zeros(T, dtype=torch.bool)
    unread[[3, 4, 50]] = True
    unread[97:129] = True
    for call in ({"attn_mask": ~unread}, {"attn_mask": torch.where(unread, -math.inf, 0.5).expand(30, T)}):
        clean = Linked(link, tensors, lambda call=call: call).run("native")
        for name in ("k", "v"):
            for invalid in (math.nan, math.inf, 1e4, -1e25):
                spoilt = dict(tensors)
                spoilt[name] = tensors[name].clone()
                spoilt[name][:, :, unread] = invalid
                found = Linked(link, spoilt, lambda call=call: call).run("native")
                for n, value in found.items():
                    assert torch.equal(value, clean[n]), (n, invalid)


@pytest.mark.parametrize("T", [60, 1000])
@pytest.mark.parametrize("link", LINKS)
def test_links_nan_stays_in_its_row(link, T):
    tensors = spread(11, 3.0, B=1, H=1, Hkv=1, Tq=30, Tk=T)
    spoilt = tensors | {"q": tensors["q"].clone()}
    spoilt["q"][0, 0, 7, 2] = math.nan
    rest = torch.arange(30) != 7
    case, other = (Linked(link, t, dict) for t in (tensors, spoilt))
    found = other.run("native", gradients=False)
    assert found["out"][0, 0, 7].isnan().all()
    runs = found, *(case.run("torch", dtype, gradients=False) for dtype in (torch.float64, None))
    case.judge(*({n: t[:, :, rest] for n, t in run.items() if n != "key_mass"} for run in runs), case.factor)
    if T == 60:  # among more keys the prefilter (csrc/links/int16_prefilter.h) may treat its neighbours differently
        clean = case.run("native", gradients=False)
        for name, value in found.items():
            if name != "key_mass":
                assert torch.allclose(value[:, :, rest], clean[name][:, :, rest], rtol=1e-5, atol=1e-6), name
    for key in (0, T // 2, T - 1):  # a NaN in a key reaches every row
        spoilt = tensors | {"k": tensors["k"].clone()}
        spoilt["k"][0, 0, key, 2] = math.nan
        assert Linked(link, spoilt, dict).run("native", gradients=False)["out"].isnan().all(), key


@pytest.mark.parametrize("T", [60, 1000])
@pytest.mark.parametrize("link", LINKS)
def test_links_nan_is_not_lost_in_a_gradient(link, T):
    tensors = spread(11, 3.0, B=1, H=1, Hkv=1, Tq=30, Tk=T)
    tensors["q"][0, 0, 7, 2] = math.nan
    unread = torch.arange(T) >= T - 5
    found = Linked(link, tensors, lambda: {"attn_mask": ~unread}).run("native")
    assert found["grad q"][0, 0, 7].isnan().all() and found["grad q"][0, 0, 8].isfinite().all()
    for name in ("grad k", "grad v"):
        assert found[name][0, 0, ~unread].isnan().any(-1).all()


@each_isa
@pytest.mark.parametrize("T", [60, 1000])
@pytest.mark.parametrize("link", ["1.05", "1.3", "1.5", "2.0"])
def test_links_common_offsets(link, T):
    """Scores and values around 1000. The plan does not depend on the offset of the scores, nor the spread on that of
    the values."""
    tensors = spread(12, 2.0, B=1, H=2, Hkv=1, Tq=20, Tk=T, D=16, Dv=8)
    tensors["q"] = torch.cat([tensors["q"], torch.ones(1, 2, 20, 1)], -1)
    tensors["k"] = torch.cat([tensors["k"], torch.full((1, 1, T, 1), 4000.0)], -1)
    tensors["v"] = tensors["v"] + 1000
    case = Linked(link, tensors, dict)
    truth = case.run("torch", torch.float64, gradients=False)
    # A score of 1000 has an error of 6e-5, which bounds the other errors: the slope of a weight is at most 1 here.
    bounds = {"out": 1e-3, "entropy": 1e-2, "collision": 1e-3, "max_weight": 1e-3, "value_spread": 2e-2, "mass": 1e-5}
    for isa in engine.isas():
        engine.use(isa)
        found = case.run("native", gradients=False)
        for name, bound in bounds.items():
            assert error(found[name], truth[name]) < bound, (name, error(found[name], truth[name]))


@pytest.mark.parametrize("link", [link for link in LINKS if link != "fermi"])
def test_links_huge_scores_pick_the_best_key(link):
    for T in (40, 900):
        tensors = qkv(13, B=1, H=2, Hkv=2, Tq=20, Tk=T)
        for size in (1e6, 1e15):
            spoilt = tensors | {"q": tensors["q"] * size}
            top, order = (spoilt["q"].double() @ tensors["k"].double().mT).topk(2)
            clear = top[..., 0] - top[..., 1] > 1e-5 * top[..., 0].abs()  # distinct in float32, too
            best = order[..., 0]
            found = Linked(link, spoilt, dict).run("native")
            expected = tensors["v"].gather(2, best[..., None].expand(-1, -1, -1, 16))
            assert clear.sum() > 30 and torch.allclose(found["out"][clear], expected[clear], atol=1e-6), (T, size)
            assert all(t.isfinite().all() for n, t in found.items() if n not in ("score_variance",)), (T, size)
