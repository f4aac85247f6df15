"""Named rules over a recorded inspection: which heads are sinks, dormant, peaked, ..., by which threshold, and whose.

A rule reads a few statistics of one head, as `Inspection.to_json()` writes them. Where a statistic is missing the rule
is skipped, and a finding without layer and head says so. Thresholds from practice carry their source; the others are
labelled ours. Rows count equally in every mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

FORMAT, VERSION = "regard-inspection", 1
SEVERITIES = ("alarm", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """What a rule says of a head; layer and head are None where it speaks of the whole model."""

    rule: str
    severity: str  # alarm: act; warning: look; note: know
    layer: int | None
    head: int | None
    value: float | None  # what was compared; None if the rule could not be checked
    threshold: float
    message: str
    why: str
    remedy: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Thresholds:
    """Where each rule draws its line. "More than" and "less than" are meant strictly."""

    sink: float = 0.3  # more mean weight than this on the first key
    dormant: float = 0.2  # a sink whose output norm, relative to its layer, is less than this
    peaked_entropy: float = 0.1  # mean H / log n less than this, and ...
    peaked_weight: float = 0.9  # ... mean largest weight more than this
    diffuse: float = 0.95  # mean H / log n more than this
    max_score: float = 100.0  # largest score more than this
    previous_token: float = 0.4  # more mean weight than this on the key before the query's own
    self_token: float = 0.4  # ... on the query's own key
    first_token: float = 0.4  # ... on the first key
    induction: float = 0.4  # ... on the keys that follow an earlier copy of the query's token
    hedging: float = 4.0  # mean variance of the scores more than this
    committed_variance: float = 0.25  # mean variance of the scores less than this, and ...
    committed_entropy: float = 0.1  # ... mean H / log n less than this
    over_peaked: float = 1.0  # mean entropy, in nats, less than this
    over_peaked_share: float = 0.5  # "consistently": in more than this share of all heads, sinks not counted

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise ValueError(f"{name}: expected a number, got {value!r}")


class _Head:
    """One head's statistics; asking for one that is not there raises `_Missing`."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.layer, self.head = entry["layer"], entry["head"]
        self._entry = entry

    def mean(self, name: str) -> float:
        return self._get("mean", name)

    def max(self, name: str) -> float:
        return self._get("max", name)

    def has(self, name: str) -> bool:
        return self._entry.get("mean", {}).get(name) is not None

    def _get(self, kind: str, name: str) -> float:
        value = self._entry.get(kind, {}).get(name)
        if value is None:
            raise _Missing(name)
        return value


class _Missing(Exception):
    pass


@dataclass(frozen=True)
class _Rule:
    """`test` gives the value, its threshold and a sentence if the rule applies to the head, else None."""

    name: str
    severity: str
    threshold: str  # the field of Thresholds that a rule which could not be checked shows
    test: Callable[[_Head, Thresholds], tuple[float, float, str] | None]
    why: str
    remedy: str
    source: str


# --- the rules --------------------------------------------------------------------------------------------------------


def _logit_alarm(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    value = head.max("max_scores")
    if not value > limits.max_score:
        return None
    return value, limits.max_score, f"largest score {_show(value)}, more than {_show(limits.max_score)}"


def _peaked(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    share, weight = head.mean("normalized_entropy"), head.mean("max_weight")
    if not (share < limits.peaked_entropy and weight > limits.peaked_weight):
        return None
    message = f"H / log n {_show(share)}, less than {_show(limits.peaked_entropy)}, and largest weight {_show(weight)}"
    return share, limits.peaked_entropy, f"{message}, more than {_show(limits.peaked_weight)}, in the mean"


def _diffuse(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    share = head.mean("normalized_entropy")
    if not share > limits.diffuse:
        return None
    return share, limits.diffuse, f"mean H / log n {_show(share)}, more than {_show(limits.diffuse)}"


def _over_peaked(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    entropy = head.mean("entropy")
    if not entropy < limits.over_peaked:
        return None
    beside = f" (H / log n {_show(head.mean('normalized_entropy'))})" if head.has("normalized_entropy") else ""
    return entropy, limits.over_peaked, f"mean entropy {_show(entropy)} nats{beside}, less than {limits.over_peaked:g}"


def _sink(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    return _weight_on(head, "first_key_mass", limits.sink, "the first key")


def _dormant(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    norm, mass = head.mean("relative_norm"), head.mean("first_key_mass")
    if not (norm < limits.dormant and mass > limits.sink):
        return None
    message = f"output norm {_show(norm)} of its layer's mean, less than {_show(limits.dormant)}"
    return norm, limits.dormant, f"{message}, and {_show(mass)} of the weight on the first key"


def _previous_token(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    return _weight_on(head, "previous_token", limits.previous_token, "the token before")


def _self(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    return _weight_on(head, "self_token", limits.self_token, "the query's own token")


def _first_token(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    name = "first_token" if head.has("first_token") else "first_key_mass"
    return _weight_on(head, name, limits.first_token, "the first token")


def _induction(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    return _weight_on(head, "induction", limits.induction, "what followed the token last time")


def _hedging(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    variance, share = head.mean("score_variance"), head.mean("normalized_entropy")
    if not variance > limits.hedging:
        return None
    message = f"score variance {_show(variance)}, more than {_show(limits.hedging)}, at H / log n {_show(share)}"
    return variance, limits.hedging, f"{message}: 10 % more temperature adds about {_show(variance * 0.0953)} nats"


def _committed(head: _Head, limits: Thresholds) -> tuple[float, float, str] | None:
    variance, share = head.mean("score_variance"), head.mean("normalized_entropy")
    if not (variance < limits.committed_variance and share < limits.committed_entropy):
        return None
    message = f"score variance {_show(variance)}, less than {_show(limits.committed_variance)}, and H / log n"
    return variance, limits.committed_variance, f"{message} {_show(share)}, less than {_show(limits.committed_entropy)}"


def _weight_on(head: _Head, name: str, threshold: float, where: str) -> tuple[float, float, str] | None:
    value = head.mean(name)
    if not value > threshold:
        return None
    return value, threshold, f"mean weight {_show(value)} on {where}, more than {_show(threshold)}"


_TUTORIAL = "the usual line in TransformerLens exercises (ARENA): mean weight > 0.4"

_RULES = (
    _Rule(
        "logit-alarm",
        "alarm",
        "max_score",
        _logit_alarm,
        "Scores this large make the softmax one-hot, its gradient vanish and half precision lose digits; in training "
        "they go on growing and end in loss spikes.",
        "QK-clip (regard.nn.qk_clip_: rescale the query and key weights of this head), QK-norm, a softcap, or a "
        "smaller learning rate.",
        "QK-clip (Kimi K2) and Megatron's default: largest score > 100",
    ),
    _Rule(
        "peaked",
        "warning",
        "peaked_entropy",
        _peaked,
        "Nearly every query reads one key: almost no gradient reaches the scores, so the head can hardly change its "
        "mind.",
        "Look at which key it reads (a fixed place is a pattern, not a fault). Otherwise: check the scale 1/√d, raise "
        "the temperature, add QK-norm or a floor on the entropy (regard.nn.entropy_floor).",
        "ours: mean H / log n < 0.1 and mean largest weight > 0.9",
    ),
    _Rule(
        "over-peaked",
        "note",
        "over_peaked",
        _over_peaked,
        "Entropy consistently below 1 nat is taken as a sign of over-peaked attention, often a fault of scaling. Mind "
        "that the number depends on the length: with n keys entropy cannot exceed log n, so rows of one or two keys "
        "are always below 1 nat, while at 4096 keys 1 nat is 12 % of the maximum. Read it beside H / log n.",
        "If most heads are like this, look for a missing or doubled scale and for a large initialisation. A single "
        "head that reads a fixed place (first, previous, own token) needs nothing.",
        'the article "Understanding Softmax: The Mathematical Foundation Behind Transformer Attention" (below 1.0), '
        "which names no source",
    ),
    _Rule(
        "diffuse",
        "note",
        "diffuse",
        _diffuse,
        "The head averages over nearly all keys: it passes on the mean of the values, hardly a choice. Early in "
        "training, and in first layers, that is normal; late, the head may be unused.",
        "Compare with an earlier checkpoint; a learned temperature lets the head sharpen; a head that stays diffuse "
        "is a candidate for pruning or for cheaper (linear) attention.",
        "ours: mean H / log n > 0.95",
    ),
    _Rule(
        "sink",
        "note",
        "sink",
        _sink,
        "Softmax rows must put their mass somewhere; a head with nothing to say parks it on the first key. The key "
        "becomes indispensable: dropping it from a cache, or quantising its outliers, breaks the model.",
        "Keep the first tokens in the cache (StreamingLLM); give each head a learned sink (regard.hf.retrofit adds one "
        "to a trained model) or a gate.",
        "Attention-Sink (sail-sg): mean weight over the queries that see the key > 0.3",
    ),
    _Rule(
        "dormant",
        "note",
        "dormant",
        _dormant,
        "The head parks its mass on a key whose value is small and so adds next to nothing on this text.",
        "A candidate for pruning; check on other text first, for a dormant head may wake on other input.",
        "after arXiv 2504.03889 (a sink, and a small output norm relative to the layer); the threshold 0.2 is ours",
    ),
    _Rule(
        "previous-token",
        "note",
        "previous_token",
        _previous_token,
        "The head copies from one token back. Such heads are the first half of induction circuits.",
        "Nothing to mend: a part to know before pruning or before changing position encodings.",
        _TUTORIAL,
    ),
    _Rule(
        "self",
        "note",
        "self_token",
        _self,
        "Each token reads mostly itself: the head acts like one more feed-forward layer.",
        "Nothing to mend; in many layers it suggests that attention is not needed there.",
        _TUTORIAL,
    ),
    _Rule(
        "first-token",
        "note",
        "first_token",
        _first_token,
        "The head's main target is the first token, whatever the query.",
        "As for a sink; look at the value of the first token to tell a parked head from one that reads a marker.",
        _TUTORIAL,
    ),
    _Rule(
        "induction",
        "note",
        "induction",
        _induction,
        "The head finds an earlier copy of the current token and reads what followed: the mechanism behind in-context "
        "copying.",
        "Nothing to mend: protect it when pruning or compressing the cache.",
        _TUTORIAL,
    ),
    _Rule(
        "hedging",
        "note",
        "hedging",
        _hedging,
        "The scores differ much among the keys that share the mass, so the entropy moves with the temperature (the "
        "variance is dH/d ln τ under a 0/1 mask): the head has not decided, and longer context or quantised scores "
        "change what it reads.",
        "A learned temperature per head (regard.hf.retrofit) has most to gain here; scaling by log n keeps such heads "
        "from flattening on longer text.",
        "ours: mean score variance > 4; read beside the entropy",
    ),
    _Rule(
        "committed",
        "note",
        "committed_variance",
        _committed,
        "Low entropy and no answer to the temperature: the choice of key is settled and no moderate rescaling changes "
        "it.",
        "Safe to compute with few keys or low precision; a learned temperature would get no gradient here.",
        "ours: mean score variance < 0.25 and mean H / log n < 0.1 (at a uniform plan the variance vanishes, too)",
    ),
)

_PLACES = ("sink", "previous-token", "self", "first-token", "induction")  # reading a known place explains a peak


def find(record: dict[str, Any], thresholds: Thresholds | None = None) -> list[Finding]:
    """All that the rules say of a record (`Inspection.to_json()` as a dict): gravest first, then by rule and head."""
    check_format(record)
    limits = Thresholds() if thresholds is None else thresholds
    if not isinstance(limits, Thresholds):
        raise TypeError(f"thresholds: expected a Thresholds or None, got {thresholds!r}")
    heads = [_Head(entry) for entry in record["heads"]]
    found: list[Finding] = []
    for rule in _RULES:
        if (reason := _pointless(rule.name, record, limits)) is not None:
            found.append(_skipped(rule, limits, reason))
            continue
        missing: list[str] = []
        for head in heads:
            try:
                outcome = rule.test(head, limits)
            except _Missing as error:
                missing.append(str(error))
                continue
            if outcome is not None:
                value, threshold, message = outcome
                found.append(_finding(rule, rule.severity, head.layer, head.head, value, threshold, message))
        if missing:
            names = ", ".join(sorted(set(missing)))
            where = "" if len(missing) == len(heads) else f" for {len(missing)} of {len(heads)} heads"
            found.append(_skipped(rule, limits, f"not checked{where}: the record has no value of {names}"))
    found = [*_consistently(found, len(heads), limits), *_explained(found)]
    rules = [rule.name for rule in _RULES]
    order = {f: (SEVERITIES.index(f.severity), rules.index(f.rule), f.layer is not None) for f in found}
    return sorted(found, key=lambda f: order[f])  # stable: heads stay in the record's order


def _finding(
    rule: _Rule, severity: str, layer: int | None, head: int | None, value: float | None, limit: float, message: str
) -> Finding:
    return Finding(rule.name, severity, layer, head, value, limit, message, rule.why, rule.remedy, rule.source)


def _skipped(rule: _Rule, limits: Thresholds, reason: str) -> Finding:
    return _finding(rule, "note", None, None, None, getattr(limits, rule.threshold), reason)


def _pointless(rule: str, record: dict[str, Any], limits: Thresholds) -> str | None:
    """Why a rule could not tell one head from another here, or None."""
    if rule != "over-peaked":
        return None
    positions = record.get("positions") or {}
    weights, curves = positions.get("rows", []), positions.get("null_entropy", [])
    nulls = [sum(n * (h or 0) for n, h in zip(weights, curve, strict=False)) for curve in curves]
    rows = sum(weights)
    null = max(nulls) / rows if rows and nulls else math.inf  # the head with most keys
    if null >= limits.over_peaked:
        return None
    return f"not checked: with so few keys even a uniform plan has only {_show(null)} nats in the mean"


def _consistently(found: list[Finding], heads: int, limits: Thresholds) -> Iterable[Finding]:
    """The over-peaked rule's word "consistently": a warning for the model. Sinks are parked, not saturated."""
    sinks = {(f.layer, f.head) for f in found if f.rule == "sink"}
    hits = [f for f in found if f.rule == "over-peaked" and f.layer is not None and (f.layer, f.head) not in sinks]
    if hits and len(hits) / heads > limits.over_peaked_share:
        rule = next(rule for rule in _RULES if rule.name == "over-peaked")
        message = (
            f"{len(hits)} of {heads} heads, sinks not counted, have a mean entropy less than {limits.over_peaked:g} nat"
        )
        yield _finding(rule, "warning", None, None, len(hits) / heads, limits.over_peaked_share, message)


def _explained(found: list[Finding]) -> Iterable[Finding]:
    """A peaked head that reads a known place is a note, not a warning."""
    places: dict[tuple[int | None, int | None], list[str]] = {}
    for f in found:
        if f.rule in _PLACES and f.layer is not None:
            places.setdefault((f.layer, f.head), []).append(f.rule)
    for f in found:
        known = places.get((f.layer, f.head))
        if f.rule == "peaked" and f.layer is not None and known:
            message = f"{f.message}; it reads a known place ({', '.join(known)})"
            yield Finding(**{**f.to_dict(), "severity": "note", "message": message})
        else:
            yield f


# --- in one line ------------------------------------------------------------------------------------------------------

RULES = tuple(rule.name for rule in _RULES)
_COUNTED = (  # first-token says little beside sink
    "sink", "dormant", "peaked", "over-peaked", "diffuse", "previous-token", "self", "induction", "hedging",
    "committed",
)  # fmt: skip


def verdict(record: dict[str, Any], findings: Iterable[Finding]) -> str:
    """One line: what is alarming, else what the heads mostly are."""
    findings = list(findings)
    graves = []
    for severity in ("alarm", "warning"):
        of_kind = [f for f in findings if f.severity == severity]
        if of_kind:
            graves.append(f"{_count(len(of_kind), severity)} ({_worst(of_kind)})")
    heads = _count(len(record["heads"]), "head")
    counts = Counter(f.rule for f in findings if f.layer is not None)
    named = {rule: _count(counts[rule], rule) if rule == "sink" else f"{counts[rule]} {rule}" for rule in _COUNTED}
    parts = [named[rule] for rule in _COUNTED if counts[rule]]
    sentences = [", ".join(graves) if graves else "Nothing alarming"]
    if parts:
        sentences.append(f"Of {heads}: {', '.join(parts)}")
    elif not graves and not counts:
        sentences.append(f"No rule applies to its {heads}")
    if skipped := [f.rule for f in findings if f.layer is None and f.value is None and f.rule not in counts]:
        sentences.append(f"Not checked: {', '.join(skipped)}")
    return ". ".join(sentences) + "."


def _worst(findings: list[Finding]) -> str:
    """Each rule once: how often, or where and by how much."""
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
            parts.append(f"{rule} in layer {f.layer}, head {f.head}: {_show(f.value)} against {_show(f.threshold)}")
    return "; ".join(parts)


def check_format(record: object, name: str = "record") -> None:
    """Raise unless this is a record that this version of regard reads."""
    if not isinstance(record, dict):
        raise TypeError(f"{name}: expected a dict as Inspection.to_json() describes it, got {type(record).__name__}")
    got = record.get("format"), record.get("version")
    if got != (FORMAT, VERSION):
        raise ValueError(f"{name}: expected format {FORMAT!r}, version {VERSION}, got {got[0]!r}, version {got[1]!r}")
    for part in ("statistics", "heads"):
        if not isinstance(record.get(part), list) or not record[part]:
            raise ValueError(f"{name}: expected a list of at least one in {part!r}, got {record.get(part)!r}")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _show(value: float) -> str:
    return f"{value:.3g}"
