"""`inspect`: runs a model over inputs; `watch`: records the calls of your own loop. Both give an `Inspection`."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import hf
from .._validate import describe
from .progress import progress_bar
from .recorder import Recorder
from .result import Inspection
from .run_file import Partial
from .token_texts import opening, token_texts
from .views import Views

SAVE_EVERY = 10.0  # seconds between two writes of a run file


@contextlib.contextmanager
def watch(model: nn.Module, *, statistics: Iterable[str] | None = None, patterns: bool = False) -> Iterator[Inspection]:
    """Record the attention of a transformers model while the block runs, in a loop of your own.

    The Inspection fills as the model is called. Forward passes that activation checkpointing repeats are counted once.
    Afterwards the model is as it was. `statistics`: names of `AuxRequest`'s fields; None is all that the problem of the
    model defines except `key_mass`, which costs most. `patterns` adds the mean weight on the query's own key, on the
    key before it and on those that follow an earlier copy of its token (about one more pass over the keys).
    """
    recorder = Recorder(model, statistics, patterns)
    with recorder.listening():
        yield recorder.inspection


def inspect(
    model: nn.Module,
    inputs: Any,
    *,
    statistics: Iterable[str] | None = None,
    patterns: bool = False,
    views: bool = False,
    tokenizer: Any = None,
    batch_size: int | None = None,
    run: str | Path | None = None,
    progress: bool | None = None,
) -> Inspection:
    """Run a transformers model over inputs and record what its attention does.

    `inputs`: token ids [T] or [B, T], a dict of the model's arguments, or an iterable of such; `batch_size` splits
    larger batches. `statistics` and `patterns` as in `watch`. `views` records details of the first sequence for the
    report: a window of each plan, a map of the whole plan, the top keys of some queries, and their path along the
    temperature; `tokenizer` gives the text of the tokens. With `run=FILE` the state is saved to the file every few
    seconds, also within a sequence, and when the run is interrupted. The same call continues from it, to the same
    numbers. `progress` (None: on a terminal) shows which layer of which sequence is being recorded.
    """
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size: expected a positive int or None, got {describe(batch_size)}")
    recorder = Recorder(model, statistics, patterns)
    if views:
        recorder.check_has_plans("views")
    if run is not None and Path(run).exists():
        _resume(recorder, run, views)
    elif views:  # recorded even where the result is empty, because the layers have no common plan
        recorder.inspection.about["views"] = True
    result = recorder.inspection
    file = _RunFile(recorder, run)
    done, seen, digest = result.batches, 0, hashlib.sha256()
    layers = len(recorder.interception.layers)
    try:
        with (
            recorder.listening(),
            hf.evaluation_mode(model),
            progress_bar(progress, layers, _number_of_batches(inputs, batch_size)) as shown,
        ):
            recorder.before_call, recorder.after_call = shown.begin_call, file.call_recorded
            for batch in hf.batches(inputs, batch_size):
                seen += 1
                _update_digest(digest, batch)
                shown.begin_batch(seen, *_names(batch, tokenizer))
                if seen == done:
                    _check_inputs(digest, result.digest, run)
                if seen > done:
                    file.digest = digest.hexdigest()
                    begun = result.partial
                    if begun is not None:
                        _check_inputs(digest, begun.digest, run)
                    more = _record_batch(recorder, batch, views and seen == 1, tokenizer, begun)
                    # In one step: an interrupt finds the batch finished, or as the partial one.
                    vars(result).update(batches=seen, digest=file.digest, partial=None, **more)
                    file.batch_recorded()
                shown.end_batch()
            if seen < done:
                raise ValueError(f"run: expected the {done} batches of {str(run)!r} among the inputs, got {seen}")
    finally:
        file.close()
    return result


class _RunFile:
    """Writes the run file: every few seconds, after an attention call or a batch, and at the end."""

    def __init__(self, recorder: Recorder, path: str | Path | None) -> None:
        self.recorder, self.path = recorder, path
        self.result = recorder.inspection
        self.began = self.saved = time.monotonic()
        self.before = self.result.about.get("seconds", 0.0)
        self.digest = ""  # of the batches up to the one under way
        self.changed = False  # since the last write

    def call_recorded(self) -> None:
        if self.path is None:
            return
        self.result.partial, self.changed = self.recorder.partial(self.digest), True
        if self._is_due():
            self._write()

    def batch_recorded(self) -> None:
        self.changed = True
        if self._is_due():
            self._write()

    def close(self) -> None:
        self._update_seconds()
        if self.changed:
            self._write()

    def _is_due(self) -> bool:
        return time.monotonic() - self.saved > SAVE_EVERY

    def _update_seconds(self) -> None:
        self.result.about["seconds"] = round(self.before + time.monotonic() - self.began, 2)

    def _write(self) -> None:
        if self.path is None:
            return
        self._update_seconds()
        result = self.result
        if result.partial is not None:  # the layers of the finished batches; `partial` has those of the batch under way
            result = replace(result, layers=self.recorder.before)
        result.save(self.path)
        self.saved, self.changed = time.monotonic(), False


def _resume(recorder: Recorder, run: str | Path, views: bool) -> None:
    """Continue from a run file. The views are those of the first batch, so a run begun without them cannot add them."""
    begun = Inspection.load(run)
    if views and (begun.batches or begun.partial) and not begun.about.get("views", begun.views):
        raise ValueError(f"views: expected False, as {str(run)!r} was begun without them, or another run file")
    recorder.resume(begun, run)


def _record_batch(
    recorder: Recorder, batch: dict[str, Any], views: bool, tokenizer: Any, begun: Partial | None
) -> dict[str, Any]:
    """Record one batch. Returns the fields of the inspection that change besides its layers. `begun`: what an earlier
    process has recorded of the batch."""
    recorder.views = Views(len(recorder.interception.layers)) if views else None
    if begun is not None:
        recorder.views = None if begun.views is None else Views.resumed(begun.views)
    recorder.forward(batch, begun)
    result = recorder.inspection
    about = {"begins_with": _opening(batch, tokenizer)} | result.about  # the first batch's stays
    fields: dict[str, Any] = {"about": about | _counts(about, batch)}
    if recorder.views is not None:
        names, ids = [layer.name for layer in result.layers], _first_sequence(batch)
        fields["views"] = recorder.views.finish(names, None if ids is None else token_texts(ids, tokenizer))
    return fields


def _check_inputs(digest: Any, expected: str, run: str | Path | None) -> None:
    if digest.hexdigest() != expected:
        raise ValueError(f"run: expected the inputs that {str(run)!r} was begun with, got others")


def _update_digest(digest: Any, batch: dict[str, Any]) -> None:
    for name, value in batch.items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _counts(about: dict[str, Any], batch: dict[str, Any]) -> dict[str, int]:
    """The numbers of tokens and sequences and the length of the longest sequence, with this batch."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return {}
    padded = isinstance(mask, Tensor) and mask.dim() == 2
    lengths = mask.sum(-1) if isinstance(mask, Tensor) and padded else torch.full((ids.shape[0],), ids.shape[1])
    return {
        "tokens": about.get("tokens", 0) + int(lengths.sum()),
        "sequences": about.get("sequences", 0) + ids.shape[0],
        "longest": max(about.get("longest", 0), int(lengths.max())),
    }


def _first_sequence(batch: dict[str, Any]) -> list[int] | None:
    """The token ids of the first sequence, if the batch has token ids."""
    ids = batch.get("input_ids")
    return ids[0].tolist() if isinstance(ids, Tensor) and ids.dim() == 2 and len(ids) else None


def _opening(batch: dict[str, Any], tokenizer: Any) -> str:
    ids = _first_sequence(batch)
    return "" if ids is None else opening(ids, tokenizer)


def _names(batch: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """What a batch is called on the terminal, and the beginning of its text if it is one sequence of text."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.shape[0] != 1:
        return "batch", ""
    return "sequence", "" if tokenizer is None else _opening(batch, tokenizer)


def _number_of_batches(inputs: Any, batch_size: int | None) -> int | None:
    """The number of batches; None if reading the inputs twice might not give the same."""
    sized = isinstance(inputs, Tensor | Mapping | Sequence)
    return sum(1 for _ in hf.batches(inputs, batch_size)) if sized else None
