"""Batches of gradients: `torch.autograd.grad(..., is_grads_batched=True)`, `jacobian(..., vectorize=True)`, gradcheck.

In these calls PyTorch passes its older kind of batched tensor to backward, which has neither memory nor rules for most
views. The functions of this file convert the batch to plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat import (
    add_legacy_batch,
    is_legacy_batchedtensor,
    legacy_vmap_level,
    register_batching_rule,
    remove_legacy_batch,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

_TOGETHER = 2**24  # how many numbers the samples that are computed together may store


def per_sample(pull: Callable[..., Any], grads: tuple[Tensor, ...], size: int) -> Any:
    """Call `pull(*grads)`. If the gradients are a batch, call it for each sample by `torch.func.vmap`. A sample stores
    about `size` numbers, which bounds how many samples are computed together."""
    if not any(map(is_legacy_batchedtensor, grads)):
        return pull(*grads)
    plain, dims, level = _unbatched(grads)
    found = torch.func.vmap(pull, dims, chunk_size=max(1, _TOGETHER // max(1, size)))(*plain)
    return tree_map(lambda t: add_legacy_batch(t, level), found)


def one_by_one(pull: Callable[..., Any], grads: tuple[Tensor, ...]) -> Any:
    """The same by a loop over the samples, for functions that `torch.func.vmap` cannot transform."""
    if not any(map(is_legacy_batchedtensor, grads)):
        return pull(*grads)
    plain, dims, level = _unbatched(grads)
    size = next(t.shape[0] for t, dim in zip(plain, dims, strict=True) if dim == 0)
    samples = [pull(*(t if dim is None else t[i] for t, dim in zip(plain, dims, strict=True))) for i in range(size)]
    stacked = tree_map(lambda *parts: torch.stack(parts), *samples)
    return tree_map(lambda t: add_legacy_batch(t, level), stacked)


def _unbatched(grads: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[int | None, ...], int]:
    """The tensors with the batch as an ordinary first dimension, its place in each (None: not batched), and its
    level."""
    level = legacy_vmap_level()
    dims = tuple(0 if is_legacy_batchedtensor(grad) else None for grad in grads)
    plain = [g if dim is None else remove_legacy_batch(g, level) for g, dim in zip(grads, dims, strict=True)]
    if any(map(is_legacy_batchedtensor, plain)):
        raise NotImplementedError("is_grads_batched: expected one batch of gradients, got a batch inside a batch")
    return plain, dims, level


def batch_by_loop(operator: Any) -> None:
    """Register a rule by which the backward operator of compiled calls takes batched gradients (`is_grads_batched`)."""

    def batched(*arguments: Any) -> Any:
        flat, tree = tree_flatten(arguments)
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and is_legacy_batchedtensor(x)]

        def pull(*sample: Tensor) -> Any:
            chosen = dict(zip(places, sample, strict=True))
            return operator(*tree_unflatten([chosen.get(i, x) for i, x in enumerate(flat)], tree))

        return one_by_one(pull, tuple(flat[i] for i in places))

    register_batching_rule(operator, batched)
