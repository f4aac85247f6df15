"""`qk_clip_`: clip the query and key weights of a whole model, measured on inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..features import Features
from ..nn import clip
from ..statistics import AuxRequest
from .calls import attend
from .inputs import batches, evaluation_mode, prepared
from .interception import AttentionCall, Interception

SLACK = 1e-2  # by which a score may exceed the threshold after all passes: the weights are rounded


def qk_clip_(model: nn.Module, inputs: Any, threshold: float = 100.0) -> dict[str, Tensor]:
    """Scale the query and key weights of a transformers model, in place, so that no score exceeds the threshold on
    these inputs. Returns the factor on the scores of each head, [H] by the name of the attention.

    `inputs`: as for `regard.inspect`. The model is run on them several times, at most once per attention layer and a
    few times more, because a clipped layer changes the inputs of the layers after it. `regard.nn.qk_clip_(model,
    inspection)` clips once, by scores that were already measured, as in a training step. It also documents which
    attentions can be clipped. If one cannot, an error names it, and no layer is changed.
    """
    given = list(batches(inputs))
    listener = _LargestScores()
    interception = Interception(model, listener)
    for problem in interception.problems.values():
        if isinstance(problem, Features):
            raise ValueError(f"model: expected attention with scores, got features ({problem!r})")
    total: dict[str, Tensor] = {}
    passes = len(interception.layers) + 3
    for _ in range(passes):
        listener.found.clear()
        with interception.attached(), evaluation_mode(model):
            for batch in given:
                model(**prepared(model, batch))
        factors = clip.qk_clip_(model, listener.found, threshold)
        total = {name: factor * total.get(name, 1.0) for name, factor in factors.items()}
        if all(bool((factor == 1).all()) for factor in factors.values()):
            return total
    name, worst = max(
        ((name, float(scores.max())) for name, scores in listener.found.items()), key=lambda pair: pair[1]
    )
    if worst > threshold * (1 + SLACK):
        raise RuntimeError(
            f"{name}: expected a largest score of at most {threshold:g} after {passes} passes, got {worst:g}; a mask "
            f"or position bias, which is part of the score, is not scaled"
        )
    return total


class _LargestScores:
    """A listener that keeps the largest score of each head, padding left out."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}  # [H] by the name of the attention

    def model_called(self) -> None:
        pass

    def model_returned(self) -> None:
        pass

    def attend(self, call: AttentionCall) -> Tensor:
        out, aux = attend(call.module, call.arguments, AuxRequest(max_scores=True))
        assert aux.max_scores is not None
        scores = aux.max_scores  # [B, H, Tq]
        if call.place.real is not None:
            scores = torch.where(call.place.real[:, None].to(scores.device), scores, -torch.inf)
        largest = scores.amax((0, 2))
        before = self.found.get(call.name)
        self.found[call.name] = largest if before is None else torch.maximum(before, largest)
        return out
