"""Brain teaser 3: raw dot products, s/Σs or ReLU instead of softmax."""

from __future__ import annotations

import torch

import regard
from regard import KL, Free, Transport, Tsallis

from ..numbers import agree, draw, how_close, show, tensor, tick
from ..variants import by_relu, by_sum, without_sign
from .teaser import Exhibit, Teaser, exact, gap
from .teaser_1_normalisation import no_optimum


def removed_softmax() -> Teaser:
    s, negative = tensor(3, -2, 1), tensor(-1, -2, -0.5)
    raw = regard.solve(s, Transport(without_sign(), marginal=Free())).weights
    relu = regard.solve(s, Transport(Tsallis(2.0), marginal=Free()))
    own = float(s.relu().sum())
    at_own = gap(s, by_relu(s), Transport(Tsallis(2.0), temperature=own))
    at_one = gap(s, by_relu(s), Transport(Tsallis(2.0)))
    options = Exhibit(
        "The three options, and their neighbours in the space",
        ("weights", "(3, −2, 1)", "(−1, −2, −0.5)", "what is dropped", "its place"),
        [
            (
                "s",
                show(s, 0),
                show(negative, 1),
                "p ≥ 0 and the marginal",
                f"L2 without sign, free {tick(agree(raw, s))}",
            ),
            ("s/Σs", show(by_sum(s), 1), show(by_sum(negative), 2), "p ≥ 0 and a given τ", "none (teaser 1)"),
            (
                "ReLU(s)",
                show(s.relu(), 0),
                show(negative.relu(), 0),
                "the marginal",
                f"Tsallis 2, free {tick(relu.certificate().holds(1e-9) and agree(relu.weights, s.relu()))}",
            ),
            (
                "ReLU(s)/Σ",
                show(by_relu(s), 2),
                show(by_relu(negative), 0),
                "a given τ",
                (
                    f"none: sparsemax at τ = ΣReLU(s) = {own:.0f} (gap {exact(at_own)}); at τ = 1 the gap is "
                    f"{exact(at_one)}"
                ),
            ),
            (
                "sparsemax",
                show(regard.solve(s, Transport(Tsallis(2.0))).weights, 2),
                show(regard.solve(negative, Transport(Tsallis(2.0))).weights, 2),
                "nothing",
                "Tsallis 2, rows",
            ),
        ],
    )
    scales = (1.0, 10.0, 100.0)
    base = tensor(0.3, 0.2, 0.1)
    focus = Exhibit(
        "Focus: the largest weight of c·(0.3, 0.2, 0.1)",
        ("weights", *(f"c = {c:g}" for c in scales)),
        [
            ("s/Σs, ReLU(s)/Σ", *(show([float(by_relu(c * base).max())], 2) for c in scales)),
            *(
                (name, *(show([float(regard.solve(c * base, Transport(r)).weights.max())], 2) for c in scales))
                for name, r in (("sparsemax", Tsallis(2.0)), ("softmax", KL()))
            ),
        ],
    )
    ranks = []
    for n in (16, 32, 64):
        q, k = draw(n, 4, seed=1), draw(n, 4, seed=2)
        inside, outside = q.relu() @ k.relu().mT, (q @ k.mT).relu()
        ranks.append((str(n), *(str(int(torch.linalg.matrix_rank(m))) for m in (q @ k.mT, inside, outside))))
    linear = Exhibit(
        "Linear time needs weights of low rank: rank for n tokens, d = 4",
        ("n", "QKᵀ", "ReLU(Q) ReLU(K)ᵀ", "ReLU(QKᵀ)"),
        ranks,
    )
    return Teaser(
        3,
        "What if we remove softmax entirely?",
        "Raw dot products drop p ≥ 0 and the marginal under L2; ReLU(s)/Σ keeps both and gives up a given temperature.",
        [options, focus, linear],
        [
            (
                f"Raw dot products are a point of the space (L2, free, no sign): {how_close(raw, s)}. Its rows have no "
                "fixed mass, so outputs grow with the number of keys and the size of the scores."
            ),
            (
                "ReLU(s)/ΣReLU(s) is the optimum of no problem with given f, τ and π: it fails the test of "
                f"teaser 1 too {tick(no_optimum(by_relu))}. A row of negative scores is 0/0. The nearest point is "
                "sparsemax: it fixes τ and solves for λ, where ReLU(s)/Σ fixes λ = 0 and solves for τ, and has an "
                "answer for every row."
            ),
            "“O(n)” belongs to ReLU(Q) ReLU(K)ᵀ, whose rank stays at d; the printed ReLU(QKᵀ) has full rank.",
        ],
    )
