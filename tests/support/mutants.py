"""A correct attention in plain PyTorch, and its mutants: the mistakes that `regard.audit` must find and name.

`attend` is written independently of regard. Each `bug` changes one line of it. `MUTANTS` lists them with the problem
that the function is declared to solve and the name of the finding.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard import ALiBi, Causal, Documents, Rows, Transport, Window


def _readable(key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeros in place of keys and values that a bool mask hides from all queries."""
    if mask is None or mask.dtype != torch.bool:
        return key, value
    B, H, Tk, _ = key.shape
    seen = mask.expand(*(B, H)[: max(0, 4 - mask.dim())], *mask.shape).expand(B, H, -1, Tk).any(2)[..., None]
    return key.where(seen, 0.0), value.where(seen, 0.0)


READS_EVERYTHING = (  # the bugs that read masked keys, NaN or not
    "reads masked values",
    "no mask",
    "inverted mask",
    "mask shifted",
    "mask of the first entry",
    "masked after softmax",
    "masked scores are 0",
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sink: Tensor | None = None,
    *,
    bug: str = "",
    window: int | None = None,
    slopes: Tensor | None = None,
    ids: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    bottom_right: bool = False,
    lse: bool = False,
) -> Any:
    D, dtype = query.shape[-1], query.dtype
    B, H, Tq, _ = query.shape
    Tk = key.shape[2]
    if bug == "half accumulation":
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    query, key, value = (t.float() for t in (query, key, value))
    if bug == "key without gradient":
        key = key.detach()
    if bug == "value gradient halved":
        value = value * 0.5 + (value * 0.5).detach()
    group = H // key.shape[1]
    if group > 1:
        if bug == "heads repeated":
            key, value = key.repeat(1, group, 1, 1), value.repeat(1, group, 1, 1)
        elif bug == "gradient of one head of a group":
            key, value = (torch.stack([t, *[t.detach()] * (group - 1)], 2).flatten(1, 2) for t in (key, value))
        else:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    factor = D**-0.5 if scale is None or bug == "scale ignored" else scale
    if bug == "no scale":
        factor = 1.0
    elif bug == "scale twice":
        factor = factor**2
    elif bug == "scale of values":
        factor = value.shape[-1] ** -0.5 if scale is None else scale
    if bug not in READS_EVERYTHING:
        key, value = _readable(key, value, attn_mask)
    scores = query @ key.mT * factor
    if bug == "scale missing in the gradient":
        raw = query @ key.mT
        scores = raw + (raw * factor - raw).detach()
    keep = torch.ones(Tq, Tk, dtype=torch.bool)
    corner = Tk - Tq if bottom_right != (bug == "other corner") else 0
    position, keys = torch.arange(Tq)[:, None] + corner, torch.arange(Tk)
    if is_causal and bug != "not causal":
        reach = {"future by one": 1, "own key missing": -1}.get(bug, 0)
        keep = keep & (keys >= position if bug == "anti-causal" else keys <= position + reach)
    if window is not None and bug != "no window":
        left = window + {"window too wide": 1, "window too narrow": -1}.get(bug, 0)
        keep = keep & (keys >= position - left) & (keys <= position)
    keep = keep.expand(B, H, Tq, Tk)
    if ids is not None and bug != "documents leak":
        own = ids.clamp(min=0) if bug == "padding is a document" else ids
        keep = keep & ((own[:, None] == own[None, :]) & (own >= 0)[:, None])
    bias: Tensor | None = None
    if attn_mask is not None and bug != "no mask":
        if attn_mask.dtype == torch.bool:
            mask = {
                "inverted mask": lambda m: ~m,
                "mask shifted": lambda m: m.roll(1, -1),
                "mask of the first entry": lambda m: m[:1] if m.dim() == 4 else m,
            }.get(bug, lambda m: m)(attn_mask)
            keep = keep & mask
        elif bug != "no bias":
            bias = attn_mask.float()
            hidden = bias == -math.inf if bug == "adds the lowest number twice" else bias < -1e30
            keep, bias = keep & ~hidden, bias.masked_fill(hidden, 0.0)
            bias = bias * factor if bug == "bias scaled" else -bias if bug == "bias negated" else bias
            if bug == "bias without gradient":
                bias = bias.detach()
            if bug == "bias gradient averaged":
                bias = bias / 2 + (bias / 2).detach()
            if bug == "bias as a mask":
                keep, bias = keep & (bias > 0).expand_as(keep), None
    if slopes is not None and bug != "no alibi":
        sign = -1 if bug == "alibi sign" else 1
        distance = (position - keys).float() if bug == "alibi without abs" else (position - keys).abs().float()
        drop = -sign * slopes.float()[:, None, None] * distance
    else:
        drop = torch.zeros(1)
    if softcap is not None and bug == "cap after the mask" and bias is not None:
        scores, bias = softcap * ((scores + bias) / softcap).tanh(), None
    elif softcap is not None and bug == "cap before the scale":
        scores = factor * softcap * (scores / factor / softcap).tanh()
    elif softcap is not None and bug == "cap without gradient":
        scores = scores + (softcap * (scores / softcap).tanh() - scores).detach()
    elif softcap is not None and bug != "no cap":
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if bug == "no temperature":
        temperature = 1.0
    elif bug == "temperature upside down":
        temperature = 1 / temperature
    elif bug == "temperature without gradient":
        temperature = temperature.detach()  # type: ignore[union-attr]
    scores = scores / temperature + drop
    lowest = torch.finfo(scores.dtype).min
    if bug == "masked by the lowest number":
        scores = scores.masked_fill(~keep, lowest)
    elif bug == "masked scores are 0":
        scores = scores.masked_fill(~keep, 0.0)
    elif bug != "masked after softmax":
        scores = scores.masked_fill(~keep, -math.inf)
    if bug == "adds the lowest number twice" and bias is not None:
        scores = scores + bias.where(bias < -1e30, 0.0)
    level = None
    if sink is not None:
        level = sink.float()[:, None, None] / (1.0 if bug == "sink without temperature" else temperature)
        level = level.detach() if bug == "sink without gradient" else level
        level = level * factor if bug == "sink scaled" else -level if bug == "sink negated" else level
        level = level.flip(0) if bug == "sinks of other heads" else level
    peak = scores.amax(-1, keepdim=True).detach()
    if bug == "adds the lowest number twice":
        peak = peak.where(keep.any(-1, keepdim=True), lowest)
    elif bug != "masked by the lowest number":
        peak = peak.clamp(min=lowest)
    peak = peak if level is None or bug == "no sink" else torch.maximum(peak, level.detach())
    if bug == "no maximum":
        peak = torch.zeros_like(peak)
    powers = (scores - peak).exp()
    total = powers.sum(-1, keepdim=True)
    with_sink = total if level is None or bug == "no sink" else total + (level - peak).exp()
    weights = powers / with_sink.where(with_sink > 0, 1.0)
    if bug == "lse without gradient":
        kept = total.detach() / (total.detach() + (level - peak).exp())  # type: ignore[operator]
        weights = powers / total.where(total > 0, 1.0) * kept
    if bug == "baseline missing":
        weights = weights.detach() * (scores - scores.detach()).nan_to_num(0).exp()
    if bug == "masked after softmax":
        weights = weights * keep
    if bug == "unsafe rows":
        weights = scores.softmax(-1)
    out = weights @ value
    if bug == "state":
        STATE.append(0)
        out = out * (1 + 1e-3 * (len(STATE) % 2))
    if not lse:
        return out.to(dtype)
    found = (peak + with_sink.log())[..., 0]
    if bug == "lse without the sink":
        found = scores.logsumexp(-1)
    if bug == "lse in base 2":
        found = found / math.log(2)
    elif bug == "lse detached":
        found = found.detach()
    return out.to(dtype), found


STATE: list[int] = []  # grows with each call of the mutant that has a state


@dataclass(frozen=True)
class Mutant:
    bug: str
    finding: str
    problem: Transport | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of `attend`
    softcap: float | None = None

    @property
    def in_gradients(self) -> bool:
        """Whether only gradients show the bug."""
        return self.finding.endswith(("-gradient", "-baseline"))

    def function(self, bug: str | None = None) -> Any:
        return functools.partial(attend, bug=self.bug if bug is None else bug, **self.options)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06])
IDS = torch.tensor([0] * 5 + [1] * 8 + [-1] * 2 + [2] * 6)
SINKS = Transport(prior=Causal(), marginal=Rows(sink=torch.zeros(4)))
WARM = Transport(marginal=Rows(sink=torch.zeros(4)), temperature=0.6)
WINDOW = Transport(prior=Causal() * Window(5))
ALIBI = Transport(prior=Causal() * ALiBi(SLOPES))
BOTH_SIDES = Transport(prior=ALiBi(SLOPES, "top_left"))
DOCUMENTS = Transport(prior=Documents(IDS))
LEARNED = torch.tensor(0.7, requires_grad=True)

MUTANTS = [
    Mutant("no sink", "sink-dropped", SINKS),
    Mutant("sink without gradient", "sink-gradient", SINKS),
    Mutant("lse without gradient", "sink-gradient", SINKS),
    Mutant("sink scaled", "sink-scaled", SINKS),
    Mutant("sink negated", "sink-sign", SINKS),
    Mutant("sinks of other heads", "sink-heads", SINKS),
    Mutant("sink without temperature", "sink-temperature", WARM, {"temperature": 0.6}),
    Mutant("no mask", "mask-dropped"),
    Mutant("inverted mask", "mask-inverted"),
    Mutant("mask shifted", "mask-shifted"),
    Mutant("mask of the first entry", "mask-batch"),
    Mutant("masked after softmax", "mask-after-softmax"),
    Mutant("masked scores are 0", "padding-counted"),
    Mutant("not causal", "causal-dropped"),
    Mutant("not causal", "causal-dropped", Transport(prior=Causal())),
    Mutant("other corner", "causal-alignment"),
    Mutant("other corner", "causal-alignment", Transport(prior=Causal("bottom_right")), {"bottom_right": True}),
    Mutant("future by one", "causal-off-by-one"),
    Mutant("own key missing", "causal-off-by-one"),
    Mutant("anti-causal", "causal-reversed"),
    Mutant("no window", "window-dropped", WINDOW, {"window": 5}),
    Mutant("window too wide", "window-off-by-one", WINDOW, {"window": 5}),
    Mutant("window too narrow", "window-off-by-one", WINDOW, {"window": 5}),
    Mutant("no alibi", "alibi-dropped", ALIBI, {"slopes": SLOPES}),
    Mutant("alibi sign", "alibi-sign", ALIBI, {"slopes": SLOPES}),
    Mutant("alibi without abs", "alibi-signed-distance", BOTH_SIDES, {"slopes": SLOPES}),
    Mutant("documents leak", "documents-dropped", DOCUMENTS, {"ids": IDS}),
    Mutant("padding is a document", "padding-counted", DOCUMENTS, {"ids": IDS}),
    Mutant("no scale", "scale-missing"),
    Mutant("scale twice", "scale-twice"),
    Mutant("scale ignored", "scale-ignored"),
    Mutant("scale of values", "scale-dimension"),
    Mutant("scale missing in the gradient", "scale-gradient"),
    Mutant("no cap", "softcap-dropped", None, {"softcap": 3.0}, 3.0),
    Mutant("cap after the mask", "softcap-order", None, {"softcap": 3.0}, 3.0),
    Mutant("cap before the scale", "softcap-order", None, {"softcap": 3.0}, 3.0),
    Mutant("cap without gradient", "softcap-gradient", None, {"softcap": 3.0}, 3.0),
    Mutant("no temperature", "temperature-dropped", WARM, {"temperature": 0.6}),
    Mutant("temperature upside down", "temperature-inverted", Transport(temperature=0.6), {"temperature": 0.6}),
    Mutant(
        "temperature without gradient", "temperature-gradient", Transport(temperature=LEARNED), {"temperature": LEARNED}
    ),
    Mutant("heads repeated", "gqa-order"),
    Mutant("gradient of one head of a group", "gqa-gradient"),
    Mutant("no bias", "bias-dropped"),
    Mutant("bias without gradient", "bias-gradient"),
    Mutant("bias gradient averaged", "bias-gradient"),
    Mutant("bias scaled", "bias-scaled"),
    Mutant("bias negated", "bias-sign"),
    Mutant("bias as a mask", "bias-binarised"),
    Mutant("lse in base 2", "lse-base", None, {"lse": True}),
    Mutant("lse detached", "lse-gradient", None, {"lse": True}),
    Mutant("lse without the sink", "lse-sink", SINKS, {"lse": True}),
    Mutant("baseline missing", "gradient-baseline"),
    Mutant("key without gradient", "key-gradient"),
    Mutant("value gradient halved", "value-gradient"),
    Mutant("half accumulation", "precision"),
    Mutant("reads masked values", "masked-nan"),
    Mutant("unsafe rows", "empty-row"),
    Mutant("masked by the lowest number", "empty-row"),
    Mutant("adds the lowest number twice", "lowest-mask"),
    Mutant("no maximum", "overflow"),
    Mutant("state", "nondeterministic"),
]
