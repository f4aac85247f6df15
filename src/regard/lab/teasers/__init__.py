"""The brain teasers of document 003, one file each: what was left out of softmax attention, and the effect of that.

Teasers 1 to 4 leave out a part of the transport problem. Teaser 5 leaves out a part of the arithmetic; the document
lists it in its contents, but does not contain it.
"""

from __future__ import annotations

from collections.abc import Callable

from ..numbers import markdown_row
from .teaser import Teaser
from .teaser_1_normalisation import simple_normalisation
from .teaser_2_scaling import skipped_scaling
from .teaser_3_softmax import removed_softmax
from .teaser_4_masking import only_masking
from .teaser_5_shift import removed_shift

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
            "Each answer is a point of the design space ([theory](theory.md)): it names the part of the problem that "
            "was dropped. The document announces a fifth teaser, but does not contain it; this page supplies it."
        ),
        "",
        (
            "`regard lab teasers` shows this page in the terminal, and `regard lab teasers --markdown` writes it. ✓ "
            "marks statements that were checked while the page was written."
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
