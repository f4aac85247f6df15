"""The inputs that `inspect` and `retrofit` accept, as the arguments of a model, batch by batch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import describe


def batches(inputs: Any, batch_size: int | None = None) -> Iterator[dict[str, Any]]:
    """The model's arguments of each batch. `batch_size` splits larger batches."""
    expected = "token ids [T] or [B, T], a dict of the model's arguments, or an iterable of such"
    if not isinstance(inputs, Iterable):
        raise TypeError(f"inputs: expected {expected}, got {describe(inputs)}")
    for item in [inputs] if isinstance(inputs, (Tensor, Mapping)) else inputs:
        if isinstance(item, Mapping):
            batch = dict(item)
        elif isinstance(item, Tensor) and item.dim() in (1, 2) and not item.is_floating_point():
            batch = {"input_ids": item if item.dim() == 2 else item[None]}
        elif isinstance(item, Sequence) and item and all(isinstance(token, int) for token in item):
            batch = {"input_ids": torch.tensor([item])}
        else:
            raise TypeError(f"inputs: expected {expected}, got {describe(item)}")
        ordered = [batch.get("input_ids"), *batch.values()]
        B = next((value.shape[0] for value in ordered if isinstance(value, Tensor) and value.dim()), 1)
        step = B if batch_size is None else batch_size
        for start in range(0, B, max(1, step)):
            yield {
                name: value[start : start + step] if isinstance(value, Tensor) and value.shape[:1] == (B,) else value
                for name, value in batch.items()
            }


def prepared(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch on the model's device, with the arguments that save memory where only the attention is of interest."""
    device = next(model.parameters()).device
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    if "labels" not in batch:
        accepted = inspect.signature(model.forward).parameters
        for name, value in (("use_cache", False), ("logits_to_keep", 1)):  # the results they would keep are not read
            if name in accepted:
                batch.setdefault(name, value)
    return batch


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """While the block runs the model is in evaluation mode and records no gradients. Then each module's mode is as it
    was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
