"""The brain teasers of document 003 as points of the design space: what was left out, and what that does when run.

Teasers 1 to 4 leave out a part of the problem. Teaser 5 is in the document's contents but was never written; it leaves
out a part of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import regard
from regard import KL, AuxRequest, Causal, FDivergence, FermiDirac, Free, Rows, Transport, Tsallis

from .verdicts import agree, distance, draw, how_close, show, tensor, tick

INF = math.inf


@dataclass(frozen=True)
class Exhibit:
    """A table of what came out."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Teaser:
    number: int
    question: str
    dropped: str  # which part of the problem, or of the arithmetic
    exhibits: list[Exhibit]
    answer: list[str]


def by_sum(s: Tensor) -> Tensor:
    return s / s.sum(-1, keepdim=True)


def by_relu(s: Tensor) -> Tensor:
    return by_sum(s.relu())


def without_sign() -> FDivergence:
    """L2, Σ p²/2, without p ≥ 0: the link is the identity, so p = (s − λ)/τ may be negative."""
    return FDivergence(f=lambda x: x.square() / 2, link=lambda t: t, slope=torch.ones_like)


def _gap(scores: Tensor, weights: Tensor, problem: Transport) -> float:
    return float(regard.certify(scores, weights, problem).gap)


def _exact(x: float, style: str = "f") -> str:
    """0 only if it is (to rounding): a small number keeps its digits in style g."""
    return "0" if abs(x) < 1e-9 else f"{x:.3f}" if style == "f" else f"{x:.2g}"


# --- 1: s / Σs --------------------------------------------------------------------------------------------------------

FAMILY = {
    "softmax": KL(),
    "1.5-entmax": Tsallis(1.5),
    "sparsemax": Tsallis(2.0),
    "3-entmax": Tsallis(3.0),
    "soft top-1": FermiDirac(),
}
MARGINALS = {"rows": Rows(), "free": Free(0.5), "sink": Rows(sink=0.5), "relaxed": Rows(relax=0.8)}
SIMPLE = {"s/Σs": by_sum, "ReLU(s)/Σ": by_relu}


def opposite_moves(weights: Callable[[Tensor], Tensor]) -> float:
    """How far weights move against each other when each score of (3, 2, 1) rises by 1: min(largest rise, largest fall).

    0 for every optimum, whatever f, τ, π and the marginal: p = π g((s − λ)/τ) with g increasing, and all keys share the
    one λ, so all weights move the same way (with rows of fixed mass, not at all).
    """
    s = tensor(3, 2, 1)
    change = weights(s + 1) - weights(s)
    return max(0.0, min(float(change.max()), float(-change.min())))


def _largest_among_optima(marginal: Rows | Free) -> float:
    def solver(regularizer, tau: float) -> Callable[[Tensor], Tensor]:
        return lambda s: regard.solve(s, Transport(regularizer, marginal=marginal, temperature=tau)).weights

    return max(opposite_moves(solver(r, tau)) for r in FAMILY.values() for tau in (0.5, 2.0, 8.0))


def no_optimum(rule: Callable[[Tensor], Tensor]) -> bool:
    """Whether the weights of a rule move against each other, and those of no optimum do."""
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
            *((name, show(r(three), 2), show(r(four), 2), _exact(opposite_moves(r))) for name, r in SIMPLE.items()),
            *(
                (f"15 optima, {name}", "", "", f"at most {_exact(_largest_among_optima(marginal))}")
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
            (name, *(_exact(_gap(s, by_sum(s), Transport(r, temperature=t)), "g") for t in (*taus, float(s.sum()))))
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
                f"= 1, and at τ = 2, which is Σs, exactly s/Σs ({how_close(at_sum, by_sum(row))}). So every row has a "
                "temperature of its own, read off the scores that it should judge."
            ),
            (
                f"Where the sum is negative so is that temperature, and the worst key gets most: (−1, −2) gives "
                f"{show(by_sum(tensor(-1, -2)), 2)}. regard's answer to τ = −3: {refused}."
            ),
            "With p ≥ 0 back in place L2 is sparsemax: no exponential, no negative weight, shift-invariant.",
        ],
    )


# --- 2: no scale ------------------------------------------------------------------------------------------------------


def saturation(d: int, scale: float | None) -> tuple[float, float, float, float]:
    """Random q, k, 64 queries, 128 keys: mean largest weight, entropy/log n, keys that take part, and the median norm
    of a row's gradient to its scores."""
    q, k, v, g = draw(1, 1, 64, d, seed=d), draw(1, 1, 128, d, seed=d + 1), draw(1, 1, 128, 8), draw(64, 8, seed=1)
    mask = torch.zeros(64, 128, dtype=torch.float64, requires_grad=True)
    wanted = AuxRequest(max_weight=True, entropy=True, collision=True)
    out, aux = regard.attention(q, k, v, attn_mask=mask, scale=scale, return_aux=wanted)
    assert aux.max_weight is not None and aux.entropy is not None and aux.collision is not None
    (slope,) = torch.autograd.grad((out * g).sum(), mask)
    return (
        float(aux.max_weight.detach().mean()),
        float(aux.entropy.detach().mean()) / math.log(128),
        float((1 / aux.collision.detach()).mean()),
        float(slope.norm(dim=-1).median()),
    )


def skipped_scaling() -> Teaser:
    rows = []
    for d in (16, 64, 512, 2048):
        for label, scale in (("1/√d_k", None), ("none", 1.0)):
            top, spread, count, slope = saturation(d, scale)
            rows.append((str(d), label, f"{top:.2f}", f"{spread:.2f}", f"{count:.1f}", f"{slope:.1g}"))
    q, k, v = (draw(1, 2, 6, 16, seed=i) for i in (1, 2, 3))
    as_scale = regard.attention(q, k, v)
    as_temperature = regard.attention(q, k, v, scale=1.0, problem=Transport(temperature=math.sqrt(16)))
    return Teaser(
        2,
        "What if we skip scaling?",
        "The temperature is dropped: τ = √d_k on raw dot products becomes τ = 1, and rows saturate.",
        [
            Exhibit(
                "Random queries and keys, 128 keys",
                ("d_k", "scale", "largest weight", "entropy / log n", "keys taking part", "gradient to scores"),
                rows,
            )
        ],
        [
            (
                f"The scale is no separate step: scale 1/√d_k and τ = √d_k on raw scores "
                f"{how_close(as_scale, as_temperature)}."
            ),
            (
                "Without it τ shrinks against the scores as d_k grows, towards the point τ = 0, hard routing: one key "
                "takes the row and the gradient to the scores goes with it."
            ),
        ],
    )


# --- 3: no softmax ----------------------------------------------------------------------------------------------------


def removed_softmax() -> Teaser:
    s, negative = tensor(3, -2, 1), tensor(-1, -2, -0.5)
    raw = regard.solve(s, Transport(without_sign(), marginal=Free())).weights
    relu = regard.solve(s, Transport(Tsallis(2.0), marginal=Free()))
    own = float(s.relu().sum())
    at_own = _gap(s, by_relu(s), Transport(Tsallis(2.0), temperature=own))
    at_one = _gap(s, by_relu(s), Transport(Tsallis(2.0)))
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
                    f"none: sparsemax at τ = ΣReLU(s) = {own:.0f} (gap {_exact(at_own)}); at τ = 1 the gap is "
                    f"{_exact(at_one)}"
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
                "mass to keep, so outputs grow with the number of keys and the size of the scores."
            ),
            (
                "ReLU(s)/ΣReLU(s) is the optimum of no problem with given f, τ and π: the test of teaser 1 catches it, "
                f"too {tick(no_optimum(by_relu))}. A row of negative scores is 0/0. The nearest point is sparsemax: "
                "it fixes τ and solves for λ, where ReLU(s)/Σ fixes λ = 0 and solves for τ, and has an answer for "
                "every row."
            ),
            "“O(n)” belongs to ReLU(Q) ReLU(K)ᵀ, whose rank stays at d; the printed ReLU(QKᵀ) has full rank.",
        ],
    )


# --- 4: masks without softmax -----------------------------------------------------------------------------------------


def only_masking() -> Teaser:
    past, below = tensor(2.8, 1.2), tensor(-1, -2)
    to_zero, to_infinity = tensor(0, 0), tensor(-INF, -INF)

    def row(name: str, rule: Callable[[Tensor], Tensor], masked: Tensor) -> tuple[str, ...]:
        return (name, *(show(rule(torch.cat([s, masked])), 2) for s in (past, below)))

    def optimum(regularizer, tau: float = 3.0) -> Callable[[Tensor], Tensor]:
        return lambda s: regard.solve(s, Transport(regularizer, temperature=tau)).weights

    attempts = Exhibit(
        "Two past keys and two future ones, masked",
        ("rule", "past scores 2.8, 1.2", "past scores −1, −2"),
        [
            row("s/Σs, mask −∞", by_sum, to_infinity),
            row("s/Σs, mask 0", by_sum, to_zero),
            row("softmax, mask 0", lambda s: regard.solve(s).weights, to_zero),
            row("softmax, mask −∞", lambda s: regard.solve(s).weights, to_infinity),
            row("1.5-entmax at τ = 3, mask −∞", optimum(Tsallis(1.5)), to_infinity),
            row("sparsemax at τ = 3, mask −∞", optimum(Tsallis(2.0)), to_infinity),
        ],
    )
    q, k, v = (draw(1, 1, 6, 4, seed=i) for i in (1, 2, 3))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 5], v2[:, :, 5] = 1.0, -1.0

    def leak(problem: Transport) -> str:
        before, after = (regard.attention(q, x, y, problem=problem)[:, :, :5] for x, y in ((k, v), (k2, v2)))
        return _exact(distance(after, before))

    leaks = Exhibit(
        "The prior's zeros: how far another last token moves the earlier outputs",
        ("regulariser", "no prior", "prior=Causal()"),
        [
            (name, leak(Transport(r)), leak(Transport(r, prior=Causal())))
            for name, r in (("softmax", KL()), ("1.5-entmax", Tsallis(1.5)), ("sparsemax", Tsallis(2.0)))
        ],
    )
    masked = torch.cat([past, to_infinity])
    softmax_leak = float(regard.solve(torch.cat([below, to_zero])).weights[2:].sum())
    zero = all(
        bool((regard.solve(masked, Transport(r)).weights[2:] == 0).all())
        for r in FAMILY.values()
        if not isinstance(r, FermiDirac)
    )
    return Teaser(
        4,
        "What if we only use masking without softmax?",
        "s/Σs has no prior, so a mask has nowhere to go; without the prior's zeros the future leaks.",
        [attempts, leaks],
        [
            (
                "A mask is a prior of 0, and p = π·g((s − λ)/τ) is 0 there for every regulariser, with or without an "
                f"exponential {tick(zero)}."
            ),
            (
                f"Masked to 0, s/Σs keeps the future out, but past scores of −1, −2 give weights "
                f"{show(by_sum(below), 2)}: the sum, its temperature, is {show([float(below.sum())], 0)}, and the "
                f"order is reversed (the document prints −0.33, −0.67). Softmax with a mask of 0 leaks "
                f"{softmax_leak:.0%} of such a row: 0 is a score like any other."
            ),
        ],
    )


# --- 5: no shift ------------------------------------------------------------------------------------------------------

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
MANY = 4096


def naive(s: Tensor) -> Tensor:
    """The textbook formula, without the shift."""
    return s.exp() / s.exp().sum(-1, keepdim=True)


def last_good(good: Callable[[Tensor], bool], dtype: torch.dtype, start: float, end: float) -> float:
    """The score of this dtype furthest from start towards end that is still good, by bisection."""
    inside, outside = (torch.tensor(x, dtype=dtype).item() for x in (start, end))
    if not good(torch.tensor(inside, dtype=dtype)) or good(torch.tensor(outside, dtype=dtype)):
        raise ValueError(f"start, end: expected the property at {start} and not at {end}")
    while True:
        middle = torch.tensor((inside + outside) / 2, dtype=dtype).item()
        if middle in (inside, outside):
            return inside
        if good(torch.tensor(middle, dtype=dtype)):
            inside = middle
        else:
            outside = middle


@dataclass(frozen=True)
class Limits:
    """Between which scores the textbook formula works in a dtype."""

    single: float  # largest score whose exp is finite: above it one key is inf/inf = NaN
    sum: float  # largest common score of MANY keys whose sum is finite: above it weights are 0, not 1/n
    floor: float  # smallest common score whose exp is not 0: below it a row is 0/0 = NaN
    gap: float  # with the shift: the smallest distance below the best key at which a weight is not yet 0


def limits(dtype: torch.dtype) -> Limits:
    def weight(below: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(below), below]).softmax(-1)[1]

    return Limits(
        last_good(lambda x: bool(naive(x[None]).isfinite().all()), dtype, 0.0, 2000.0),
        last_good(lambda x: bool(x.expand(MANY).exp().sum().isfinite()), dtype, 0.0, 2000.0),
        last_good(lambda x: bool(naive(x[None]).isfinite().all()), dtype, 0.0, -2000.0),
        last_good(lambda x: bool(weight(x) > 0), dtype, 0.0, -2000.0),
    )


def removed_shift() -> Teaser:
    rows, after = [], []
    for name, dtype in DTYPES.items():
        found = limits(dtype)
        rows.append((name, *(show([x], 1) for x in (found.single, found.sum, found.floor, found.gap))))
        high = 2 * found.single
        s = torch.tensor([high, high - 1], dtype=dtype)
        q, k, v = s[None, None, None], torch.eye(2, dtype=dtype)[None, None], torch.eye(2, dtype=dtype)[None, None]
        ours = regard.attention(q, k, v, scale=1.0)[0, 0, 0]
        between = torch.full((MANY,), (found.single + found.sum) / 2, dtype=dtype)
        after.append(
            (
                name,
                f"({show(s.double(), 1)})",
                show(naive(s).double(), 2),
                show(ours.double(), 2),
                f"{float(naive(between).double().sum()):.0f}",
                f"{float(regard.solve(between).weights.double().sum()):.0f}",
            )
        )
    exact = naive(tensor(1, 0))
    return Teaser(
        5,
        "What if we remove the shifting trick?",
        "Nothing of the problem: p = exp(s − λ), and the shift subtracts a part of λ before exp instead of dividing "
        "after it. What is dropped is a representable exp(s).",
        [
            Exhibit(
                f"Where exp(s)/Σexp(s) breaks, found by bisection (n = {MANY} for the sum; last column: with the "
                "shift)",
                ("dtype", "NaN above", "sum is inf above", "NaN below", "shifted: weight 0 below"),
                rows,
            ),
            Exhibit(
                f"Beyond it, without and with the shift; right, the mass of {MANY} equal keys above the sum's limit",
                ("dtype", "scores", "no shift", "regard", "mass, no shift", "mass, regard"),
                after,
            ),
        ],
        [
            (
                f"Exactly, scores (x, x − 1) have weights {show(exact, 2)} for every x: softmax is unchanged by a "
                "shift, so the shift costs nothing. (s/Σs is not, and cannot be shifted: teaser 1.)"
            ),
            (
                "Above the first limit one key suffices for ∞/∞ = NaN. Above the second, lower one nothing is NaN and "
                "it is worse: Σ is inf, all weights are 0 and the row silently loses its mass. Below the third, Σ = 0 "
                "and 0/0 = NaN."
            ),
            (
                "With the shift the best key has exp(0) = 1, so 1 ≤ Σ ≤ n: neither end can be reached. What underflows "
                "(last column) are weights too small for the dtype, and they become 0."
            ),
        ],
    )


TEASERS: dict[int, Callable[[], Teaser]] = {
    1: simple_normalisation,
    2: skipped_scaling,
    3: removed_softmax,
    4: only_masking,
    5: removed_shift,
}


def to_markdown() -> str:
    """The page docs/teasers.md."""
    lines = [
        "# Five brain teasers, run",
        "",
        (
            "Document 003 of the [claims](claims.md) asks what breaks when a part of softmax attention is left out. "
            "Each answer is a point of the design space ([theory](theory.md)): a part of the problem that was dropped. "
            "Its fifth teaser was announced and never written; here it is."
        ),
        "",
        (
            "`regard lab teasers` shows this page in the terminal, `regard lab teasers --markdown` writes it. ✓ marks "
            "what was checked when it was written."
        ),
    ]
    for make in TEASERS.values():
        teaser = make()
        lines += ["", f"## {teaser.number}. {teaser.question}", "", f"**Dropped:** {teaser.dropped}"]
        for exhibit in teaser.exhibits:
            lines += ["", f"{exhibit.title}:", "", markdown_row(exhibit.header), "|" + "---|" * len(exhibit.header)]
            lines += [markdown_row(row) for row in exhibit.rows]
        lines += ["", *(f"- {sentence}" for sentence in teaser.answer)]
    return "\n".join(lines) + "\n"


def markdown_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
