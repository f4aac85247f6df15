"""Brain teaser 2: dot products without the scale 1/√d_k."""

from __future__ import annotations

import math

import torch

import regard
from regard import AuxRequest, Transport

from ..numbers import draw, how_close
from .teaser import Exhibit, Teaser


def saturation(d: int, scale: float | None) -> tuple[float, float, float, float]:
    """For 64 random queries and 128 keys: mean largest weight, mean entropy / log n, mean number of keys that take part
    (1/Σp²), and the median norm of the gradient with respect to a row's scores."""
    q, k, v, g = draw(1, 1, 64, d, seed=d), draw(1, 1, 128, d, seed=d + 1), draw(1, 1, 128, 8), draw(64, 8, seed=1)
    mask = torch.zeros(64, 128, dtype=torch.float64, requires_grad=True)
    wanted = AuxRequest(max_weight=True, entropy=True, collision=True)
    out, aux = regard.attention(q, k, v, attn_mask=mask, scale=scale, return_aux=wanted)
    assert aux.max_weight is not None and aux.entropy is not None and aux.collision is not None
    (slope,) = torch.autograd.grad((out * g).sum(), mask)
    return (
        float(aux.max_weight.detach().mean()),
        float(aux.entropy.detach().mean()) / math.log(128),
        float((1 / aux.collision.detach()).mean()),
        float(slope.norm(dim=-1).median()),
    )


def skipped_scaling() -> Teaser:
    rows = []
    for d in (16, 64, 512, 2048):
        for label, scale in (("1/√d_k", None), ("none", 1.0)):
            top, spread, count, slope = saturation(d, scale)
            rows.append((str(d), label, f"{top:.2f}", f"{spread:.2f}", f"{count:.1f}", f"{slope:.1g}"))
    q, k, v = (draw(1, 2, 6, 16, seed=i) for i in (1, 2, 3))
    as_scale = regard.attention(q, k, v)
    as_temperature = regard.attention(q, k, v, scale=1.0, problem=Transport(temperature=math.sqrt(16)))
    return Teaser(
        2,
        "What if we skip scaling?",
        "The temperature is dropped: τ = √d_k on raw dot products becomes τ = 1, and rows saturate.",
        [
            Exhibit(
                "Random queries and keys, 128 keys",
                ("d_k", "scale", "largest weight", "entropy / log n", "keys taking part", "gradient to scores"),
                rows,
            )
        ],
        [
            (
                f"The scale is a temperature, not a separate step: scale 1/√d_k and τ = √d_k on raw scores "
                f"{how_close(as_scale, as_temperature)}."
            ),
            (
                "Without it τ becomes small relative to the scores as d_k grows. The limit τ = 0 is hard routing: one "
                "key takes the whole row, and the gradient with respect to the scores vanishes."
            ),
        ],
    )
