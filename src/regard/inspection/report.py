"""The report: one HTML file that needs nothing else. page.html, page.css and page.js are joined here with the record,
and the page computes nothing that the record does not hold: the views are drawn from what `to_json()` writes."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from .findings import SEVERITIES, Finding, check_format, find, verdict


def to_html(record: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """The page for a record (`Inspection.to_json()` as a dict), compared with another one if given.

    Nothing is loaded from anywhere, and the page's own policy forbids it; text from the record is shown, never run.
    Findings are taken from the record; where it has none, the rules are applied with their default thresholds.
    """
    check_format(record)
    found = _findings(record)
    data: dict[str, Any] = {"record": _with(record, found), "other": None, "obstacle": None}
    if other is not None:
        check_format(other, "other")
        found_there = _findings(other)
        data["other"] = _with(other, found_there)
        data["other_verdict"] = verdict(other, found_there)
        data["obstacle"] = incomparable(record, other)
    style, script = _part("page.css"), _part("page.js")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    parts = {
        "policy": f"{policy}; form-action 'none'",
        "model": html.escape(str(record.get("provenance", {}).get("model") or "model")),
        "severity": next((s for s in SEVERITIES if any(f.severity == s for f in found)), "note"),
        "verdict": html.escape(verdict(record, found)),
        "style": style,
        "script": script,
        "data": _embedded(data),
    }
    # One pass: what is inserted is not searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))


def incomparable(record: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Why two records cannot be compared head by head, or None."""
    first, second = ({(h["layer"], h["head"]) for h in r["heads"]} for r in (record, other))
    if first == second:
        return None
    return f"Not compared head by head: the first has {_shape(first)}, the second {_shape(second)}."


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
    """JSON that no HTML parser takes for anything else: no "<", so neither "</script" nor "<!--"."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
