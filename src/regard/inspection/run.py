"""`inspect`: runs a model over inputs; `watch`: records the calls of your own loop. Both give an `Inspection`."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import hf
from .._validate import describe
from .recorder import Recorder
from .result import Inspection
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
    report: a window of each plan, the top keys of some queries, and their path along the temperature; `tokenizer` gives
    the text of the tokens. With `run=FILE` the state is saved to the file every few seconds and when the run is
    interrupted, and the same call continues from it. `progress` (None: on a terminal) shows a progress bar.
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
    began = saved = time.monotonic()
    done, seen, digest = result.batches, 0, hashlib.sha256()
    try:
        with (
            recorder.listening(),
            hf.evaluation_mode(model),
            _progress_bar(inputs, batch_size, progress) as advance,
        ):
            for batch in hf.batches(inputs, batch_size):
                seen += 1
                _update_digest(digest, batch)
                if seen == done and digest.hexdigest() != result.digest:
                    raise ValueError(f"run: expected the inputs that {str(run)!r} was begun with, got others")
                if seen > done:
                    _record_batch(recorder, batch, views and seen == 1, tokenizer)
                    result.batches, result.digest = seen, digest.hexdigest()
                    if run is not None and time.monotonic() - saved > SAVE_EVERY:
                        result.save(run)
                        saved = time.monotonic()
                advance()
            if seen < done:
                raise ValueError(f"run: expected the {done} batches of {str(run)!r} among the inputs, got {seen}")
    finally:
        result.about["seconds"] = round(result.about.get("seconds", 0.0) + time.monotonic() - began, 2)
        if run is not None and result.batches > done:
            result.save(run)
    return result


def _resume(recorder: Recorder, run: str | Path, views: bool) -> None:
    """Continue from a run file. The views are those of the first batch, so a run begun without them cannot add them."""
    begun = Inspection.load(run)
    if views and begun.batches and not begun.about.get("views", begun.views):
        raise ValueError(f"views: expected False, as {str(run)!r} was begun without them, or another run file")
    recorder.resume(begun, run)


def _record_batch(recorder: Recorder, batch: dict[str, Any], views: bool, tokenizer: Any) -> None:
    recorder.views = Views() if views else None
    recorder.forward(batch)
    result = recorder.inspection
    if recorder.views is not None:
        names = [layer.name for layer in result.layers]
        result.views = recorder.views.finish(names, _token_texts(batch, tokenizer))
    _count_tokens(result.about, batch)


def _update_digest(digest: Any, batch: dict[str, Any]) -> None:
    for name, value in batch.items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _count_tokens(about: dict[str, Any], batch: dict[str, Any]) -> None:
    """Add the batch to the numbers of tokens and sequences and to the length of the longest sequence."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(ids, Tensor) and ids.dim() == 2:
        padded = isinstance(mask, Tensor) and mask.dim() == 2
        lengths = mask.sum(-1) if isinstance(mask, Tensor) and padded else torch.full((ids.shape[0],), ids.shape[1])
        about["tokens"] = about.get("tokens", 0) + int(lengths.sum())
        about["sequences"] = about.get("sequences", 0) + ids.shape[0]
        about["longest"] = max(about.get("longest", 0), int(lengths.max()))


def _token_texts(batch: dict[str, Any], tokenizer: Any) -> list[str] | None:
    """The text of each token of the first sequence; without a tokenizer, the token ids."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor):
        return None
    row = ids[0].tolist()
    return [str(i) for i in row] if tokenizer is None else [tokenizer.decode([i]) for i in row]


@contextlib.contextmanager
def _progress_bar(inputs: Any, batch_size: int | None, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, and the function that advances it by one batch."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    sized = isinstance(inputs, Tensor | Mapping | Sequence)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("inspecting", total=sum(1 for _ in hf.batches(inputs, batch_size)) if sized else None)
        yield lambda: bar.advance(task)
