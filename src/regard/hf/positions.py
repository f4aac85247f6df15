"""Which queries of an attention call are padding, and the position of each query and key in its own sequence.

An attention function receives tensors without this information. `CallStack` finds it in the arguments of the model and
of its parts: hooks push a frame with the arguments when such a module is called, and pop it when the module returns.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._display import Displayed

_names: dict[type, tuple[str, ...]] = {}  # of the arguments of forward, by the class of a module
_SOUND = frozenset(("input_values", "input_features"))
_INPUTS = _SOUND | {"input_ids", "inputs_embeds", "pixel_values"}  # a module that accepts one of them is a part
_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")  # the sources of other keys


@dataclass(frozen=True, eq=False, repr=False)
class Place(Displayed):
    """The positions of an attention call's queries and keys."""

    is_cross: bool  # the keys are those of another sequence
    tokens: Tensor | None  # [B, Tq] token ids of the queries, where the model was called with token ids
    real: Tensor | None  # [B, Tq], False for padding; None: no query is padding
    first: Tensor | None  # [B|1, Tq] first key of each query's sequence (negative: a cache dropped it); None: key 0
    positions: Tensor  # [B|1, Tq] of the queries, from 0 in each sequence
    key_positions: Tensor  # [B|1, Tk]


@dataclass(eq=False)
class _Frame:
    """One call under way, of the model or of a part."""

    module: nn.Module
    arguments: dict[str, Any]
    past: int = 0  # number of tokens that the cache held before the call
    entered: Counter[int] = field(default_factory=Counter)  # how often each attention was called, by its id
    places: dict[tuple[int, int, int, bool], Place] = field(default_factory=dict)


def parts_of(model: nn.Module, attentions: Iterable[nn.Module]) -> list[nn.Module]:
    """The model and its parts that accept tokens: they may be called on their own, and the mask of a part may be built
    inside the model."""
    attending = {id(module) for module in attentions}
    return [
        module
        for module in model.modules()
        if id(module) not in attending and (module is model or _INPUTS & {*_parameters(module)})
    ]


def named_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward by name."""
    return dict(zip(_parameters(module), args, strict=False)) | kwargs


def is_cross(arguments: dict[str, Any]) -> bool:
    """Whether an attention that is called with these arguments reads the keys of another sequence."""
    return any(arguments.get(name) is not None for name in _OTHER_SEQUENCE)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    if "forward" in vars(module):  # replaced on this module alone
        return tuple(inspect.signature(module.forward).parameters)
    kind = type(module)
    if kind not in _names:  # Dynamo, which may trace this, warns about functools.cache
        _names[kind] = tuple(inspect.signature(kind.forward).parameters)[1:]
    return _names[kind]


class CallStack:
    """The calls of models and of their parts that are under way, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self._is_cross: dict[int, bool] = {}  # by attention: whether its keys are those of another sequence
        self._warned = False

    def push(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The model or a part is called."""
        arguments = named_arguments(module, args, kwargs)
        cache: Any = arguments.get("past_key_values")
        past = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        self.frames.append(_Frame(module, arguments, past))

    def pop(self, module: nn.Module) -> None:
        """The module has returned."""
        if any(frame.module is module for frame in self.frames):
            while self.frames.pop().module is not module:
                pass  # frames of calls that an exception ended

    def enter_attention(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """An attention is called."""
        self._is_cross[id(module)] = is_cross(arguments)
        if self.frames:
            self.frames[-1].entered[id(module)] += 1

    def depth(self, module: nn.Module) -> int:
        """How often the innermost call under way has called this attention before: layers may share their weights."""
        return max(0, self.frames[-1].entered[id(module)] - 1) if self.frames else 0

    def clear(self) -> None:
        self.frames.clear()

    # --- positions ----------------------------------------------------------------------------------------------------

    def place(self, module: nn.Module, B: int, Tq: int, Tk: int, position_ids: object) -> Place:
        """The positions of an attention's queries and keys. The layers of one call share the result."""
        frame = self.frames[-1] if self.frames else _Frame(module, {})
        cross = self._is_cross.get(id(module), False)
        key = (B, Tq, Tk, cross)
        if key not in frame.places:
            if position_ids is None:
                position_ids = frame.arguments.get("position_ids")
            frame.places[key] = self._find_place(frame, B, Tq, Tk, cross, position_ids)
        return frame.places[key]

    def _find_place(self, frame: _Frame, B: int, Tq: int, Tk: int, is_cross: bool, position_ids: object) -> Place:
        mask = self._padding_mask(Tq)
        past = frame.past
        dropped = 0 if is_cross else max(0, past + Tq - Tk)  # keys that the cache of a sliding window no longer holds
        real, key_positions = None, torch.arange(dropped, dropped + Tk)[None]
        first = torch.full((1, Tq), -1) if dropped else None
        if mask is not None and mask.shape[0] == B and past + Tq <= mask.shape[1] and not bool(mask.all()):
            position_of = (mask.cumsum(-1) - 1).clamp(min=0)
            real, positions = mask[:, past : past + Tq], position_of[:, past : past + Tq]
            if not is_cross:
                begin = mask.long().argmax(-1, keepdim=True) - dropped
                first = begin.expand(B, Tq) if bool(begin.any()) else None
                key_positions = (key_positions - mask.long().argmax(-1, keepdim=True)).clamp(min=0)
                known = position_of[:, dropped : dropped + Tk]
                key_positions[:, : known.shape[1]] = known
        elif isinstance(position_ids, Tensor) and position_ids.dim() == 2 and position_ids.shape[1] == Tq:
            # Packed sequences, or padding that a dense mask contains: positions count from the start of each sequence.
            positions = position_ids.cpu()
            begin = (torch.arange(past, past + Tq) - positions).clamp(min=0)
            if not is_cross and bool(begin.any()):
                first = begin - dropped
                key_positions = positions if Tq == Tk else (key_positions - begin[:, -1:]).clamp(min=0)
        else:
            positions = torch.arange(past, past + Tq)[None]
        encoder_mask = frame.arguments.get("encoder_attention_mask")
        if is_cross and isinstance(encoder_mask, Tensor) and encoder_mask.shape == (B, Tk):
            encoder_mask = encoder_mask.bool().cpu()
            key_positions = (encoder_mask.cumsum(-1) - 1).clamp(min=0)
            begin = encoder_mask.long().argmax(-1, keepdim=True)
            first = begin.expand(B, Tq) if bool(begin.any()) else None
        return Place(is_cross, self._tokens(B, Tq), real, first, positions, key_positions)

    def _tokens(self, B: int, Tq: int) -> Tensor | None:
        """The token ids of the queries. A part may receive embeddings from a module that was called with the ids."""
        ids = None
        for frame in reversed(self.frames):
            ids = frame.arguments.get("input_ids")
            if ids is not None or frame.arguments.get("encoder_hidden_states") is not None:
                break
        return ids if isinstance(ids, Tensor) and ids.shape == (B, Tq) else None

    # --- padding ------------------------------------------------------------------------------------------------------

    def _padding_mask(self, Tq: int) -> Tensor | None:
        """Which tokens of the innermost call are real, [B, T]; None if all are, or if this is not known."""
        for frame in reversed(self.frames):
            mask, tokens = frame.arguments.get("attention_mask"), frame.arguments.get("input_ids")
            tokens = frame.arguments.get("inputs_embeds") if tokens is None else tokens
            if tokens is None and isinstance(mask, Tensor) and mask.dim() == 2 and frame.arguments.keys() & _SOUND:
                return self._sound_padding_mask(frame.module, mask, Tq)
            if mask is None or tokens is None or tokens.shape[1] != Tq:
                return None
            if isinstance(mask, Tensor) and mask.dim() == 2:
                return mask.bool().cpu()
            # Otherwise the caller of this part has expanded the mask, and was itself called with the 2-D mask.
        return None

    def _sound_padding_mask(self, module: nn.Module, mask: Tensor, Tq: int) -> Tensor | None:
        """The same for a speech model: its mask has one entry per sample or frame, and may have fewer queries."""
        shorten: Any = getattr(module, "_get_feature_vector_attention_mask", None)
        if mask.shape[1] != Tq and shorten is not None:
            # The attention layers run before the adapter, where the model has one.
            before = {"add_adapter": False} if "add_adapter" in inspect.signature(shorten).parameters else {}
            mask = shorten(Tq, mask, **before)
        if mask.shape[1] == Tq:
            return mask.bool().cpu()
        if not bool(mask.all()) and not self._warned:
            self._warned = True
            warnings.warn(
                f"attention_mask: expected one of the {Tq} positions that {type(module).__name__} attends to, or a "
                f"model with a method that shortens a mask of {mask.shape[1]}; padding is counted as sound",
                stacklevel=2,
            )
        return None
