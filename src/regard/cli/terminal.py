"""What the commands share on the terminal: tables, error messages and the files they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._files import check_writable, write


def plain_table(**options: Any) -> Table:
    """A table without a frame: a line below the header, two spaces between columns."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), **options)


def fail(message: object) -> NoReturn:
    """Print an error, without a traceback, and exit with status 2."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(message)), soft_wrap=True)
    raise typer.Exit(2) from None


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Exit with an error if a file cannot be written to one of these paths, by option, before anything is computed."""
    taken: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            fail(f"{option}: expected a file, got the folder {path}")
        if not path.resolve().parent.is_dir():
            fail(f"{option}: expected a path in a folder that exists, got {path}: no folder {path.resolve().parent}")
        if taken.setdefault(path.resolve(), option) != option:
            fail(f"{option}: expected another file than that of {taken[path.resolve()]}, got {path} for both")
        try:
            check_writable(path)
        except OSError as error:
            fail(_unwritable(option, path, error))


def write_outputs(files: Mapping[str, tuple[Path | None, Callable[[], str], str]], console: Console) -> None:
    """Write files, by option: the path (None: no file), a function that returns the text, and a word for it.

    Prints the word and the path of each. If one cannot be written, the others are, and the command exits with an error.
    """
    failures = []
    for option, (path, text, what) in files.items():
        if path is None:
            continue
        try:
            write(path, text())
        except OSError as error:
            failures.append(_unwritable(option, path, error))
        else:
            console.print(Text(f"{what}: {path}"), soft_wrap=True)
    if failures:
        fail("; ".join(failures))


def _unwritable(option: str, path: Path, error: OSError) -> str:
    return f"{option}: expected a file that can be written, got {path}: {error.strerror}"
