"""The work of the commands `regard inspect` (find the model, read a text, inspect) and `regard report` (read a run
file of a training or of an inspection). `regard.cli` prints the results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..expressions import read_problem
from ..problem import Transport
from .findings import check_format
from .head_rules import Thresholds, rule_names
from .journal import located, read_run
from .result import Inspection
from .rules import SEVERITIES
from .run import inspect

_NUMBER = re.compile(r"([0-9][0-9,_]*)(k?)", re.IGNORECASE)  # of tokens, as somebody writes it: 30000, 30,000, 30k
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # 18 digits fit into 64 bits


class Refused(Exception):
    """An error that the user can fix; its text says how."""


@dataclass(frozen=True)
class Source:
    """What the model reads: a text or token ids, and the name of the file."""

    name: str
    text: str = ""
    ids: Tensor | None = None
    is_sample: bool = False  # the text that ships with regard


def read_source(text: Path | None, tokens: Path | None) -> Source:
    """The file of --text or --tokens, or the text that ships with regard."""
    if text is not None and tokens is not None:
        raise Refused("--text, --tokens: expected one of them, got both")
    if tokens is not None:
        words = _content(tokens, "--tokens").replace(",", " ").strip("[] \n").split()
        if wrong := next((word for word in words if not _INTEGER.fullmatch(word)), None):
            shown = wrong if len(wrong) <= 40 else wrong[:39] + "…"
            raise Refused(f"--tokens: expected integers of at most 18 digits, got {shown!r} in {tokens}")
        ids = torch.tensor([int(word) for word in words], dtype=torch.long)
        if len(ids) < 2:
            raise Refused(f"--tokens: expected at least 2 token ids, got {tokens} with {len(ids)}")
        return Source(tokens.name, ids=ids)
    if text is None:
        sample = resources.files("regard.inspection").joinpath("sample.txt")
        return Source("the sample text", sample.read_text("utf-8"), is_sample=True)
    content = _content(text, "--text")
    if not content.strip():
        raise Refused(f"--text: expected some text, got {text}, which is {'blank' if content else 'empty'}")
    return Source(text.name, content)


def check_models(names: Mapping[str, str]) -> None:
    """Raise if one of these models, by argument, cannot be found. None is loaded."""
    for argument, name in names.items():
        try:
            hf.locate(name)
        except (ImportError, ValueError) as error:
            raise Refused(f"{argument}: {str(error).removeprefix('model: ')}") from None


def check_run(run: Path | None) -> None:
    """Raise if there is a file at this path that is not a run file."""
    if run is not None and run.exists():
        try:
            Inspection.load(run)
        except OSError as error:
            raise Refused(f"--run: expected a new file or one that --run wrote, got {run}: {error}") from None
        except ValueError as error:
            raise Refused(f"--run: {str(error).removeprefix('path: ')}") from None


def examine(
    name: str,
    *,
    source: Source,
    length: int,
    limit: int | None,
    trust_remote_code: bool,
    thresholds: Thresholds,
    run: Path | None,
    problem: str | None = None,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Inspect a model by its name. Returns the record of the `Inspection`, with the names of the model and the text.
    `problem` is the text of a problem that the model's attention shall solve. `say` receives a line for each stage."""
    declared = None if problem is None else read_declared(problem)
    say(f"loading {name}")
    try:
        model, tokenizer = hf.load(name, trust_remote_code=trust_remote_code, problem=declared)
        ids = _token_ids(source, tokenizer, name)
        words = _vocabulary(model)
        if bool(((ids < 0) | (ids >= words)).any()):
            raise Refused(f"token ids: expected 0 to {words - 1}, got {int(ids.min())} to {int(ids.max())}")
        longest = _longest(model) or length
        pieces = _cut(ids if limit is None else ids[:limit], min(length, longest))
        say(_account(pieces, length, longest))
        if limit is not None and limit > len(ids):
            say(f"--max-tokens {limit}: {source.name} has no more{': use --text FILE' if source.is_sample else ''}")
        inspection = inspect(model, _arguments(model, pieces), patterns=True, views=True, tokenizer=tokenizer, run=run)
    except OSError as error:
        if run is None or error.filename is None or Path(error.filename) != run:
            raise Refused(str(error)) from None
        raise Refused(f"--run: expected a file that can be written, got {run}: {error.strerror}") from None
    except (ImportError, ValueError, NotImplementedError) as error:
        raise Refused(str(error)) from None
    inspection.about |= {"architecture": inspection.about["model"], "model": name, "text": source.name}
    return inspection.record(thresholds)


def read_declared(text: str) -> Transport:
    """The problem that --problem gives."""
    try:
        return read_problem(text)
    except (ValueError, TypeError) as error:
        raise Refused(f"--problem: {error}") from None


def _account(pieces: list[Tensor], length: int, of_model: int) -> str:
    """What is read, and why in how many sequences."""
    text = f"reading {sum(map(len, pieces)):,} tokens"
    if len(pieces) == 1:
        return text
    reason = "the model's limit" if of_model < length else "--length sets it"
    return f"{text} in {len(pieces)} sequences of at most {min(length, of_model):,} ({reason})"


def _token_ids(source: Source, tokenizer: Any, name: str) -> Tensor:
    if source.ids is not None:
        return source.ids
    if tokenizer is None:
        raise Refused(f"{name} has no tokenizer: give token ids with --tokens FILE")
    return torch.tensor(tokenizer(source.text, verbose=False)["input_ids"])  # not verbose: a long text is cut below


def _vocabulary(model: Any) -> int:
    """The number of tokens that the model knows."""
    reads, embeddings = model.main_input_name, model.get_input_embeddings()
    if reads != "input_ids" or not hasattr(embeddings, "num_embeddings"):
        raise Refused(
            f"model: expected one that reads tokens, got {type(model).__name__}, which reads {reads}: in Python, "
            "regard.inspect(model, inputs) takes any inputs"
        )
    return embeddings.num_embeddings


def _longest(model: Any) -> int | None:
    """The largest number of tokens that the model can read at once; None if it has no limit."""
    limits = [getattr(model.config, "max_position_embeddings", None)]
    for name, module in model.named_modules():  # in RoBERTa and its relatives, positions begin after that of padding
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min((limit for limit in limits if limit), default=None)


def _arguments(model: Any, pieces: list[Tensor]) -> list[dict[str, Tensor]]:
    """The arguments of the model for each piece. The decoder of an encoder-decoder model reads the same tokens."""
    names = ("input_ids", "decoder_input_ids") if model.config.is_encoder_decoder else ("input_ids",)
    return [dict.fromkeys(names, piece[None]) for piece in pieces]


def _content(path: Path, option: str) -> str:
    number = _NUMBER.fullmatch(str(path))
    if number and not path.exists():
        wanted = int(number[1].replace(",", "").replace("_", "")) * (1000 if number[2] else 1)
        hint = f"use --max-tokens {wanted} (in all) or --length {wanted} (in one sequence)"
        raise Refused(f"{option}: expected a file, got {path}. To read this many tokens, {hint}")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        raise Refused(f"{option}: expected a text file that can be read, got {path}: {reason}") from None


def _cut(ids: Tensor, length: int) -> list[Tensor]:
    """Sequences of at most this length. A last sequence of one token is dropped: it has no other token to attend to."""
    pieces = [piece for piece in ids.split(length) if len(piece) > 1]
    if not pieces:
        raise Refused(f"the text: expected at least 2 tokens, got {len(ids)}")
    return pieces


def read_record(path: Path, option: str) -> dict[str, Any]:
    """A record that `regard inspect --json` wrote. `option`: the one that names the file, for errors."""
    try:
        record = json.loads(_content(path, option))
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
            return "inspection", read_record(where, "RUN")
        if len(head) > 8 and head[8:9] == b"{":  # safetensors: the header's length, then the header
            found = Inspection.load(where)
            if not found.layers:
                hint = f"regard inspect with --run {where} continues it"
                raise Refused(f"{where}: expected a run with a finished sequence, got one that ended before: {hint}")
            return "inspection", found.record()
        return "training", read_run(where)
    except OSError as error:
        raise Refused(f"{where}: expected a file that can be read, got an error: {error.strerror}") from None
    except ValueError as error:
        raise Refused(str(error)) from None


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
