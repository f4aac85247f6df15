"""T5's relative position bias as a table: `RelativeBias`, in place of a [1, H, Tq, Tk] tensor.

T5 and its relatives (mT5, UMT5, Switch Transformers, Pop2Piano, the decoders of LongT5, Pix2Struct and UDOP) compute
the bias in a method `compute_bias` of their first attention and pass the tensor on to the other layers. They pass a
tensor of zeros to cross-attention. `use_tables` wraps these methods, so that they give a `RelativeBias` where the
attention function is ours. Our attention function reads it as the prior `Relative`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import pytree
from ..priors import Prior
from ..problem import Transport
from ..regularizers import KL
from ..structured import Relative

_ARGUMENTS = ("self", "query_length", "key_length", "device", "past_seen_tokens")  # of `compute_bias`
_wrapped: set[type] = set()


class RelativeBias:
    """The position bias [1, H, Tq, Tk] of a T5 attention, of which only a table over the distances is stored.

    Our attention function reads the table. For any torch function it behaves as the dense bias, gradient included. It
    is no tensor: activation checkpointing passes it from layer to layer as it is.
    """

    def __init__(self, owner: Any, compute: Callable[..., Tensor], arguments: tuple[int, int, Any, int]) -> None:
        self.owner, self.compute = owner, compute
        self.query_length, self.key_length, self.device, self.offset = arguments
        weights = getattr(owner, "relative_attention_bias", None)
        self.weights: Tensor | None = None if weights is None else weights.weight  # None: cross-attention, without bias
        self._table = None if weights is None else self._new_table()

    def _new_table(self) -> Tensor:
        """The bias of every distance from -R to R, [H, 2R + 1]: that of one query with R keys on either side.

        The model's own method computes it. From R = max_distance on, all distances share a bucket."""
        R = self.owner.relative_attention_max_distance
        return self.compute(self.owner, 1, 2 * R + 1, device=self.device, past_seen_tokens=R)[0, :, 0]

    def table(self) -> Tensor:
        assert self._table is not None and self.weights is not None
        if self.weights.requires_grad and torch.is_grad_enabled() and not self._table.requires_grad:
            return self._new_table()  # the first layer ran without gradient, as in reentrant checkpointing
        return self._table

    def as_prior(self, Tq: int, Tk: int, temperature: object) -> list[Prior] | None:
        """The bias as a prior (none for cross-attention), for scores that are divided by this temperature.

        None if there is no such prior: the temperature is not one positive number per head, or the queries are not at
        the first or the last of these keys."""
        if self.weights is None:
            return []
        if Tq == Tk and self.offset == 0:
            alignment = None
        elif self.offset in (0, Tk - Tq):
            alignment = "bottom_right" if self.offset else "top_left"
        else:
            return None
        table = self.table()
        if isinstance(temperature, Tensor):
            per_head = temperature.dim() <= 3 and temperature.shape[-2:].numel() <= 1
            if not per_head or temperature.numel() not in (1, table.shape[0]):
                return None
            table = table / temperature.reshape(-1, 1)  # a bias of the score is divided by it, a prior is not
        elif not isinstance(temperature, (float, int)) or temperature == 0:
            return None
        elif temperature != 1:
            table = table / temperature
        return [Relative(table, alignment)]

    def dense(self) -> Tensor:
        """The bias as the model computes it, [1, H, Tq, Tk]."""
        if self.weights is None:
            shape = (1, self.owner.n_heads, self.query_length, self.key_length)
            return torch.zeros(shape, device=self.device)
        return self.compute(
            self.owner, self.query_length, self.key_length, device=self.device, past_seen_tokens=self.offset
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args = pytree.tree_map_only(RelativeBias, RelativeBias.dense, args)
        return func(*args, **pytree.tree_map_only(RelativeBias, RelativeBias.dense, kwargs or {}))

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __repr__(self) -> str:
        return f"RelativeBias({self.query_length} x {self.key_length}, offset={self.offset})"


def read_bias(
    bias: Tensor | RelativeBias | None, problem: Transport | None, temperature: object, Tq: int, Tk: int
) -> tuple[list[Prior], Tensor | None]:
    """A position bias for the first Tk keys, as priors or as a dense tensor.

    A bias is part of the score. The plan of KL is the same if it is a prior; other regularisers get the tensor."""
    if isinstance(bias, RelativeBias):
        softmax = problem is None or isinstance(problem.regularizer, KL)
        found = bias.as_prior(Tq, Tk, temperature) if softmax else None
        if found is not None:
            return found, None
        bias = bias.dense()
    return [], bias if bias is None else bias[..., :Tk]


def use_tables(attentions: list[nn.Module], is_ours: Callable[[str | None], bool]) -> None:
    """Wrap the classes of these modules that compute T5's bias, so that they give a `RelativeBias` where the
    implementation of attention `is_ours`. Under torch.compile, and with any other implementation, nothing changes."""
    for kind in {type(module) for module in attentions}:
        compute = getattr(kind, "compute_bias", None)
        if kind not in _wrapped and compute and tuple(inspect.signature(compute).parameters) == _ARGUMENTS:
            _wrap(kind, is_ours)
            _wrapped.add(kind)


def _wrap(kind: Any, is_ours: Callable[[str | None], bool]) -> None:
    compute, run = kind.compute_bias, kind.forward

    def active(self: Any) -> bool:
        return not torch.compiler.is_compiling() and is_ours(self.config._attn_implementation_internal)

    @functools.wraps(compute)
    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int | Tensor = 0
    ) -> Tensor | RelativeBias:
        if not active(self):
            return compute(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        return RelativeBias(self, compute, (query_length, key_length, device, int(past_seen_tokens)))

    @functools.wraps(run)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.has_relative_attention_bias or not active(self):
            return run(self, *args, **kwargs)
        # Without a bias of its own the method writes zeros. With the flag set it calls `compute_bias` instead.
        self.has_relative_attention_bias = True
        try:
            return run(self, *args, **kwargs)
        finally:
            self.has_relative_attention_bias = False

    kind.compute_bias, kind.forward = compute_bias, forward
