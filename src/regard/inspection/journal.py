"""The run file of a `Monitor`: JSON lines. One per sampled step, one per event, a header, and the names of the layers.

If the machine stops while a line is written, the file ends with an incomplete line, which the reader drops. If a run
goes back to step k (from a checkpoint), the lines of step k and later are moved to a file beside it with the suffix
.stale, and the run continues from k.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from .._files import write
from .events import Event

FORMAT, VERSION = "regard-monitor", 1
NAME = "attention.jsonl"  # of the file in a folder
_HEAD = f'{{"format": "{FORMAT}"'.encode()


def located(path: str | os.PathLike[str]) -> Path:
    """The run file of a path: the path itself, or `attention.jsonl` in it if it is a folder or has no suffix."""
    found = Path(path)
    if found.is_file():
        return found
    return found / NAME if found.is_dir() or not found.suffix or str(path).endswith(("/", os.sep)) else found


class Journal:
    """A run file that is being written."""

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any]) -> None:
        self.path, self.about = located(path), about
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last = -1  # the last step in the file
        self.layers: list[Any] | None = None  # the last names of the layers in the file
        if self.path.exists():
            for line in read_lines(self.path):
                self.last = max(self.last, line.get("step", -1))
                self.layers = line.get("layers", self.layers)
            if not self.path.read_bytes().endswith(b"\n"):
                self.rewind(self.last + 1)  # drops the incomplete line, so that the next one is not appended to it

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and wait until it is on disk."""
        lines = [line]
        if not self.path.exists() or self.path.stat().st_size == 0:
            lines.insert(0, {"format": FORMAT, "version": VERSION} | self.about)
        with self.path.open("ab") as file:
            file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self.last = max(self.last, line.get("step", -1))
        self.layers = line.get("layers", self.layers)

    def rewind(self, step: int) -> None:
        """Move the lines of this step and of later ones to the .stale file."""
        kept, stale = [], []
        lines = read_lines(self.path)
        if not any(-1 < line.get("step", -1) < step for line in lines):  # no step remains: a new run begins
            step_of = [step] * len(lines)
            self.layers = None
        else:
            step_of = [line.get("step", -1) for line in lines]
        for line, at in zip(lines, step_of, strict=True):
            (stale if at >= step else kept).append(json.dumps(line) + "\n")
        if stale:
            with self.path.with_name(self.path.name + ".stale").open("a", encoding="utf-8") as file:
                file.writelines(stale)
        write(self.path, "".join(kept))
        self.last = step - 1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run file, without an incomplete one at its end. Raises a ValueError for any other file."""
    *lines, incomplete = path.read_bytes().split(b"\n")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line, parse_constant=_not_a_number)
            if not isinstance(entry, dict):
                raise TypeError("not an object")
            if not isinstance(entry.get("step", 0), int):
                raise TypeError("its step is not an integer")
            for layer in entry.get("layers", []):
                index, name, heads = layer
                if not (isinstance(index, int) and isinstance(name, str) and isinstance(heads, int)):
                    raise TypeError("its layers are not [number, name, heads]")
        except (ValueError, TypeError) as error:
            reason = "not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
            what = "another file" if number == 1 else "a damaged one"
            raise ValueError(
                f"{path}: expected a run file of regard.Monitor, got {what} (line {number}: {reason})"
            ) from None
        if number == 1 and (entry.get("format"), entry.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{path}: expected a run file of regard.Monitor (version {VERSION}), got another file")
        found.append(entry)
    if not found and not _HEAD.startswith(incomplete[: len(_HEAD)]):
        raise ValueError(f"{path}: expected a run file of regard.Monitor, got another file")
    return found


def _not_a_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# --- reading a run ----------------------------------------------------------------------------------------------------

SHOWN = 400  # largest number of samples in a record; of a longer run some are left out
WHOLE = ("loss", "loss_min", "loss_max", "grad_norm", "max_attention_logit", "rows")  # numbers of the whole run
_METRIC = re.compile(r"attn/(\w+)/L(\d+)(?:_(p\d+|min|max))?")


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A run file as the training report shows it: the steps, their metrics by quantile and layer, and the events.

    Raises a ValueError if the file does not exist or has no sampled step.
    """
    where = located(path)
    if not where.is_file():
        raise ValueError(f"{where}: expected a run file of regard.Monitor, got no file")
    header, *lines = read_lines(where) or [{}]
    events = [{"rule": line["event"]} | line for line in lines if "event" in line]
    samples = [line for line in lines if "step" in line and "event" not in line]
    if not samples:
        raise ValueError(f"{where}: expected a run with at least one sampled step, got none")
    for event in events:
        del event["event"]
        missing = {field.name for field in fields(Event)} - event.keys()
        if missing:
            raise ValueError(f"{where}: expected {', '.join(sorted(missing))} in an event, step {event['step']}")
        if not isinstance(event["layer"], int | None):
            raise ValueError(f"{where}: expected a layer's number in an event, step {event['step']}")
    kept = _thinned(samples, [event["step"] for event in events])
    named = next((line["layers"] for line in reversed(lines) if "layers" in line), [])
    names: dict[int, list[Any]] = {layer[0]: layer for layer in named}
    metrics: dict[str, dict[str, dict[int, list[float | None]]]] = {}
    for n, sample in enumerate(kept):
        for name, value in sample.items():
            found = _METRIC.fullmatch(name)
            if found is None and name not in WHOLE:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise ValueError(f"{where}: expected a number as {name} of step {sample['step']}, got {value!r}")
            if found is None:
                continue
            metric, index, kind = found[1], int(found[2]), found[3] or "all"
            names.setdefault(index, [index, "", 0])
            by_layer = metrics.setdefault(metric, {}).setdefault(kind, {})
            by_layer.setdefault(index, [None] * len(kept))[n] = value
    if not metrics:
        raise ValueError(f"{where}: expected sampled steps with metrics of layers, got none")
    layers = [names[index] for index in sorted(names)]
    none: list[float | None] = [None] * len(kept)
    return {
        "about": {name: value for name, value in header.items() if name not in ("format", "version")},
        "samples": len(samples),
        "steps": [sample["step"] for sample in kept],
        "layers": layers,
        "values": {name: [s.get(name) for s in kept] for name in WHOLE if any(name in s for s in kept)},
        "metrics": {
            metric: {kind: [rows.get(layer[0], none) for layer in layers] for kind, rows in kinds.items()}
            for metric, kinds in metrics.items()
        },
        "events": events,
    }


def _thinned(samples: list[dict[str, Any]], events: list[int]) -> list[dict[str, Any]]:
    """At most SHOWN samples, evenly spaced, with the first, the last and those at events (as many as fit)."""
    if len(samples) <= SHOWN:
        return samples
    steps = [sample["step"] for sample in samples]
    chosen = {min(bisect.bisect_left(steps, step), len(steps) - 1) for step in events[: SHOWN // 4]}
    free = SHOWN - len(chosen)
    chosen |= {round(n * (len(samples) - 1) / (free - 1)) for n in range(free)}
    return [samples[n] for n in sorted(chosen)]
