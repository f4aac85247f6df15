"""The mask function that transformers calls: masks described by their structure, without a Tq x Tk tensor.

Where transformers would write out a Tq x Tk mask (padding, a sliding window, packed sequences, chunks, images inside of
a text, a bidirectional prefix, a part of a prefill), `make_mask` returns a `StructuredMask`. Our attention function
reads its structure as priors. Transformers describes a mask by a function of indices, which `and_masks` and `or_masks`
combine. We read the parts that transformers itself defines: intersections become products of priors, unions become
unions. A mask with a function of a model's own, or one that arrives as a tensor, stays dense.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from .._compat import pytree, without_memory, writes_to_arguments
from ..priors import Alignment, Causal, Documents, PlanShape, Prior, Product, Union, Window
from .models import check_configuration


class StructuredMask(Tensor):
    """A bool mask [B, 1, Tq, Tk] described by priors of 0 and 1, and the padding.

    Our attention function reads the structure. For any other operation it behaves as the tensor itself: the operation
    receives the dense mask.
    """

    region: Prior | None  # without an alignment; None: everything
    offset: int  # query i is at key position i + offset
    padding: Tensor | None  # [B, Tk], True for a real key
    _priors: tuple[list[Prior], int] | None  # what `priors` found: maps of tiles are cached by the prior's tensors

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device,
        region: Prior | None,
        offset: int,
        padding: Tensor | None,
    ) -> StructuredMask:
        mask = without_memory(cls, shape, torch.bool, device)
        mask.region, mask.offset, mask.padding, mask._priors = region, offset, padding, None
        return mask

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        padding = "" if self.padding is None else ", padding"
        return f"StructuredMask({list(self.shape)}, {self.region!r}, offset={self.offset}{padding})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if writes_to_arguments(func):
            raise NotImplementedError(f"{func}: a StructuredMask cannot be changed in place; clone() it first")
        args = pytree.tree_map_only(StructuredMask, StructuredMask.dense, args)
        return func(*args, **pytree.tree_map_only(StructuredMask, StructuredMask.dense, kwargs or {}))

    def dense(self) -> Tensor:
        """The mask as a dense bool tensor."""
        B, _, Tq, Tk = self.shape
        mask = torch.ones(B, 1, Tq, Tk, dtype=torch.bool, device=self.device)
        if self.region is not None:
            shape = PlanShape((B, 1), Tq, Tk, torch.float32, self.device, self.offset)
            b, i, j = (torch.arange(n, device=self.device) for n in (B, Tq, Tk))
            mask &= self.region.admits(shape, b[:, None, None, None], i[:1], i[:, None], j)
        if self.padding is not None:
            mask &= self.padding[:, None, None]
        return mask

    def fits(self, Tq: int, Tk: int) -> bool:
        """Whether `priors` can express the mask for these lengths."""
        return (Tq, Tk) == tuple(self.shape[2:]) and (self.offset == 0 or self.offset == self.reach() - Tq)

    def priors(self) -> tuple[list[Prior], int]:
        """The mask as priors over the first `reach()` keys, and that number. No query sees a later key."""
        if self._priors is not None:
            return list(self._priors[0]), self._priors[1]
        Tq, Tk = self.shape[2], self.reach()
        alignment = None if Tq == Tk else "top_left" if self.offset == 0 else "bottom_right"
        factors: list[Prior] = []
        if self.region is not None:
            factors += _fitted(self.region, Tk, alignment).factors()
        if self.padding is not None:
            same = torch.zeros(Tq, dtype=torch.long, device=self.device)
            factors.append(Documents(same, self.padding[:, :Tk].long() - 1))
        self._priors = factors, Tk
        return list(factors), Tk

    def reach(self) -> int:
        """The number of leading keys that contains every key that some query sees."""
        Tq, Tk = self.shape[2:]
        return Tk if self.region is None else max(0, min(Tk, _reach(self.region, Tq + self.offset, Tk)))


def _reach(prior: Prior, stop: int, Tk: int) -> int:
    """A bound for the last key that the prior admits, plus 1, for queries at positions below `stop`."""
    if isinstance(prior, Product):
        return min(_reach(part, stop, Tk) for part in prior.parts)
    if isinstance(prior, Union):
        return max(_reach(part, stop, Tk) for part in prior.parts)
    if isinstance(prior, Causal):
        return stop
    if isinstance(prior, Window) and prior.right is not None:
        return stop + prior.right
    if isinstance(prior, Documents):
        ids = prior.query_ids if prior.key_ids is None else prior.key_ids
        last = torch.where(ids >= 0, torch.arange(1, Tk + 1, device=ids.device), 0).max()
        return int(last)
    return Tk


def _fitted(prior: Prior, Tk: int, alignment: Alignment | None) -> Prior:
    """The same prior for the first Tk keys, with this alignment."""
    if isinstance(prior, (Product, Union)):
        join = operator.mul if isinstance(prior, Product) else operator.or_
        return functools.reduce(join, (_fitted(part, Tk, alignment) for part in prior.parts))
    if isinstance(prior, (Causal, Window)):
        return dataclasses.replace(prior, alignment=alignment)
    assert isinstance(prior, Documents) and prior.key_ids is not None
    return Documents(prior.query_ids, prior.key_ids[:, :Tk])


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask that transformers passes to the attention function.

    None where `as_call` can infer the mask, a `StructuredMask` where the structure is known, and otherwise the dense
    mask of transformers.
    """
    region: Prior | _Everything | None = None
    if not torch.compiler.is_compiling():
        if config is not None:
            check_configuration(type(config))
        if q_length > 1:  # the dense mask of a single query is small
            offset = int(q_offset)
            queries, keys = slice(offset, offset + q_length), slice(kv_offset, kv_offset + kv_length)
            region = _region(mask_function, queries, keys)
    if region is None:
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **kwargs,
        )
    device = torch.device(device)
    padding = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padding is not None
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device, torch.bool)
    found = None if isinstance(region, _Everything) else region
    mask = StructuredMask((batch_size, 1, q_length, kv_length), device, found, int(q_offset) - kv_offset, padding)
    if padding is not None and bool(padding[:, : mask.reach()].all()):
        mask.padding = padding = None
    if padding is None:
        if allow_is_causal_skip and found == Causal() and mask.offset == 0:
            return None
        if allow_is_bidirectional_skip and found is None:
            return None
    return mask


# --- reading transformers' mask functions -----------------------------------------------------------------------------

_AND = masking_utils.and_masks().__code__
_OR = masking_utils.or_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_WINDOW_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__
_CHUNKED = masking_utils.chunked_overlay(1, torch.empty(0)).__code__
_BLOCKS = None  # transformers 5.5 has no such mask
if hasattr(masking_utils, "blockwise_overlay"):
    _BLOCKS = masking_utils.blockwise_overlay(torch.empty(0)).__code__


class _Everything:
    """The prior that admits every pair."""


def _region(function: Callable, queries: slice, keys: slice) -> Prior | _Everything | None:
    """A mask function of transformers, or several joined by `and_masks` and `or_masks`, as a prior of 0 and 1 for the
    queries and keys at these positions. None for any other function."""
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return _Everything()
    code, held = _code_and_closure(function)
    if code is _WINDOW or code is _WINDOW_BOTH:
        left, right = held["sliding_window"] - 1, None
        if code is _WINDOW_BOTH:
            left = right = held["sliding_window"]
        if right is None and queries.stop - 1 - keys.start <= left:
            return _Everything()  # the window of every query reaches the first key
        return Window(left, right)
    if code is _CHUNKED:
        before = held["left_padding"][:, None]
        last = max(queries.stop, keys.stop)
        return _same((torch.arange(last, device=before.device) - before) // held["chunk_size"], queries, keys)
    if code is _PACKED:
        return _same(held["packed_sequence_mask"], queries, keys)
    if code is _BLOCKS:
        return _documents(held["block_sequence_ids"], queries, keys)
    if code is not _AND and code is not _OR:
        return None
    found: Prior | _Everything | None = None
    for part in held["mask_functions"]:
        region = _region(part, queries, keys)
        if region is None:
            return None
        found = region if found is None else _joined(found, region, code is _AND)
    return found


def _joined(one: Prior | _Everything, other: Prior | _Everything, both: bool) -> Prior | _Everything:
    """The intersection (`both`) or the union of two regions."""
    if isinstance(one, _Everything):
        return other if both else one
    if isinstance(other, _Everything):
        return one if both else other
    if not both:
        return one | other
    for window, causal in ((one, other), (other, one)):
        if isinstance(window, Window) and isinstance(causal, Causal):
            return Window(window.left, 0 if window.right is None else min(0, window.right))
    return one * other


def _same(ids: Tensor, queries: slice, keys: slice) -> Documents | None:
    """Pairs of equal ids, which may be negative."""
    return _documents(ids - ids.min(), queries, keys)


def _documents(ids: Tensor, queries: slice, keys: slice) -> Documents | None:
    """Pairs of equal ids [B, T] that are not negative. None if there is no id for some position."""
    if ids.dim() != 2 or ids.shape[1] < max(queries.stop, keys.stop):
        return None
    return Documents(ids[:, queries].long(), ids[:, keys].long())


def _code_and_closure(function: Callable) -> tuple[Any, dict[str, Any]]:
    """A function's code object and the variables of its closure by name."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    values = (cell.cell_contents for cell in cells)
    return code, {} if code is None else dict(zip(code.co_freevars, values, strict=True))
