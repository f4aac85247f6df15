"""Every mask of docs/masks.md against a dense mask that is written out by its definition."""

import re
from pathlib import Path

import pytest
import torch

import regard
from regard import Transport, priors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "masks.md"
T = 144


def _by_definition() -> dict[str, torch.Tensor]:
    """Loops over pairs of a query and a key, from the words of the page."""

    def pairs(admits, Tq=T, Tk=T):
        return torch.tensor([[bool(admits(i, j)) for j in range(Tk)] for i in range(Tq)])[None, None]

    sequence = [(n >= 40) + (n >= 100) for n in range(T)]
    special = (0, 70)

    def diffusion(i, j):
        q_noised, k_noised, q_block, k_block = i < 72, j < 72, i % 72 // 8, j % 72 // 8
        if q_noised:
            return q_block == k_block if k_noised else k_block < q_block
        return not k_noised and k_block <= q_block

    def tree(i, j):
        while j >= 100 and i > j - 100:
            i = (i - 1) // 2  # its parent
        return j < 100 or i == j - 100

    def drafts(i, j):
        return j < 100 or ((j - 100) // 11 == i // 11 and j - 100 <= i)

    def images(i, j):
        start, stop = ((10, 60), (60, 90), (80, 144))[j // 16]
        return start <= i < stop

    def neighbourhood(place):
        def admits(i, j):
            (y, x), (v, u) = place(i), place(j)
            return abs(min(max(y, 2), 9) - v) <= 2 and abs(min(max(x, 2), 9) - u) <= 2

        return admits

    def by_tile(n):
        tile, within = n // 9, n % 9
        return tile // 4 * 3 + within // 3, tile % 4 * 3 + within % 3

    curve = sorted(((y, x) for y in range(12) for x in range(12)), key=_morton)

    def axis(q, k, count, kernel):
        before, after = kernel // 2, (kernel - 1) // 2
        centre = min(max(q, before), count - 1 - after)
        return centre - before <= k <= centre + after

    def sliding(i, j):
        q, k = i // 9, j // 9
        return q >= 12 or k >= 12 or (axis(q // 3, k // 3, 4, 3) and axis(q % 3, k % 3, 3, 2))

    def video(i, j):
        q, k = i // 4, j // 4
        outer = axis(q // 9, k // 9, 4, 2) and axis(q // 3 % 3, k // 3 % 3, 3, 3)
        return outer and axis(q % 3, k % 3, 3, 1)

    def prompt(i, j):
        return i < 14 or j < 14

    best = torch.rand(1, 2, 9, 9, generator=torch.Generator().manual_seed(0)).topk(3).indices.tolist()[0]
    selected = [pairs(lambda i, j, head=head: j // 16 in best[head][i // 16] and j % 16 < 13) for head in range(2)]
    return {
        "causal": pairs(lambda i, j: j <= i),
        "sliding window": pairs(lambda i, j: 0 <= i - j <= 16),
        "dilated window": pairs(lambda i, j: abs(i - j) <= 16 and (i - j) % 4 == 0),
        "batches of 24": pairs(lambda i, j: j <= i and i // 24 == j // 24),
        "documents": pairs(lambda i, j: j <= i and sequence[i] == sequence[j]),
        "prefix-LM": pairs(lambda i, j: j <= i or j < 30),
        "shared prefix": pairs(lambda i, j: j <= i and sequence[j] in (0, sequence[i])),
        "global tokens": pairs(lambda i, j: abs(i - j) <= 16 or i in special or j in special),
        "block diffusion": pairs(diffusion),
        "tree": pairs(tree, 44),
        "drafts": pairs(drafts, 44),
        "images": pairs(images, T, 48),
        "neighbourhood": pairs(neighbourhood(lambda n: (n // 12, n % 12))),
        "neighbourhood by tiles": pairs(neighbourhood(by_tile)),
        "neighbourhood by Morton's curve": pairs(neighbourhood(lambda n: curve[n])),
        "sliding tiles": pairs(sliding),
        "sliding tiles of a video": pairs(video),
        "spatial head": pairs(lambda i, j: prompt(i, j) or abs(i - j) < 32),
        "temporal head": pairs(lambda i, j: prompt(i, j) or abs((i - 14) % 26 - (j - 14) % 26) < 3),
        "selected tiles": torch.cat(selected, 1),
    }


def _morton(place: tuple[int, int]) -> int:
    y, x = (sum(((n >> bit) & 1) << (2 * bit) for bit in range(4)) for n in place)
    return 2 * y + x


@pytest.fixture(scope="module")
def masks() -> dict[str, priors.Prior]:
    space: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(snippet, space)
    return space["masks"]


DENSE = _by_definition()


def test_every_mask_of_the_page_has_a_definition(masks):
    assert list(masks) == list(DENSE)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", DENSE)
def test_a_mask_equals_its_definition(name, backend, masks):
    dense = DENSE[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, t, 8, generator=generator).double() for t in (dense.shape[2], *dense.shape[3:] * 2))
    expected = regard.attention(q, k, v, dense, backend="torch")
    got = regard.attention(q, k, v, problem=Transport(prior=masks[name]), backend=backend)
    assert torch.allclose(got, expected, atol=1e-12) and dense.any() and not dense.all()


@pytest.mark.parametrize("name", DENSE)
def test_a_wrong_pair_is_found(name, masks):
    """The comparison above would notice one pair more or less."""
    dense = DENSE[name].clone()
    dense[..., 20, 30] ^= True
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, t, 8, generator=generator).double() for t in (dense.shape[2], *dense.shape[3:] * 2))
    got = regard.attention(q, k, v, problem=Transport(prior=masks[name]))
    assert not torch.allclose(got, regard.attention(q, k, v, dense, backend="torch"), atol=1e-6)
