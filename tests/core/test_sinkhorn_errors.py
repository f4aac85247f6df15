"""Rows and columns: causal problems, invalid settings, plans that do not exist, and calls that do not converge."""

import math
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

import regard
from regard import AuxRequest, Bias, Causal, Documents, RowsAndColumns, Transport, Tsallis, Window
from regard.solvers.sinkhorn import feasibility
from support.sinkhorn import F64, by_backend, call, draw, tight

pytestmark = pytest.mark.each_isa


TWO, ONE = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"is_causal": True}, "read the future"),
        ({"prior": Causal()}, "read the future"),
        ({"prior": Window(2)}, "read the future"),
        ({"prior": Window(2, -1)}, "read the future"),
        ({"regularizer": Tsallis(1.5)}, r"RowsAndColumns expects KL\(\)"),
        ({"temperature": 0.0}, "temperature: 0"),
        ({"temperature": torch.ones(5, 1)}, "temperature: expected one for all queries"),
        ({"marginal": RowsAndColumns(row=torch.ones(4))}, r"RowsAndColumns\(row\): expected a shape"),
        ({"marginal": RowsAndColumns(row=-torch.ones(5))}, r"RowsAndColumns\(row\): expected finite numbers >= 0"),
        ({"marginal": RowsAndColumns(column=torch.ones(4))}, r"RowsAndColumns\(column\): expected a shape"),
        ({"marginal": RowsAndColumns(column=torch.full((5,), 2.0))}, r"send, 5, over .* got 10"),
        ({"marginal": RowsAndColumns(relax=torch.tensor(-1.0))}, r"RowsAndColumns\(relax\): expected relax > 0"),
        ({"backend": "sdpa"}, 'backend "sdpa"'),
        ({"prior": Documents(TWO, ONE), "marginal": RowsAndColumns(column=torch.ones(5))}, "in a document"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_errors(more, words):
    parts = {name: more.pop(name) for name in ("prior", "temperature", "marginal") if name in more}
    parts.setdefault("marginal", RowsAndColumns())
    with pytest.raises((ValueError, NotImplementedError), match=words):
        call(problem=Transport(more.pop("regularizer", None), **parts), **more)


LOWER = torch.ones(5, 5, dtype=torch.bool).tril()
ONE_OF_MANY = torch.stack([torch.ones(5, 5, dtype=torch.bool), LOWER])  # a head
FORBIDDEN = torch.zeros(5, 5, dtype=F64).masked_fill(~LOWER, -math.inf)


@pytest.mark.parametrize(
    "mask",
    [
        LOWER, LOWER.expand(1, 2, 5, 5), ONE_OF_MANY, LOWER.tril(-1), LOWER & (torch.arange(5) < 4), FORBIDDEN,
        FORBIDDEN.float().clamp(min=torch.finfo(torch.float32).min), FORBIDDEN.clone().requires_grad_(),
        LOWER & (TWO[:, None] == TWO),
    ],
    ids=["bool", "expanded", "one head", "strict", "padded", "float", "finite", "learned", "packed"],
)  # fmt: skip
def test_causal_masks_raise(mask):
    """In every form in which they can be given: earlier outputs would depend on later queries."""
    problem = Transport(marginal=RowsAndColumns())
    with pytest.raises(ValueError, match=r"attn_mask: RowsAndColumns does not allow a causal .* read the future"):
        call(attn_mask=mask, problem=problem)
    if mask.is_floating_point():
        with pytest.raises(
            ValueError, match=r"Bias\(log_prior\): RowsAndColumns does not allow a causal .* read the future"
        ):
            call(problem=Transport(prior=Bias(mask), marginal=RowsAndColumns()))
        with pytest.raises(ValueError, match="read the future"):
            regard.solve(draw(2, 5, 5), Transport(prior=Bias(mask), marginal=RowsAndColumns()))


ALTERNATING = torch.arange(5) % 2
NOT_THE_NEXT = ~torch.ones(5, 5, dtype=torch.bool).tril(1).triu(1)
UP_TO_THE_NEXT = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(2), -math.inf)


@pytest.mark.parametrize(
    ("prior", "mask"),
    [
        (Window(2, 1), NOT_THE_NEXT),
        (Window(None, 1) * Documents(ALTERNATING), None),
        (Bias(UP_TO_THE_NEXT), NOT_THE_NEXT),
        (Documents(TWO), LOWER | (TWO[:, None] != TWO)),
    ],
    ids=["window", "documents", "bias", "document by document"],
)
def test_priors_and_masks_that_are_causal_together_raise(prior, mask):
    whole = prior if mask is None else prior * Bias(torch.zeros(5, 5).masked_fill(~mask, -math.inf))
    with pytest.raises(
        ValueError, match=r"prior.* together: RowsAndColumns does not allow a causal .* read the future"
    ):
        call(attn_mask=mask, problem=Transport(prior=prior, marginal=RowsAndColumns()))
    with pytest.raises(ValueError, match="factors together: RowsAndColumns does not allow a causal"):
        call(problem=Transport(prior=whole, marginal=RowsAndColumns()))


def test_one_causal_head_is_found_in_late_blocks():
    """The test reads blocks of queries one after the other, and each head by itself."""
    T = 600
    mask = torch.ones(2, T, T, dtype=torch.bool).tril()
    q = draw(1, 2, T, 4)
    problem = Transport(marginal=RowsAndColumns(iterations=1))
    mask[0, 10, 11] = mask[1, 590, 599] = True
    regard.attention(q, q, q, mask, problem=problem)
    mask[1, 590, 599] = False
    with pytest.raises(ValueError, match="attn_mask: RowsAndColumns does not allow a causal"):
        regard.attention(q, q, q, mask, problem=problem)


@pytest.mark.parametrize("low", [-65504.0, -1e9, -1e30])
def test_finite_numbers_in_place_of_minus_infinity(low):
    """They count as scores. A triangle of them is causal and raises; other patterns cause a warning."""
    problem = Transport(marginal=RowsAndColumns(iterations=3))
    bias = draw(5, 5)
    triangle, padding = bias.masked_fill(~LOWER, low), bias.masked_fill(torch.arange(5) == 4, low)
    with pytest.raises(ValueError, match="attn_mask: RowsAndColumns does not allow a causal"):
        call(attn_mask=triangle, problem=problem)
    with pytest.warns(UserWarning, match=r"attn_mask: RowsAndColumns expects -inf .* got numbers down to -"):
        call(attn_mask=padding, problem=problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(attn_mask=bias.masked_fill(torch.arange(5) == 4, -math.inf), problem=problem)
        call(attn_mask=bias.abs() * low, problem=problem)  # large costs


def test_causal_masks_of_modules_raise():
    module = regard.nn.MultiheadAttention(8, 2, problem=Transport(marginal=RowsAndColumns()), batch_first=True)
    x = torch.randn(1, 5, 8)
    with pytest.raises(ValueError, match="read the future"):
        module(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    module(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(3))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(5, 5, dtype=torch.bool), TWO[:, None] == TWO, torch.eye(5, dtype=torch.bool),
        (torch.arange(5) < 1).expand(5, 5), (torch.arange(5) == 4)[:, None].expand(5, 5), torch.arange(5) < 3,
        (torch.arange(5) < 3) & (torch.arange(5) < 3)[:, None], torch.zeros(5, 5, dtype=torch.bool),
    ],
    ids=["whole", "blocks", "diagonal", "one key", "one query", "keys", "padding", "nothing"],
)  # fmt: skip
def test_other_masks_do_not_raise(mask):
    bias = torch.zeros(mask.shape, dtype=F64).masked_fill(~mask, -math.inf)
    by_mask = call(attn_mask=mask, problem=Transport(marginal=tight(strict=True)))
    by_bias = call(problem=Transport(prior=Bias(bias), marginal=tight(strict=True)))
    assert (by_mask - by_bias).abs().max() < 1e-9


def test_a_triangle_that_is_not_square_does_not_raise():
    """If there are more keys than queries, the mask alone does not determine the position of a query."""
    q, k = draw(1, 2, 3, 4), draw(1, 2, 5, 4)
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    regard.attention(q, k, k, mask, problem=Transport(marginal=RowsAndColumns(strict=True)))


@pytest.mark.parametrize(
    "bad",
    [
        {"row": 0.0}, {"row": "x"}, {"column": 1.0}, {"relax": -1.0}, {"tolerance": 0.0}, {"max_iterations": 0},
        {"iterations": 2}, {"iterations": 0}, {"strict": 1}, {"tolerance": torch.ones(())},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_raise(bad):
    with pytest.raises((ValueError, TypeError), match=rf"RowsAndColumns\({next(iter(bad))}\): expected"):
        RowsAndColumns(**bad)


def test_failure_to_converge_is_reported():
    """Under an upper triangular mask (not causal) the only plan is the diagonal, which no finite prices give."""
    mask = torch.ones(5, 5, dtype=torch.bool).triu()
    short = {"max_iterations": 8, "tolerance": 1e-9}
    with pytest.warns(UserWarning, match=r"after \d+ iterations .*e-\d\d of the mass is in a wrong column"):
        _, aux = call(
            attn_mask=mask,
            problem=Transport(marginal=RowsAndColumns(**short)),
            return_aux=AuxRequest(column_residual=True, key_mass=True),
        )
    assert (aux.column_residual - (aux.key_mass - 1).abs()).abs().max() < 1e-12 and aux.column_residual.max() > 1e-9
    with pytest.raises(RuntimeError, match="in a wrong column"):
        call(attn_mask=mask, problem=Transport(marginal=RowsAndColumns(strict=True, **short)))
    with pytest.raises(RuntimeError, match="more of the mass than float64 can resolve may be in a wrong column"):
        call(problem=Transport(marginal=RowsAndColumns(strict=True, max_iterations=8), temperature=1e-12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(problem=Transport(marginal=RowsAndColumns(strict=True)))


def crowded(T, queries, keys):
    """A mask whose first queries may read only the first keys, which cannot receive all that these queries send."""
    mask = torch.ones(T, T, dtype=torch.bool)
    mask[:queries, keys:] = False
    return mask


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("T", [8, 64])
@pytest.mark.parametrize("kind", ["over", "block"])
def test_every_head_without_a_plan_is_reported(kind, T, dtype):
    """If prices grow without bound, the residual is only rounding and may be 0 by chance. Each head is still
    reported."""
    mask = crowded(T, 2, 1) if kind == "over" else crowded(T, T // 2, T // 4)
    q, k, v = (draw(4, 2, T, 8, seed=seed, dtype=dtype) for seed in range(3))
    settings = {"max_iterations": 250 if T == 8 else 60}
    with pytest.warns(UserWarning, match="in a wrong column .* in 8 of 8 heads"):
        out, aux = regard.attention(
            q, k, v, mask, problem=Transport(marginal=RowsAndColumns(**settings)),
            return_aux=AuxRequest(column_residual=True, key_mass=True, mass=True),
        )  # fmt: skip
    least = {"over": 2 / T, "block": 1 / 2}[kind]  # of the mass: an excess in one column is missing in another
    assert bool((aux.column_residual.sum(-1) / T > least * (1 - 1e-4)).all())
    assert (aux.column_residual - (aux.key_mass - 1).abs()).abs().max() < 1e-4
    assert out.isfinite().all() and (aux.mass - 1).abs().max() < 1e-4
    with pytest.raises(RuntimeError, match="in 8 of 8 heads"):
        regard.attention(q, k, v, mask, problem=Transport(marginal=RowsAndColumns(strict=True, **settings)))


@by_backend
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_a_missing_plan_is_proven_in_few_iterations(backend, seed):
    """Each query sends 1 and each key receives 1. A plan exists if queries and keys can be matched (Birkhoff)."""
    T = 7
    mask = torch.rand(T, T, generator=torch.Generator().manual_seed(seed)) < 0.3
    mask[:, 0] |= ~mask.any(1)
    mask[0] |= ~mask.any(0)
    mask[0, -1] = True  # not causal, even by chance
    matched = maximum_bipartite_matching(csr_array(mask.numpy()), perm_type="column")
    q, k, v = (draw(1, 2, T, 4, seed=n) for n in range(3))
    problem = Transport(marginal=RowsAndColumns(tolerance=1e-5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        aux = regard.attention(
            q, k, v, mask, problem=problem, backend=backend, return_aux=AuxRequest(iterations=True)
        )[1]  # fmt: skip
    if (matched >= 0).all():
        assert not caught
        return
    [warning] = caught
    sent, keys = re.search(r"no plan: in head . of batch 0, (\d) queries send \1 and may read only (\d) keys",
                              str(warning.message)).groups()  # fmt: skip
    assert int(sent) > int(keys) and int(aux.iterations.max()) <= 33


def test_a_search_without_progress_ends_before_the_last_iteration(monkeypatch):
    """There is no plan here, and the search for a proof is disabled."""
    monkeypatch.setattr(feasibility.Infeasibility, "_test_order", lambda *_: None)
    problem = Transport(marginal=RowsAndColumns(strict=True, max_iterations=2000))
    q = draw(1, 1, 8, 4)
    with pytest.raises(RuntimeError, match=r"after [1-9]\d\d iterations 1.2\de-01 .* stopped making progress"):
        regard.attention(q, q, q, crowded(8, 2, 1), problem=problem)


@by_backend
def test_marginals_that_contradict_the_mask_raise(backend):
    q, k, v = (draw(2, 2, 8, 4, seed=n) for n in range(3))

    def solved(mask, **marginals):
        problem = Transport(marginal=RowsAndColumns(strict=True, tolerance=1e-9, **marginals))
        aux = AuxRequest(key_mass=True, mass=True)
        return regard.attention(q, k, v, mask, problem=problem, backend=backend, return_aux=aux)[1]

    one_key = torch.ones(8, 8, dtype=torch.bool)
    one_key[2, 1:] = False  # query 2 reads key 0 alone ...
    nothing = torch.tensor([0.0, *[8 / 7] * 7], dtype=F64)
    with pytest.raises(ValueError, match=r"\(column\): expected every query .* 4 that cannot, .* query 2 of head 0"):
        solved(one_key, column=nothing)  # ... which is to receive nothing
    with pytest.raises(ValueError, match="got 4 that cannot"):
        solved(one_key, column=nothing, relax=1.0)
    unread = torch.arange(8) != 3
    with pytest.raises(ValueError, match=r"8, over the keys that can be read, got 7; 1 keys that no query may read"):
        solved(unread.expand(8, 8), column=torch.ones(8, dtype=F64))
    by_idle = unread.expand(8, 8).clone()
    by_idle[2, 3] = True  # key 3 is read by query 2 alone, which sends nothing
    row = torch.ones(8, dtype=F64).index_fill(0, torch.tensor(2), 0.0)
    found = solved(by_idle, row=row).key_mass
    assert (found - torch.where(unread, 1.0, 0.0)).abs().max() < 1e-8
    with pytest.raises(ValueError, match=r"7, over the keys that can be read, got 6\.125; 1 keys"):
        solved(by_idle, row=row, column=torch.full((8,), 7 / 8, dtype=F64))
    relaxed = solved(by_idle, row=row, column=torch.full((8,), 7 / 8, dtype=F64), relax=0.5)
    assert (relaxed.mass - row).abs().max() < 1e-12 and relaxed.key_mass[..., 3].abs().max() == 0


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("T", [8, 64])
def test_masks_that_leave_a_plan_do_not_warn(T, dtype):
    """Nearly triangular, and a band."""
    q, k, v = (draw(4, 2, T, 8, seed=seed, dtype=dtype) for seed in range(3))
    whole = torch.ones(T, T, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (whole.tril(T // 4), whole.tril(2).triu(-2)):
            regard.attention(q, k, v, mask, problem=Transport(marginal=RowsAndColumns(strict=True)))
