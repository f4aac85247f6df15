"""Events of a training run: named rules that compare each step with the steps before it.

`EventDetector` keeps what the rules compare with (the last values of each series) as plain numbers, so that it can be
saved with a checkpoint. An event is reported when it begins, and not again while it lasts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from .rules import LOGIT_ALARM, Finding, Rule


@dataclass(frozen=True, repr=False)
class Event(Finding):
    """What a rule found in a step. Layer and head are None where the event is about the whole run."""

    step: int
    metric: str

    def __str__(self) -> str:  # the message of an event names layer and head
        return f"step {self.step}: {self.rule}: {self.message}. Remedy: {self.remedy}"


@dataclass(frozen=True)
class Limits:
    """The thresholds of the rules."""

    max_score: float = 100.0  # a larger score than this
    spike: float = 6.0  # this many standard deviations above the mean ...
    window: int = 128  # ... of so many values before it (a quarter of them is enough; ours)
    rise: float = 0.01  # ... and more than this share of the mean (ours: a flat series has almost no deviation)
    dip: float = 0.5  # the entropy of a layer's lower heads below this share of its highest value ...
    dip_samples: int = 8  # ... in so many samples before
    oscillation: float = 1.5  # upward moves of the loss, as a multiple of its earlier moves
    climb: float = 0.1  # until `window` losses are known: the loss above its lowest by this share (ours)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"thresholds: expected {name} to be a positive number, got {value!r}")
        for name in ("window", "dip_samples"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"thresholds: expected {name} to be an int, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Heads:
    """The numbers of one layer in a sampled step that the rules read."""

    layer: int
    entropy: list[float]  # mean H / log n of each head
    lower: float  # the 10 % quantile of these
    max_score: list[float]  # largest score of each head


_SPIKE = Rule(
    "spike",
    "warning",
    "A value this far above the recent ones is not noise: often a bad batch, sometimes the beginning of a divergence.",
    "Look at the batch. If spikes become more frequent or do not recover: clip gradients, lower the learning rate, or "
    "go back to a checkpoint and skip the data.",
    "OLMo-core's StabilityMonitor: more than 6 standard deviations above the mean of the last 128 values",
)
_NOT_FINITE = Rule(
    "not-finite",
    "alarm",
    "From this step on, every weight that this gradient reaches is lost.",
    "Stop, go back to the last checkpoint, and look at the events before this one.",
    "arithmetic",
)
_COLLAPSE = Rule(
    "collapse-dip",
    "alarm",
    "Attention concentrates on few keys while the loss begins to oscillate: the pattern of entropy collapse. Peaked "
    "rows pass almost no gradient to the scores, and the run seldom recovers by itself.",
    "Go back before the dip with a smaller learning rate or a longer warm-up; QK-clip (regard.nn.qk_clip_), σReparam "
    "or QK-norm; a floor under the entropy (regard.nn.entropy_floor); check the scale 1/√d and the initialisation; see "
    "docs/stabilize.md.",
    "σReparam, arXiv 2303.06296 (a sharp dip of entropy together with oscillation of the loss); the numbers are ours",
)
RULES = tuple(rule.name for rule in (LOGIT_ALARM, _COLLAPSE, _SPIKE, _NOT_FINITE))
RECENT = 8  # number of losses over which oscillation is measured


@dataclass
class EventDetector:
    """The rules, and the values that they compare with."""

    limits: Limits = field(default_factory=Limits)
    series: dict[str, list[float]] = field(default_factory=dict)  # the last values of the loss, ...
    lower: dict[str, list[float]] = field(default_factory=dict)  # by layer: `Heads.lower` in the last samples
    swings: list[float] = field(default_factory=list)  # largest oscillation of the loss before each of the last samples
    swing: float = 0.0  # ... and since the last one
    lasting: list[str] = field(default_factory=list)  # events that have begun and not ended

    def logged(self, step: int, **values: float | None) -> list[Event]:
        """Numbers of the whole run at a step: loss, grad_norm."""
        events = []
        for name, value in values.items():
            if value is None:
                continue
            if self._begins(f"not-finite {name}", not math.isfinite(value)):
                events.append(_event(_NOT_FINITE, step, None, None, name, None, math.inf, f"{name} is {value}"))
            if math.isfinite(value):
                events += self._spike(step, name, value)
        if math.isfinite(values.get("loss") or 0.0):
            self.swing = max(self.swing, self._oscillation())
        return events

    def sampled(self, step: int, layers: list[Heads]) -> list[Event]:
        """The heads in a sampled step."""
        self.swings = [*self.swings, self.swing][-self.limits.dip_samples :]
        self.swing = 0.0
        events = []
        for heads in layers:
            events += self._large_score(step, heads)
            known = [score for score in heads.max_score if math.isfinite(score)]
            if known:
                head = heads.max_score.index(max(known))
                events += self._spike(step, f"attn/max_score/L{heads.layer:02d}", max(known), heads.layer, head)
            events += self._dip(step, heads)
        return events

    def _begins(self, name: str, now: bool, over: bool | None = None) -> bool:
        """Whether an event begins with this step. It ends when `over` (None: when it no longer holds)."""
        lasts = name in self.lasting
        if lasts and (not now if over is None else over):
            self.lasting.remove(name)
        if now and not lasts:
            self.lasting.append(name)
            return True
        return False

    def _large_score(self, step: int, heads: Heads) -> list[Event]:
        limit = self.limits.max_score
        top = max(heads.max_score, key=lambda score: -math.inf if math.isnan(score) else score)
        if not self._begins(f"logit-alarm {heads.layer}", top > limit, over=top < 0.9 * limit):
            return []
        head = heads.max_score.index(top)
        others = sum(score > limit for score in heads.max_score) - 1
        more = f" ({others} more heads of the layer are above)" if others else ""
        message = f"largest score {top:.4g} in layer {heads.layer}, head {head}, more than {limit:g}{more}"
        return [_event(LOGIT_ALARM, step, heads.layer, head, "max_score", top, limit, message)]

    def _spike(
        self, step: int, name: str, value: float, layer: int | None = None, head: int | None = None
    ) -> list[Event]:
        before = self.series.setdefault(name, [])
        mean = fmean(before) if before else value
        deviation = math.sqrt(fmean([(x - mean) ** 2 for x in before])) if before else 0.0
        limit = mean + max(self.limits.spike * deviation, self.limits.rise * abs(mean))
        high = len(before) >= max(2, self.limits.window // 4) and value > limit
        self.series[name] = [*before, value][-self.limits.window :]
        if not self._begins(f"spike {name}", high):
            return []
        where = "" if layer is None else f" in layer {layer}, head {head}"
        label = name if layer is None else "largest score"
        sigmas = f", {(value - mean) / deviation:.0f} standard deviations" if deviation > 0 else ""
        message = f"{label} {value:.4g}{where}{sigmas} above its mean {mean:.4g} over the last {len(before)} values"
        metric = name if layer is None else "max_score"
        return [_event(_SPIKE, step, layer, head, metric, value, limit, message)]

    def _oscillation(self) -> float:
        """The mean upward move of the last losses, as a multiple of the mean move before. A falling loss, however
        steep, does not oscillate."""
        losses = self.series.get("loss", [])
        moves = [b - a for a, b in pairwise(losses)]
        before, recent = moves[:-RECENT], moves[-RECENT:]
        if len(before) < RECENT:
            return 0.0
        usual = fmean(map(abs, before))
        upward = fmean(max(0.0, move) for move in recent)
        return upward / usual if usual > 0 else 0.0

    def _climb(self) -> tuple[float, float] | None:
        """Where the loss was and where it is, if it has climbed since the run began.

        A run that diverges in its first steps has no earlier moves of the loss to compare with. Until the window is
        full, the last losses are therefore compared with the first one and with the lowest mean of as many in a row."""
        losses = self.series.get("loss", [])
        n = min(RECENT, len(losses) // 2)
        if not n or len(losses) >= self.limits.window:
            return None
        means = [fmean(losses[k : k + n]) for k in range(len(losses) - n + 1)]
        base = min(losses[0], *means)
        size = max(abs(base), losses[0] - base)  # a loss near 0 is compared with how far it has fallen
        return (base, means[-1]) if means[-1] - base > self.limits.climb * size else None

    def _dip(self, step: int, heads: Heads) -> list[Event]:
        before = self.lower.setdefault(str(heads.layer), [])
        if math.isnan(heads.lower):
            return []
        limit = self.limits.dip * max(before, default=0.0)
        swing, climb = max(self.swings, default=0.0), self._climb()
        unstable = swing > self.limits.oscillation or climb is not None
        now = heads.lower < limit and unstable
        self.lower[str(heads.layer)] = [*before, heads.lower][-self.limits.dip_samples :]
        if not self._begins(f"collapse-dip {heads.layer}", now, over=heads.lower >= limit):
            return []
        lowest = min(range(len(heads.entropy)), key=lambda h: _or_one(heads.entropy[h]))
        loss = f"moved up {swing:.2g} times as much as it used to move"
        if climb is not None:
            loss = f"rose from {climb[0]:.3g} to {climb[1]:.3g}"
        message = (
            f"entropy / log n of the lower heads of layer {heads.layer} fell from {max(before):.3g} to "
            f"{heads.lower:.3g} (lowest: head {lowest}, {heads.entropy[lowest]:.3g}) while the loss {loss}"
        )
        return [_event(_COLLAPSE, step, heads.layer, lowest, "entropy_norm", heads.lower, limit, message)]

    def state_dict(self) -> dict[str, Any]:
        """All values that the rules compare with, as plain numbers and lists."""
        kept = asdict(self)
        del kept["limits"]
        return kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            if name not in state:
                raise ValueError(f"state: expected {name!r} in it, got {sorted(state)}")
        for name in self.state_dict():
            value = state[name]
            copied = {key: list(values) for key, values in value.items()} if isinstance(value, dict) else value
            setattr(self, name, list(copied) if isinstance(copied, list) else copied)


def _event(
    rule: Rule,
    step: int,
    layer: int | None,
    head: int | None,
    metric: str,
    value: float | None,
    threshold: float,
    message: str,
) -> Event:
    finite = None if value is None or not math.isfinite(value) else value
    numbers: dict[str, Any] = {"layer": layer, "head": head, "value": finite, "threshold": threshold}
    return Event(**rule.text(), **numbers, message=message, step=step, metric=metric)


def _or_one(value: float) -> float:
    return 1.0 if math.isnan(value) else value
