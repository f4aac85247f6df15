"""The work of the commands `regard inspect` (find the model, read a text, inspect) and `regard report` (read a run
file of a training or of an inspection). `regard.cli` prints the results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import hf
from .findings import check_format
from .head_rules import Thresholds, rule_names
from .journal import located, read_run
from .result import Inspection
from .rules import SEVERITIES
from .run import inspect


class Refused(Exception):
    """An error that the user can fix; its text says how."""


def examine(
    name: str,
    *,
    text: Path | None,
    tokens: Path | None,
    length: int,
    limit: int | None,
    trust_remote_code: bool,
    thresholds: Thresholds,
    run: Path | None,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Inspect a model by its name. Returns the record of the `Inspection`, with the names of the model and the text.
    `say` receives a line for each stage."""
    _check_files(text, tokens)
    say(f"loading {name}")
    source = tokens or text
    try:
        model, tokenizer = hf.load(name, trust_remote_code=trust_remote_code)
        ids = _read(text, tokens, tokenizer, name)
        limit_of_model = getattr(model.config, "max_position_embeddings", None) or length
        words = model.get_input_embeddings().num_embeddings
        if bool(((ids < 0) | (ids >= words)).any()):
            raise Refused(f"token ids: expected 0 to {words - 1}, got {int(ids.min())} to {int(ids.max())}")
        batches = _cut(ids if limit is None else ids[:limit], min(length, limit_of_model))
        say(_account(batches, length, limit_of_model))
        if limit is not None and limit > len(ids):
            where = "the sample text has no more: use --text FILE" if source is None else f"{source.name} has no more"
            say(f"--max-tokens {limit}: {where}")
        inspection = inspect(model, batches, patterns=True, views=True, tokenizer=tokenizer, run=run)
    except (ImportError, ValueError, NotImplementedError, OSError) as error:
        raise Refused(str(error)) from None
    inspection.about |= {
        "architecture": inspection.about["model"],
        "model": name,
        "text": "the sample text" if source is None else source.name,
    }
    return inspection.record(thresholds)


def _check_files(text: Path | None, tokens: Path | None) -> None:
    """Raise if a number of tokens was given in place of a file: name the options that take one."""
    for option, path in (("--text: expected a file", text), ("--tokens: expected a file of token ids", tokens)):
        number = str(path).replace(",", "").replace("_", "")
        if path is not None and number.isdecimal() and not path.exists():
            hint = f"use --max-tokens {number} (in all) or --length {number} (in one sequence)"
            raise Refused(f"{option}, got {path}. To read this many tokens, {hint}")


def _account(batches: list[Tensor], length: int, of_model: int) -> str:
    """What is read, and why in how many sequences."""
    text = f"reading {sum(map(len, batches)):,} tokens"
    if len(batches) == 1:
        return text
    reason = "the model's limit" if of_model < length else "--length sets it"
    return f"{text} in {len(batches)} sequences of at most {min(length, of_model):,} ({reason})"


def _read(text: Path | None, tokens: Path | None, tokenizer: Any, name: str) -> Tensor:
    """The token ids to inspect."""
    if text is not None and tokens is not None:
        raise Refused("--text, --tokens: expected one of them, got both")
    if tokens is not None:
        try:
            return torch.tensor([int(word) for word in _content(tokens).replace(",", " ").strip("[] \n").split()])
        except ValueError as error:
            raise Refused(f"--tokens: expected integers in {tokens}: {error}") from None
    if tokenizer is None:
        raise Refused(f"{name} has no tokenizer: give token ids with --tokens FILE")
    sample = resources.files("regard.inspection").joinpath("sample.txt").read_text("utf-8")
    return torch.tensor(tokenizer(sample if text is None else _content(text))["input_ids"])


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None


def _cut(ids: Tensor, length: int) -> list[Tensor]:
    """Sequences of at most this length. A last sequence of one token is dropped: it has no other token to attend to."""
    pieces = [piece for piece in ids.split(length) if len(piece) > 1]
    if not pieces:
        raise Refused(f"the text: expected at least 2 tokens, got {len(ids)}")
    return pieces


def read_record(path: Path) -> dict[str, Any]:
    """A record that `regard inspect --json` wrote."""
    try:
        record = json.loads(_content(path))
        check_format(record, str(path))
        if not isinstance(record["provenance"], dict):
            raise TypeError("its provenance is not an object")
        for head in record["heads"]:
            _ = head["layer"], head["head"], head["mean"], head["max"]
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} is not what regard inspect --json writes: {error}") from None
    return record


def limits(settings: list[str]) -> Thresholds:
    """Thresholds, some of them set by "name=number"."""
    known = [field.name for field in fields(Thresholds)]
    chosen = {}
    for setting in settings:
        name, _, number = setting.partition("=")
        try:
            if name not in known:
                raise ValueError
            chosen[name] = float(number)
        except ValueError:
            expected = f"NAME=NUMBER with a name among {', '.join(known)}"
            raise Refused(f"--threshold: expected {expected}, got {setting!r}") from None
    try:
        return Thresholds(**chosen)
    except ValueError as error:
        raise Refused(f"--threshold: {error}") from None


def read_any(path: Path) -> tuple[str, dict[str, Any]]:
    """The content of a file: ("training", record) of a Monitor, or ("inspection", record)."""
    if not path.exists():
        raise Refused(f"{path}: there is no such file")
    where = located(path)
    if path.is_dir() and not where.exists():
        raise Refused(f"{path}: expected a folder with {where.name} in it, which regard.Monitor writes")
    try:
        if where.stat().st_size == 0:
            raise Refused(f"{where}: expected a run file, got an empty one")
        with where.open("rb") as file:
            head = file.read(64)
        if where.suffix == ".json" and head.lstrip().startswith(b"{"):
            return "inspection", read_record(where)
        if len(head) > 8 and head[8:9] == b"{":  # safetensors: the header's length, then the header
            found = Inspection.load(where)
            if not found.layers:
                hint = f"regard inspect with --run {where} continues it"
                raise Refused(f"{where}: expected a run with a finished sequence, got one that ended before: {hint}")
            return "inspection", found.record()
        return "training", read_run(where)
    except (OSError, ValueError) as error:
        raise Refused(f"{error}") from None


def judge(fail_on: list[str]) -> Callable[[dict[str, Any]], bool]:
    """A function that tells whether --fail-on names a finding: by its rule, by its severity, or by a lower severity."""
    for name in fail_on:
        known = (*SEVERITIES, *rule_names())
        if name not in known:
            raise Refused(f"--fail-on: expected one of {', '.join(known)}, got {name!r}")

    def fails(finding: dict[str, Any]) -> bool:
        if finding["value"] is None:  # the rule could not be checked
            return False
        rank = SEVERITIES.index(finding["severity"])
        return finding["rule"] in fail_on or any(s in fail_on for s in SEVERITIES[rank:])

    return fails
