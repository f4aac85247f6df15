"""`Context`: the attention call, as the callable that builds its problem receives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import describe
from ..problem import Transport


class Context:
    """The attention call for which a problem is built. A callable with one argument receives it in every forward."""

    module: nn.Module  # the attention
    heads: int
    hidden_states: Tensor  # [B, Tq, E]: what the queries are projected from
    layer: int  # number of the attention in its model, from 0
    is_cross: bool  # whether the keys are those of another sequence

    def __init__(
        self,
        module: nn.Module,
        heads: int,
        hidden_states: Tensor,
        layer: int = 0,
        *,
        keys: int | None = None,
        padding: Tensor | None = None,
    ) -> None:
        """`keys`: their number, if they are not those of the queries' own sequence. `padding` [B, Tk]: True for keys
        that are padding."""
        self.module, self.heads, self.hidden_states, self.layer = module, heads, hidden_states, layer
        self.is_cross = keys is not None
        self._keys = hidden_states.shape[1] if keys is None else keys
        self._padding = padding

    @property
    def query_positions(self) -> Tensor:
        """[B, Tq]: the position of each query in its own sequence, from 0; padding does not count."""
        return self._counted(self.hidden_states.shape[1]) if self.is_cross else self.key_positions

    @property
    def key_positions(self) -> Tensor:
        """[B, Tk]: the position of each key in its own sequence, from 0. Padding has that of the last token before it,
        or 0."""
        if self._padding is None:
            return self._counted(self._keys)
        return ((~self._padding).long().cumsum(-1) - 1).clamp(min=0)

    @property
    def lengths(self) -> Tensor:
        """[B]: the number of keys of each sequence so far, without padding."""
        return self.key_positions.amax(-1) + 1

    def remember(self, name: str, tensor: Tensor) -> Tensor:
        """Numbers per key, computed from the hidden states of this call: [B, ..., Tq] -> [B, ..., Tk] for all keys.

        In a model with a cache, what earlier calls remembered under this name comes before what this call computed, and
        both follow the cache. Call it once for a name in every call. Without a cache the result is the tensor.
        """
        self._check_remembered(name, tensor)
        if self.is_cross:
            raise other_sequence(name)
        return tensor

    def _check_remembered(self, name: str, tensor: Tensor) -> None:
        B, Tq = self.hidden_states.shape[:2]
        if not isinstance(name, str):
            raise TypeError(f"remember(name): expected a str, got {describe(name)}")
        shape = tensor.shape if isinstance(tensor, Tensor) else ()
        if len(shape) < 2 or shape[0] not in (1, B) or shape[-1] != Tq:
            raise ValueError(
                f"remember({name!r}): expected a tensor [B, ..., Tq] with B={B} sequences and the Tq={Tq} tokens of "
                f"this call, got {describe(tensor)}"
            )

    def _counted(self, T: int) -> Tensor:
        states = self.hidden_states
        return torch.arange(T, device=states.device).expand(states.shape[0], T)


def other_sequence(name: str) -> ValueError:
    return ValueError(
        f"remember({name!r}): expected keys of the sequence that the hidden states belong to, got those of another one "
        f"(cross-attention, or keys that the attention appends)"
    )


def takes_context(problem: Callable[..., Any]) -> bool:
    """Whether a callable has an argument that must be given."""
    own = inspect.signature(problem.forward if isinstance(problem, nn.Module) else problem).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in own)


def called(factory: Callable[..., Any], context: Context) -> Transport | None:
    """The problem that a callable builds for a call. Raises if it is neither a `Transport` nor None."""
    problem = factory(context) if takes_context(factory) else factory()
    if problem is not None and not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a callable that returns a Transport or None, got {describe(problem)}")
    return problem
