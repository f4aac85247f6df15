"""Mistakes with priors: causal masks, windows, ALiBi, documents."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...priors import ALiBi, Bias, Causal, Documents, Prior, Union, Window
from ...structured import Relative
from ..calls import Call
from ..declared import aligned
from .base import Change, Hypotheses, with_prior

POSITIONS = Hypotheses()


def _band(left: int | None, right: int | None, like: object) -> Prior:
    return Window(left, right, getattr(like, "alignment", None))


def _other(alignment: str | None) -> str:
    return "top_left" if alignment == "bottom_right" else "bottom_right"


def _aligned_otherwise(*kinds: type[Prior]) -> Change:
    """The other alignment for the whole prior, where queries and keys differ in number. One alignment holds for the
    whole prior, so a change of some factors only is made with shifted windows."""

    def changed(call: Call) -> Call | None:
        Tq, Tk = call.query.shape[2], call.key.shape[2]
        positioned = [f for f in call.factors if f.positioned]
        if Tq == Tk or not any(isinstance(f, kinds) for f in positioned):
            return None
        current = next((f.alignment for f in positioned if getattr(f, "alignment", None)), None)  # type: ignore[attr-defined]
        if all(isinstance(f, kinds) for f in positioned):
            return call.change_problem(prior=aligned(call.problem.prior, _other(current)))  # type: ignore[arg-type]
        shift = Tk - Tq if current != "bottom_right" else Tq - Tk
        factors: list[Prior] = []
        for factor in call.factors:
            if isinstance(factor, kinds) and isinstance(factor, Causal):
                factor = _band(None, shift, factor)
            elif isinstance(factor, kinds) and isinstance(factor, Window):
                left = None if factor.left is None else factor.left - shift
                right = None if factor.right is None else factor.right + shift
                if left is not None and right is not None and right < -left:
                    return None
                factor = _band(left, right, factor)
            elif isinstance(factor, kinds):
                return None
            factors.append(factor)
        return call.with_factors(factors)

    return changed


_ALIGNMENT = "the causal mask is aligned to the other corner of the matrix (top-left for bottom-right, or the reverse)"
POSITIONS.add("causal-dropped", "this is attention without its causal mask", with_prior(Causal, lambda f, c: None))
POSITIONS.add(
    "causal-alignment",
    _ALIGNMENT,
    lambda c: _aligned_otherwise(Prior)(c) if any(isinstance(f, Causal) for f in c.factors) else None,
    _aligned_otherwise(Causal),
)
POSITIONS.add(
    "causal-off-by-one",
    "the causal mask is off by one: a query reads the next key, or does not read its own",
    with_prior(Causal, lambda f, c: _band(None, 1, f)),
    with_prior(Causal, lambda f, c: _band(None, -1, f)),
)
POSITIONS.add(
    "causal-reversed",
    "the causal mask is reversed: a query reads the future",
    with_prior(Causal, lambda f, c: _band(0, None, f)),
)


def _wider(left: int, right: int) -> Change:
    def change(factor: object, call: Call) -> Prior | bool:
        assert isinstance(factor, Window)
        if (left and factor.left is None) or (right and factor.right is None):
            return False
        new_left = None if factor.left is None else factor.left + left
        new_right = None if factor.right is None else factor.right + right
        if new_left is not None and new_right is not None and new_right < -new_left:
            return False
        return _band(new_left, new_right, factor)

    return with_prior(Window, change)


def _is_causal(call: Call) -> bool:
    return any(isinstance(f, Causal) for f in call.factors)


POSITIONS.add("window-dropped", "this is attention without its window", with_prior(Window, lambda f, c: None))
POSITIONS.add(
    "window-dropped",
    "the window's left edge is ignored: a query reads the whole past",
    with_prior(Window, lambda f, c: _band(None, f.right, f)),  # type: ignore[attr-defined]
)
POSITIONS.add(
    "window-off-by-one",
    "the window is off by one key",
    _wider(1, 0),
    _wider(-1, 0),
    _wider(0, 1),
    _wider(0, -1),
    _wider(1, 1),
    _wider(-1, -1),
)
POSITIONS.add(
    "window-alignment",
    "the window is aligned to the other corner of the matrix",
    _aligned_otherwise(Window),
    lambda c: None if _is_causal(c) else _aligned_otherwise(Window, ALiBi, Relative)(c),
)
POSITIONS.add(
    "window-two-sided",
    "the window reaches as far into the future as into the past",
    with_prior(Window, lambda f, c: _band(f.left, f.left, f) if f.left is not None else False),  # type: ignore[attr-defined]
)


def _heads_reversed(slopes: object) -> Tensor | None:
    return slopes.flip(-1) if isinstance(slopes, Tensor) and slopes.numel() > 1 else None


def _signed_distance(factor: object, call: Call) -> Prior | bool:
    """-slope * (i - j), without the absolute value."""
    assert isinstance(factor, ALiBi)
    Tq, Tk = call.query.shape[2], call.key.shape[2]
    offset = Tk - Tq if factor.alignment == "bottom_right" else 0
    distance = torch.arange(Tq)[:, None] + offset - torch.arange(Tk)
    slopes = factor.slopes if isinstance(factor.slopes, Tensor) else call.query.new_tensor([factor.slopes])
    return Bias(-slopes.reshape(-1, 1, 1).to(call.query.dtype) * distance.to(call.query.dtype))


def _reversed_slopes(factor: object, call: Call) -> Prior | bool:
    assert isinstance(factor, ALiBi)
    new = _heads_reversed(factor.slopes)
    return False if new is None else dataclasses.replace(factor, slopes=new)


POSITIONS.add("alibi-dropped", "this is attention without ALiBi", with_prior(ALiBi, lambda f, c: None))
POSITIONS.add(
    "alibi-sign",
    "ALiBi has the wrong sign: far keys are preferred",
    with_prior(ALiBi, lambda f, c: dataclasses.replace(f, slopes=-f.slopes)),  # type: ignore[attr-defined,type-var]
)
POSITIONS.add(
    "alibi-signed-distance", "ALiBi uses i - j without its absolute value", with_prior(ALiBi, _signed_distance)
)
POSITIONS.add("alibi-heads", "the heads have one another's ALiBi slopes", with_prior(ALiBi, _reversed_slopes))
POSITIONS.add(
    "alibi-alignment",
    "ALiBi counts distances from the other corner of the matrix",
    lambda c: _aligned_otherwise(ALiBi)(c) if all(isinstance(f, ALiBi) for f in c.factors if f.positioned) else None,
)
POSITIONS.add(
    "alibi-scaled",
    "ALiBi is multiplied by the scale",
    with_prior(ALiBi, lambda f, c: dataclasses.replace(f, slopes=f.slopes * c.scale_factor)),  # type: ignore[attr-defined,type-var]
)
POSITIONS.add(
    "relative-dropped", "this is attention without its relative bias", with_prior(Relative, lambda f, c: None)
)
POSITIONS.add(
    "relative-reversed",
    "the relative bias counts distances in the other direction",
    with_prior(Relative, lambda f, c: dataclasses.replace(f, table=f.table.flip(-1))),  # type: ignore[attr-defined,type-var]
)


def _unpadded(factor: object, call: Call) -> Prior | bool:
    """Padding as one more document."""
    assert isinstance(factor, Documents)
    ids = [factor.query_ids] if factor.key_ids is None else [factor.query_ids, factor.key_ids]
    if all(bool((i >= 0).all()) for i in ids):
        return False
    return Documents(*(i.clamp(min=0) for i in ids))


POSITIONS.add(
    "documents-dropped",
    "the documents leak: queries read keys of other documents",
    with_prior(Documents, lambda f, c: None),
)
POSITIONS.add("padding-counted", "padding is read: its ids count as a document", with_prior(Documents, _unpadded))


def _part_dropped(call: Call, kind: str) -> Call | None:
    rest = [f for f in call.factors if type(f).__name__ != kind]
    return None if len(rest) == len(call.factors) else call.with_factors(rest)


for _kind in ("Decay", "Density", "LowRank", "Selected", "Prefix", "Blocks"):
    POSITIONS.add(
        f"{_kind.lower()}-dropped",
        f"this is attention without its prior {_kind}",
        lambda call, kind=_kind: _part_dropped(call, kind),
    )
POSITIONS.add("union-dropped", "this is attention without its union of masks", with_prior(Union, lambda f, c: None))
