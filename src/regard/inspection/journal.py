"""The run file of a `Monitor`: JSON lines, one per sampled step, one per event, and a few that say what they are about.

A line is written whole or, if the machine stops in the middle, torn at the file's end; who reads drops such an end. A
run that goes back to step k (from a checkpoint) has not done what comes later in the file: those lines are moved to a
file beside it, with the ending .stale, and the run goes on from k.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from .events import Event

FORMAT, VERSION = "regard-monitor", 1
NAME = "attention.jsonl"  # in a folder
_HEAD = f'{{"format": "{FORMAT}"'.encode()


def located(path: str | os.PathLike[str]) -> Path:
    """The file that a path means: itself, or `attention.jsonl` in a folder (one that is there, or has no ending)."""
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
        self.layers: list[Any] | None = None  # as the file says
        if self.path.exists():
            for line in read_lines(self.path):
                self.last = max(self.last, line.get("step", -1))
                self.layers = line.get("layers", self.layers)
            if not self.path.read_bytes().endswith(b"\n"):
                self.rewind(self.last + 1)  # without the torn end, so that nothing is glued to it

    def write(self, line: dict[str, Any]) -> None:
        """Append, and see it on the disk."""
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
        """Move the lines of this step and later ones out of the way."""
        kept, stale = [], []
        lines = read_lines(self.path)
        if not any(-1 < line.get("step", -1) < step for line in lines):  # nothing of it stays: another run begins
            step_of = [step] * len(lines)
            self.layers = None
        else:
            step_of = [line.get("step", -1) for line in lines]
        for line, at in zip(lines, step_of, strict=True):
            (stale if at >= step else kept).append(json.dumps(line) + "\n")
        if stale:
            with self.path.with_name(self.path.name + ".stale").open("a", encoding="utf-8") as file:
                file.writelines(stale)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(self.path)
        self.last = step - 1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run file, without one torn at its end; raises a ValueError where it is no run file."""
    *lines, torn = path.read_bytes().split(b"\n")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line, parse_constant=_refused)
            if not isinstance(entry, dict):
                raise TypeError("not an object")
            if not isinstance(entry.get("step", 0), int):
                raise TypeError("its step is no integer")
            for layer in entry.get("layers", []):
                index, name, heads = layer
                if not (isinstance(index, int) and isinstance(name, str) and isinstance(heads, int)):
                    raise TypeError("its layers are no layers")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: expected a line that Monitor wrote, got line {number}: {error}") from None
        if number == 1 and (entry.get("format"), entry.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{path}: expected a run file of regard.Monitor (version {VERSION}), got another file")
        found.append(entry)
    if not found and not _HEAD.startswith(torn[: len(_HEAD)]):
        raise ValueError(f"{path}: expected a run file of regard.Monitor, got another file")
    return found


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# --- reading a run ----------------------------------------------------------------------------------------------------

SHOWN = 400  # samples in a record at most; a longer run is thinned
WHOLE = ("loss", "loss_min", "loss_max", "grad_norm", "max_attention_logit", "rows")  # numbers of the whole run
_METRIC = re.compile(r"attn/(\w+)/L(\d+)(?:_(p\d+|min|max))?")


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A run file as the training report shows it: steps, what they measured by metric, quantile and layer, events.

    Raises a ValueError where there is no such file, or nothing in it.
    """
    where = located(path)
    if not where.is_file():
        raise ValueError(f"{where}: expected a run file of regard.Monitor, there is none")
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
    """At most SHOWN samples, evenly, with the first, the last and those at events (as many as fit)."""
    if len(samples) <= SHOWN:
        return samples
    steps = [sample["step"] for sample in samples]
    chosen = {min(bisect.bisect_left(steps, step), len(steps) - 1) for step in events[: SHOWN // 4]}
    free = SHOWN - len(chosen)
    chosen |= {round(n * (len(samples) - 1) / (free - 1)) for n in range(free)}
    return [samples[n] for n in sorted(chosen)]
