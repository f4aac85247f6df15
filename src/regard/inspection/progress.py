"""`progress_bar`: shows on the terminal which layer of which sequence is being recorded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .token_texts import first_words


class Progress:
    """What `inspect` reports while it runs. This one shows nothing."""

    def begin_batch(self, number: int, noun: str, words: str) -> None:
        """The batch with this number (from 1) begins; `noun`: what it is called; `words`: its beginning, if known."""

    def begin_call(self, number: int, repeated: bool) -> None:
        """The attention call with this number (from 1) of the batch begins. `repeated`: it is in the run file, and is
        only computed again."""

    def end_batch(self) -> None:
        """The batch is recorded, or was already."""


class _Bar(Progress):
    """A bar over all attention calls of all batches."""

    def __init__(self, bar: Any, layers: int, batches: int | None) -> None:
        self.bar, self.layers, self.batches = bar, layers, batches
        self.room = max(12, min(40, bar.console.width - 68))  # characters for the words, beside the other columns
        self.task = bar.add_task("inspecting", total=self._total())
        self.number, self.title, self.words = 0, "", ""
        self.calls = 0  # of attention, in the batch

    def begin_batch(self, number: int, noun: str, words: str) -> None:
        self.number, self.words = number, f": “{first_words(words, self.room)}”" if words else ""
        self.title = f"{noun} {number}" if self.batches is None else f"{noun} {number} of {self.batches}"

    def begin_call(self, number: int, repeated: bool) -> None:
        # Layers may share one attention. Their number is known after the first batch: until then the bar stays.
        self.calls = number
        of_all = "" if number > self.layers else f" of {self.layers}"
        text = f"{self.title}, layer {number}{of_all}{' (again)' if repeated else ''}{self.words}"
        self._show((self.number - 1) * self.layers + min(number, self.layers) - 1, text)

    def end_batch(self) -> None:
        if self.calls > self.layers:
            self.layers = self.calls
            self.bar.update(self.task, total=self._total())
        self._show(self.number * self.layers, self.title + self.words)

    def _total(self) -> int | None:
        return None if self.batches is None else self.batches * self.layers

    def _show(self, completed: int, text: str) -> None:
        self.bar.update(self.task, completed=completed, description=text)


@contextlib.contextmanager
def progress_bar(wanted: bool | None, layers: int, batches: int | None) -> Iterator[Progress]:
    """A progress bar on stderr (`wanted` None: if that is a terminal) for models with this many attentions. `batches`:
    their number, if it is known."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield Progress()
        return
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    columns = (
        progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        progress.BarColumn(bar_width=12),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar, layers, batches)
