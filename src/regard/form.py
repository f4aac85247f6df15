"""The normal form of a problem: `Form`, one flat record that every solver and every backend reads.

`lower` (lowering.py) checks the arguments of `attention` and fills the record. Later code reads the record only, not
the user's objects.

Shape letters, here and everywhere: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D, Dv head sizes.
Almost every tensor broadcasts to [B, H, Tq, Tk]; `_AXES` lists the others. So one rule cuts a block out of a problem
(`Form.cut`), and a block of a Form is again a Form. A tensor that is given with broadcast dimensions is never expanded.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _dropout, tiles
from ._validate import Scalar, compute_dtype, concrete
from .compiled import pairs
from .regularizers import Regularizer, regularizer_of


class ColumnSettings(NamedTuple):
    """How precisely a plan with both marginals is solved: the settings of `RowsAndColumns`."""

    tolerance: float
    max_iterations: int
    iterations: int | None
    strict: bool


@dataclass(eq=False)
class Form:
    """A lowered problem. A part that is absent is None, or an empty list. A Scalar is a number or a tensor
    [B|1, H|1, Tq|1, 1]. The arguments of the compiled operators are made from the annotated types of these fields."""

    query: Tensor | None = None  # [B, H, Tq, D]
    key: Tensor | None = None  # [B, Hkv, Tk, D]
    value: Tensor | None = None  # [B, Hkv, Tk, Dv]

    # The score is s = softcap * tanh(scale * qk / softcap) + score_bias.
    scale: float = 1.0
    softcap: float | None = None
    score_bias: Tensor | None = None  # a float attn_mask

    # The prior is pi = density * exp(sum(log_priors) - slopes * |distance| + relative[distance] + <query_factor,
    # key_factor> + decay_query - decay_key + function), and pi = 0 where a key is masked.
    mask: Tensor | None = None  # a bool attn_mask, True = admissible
    log_priors: list[Tensor] = field(default_factory=list)
    slopes: Tensor | None = None  # [1, H|1, 1, 1]
    relative: Tensor | None = None  # [1, H|1, 1, 2R + 1], by distance; distances beyond R count as R
    query_factor: Tensor | None = None  # [B|1, H|1, Tq, r]
    key_factor: Tensor | None = None  # [B|1, H|1, Tk, r]
    decay_query: Tensor | None = None  # [B|1, H|1, Tq, 1] float64: cumulative sums, of which only differences count
    decay_key: Tensor | None = None  # [B|1, H|1, 1, Tk] float64
    density: Tensor | None = None  # a key of density 0 has no weight, but is read
    selected: Tensor | None = None  # [B|1, H|1, Tq, n]: key j is masked unless j // block is there; -1 is no block
    selected_block: int = 1
    tile_map: Tensor | None = None  # [B|1, H|1, tiles, tiles]: a mask by tiles of 64 x 64 pairs (tiles.py)
    tiles: Tensor | None = None  # [n, 64]
    query_ids: Tensor | None = None  # [B|1, 1, Tq, 1]; a key is admissible if its id is the query's, and not negative
    key_ids: Tensor | None = None  # [B|1, 1, 1, Tk]
    function: str | None = None  # log pi as a graph of b, h, position, j (compiled/pairs.py)
    captured: list[Tensor] = field(default_factory=list)  # the tensors that it reads
    untraced: str | None = None  # why a function of the user's is not here, but a dense log-prior
    left: int | None = None  # the first admissible key of query i is i + offset - left
    right: int | None = None  # the last one at position + right
    offset: int = 0  # query i is at key position i + offset

    # The regulariser, by its name and its parameters.
    family: str = "kl"
    parameters: list[Scalar] = field(default_factory=list)

    # The marginal: "rows", "sink", "relax", "free" or "columns" (both marginals).
    marginal: str = "rows"
    mass: float = 1.0  # that each query sends
    marginal_parameter: Scalar = 0.0  # sink: its score; free: the offset; relax, columns: rho (0: no penalty)
    row_mass: Tensor | None = None  # columns: [B|1, H|1, Tq|1, 1], in place of `mass`
    column_mass: Tensor | None = None  # columns: [B|1, H|1, 1, Tk|1]

    # The temperature, or the statistic that it is found from.
    temperature: Scalar = 1.0
    hard: bool = False  # whether some row may have temperature 0
    matched: str | None = None  # "kl" or "entropy": find each row's temperature, where this statistic is `budget`
    budget: Tensor | None = None  # [B|1, H|1, Tq|1, 1]

    # Dropout: a hash of (index of the key, index of the query, dropout_key) decides which weights are dropped.
    dropout_p: float = 0.0
    dropout_key: Tensor | None = None  # [B, H, 1, 1] of 32-bit integers

    # Where this block begins in the whole plan.
    first_query: int = 0
    first_key: int = 0
    first_batch: int = 0
    first_head: int = 0

    # Objects that a torch.library operator does not need: an FDivergence (its family name is passed), the settings of
    # columns, and the dtype that the output is cast to.
    declared: Regularizer | None = None
    columns: ColumnSettings | None = None
    output_dtype: torch.dtype | None = None  # None: the query's

    @property
    def regularizer(self) -> Regularizer:
        return regularizer_of(self.family, self.parameters) if self.declared is None else self.declared

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, Tq, Tk."""
        assert self.query is not None and self.key is not None
        B, H, Tq, _ = self.query.shape
        return B, H, Tq, self.key.shape[2]

    @property
    def group(self) -> int:
        """The number of query heads that share one key/value head."""
        assert self.query is not None and self.key is not None
        return max(1, self.query.shape[1] // max(1, self.key.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation: float32 for half types."""
        assert self.query is not None
        return compute_dtype(self.query.dtype)

    @property
    def known_hard(self) -> bool:
        """Whether some row is known to have temperature 0 (the value of a traced temperature is not known)."""
        return self.hard and (not isinstance(self.temperature, Tensor) or concrete(self.temperature))

    @property
    def weighted(self) -> bool:
        """Whether the prior may have other values than 0 and 1."""
        terms = (self.slopes, self.relative, self.query_factor, self.decay_query, self.density)
        return bool(self.log_priors) or self.function is not None or any(term is not None for term in terms)

    @property
    def has_prior(self) -> bool:
        """Whether some pair may be masked or weighted, by the prior or by a mask."""
        masks = (self.mask, self.score_bias, self.left, self.right, self.query_ids, self.selected, self.tile_map)
        return self.weighted or any(mask is not None for mask in masks)

    # --- tensors --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The tensors present, by slot. Those of a list are numbered: "log_priors.0"."""
        fields = self.__dict__
        found = {n: t for n in SLOTS if (t := fields[n]) is not None and isinstance(t, Tensor)}
        for name in LISTS:
            for n, part in enumerate(fields[name]):
                if isinstance(part, Tensor):
                    found[f"{name}.{n}"] = part
        return found

    def requires_grad(self) -> bool:
        """Whether some tensor requires a gradient."""
        assert self.query is not None and self.key is not None and self.value is not None
        if self.query.requires_grad or self.key.requires_grad or self.value.requires_grad:
            return True
        return any(tensor.requires_grad for tensor in self.tensors().values())

    def with_tensors(self, tensors: dict[str, Tensor]) -> Form:
        """The same problem with other tensors in some of its slots."""
        fields: dict[str, Any] = self.__dict__ | tensors
        for name in LISTS:
            if parts := fields[name]:
                fields[name] = [fields.pop(f"{name}.{n}", part) for n, part in enumerate(parts)]
        form = Form.__new__(Form)  # every field is set: skip the defaults
        form.__dict__ = fields
        return form

    def without_tensors(self) -> Form:
        """The same problem with None in every slot (lists keep their length). Autograd saves the tensors itself."""
        return self.with_tensors(dict.fromkeys(self.tensors()))  # type: ignore[arg-type]

    def detached(self) -> Form:
        """The same problem outside of autograd."""
        return self.with_tensors({name: tensor.detach() for name, tensor in self.tensors().items()})

    def widened(self) -> Form:
        """The same problem in float64. Masks, float masks and log-priors keep their dtype, because backends read
        any."""
        if self.dtype == torch.float64:
            return self
        tensors = {n: t for n, t in self.tensors().items() if t.is_floating_point() and n != "score_bias"}
        return self.with_tensors({n: t.double() for n, t in tensors.items() if not n.startswith("log_priors")})

    def without_scores(self) -> Form:
        """The prior alone: every score is 0, except where a float mask is -inf."""
        assert self.query is not None and self.key is not None
        mask = self.mask
        if self.score_bias is not None:
            allowed = self.score_bias != -math.inf
            mask = allowed if mask is None else mask & allowed
        return dataclasses.replace(
            self, query=self.query[..., :0], key=self.key[..., :0], mask=mask, score_bias=None, softcap=None
        )

    # --- blocks ---------------------------------------------------------------------------------------------------

    def cut(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Form:
        """The block of the plan at these (query) heads, queries and keys."""
        tensors = {n: self.cut_slot(n, t, batch, heads, queries, keys) for n, t in self.tensors().items()}
        block = self.with_tensors(tensors)
        block.first_query += queries.start
        block.first_key += keys.start
        block.first_batch += batch.start or 0
        block.first_head += heads.start or 0
        return block

    def cut_slot(self, name: str, tensor: Tensor, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """The part of one slot (or of a gradient of its shape) that belongs to a block."""
        if name.startswith("captured."):
            return tensor
        if name in ("key", "value"):
            return tensor[batch, heads.start // self.group : -(-heads.stop // self.group), keys]
        cuts = {"b": batch, "h": heads, "q": queries, "k": keys}
        axes = zip(_AXES.get(name, "bhqk"), tensor.shape, strict=True)
        return tensor[tuple(cuts[axis] if size > 1 and axis in cuts else slice(None) for axis, size in axes)]

    def key_range(self, queries: slice) -> slice:
        """The keys that these queries can reach inside the band `left`, `right` (all keys without a band)."""
        Tk = self.shape[3]
        first, last = queries.start + self.offset, queries.stop - 1 + self.offset
        start = 0 if self.left is None else min(Tk, max(0, first - self.left))
        stop = Tk if self.right is None else min(Tk, max(0, last + self.right + 1))
        return slice(start, max(start, stop))

    # --- the prior of a block -------------------------------------------------------------------------------------

    def distance(self, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """Key position minus query position, [Tq, Tk]."""
        keys = torch.arange(Tk, device=device) + self.first_key
        queries = torch.arange(Tq, device=device) + (self.first_query + self.offset)
        return keys - queries[:, None]

    def admissible(self, Tq: int, Tk: int, device: torch.device) -> Tensor | None:
        """True where a query may read a key, broadcastable to [B, H, Tq, Tk]; None if everywhere. There pi > 0, but
        for a density of 0."""
        parts = [] if self.mask is None else [self.mask]
        if self.left is not None or self.right is not None:
            distance = self.distance(Tq, Tk, device)
            if self.right is not None:
                parts.append(distance <= self.right)
            if self.left is not None:
                parts.append(distance >= -self.left)
        if self.query_ids is not None and self.key_ids is not None:
            parts.append((self.query_ids == self.key_ids) & (self.query_ids >= 0))
        if self.tile_map is not None and self.tiles is not None:
            queries, keys = range(self.first_query, self.first_query + Tq), range(self.first_key, self.first_key + Tk)
            parts.append(tiles.expand(self.tile_map, self.tiles, queries, keys))
        if self.selected is not None:
            parts.append(self._selects(Tk))
        parts += [bias != -math.inf for bias in (self.score_bias, *self.log_priors) if bias is not None]
        if self.function is not None:
            parts.append(self.function_prior(Tq, Tk, self.dtype, device).detach() != -math.inf)
        result = None
        for part in parts:
            result = part if result is None else result & part
        return result

    def _selects(self, Tk: int) -> Tensor:
        """True where key j // block is selected, [B|1, H|1, Tq, Tk]."""
        assert self.selected is not None
        first, block = self.first_key, self.selected_block
        blocks = -(-(first + Tk) // block)
        # One more column than blocks collects the entries that stand for no block.
        found = torch.zeros(*self.selected.shape[:3], blocks + 1, dtype=torch.bool, device=self.selected.device)
        index = torch.where(self.selected < 0, blocks, self.selected.clamp(max=blocks))
        found.scatter_(3, index, True)
        return found[..., (torch.arange(Tk, device=found.device) + first) // block]

    def log_prior(
        self, Tq: int, Tk: int, dtype: torch.dtype, device: torch.device, with_density: bool = True
    ) -> Tensor | None:
        """log pi of all terms; None if there are none. Masks and bands are in `admissible`."""
        terms = [bias.to(dtype) for bias in self.log_priors]
        if self.slopes is not None:
            terms.append(-self.slopes * self.distance(Tq, Tk, device).abs())
        if self.relative is not None:
            reach = self.relative.shape[3] // 2
            distance = self.distance(Tq, Tk, device).clamp(-reach, reach) + reach
            # In float64, because each entry of the gradient is a sum over all pairs of one distance.
            terms.append(self.relative.double()[:, :, 0, distance].to(dtype))
        if self.query_factor is not None and self.key_factor is not None:
            terms.append(self.query_factor.to(dtype) @ self.key_factor.to(dtype).mT)
        if self.decay_query is not None and self.decay_key is not None:
            # A masked key may be ahead of the query, where the sum would be positive and might overflow.
            terms.append((self.decay_query - self.decay_key).clamp(max=0).to(dtype))
        if self.function is not None:
            terms.append(self.function_prior(Tq, Tk, dtype, device))
        if self.density is not None and with_density:
            terms.append(self.density.to(dtype).log())
        result = None
        for term in terms:
            result = term if result is None else result + term
        return result

    def function_prior(self, Tq: int, Tk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """log pi of `function`, broadcastable to [B, H, Tq, Tk]."""
        assert self.function is not None
        B, H, _, _ = self.shape
        starts = (self.first_batch, self.first_head, self.first_query + self.offset, self.first_key)
        index = pairs.indices((B, H, Tq, Tk), starts, device)
        found = pairs.log_prior_at(self.function, self.captured, index, dtype)
        return found.expand(*(1,) * (4 - found.dim()), *found.shape)

    def kept(self, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """True where dropout keeps a weight, [B, H, Tq, Tk]."""
        assert self.dropout_key is not None
        queries = torch.arange(Tq, device=device) + self.first_query
        keys = torch.arange(Tk, device=device) + self.first_key
        return _dropout.kept(self.dropout_key, self.dropout_p, queries, keys)


# What the dimensions of a slot are, where not "bhqk": batch, heads, queries, keys ("-": none of these).
_AXES = {
    "query": "bhq-",
    "query_factor": "bhq-",
    "key_factor": "bhk-",
    "relative": "bh--",
    "selected": "bhq-",
    "tile_map": "bh--",
    "tiles": "--",
}
UNBATCHED = tuple(name for name, axes in _AXES.items() if "b" not in axes)
SLOTS = tuple(f.name for f in dataclasses.fields(Form) if str(f.type) in ("Tensor | None", "Scalar"))
LISTS = tuple(f.name for f in dataclasses.fields(Form) if str(f.type).startswith("list["))
PRIOR_SLOTS = (
    "slopes",
    "relative",
    "query_factor",
    "key_factor",
    "decay_query",
    "decay_key",
    "density",
)  # differentiable
