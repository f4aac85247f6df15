"""Every checkable sentence and printed number of the five documents regard grew out of, judged by computation.

`verdicts` says what a claim is and how it is judged, `derivations` and `tutorial` hold the claims themselves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from . import derivations, tutorial
from .teasers import markdown_row
from .verdicts import VERDICTS, Claim

DOCUMENTS = {
    "000": "a post: softmax as the solution of an entropy-regularized transport problem",
    "001": "E. Litman, Scaled-Dot-Product Attention as One-Sided Entropic Optimal Transport (2025), the abstract",
    "002": "a post: Why Softmax?",
    "003": "a tutorial: Understanding Softmax: The Mathematical Foundation Behind Transformer Attention",
    "004": "J. Ma, Deriving the Scaled-Dot-Function via Maximum Likelihood Estimation and Maximum Entropy Approach",
}

CLAIMS: list[Claim] = sorted([*derivations.CLAIMS, *tutorial.CLAIMS], key=lambda claim: claim.source)


@dataclass(frozen=True)
class Row:
    """One judged claim."""

    name: str
    source: str
    section: str
    claim: str
    computed: str
    verdict: str


def judge(claim: Claim) -> Row:
    found = claim.judge()
    return Row(claim.name, claim.source, claim.section, claim.says, found.computed, found.verdict)


def table(source: str | None = None, verdict: str | None = None) -> list[Row]:
    """Judge the claims: all, those of one document, or those with one verdict."""
    if source is not None and source not in DOCUMENTS:
        raise ValueError(f"source: expected one of {', '.join(DOCUMENTS)}, got {source!r}")
    if verdict is not None and verdict not in VERDICTS:
        raise ValueError(f"verdict: expected one of {', '.join(VERDICTS)}, got {verdict!r}")
    rows = [judge(claim) for claim in CLAIMS if source in (None, claim.source)]
    return [row for row in rows if verdict in (None, row.verdict)]


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows have each verdict, also where none has."""
    counted = Counter(row.verdict for row in rows)
    return {verdict: counted[verdict] for verdict in VERDICTS}


def summary(rows: list[Row]) -> str:
    parts = ", ".join(f"{verdict} {number}" for verdict, number in counts(rows).items() if number)
    return f"{len(rows)} claim{'s' if len(rows) != 1 else ''}: {parts}" if rows else "no claims"


def to_dict(rows: list[Row]) -> dict[str, Any]:
    return {"documents": DOCUMENTS, "counts": counts(rows), "claims": [asdict(row) for row in rows]}


def to_json(rows: list[Row]) -> str:
    return json.dumps(to_dict(rows), indent=2, ensure_ascii=False)


def to_markdown(rows: list[Row]) -> str:
    """The page docs/claims.md."""
    lines = [
        "# Claims about softmax attention, computed",
        "",
        (
            "Five documents say why attention is softmax. This page takes every sentence and every printed number in "
            "them that can be checked and shows what regard computed. `regard lab claims` computes it anew in a few "
            "seconds, `regard lab claims --markdown` writes this page."
        ),
        "",
        "- **holds**: as it was said. Printed numbers are compared at the precision they are printed with.",
        "- **holds with correction**: after the repair that is named.",
        "- **fails**: the true numbers stand beside it.",
        "- **not testable**: an opinion, or a result of training for which no source is given.",
        "",
        (
            "✓ and ✗ mark what was checked while the page was written. The brain teasers of 003 are run in "
            "[teasers.md](teasers.md); notation as in [theory.md](theory.md)."
        ),
        "",
        f"**{summary(rows)}**",
    ]
    for source, title in DOCUMENTS.items():
        mine = [row for row in rows if row.source == source]
        if mine:
            lines += ["", f"## {source}: {title}", "", summary(mine), ""]
            lines += ["| section | claim | computed | verdict |", "|---|---|---|---|"]
            lines += [markdown_row((row.section, row.claim, row.computed, row.verdict)) for row in mine]
    return "\n".join(lines) + "\n"
