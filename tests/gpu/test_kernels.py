"""The Triton kernels, interpreted: problems of several tiles, and what kernels must never do.

Triton decides at its import whether it interprets, so these tests need TRITON_INTERPRET=1 from the start.
tests/backends/test_triton.py runs them in a process of their own. `make test-gpu-kernels` also runs the case table.
"""

import math

import pytest
import torch

import regard
from regard import (
    ALiBi,
    AuxRequest,
    Bias,
    Causal,
    Decay,
    Documents,
    FermiDirac,
    Free,
    LowRank,
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
from regard.backends.triton.schedule import schedule
from regard.statistics import ROW_STATISTICS
from support.tolerance import pytorch_loss

if not launch.interpreting():
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

T = 70  # more than one tile of 64
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=generator)


SLOPES, FORGET = torch.tensor([0.1, 0.4]), -torch.rand(2, T, generator=generator)
PROBLEMS = {
    "softmax": Transport(),
    "causal": Transport(prior=Causal()),
    "window, ALiBi, sink": Transport(
        prior=Window(9, 3) * ALiBi(torch.tensor([0.1, 0.4])), marginal=Rows(sink=normal(2))
    ),
    "relaxed": Transport(prior=Causal(), marginal=Rows(relax=2.0), temperature=torch.tensor([0.5, 1.5]).view(2, 1, 1)),
    "free": Transport(prior=Causal(), marginal=Free(offset=-2.0)),
    "structured": Transport(
        prior=Relative(normal(2, 9))
        * Decay(-torch.rand(2, T, generator=generator))
        * LowRank(normal(T, 3), normal(T, 3))
    ),
    "selected": Transport(prior=Selected(torch.randint(-1, 9, (2, T, 3), generator=generator), 8)),
    "union, documents": Transport(prior=(Prefix(5) | Window(6)) * Documents(torch.arange(T) // 40)),
    "entmax": Transport(Tsallis(1.5), prior=Causal()),
    "sparsemax, sink": Transport(Tsallis(2.0), prior=ALiBi(SLOPES), marginal=Rows(sink=normal(2))),
    "near softmax": Transport(Tsallis(1.1), prior=Causal()),
    "alpha per head, relaxed": Transport(Tsallis(torch.tensor([1.3, 1.8]).view(2, 1, 1)), marginal=Rows(relax=1.5)),
    "free entmax": Transport(Tsallis(1.7), marginal=Free(offset=0.5)),
    "sigmoid": Transport(FermiDirac(), marginal=Free(offset=-math.log(T))),
    "soft top-3": Transport(FermiDirac(), prior=Causal(), marginal=Rows(mass=3.0)),
}


def results(problem, backend, dtype, **inputs):
    """Output, statistics and gradients of every tensor that requires one."""
    wanted = AuxRequest(**{n: n != "lse" or isinstance(problem.regularizer, regard.KL) for n in ROW_STATISTICS})
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in inputs.values())
    out, aux = regard.attention(q, k, v, problem=problem, enable_gqa=True, return_aux=wanted, backend=backend)
    loss = (out.double() * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum()
    found = {"out": out, **{n: getattr(aux, n) for n in ROW_STATISTICS if getattr(aux, n) is not None}}
    grads = torch.autograd.grad(loss, (q, k, v))
    return found | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def inputs(Tq=T, Tk=T, D=16):
    g = torch.Generator().manual_seed(3)
    return {
        "q": torch.randn(2, 2, Tq, D, generator=g),
        "k": torch.randn(2, 1, Tk, D, generator=g),
        "v": torch.randn(2, 1, Tk, D, generator=g),
    }


def check(found, exact, dtype, sensitivity=1.0):
    for name, truth in exact.items():
        allowed = 8 * sensitivity * pytorch_loss(dtype if name in ("out", "dq", "dk", "dv") else torch.float32)
        infinite = truth.isinf()
        assert torch.equal(found[name][infinite].double(), truth[infinite]), name
        gap = (found[name].double() - truth)[~infinite].abs().max() / truth[~infinite].abs().max().clamp(min=1)
        assert gap <= allowed, (name, float(gap), allowed)


@pytest.mark.parametrize("name", PROBLEMS)
def test_output_statistics_and_gradients(name):
    found = results(PROBLEMS[name], "triton", torch.float32, **inputs())
    check(found, results(PROBLEMS[name], "torch", torch.float64, **inputs()), torch.float32, 4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "entmax"])
def test_half_types(name, dtype):
    half = {n: t.to(dtype) for n, t in inputs().items()}
    found = results(PROBLEMS[name], "triton", dtype, **half)
    check(found, results(PROBLEMS[name], "torch", torch.float64, **half), dtype, 4.0)


@pytest.mark.parametrize("Tq", [1, 5, 100])
def test_other_numbers_of_queries(Tq):
    problem = Transport(prior=Causal("bottom_right") * Window(20))
    found = results(problem, "triton", torch.float32, **inputs(Tq))
    check(found, results(problem, "torch", torch.float64, **inputs(Tq)), torch.float32, 4.0)


def test_readouts():
    given = inputs()
    q, k = given["q"], given["k"]
    for problem in (PROBLEMS["causal"], PROBLEMS["entmax"]):
        form = regard.lowering.lower(q, k, given["v"], problem=problem, enable_gqa=True)
        ours, exact = BACKENDS["triton"], BACKENDS["torch"]
        weights, keys = ours.topk(form, 3)
        torch.testing.assert_close(weights, exact.topk(form, 3)[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(ours.weights_at(form, keys), weights, atol=0, rtol=0)
        torch.testing.assert_close(ours.block_sums(form, 9), exact.block_sums(form, 9), atol=1e-5, rtol=1e-5)


def test_masked_keys_may_hold_nan():
    """A key that no query reads, and a query without keys, reach no result and no gradient."""
    given = inputs()
    ids = torch.arange(T) // 20
    ids[30:34] = -1
    for t in given.values():
        t[:, :, 30:34] = math.nan
    for regularizer in (None, Tsallis(1.5)):
        found = results(Transport(regularizer, prior=Documents(ids)), "triton", torch.float32, **given)
        for name in ("out", "dq", "dk", "dv", "entropy"):
            assert found[name].isfinite().all(), name
        assert (found["out"][:, :, 30:34] == 0).all() and (found["dk"][:, :, 30:34] == 0).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_invalid_numbers_stay_visible(where):
    given = inputs()
    given[where][0, 0, 8, 3] = math.nan
    for regularizer in (None, Tsallis(1.5), Tsallis(2.0)):
        out = regard.attention(*given.values(), problem=Transport(regularizer), enable_gqa=True, backend="triton")
        assert out[0, 0, 8].isnan().any()


def test_dropout_drops_the_same_weights():
    given = inputs()
    for regularizer in (None, Tsallis(1.5)):
        outs = []
        for backend in ("triton", "torch"):
            torch.manual_seed(5)
            problem = Transport(regularizer, prior=Causal())
            outs.append(
                regard.attention(*given.values(), dropout_p=0.4, problem=problem, enable_gqa=True, backend=backend)
            )
        torch.testing.assert_close(*outs, atol=2e-6, rtol=1e-5)


def test_scores_are_summed_from_one_reference():
    """A first tile whose best score is exactly 0 is a reference like any other."""
    given = inputs()
    given["k"][:, :, :64] = 0
    for problem in (PROBLEMS["free entmax"], PROBLEMS["sigmoid"]):
        found = results(problem, "triton", torch.float32, **given)
        check(found, results(problem, "torch", torch.float64, **given), torch.float32, 4.0)


def test_windows_wider_than_32_bits():
    problem = Transport(prior=Window(2**31 - 1, 2**40))
    found = results(problem, "triton", torch.float32, **inputs())
    check(found, results(problem, "torch", torch.float64, **inputs()), torch.float32, 4.0)


@pytest.mark.parametrize("regularizer", [None, Tsallis(1.5), FermiDirac()])
def test_invalid_numbers_reach_the_gradients(regularizer):
    """Where all keys that a query may read give NaN, the row is invalid. It is not a row without keys."""
    given = inputs(Tq=20)
    given["q"][0, 0, 3] = math.nan
    marginal = Free(offset=-1.0) if isinstance(regularizer, FermiDirac) else Rows()
    found = results(
        Transport(regularizer, prior=Causal("top_left"), marginal=marginal), "triton", torch.float32, **given
    )
    assert found["dq"][0, 0, 3].isnan().all() and found["dq"][0, 1].isfinite().all()
    for name in ("dk", "dv"):
        assert found[name][0, 0, :4].isnan().all(), name
        assert (found[name][:, :, 20:] == 0).all(), name  # no query reads these keys


def test_a_price_beyond_the_range_of_numbers_is_nan():
    """A prior of exp(-100) for every key needs a price of -1e43 for sparsemax, which float32 does not have."""
    out = regard.attention(
        *inputs().values(),
        problem=Transport(Tsallis(2.0), prior=Bias(torch.full((T,), -100.0))),
        enable_gqa=True,
        backend="triton",
    )
    assert out.isnan().all()


def test_a_row_without_keys_has_the_value_zero_under_fermi_dirac():
    mask = torch.ones(T, T, dtype=torch.bool)
    mask[5] = False
    problem = Transport(FermiDirac(), marginal=Rows(mass=3.0))
    _, aux = regard.attention(
        *inputs().values(), mask, problem=problem, enable_gqa=True, return_aux=AuxRequest(value=True), backend="triton"
    )
    assert (aux.value[:, :, 5] == 0).all() and aux.value.isfinite().all()


def test_strided_inputs_with_nan_around_them():
    """Kernels read no entry beside the inputs: NaN surrounds each of them, and no dimension is contiguous."""
    given = inputs()
    guarded = {}
    for name, t in given.items():
        B, H, n, D = t.shape
        memory = torch.full((D + 2, 2 * n + 2, H + 2, B + 2), math.nan)
        guarded[name] = memory[1:-1, 1:-1:2, 1:-1, 1:-1].permute(3, 2, 1, 0).copy_(t)
        assert guarded[name].stride(3) != 1
    for name in ("causal", "entmax"):
        ask = {"problem": PROBLEMS[name], "enable_gqa": True, "backend": "triton"}
        assert torch.equal(regard.attention(*guarded.values(), **ask), regard.attention(*given.values(), **ask))


def test_readouts_without_queries():
    given = inputs(Tq=0)
    form = regard.lowering.lower(*given.values(), problem=Transport(), enable_gqa=True)
    assert BACKENDS["triton"].topk(form, 3)[1].shape == (2, 2, 0, 3)


def test_results_do_not_share_memory():
    form = regard.lowering.lower(*inputs().values(), problem=Transport(), enable_gqa=True)
    found = BACKENDS["triton"].forward(form, ("out", "dual", "value"))
    assert found["dual"].data_ptr() != found["value"].data_ptr()


def test_results_do_not_depend_on_the_order_of_programs(monkeypatch):
    """Programs of a GPU run in any order: none may read what another one writes."""
    from triton.runtime import interpreter

    plain = results(PROBLEMS["entmax"], "triton", torch.float32, **inputs())
    orders = []
    set_index = interpreter.interpreter_builder.set_grid_idx

    def backwards(x, y, z):
        size = interpreter.interpreter_builder.grid_dim
        set_index(size[0] - 1 - x, size[1] - 1 - y, size[2] - 1 - z)
        orders.append((x, y, z))

    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", backwards)
    again = results(PROBLEMS["entmax"], "triton", torch.float32, **inputs())
    assert len(orders) > 4
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name


def test_a_wrong_kernel_is_found(monkeypatch):
    """A window that is off by one, and a stride that is swapped, fail the comparison."""
    exact = results(PROBLEMS["window, ALiBi, sink"], "torch", torch.float64, **inputs())
    record = launch.record

    def off_by_one(form, readable):
        return record(form, readable)._replace(left=form.left + 1)

    def swapped(form, readable):
        found = record(form, readable)
        return found._replace(key=found.key._replace(i=found.key.j, j=found.key.i))

    for wrong in (off_by_one, swapped):
        monkeypatch.setattr(launch, "record", wrong)
        found = results(PROBLEMS["window, ALiBi, sink"], "triton", torch.float32, **inputs())
        with pytest.raises(AssertionError):
            check(found, exact, torch.float32, 4.0)


def test_a_missing_mask_is_found(monkeypatch):
    """A kernel that takes a mixed tile for a full one fails the comparison."""

    def without_masks(form, BM, BN, by_key=False):
        order, counts = schedule(form, BM, BN, by_key)
        return order, counts * torch.tensor([0, 1], dtype=torch.int32)

    monkeypatch.setattr(launch, "schedule", without_masks)
    given = {name: torch.nn.functional.pad(t, (0, 0, 0, 58)) for name, t in inputs().items()}  # no tile at the edge
    problem = Transport(prior=(Prefix(5) | Window(6)) * Documents(torch.arange(128) // 40))
    found = results(problem, "triton", torch.float32, **given)
    exact = results(problem, "torch", torch.float64, **given)
    with pytest.raises(AssertionError):
        check(found, exact, torch.float32, 4.0)


def test_without_a_gpu_and_without_interpretation_it_declines(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match='backend "triton" cannot serve this problem: runs on GPUs only'):
        regard.attention(q, q, q, backend="triton")
