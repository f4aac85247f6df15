"""`MultiheadAttention`: PyTorch's module with any transport problem or features. `Temperature`: learned per head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._validate import describe
from ..features import Features
from ..operator import attention
from ..plan import solve
from ..priors import Documents
from ..problem import RowsAndColumns, Transport
from .declared import HasProblem, Problem


def _same(query: Tensor, key: Tensor) -> bool:
    """Whether query and key are the same sequence. Checkpointing passes one tensor as several views of its memory."""
    if query is key or torch.compiler.is_compiling() or query.shape != key.shape:
        return query is key
    return query.stride() == key.stride() and query.dtype == key.dtype and query.data_ptr() == key.data_ptr()


def _idle(padding: Tensor) -> Tensor:
    """Where a bool or float key_padding_mask masks a key."""
    return padding if padding.dtype == torch.bool else padding == -math.inf


class Temperature(nn.Module):
    """A positive temperature for each head, learned through its logarithm: `Transport(temperature=temperature())`."""

    def __init__(self, num_heads: int, init: float = 1.0, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(f"num_heads: expected a positive int, got {describe(num_heads)}")
        if not 0 < init < math.inf:
            raise ValueError(f"init: expected a positive, finite number, got {describe(init)}")
        self.log_temperature = nn.Parameter(torch.full((num_heads,), math.log(init), device=device, dtype=dtype))

    def forward(self) -> Tensor:
        return self.log_temperature.exp()[:, None, None]  # [H, 1, 1]


class MultiheadAttention(HasProblem, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` (same arguments, same call, same state dict) whose heads solve `problem`.

    `problem` is a `Transport`, or a callable that builds one in every forward call; None is softmax. The callable may
    be a module with parameters, which becomes a submodule. If it has an argument, it receives a `Context` with the
    query's `hidden_states` [B, Tq, E], the number of `heads` and the positions. A module of
    `regard.features` may be passed instead of a problem; it supports causal attention and padding, but no other mask
    and no dropout. Masks are as in PyTorch: True in a bool mask *masks* a key, a float mask is added to the scores.

    An `nn.Parameter` in a `Transport` becomes a parameter of this module, named by its place: `problem.marginal.sink`.
    Other tensors in it become buffers. The attribute `problem` is then a module that builds the Transport from their
    current values. The state dict of a `torch.nn.MultiheadAttention` does not have these parameters: load it with
    `strict=False`.

    Differences from PyTorch: `is_causal=True` needs no `attn_mask` (if there is one, it is assumed to be the causal
    mask and is not read). A query without an admissible key gives 0, not NaN. Weights are those before dropout. With
    `RowsAndColumns` in self-attention (`query` and `key` are the same tensor, or views of the same memory), padding
    sends no mass. Weights take T x T numbers, also with features: pass `need_weights=False` for long sequences.
    """

    def __init__(self, *args: Any, problem: Problem | Features = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(problem, Features) and self.dropout:
            raise ValueError(f"dropout: expected 0 for attention by features, which has none, got {self.dropout}")
        self.problem = problem
        # Otherwise PyTorch's encoder layers compute softmax from the weights themselves and skip this forward.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.is_nested:
                raise NotImplementedError(f"{name}: expected a plain tensor, got a nested one")
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim():
                raise ValueError(
                    f"{name}: expected shape [T, E], or [B, T, E] with batch_first, else [T, B, E], as query "
                    f"{list(query.shape)}; got {list(tensor.shape)}"
                )
        batched, alone = query.dim() == 3, _same(query, key)
        if not batched:
            query, key, value = (t[None] for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(query, key, value)  # [B, H, T, D]
        if isinstance(self.problem, Features):
            keep = self._keep(attn_mask, key_padding_mask, is_causal, q.shape[0], k.shape[2])
            out, weights = self._by_features(self.problem, q, k, v, keep, is_causal, need_weights)
        else:
            mask, is_causal = self._mask(attn_mask, key_padding_mask, is_causal, q.shape[0], q.shape[2], k.shape[2])
            idle = None if key_padding_mask is None else _idle(F.pad(key_padding_mask, (0, self._added())))
            own = alone and not self._added()
            problem = self.problem_of(self.num_heads, query, None if own else k.shape[2], idle)
            if alone and key_padding_mask is not None:
                problem = self._without_idle(problem, key_padding_mask)
            out = attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal, problem=problem)
            weights = self._weights(q, k, mask, is_causal, problem) if need_weights else None
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # [B, Tq, E]
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _added(self) -> int:
        """The number of keys that are appended to the given ones."""
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head; bias_k and a key of zeros are appended, if the module has them."""
        if self.in_proj_weight is not None:
            into = self.in_proj_weight.chunk(3)
        else:
            into = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), into, biases, strict=True))
        B = q.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = torch.cat([k, self.bias_k.expand(B, 1, -1)], 1), torch.cat([v, self.bias_v.expand(B, 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (t.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        return q, k, v

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool, B: int, Tq: int, Tk: int
    ) -> tuple[Tensor | None, bool]:
        """PyTorch's masks as one mask of `attention` (bool: True keeps), and whether the plan is also causal."""
        added = self._added()
        keys = Tk - added
        masks = []
        if is_causal and added:  # every query may read the appended keys, which no causal prior expresses
            masks.append(torch.ones(Tq, keys, dtype=torch.bool, device=self.out_proj.weight.device).triu(1))
        elif attn_mask is not None and not is_causal:
            shapes = ([Tq, keys], [B * self.num_heads, Tq, keys])
            if list(attn_mask.shape) not in shapes:
                raise ValueError(f"attn_mask: expected shape {shapes[0]} or {shapes[1]}, got {list(attn_mask.shape)}")
            masks.append(attn_mask.unflatten(0, (B, self.num_heads)) if attn_mask.dim() == 3 else attn_mask)
        if padding is not None:
            if list(padding.shape) != [B, keys]:
                raise ValueError(f"key_padding_mask: expected shape {[B, keys]}, got {list(padding.shape)}")
            masks.append(padding[:, None, None])
        if not masks:
            return None, is_causal
        masks = [F.pad(mask, (0, added)) for mask in masks]  # 0 and False: the appended keys may be read
        if all(mask.dtype == torch.bool for mask in masks):
            forbidden = masks[0]
            for mask in masks[1:]:
                forbidden = forbidden | mask
            return ~forbidden, is_causal and not added
        total = None
        for mask in masks:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=self.out_proj.weight.dtype).masked_fill(mask, -math.inf)
            total = mask if total is None else total + mask
        return total, is_causal and not added

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, problem: Transport | None) -> Tensor:
        """The plan, [B, H, Tq, Tk]."""
        scores = q @ k.mT / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        return solve(scores, problem).weights

    def _without_idle(self, problem: Transport | None, padding: Tensor) -> Transport | None:
        """With both marginals, padding must not send mass either: its queries are masked."""
        if problem is None or not isinstance(problem.marginal, RowsAndColumns):
            return problem
        keys = padding.shape[1] + self._added()
        real = Documents(-_idle(padding).long(), torch.zeros(keys, dtype=torch.long, device=padding.device))
        return dataclasses.replace(problem, prior=real if problem.prior is None else problem.prior * real)

    # --- attention by features ----------------------------------------------------------------------------------------

    def _keep(
        self, attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool, B: int, Tk: int
    ) -> Tensor | None:
        """PyTorch's masks as the `key_mask` of features: which keys may be read, [B, Tk]."""
        added = self._added()
        if attn_mask is not None and not is_causal:
            raise ValueError(
                "attn_mask: expected None for attention by features, which supports only is_causal and "
                f"key_padding_mask, got {describe(attn_mask)}"
            )
        if added and is_causal:
            raise ValueError(
                "is_causal: expected False for attention by features with add_bias_kv or add_zero_attn, whose keys "
                "come after all others, got True"
            )
        if padding is None:
            return None
        if list(padding.shape) != [B, Tk - added]:
            raise ValueError(f"key_padding_mask: expected shape {[B, Tk - added]}, got {list(padding.shape)}")
        idle = _idle(padding)
        if padding.dtype != torch.bool and not bool(((padding == 0) | idle).all()):
            raise ValueError(
                "key_padding_mask: expected a bool mask, or one of 0 and -inf, for attention by features, got others"
            )
        return ~F.pad(idle, (0, added))

    def _by_features(
        self, features: Features, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, is_causal: bool, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output and, if `weights` is set, the plan, which is the output for one-hot values.

        Both come from one call, because each call may draw new random features."""
        if not weights:
            return features(q, k, v, is_causal, key_mask=keep), None
        own = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
        both = features(q, k, torch.cat([v, own], -1), is_causal, key_mask=keep)
        return both[..., : v.shape[3]], both[..., v.shape[3] :]
