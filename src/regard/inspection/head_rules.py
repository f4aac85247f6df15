"""The named rules about one head of an inspection: each with its threshold and the source of the threshold.

A rule reads a few statistics of a head from the record (`Inspection.to_json()`). Thresholds from the literature or from
other tools name their source; the others are labelled "ours". All rows count equally in a mean. A new rule is one
function and one entry of `HEAD_RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .numbers import short
from .rules import LOGIT_ALARM, Rule


@dataclass(frozen=True)
class Thresholds:
    """The threshold of each rule. "More than" and "less than" are strict."""

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


class Missing(Exception):
    """The record has no value of this statistic for the head."""


class Head:
    """The statistics of one head. Reading one that the record does not have raises `Missing`."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.layer, self.head = entry["layer"], entry["head"]
        self._entry = entry

    def mean(self, name: str) -> float:
        return self._get("mean", name)

    def max(self, name: str) -> float:
        return self._get("max", name)

    def not_finite(self) -> tuple[int, int]:
        """The number of rows whose output is NaN or infinite, and of all. Records of version 1 did not count them."""
        return self._entry.get("not_finite", 0), self._entry.get("rows", 0)

    def has(self, name: str) -> bool:
        return self._entry.get("mean", {}).get(name) is not None

    def _get(self, kind: str, name: str) -> float:
        value = self._entry.get(kind, {}).get(name)
        if value is None:
            raise Missing(name)
        return value


Outcome = tuple[float, float, str] | None  # the value, its threshold and a message if the rule applies, else None


@dataclass(frozen=True)
class HeadRule:
    rule: Rule
    threshold: str | float  # a field of Thresholds, or a number: shown if the rule could not be checked
    test: Callable[[Head, Thresholds], Outcome]


def _not_finite(head: Head, _: Thresholds) -> Outcome:
    lost, rows = head.not_finite()
    return (lost / rows, 0.0, f"the output of {lost:,} of {rows:,} rows is NaN or infinite") if lost else None


def _logit_alarm(head: Head, limits: Thresholds) -> Outcome:
    value = head.max("max_scores")
    if not value > limits.max_score:
        return None
    return value, limits.max_score, f"largest score {short(value)}, more than {short(limits.max_score)}"


def _peaked(head: Head, limits: Thresholds) -> Outcome:
    share, weight = head.mean("normalized_entropy"), head.mean("max_weight")
    if not (share < limits.peaked_entropy and weight > limits.peaked_weight):
        return None
    message = (
        f"mean H / log n {short(share)}, less than {short(limits.peaked_entropy)}, and mean largest weight "
        f"{short(weight)}, more than {short(limits.peaked_weight)}"
    )
    return share, limits.peaked_entropy, message


def _diffuse(head: Head, limits: Thresholds) -> Outcome:
    share = head.mean("normalized_entropy")
    if not share > limits.diffuse:
        return None
    return share, limits.diffuse, f"mean H / log n {short(share)}, more than {short(limits.diffuse)}"


def _over_peaked(head: Head, limits: Thresholds) -> Outcome:
    entropy = head.mean("entropy")
    if not entropy < limits.over_peaked:
        return None
    beside = f" (H / log n {short(head.mean('normalized_entropy'))})" if head.has("normalized_entropy") else ""
    return entropy, limits.over_peaked, f"mean entropy {short(entropy)} nats{beside}, less than {limits.over_peaked:g}"


def _sink(head: Head, limits: Thresholds) -> Outcome:
    return _weight_on(head, "first_key_mass", limits.sink, "the first key")


def _dormant(head: Head, limits: Thresholds) -> Outcome:
    norm, mass = head.mean("relative_norm"), head.mean("first_key_mass")
    if not (norm < limits.dormant and mass > limits.sink):
        return None
    message = f"output norm {short(norm)} of its layer's mean, less than {short(limits.dormant)}"
    return norm, limits.dormant, f"{message}, and {short(mass)} of the weight on the first key"


def _previous_token(head: Head, limits: Thresholds) -> Outcome:
    return _weight_on(head, "previous_token", limits.previous_token, "the token before")


def _self(head: Head, limits: Thresholds) -> Outcome:
    return _weight_on(head, "self_token", limits.self_token, "the query's own token")


def _first_token(head: Head, limits: Thresholds) -> Outcome:
    name = "first_token" if head.has("first_token") else "first_key_mass"
    return _weight_on(head, name, limits.first_token, "the first token")


def _induction(head: Head, limits: Thresholds) -> Outcome:
    return _weight_on(head, "induction", limits.induction, "what followed the token last time")


def _hedging(head: Head, limits: Thresholds) -> Outcome:
    variance, share = head.mean("score_variance"), head.mean("normalized_entropy")
    if not variance > limits.hedging:
        return None
    message = f"score variance {short(variance)}, more than {short(limits.hedging)}, at H / log n {short(share)}"
    return variance, limits.hedging, f"{message}: 10 % more temperature adds about {short(variance * 0.0953)} nats"


def _committed(head: Head, limits: Thresholds) -> Outcome:
    variance, share = head.mean("score_variance"), head.mean("normalized_entropy")
    if not (variance < limits.committed_variance and share < limits.committed_entropy):
        return None
    message = f"score variance {short(variance)}, less than {short(limits.committed_variance)}, and H / log n"
    return variance, limits.committed_variance, f"{message} {short(share)}, less than {short(limits.committed_entropy)}"


def _weight_on(head: Head, name: str, threshold: float, where: str) -> Outcome:
    value = head.mean(name)
    if not value > threshold:
        return None
    return value, threshold, f"mean weight {short(value)} on {where}, more than {short(threshold)}"


_TUTORIAL = "the usual threshold in TransformerLens exercises (ARENA): mean weight > 0.4"

HEAD_RULES: list[HeadRule] = [
    HeadRule(
        Rule(
            "not-finite",
            "alarm",
            "NaN or infinity in a row spreads to every later layer. No other rule can say anything about such rows.",
            "Look at the first layer with this finding: its weights or its input are not finite. Go back to a "
            "checkpoint before the run diverged. In half precision, compute in bfloat16 or float32.",
            "arithmetic",
        ),
        0.0,
        _not_finite,
    ),
    HeadRule(LOGIT_ALARM, "max_score", _logit_alarm),
    HeadRule(
        Rule(
            "peaked",
            "warning",
            "Nearly every query reads one key: almost no gradient reaches the scores, and the head can hardly change.",
            "Look at which key the head reads (a fixed position is a pattern, not a fault). Otherwise check the scale "
            "1/√d, raise the temperature, add QK-norm or a floor on the entropy (regard.nn.entropy_floor).",
            "ours: mean H / log n < 0.1 and mean largest weight > 0.9",
        ),
        "peaked_entropy",
        _peaked,
    ),
    HeadRule(
        Rule(
            "over-peaked",
            "note",
            "Entropy consistently below 1 nat is taken as a sign of over-peaked attention, often a fault of scaling. "
            "The number depends on the length: with n keys the entropy is at most log n, so rows of one or two keys "
            "are always below 1 nat, while at 4096 keys 1 nat is 12 % of the maximum. Compare it with H / log n.",
            "If most heads are like this, look for a missing or doubled scale and for a large initialisation. A single "
            "head that reads a fixed position (first, previous, own token) needs no change.",
            'the article "Understanding Softmax: The Mathematical Foundation Behind Transformer Attention" (below '
            "1.0), which names no source",
        ),
        "over_peaked",
        _over_peaked,
    ),
    HeadRule(
        Rule(
            "diffuse",
            "note",
            "The head averages over nearly all keys: its output is close to the mean of the values. Early in training, "
            "and in first layers, that is normal; late in training the head may be unused.",
            "Compare with an earlier checkpoint. A learned temperature lets the head sharpen. A head that stays "
            "diffuse is a candidate for pruning or for cheaper (linear) attention.",
            "ours: mean H / log n > 0.95",
        ),
        "diffuse",
        _diffuse,
    ),
    HeadRule(
        Rule(
            "sink",
            "note",
            "The weights of a softmax row sum to 1, so a head with nothing to read puts its mass on the first key. The "
            "model then depends on this key: dropping it from a cache, or quantising its outliers, breaks the model.",
            "Keep the first tokens in the cache (StreamingLLM); give each head a learned sink (regard.hf.retrofit adds "
            "one to a trained model) or a gate.",
            "Attention-Sink (sail-sg): mean weight over the queries that see the key > 0.3",
        ),
        "sink",
        _sink,
    ),
    HeadRule(
        Rule(
            "dormant",
            "note",
            "The head puts its mass on a key whose value is small, and so adds almost nothing on this text.",
            "A candidate for pruning. Check other text first: a dormant head may be active on other input.",
            "after arXiv 2504.03889 (a sink, and a small output norm relative to the layer); the threshold 0.2 is ours",
        ),
        "dormant",
        _dormant,
    ),
    HeadRule(
        Rule(
            "previous-token",
            "note",
            "The head copies from the previous token. Such heads are the first half of induction circuits.",
            "No change needed. Know these heads before pruning or changing position encodings.",
            _TUTORIAL,
        ),
        "previous_token",
        _previous_token,
    ),
    HeadRule(
        Rule(
            "self",
            "note",
            "Each token reads mostly itself: the head acts like one more feed-forward layer.",
            "No change needed. In many layers it suggests that attention is not needed there.",
            _TUTORIAL,
        ),
        "self_token",
        _self,
    ),
    HeadRule(
        Rule(
            "first-token",
            "note",
            "The head's main target is the first token, for any query.",
            "As for a sink. The value of the first token tells an idle head from one that reads a marker.",
            _TUTORIAL,
        ),
        "first_token",
        _first_token,
    ),
    HeadRule(
        Rule(
            "induction",
            "note",
            "The head finds an earlier copy of the current token and reads what followed it: the mechanism of "
            "in-context copying.",
            "No change needed. Protect it when pruning or compressing the cache.",
            _TUTORIAL,
        ),
        "induction",
        _induction,
    ),
    HeadRule(
        Rule(
            "hedging",
            "note",
            "The scores of the keys that share the mass differ much, so the entropy changes with the temperature (the "
            "variance is dH/d ln τ under a 0/1 mask). Longer context or quantised scores change what the head reads.",
            "A learned temperature per head (regard.hf.retrofit) has most to gain here. Scaling by log n keeps such "
            "heads from flattening on longer text.",
            "ours: mean score variance > 4; compare with the entropy",
        ),
        "hedging",
        _hedging,
    ),
    HeadRule(
        Rule(
            "committed",
            "note",
            "Low entropy that does not change with the temperature: the choice of key is settled, and no moderate "
            "rescaling changes it.",
            "Safe to compute with few keys or low precision. A learned temperature would get no gradient here.",
            "ours: mean score variance < 0.25 and mean H / log n < 0.1 (the variance also vanishes at a uniform plan)",
        ),
        "committed_variance",
        _committed,
    ),
]


def rule_names() -> list[str]:
    """The names of the rules, in the order in which findings are listed."""
    return [entry.rule.name for entry in HEAD_RULES]
