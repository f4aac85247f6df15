"""What a problem remembers for each key, kept beside a model's cache and changed with it.

A cache of transformers has a layer for each attention, which appends keys and values, drops those that have left a
window, or writes them into a tensor of fixed size. What is remembered is stored in a second layer of the same kind, so
that transformers' own code moves both alike. The class of the cache's layer becomes a subclass that repeats every
change (reordering for beam search, cropping, repeating, resetting) in the second layer. If its contents change in
another way, `remember` raises.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import cache_utils

# By the method that appends keys: a fresh layer that keeps the same keys. Numbers of a quantized cache stay exact.
_FRESH: dict[Any, Any] = {
    cache_utils.DynamicLayer.update: lambda layer: cache_utils.DynamicLayer(),
    cache_utils.DynamicSlidingWindowLayer.update: lambda layer: cache_utils.DynamicSlidingWindowLayer(
        sliding_window=layer.sliding_window
    ),
    cache_utils.StaticLayer.update: lambda layer: cache_utils.StaticLayer(max_cache_len=layer.max_cache_len),
    cache_utils.StaticSlidingWindowLayer.update: lambda layer: cache_utils.StaticSlidingWindowLayer(
        max_cache_len=layer.max_cache_len, sliding_window=layer.max_cache_len
    ),
    cache_utils.QuantizedLayer.update: lambda layer: cache_utils.DynamicLayer(),
}
if hasattr(cache_utils, "Fp8QuantizedLayer"):  # not in transformers 5.5
    _FRESH[cache_utils.Fp8QuantizedLayer.update] = lambda layer: cache_utils.DynamicLayer()
_kinds: dict[type, type] = {}  # what `_following` made
_REPEATED = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "offload",
    "prefetch",
    "reorder_cache",
    "reset",
)


@dataclass(eq=False)
class _Memory:
    """What was remembered under one name, for the keys of one cache layer."""

    layer: Any  # its "keys" are the numbers, [B, M, T, 1]
    shape: tuple[int, ...]  # of the numbers between B and T
    waiting: bool = False  # the cache has keys for which nothing has been remembered yet
    lost: str | None = None  # why it no longer fits the cache


def remember(cache: Any, module: Any, name: str, tensor: Tensor, keys: int) -> Tensor:
    """Append numbers [B, ..., Tq] to those of the earlier keys of this attention: [B, ..., keys].

    The cache has been given the keys of this call before."""
    layer = _layer_of(cache, module, name)
    memories: dict[str, _Memory] | None = layer.__dict__.get("regard_memories")
    memory = _first(layer, name, tensor) if memories is None or name not in memories else memories[name]
    if memory.lost is not None:
        raise _not_followed(name, memory.lost)
    if not memory.waiting:
        raise ValueError(
            f"remember({name!r}): expected one call in each forward of an attention, after its cache has got new keys, "
            f"got another one"
        )
    if tensor.shape[1:-1] != memory.shape:
        raise ValueError(
            f"remember({name!r}): expected the shape of the first call, [B, {', '.join(map(str, memory.shape))}, Tq], "
            f"got {list(tensor.shape)}"
        )
    stored = tensor.flatten(1, -2).unsqueeze(-1) if memory.shape else tensor[:, None, :, None]  # [B, M, Tq, 1]
    found = memory.layer.update(stored, stored[..., :0])[0]
    memory.waiting = False
    if found.shape[2] != keys:
        raise _not_followed(name, f"it has {keys} keys, and numbers were remembered for {found.shape[2]}")
    return found.squeeze(-1).reshape(found.shape[0], *memory.shape, keys)


def _layer_of(cache: Any, module: Any, name: str) -> Any:
    """The layer of a cache that holds the keys of an attention."""
    number, layers = getattr(module, "layer_idx", None), getattr(cache, "layers", None)
    if not isinstance(number, int) or layers is None or number >= len(layers):
        raise _not_followed(name, f"{type(cache).__name__} has no layer for this {type(module).__name__}")
    return layers[number]


def _first(layer: Any, name: str, tensor: Tensor) -> _Memory:
    """A new memory for a cache layer that holds the keys of this call and no others."""
    fresh = _FRESH.get(type(layer).update) if "regard_memories" not in layer.__dict__ else _FRESH.get(_kept(layer))
    if fresh is None:
        raise _not_followed(name, f"regard does not know how {type(layer).__name__} keeps its keys")
    if (before := int(layer.get_seq_length()) - tensor.shape[-1]) != 0:
        raise _not_followed(name, f"it has {before} earlier keys for which nothing was remembered")
    if "regard_memories" not in layer.__dict__:
        kind = type(layer)
        if kind not in _kinds:
            _kinds[kind] = _following(kind)
        layer.__class__ = _kinds[kind]
        layer.regard_memories, layer.regard_keys = {}, layer.keys
    own = fresh(layer)
    if getattr(layer, "record_past", False):
        own.activate_past_recording()
    memory = layer.regard_memories[name] = _Memory(own, tuple(tensor.shape[1:-1]), waiting=True)
    return memory


def _kept(layer: Any) -> Any:
    """The method that appends keys, of a layer whose class `_following` made."""
    return type(layer).__mro__[1].update


def _following(kind: type) -> type:
    """A cache layer of this kind that repeats every change in its memories."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note_changes(self)
        found = kind.update(self, *args, **kwargs)  # type: ignore[attr-defined]
        for memory in self.regard_memories.values():
            if memory.waiting:
                memory.lost = memory.lost or "it was given keys in a call that remembered nothing"
            memory.waiting = True
        self.regard_keys = self.keys
        return found

    def repeated(name: str) -> Any:
        original = getattr(kind, name)

        @functools.wraps(original)
        def change(self: Any, *args: Any, **kwargs: Any) -> Any:
            _note_changes(self)
            found = original(self, *args, **kwargs)
            for memory in self.regard_memories.values():
                getattr(memory.layer, name)(*args, **kwargs)
                if name == "reset":
                    memory.waiting, memory.lost = False, None
            self.regard_keys = self.keys
            return found

        return change

    changes = {name: repeated(name) for name in _REPEATED if hasattr(kind, name)}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_layer_type": None}
    return type(kind.__name__, (kind,), {**names, **changes, "update": update})


def _note_changes(layer: Any) -> None:
    """Keys that were replaced without a method of the cache cannot be followed."""
    if layer.keys is not layer.regard_keys:
        for memory in layer.regard_memories.values():
            memory.lost = memory.lost or "its keys were replaced by other means than its methods"


def _not_followed(name: str, why: str) -> ValueError:
    return ValueError(
        f"remember({name!r}): expected a cache that can be followed from its first token, got one that cannot: {why}"
    )
