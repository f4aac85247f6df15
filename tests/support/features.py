"""Attention by features computed from its definition, with the whole matrix of weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.features import Features, LinearAttention, Performer, ReLUFeatures

D = 8
MAPS = {
    "elu": LinearAttention,
    "relu": ReLUFeatures,
    "relu of projections": lambda **kw: ReLUFeatures(D, 20, generator=seeded(1), **kw),
    "favor": lambda **kw: Performer(D, 20, generator=seeded(1), **kw),
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors(*lengths: int, B=2, H=4, Hkv=None, Dv=6, dtype=torch.float64, seed=0, size=D) -> list[Tensor]:
    Tq, Tk = lengths if len(lengths) == 2 else lengths * 2
    shapes = ((B, H, Tq, size), (B, Hkv or H, Tk, size), (B, Hkv or H, Tk, Dv))
    g = seeded(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def phi(module: Features, x: Tensor, scale: float | None) -> Tensor:
    """The feature map, as its paper writes it."""
    if isinstance(module, Performer):
        x = x * math.sqrt(D**-0.5 if scale is None else scale)
        w = module.projection.to(x)
        return torch.exp(x @ w.mT - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(w))
    x = x * math.sqrt(1.0 if scale is None else scale)
    if isinstance(module, LinearAttention):
        return F.elu(x) + 1
    assert isinstance(module, ReLUFeatures)
    return x.relu() if module.projection is None else (x @ module.projection.to(x).mT / math.sqrt(20)).relu()


def definition(module, q, k, v, causal=False, scale=None, key_mask=None, offset=0):
    """Output and statistics from the whole matrix of weights."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = phi(module, q, scale) @ phi(module, k, scale).mT
    if causal:
        weights = weights.tril(offset)
    if key_mask is not None:
        weights = weights * key_mask[:, None, None]
    total = weights.sum(-1, keepdim=True)
    p = torch.where(total > 0, weights / total, 0.0)
    return p @ v, {
        "lse": total.log().squeeze(-1),
        "mass": p.sum(-1),
        "first_key_mass": p[..., 0],
        "key_mass": p.sum(-2),
    }


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
