"""The mask function that transformers calls: masks described by their structure, in O(Tq + Tk) memory.

Where transformers would write out a Tq x Tk mask (padding, a sliding window, packed sequences, a chunk of a prefill),
`make_mask` returns a `StructuredMask`. Our attention function reads its structure as priors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from .._compat import pytree
from ..priors import Causal, Documents, Prior, Window
from .models import check_configuration


class StructuredMask(Tensor):
    """A bool mask [B, 1, Tq, Tk] described by a band of keys around each query, the padding, and documents.

    Our attention function reads the structure. For any other operation it behaves as the tensor itself: the operation
    receives the dense mask.
    """

    left: int | None  # the band begins at key position - left; None: no limit
    right: int | None  # the band ends at key position + right; None: no limit
    offset: int  # query i is at key position i + offset
    padding: Tensor | None  # [B, Tk], True for a real key
    documents: Tensor | None  # [B, T] document of each position, for Tq = Tk = T

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device,
        left: int | None,
        right: int | None,
        offset: int,
        padding: Tensor | None,
        documents: Tensor | None,
    ) -> StructuredMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)  # type: ignore[attr-defined]
        mask.left, mask.right, mask.offset, mask.padding, mask.documents = left, right, offset, padding, documents
        return mask

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        parts = {name: getattr(self, name) is not None for name in ("padding", "documents")}
        named = "".join(f", {name}" for name, present in parts.items() if present)
        return f"StructuredMask({list(self.shape)}, left={self.left}, right={self.right}, offset={self.offset}{named})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func}: a StructuredMask cannot be changed in place; clone() it first")
        args = pytree.tree_map_only(StructuredMask, StructuredMask.dense, args)
        return func(*args, **pytree.tree_map_only(StructuredMask, StructuredMask.dense, kwargs or {}))

    def dense(self) -> Tensor:
        """The mask as a dense bool tensor."""
        B, _, Tq, Tk = self.shape
        distance = torch.arange(Tk, device=self.device) - torch.arange(Tq, device=self.device)[:, None] - self.offset
        mask = torch.ones(B, 1, Tq, Tk, dtype=torch.bool, device=self.device)
        if self.left is not None:
            mask &= distance >= -self.left
        if self.right is not None:
            mask &= distance <= self.right
        if self.padding is not None:
            mask &= self.padding[:, None, None]
        if self.documents is not None:
            mask &= self.documents[:, None, :, None] == self.documents[:, None, None, :]
        return mask

    def fits(self, Tq: int, Tk: int) -> bool:
        """Whether `priors` can express the mask for these lengths."""
        return (Tq, Tk) == tuple(self.shape[2:]) and (self.offset == 0 or self.offset == self.reach() - Tq)

    def priors(self) -> tuple[list[Prior], int]:
        """The mask as priors over the first `reach()` keys, and that number. No query sees a later key."""
        Tq, Tk = self.shape[2], self.reach()
        alignment = None if Tq == Tk else "top_left" if self.offset == 0 else "bottom_right"
        factors: list[Prior] = []
        if self.left is not None:
            factors.append(Window(self.left, self.right, alignment))
        elif self.right is not None:
            factors.append(Causal(alignment) if self.right == 0 else Window(None, self.right, alignment))
        if self.padding is not None:
            same = torch.zeros(Tq, dtype=torch.long, device=self.device)
            factors.append(Documents(same, self.padding[:, :Tk].long() - 1))
        if self.documents is not None:
            factors.append(Documents(self.documents))
        return factors, Tk

    def reach(self) -> int:
        """The number of leading keys that contains every key that some query sees."""
        Tq, Tk = self.shape[2:]
        return Tk if self.right is None else max(0, min(Tk, Tq + self.offset + self.right))


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
    structure = None
    if not torch.compiler.is_compiling():
        if config is not None:
            check_configuration(type(config))
        if q_length > 1:  # the dense mask of a single query is small
            structure = _structure(mask_function)
    if structure is None or (structure[2] is not None and not structure[2].shape[-1] == q_length == kv_length):
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
    left, right, documents = structure
    offset = int(q_offset) - kv_offset
    if left is not None and offset + q_length - 1 <= left:
        left = None  # the window of every query reaches the first key
    device = torch.device(device)
    padding = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padding is not None
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device, torch.bool)
    mask = StructuredMask((batch_size, 1, q_length, kv_length), device, left, right, offset, padding, documents)
    if padding is not None and bool(padding[:, : mask.reach()].all()):
        mask.padding = padding = None
    if left is None and padding is None and documents is None:
        if allow_is_causal_skip and right == 0 and offset == 0:
            return None
        if allow_is_bidirectional_skip and right is None:
            return None
    return mask


# --- reading transformers' mask functions -----------------------------------------------------------------------------

_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_WINDOW_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__


def _structure(function: Callable) -> tuple[int | None, int | None, Tensor | None] | None:
    """(left, right, documents) of a mask function of transformers, or of several joined by `and_masks`; None for any
    other function."""
    if function is masking_utils.causal_mask_function:
        return None, 0, None
    if function is masking_utils.bidirectional_mask_function:
        return None, None, None
    code, held = _code_and_closure(function)
    if code is _WINDOW:
        return held["sliding_window"] - 1, None, None
    if code is _WINDOW_BOTH:
        return held["sliding_window"], held["sliding_window"], None
    if code is _PACKED:
        return None, None, held["packed_sequence_mask"]
    if code is not _AND:
        return None
    left = right = documents = None
    for part in map(_structure, held["mask_functions"]):
        if part is None or (documents is not None and part[2] is not None):
            return None
        left = part[0] if left is None else left if part[0] is None else min(left, part[0])
        right = part[1] if right is None else right if part[1] is None else min(right, part[1])
        documents = part[2] if documents is None else documents
    return left, right, documents


def _code_and_closure(function: Callable) -> tuple[Any, dict[str, Any]]:
    """A function's code object and the variables of its closure by name."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    values = (cell.cell_contents for cell in cells)
    return code, {} if code is None else dict(zip(code.co_freevars, values, strict=True))
