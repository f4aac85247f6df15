"""What the commands share on the terminal: tables, error messages, the streams and the files they write."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich import box, progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from .._files import check_writable, write

# Of an option that is a path: the command checks the file, with an error of one line; typer's is a box of five.
OURS: dict[str, Any] = {"readable": False}


def plain_table(**options: Any) -> Table:
    """A table without a frame: a line below the header, two spaces between columns."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), **options)


def show_remedies(remedies: Mapping[str, str], console: Console) -> None:
    """Print what to do, by the name of the rule."""
    if remedies:
        console.print()
    for rule, remedy in remedies.items():
        console.print(Text(f"what to do about {rule}: {remedy}"))


def fail(message: object) -> NoReturn:
    """Print an error, without a traceback, and exit with status 2."""
    show_error(message)
    raise typer.Exit(2) from None


def show_error(message: object) -> None:
    """Print an error as one line."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(message)), soft_wrap=True)


def existing_device(name: str) -> torch.device:
    """The device of the option --device. Exits with an error if it is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device: expected a device that is there, got {name!r}: {str(error).splitlines()[0]}")
    return device


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, if that is a terminal. It disappears at the end.

    The function that it gives takes what is being done, how many steps are done, and how many there are."""
    errors = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        progress.BarColumn(bar_width=20),
        progress.TaskProgressColumn(),
    )
    with progress.Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def report(what: str, number: int, total: int) -> None:
            bar.update(task, description=what, completed=number, total=total)

        yield report


class _Stream:
    """Stands in for sys.stdout or sys.stderr. If it cannot be written, the rest of what is printed is dropped.

    The command continues, so that a full disk or a closed pipe does not cost the files that it writes.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self.stream, self.name = stream, name
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if self.error is not None:
                raise
            self.error = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # the stream still has text that Python writes when it exits
            os.close(nowhere)
            if error.errno != errno.EPIPE:  # a reader that closed the pipe, as `head` does, has read enough
                show_error(f"{self.name}: expected a stream that can be written, got an error: {error.strerror}")


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Run a command. If what it prints cannot be written, it runs to its end; then exit with status 2, and with 1 if a
    pipe was closed."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    guards = {name: _Stream(stream, name) for name, stream in streams.items() if stream is not None}  # None: closed
    for name, guard in guards.items():
        setattr(sys, name, guard)
    status: Any = 0
    try:
        yield
    except SystemExit as ended:
        status = ended.code
    finally:
        for name, guard in guards.items():
            guard.flush()
            setattr(sys, name, guard.stream)
    errors = [guard.error for guard in guards.values() if guard.error is not None]
    if errors:
        status = 1 if all(error.errno == errno.EPIPE for error in errors) else 2
    sys.exit(status)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Run a command that prints a warning as one line, without the file and the line of the code."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


def check_outputs(paths: Mapping[str, Path | None], inputs: Mapping[str, Path | str | None] | None = None) -> None:
    """Exit with an error if a file cannot be written to one of these paths, by option, before anything is computed.

    `inputs`: the files that the command reads, by option. None of them is replaced.
    """
    taken = {Path(path).resolve(): option for option, path in (inputs or {}).items() if path and os.path.isfile(path)}
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
