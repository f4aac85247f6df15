"""Problems from what a model computes: a registered callable builds the problem of every attention call.

Transformers gives an attention function queries, keys and values, not the hidden states they come from. A hook before
the attention module adds its hidden states and its cache as the keyword argument `regard_seen`, which the modules of
transformers pass to the attention function with the others. Nothing is stored between the two, so that threads and
`torch.compile` need no special case. Positions are found from the model's arguments (positions.py). adoption.py
installs the hooks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from .._compat import in_backward
from .._validate import describe
from ..nn.context import Context, called, other_sequence
from ..problem import Transport
from .memory import remember
from .positions import CallStack, Place, is_cross

ADOPTED = "_regard_adopted"  # the attribute of an attention that holds its `Adopted`

_numbers = itertools.count()
_threads = threading.local()  # `calls` of each thread


class Seen(NamedTuple):
    """What a factory needs of a call of an attention module: the keyword argument `regard_seen`."""

    hidden_states: Tensor | None
    cache: Any
    is_cross: bool


class Adopted(NamedTuple):
    """What an attention builds its problems with."""

    number: int  # of the `Factory`
    layer: int  # of the attention in its model
    names: tuple[str, ...]  # of the arguments of its forward
    build: Callable[..., Any]


class Factory:
    """A callable under a registered name."""

    def __init__(self, name: str, given: Callable[..., Any]) -> None:
        _check(given)
        self.name, self.given, self.number = name, given, next(_numbers)
        self.label = getattr(given, "__qualname__", None) or type(given).__qualname__
        self.text = f"{self.label}(...)" if isinstance(given, nn.Module) else self.label  # as Python writes it
        self.owned = False  # whether a model has the registered module itself; every other model has a copy
        # How the module was when it was registered: the first model that uses the name trains the module itself.
        self.as_registered = copy.deepcopy(given) if isinstance(given, nn.Module) else None

    def __repr__(self) -> str:
        return f"Factory({self.text})"

    def build(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        keys: int,
        seen: Seen | None,
        mask: object,
        position_ids: object,
    ) -> Transport | None:
        """The problem of one call, whose attention reads the first `keys` keys."""
        adopted: Adopted | None = vars(module).get(ADOPTED)
        kind = type(module).__name__
        if adopted is None:
            raise RuntimeError(
                f"attn_implementation: expected a model that was built with {self.name!r}, or that "
                f"model.set_attn_implementation({self.name!r}) was called on, got a {kind} whose configuration was "
                f"changed in another way: the parameters of {self.label} are not in the model"
            )
        B, H, Tq, _ = query.shape
        if seen is None:
            raise ValueError(
                f"hidden_states: expected an attention that passes its keyword arguments on to the attention function, "
                f"got {kind}, which does not: {self.label} cannot see its hidden states"
            )
        states = seen.hidden_states
        if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[:2] != (B, Tq):
            raise ValueError(
                f"hidden_states: expected the first argument of {kind} to have shape [B={B}, Tq={Tq}, E], got "
                f"{describe(states)}: {self.label} cannot see its hidden states"
            )
        context = _ModelContext(module, H, states, adopted.layer, seen, key.shape[2], keys, mask, position_ids)
        return called(adopted.build, context)


class _ModelContext(Context):
    """A `Context` inside of a transformers model: positions from the model's arguments, memory beside its cache."""

    def __init__(
        self,
        module: nn.Module,
        heads: int,
        hidden_states: Tensor,
        layer: int,
        seen: Seen,
        given: int,
        keys: int,
        mask: object,
        position_ids: object,
    ) -> None:
        super().__init__(module, heads, hidden_states, layer)
        self._keys, self._given, self._cache = keys, given, seen.cache
        self._mask, self._position_ids = mask, position_ids
        self.is_cross = seen.is_cross

    @property
    def query_positions(self) -> Tensor:
        return self._expanded(self._place("query_positions").positions)

    @property
    def key_positions(self) -> Tensor:
        return self._expanded(self._place("key_positions").key_positions)

    @property
    def lengths(self) -> Tensor:
        positions = self._place("lengths").key_positions
        if bool((positions.diff(dim=-1) < 0).any()):
            raise ValueError(
                "lengths: expected one sequence in each row, got packed ones; query_positions + 1 is the length of "
                "each query's own sequence so far"
            )
        return self._expanded(positions).amax(-1) + 1

    def remember(self, name: str, tensor: Tensor) -> Tensor:
        self._check_remembered(name, tensor)
        cache, B, Tq = self._cache, *self.hidden_states.shape[:2]
        if self.is_cross:
            raise other_sequence(name)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        tensor = tensor.expand(B, *tensor.shape[1:])
        if cache is not None:
            return remember(cache, self.module, name, tensor, self._given)[..., : self._keys]
        if self._given != Tq:
            raise ValueError(
                f"remember({name!r}): expected the cache of the {self._given} keys among the arguments of "
                f"{type(self.module).__name__}, got none that can be followed"
            )
        return tensor[..., : self._keys]

    def _place(self, name: str) -> Place:
        if torch.compiler.is_compiling():
            raise self._unknown(name)
        B, Tq = self.hidden_states.shape[:2]
        given, carried = self._position_ids, self._carried_places()
        key = (B, Tq, self._keys, self.is_cross, id(given))
        if in_backward():
            if key not in carried:
                raise RuntimeError(
                    f"{name}: expected a forward call, got one that activation checkpointing repeats, in which the "
                    f"model's arguments are not known; train without gradient checkpointing, or do not use {name}"
                )
            return carried[key][0]
        if not calls().frames:
            raise self._unknown(name)
        place = calls().place(self.module, B, Tq, self._keys, given)
        if self.module.training:
            carried[key] = place, given
        return place

    def _unknown(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"{name}: expected a call of the model outside of torch.compile, got a compiled one, or one of a layer "
            f"alone, where the model's arguments are not known"
        )

    def _carried_places(self) -> dict[tuple, tuple[Place, object]]:
        """Where the positions of this call are kept for checkpointing, which calls the layer again with the same mask
        and position ids: an attribute of one of these tensors. The position ids in it keep their id from another
        tensor."""
        carrier = self._mask if isinstance(self._mask, Tensor) else self._position_ids
        return vars(carrier).setdefault("regard_places", {}) if isinstance(carrier, Tensor) else {}

    def _expanded(self, positions: Tensor) -> Tensor:
        states = self.hidden_states
        return positions.to(states.device).expand(states.shape[0], -1)


# --- hooks ------------------------------------------------------------------------------------------------------------


def calls() -> CallStack:
    """The calls of models with factories that are under way in this thread."""
    if not hasattr(_threads, "calls"):
        _threads.calls = CallStack()
    return _threads.calls


def before_part(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A hook before a model or a part of it."""
    if not torch.compiler.is_compiling():
        calls().push(module, args, kwargs)


def after_part(module: nn.Module, *_: Any) -> None:
    """A hook after a model or a part of it."""
    if not torch.compiler.is_compiling():
        calls().pop(module)


def before_attention(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A hook before an attention: its hidden states and its cache go to the attention function."""
    arguments = dict(zip(vars(module)[ADOPTED].names, args, strict=False)) | kwargs
    if not torch.compiler.is_compiling():
        calls().enter_attention(module, arguments)
    states = arguments.get("hidden_states", next(iter(arguments.values()), None))
    cache = arguments.get("past_key_values", arguments.get("layer_past"))
    return args, {**kwargs, "regard_seen": Seen(states, cache, is_cross(arguments))}


# --- what may be registered -------------------------------------------------------------------------------------------


def _check(given: Callable[..., Any]) -> None:
    """Raise for a callable that cannot be a factory, or whose parameters no model could have."""
    if isinstance(given, type) and not issubclass(given, nn.Module):
        raise TypeError(f"problem: expected a class of modules, a module or a function, got the class {given.__name__}")
    if not isinstance(given, type):
        target = given.forward if isinstance(given, nn.Module) else given
        required = [
            p for p in inspect.signature(target).parameters.values() if p.default is p.empty and p.kind not in (2, 4)
        ]
        if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
            names = ", ".join(p.name for p in required)
            raise TypeError(f"problem: expected a callable of one argument, the context, got one of ({names})")
    if not isinstance(given, (nn.Module, type)) and (hidden := _hidden_in(given)) is not None:
        raise ValueError(
            f"problem: expected a module that owns what it learns, got a function with {hidden}, which no model's "
            f"parameters() would contain; make it the forward of a module"
        )


def _hidden_in(function: Any) -> str | None:
    """A module or a learned tensor that a function refers to."""
    held: list[Any] = [getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values(), getattr(function.func, "__self__", None)]
    held += list(inspect.getclosurevars(function).nonlocals.values()) if inspect.isfunction(function) else []
    for one in held:
        if isinstance(one, nn.Module) and next(one.parameters(), None) is not None:
            return f"the module {type(one).__name__}"
        if isinstance(one, Tensor) and one.requires_grad:
            return describe(one)
    return None
