"""What the commands share on the terminal: tables, error messages and the files they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def plain_table(**options: Any) -> Table:
    """A table without a frame: a line below the header, two spaces between columns."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), **options)


def fail(message: object) -> NoReturn:
    """Print an error, without a traceback, and exit with status 2."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(message)), soft_wrap=True)
    raise typer.Exit(2) from None


def check_output(*paths: Path | None) -> None:
    """Exit with an error if a file cannot be written to one of these paths, before anything is computed."""
    for path in paths:
        if path is not None and path.is_dir():
            fail(f"{path}: expected a file, got a folder")
        if path is not None and not path.resolve().parent.is_dir():
            fail(f"{path}: there is no folder {path.resolve().parent}")


def write_output(path: Path, text: str, what: str, console: Console) -> None:
    """Write a file, and print its path after the word `what`."""
    path.write_text(text, encoding="utf-8")
    console.print(Text(f"{what}: {path}"), soft_wrap=True)
