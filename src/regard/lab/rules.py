"""Softmax and its replacements by name, as arguments of a small `Transformer`, for experiments that compare them."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..features import LinearAttention, Performer
from ..nn import Transformer
from ..problem import Free, Transport
from ..regularizers import FermiDirac, Tsallis
from .experiment import Config
from .variants import raw_dot_products, relu_features, relu_normalisation, row_sum_normalisation


def attention_named(name: str, config: Config) -> dict[str, Any]:
    """The arguments of `Transformer` for one rule. Call `draw_directions` on the model afterwards."""
    problems = {
        "softmax": Transport(),
        "entmax-1.5": Transport(Tsallis(1.5)),
        "sparsemax": Transport(Tsallis(2.0)),
        # the offset -log n makes the weights of a row sum to about 1 at the start
        "sigmoid": Transport(FermiDirac(), marginal=Free(offset=-math.log(config["length"]))),
    }
    attentions = {
        "ReLU, normalised": relu_normalisation,
        "ReLU features": relu_features,
        "row sum": row_sum_normalisation,
        "raw dot products": raw_dot_products,
        "linear (elu + 1)": LinearAttention(),
    }
    if name == "Performer":  # with a generator of its own, so that the model's weights are those of the other rules
        dim = config["width"] // config["heads"]
        return {"attention": Performer(dim, 4 * dim, generator=torch.Generator().manual_seed(0))}
    return {"problem": problems[name]} if name in problems else {"attention": attentions[name]}


def draw_directions(model: Transformer, seed: int) -> Transformer:
    """Give the Performer of each layer its own random directions, by the seed (the layers are created as copies)."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Performer):
            module.redraw(generator)
    return model
