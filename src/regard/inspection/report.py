"""The reports: one HTML file each, which loads nothing else.

The page of an inspection is made of page.html, page.css, plots.js, heads.js, sequence.js, panel.js and page.js; the
page of a training run of training.html, page.css, plots.js and training.js. The record is embedded as JSON, and the
scripts draw it: all statistics are computed in Python.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from importlib import resources
from typing import Any

from .findings import check_format, find, verdict
from .rules import SEVERITIES, Finding
from .token_texts import first_words


def to_html(record: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """The page for a record (`Inspection.to_json()` as a dict), compared with another one if given.

    The page loads nothing, and its content security policy forbids it. Text of the record is shown, never executed.
    The findings are those of the record; if it has none, the rules are applied with their default thresholds.
    """
    check_format(record)
    found = _findings(record)
    data: dict[str, Any] = {"record": _with(record, found), "other": None, "obstacle": None, "names": []}
    if other is not None:
        check_format(other, "other")
        found_there = _findings(other)
        data["other"] = _with(other, found_there)
        data["other_verdict"] = verdict(other, found_there)
        data["obstacle"] = incomparable(record, other)
        data["names"] = labels(record, other)
    words = {
        "model": html.escape(str(record.get("provenance", {}).get("model") or "model")),
        "severity": next((s for s in SEVERITIES if any(f.severity == s for f in found)), "note"),
        "verdict": html.escape(verdict(record, found)),
    }
    return _page("page", ("plots.js", "heads.js", "sequence.js", "panel.js", "page.js"), words, data)


def training_html(record: dict[str, Any]) -> str:
    """The page for a training run (`journal.read_run`): the metrics of each layer by step, and the events."""
    about = record["about"]
    words = {
        "model": html.escape(str(about.get("checkpoint") or about.get("model") or "model")),
        "severity": next((s for s in SEVERITIES if any(e["severity"] == s for e in record["events"])), "note"),
        "verdict": html.escape(training_verdict(record)),
    }
    return _page("training", ("plots.js", "training.js"), words, record)


def training_verdict(record: dict[str, Any]) -> str:
    """One line: the rules with events, how many, and the first step of each."""
    events, steps = record["events"], record["steps"]
    counts = Counter(event["rule"] for event in events)
    parts = []
    for rule, count in counts.items():
        first = min(event["step"] for event in events if event["rule"] == rule)
        parts.append(f"{rule} at step {first:,}" if count == 1 else f"{count} × {rule}, first at step {first:,}")
    span = f"steps {steps[0]:,} to {steps[-1]:,}"
    return f"{'; '.join(parts)}." if parts else f"Nothing alarming in {span}."


def _page(name: str, scripts: tuple[str, ...], words: dict[str, str], data: object) -> str:
    """The page with its parts inserted. Its policy allows its own script and style only."""
    style, script = _part("page.css"), "".join(map(_part, scripts))
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    parts = words | {
        "policy": f"{policy}; form-action 'none'",
        "style": style,
        "script": script,
        "data": _embedded(data),
    }
    # One pass: inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part(f"{name}.html"))


def incomparable(record: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Why two records cannot be compared head by head, or None."""
    first, second = ({(h["layer"], h["head"]) for h in r["heads"]} for r in (record, other))
    if first == second:
        return None
    return f"Not compared head by head: the first has {_shape(first)}, the second {_shape(second)}."


def labels(record: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """What tells two records apart: the models' names. If they are the same, the words of the texts, the names of the
    texts, or else the order."""
    first, second = (r.get("provenance") or {} for r in (record, other))
    for key, form in (("model", "{}"), ("begins_with", "“{}”"), ("text", "{}")):
        a, b = (str(about.get(key) or "") for about in (first, second))
        if a and b and a != b:
            start = _where_words_differ(a, b) if key == "begins_with" else 0
            return form.format(_label(a, start)), form.format(_label(b, start))
    model = str(first.get("model") or "model")
    return f"{model} (first)", f"{model} (second)"


LABEL = 40  # characters


def _where_words_differ(a: str, b: str) -> int:
    """Where labels begin: at 0, or if the first words are the same, at the first word that is not."""
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return 0 if same < LABEL // 2 else a.rfind(" ", 0, same) + 1


def _label(text: str, start: int) -> str:
    return ("… " if start else "") + first_words(text[start:], LABEL)


def _shape(heads: set[tuple[int, int]]) -> str:
    layers = len({layer for layer, _ in heads})
    text = f"{layers} layer{'' if layers == 1 else 's'} with {len(heads)} heads in all"
    return text if len(heads) % layers else f"{text} ({len(heads) // layers} each)"


def _findings(record: dict[str, Any]) -> list[Finding]:
    return [Finding(**entry) for entry in record.get("findings") or []] or find(record)


def _with(record: dict[str, Any], found: list[Finding]) -> dict[str, Any]:
    return {**record, "findings": [f.to_dict() for f in found]}


def _part(name: str) -> str:
    return resources.files("regard.inspection").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: object) -> str:
    """JSON without "<", so that an HTML parser finds neither "</script" nor "<!--" in it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
