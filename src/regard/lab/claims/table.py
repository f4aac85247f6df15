"""The register of documents, and the table of their judged claims as text, JSON and the page docs/claims.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from ..numbers import markdown_row
from . import (
    document_000,
    document_001,
    document_002,
    document_003_softmax,
    document_003_teasers_1_2,
    document_003_teasers_3_4,
    document_003_temperature,
    document_004,
)
from .claim import VERDICTS, Claim

DOCUMENTS = {
    "000": "a post: softmax as the solution of an entropy-regularized transport problem",
    "001": "E. Litman, Scaled-Dot-Product Attention as One-Sided Entropic Optimal Transport (2025), the abstract",
    "002": "a post: Why Softmax?",
    "003": "a tutorial: Understanding Softmax: The Mathematical Foundation Behind Transformer Attention",
    "004": "J. Ma, Deriving the Scaled-Dot-Function via Maximum Likelihood Estimation and Maximum Entropy Approach",
}
MODULES: tuple[ModuleType, ...] = (
    document_000,
    document_001,
    document_002,
    document_003_softmax,
    document_003_teasers_1_2,
    document_003_teasers_3_4,
    document_003_temperature,
    document_004,
)
CLAIMS: list[Claim] = [claim for module in MODULES for claim in module.CLAIMS]


@dataclass(frozen=True)
class ClaimRow:
    """One judged claim."""

    name: str
    source: str
    section: str
    claim: str
    computed: str
    verdict: str


def judge_claim(claim: Claim) -> ClaimRow:
    found = claim.judge()
    return ClaimRow(claim.name, claim.source, claim.section, claim.says, found.computed, found.verdict)


def judge_claims(source: str | None = None, verdict: str | None = None) -> list[ClaimRow]:
    """Judge all claims, those of one document, or those with one verdict."""
    if source is not None and source not in DOCUMENTS:
        raise ValueError(f"source: expected one of {', '.join(DOCUMENTS)}, got {source!r}")
    if verdict is not None and verdict not in VERDICTS:
        raise ValueError(f"verdict: expected one of {', '.join(VERDICTS)}, got {verdict!r}")
    rows = [judge_claim(claim) for claim in CLAIMS if source in (None, claim.source)]
    return [row for row in rows if verdict in (None, row.verdict)]


def counts(rows: Iterable[ClaimRow]) -> dict[str, int]:
    """How many rows have each verdict, including the verdicts that no row has."""
    counted = Counter(row.verdict for row in rows)
    return {verdict: counted[verdict] for verdict in VERDICTS}


def summary(rows: list[ClaimRow]) -> str:
    parts = ", ".join(f"{verdict} {number}" for verdict, number in counts(rows).items() if number)
    return f"{len(rows)} claim{'s' if len(rows) != 1 else ''}: {parts}" if rows else "no claims"


def to_dict(rows: list[ClaimRow]) -> dict[str, Any]:
    return {"documents": DOCUMENTS, "counts": counts(rows), "claims": [asdict(row) for row in rows]}


def to_json(rows: list[ClaimRow]) -> str:
    return json.dumps(to_dict(rows), indent=2, ensure_ascii=False)


def to_markdown(rows: list[ClaimRow]) -> str:
    """The page docs/claims.md."""
    lines = [
        "# Claims about softmax attention, computed",
        "",
        (
            "Five documents explain why attention is softmax. This page lists every sentence and every printed number "
            "in them that can be checked, with the result that regard computed. `regard lab claims` computes all of "
            "them again in a few seconds, and `regard lab claims --markdown` writes this page."
        ),
        "",
        "- **holds**: true as stated. Printed numbers are compared at the precision with which they are printed.",
        "- **holds with correction**: true after the correction that the row names.",
        "- **fails**: false; the row gives the true numbers.",
        "- **not testable**: an opinion, or a result of training for which no source is given.",
        "",
        (
            "✓ and ✗ mark side conditions that were checked while the page was written. The brain teasers of 003 are "
            "run in [teasers.md](teasers.md); the notation is that of [theory.md](theory.md)."
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
