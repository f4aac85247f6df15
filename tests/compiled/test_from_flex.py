"""`regard.from_flex`: FlexAttention's mods as priors, equal to FlexAttention's own result in eager mode."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

import regard
from regard import Causal, Transport

B, H, T, D = 2, 4, 96, 16
SLOPES = torch.exp2(-8.0 * (torch.arange(H) + 1) / H)
DOCUMENTS = torch.tensor([0] * 20 + [1] * 41 + [2] * 35)
STARTS = torch.tensor([0, 20, 61])
LENGTHS = torch.tensor([70, 96])
RELATIVE = torch.randn(2 * T - 1, generator=torch.Generator().manual_seed(1))
PER_HEAD = torch.randn(H, T, T, generator=torch.Generator().manual_seed(2))
WIDE, HIGH = 12, 8  # an image of 8 rows of 12


def causal(b, h, q, k):
    return q >= k


def sliding_window(b, h, q, k):
    return (q >= k) & (q - k <= 17)


def prefix_lm(b, h, q, k):
    return (k < 31) | (q >= k)


def documents(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def causal_documents(b, h, q, k):
    """Causal inside of each document, on positions that begin at its start."""
    own, other = q - STARTS[DOCUMENTS[q]], k - STARTS[DOCUMENTS[k]]
    return documents(b, h, q, k) & (own >= other)


def neighbourhood(b, h, q, k):
    """A window of 5 x 5 pixels, moved inside at the borders of the image."""
    row, column, other_row, other_column = q // WIDE, q % WIDE, k // WIDE, k % WIDE
    centre_row, centre_column = row.clamp(2, HIGH - 3), column.clamp(2, WIDE - 3)
    return ((centre_row - other_row).abs() <= 2) & ((centre_column - other_column).abs() <= 2)


def dilated(b, h, q, k):
    away = torch.abs(q - k)
    return (away <= 24) & (away % 3 == 0)


def transfusion(b, h, q, k):
    """Causal text around two images whose patches see one another."""
    image = ((q >= 10) & (q < 26) & (k >= 10) & (k < 26)) | ((q >= 50) & (q < 66) & (k >= 50) & (k < 66))
    return causal(b, h, q, k) | image


def shared_prefix(b, h, q, k):
    """Several continuations of one prefix of 20 tokens: a continuation sees the prefix and itself."""
    own = DOCUMENTS[q] == DOCUMENTS[k]
    return (q >= k) & (own | (k < 20))


def block_diffusion(b, h, q, k):
    """Noised blocks of 8, then the same tokens clean: within a block, to clean blocks before, block-causal."""
    half, size = T // 2, 8
    q_clean, k_clean = q >= half, k >= half
    q_block = torch.where(q_clean, (q - half) // size, q // size)
    k_block = torch.where(k_clean, (k - half) // size, k // size)
    diagonal = (q_block == k_block) & (q_clean == k_clean)
    offset = (q_block > k_block) & k_clean & ~q_clean
    return diagonal | offset | ((q_block >= k_block) & k_clean & q_clean)


def flamingo(b, h, q, k):
    """Each text token sees the 16 patches of the latest of six images."""
    return (k // 16) == torch.clamp(q // 17, max=5)


def padding(b, h, q, k):
    return (q < LENGTHS[b]) & (k < LENGTHS[b])


def by_head(b, h, q, k):
    return ((h % 2 == 0) & (q >= k)) | ((h % 2 == 1) & (q <= k))


TILES = torch.stack([torch.randperm(T // 8, generator=torch.Generator().manual_seed(n))[:3] for n in range(B * H * 12)])
TILES = TILES.view(B, H, T // 8, 3)
INTERVALS = torch.tensor([[0, 40], [10, 64], [40, 96], [90, 96]], dtype=torch.int32)


def selected_tiles(b, h, q, k):
    """The tiles of 8 keys in a list of each tile of queries."""
    return (TILES[b, h, q // 8] == (k // 8).unsqueeze(-1)).any(dim=-1)


def visible_interval(b, h, q, k):
    """An image of 24 patches is seen by the text of its interval."""
    interval = INTERVALS[k // 24]
    return (q >= interval[0]) & (q < interval[1])


def round_numbers(b, h, q, k):
    """Numbers that the function makes, and one row in two parts."""
    first, *rest = TILES[b, h, q // 8].unbind()
    return (k // 8 == first) | (torch.stack(rest) == k // 8).any() | (torch.arange(0, 96, 7) == k).any()


MASKS = [
    *(causal, sliding_window, prefix_lm, documents, causal_documents, neighbourhood, dilated, transfusion),
    *(shared_prefix, block_diffusion, flamingo, padding, by_head, selected_tiles, visible_interval, round_numbers),
]


def alibi(score, b, h, q, k):
    return score + (k - q) * SLOPES[h]


def relative_index(score, b, h, q, k):
    return score + (q - k)


def relative_bias(score, b, h, q, k):
    return score + RELATIVE[q - k + T - 1]


def table_per_head(score, b, h, q, k):
    return score + PER_HEAD[h, q, k]


def chained(score, b, h, q, k):
    return score + PER_HEAD[h][q][k]


def as_mask(score, b, h, q, k):
    return torch.where(q >= k, score, -float("inf"))


def masked_alibi(score, b, h, q, k):
    return torch.where((q >= k) & (q - k < 40), score - SLOPES[h] * (q - k), float("-inf"))


def checkerboard(score, b, h, q, k):
    return torch.where((q + k) % 2 == 0, score, score - 0.5)


def inverted(score, b, h, q, k):
    return torch.where(q < k, -float("inf"), 0.25 + score)


def logarithmic(score, b, h, q, k):
    return score - 0.7 * torch.log1p(torch.abs(q - k))


def untouched(score, b, h, q, k):
    return score


ROPE = torch.randn(2, B, H, T, 9, generator=torch.Generator().manual_seed(4))
WAVES = torch.logspace(0, -3, 16)


def latent(score, b, h, q, k):
    """The second product of latent attention; one head of keys."""
    return score + 0.3 * torch.dot(ROPE[0, b, h, q], ROPE[1, b, h // H, k])


def sandwich(score, b, h, q, k):
    """The inner product of sinusoidal position embeddings, not from a table."""
    return score + torch.cos((q - k) * WAVES).sum() * SLOPES[h]


def rows_of_rows(score, b, h, q, k):
    """The same row taken in several ways, as numbers and as parts."""
    row = ROPE[0, b][h, q]
    part = torch.cat([row[:3], ROPE[1][b, h, k][3:5]])
    return score + part.mean() - row[-1] + (row * row).amax() + row.view(3, 3).sum(0)[2] + part.abs().prod()


SCORES = [
    *(alibi, relative_index, relative_bias, table_per_head, chained, as_mask, masked_alibi, checkerboard),
    *(inverted, logarithmic, untouched, latent, sandwich, rows_of_rows),
]


def inputs(dtype=torch.float32, grad=False):
    return [torch.randn(B, H, T, D, dtype=dtype, requires_grad=grad) for _ in range(3)]


def dense(score_mod):
    """What a score_mod adds, for every pair; the mod sees numbers, as in FlexAttention."""
    function = score_mod
    for n in (4, 3, 2, 1):
        function = torch.vmap(function, tuple(0 if m == n else None for m in range(5)))
    return function(torch.zeros(()), torch.arange(B), torch.arange(H), torch.arange(T), torch.arange(T)).float()


def native_or_skip():
    query, key, value = inputs()
    choice = regard.select_backend(query, key, value, problem=Transport(prior=regard.from_flex(alibi)))
    if choice.backend != "native":
        pytest.skip(choice.reasons["native"])


def read_rows(mask):
    """FlexAttention gives NaN or a mean for a row without keys, regard gives 0."""
    return mask.any(-1, keepdim=True)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda f: f.__name__)
def test_masks(mask_mod, backend):
    if backend == "native":
        native_or_skip()
    query, key, value = inputs()
    mask = create_mask(mask_mod, B, H, T, T, device="cpu")

    def score_mod(score, b, h, q, k):
        return torch.where(mask_mod(b, h, q, k), score, -float("inf"))

    prior = regard.from_flex(mask_mod=mask_mod)
    found = regard.attention(query, key, value, problem=Transport(prior=prior), backend=backend)
    expected = torch.where(read_rows(mask), flex_attention(query, key, value, score_mod), 0.0)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    assert prior.binary
    union = regard.attention(query, key, value, problem=Transport(prior=prior | Causal()))
    either = mask | mask.new_ones(T, T).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, either)
    torch.testing.assert_close(union, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("score_mod", SCORES, ids=lambda f: f.__name__)
def test_scores(score_mod, backend):
    if backend == "native":
        native_or_skip()
    query, key, value = inputs(grad=True)
    problem = Transport(prior=regard.from_flex(score_mod))
    found = regard.attention(query, key, value, problem=problem, backend=backend)
    expected = flex_attention(query.detach(), key.detach(), value.detach(), score_mod)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5)  # scores of up to 95, whose last place is 8e-6
    # FlexAttention has no backward on a CPU: the gradients are compared with those of a dense mask, in float64.
    query, key, value = inputs(torch.float64, grad=True)
    found = regard.attention(query, key, value, problem=problem, backend=backend)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense(score_mod).double())
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)  # the mods' own numbers are float32


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_both_mods_and_the_gradient_of_a_bias(backend):
    if backend == "native":
        native_or_skip()
    query, key, value = inputs()
    bias = torch.nn.Parameter(torch.randn(H, 2 * T))

    def score_mod(score, b, h, q, k):
        return score + bias[h, q - k + T]

    def whole(score, b, h, q, k):
        return torch.where(sliding_window(b, h, q, k), score_mod(score, b, h, q, k), -float("inf"))

    prior = regard.from_flex(score_mod, sliding_window)
    found = regard.attention(query, key, value, problem=Transport(prior=prior), backend=backend)
    index = [torch.arange(n).view([n if m == at else 1 for m in range(4)]) for at, n in enumerate((B, H, T, T))]
    dense = whole(torch.zeros(()), *index)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense.expand(B, H, T, T))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    grads = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_other_lengths_are_aligned_top_left():
    query, key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    problem = Transport(prior=regard.from_flex(as_mask))
    torch.testing.assert_close(
        regard.attention(query, key, value, problem=problem), flex_attention(query, key, value, as_mask)
    )
    with pytest.raises(ValueError, match="alignment"):
        regard.attention(query, key, value, problem=Transport(prior=problem.prior * Causal("bottom_right")))


WRONG = {
    "softcap": (lambda s, b, h, q, k: 30 * torch.tanh(s / 30), "softcap="),
    "scaled": (lambda s, b, h, q, k: s * 0.5, "temperature="),
    "divided": (lambda s, b, h, q, k: s / (1 + h), "temperature="),
    "negative": (lambda s, b, h, q, k: k - s, "not additive"),
    "square": (lambda s, b, h, q, k: s + s**2, "not additive"),
    "twice": (lambda s, b, h, q, k: s + s, "not additive"),
    "decided by the score": (lambda s, b, h, q, k: torch.where(s > 0, s, s - 1), "the score decides"),
    "replaced": (lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), "-inf"),
    "without the score": (lambda s, b, h, q, k: -(q - k).abs() * 1.0, "does not depend on the score"),
    "detached": (lambda s, b, h, q, k: s.detach() + q, "not additive"),
    "control flow": (lambda s, b, h, q, k: s if q.sum() > k.sum() else s + 1, "data-dependent control flow"),
    "a function of the score": (lambda s, b, h, q, k: torch.log(torch.relu(s) + 1), r"FDivergence\(f, link\)"),
    "a row": (lambda s, b, h, q, k: s + ROPE[0, b, h, q], r"returned the shape \[9\]"),
    "a long row": (lambda s, b, h, q, k: s + torch.randn(600)[: q * 0 + 600].sum(), "control flow|random"),
    "a long sum": (lambda s, b, h, q, k: s + (PER_HEAD.view(-1) * q).sum(), "more than 512 elements"),
    "an index that was computed": (lambda s, b, h, q, k: s + (ROPE[0, b, h, q] * 2)[q], "computed tensor"),
    "written to": (lambda s, b, h, q, k: s + ROPE[0, b, h, q].mul_(2).sum(), "in place"),
    "sorted": (lambda s, b, h, q, k: s + ROPE[0, b, h, q].sort().values[0], r"torch\.sort"),
    "arguments": (lambda s, b, h, q: s, "positional argument"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_score_mods_raise_when_built(name):
    score_mod, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        regard.from_flex(score_mod)


def test_inside_of_a_compiled_function_or_a_transform_it_raises():
    """There a mod cannot be checked: a softcap would be taken for a bias of tanh(0)."""
    query, key, value = inputs()

    def attend(query):
        prior = regard.from_flex(WRONG["softcap"][0])
        return regard.attention(query, key, value, problem=Transport(prior=prior))

    with pytest.raises(ValueError, match=r"outside of torch\.compile"):
        torch.func.vmap(attend)(query[None])
    with pytest.raises(Exception, match=r"outside of torch\.compile"):
        torch.compile(attend, fullgraph=True, backend="eager")(query)


def test_rows_of_a_table_get_their_gradient():
    query, key, value = inputs(torch.float64)
    rows = torch.randn(2, H, T, 5, dtype=torch.float64, requires_grad=True)

    def dot(score, b, h, q, k):
        return score + torch.dot(rows[0, h, q], rows[1, h, k])

    found = regard.attention(query, key, value, problem=Transport(prior=regard.from_flex(dot)))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, rows[0] @ rows[1].mT)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), rows)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="expected a score_mod or a mask_mod"):
        regard.from_flex()
    with pytest.raises(TypeError, match="from_flex\\(mask_mod\\): expected a callable"):
        regard.from_flex(mask_mod=torch.ones(3))
    with pytest.raises(ValueError, match="truth values"):
        regard.from_flex(mask_mod=lambda b, h, q, k: q - k)
    with pytest.raises(ValueError, match=r"torch\.cumsum"):
        regard.from_flex(mask_mod=lambda b, h, q, k: q.cumsum(0) > k)


def test_repr_and_identity():
    prior = regard.from_flex(alibi, causal)
    assert repr(prior) == "from_flex(score_mod=alibi) * from_flex(mask_mod=causal)"
    assert prior == regard.from_flex(alibi, causal) and hash(prior) == hash(regard.from_flex(alibi, causal))
    assert prior != regard.from_flex(alibi, documents)
