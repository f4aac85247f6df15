"""Selected keys on the native backend: the kernels that turn the lists around (csrc/kl/selected_blocks.h), and lists of
single keys, against a dense mask in float64 on the reference backend."""

import math

import pytest
import torch

import regard
from regard import AuxRequest, Causal, Free, Rows, Selected, Transport, Tsallis, Window
from support.threads import with_threads
from support.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("isa", "poison")

STATISTICS = (
    *("lse", "entropy", "score_variance", "collision", "support", "first_key_mass", "max_weight", "max_scores"),
    *("mass", "value_spread", "kl", "cost", "dual", "key_mass"),
)
# Blocks of 32 keys and more are turned where enough rows select one; a block of more than 64 keys has several segments.
SIZES = ("B", "H", "Hkv", "Tq", "Tk", "D", "Dv", "block", "n")
SHAPES = {
    name: dict(zip(SIZES, sizes, strict=True))
    for name, sizes in {
        "cut blocks": (2, 4, 2, 90, 310, 20, 13, 33, 3),
        "long blocks": (1, 2, 1, 100, 700, 64, 64, 150, 1),
        "several ranges of rows": (1, 1, 1, 1300, 1300, 8, 8, 64, 5),
        "chunks of keys": (1, 2, 2, 200, 1100, 16, 16, 32, 4),
        "single keys": (1, 2, 2, 40, 300, 20, 13, 1, 60),
    }.items()
}
PRIORS = {"alone": None, "causal": Causal("bottom_right"), "gaps": Window(17, -2, alignment="bottom_right")}
MARGINALS = {"rows": Rows(), "sink": Rows(sink=0.3), "relaxed": Rows(relax=0.7), "free": Free(offset=-3.0)}


def tensors(B, H, Hkv, Tq, Tk, D, Dv, block, n):
    q, k, v = torch.randn(B, H, Tq, D), torch.randn(B, Hkv, Tk, D), torch.randn(B, Hkv, Tk, Dv)
    index = torch.randint(-1, -(-Tk // block), (B, H, Tq, n))  # with repetitions, in any order
    index[0, 0, 3] = -1  # a row without keys
    return q, k, v, index


def admissible(index, block, Tk, prior):
    Tq = index.shape[2]
    mask = (index[..., None] == torch.arange(Tk) // block).any(-2)
    distance = torch.arange(Tk) - torch.arange(Tq)[:, None] - (Tk - Tq)
    if prior is PRIORS["causal"]:
        mask &= distance <= 0
    if prior is PRIORS["gaps"]:
        mask &= (distance >= -17) & (distance <= -2)
    return mask


def results(q, k, v, problem, backend, **arguments):
    """Output, statistics, and the gradients of inputs and temperature."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, problem.temperature)]
    problem = Transport(problem.regularizer, prior=problem.prior, marginal=problem.marginal, temperature=leaves[3])
    request = AuxRequest(**dict.fromkeys(STATISTICS, True))
    arguments |= {"enable_gqa": True, "backend": backend, "problem": problem}
    out, aux = regard.attention(*leaves[:3], return_aux=request, **arguments)
    generator = torch.Generator().manual_seed(7)
    loss = 0.0
    for value in (out, aux.lse, aux.entropy):
        weight = torch.randn(value.shape, generator=generator).to(value.dtype)
        loss = loss + (value.masked_fill(value.isinf(), 0.0) * weight).sum()
    found = {"out": out} | {name: getattr(aux, name) for name in STATISTICS}
    names = ("grad q", "grad k", "grad v", "grad temperature")
    return found | dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


CASES = [(shape, prior, "rows") for shape in SHAPES for prior in PRIORS if shape != "several ranges of rows"]
CASES += [("several ranges of rows", "causal", "rows")]
CASES += [("cut blocks", "causal", marginal) for marginal in MARGINALS if marginal != "rows"]


@pytest.mark.parametrize(("shape", "prior", "marginal"), CASES)
def test_selected_blocks(shape, prior, marginal):
    given, band = SHAPES[shape], PRIORS[prior]
    q, k, v, index = tensors(**given)
    temperature = torch.rand(given["H"], 1, 1) + 0.5
    selected = Selected(index, given["block"])
    problem = Transport(
        prior=selected if band is None else selected * band, marginal=MARGINALS[marginal], temperature=temperature
    )
    found = results(q, k, v, problem, "native")
    exact = Transport(marginal=MARGINALS[marginal], temperature=temperature.double())
    mask = admissible(index, given["block"], given["Tk"], band)
    wanted = results(q.double(), k.double(), v.double(), exact, "torch", attn_mask=mask)
    for name, value in found.items():
        # Sums whose terms cancel, and the masses of a relaxed marginal, which are powers of the row's normalizer.
        sensitive = 20 if name == "grad temperature" else 5 if name in ("cost", "value_spread") else 2
        assert_close(value, wanted[name], torch.float32, sensitive * (4 if marginal == "relaxed" else 1), name)
    assert (found["out"][0, 0, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_selected_blocks_in_other_types(dtype):
    given = SHAPES["cut blocks"]
    *inputs, index = tensors(**given)
    inputs = [x.to(dtype) for x in inputs]
    grad = torch.randn_like(inputs[0][..., :1]).expand(-1, -1, -1, given["Dv"])
    prior = Selected(index, given["block"]) * Causal("bottom_right")
    mask = admissible(index, given["block"], given["Tk"], PRIORS["causal"])
    both = []
    for leaves, how in (
        (inputs, {"problem": Transport(prior=prior), "backend": "native"}),
        ([x.double() for x in inputs], {"attn_mask": mask, "backend": "torch"}),
    ):
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = regard.attention(*leaves, enable_gqa=True, **how)
        both.append([out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    for got, wanted in zip(*both, strict=True):
        assert_close(got, wanted, dtype, 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_do_not_change_a_bit_of_selected_blocks(shape):
    q, k, v, index = tensors(**SHAPES[shape])
    problem = Transport(prior=Selected(index, SHAPES[shape]["block"]), temperature=torch.ones(()))
    one, *others = with_threads(lambda: results(q, k, v, problem, "native"))
    for other in others:
        for name, value in other.items():
            assert torch.equal(value, one[name]), name


@pytest.mark.parametrize("prior", ["alone", "causal", "gaps"])
def test_keys_that_no_row_selects_may_hold_nan(prior):
    """Beside selected blocks, and in them where the band excludes the key for every row that selected it."""
    given, band = SHAPES["cut blocks"] | {"H": 2, "Hkv": 2}, PRIORS[prior]
    q, k, v, index = tensors(**given)
    index = index % 4 * 2  # every other block, of the first seven
    index[:, :, ::3] = -1
    mask = admissible(index, given["block"], given["Tk"], band)
    unread = ~mask.any(2)[..., None]  # [B, H, Tk, 1]
    assert unread.any() and (prior == "alone" or unread.float().mean() > mask.float().mean())
    selected = Selected(index, given["block"])
    problem = Transport(prior=selected if band is None else selected * band)
    both = []
    for fill in (0.0, math.nan):
        leaves = [q, k.masked_fill(unread, fill), v.masked_fill(unread, -fill)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = regard.attention(*leaves, problem=problem, backend="native")
        both.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for clean, poisoned in zip(*both, strict=True):
        assert torch.equal(clean, poisoned)


def test_a_query_of_nan_spoils_its_own_row_alone():
    q, k, v, index = tensors(**SHAPES["cut blocks"])
    problem = Transport(prior=Selected(index.clamp(min=0), SHAPES["cut blocks"]["block"]))
    clean = regard.attention(q, k, v, problem=problem, backend="native", enable_gqa=True)
    q[1, 2, 50] = math.nan
    out = regard.attention(q, k, v, problem=problem, backend="native", enable_gqa=True)
    assert out[1, 2, 50].isnan().all()
    out[1, 2, 50] = clean[1, 2, 50]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("block", [1, 32])
def test_a_window_full_of_selected_keys(block):
    """Under a short window, lists have as many keys as the window, which is more than a third of them."""
    T, count = 1500, -(-1500 // block)
    q, k, v = (torch.randn(1, 1, T, 8) for _ in range(3))
    index = (torch.arange(T)[:, None] // block - torch.arange(400 // block)).clamp(min=-1)[None, None]
    assert T >= 3 * 400 and index.max() < count
    prior = Selected(index, block) * Window(99)
    for regularizer in (Tsallis(1.5), Tsallis(2.0)):
        out = regard.attention(q, k, v, problem=Transport(regularizer, prior=prior), backend="native")
        wanted = regard.attention(q, k, v, problem=Transport(regularizer, prior=Window(99)), backend="torch")
        assert_close(out, wanted, torch.float32, 2)


def test_parts_of_the_gradient_on_their_own():
    """Gradients of one input at a time are those of all of them."""
    q, k, v, index = tensors(**SHAPES["chunks of keys"])
    problem = Transport(prior=Selected(index, 32))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(regard.attention(*leaves, problem=problem, backend="native").sin().sum(), leaves)
    for n, grad in enumerate(grads):
        leaves = [x.clone().requires_grad_(i == n) for i, x in enumerate((q, k, v))]
        out = regard.attention(*leaves, problem=problem, backend="native")
        assert torch.equal(torch.autograd.grad(out.sin().sum(), leaves[n])[0], grad)
