"""Priors with structure: tables, factors, decays, densities. Their errors, gradients and accuracy."""

import math

import pytest
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

import regard
from regard import (
    KL,
    AuxRequest,
    Bias,
    Blocks,
    ByKeys,
    Causal,
    Decay,
    Density,
    FermiDirac,
    Free,
    LowRank,
    Prefix,
    Relative,
    Rows,
    RowsAndColumns,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from support.reference import truth
from support.structured import attend, by_engine, double, draw, uniform
from support.tolerance import assert_close

pytestmark = pytest.mark.each_isa


# --- construction and shapes ------------------------------------------------------------------------------------------

# Query and key have B = 2, H = 4, Hkv = 2, Tq = 5, Tk = 9.
ERRORS = {
    "table of integers": (
        lambda: Relative(torch.zeros(3).long()),
        TypeError,
        r"Relative\(table\): expected a floating",
    ),
    "table, no tensor": (lambda: Relative([0.0]), TypeError, r"Relative\(table\): expected a floating.*got \[0\.0\]"),
    "even table": (
        lambda: Relative(torch.zeros(4)),
        ValueError,
        r"Relative\(table\): expected shape \[H, 2R \+ 1\].*4",
    ),
    "deep table": (
        lambda: Relative(torch.zeros(1, 4, 3)),
        ValueError,
        r"Relative\(table\): expected shape.*\[1, 4, 3\]",
    ),
    "scalar table": (lambda: Relative(torch.tensor(1.0)), ValueError, r"Relative\(table\): expected shape.*got \[\]"),
    "table alignment": (
        lambda: Relative(torch.zeros(3), "left"),
        ValueError,
        r"Relative\(alignment\): expected.*'left'",
    ),
    "t5 integers": (lambda: Relative.t5(torch.zeros(8, 2).int(), True), TypeError, r"Relative.t5\(weights\): expected"),
    "t5 shape": (
        lambda: Relative.t5(torch.zeros(8), True),
        ValueError,
        r"Relative.t5\(weights\): expected shape.*\[8\]",
    ),
    "t5 buckets": (
        lambda: Relative.t5(torch.zeros(3, 2), True),
        ValueError,
        "Relative.t5: expected at least 4 buckets",
    ),
    "t5 distance": (lambda: Relative.t5(torch.zeros(8, 2), True, 3), ValueError, "max_distance >= .*max_distance=3"),
    "factor of integers": (
        lambda: LowRank(torch.zeros(5, 2).int(), torch.zeros(9, 2)),
        TypeError,
        r"LowRank\(query_factor\): expected a floating",
    ),
    "no key factor": (
        lambda: LowRank(torch.zeros(5, 2), None),
        TypeError,
        r"LowRank\(key_factor\): expected a floating-point tensor, got None",
    ),
    "flat factor": (
        lambda: LowRank(torch.zeros(5, 2), torch.zeros(9)),
        ValueError,
        r"LowRank\(key_factor\): expected shape \[..., T, r\], got \[9\]",
    ),
    "ranks": (
        lambda: LowRank(torch.zeros(5, 2), torch.zeros(9, 3)),
        ValueError,
        "LowRank: expected factors of one rank r, got 2 and 3",
    ),
    "gates of integers": (lambda: Decay(torch.zeros(9).int()), TypeError, r"Decay\(log_forget\): expected a floating"),
    "one gate": (lambda: Decay(torch.tensor(-1.0)), ValueError, r"Decay\(log_forget\): expected shape.*got \[\]"),
    "decay alignment": (lambda: Decay(torch.zeros(9), 3), ValueError, r"Decay\(alignment\): expected.*got 3"),
    "density of bools": (lambda: Density(torch.ones(9).bool()), TypeError, r"Density\(prior\): expected a floating"),
    "float index": (lambda: Selected(torch.zeros(5, 2)), TypeError, r"Selected\(index\): expected an integer tensor"),
    "bool index": (lambda: Selected(torch.zeros(5, 2).bool()), TypeError, r"Selected\(index\): expected an integer"),
    "flat index": (lambda: Selected(torch.zeros(5).long()), ValueError, r"Selected\(index\): expected shape.*\[5\]"),
    "no block": (
        lambda: Selected(torch.zeros(5, 2).long(), 0),
        ValueError,
        r"Selected\(block\): expected a pos.*got 0",
    ),
    "half a block": (lambda: Selected(torch.zeros(5, 2).long(), 1.5), ValueError, r"Selected\(block\): .*got 1.5"),
    "negative prefix": (lambda: Prefix(-1), ValueError, r"Prefix\(n\): expected an int >= 0.*got -1"),
    "float prefix": (lambda: Prefix(2.0), ValueError, r"Prefix\(n\): expected an int >= 0.*got 2\.0"),
    "prefix of floats": (lambda: Prefix(torch.ones(2)), TypeError, r"Prefix\(n\): expected .*got Tensor\(float32"),
    "prefix of two": (lambda: Prefix(torch.ones(2, 2).long()), TypeError, r"Prefix\(n\): expected .* \[B\]"),
    "map of numbers": (lambda: Blocks(torch.ones(1, 2), 5), TypeError, r"Blocks\(map\): expected a bool tensor"),
    "flat map": (lambda: Blocks(torch.ones(2).bool(), 5), ValueError, r"Blocks\(map\): expected shape.*got \[2\]"),
    "size": (lambda: Blocks(torch.ones(1, 2).bool(), 0), ValueError, r"Blocks\(size\): expected a positive int, got 0"),
    "slope": (
        lambda: ByKeys("1"),
        TypeError,
        r"ByKeys\(slope\): expected a number or a floating-point tensor, got '1'",
    ),
    "offset": (lambda: ByKeys(1.0, math.inf), ValueError, r"ByKeys\(offset\): expected a finite number, got inf"),
    "power": (lambda: ByKeys(1.0, 0.0, 0.0), ValueError, r"ByKeys\(power\): expected a positive, finite number, got 0"),
}
MISFITS = {
    "heads of a table": (Relative(torch.zeros(3, 3), "top_left"), r"Relative\(table\): expected .* H=4, .*\[3, 3\]"),
    "table not finite": (Relative(torch.full((3,), math.inf), "top_left"), r"Relative\(table\): expected finite.*inf"),
    "table NaN": (Relative(torch.full((3,), math.nan), "top_left"), r"Relative\(table\): expected finite.*got nan"),
    "queries of a factor": (
        LowRank(torch.zeros(4, 2), torch.zeros(9, 2)),
        r"LowRank\(query_factor\): expected .*\[4, 2\]",
    ),
    "one query factor": (LowRank(torch.zeros(1, 2), torch.zeros(9, 2)), r"LowRank\(query_factor\): expected T=5 rows"),
    "keys of a factor": (LowRank(torch.zeros(5, 2), torch.zeros(5, 2)), r"LowRank\(key_factor\): expected .*\[5, 2\]"),
    "heads of a factor": (
        LowRank(torch.zeros(5, 2), torch.zeros(3, 9, 2)),
        r"LowRank\(key_factor\): expected .*got \[3, 9, 2\]",
    ),
    "factor NaN": (
        LowRank(torch.zeros(5, 2), torch.full((9, 2), math.nan)),
        r"LowRank\(key_factor\): expected finite numbers, got nan",
    ),
    "gates of queries": (Decay(torch.zeros(5), "top_left"), r"Decay\(log_forget\): expected .*got \[5\]"),
    "one gate for all": (Decay(torch.zeros(4, 1), "top_left"), r"Decay\(log_forget\): expected .*Tk=9.*\[4, 1\]"),
    "gate above 1": (
        Decay(torch.full((9,), 0.1), "top_left"),
        r"Decay\(log_forget\): expected finite numbers <= 0, got 0.1",
    ),
    "gate 0": (Decay(torch.full((9,), -math.inf), "top_left"), r"Decay\(log_forget\): expected finite.*got -inf"),
    "density below 0": (Density(torch.full((9,), -0.5)), r"Density\(prior\): expected finite numbers >= 0, got -0.5"),
    "density NaN": (Density(torch.full((9,), math.nan)), r"Density\(prior\): expected finite numbers >= 0, got nan"),
    "density inf": (Density(torch.full((9,), math.inf)), r"Density\(prior\): expected finite numbers >= 0, got inf"),
    "density shape": (Density(torch.ones(5)), r"Density\(prior\): expected a shape .*\[2, 4, 5, 9\], got \[5\]"),
    "rows of an index": (Selected(torch.zeros(4, 2).long()), r"Selected\(index\): expected .*got \[4, 2\]"),
    "one row of an index": (Selected(torch.zeros(1, 2).long()), r"Selected\(index\): expected one row .*Tq=5"),
    "prefixes": (Prefix(torch.ones(3).long()), r"Prefix\(n\): expected a number for each batch entry, B=2, got \[3\]"),
    "prefix values": (Prefix(torch.tensor([1, -1])), r"Prefix\(n\): expected numbers >= 0, got -1"),
    "blocks": (Blocks(torch.ones(2, 2).bool(), 5), r"Blocks\(map\): expected .*got \[2, 2\]"),
    "one block": (Blocks(torch.ones(1, 1).bool(), 5), r"Blocks\(map\): expected 1 x 2 blocks of size 5, got \[1, 1\]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_construction(name):
    make, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("name", MISFITS)
def test_errors_of_shapes_and_values(name):
    prior, message = MISFITS[name]
    q, k = draw(2, 4, 5, 8), draw(2, 2, 9, 8)
    for more in (prior, Causal("top_left") * prior):
        with pytest.raises(ValueError, match=message):
            attend(q, k, k, more, "torch")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda t: Relative(t(3), "top_left"), "Relative(table)"),
        (lambda t: LowRank(t(5, 2), torch.zeros(9, 2)), "LowRank(query_factor)"),
        (lambda t: LowRank(torch.zeros(5, 2), t(9, 2)), "LowRank(key_factor)"),
        (lambda t: Decay(t(9), "top_left"), "Decay(log_forget)"),
        (lambda t: Density(t(9)), "Density(prior)"),
        (lambda t: Selected(t(5, 2).long()), "Selected(index)"),
        (lambda t: Prefix(t(2).long()), "Prefix(n)"),
        (lambda t: Blocks(t(1, 2).bool(), 5), "Blocks(map)"),
    ],
)
def test_errors_of_devices_and_types(make, name):
    q, k = draw(2, 4, 5, 8), draw(2, 2, 9, 8)
    with pytest.raises(ValueError, match=r"expected a tensor on cpu, as query, got one on meta") as raised:
        attend(q, k, k, make(lambda *shape: torch.zeros(shape, device="meta")), "torch")
    assert str(raised.value).startswith(name)

    class Subclass(torch.Tensor):
        """A tensor type of another library."""

    with pytest.raises(TypeError, match="expected a plain tensor, got a Subclass") as wrong:
        attend(q, k, k, make(lambda *shape: torch.zeros(shape).as_subclass(Subclass)), "torch")
    assert str(wrong.value).startswith(name)


def by_the_inverse_temperature(q, k, v, slope, marginal: Rows | Free):
    """Causal softmax as a function of 1/temperature, which may be 0."""
    T = q.shape[2]
    inverse = slope[:, None, None] * torch.arange(1, T + 1, dtype=slope.dtype).log()[:, None]
    x = (inverse * (q @ k.mT) / q.shape[3] ** 0.5).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf)
    lse = x.logsumexp(-1, keepdim=True)
    if isinstance(marginal, Free):
        return (x + marginal.offset * inverse).exp() @ v
    assert isinstance(marginal, Rows)
    if marginal.relax is not None:
        return ((x - lse) + lse / (1 + marginal.relax * inverse)).exp() @ v
    null = lse if marginal.sink is None else torch.logaddexp(lse, marginal.sink * inverse)
    return (x - null).exp() @ v


@pytest.mark.parametrize("marginal", [Rows(), Rows(sink=0.3), Rows(relax=0.7), Free(0.3)], ids=repr)
@pytest.mark.parametrize("start", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float64), ("torch", torch.float32), ("native", torch.float64), ("native", torch.float32)],
)
def test_the_slope_of_the_rule_learns_from_zero(marginal, start, backend, dtype):
    """At 1/temperature = 0 the gradient by the slope is finite; near 0 it must not cancel against large prices."""
    if backend == "native":
        pytest.importorskip("regard._native")
    given = [draw(1, 2, 30, 8).double() for _ in range(4)]
    exact_slope = torch.full((2,), start, dtype=torch.float64, requires_grad=True)
    exact_leaves = [exact_slope, *(x.clone().requires_grad_() for x in given[:3])]
    out = by_the_inverse_temperature(*exact_leaves[1:], exact_slope, marginal)
    exact = [out, *torch.autograd.grad(out, exact_leaves, given[3])]

    slope = torch.full((2,), start, dtype=dtype, requires_grad=True)
    leaves = [slope, *(x.to(dtype).requires_grad_() for x in given[:3])]
    problem = Transport(prior=Causal(), marginal=marginal, temperature=ByKeys(slope))
    out = regard.attention(*leaves[1:], problem=problem, backend=backend)
    mine = [out, *torch.autograd.grad(out, leaves, given[3].to(dtype))]
    for found, expected in zip(mine, exact, strict=True):
        scale = float(expected.detach().abs().max().clamp(min=1e-3))
        assert float((found.double() - expected).detach().abs().max()) <= scale * 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_slope_of_the_rule_learns_from_zero_in_half(dtype):
    q, k, v, grad = (draw(1, 2, 30, 8).to(dtype) for _ in range(4))

    def of(convert: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        slope = torch.zeros(2, requires_grad=True)
        problem = Transport(prior=Causal(), temperature=ByKeys(slope))
        out = regard.attention(q.to(convert), k.to(convert), v.to(convert), problem=problem)
        return out, torch.autograd.grad(out, slope, grad.to(convert))[0]

    (half, mine), (_, exact) = of(dtype), of(torch.float64)
    assert half.dtype == dtype and mine.abs().min() > 1e-3
    torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)


def test_errors_of_the_rule():
    q, k = draw(2, 4, 5, 8), draw(2, 2, 9, 8)
    for rule, message in (
        (ByKeys(-1.0), "temperature: expected ByKeys with 1/temperature >= 0, got -"),
        (ByKeys(1.0, -10.0), "temperature: expected ByKeys with 1/temperature >= 0, got -"),
        (ByKeys(torch.full((4,), -0.1)), "temperature: expected ByKeys with 1/temperature >= 0, got -"),
        (ByKeys(torch.tensor(math.nan)), "temperature: expected ByKeys with 1/temperature >= 0, got nan"),
        (ByKeys(torch.ones(3)), r"ByKeys\(slope\): expected a number or a shape \[H=4\]"),
        (ByKeys(1.0, torch.ones(2, 4, 9, 1)), r"ByKeys\(offset\): expected a number or a shape"),
        (ByKeys(1.0, 0.5, torch.full((4,), -1.0)), r"ByKeys\(power\): expected power > 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            regard.attention(q, k, k, problem=Transport(temperature=rule), enable_gqa=True)
    zero = Transport(temperature=ByKeys(torch.zeros(4, requires_grad=True)))
    for options in ({"softcap": 5.0}, {"attn_mask": torch.zeros(5, 9)}):
        with pytest.raises(ValueError, match="> 0 where it needs a gradient and there is a softcap or a float"):
            regard.attention(q, k, k, problem=zero, enable_gqa=True, **options)
    with pytest.raises(ValueError, match=r"temperature: expected one for all queries .* got ByKeys"):
        regard.attention(k, k, k, problem=Transport(marginal=RowsAndColumns(), temperature=ByKeys(1.0)))


# --- gradients --------------------------------------------------------------------------------------------------------

GRADIENTS = {
    "softmax": (KL(), None),
    "sink": (KL(), Rows(sink=0.3)),
    "relaxed": (KL(), Rows(relax=0.8)),
    "free": (KL(), Free(-0.5)),
    "entmax": (Tsallis(1.5), None),
    "sparsemax, sink": (Tsallis(2.0), Rows(sink=0.3)),
    "sigmoid": (FermiDirac(), Free(-1.0)),
}
LEARNED = {
    "table": (lambda t: Relative(t, "bottom_right"), draw(4, 5)),
    "one table for all heads": (lambda t: Relative(t, "bottom_right"), draw(15)),
    "query factor": (lambda t: LowRank(t, draw(2, 2, 9, 3)), draw(2, 4, 5, 3, seed=1)),
    "query factor of all": (lambda t: LowRank(t, draw(4, 9, 3)), draw(5, 3, seed=1)),
    "key factor": (lambda t: LowRank(draw(4, 5, 3), t), draw(2, 1, 9, 3, seed=1)),
    "key factor of key heads": (lambda t: LowRank(draw(4, 5, 3), t), draw(2, 9, 3, seed=1)),
    "gates": (lambda t: Decay(t, "bottom_right"), uniform(-1, -0.1, 2, 4, 9)),
    "gates of all": (lambda t: Decay(t, "top_left"), uniform(-1, -0.1, 9)),
    "density": (Density, uniform(0.1, 1, 2, 4, 5, 9)),
    "density per key": (Density, uniform(0.1, 1, 4, 1, 9)),
    "density per query": (Density, uniform(0.1, 1, 5, 1)),
    "density of heads": (Density, uniform(0.1, 1, 4, 1, 1)),
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("how", GRADIENTS)
@by_engine
def test_gradcheck(name, how, backend):
    if backend == "torch" and how not in ("softmax", "entmax"):
        pytest.skip("the table of cases has it")
    make, tensor = LEARNED[name]
    regularizer, marginal = GRADIENTS[how]
    q, k, v = draw(2, 4, 5, 4), draw(2, 2, 9, 4, seed=1), draw(2, 2, 9, 3, seed=2)
    tensor = tensor.clone().requires_grad_()

    def function(t):
        return attend(q, k, v, make(t), backend, regularizer, marginal)

    assert torch.autograd.gradcheck(function, tensor, fast_mode=True)
    assert (torch.autograd.grad(function(tensor).sin().sum(), tensor)[0] != 0).any()


@pytest.mark.parametrize("how", GRADIENTS)
@by_engine
def test_the_gradient_of_a_density_of_0_is_that_from_the_right(how, backend):
    regularizer, marginal = GRADIENTS[how]
    q, k, v = draw(1, 2, 4, 4), draw(1, 2, 6, 4, seed=1), draw(1, 2, 6, 3, seed=2)
    density = uniform(0.2, 1, 1, 2, 4, 6)
    density[:, :, :, 1] = density[:, 1, 2, 3:] = 0

    def loss(t):
        return attend(q, k, v, Density(t), backend, regularizer, marginal).sin().sum()

    leaf = density.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf), leaf)
    step = 1e-6
    for at in (density == 0).nonzero().tolist():
        values = []
        for n in range(3):
            moved = density.clone()
            moved[tuple(at)] = n * step
            values.append(loss(moved))
        slope = (4 * values[1] - values[2] - 3 * values[0]) / (2 * step)  # one-sided, of second order
        assert torch.allclose(found[tuple(at)], slope, atol=1e-6, rtol=1e-5), (at, found[tuple(at)], slope)
    if regularizer == KL():
        assert (found[density == 0] != 0).all()  # alive


@pytest.mark.parametrize("how", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, double], ids=["float32", "float64"])
@by_engine
def test_a_row_of_zero_density_is_empty(how, dtype, backend):
    regularizer, marginal = GRADIENTS[how]
    leaves = [t.to(dtype).requires_grad_() for t in (draw(1, 2, 4, 4), draw(1, 2, 6, 4, seed=1), draw(1, 2, 6, 3))]
    density = uniform(0.2, 1, 4, 6).to(dtype)
    density[2] = 0
    density.requires_grad_()
    out = attend(*leaves, Density(density), backend, regularizer, marginal)
    gradients = torch.autograd.grad(out.sin().sum(), [*leaves, density])
    assert (out[:, :, 2] == 0).all() and (gradients[0][:, :, 2] == 0).all()
    assert all(g.isfinite().all() for g in gradients)
    # With a price that does not depend on the row's keys, a key of density 0 has a gradient also in such a row.
    if marginal is None:
        assert (gradients[3][2] == 0).all()


@by_engine
def test_zero_densities_beside_scores_that_overflow(backend):
    """A key of density 0 may have a score far above all others: its weight is 0, and nothing overflows."""
    q, k, v = (draw(1, 1, 8, 4, seed=n, dtype=torch.float32) for n in range(3))
    k[:, :, 3] *= 1e4
    density = torch.ones(8)
    density[3] = 0
    leaves = [t.requires_grad_() for t in (q, k, v, density)]
    out = attend(q, k, v, Density(density), backend)
    mask = torch.arange(8) != 3
    assert_close(out, regard.attention(q, k, v, attn_mask=mask), torch.float32)
    gradients = torch.autograd.grad(out.sin().sum(), leaves)
    assert all(g.isfinite().all() for g in gradients[:3])


@pytest.mark.parametrize("T", [2000])
@by_engine
def test_gradients_of_long_sums_keep_their_digits(T, backend):
    """Each entry of a table sums over a diagonal of pairs, each gate over all queries and keys after it."""
    shapes = {"table": (2, 9), "query": (T, 2), "key": (2, T, 2), "gates": (2, T), "density": (2, 1, T)}
    results = []
    for dtype, engine in ((torch.float32, backend), (double, "torch")):
        q, k, v = (draw(1, 2, T, 8, seed=n, dtype=torch.float32).to(dtype) for n in range(3))
        leaves = {name: draw(*shape, seed=5, dtype=torch.float32).to(dtype) for name, shape in shapes.items()}
        leaves["gates"] = -0.01 * leaves["gates"].abs()
        leaves["density"] = leaves["density"].abs() + 0.1
        for leaf in leaves.values():
            leaf.requires_grad_()
        prior = Relative(leaves["table"]) * LowRank(leaves["query"], leaves["key"])
        prior = prior * Decay(leaves["gates"]) * Density(leaves["density"])
        out = attend(q, k, v, prior, engine)
        results.append(torch.autograd.grad(out.sin().sum(), list(leaves.values())))
    for name, got, expected in zip(shapes, *results, strict=True):
        assert_close(got, expected, torch.float32, 4, name)


# --- Decay over long sequences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["equal gates", "gates vary"])
@by_engine
def test_decay_is_accurate_at_65536_keys(backend, spread):
    """The cumulative sums reach -45 000, where float32 has steps of 0.004; their differences are exact."""
    T, last = 65536, 64
    gates = (-0.7 + spread * draw(1, T)).clamp(max=-0.01)
    q, k, v = (draw(1, 1, n, 8, seed=s) for s, n in enumerate((last, T, T)))
    gates, q, k, v = (t.float() for t in (gates, q, k, v))
    q.requires_grad_()
    gates.requires_grad_()
    out, aux = attend(q, k, v, Decay(gates, "bottom_right"), backend, return_aux=AuxRequest(entropy=True, lse=True))
    near = 600  # earlier keys weigh less than exp(-0.2 * 500)
    part, own = gates.detach().double()[:, -near:], torch.arange(near)
    position = own[-last:, None]
    between = (own > own[:, None, None]).permute(1, 0, 2) & (own <= position[..., None])  # [last, near, near]
    log_prior = torch.einsum("l,ijl->ij", part[0], between.double()).masked_fill(own > position, -math.inf)
    exact_q = q.detach().double().requires_grad_()
    x = exact_q @ k[:, :, -near:].double().mT / math.sqrt(8) + log_prior
    expected = x.softmax(-1) @ v[:, :, -near:].double()
    assert_close(out, expected, torch.float32, 1, "out")
    assert_close(aux.lse, x.logsumexp(-1), torch.float32, 2, "lse")
    weight = draw(*out.shape, seed=9)
    found, by_gate = torch.autograd.grad(out, (q, gates), weight.float())
    (wanted,) = torch.autograd.grad(expected, exact_q, weight)
    assert_close(found, wanted, torch.float32, 4, "gradient of query")
    assert by_gate.isfinite().all() and by_gate[0, -2] != 0


# --- T5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 20), (8, 128), (6, 50), (4, 7), (64, 1000)])
def test_t5_has_the_buckets_of_transformers(bidirectional, buckets, max_distance):
    numbers = torch.arange(buckets, dtype=double)[:, None] + torch.tensor([0.0, 1000.0])
    table = Relative.t5(numbers, bidirectional, max_distance).table  # entries are the numbers of buckets
    distance = torch.arange(-max_distance, max_distance + 1)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    assert torch.equal(table, expected + torch.tensor([[0.0], [1000.0]], dtype=double))
    far = T5Attention._relative_position_bucket(torch.tensor([-5000, 5000]), bidirectional, buckets, max_distance)
    assert torch.equal(table[0, [0, -1]], far.double())


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("Tq", "Tk"), [(40, 40), (7, 40), (1, 300)])
@by_engine
def test_t5_is_the_bias_of_transformers(decoder, Tq, Tk, backend):
    config = transformers.T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=decoder)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    torch.nn.init.normal_(module.relative_attention_bias.weight)
    weight = module.relative_attention_bias.weight
    q, k, v = (draw(2, 4, T, 8, seed=n, dtype=torch.float32) for n, T in enumerate((Tq, Tk, Tk)))
    causal = Causal() if decoder else Window(None, None)
    prior = Relative.t5(weight, bidirectional=not decoder, alignment="bottom_right") * causal
    bias = module.compute_bias(Tq, Tk, past_seen_tokens=Tk - Tq)
    expected = attend(
        q, k, v, Bias(bias) * (Causal("bottom_right") if decoder else Window(None, None, "bottom_right")), backend
    )
    out = attend(q, k, v, prior, backend)
    assert_close(out, expected, torch.float32)
    assert_close(*(torch.autograd.grad(o.sin().sum(), weight)[0] for o in (out, expected)), torch.float32, 4)


def test_the_definition_is_independent():
    """The definition of the tests sees an error of a prior that the library would make."""
    q, k, v = draw(1, 2, 5, 4), draw(1, 2, 9, 4, seed=1), draw(1, 2, 9, 4, seed=2)
    prior = Relative(draw(2, 3), "bottom_right")
    right = truth(q, k, v, problem=Transport(prior=prior)).out
    assert_close(attend(q, k, v, prior, "torch"), right, double)
    wrong = attend(q, k, v, Relative(prior.table, "top_left"), "torch")
    with pytest.raises(AssertionError):
        assert_close(wrong, right, double)
