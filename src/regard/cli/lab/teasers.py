"""`regard lab teasers`: runs the brain teasers, and shows their tables and answers."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...lab.teasers import TEASERS, to_markdown
from ...lab.teasers.teaser import Teaser
from ..terminal import plain_table


def teasers(
    number: Annotated[int | None, typer.Argument(help="One teaser, 1 to 5; all by default.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/teasers.md.")] = False,
) -> None:
    """Run the five brain teasers: which part of attention each leaves out, and the effect."""
    if number is not None and number not in TEASERS:
        raise typer.BadParameter(f"number: expected 1 to {len(TEASERS)}, got {number}")
    if markdown:
        if number is not None:
            raise typer.BadParameter("number: expected none with --markdown, which prints the whole page")
        print(to_markdown(), end="")
        return
    for make in TEASERS.values() if number is None else [TEASERS[number]]:
        show_teaser(make(), Console())


def show_teaser(teaser: Teaser, console: Console) -> None:
    """The question, what is dropped, the tables, and the answer in sentences."""
    console.print(Text(f"{teaser.number}. {teaser.question}", style="bold"))
    console.print(Text.assemble(("Dropped: ", "bold"), teaser.dropped))
    for exhibit in teaser.exhibits:
        console.print()
        console.print(Text(f"{exhibit.title}:"))
        table = plain_table()
        for name in exhibit.header:
            table.add_column(name)
        for row in exhibit.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    console.print()
    for sentence in teaser.answer:
        bullet = Table.grid(padding=(0, 1))
        bullet.add_row("-", Text(sentence))
        console.print(bullet)
    console.print()
