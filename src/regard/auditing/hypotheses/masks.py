"""Mistakes with masks and with biases in their place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...priors import Bias, Prior
from ..calls import Call, Solved, Solver, admissible
from .base import Change, Hypotheses, kept, only_masks, with_prior

MASKS = Hypotheses()


def _with_mask(change: Callable[[Tensor, Call], Tensor | None]) -> Change:
    """A change of what a mask admits."""

    def changed(call: Call) -> Call | None:
        if not only_masks(call.mask):
            return None
        assert call.mask is not None
        new = change(kept(call.mask), call)
        return None if new is None else call.change(mask=new)

    return changed


def _transposed(keep: Tensor, call: Call) -> Tensor | None:
    return keep.mT if keep.dim() > 1 and keep.shape[-1] == keep.shape[-2] else None


@MASKS("mask-dropped", "this is attention without its mask")
def _(call: Call) -> Call | None:
    return None if not only_masks(call.mask) else call.change(mask=None)


MASKS.add(
    "mask-inverted", "the mask is inverted: masked keys are read and the others are not", _with_mask(lambda k, c: ~k)
)
MASKS.add(
    "mask-shifted",
    "the mask is shifted by one",
    _with_mask(lambda k, c: k.roll(1, -1)),
    _with_mask(lambda k, c: k.roll(-1, -1)),
    _with_mask(lambda k, c: k.roll(1, -2) if k.shape[-2] > 1 else None),
    _with_mask(lambda k, c: k.roll(-1, -2) if k.shape[-2] > 1 else None),
    _with_mask(lambda k, c: torch.nn.functional.pad(k[..., 1:], (0, 1), value=True)),
    _with_mask(lambda k, c: torch.nn.functional.pad(k[..., :-1], (1, 0), value=True)),
)
MASKS.add("mask-transposed", "queries and keys of the mask are exchanged", _with_mask(_transposed))
MASKS.add(
    "mask-batch",
    "all batch entries have the mask of one entry",
    _with_mask(lambda k, c: k[:1] if k.dim() == 4 and k.shape[0] > 1 else None),
    _with_mask(lambda k, c: k[-1:] if k.dim() == 4 and k.shape[0] > 1 else None),
)
MASKS.add(
    "mask-heads",
    "all heads have the mask of one head",
    _with_mask(lambda k, c: k[:, :1] if k.dim() == 4 and k.shape[1] > 1 else None),
    _with_mask(lambda k, c: k[:, -1:] if k.dim() == 4 and k.shape[1] > 1 else None),
)


def _without_masks(call: Call) -> Call:
    """The call without anything that masks."""
    mask = None if only_masks(call.mask) else call.mask
    mask = None if mask is None else mask.masked_fill(mask == -math.inf, 0.0)
    return call.change(mask=mask).with_factors([f for f in call.factors if not f.binary])


@MASKS("mask-after-softmax", "masked weights are set to 0 after the softmax, so rows no longer sum to 1")
def _(call: Call) -> Call | None:
    keep = admissible(call)
    if bool(keep.all()):
        return None

    def compute(call: Call, solve: Solver) -> Solved:
        free = _without_masks(call)
        weights, lse = solve(free.with_scores(free.capped(free.scores())))
        return (weights * keep) @ call.repeated(call.value), lse

    return call.change(compute=compute)


def _counted(call: Call, values: bool) -> Call | None:
    """Masked keys have the score 0 and take part in the normalisation. `values`: they keep their values."""
    keep = admissible(call)
    if bool(keep.all()):
        return None

    def compute(call: Call, solve: Solver) -> Solved:
        free = _without_masks(call)
        scores = free.capped(free.scores()).where(keep, 0.0)
        weights, lse = solve(free.with_scores(scores))
        return (weights if values else weights * keep) @ call.repeated(call.value), lse

    return call.change(compute=compute)


@MASKS("padding-counted", "masked keys count as keys of score 0, so they take part in the normalisation")
def _(call: Call) -> Call | None:
    return _counted(call, values=True)


@MASKS("padding-counted", "masked keys have the value 0 and the score 0, so they take part in the normalisation")
def _(call: Call) -> Call | None:
    return _counted(call, values=False)


# --- biases ---------------------------------------------------------------------------------------------------------


def _is_bias(call: Call) -> bool:
    return call.mask is not None and call.mask.dtype != torch.bool


def _with_bias(change: Callable[[Tensor, Call], Tensor | None]) -> Change:
    def changed(call: Call) -> Call | None:
        if not _is_bias(call):
            return None
        assert call.mask is not None
        new = change(call.mask, call)
        return None if new is None else call.change(mask=new)

    return changed


def _finite(bias: Tensor, value: Tensor) -> Tensor:
    """`value`, with -inf where the bias has it."""
    return value.masked_fill(bias == -math.inf, -math.inf)


def _prior_bias(change: Callable[[Tensor], Tensor | None]) -> Change:
    """A change of the prior `Bias`."""

    def changed(factor: object, call: Call) -> Prior | bool:
        assert isinstance(factor, Bias)
        new = change(factor.log_prior)
        return False if new is None else Bias(new)

    return with_prior(Bias, changed)


_BIAS = "this is attention without its bias"
MASKS.add(
    "bias-dropped",
    _BIAS,
    _with_bias(lambda b, c: _finite(b, torch.zeros_like(b))),
    lambda call: call.change(mask=None) if call.mask is not None and call.mask.dtype != torch.bool else None,
    with_prior(Bias, lambda b, c: None),
)
_NO_GRADIENT = "the bias acts on the output but receives no gradient"
MASKS.add("bias-gradient", _NO_GRADIENT, _with_bias(lambda b, c: b.detach()), _prior_bias(lambda b: b.detach()))
MASKS.add(
    "bias-sign",
    "the bias has the wrong sign",
    _with_bias(lambda b, c: _finite(b, -b)),
    _prior_bias(lambda b: _finite(b, -b)),
)
MASKS.add(
    "bias-scaled",
    "the bias is multiplied by the scale, as if it were added before it",
    _with_bias(lambda b, c: b * c.scale_factor),
)
MASKS.add(
    "bias-heads",
    "all heads, or all batch entries, have one bias",
    _with_bias(lambda b, c: b[..., :1, :, :] if b.dim() > 2 and b.shape[-3] > 1 else None),
    _with_bias(lambda b, c: b[:1] if b.dim() == 4 and b.shape[0] > 1 else None),
)
MASKS.add(
    "bias-binarised",
    "the bias is read as a mask: numbers other than 0 count as True",
    _with_bias(lambda b, c: b != 0),
    _with_bias(lambda b, c: b > 0),
)
