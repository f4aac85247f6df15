"""`Rule`: the text of a named rule; `Finding`: what a rule found. Inspections (head_rules.py) and training runs
(events.py) share them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

SEVERITIES = ("alarm", "warning", "note")  # alarm: act; warning: look; note: for information


@dataclass(frozen=True, repr=False)
class Finding:
    """What a rule found in a head. Layer and head are None where the finding is about the whole model."""

    rule: str
    severity: str
    layer: int | None
    head: int | None
    value: float | None  # the number that was compared; None if it is not finite, or if the rule could not be checked
    threshold: float
    message: str
    why: str
    remedy: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """What was found and what to do about it, for a terminal."""
        where = "" if self.layer is None else f" in layer {self.layer}, head {self.head}"
        return f"{self.severity}: {self.rule}{where}: {self.message}. Remedy: {self.remedy}"

    def __repr__(self) -> str:
        """Without the texts that are the same for every finding of the rule."""
        texts = ("why", "remedy", "source")
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.name not in texts)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class Rule:
    """The name of a rule, its severity, why it matters, what people do about it, and where it comes from."""

    name: str
    severity: str
    why: str
    remedy: str
    source: str

    def text(self) -> dict[str, str]:
        """The fields of a `Finding` that are the same for every finding of the rule."""
        return {
            "rule": self.name,
            "severity": self.severity,
            "why": self.why,
            "remedy": self.remedy,
            "source": self.source,
        }


LOGIT_ALARM = Rule(
    "logit-alarm",
    "alarm",
    "Scores this large make the softmax one-hot, so its gradient vanishes and half precision loses digits. In training "
    "they continue to grow and end in loss spikes.",
    "QK-clip (regard.nn.qk_clip_: rescale the query and key weights of this head), QK-norm, a softcap, or a "
    "smaller learning rate; see docs/stabilize.md.",
    "QK-clip (Kimi K2) and Megatron's default: largest score > 100",
)
