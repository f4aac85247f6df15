"""Brain teaser 1: weights s/Σs instead of softmax."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import regard
from regard import FermiDirac, Free, Rows, Transport, Tsallis

from ..numbers import how_close, show, tensor, tick
from ..variants import by_relu, by_sum, without_sign
from .teaser import FAMILY, Exhibit, Teaser, exact, gap

MARGINALS = {"rows": Rows(), "free": Free(0.5), "sink": Rows(sink=0.5), "relaxed": Rows(relax=0.8)}
SIMPLE = {"s/Σs": by_sum, "ReLU(s)/Σ": by_relu}


def opposite_moves(weights: Callable[[Tensor], Tensor]) -> float:
    """How far weights move against each other when each score of (3, 2, 1) rises by 1: min(largest rise, largest fall).

    It is 0 for the optimum of every problem: p = π g((s − λ)/τ) with g increasing, and all keys of a row share one λ,
    so all weights move in the same direction (with rows of fixed mass they do not move).
    """
    s = tensor(3, 2, 1)
    change = weights(s + 1) - weights(s)
    return max(0.0, min(float(change.max()), float(-change.min())))


def _largest_among_optima(marginal: Rows | Free) -> float:
    """The largest `opposite_moves` of five regularisers at three temperatures."""

    def solver(regularizer, tau: float) -> Callable[[Tensor], Tensor]:
        return lambda s: regard.solve(s, Transport(regularizer, marginal=marginal, temperature=tau)).weights

    return max(opposite_moves(solver(r, tau)) for r in FAMILY.values() for tau in (0.5, 2.0, 8.0))


def no_optimum(rule: Callable[[Tensor], Tensor]) -> bool:
    """Whether the weights of a rule move against each other, which the weights of an optimum never do."""
    return opposite_moves(rule) > 1e-3 and max(map(_largest_among_optima, MARGINALS.values())) < 1e-9


def simple_normalisation() -> Teaser:
    cases = [tensor(3, -2, 1), tensor(10, 9, 8), tensor(-1, -2), tensor(3, -2, -0.999)]
    given = Exhibit(
        "What it gives",
        ("scores", "s/Σs", "sparsemax", "softmax"),
        [
            (
                f"{show(s, 3 if (s % 1).any() else 0)}",
                show(by_sum(s), 2),
                show(regard.solve(s, Transport(Tsallis(2.0))).weights, 2),
                show(regard.solve(s).weights, 2),
            )
            for s in cases
        ],
    )

    three, four = tensor(3, 2, 1), tensor(4, 3, 2)
    moves = Exhibit(
        "Why it is no optimum of any problem with given f, τ and π. Raise all scores of (3, 2, 1) by 1: the weights of "
        "an optimum share one λ, so they all move the same way (here for five regularisers at three temperatures each)",
        ("weights", "before", "after", "move against each other by"),
        [
            *((name, show(r(three), 2), show(r(four), 2), exact(opposite_moves(r))) for name, r in SIMPLE.items()),
            *(
                (f"15 optima, {name}", "", "", f"at most {exact(_largest_among_optima(marginal))}")
                for name, marginal in MARGINALS.items()
            ),
        ],
    )

    s = tensor(10, 9, 8)
    taus = (0.1, 1.0, 10.0, 100.0)
    gaps = Exhibit(
        "How far s/Σs of (10, 9, 8) is from the optimum (the certificate's gap)",
        ("regulariser", *(f"τ = {t:g}" for t in taus), "τ = Σs = 27"),
        [
            (name, *(exact(gap(s, by_sum(s), Transport(r, temperature=t)), "g") for t in (*taus, float(s.sum()))))
            for name, r in FAMILY.items()
            if not isinstance(r, FermiDirac)
        ],
    )

    row = tensor(3, -2, 1)
    at_sum = regard.solve(row, Transport(without_sign(), temperature=2.0)).weights
    fixed = regard.solve(row, Transport(without_sign())).weights
    try:
        refused = repr(Transport(without_sign(), temperature=-3.0))
    except ValueError as error:
        refused = str(error)
    return Teaser(
        1,
        "Why not simple normalization?",
        "p ≥ 0 is dropped, and the temperature is replaced by the row's own sum.",
        [given, moves, gaps],
        [
            (
                "No problem with a given regulariser, temperature and prior has it as its optimum: its weights move "
                f"against each other under a common shift, and no optimum's do {tick(no_optimum(by_sum))}."
            ),
            (
                f"The nearest point is L2 without p ≥ 0, where p = s/τ + const: (3, −2, 1) gives {show(fixed, 2)} at τ "
                f"= 1, and at τ = 2, which is Σs, exactly s/Σs ({how_close(at_sum, by_sum(row))}). So every row has "
                "its own temperature, computed from the scores that it is meant to weigh."
            ),
            (
                f"Where the sum is negative so is that temperature, and the worst key gets most: (−1, −2) gives "
                f"{show(by_sum(tensor(-1, -2)), 2)}. For τ = −3 regard raises: {refused}."
            ),
            "With p ≥ 0 back in place L2 is sparsemax: no exponential, no negative weight, shift-invariant.",
        ],
    )
