"""A small `regard.nn.Transformer`, some tokens, and whether it sees the future."""

from __future__ import annotations

import torch

from regard.nn import Transformer

SMALL = {"vocabulary": 11, "length": 16, "layers": 2, "heads": 2, "width": 16}


def small(**kwargs) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**SMALL, **kwargs)


tokens = torch.randint(11, (3, 17), generator=torch.Generator().manual_seed(1))


def leak(model: Transformer) -> float:
    """How much the logits before the last position depend on the last token."""
    other = tokens[:, :16].clone()
    other[:, -1] = (other[:, -1] + 1) % 11
    with torch.no_grad():
        return float((model(other) - model(tokens[:, :16]))[:, :-1].abs().max())
