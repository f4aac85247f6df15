"""`find`: applies the named rules to a record; `verdict`: the findings in one line.

If the record has no value of a statistic that a rule needs, the rule is skipped, and a finding without layer and head
reports this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .head_rules import HEAD_RULES, Head, HeadRule, Missing, Thresholds, rule_names
from .numbers import count_of, short
from .rules import SEVERITIES, Finding

FORMAT, VERSION, READABLE = "regard-inspection", 2, (1, 2)  # version 2: the map, parts of characters, begins_with
_POSITIONS = ("sink", "previous-token", "self", "first-token", "induction")  # reading a known position explains a peak


def find(record: dict[str, Any], thresholds: Thresholds | None = None) -> list[Finding]:
    """What the rules find in a record (`Inspection.to_json()` as a dict): the most severe first, then by rule and
    head."""
    check_format(record)
    limits = Thresholds() if thresholds is None else thresholds
    if not isinstance(limits, Thresholds):
        raise TypeError(f"thresholds: expected a Thresholds or None, got {thresholds!r}")
    heads = [Head(entry) for entry in record["heads"]]
    found: list[Finding] = []
    for entry in HEAD_RULES:
        found += _apply(entry, record, heads, limits)
    found = [*_over_peaked_model(found, len(heads), limits), *_explained_peaks(found)]
    rules = rule_names()
    order = {f: (SEVERITIES.index(f.severity), rules.index(f.rule), f.layer is not None) for f in found}
    return sorted(found, key=lambda f: order[f])  # stable: heads stay in the record's order


def _apply(entry: HeadRule, record: dict[str, Any], heads: list[Head], limits: Thresholds) -> Iterable[Finding]:
    """One rule over all heads."""
    if (reason := _not_applicable(entry.rule.name, record, limits)) is not None:
        yield _not_checked(entry, limits, reason)
        return
    missing: list[str] = []
    for head in heads:
        try:
            outcome = entry.test(head, limits)
        except Missing as error:
            missing.append(str(error))
            continue
        if outcome is not None:
            value, threshold, message = outcome
            place = {"layer": head.layer, "head": head.head}
            yield Finding(**entry.rule.text(), **place, value=value, threshold=threshold, message=message)
    if missing:
        where = "" if len(missing) == len(heads) else f" for {len(missing)} of {len(heads)} heads"
        yield _not_checked(entry, limits, f"not checked{where}: {_why_missing(record, sorted(set(missing)))}")


def _why_missing(record: dict[str, Any], names: list[str]) -> str:
    """Why statistics have no value: they were not recorded, or this text has no row that defines them."""
    verb = "was" if len(names) == 1 else "were"
    if not set(names) <= set(record["statistics"]):
        return f"{', '.join(names)} {verb} not recorded"
    if names == ["induction"]:
        return "in this text no token occurs again, which induction needs"
    return f"no query of this text has a value of {', '.join(names)}"


def _not_checked(entry: HeadRule, limits: Thresholds, reason: str) -> Finding:
    text = entry.rule.text() | {"severity": "note"}
    threshold = getattr(limits, entry.threshold) if isinstance(entry.threshold, str) else entry.threshold
    return Finding(**text, layer=None, head=None, value=None, threshold=threshold, message=reason)


def _not_applicable(rule: str, record: dict[str, Any], limits: Thresholds) -> str | None:
    """Why a rule cannot tell heads apart in this record, or None."""
    if rule != "over-peaked":
        return None
    positions = record.get("positions") or {}
    weights, curves = positions.get("rows", []), positions.get("null_entropy", [])
    nulls = [sum(n * (h or 0) for n, h in zip(weights, curve, strict=False)) for curve in curves]
    rows = sum(weights)
    null = max(nulls) / rows if rows and nulls else math.inf  # of the head with the most keys
    if null >= limits.over_peaked:
        return None
    return f"not checked: with so few keys even a uniform plan has a mean entropy of only {short(null)} nats"


def _over_peaked_model(found: list[Finding], heads: int, limits: Thresholds) -> Iterable[Finding]:
    """A warning about the model if most heads are over-peaked. Sinks, whose peak is the first key, do not count."""
    sinks = {(f.layer, f.head) for f in found if f.rule == "sink"}
    hits = [f for f in found if f.rule == "over-peaked" and f.layer is not None and (f.layer, f.head) not in sinks]
    if hits and len(hits) / heads > limits.over_peaked_share:
        message = (
            f"{len(hits)} of {heads} heads, sinks not counted, have a mean entropy less than {limits.over_peaked:g} nat"
        )
        changes: dict[str, Any] = {"severity": "warning", "layer": None, "head": None, "message": message}
        yield replace(hits[0], value=len(hits) / heads, threshold=limits.over_peaked_share, **changes)


def _explained_peaks(found: list[Finding]) -> Iterable[Finding]:
    """The findings, with a note in place of the warning for a peaked head that reads a known position."""
    positions: dict[tuple[int | None, int | None], list[str]] = {}
    for f in found:
        if f.rule in _POSITIONS and f.layer is not None:
            positions.setdefault((f.layer, f.head), []).append(f.rule)
    for f in found:
        known = positions.get((f.layer, f.head))
        if f.rule == "peaked" and f.layer is not None and known:
            yield replace(f, severity="note", message=f"{f.message}; it reads a known position ({', '.join(known)})")
        else:
            yield f


# --- in one line ------------------------------------------------------------------------------------------------------

_COUNTED = (  # without first-token, which adds little to sink
    "sink", "dormant", "peaked", "over-peaked", "diffuse", "previous-token", "self", "induction", "hedging",
    "committed",
)  # fmt: skip


def verdict(record: dict[str, Any], findings: Iterable[Finding]) -> str:
    """One line: the alarms and warnings, and how many heads of each kind there are."""
    findings = list(findings)
    severe = []
    for severity in ("alarm", "warning"):
        of_kind = [f for f in findings if f.severity == severity]
        if of_kind:
            severe.append(f"{count_of(len(of_kind), severity)} ({_by_rule(of_kind)})")
    heads = count_of(len(record["heads"]), "head")
    counts = Counter(f.rule for f in findings if f.layer is not None)
    named = {rule: count_of(counts[rule], rule) if rule == "sink" else f"{counts[rule]} {rule}" for rule in _COUNTED}
    parts = [named[rule] for rule in _COUNTED if counts[rule]]
    sentences = [", ".join(severe) if severe else "Nothing alarming"]
    if parts:
        sentences.append(f"Of {heads}: {', '.join(parts)}")
    elif not severe and not counts:
        sentences.append(f"No rule applies to its {heads}")
    if skipped := [f.rule for f in findings if f.layer is None and f.value is None and f.rule not in counts]:
        sentences.append(f"Not checked: {', '.join(skipped)}")
    return ". ".join(sentences) + "."


def _by_rule(findings: list[Finding]) -> str:
    """Each rule once: in how many heads, or in which head and by how much."""
    by_rule: dict[str, list[Finding]] = {}
    for f in findings:
        by_rule.setdefault(f.rule, []).append(f)
    parts = []
    for rule, group in by_rule.items():
        f = group[0]
        if len(group) > 1:
            parts.append(f"{rule} in {len(group)} heads")
        elif f.layer is None or f.value is None:
            parts.append(f"{rule}: {f.message}")
        else:
            parts.append(f"{rule} in layer {f.layer}, head {f.head}: {short(f.value)} against {short(f.threshold)}")
    return "; ".join(parts)


def check_format(record: object, name: str = "record") -> None:
    """Raise unless this is a record that this version of regard can read."""
    if not isinstance(record, dict):
        raise TypeError(f"{name}: expected a dict as Inspection.to_json() describes it, got {type(record).__name__}")
    got = record.get("format"), record.get("version")
    if got[0] != FORMAT or got[1] not in READABLE:
        known = " or ".join(map(str, READABLE))
        raise ValueError(f"{name}: expected format {FORMAT!r}, version {known}, got {got[0]!r}, version {got[1]!r}")
    for part in ("statistics", "heads"):
        if not isinstance(record.get(part), list) or not record[part]:
            raise ValueError(f"{name}: expected a list of at least one in {part!r}, got {record.get(part)!r}")
