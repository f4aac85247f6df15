"""Unions, `Prefix`, `Blocks` and `Selected` against dense bool masks, and the map of tiles that they become."""

import math

import pytest
import torch

import regard
from regard import (
    ALiBi,
    AuxRequest,
    Bias,
    Blocks,
    Causal,
    Decay,
    Density,
    Documents,
    LowRank,
    Prefix,
    Relative,
    RowsAndColumns,
    Selected,
    Transport,
    Tsallis,
    Window,
    tiles,
)
from regard.lowering import lower
from support.reference import log_prior_matrix
from support.tolerance import assert_close, stock_attention

pytestmark = pytest.mark.each_isa
by_engine = pytest.mark.parametrize("backend", ["native", "torch"])
double = torch.float64


def heads(B, H, Hkv, Tq, Tk, D=8, dtype=torch.float32):
    return [torch.randn(B, h, T, D, dtype=dtype, requires_grad=True) for h, T in ((H, Tq), (Hkv, Tk), (Hkv, Tk))]


def positions(Tq, Tk, offset=0):
    return torch.arange(Tq)[:, None] + offset, torch.arange(Tk)[None]


def block_diffusion(T, block):
    """Noised tokens 0 ... T - 1, then the same tokens clean: a noised block reads itself and earlier clean blocks, a
    clean block reads clean blocks up to itself."""
    order = torch.arange(T // block)
    own, before, none = torch.eye(T // block).bool(), order[:, None] > order, torch.zeros(T // block, T // block).bool()
    return torch.cat([torch.cat([own, before], 1), torch.cat([none, before | own], 1)])


def tree_mask(parent):
    """Each token reads its ancestors and itself."""
    mask = torch.eye(len(parent)).bool()
    for node, above in enumerate(parent):
        if above >= 0:
            mask[node] |= mask[above]
    return mask


def masks():
    """Name -> prior, dense mask, (B, H, Hkv, Tq, Tk)."""
    found = {}
    i, j = positions(200, 200)
    n = torch.tensor([30, 130])
    found["prefix-LM"] = (Prefix(n) | Causal(), ((j < n.view(2, 1, 1)) | (j <= i))[:, None], (2, 2, 2, 200, 200))
    found["global tokens and window"] = (
        (Prefix(5) | Window(40)) * Causal(),
        ((j < 5) | (j >= i - 40)) & (j <= i),
        (1, 2, 1, 200, 200),
    )
    ids = torch.repeat_interleave(torch.arange(4), 50)
    shared = (ids[:, None] == ids) & (j <= i)
    found["shared prefix"] = (
        Prefix(20) | Causal() * Documents(ids),
        (j < 20) | shared,
        (1, 2, 2, 200, 200),
    )
    blocks = block_diffusion(80, 16)
    dense = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)
    found["block diffusion"] = (Blocks(blocks, 16), dense, (1, 2, 2, 160, 160))
    tree = tree_mask([-1, 0, 0, 1, 1, 2, 2, 5])
    context = 90  # keys of the prompt, before the tokens of the tree
    own = torch.cat([torch.ones(8, context).bool(), tree], 1)
    found["tree"] = (Blocks(own, 1), own, (2, 2, 1, 8, 98))
    batch = torch.tensor([0] * 40 + [1] * 60)
    found["tree by documents"] = (
        Documents(batch) * (Prefix(3) | Blocks(tree_mask([-1, 0, 0, 1, 2]), 20)),
        (batch[:, None] == batch)
        & ((torch.arange(100) < 3) | tree_mask([-1, 0, 0, 1, 2]).repeat_interleave(20, 0).repeat_interleave(20, 1)),
        (1, 2, 2, 100, 100),
    )
    x, y = torch.arange(144) % 12, torch.arange(144) // 12  # an image of 12 x 12 patches
    near = ((x[:, None] - x).abs() <= 2) & ((y[:, None] - y).abs() <= 1)
    found["neighbourhood in 2-D"] = (Blocks(near, 1), near, (1, 2, 2, 144, 144))
    per_head = torch.rand(2, 3, 5, 7) < 0.4
    dense = per_head.repeat_interleave(30, 2).repeat_interleave(30, 3)[:, :, :140, :190]
    found["blocks per head"] = (Blocks(per_head, 30), dense, (2, 3, 3, 140, 190))
    i, j = positions(70, 150, 80)
    found["dilated window, cached"] = (
        Window(10, alignment="bottom_right") | Window(60, -50) | Prefix(1),
        (((j >= i - 10) & (j <= i)) | ((j >= i - 60) & (j <= i - 50)) | (j < 1)).expand(70, 150),
        (1, 2, 1, 70, 150),
    )
    index = torch.randint(-1, 10, (2, 1, 70, 3))
    chosen = (index[..., None] == torch.arange(150) // 16).any(-2)
    found["selected or recent"] = (
        (Selected(index, 16) | Window(20)) * Causal("bottom_right"),
        (chosen | (j >= i - 20)) & (j <= i),
        (2, 2, 2, 70, 150),
    )
    found["intersection of selections"] = (
        Selected(index, 16) * Selected(index.flip(2), 16),
        chosen & (index.flip(2)[..., None] == torch.arange(150) // 16).any(-2),
        (2, 2, 2, 70, 150),
    )
    found["unions multiply"] = (
        (Prefix(64) | Window(3, alignment="top_left")) * (Prefix(2) | Window(100, 0)),
        ((torch.arange(150) < 64) | near_band(70, 150, 3)) & ((torch.arange(150) < 2) | near_band(70, 150, 100)),
        (1, 2, 2, 70, 150),
    )
    found["nothing"] = (Prefix(0) | Blocks(torch.zeros(2, 2).bool(), 64), torch.zeros(90, 90).bool(), (1, 1, 1, 90, 90))
    found["everything"] = (Prefix(90) | Causal(), torch.ones(90, 90).bool(), (1, 1, 1, 90, 90))
    return found


def near_band(Tq, Tk, left):
    i, j = positions(Tq, Tk)
    return (j <= i) & (j >= i - left)


torch.manual_seed(0)
MASKS = masks()


@pytest.mark.parametrize("name", MASKS)
@by_engine
def test_a_union_is_its_dense_mask(name, backend):
    prior, mask, (B, H, Hkv, Tq, Tk) = MASKS[name]
    leaves = heads(B, H, Hkv, Tq, Tk)
    for regularizer in (None, Tsallis(1.5)) if backend == "native" else (None,):
        results = []
        for problem, attn_mask in ((Transport(regularizer, prior=prior), None), (Transport(regularizer), mask)):
            out, aux = regard.attention(
                *leaves,
                problem=problem,
                attn_mask=attn_mask,
                enable_gqa=True,
                backend=backend,
                return_aux=AuxRequest(support=True, entropy=True),
            )
            gradients = torch.autograd.grad(out.sin().sum() + aux.entropy.sum(), leaves)
            results.append([out, aux.support, aux.entropy, *gradients])
        for got, expected in zip(*results, strict=True):
            assert_close(got, expected, torch.float32, 4, name)
    group = H // Hkv
    stock = stock_attention(leaves[0], *(t.repeat_interleave(group, 1) for t in leaves[1:]), attn_mask=mask)
    found = regard.attention(*leaves, problem=Transport(prior=prior), enable_gqa=True, backend=backend)
    assert_close(found, stock.nan_to_num(0.0), torch.float32, 4, name)


@pytest.mark.parametrize("name", MASKS)
def test_the_map_of_tiles_is_the_mask(name):
    """Each pair, through the map, and the statement of the documentation on empty and full tiles."""
    prior, mask, (B, H, Hkv, Tq, Tk) = MASKS[name]
    q, k, v = heads(B, H, Hkv, Tq, Tk)
    form = lower(q, k, v, enable_gqa=True, problem=Transport(prior=prior))
    assert torch.equal(form.admissible(Tq, Tk, q.device).expand(B, H, Tq, Tk), mask.expand(B, H, Tq, Tk))
    if form.tile_map is None:
        return
    assert form.tile_map.shape[2:] == (-(-Tq // 64), -(-Tk // 64))
    whole = form.tile_map.expand(B, H, -1, -1)
    region = tiles.expand(form.tile_map, form.tiles, range(Tq), range(Tk)).expand(B, H, Tq, Tk)
    for down in range(whole.shape[2]):
        for across in range(whole.shape[3]):
            part = region[:, :, 64 * down : 64 * down + 64, 64 * across : 64 * across + 64].flatten(2)
            number = whole[:, :, down, across]
            assert torch.equal(number == 0, ~part.any(2)) and torch.equal(number == 1, part.all(2))


@by_engine
def test_blocks_of_a_plan_read_the_map_in_place(backend, monkeypatch):
    """The reference cuts plans into blocks of rows, which begin anywhere in a tile."""
    monkeypatch.setattr("regard.backends.reference.BLOCK", 150 * 13)
    prior, mask, (B, H, Hkv, Tq, Tk) = MASKS["selected or recent"]
    leaves = heads(B, H, Hkv, Tq, Tk)
    one, other = (
        regard.attention(*leaves, **how, backend=backend)
        for how in ({"problem": Transport(prior=prior)}, {"attn_mask": mask})
    )
    assert_close(one, other, torch.float32)
    for got, expected in zip(*(torch.autograd.grad(o.sin().sum(), leaves) for o in (one, other)), strict=True):
        assert_close(got, expected, torch.float32, 4)


def test_the_definition_agrees_with_the_masks():
    """The definition that other tests compare with reads unions by code of its own."""
    for name, (prior, mask, (B, H, _, Tq, Tk)) in MASKS.items():
        assert torch.equal(log_prior_matrix(prior, False, None, B, H, Tq, Tk) == 0, mask.expand(B, H, Tq, Tk)), name


# --- alignment --------------------------------------------------------------------------------------------------------


@by_engine
def test_an_alignment_holds_for_the_whole_expression(backend):
    q, k, v = heads(1, 2, 2, 5, 9)
    for where, alignment in ((0, "top_left"), (1, "bottom_right"), (2, "bottom_right"), (3, "top_left")):
        given = [alignment if n == where else None for n in range(4)]
        prior = (Causal(given[0]) | Window(1, 1, given[1])) * Relative(torch.randn(2, 3), given[2])
        prior = prior * Window(3, 3, given[3])
        i, j = positions(5, 9, 4 if alignment == "bottom_right" else 0)
        mask = ((j <= i) | ((j <= i + 1) & (j >= i - 1))) & ((j - i).abs() <= 3)
        table = Bias(prior.factors()[1].table[:, (j - i).clamp(-1, 1) + 1])
        found, expected = (
            regard.attention(q, k, v, attn_mask=attn_mask, problem=Transport(prior=p), backend=backend)
            for p, attn_mask in ((prior, None), (table, mask))
        )
        assert_close(found, expected, torch.float32)


def test_alignments_that_conflict_or_miss_raise():
    q, k, v = heads(1, 2, 2, 5, 9)

    def attend(prior, **more):
        regard.attention(q, k, v, problem=Transport(prior=prior), **more)

    with pytest.raises(ValueError, match=r"alignment: expected one for the whole prior, got .top_left. and"):
        attend(Causal("top_left") | Window(3, alignment="bottom_right"))
    with pytest.raises(ValueError, match="alignment: expected one for the whole prior"):
        attend(Prefix(2) | Causal("bottom_right"), is_causal=True)
    for prior in (Prefix(2) | Causal(), Relative(torch.zeros(3)), Decay(torch.zeros(9))):
        with pytest.raises(ValueError, match=r"alignment: expected .* where Tq != Tk, got none with Tq=5, Tk=9"):
            attend(prior)
    attend(Prefix(2) | Blocks(torch.ones(1, 1).bool(), 9))  # no position is needed


# --- what a union accepts ---------------------------------------------------------------------------------------------

WEIGHTED = {
    "ALiBi": ALiBi(0.5),
    "Bias": Bias(torch.zeros(5, 5)),
    "Relative": Relative(torch.zeros(3)),
    "LowRank": LowRank(torch.zeros(5, 2), torch.zeros(5, 2)),
    "Decay": Decay(torch.zeros(5)),
    "Density": Density(torch.ones(5)),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_union_of_a_weighted_prior_raises(name):
    message = rf"prior: `\|` expects priors of 0 and 1 .*, got {name}\("
    for make in (
        lambda p: p | Causal(),
        lambda p: Causal() | p,
        lambda p: Prefix(2) | Causal() * p,
        lambda p: (Prefix(2) | Causal()) | p * Window(3),
    ):
        with pytest.raises(ValueError, match=message):
            make(WEIGHTED[name])


def test_other_operands_raise():
    for wrong in (lambda: Causal() | 3, lambda: None | Prefix(2), lambda: Prefix(2) * 0.5):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()


def test_unions_show_what_they_are():
    prior = (Prefix(2) | Causal()) * Window(3)
    assert repr(prior) == "(Prefix(2) | Causal()) * Window(3)"
    assert repr(Prefix(2) | Causal() * Window(3)) == "Prefix(2) | Causal() * Window(3)"
    assert (Prefix(2) | Causal()) == (Prefix(2) | Causal()) != (Causal() | Prefix(2))
    assert len({Prefix(2) | Causal(), Prefix(2) | Causal()}) == 1
    assert len(((Prefix(2) | Causal()) | Window(3)).parts) == 3


# --- the cache of maps ------------------------------------------------------------------------------------------------


def maps(prior, T=130):
    q = torch.zeros(1, 1, T, 4)
    form = lower(q, q, q, problem=Transport(prior=prior))
    return form.tile_map, form.tiles


def test_the_same_tensors_give_the_same_map(monkeypatch):
    built = []
    build = tiles.build
    monkeypatch.setattr(tiles, "build", lambda *a: (built.append(a), build(*a))[1])
    monkeypatch.setattr(tiles, "_cache", type(tiles._cache)())
    ids = torch.arange(130) // 50
    first = maps(Prefix(2) | Documents(ids) * Causal())
    again = maps(Prefix(2) | Documents(ids) * Causal())  # a new object of equal structure and the same tensors
    assert all(a is b for a, b in zip(first, again, strict=True)) and len(built) == 1
    other = maps(Prefix(2) | Documents(ids.clone()) * Causal())  # other tensors of the same values
    assert len(built) == 2 and all(map(torch.equal, first, other))
    maps(Prefix(3) | Documents(ids) * Causal())
    maps(Prefix(2) | Causal(), T=131)
    maps(Prefix(2) | Causal(), T=130)
    assert len(built) == 5


def test_a_tensor_changed_in_place_gives_a_new_map():
    ids, n = torch.arange(130) // 50, torch.tensor([3])
    blocks, index = torch.zeros(13, 13).bool(), torch.zeros(130, 1).long()
    for prior, tensor, change in (
        (Prefix(2) | Documents(ids), ids, lambda t: t.add_(torch.arange(130) % 2)),
        (Prefix(n) | Causal(), n, lambda t: t.fill_(70)),
        (Blocks(blocks, 10), blocks, lambda t: t.logical_not_()),
        (Selected(index) | Causal(), index, lambda t: t.fill_(129)),
    ):
        before = tiles.expand(*maps(prior), range(130), range(130))
        change(tensor)
        after = tiles.expand(*maps(prior), range(130), range(130))
        assert not torch.equal(before, after)
        expected = log_prior_matrix(prior, False, None, 1, 1, 130, 130) == 0
        assert torch.equal(after, expected)


def test_a_tensor_of_inference_mode_is_not_cached():
    with torch.inference_mode():
        n = torch.tensor([3])
        first = tiles.expand(*maps(Prefix(n) | Causal()), range(130), range(130))
        n.fill_(70)
        assert not torch.equal(first, tiles.expand(*maps(Prefix(n) | Causal()), range(130), range(130)))


def test_the_cache_is_bounded():
    for n in range(3 * tiles._CACHED):
        maps(Prefix(n) | Causal())
    assert len(tiles._cache) == tiles._CACHED


# --- Selected ---------------------------------------------------------------------------------------------------------


@by_engine
@pytest.mark.parametrize("block", [1, 3, 40])
def test_selected_keys(backend, block):
    """Entries repeat, stand for nothing, come in any order and in any integer type; the last block is cut."""
    Tq, Tk = 37, 100
    count = -(-Tk // block)
    index = torch.randint(-1, count, (2, 1, Tq, min(7, count + 2)))
    index[0, 0, 0] = -1  # an empty row
    index[0, 0, 1] = count - 1  # one block, many times
    leaves = heads(2, 4, 2, Tq, Tk)
    mask = (index[..., None] == torch.arange(Tk) // block).any(-2)
    shuffled = index[..., torch.randperm(index.shape[-1])]
    how = {"enable_gqa": True, "backend": backend}
    expected = regard.attention(*leaves, attn_mask=mask, **how)
    gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    for given in (index, shuffled, index.int(), index.expand(2, 4, Tq, -1)):
        out = regard.attention(*leaves, problem=Transport(prior=Selected(given, block)), **how)
        assert_close(out, expected, torch.float32)
        assert (out[0, :, 0] == 0).all()
        for got, wanted in zip(torch.autograd.grad(out.sin().sum(), leaves), gradients, strict=True):
            assert_close(got, wanted, torch.float32, 4)


def test_lists_of_more_keys_than_are_sorted_at_once():
    """Lists in any order are sorted by bits, 65536 at a time."""
    Tq, Tk = 17, 70000
    index = torch.randint(-1, Tk, (1, 1, Tq, 60))
    index[..., 30:] = index[..., 30:] % 5000 + 65000  # some beyond
    leaves = heads(1, 1, 1, Tq, Tk, 4)
    results = []
    for given in (index, index.sort(-1).values):
        out = regard.attention(*leaves, problem=Transport(prior=Selected(given)), backend="native")
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    mask = (index[..., None] == torch.arange(Tk)).any(-2)
    expected = regard.attention(*leaves, attn_mask=mask, backend="torch")
    exact = (expected, *torch.autograd.grad(expected.sin().sum(), leaves))
    for unsorted, ascending, wanted in zip(*results, exact, strict=True):
        assert torch.equal(unsorted, ascending)
        assert_close(unsorted, wanted, torch.float32, 4)


@by_engine
def test_selecting_no_or_every_key(backend):
    q, k, v = heads(1, 2, 2, 5, 9)
    none = regard.attention(q, k, v, problem=Transport(prior=Selected(torch.zeros(5, 0).long())), backend=backend)
    assert (none == 0).all()
    everything = Selected(torch.arange(3).expand(5, 3), block=4)
    assert_close(
        regard.attention(q, k, v, problem=Transport(prior=everything), backend=backend),
        regard.attention(q, k, v),
        torch.float32,
    )


def test_a_selection_out_of_range_raises():
    q, k, v = heads(1, 2, 2, 5, 9)
    for index, block, expected, got in (
        (torch.full((5, 2), 9), 1, "blocks of keys below 9", 9),
        (torch.full((5, 2), 3), 4, "blocks of keys below 3", 3),
        (torch.full((5, 2), -2), 4, "-1, or blocks of keys", -2),
    ):
        with pytest.raises(ValueError, match=rf"Selected\(index\): expected .*{expected}.*, got {got}"):
            regard.attention(q, k, v, problem=Transport(prior=Selected(index, block)))
        with pytest.raises(ValueError, match=r"Selected\(index\): expected"):
            regard.attention(q, k, v, problem=Transport(prior=Selected(index, block) | Prefix(1)))


# --- where a map cannot be read as it is ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["union", "selected", "selected blocks", "product"])
def test_both_marginals_read_a_map_of_tiles(name):
    """The solver reads the plan with queries and keys exchanged, too: a map of tiles is turned, never a dense mask."""
    T = 150
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-1, T, (2, 1, T, 60), generator=generator)
    prior = {
        "union": Window(20, 20) | Prefix(5),
        "selected": Selected(keys),
        "selected blocks": Selected(keys[:, :, :, :9] // 16, 16),
        "product": Selected(keys) * (Window(90, 90) | Prefix(5)),
    }[name]
    q, k, v = (torch.randn(2, 2, T, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    form = lower(q, k, v, problem=Transport(prior=prior, marginal=RowsAndColumns()))
    assert form.mask is None and form.selected is None and form.tile_map is not None and form.tiles is not None
    mask = tiles.expand(form.tile_map, form.tiles, range(T), range(T))
    turned = tiles.expand(*tiles.transposed(form.tile_map, form.tiles), range(T), range(T))
    assert torch.equal(turned, mask.mT)
    dense = Bias(torch.where(mask, 0.0, -math.inf).double())
    results = []
    for used in (prior, dense):
        x = q.clone().requires_grad_()
        out = regard.attention(x, k, v, problem=Transport(prior=used, marginal=RowsAndColumns(tolerance=1e-12)))
        results.append((out, *torch.autograd.grad(out.sin().sum(), x)))
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, atol=1e-9)


def test_a_compiled_graph_breaks_where_a_dense_mask_would_be_large(monkeypatch):
    prior = Causal() * (Window(5) | Prefix(3))
    q = torch.randn(1, 2, 40, 8, requires_grad=True)

    def function(x):
        return regard.attention(x * 2, x, x, problem=Transport(prior=prior)).sin()

    expected = function(q)
    for limit, breaks in ((40 * 40, False), (40 * 40 - 1, True)):
        monkeypatch.setattr(regard.operator, "DENSE_MASK", limit)
        torch._dynamo.reset()
        out = torch.compile(function, backend="aot_eager")(q)
        assert torch.allclose(out, expected, atol=1e-6)
        (got,), (wanted,) = (torch.autograd.grad(o.sum(), q, retain_graph=True) for o in (out, expected))
        assert torch.allclose(got, wanted, atol=1e-6)
        torch._dynamo.reset()
        whole = torch.compile(function, backend="aot_eager", fullgraph=True)
        if breaks:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="for a union, Prefix or Blocks of this length"):
                whole(q)
        else:
            assert torch.allclose(whole(q), expected, atol=1e-6)
