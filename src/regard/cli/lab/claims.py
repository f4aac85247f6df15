"""`regard lab claims`: judges the claims of the documents, and shows the table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ...lab import claims as book
from ..terminal import plain_table

COLOURS = {"holds": "green", "holds with correction": "yellow", "fails": "red", "not testable": "dim"}


def claims(
    source: Annotated[str | None, typer.Option(help="Only this document: 000 to 004.")] = None,
    verdict: Annotated[
        str | None, typer.Option(help="Only this verdict: holds, 'holds with correction', fails or 'not testable'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/claims.md.")] = False,
) -> None:
    """Judge every checkable sentence and printed number of the five documents from which regard started.

    A claim that fails is a result: the status is 0.
    """
    if as_json and markdown:
        raise typer.BadParameter("expected one of --json and --markdown, got both")
    for name, value, known in (("--source", source, book.DOCUMENTS), ("--verdict", verdict, book.VERDICTS)):
        if value is not None and value not in known:
            raise typer.BadParameter(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    rows = book.judge_claims(source, verdict)
    if as_json:
        print(book.to_json(rows))
    elif markdown:
        print(book.to_markdown(rows), end="")
    else:
        show_claims(rows, Console())


def show_claims(rows: list[book.ClaimRow], console: Console) -> None:
    """A table per document, and a summary."""
    for source, title in book.DOCUMENTS.items():
        mine = [row for row in rows if row.source == source]
        if not mine:
            continue
        console.print(Text.assemble((f"{source}  ", "bold"), title))
        table = plain_table(leading=1, expand=True)
        table.add_column("claim", ratio=4)
        table.add_column("computed", ratio=6)
        table.add_column("verdict", width=10)
        for row in mine:
            claim = Text.assemble(row.claim, "\n", (row.section, "dim italic"))
            table.add_row(claim, Text(row.computed), Text(row.verdict, style=COLOURS[row.verdict]))
        console.print(table)
        console.print()
    console.print(Text(book.summary(rows), style="bold"))
