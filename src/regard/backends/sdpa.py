"""Stock PyTorch: `torch.nn.functional.scaled_dot_product_attention`, for the softmax problems it can express."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..form import Form
from .base import Backend

# Bound at import, because a user may later replace PyTorch's function by regard.attention.
_stock = F.scaled_dot_product_attention

MASK_LIMIT = 2**24  # "auto" does not build a larger Tq x Tk mask


class Stock(Backend):
    """backend="sdpa"."""

    name: ClassVar[str] = "sdpa"
    has_own_autograd: ClassVar[bool] = True

    def unsupported(self, form: Form, names: tuple[str, ...]) -> str | None:
        """Why stock PyTorch cannot serve the problem, or None."""
        if form.family != "kl":
            return "computes softmax only"
        if form.marginal != "rows" or form.mass != 1:
            return "rows sum to 1 only (no sink, relaxed or free rows, or mass)"
        if form.hard:
            return "has no temperature 0"
        if form.softcap is not None:
            return "has no softcap"
        if form.function is not None or form.untraced is not None:
            return "has no priors from functions"
        if form.density is not None and form.density.requires_grad:
            return "has no gradient of a density at 0"
        if form.dropout_p > 0:
            return "has its own dropout mask, not the one shared by the backends"
        statistics = [name for name in names if name != "out"]
        if statistics:
            return f"returns no statistics (requested: {', '.join(statistics)})"
        if isinstance(form.temperature, Tensor) and form.score_bias is not None:
            return "cannot divide a float mask by a temperature tensor"
        if isinstance(form.temperature, Tensor) and form.query is not None and form.query.dtype != form.dtype:
            return "would round queries divided by a temperature tensor to half precision"
        return None

    def unwise(self, form: Form, names: tuple[str, ...]) -> str | None:
        """Why "auto" does not choose this backend: it would take too much memory."""
        assert form.query is not None and form.value is not None
        B, H, Tq, Tk = form.shape
        if B * H * Tq * Tk > MASK_LIMIT and form.query.device.type == "cpu":
            biases = [b for b in (form.score_bias, *form.log_priors) if b is not None]
            if form.value.shape[-1] != form.query.shape[-1] or any(b.requires_grad for b in biases):
                return "would store the Tq x Tk scores (Dv differs from D, or a mask needs a gradient)"
        if not _plain_causal(form) and _needs_matrix(form):
            used = ("query", "key", "value", "tiles")
            pieces = [t.shape[:2] for name, t in form.tensors().items() if name not in used]
            copies = torch.broadcast_shapes(*pieces, (1, 1))
            if math.prod(copies) * Tq * Tk > MASK_LIMIT:
                return "would need a large Tq x Tk mask"
        return None

    def forward(self, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The output, with nothing recorded for a gradient."""
        with torch.no_grad():
            return {"out": self.attend(form)}

    def backward(
        self, form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """PyTorch's own gradients of the needed slots, from a repeated forward pass. Only forward mode calls this: in
        all other cases PyTorch's autograd differentiates `attend`."""
        tensors = form.tensors()
        leaves = {name: tensors[name].detach().requires_grad_() for name in needed}
        with torch.enable_grad():
            out = self.attend(form.with_tensors(leaves))
            found = torch.autograd.grad(
                out, list(leaves.values()), grads["out"], allow_unused=True, materialize_grads=True
            )
        return dict(zip(needed, found, strict=True))

    def attend(self, form: Form) -> Tensor:
        """The attended values [B, H, Tq, Dv], differentiable by PyTorch's own autograd."""
        assert form.query is not None and form.key is not None and form.value is not None
        _, _, Tq, Tk = form.shape
        query, key, value = form.query, form.key, form.value
        scale = form.scale
        if isinstance(form.temperature, Tensor):
            query = query / form.temperature
        else:
            scale = scale / form.temperature
        mask = None
        causal = _plain_causal(form)
        if causal:
            key, value = key[:, :, :Tq], value[:, :, :Tq]  # later keys are masked and may hold NaN
        else:
            mask = _mask(form)
        if mask is not None:
            admissible = mask if mask.dtype == torch.bool else mask != -math.inf
            read = admissible.any(2, keepdim=True).mT  # [B|1, H|1, Tk|1, 1]
            if read.shape[1] > 1:
                read = read.unflatten(1, (key.shape[1], form.group)).any(2)
            # PyTorch propagates NaN from keys and queries that are masked everywhere: 0 * NaN is NaN.
            key, value = torch.where(read, key, 0.0), torch.where(read, value, 0.0)
            query = torch.where(admissible.any(3, keepdim=True), query, 0.0)
            if mask.dtype == torch.bool and 1 in mask.shape[2:]:  # PyTorch would copy an expanded bool mask in full
                mask = torch.zeros_like(mask, dtype=form.dtype).masked_fill(~mask, -math.inf)
            mask = mask.expand(*mask.shape[:2], Tq, Tk)
        return _stock(query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=form.group > 1)


def _plain_causal(form: Form) -> bool:
    """Whether the prior is plain causal, the one structured prior that PyTorch supports."""
    if form.left is not None or form.right != 0 or form.offset != 0 or form.weighted:
        return False
    return form.mask is form.score_bias is form.query_ids is form.selected is form.tile_map is None


def _needs_matrix(form: Form) -> bool:
    """Whether a Tq x Tk mask must be built for the prior. (A mask that was given costs nothing more.)"""
    given = sum(t is not None for t in (form.mask, form.score_bias, *form.log_priors))
    plain = dataclasses.replace(form, mask=None, score_bias=None, log_priors=[])
    return plain.has_prior or given > 1


def _mask(form: Form) -> Tensor | None:
    """One bool mask, or one float mask in the compute dtype, or None."""
    assert form.query is not None
    _, _, Tq, Tk = form.shape
    device = form.query.device
    admissible = form.admissible(Tq, Tk, device)
    bias = form.log_prior(Tq, Tk, form.dtype, device)
    if form.score_bias is not None:
        assert not isinstance(form.temperature, Tensor)
        # A mask entry at the lowest finite number must not become -inf when divided.
        score = (form.score_bias.to(form.dtype) / form.temperature).clamp(min=torch.finfo(form.dtype).min)
        bias = score if bias is None else bias + score
    if admissible is not None:
        admissible = admissible.expand(*torch.broadcast_shapes(admissible.shape, (1, 1, 1, 1)))
    if bias is None:
        return admissible
    if admissible is not None:
        bias = torch.where(admissible, bias, -math.inf)
    return bias
