"""The normal form: `lower` checks what the user wrote and brings it to one flat list of fields for every backend.

Shape letters, here and everywhere: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D, Dv head sizes.
Every tensor but key and value broadcasts to [B, H, Tq, Tk]: so one rule cuts a block out of a problem (`Form.cut`),
and a block of a Form is again a Form. Nothing that came in broadcast is ever expanded.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .checks import (
    KNOWN_TYPES,
    autocast,
    broadcastable,
    check_device,
    check_tensors,
    check_type,
    check_values,
    concrete,
    default_scale,
    fold,
    leading_shape,
    may_be_zero,
    number,
    plain,
    row_parameter,
)
from .parts import Scalar, describe, finite, positive, probability
from .problem import (
    ALiBi,
    Bias,
    Budget,
    Causal,
    Documents,
    Free,
    Prior,
    Rows,
    RowsAndColumns,
    Transport,
    Window,
)
from .regularizers import FDivergence, Regularizer, Tsallis, regularizer_of


@dataclass(eq=False)
class Form:
    """An attention problem, lowered. Optional parts are None, lists empty; a Scalar is a number or a tensor
    [B|1, H|1, Tq|1, 1]. All fields but the last are numbers, strings, tensors: `ops` derives its schema from them."""

    query: Tensor | None = None  # [B, H, Tq, D]
    key: Tensor | None = None  # [B, Hkv, Tk, D]
    value: Tensor | None = None  # [B, Hkv, Tk, Dv]

    # the score: s = softcap * tanh(scale * qk / softcap) + score_bias
    scale: float = 1.0
    softcap: float | None = None
    score_bias: Tensor | None = None  # a float attn_mask

    # the prior: log pi = sum(log_priors) - slopes * |distance|; zero where not admissible
    mask: Tensor | None = None  # a bool attn_mask, True = admissible
    log_priors: list[Tensor] = field(default_factory=list)
    slopes: Tensor | None = None  # [1, H|1, 1, 1]
    query_ids: Tensor | None = None  # [B|1, 1, Tq, 1]
    key_ids: Tensor | None = None  # [B|1, 1, 1, Tk]
    left: int | None = None  # keys from position - left
    right: int | None = None  # keys up to position + right
    offset: int = 0  # query i stands at key position i + offset

    # the regulariser, the marginal, the temperature
    family: str = "kl"
    alpha: Scalar = 0.0
    marginal: str = "rows"  # rows, sink, relax, free; `level` is its score b, its rho or its offset
    mass: float = 1.0
    level: Scalar = 0.0
    # ... or columns: rows and columns, whose rho is `level` (0: none). Only `sinkhorn` solves it, by way of rows.
    row_mass: Tensor | None = None  # [B|1, H|1, Tq|1, 1], in place of `mass`
    column_mass: Tensor | None = None  # [B|1, H|1, 1, Tk|1]
    temperature: Scalar = 1.0
    hard: bool = False  # some row may have temperature 0

    # dropout: a weight is dropped where a hash of (key, query, dropout_key) says so
    dropout_p: float = 0.0
    dropout_key: Tensor | None = None  # [B, H, 1, 1] of 32-bit integers

    # where this block begins in the whole plan
    first_query: int = 0
    first_key: int = 0

    declared: Regularizer | None = None  # a user's own regulariser; through an operator only its `family` name travels

    @property
    def regularizer(self) -> Regularizer:
        if self.declared is not None:
            return self.declared
        return regularizer_of(self.family, self.alpha)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, Tq, Tk."""
        assert self.query is not None and self.key is not None
        B, H, Tq, _ = self.query.shape
        return B, H, Tq, self.key.shape[2]

    @property
    def group(self) -> int:
        """Query heads that read one key/value head."""
        assert self.query is not None and self.key is not None
        return max(1, self.query.shape[1] // max(1, self.key.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in: float32 for half types."""
        assert self.query is not None
        return compute_dtype(self.query.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors present, by slot; the log-priors are numbered."""
        fields = self.__dict__
        found = {n: t for n in SLOTS if (t := fields[n]) is not None and isinstance(t, Tensor)}
        for n, bias in enumerate(self.log_priors):
            found[f"log_priors.{n}"] = bias
        return found

    def requires_grad(self) -> bool:
        """Whether a gradient of some tensor may be asked for."""
        assert self.query is not None and self.key is not None and self.value is not None
        if self.query.requires_grad or self.key.requires_grad or self.value.requires_grad:
            return True
        return any(tensor.requires_grad for tensor in self.tensors().values())

    @property
    def weighted(self) -> bool:
        """Whether the prior may be other than 0 and 1."""
        return bool(self.log_priors) or self.slopes is not None

    def without_scores(self) -> Form:
        """The prior alone: every score 0 (but those that a float mask forbids)."""
        assert self.query is not None and self.key is not None
        mask = self.mask
        if self.score_bias is not None:
            allowed = self.score_bias != -math.inf
            mask = allowed if mask is None else mask & allowed
        return dataclasses.replace(
            self, query=self.query[..., :0], key=self.key[..., :0], mask=mask, score_bias=None, softcap=None
        )

    def with_tensors(self, tensors: dict[str, Tensor]) -> Form:
        """The same problem with other tensors in (some of) its slots."""
        fields: dict[str, Any] = self.__dict__ | tensors
        if self.log_priors:
            fields["log_priors"] = [fields.pop(f"log_priors.{n}", t) for n, t in enumerate(self.log_priors)]
        form = Form.__new__(Form)  # all fields are there: no need to go through their defaults
        form.__dict__ = fields
        return form

    def cut(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Form:
        """The block of the plan at these (query) heads, queries and keys."""
        tensors = {n: self.cut_slot(n, t, batch, heads, queries, keys) for n, t in self.tensors().items()}
        block = self.with_tensors(tensors)
        block.first_query += queries.start
        block.first_key += keys.start
        return block

    def cut_slot(self, name: str, tensor: Tensor, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """What a block sees of one slot (or of a gradient of its shape)."""
        if name in ("key", "value"):
            return tensor[batch, heads.start // self.group : -(-heads.stop // self.group), keys]
        last = slice(None) if name == "query" else keys
        cuts = (batch, heads, queries, last)
        return tensor[tuple(c if size > 1 else slice(None) for c, size in zip(cuts, tensor.shape, strict=True))]

    def key_range(self, queries: slice) -> slice:
        """The keys that the band lets these queries reach (all, without a band)."""
        Tk = self.shape[3]
        first, last = queries.start + self.offset, queries.stop - 1 + self.offset
        start = 0 if self.left is None else min(Tk, max(0, first - self.left))
        stop = Tk if self.right is None else min(Tk, max(0, last + self.right + 1))
        return slice(start, max(start, stop))

    def distance(self, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """Key position minus query position, [Tq, Tk]."""
        keys = torch.arange(Tk, device=device) + self.first_key
        queries = torch.arange(Tq, device=device) + (self.first_query + self.offset)
        return keys - queries[:, None]

    def admissible(self, Tq: int, Tk: int, device: torch.device) -> Tensor | None:
        """Where pi > 0, broadcastable to [B, H, Tq, Tk]; None if everywhere."""
        parts = [] if self.mask is None else [self.mask]
        if self.left is not None or self.right is not None:
            distance = self.distance(Tq, Tk, device)
            if self.right is not None:
                parts.append(distance <= self.right)
            if self.left is not None:
                parts.append(distance >= -self.left)
        if self.query_ids is not None and self.key_ids is not None:
            parts.append((self.query_ids == self.key_ids) & (self.query_ids >= 0))
        parts += [bias != -math.inf for bias in (self.score_bias, *self.log_priors) if bias is not None]
        result = None
        for part in parts:
            result = part if result is None else result & part
        return result

    def log_prior(self, Tq: int, Tk: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """log pi where it is not 0 or -inf by structure alone; None if there is nothing to add."""
        terms = [bias.to(dtype) for bias in self.log_priors]
        if self.slopes is not None:
            terms.append(-self.slopes * self.distance(Tq, Tk, device).abs())
        result = None
        for term in terms:
            result = term if result is None else result + term
        return result

    def kept(self, Tq: int, Tk: int, device: torch.device) -> Tensor:
        """Which weights dropout keeps, [B, H, Tq, Tk]."""
        assert self.dropout_key is not None
        queries = torch.arange(Tq, device=device)[:, None] + self.first_query
        keys = torch.arange(Tk, device=device) + self.first_key
        return hash_with(hash_with(self.dropout_key, queries), keys) >= int(self.dropout_p * 2**32)


SLOTS = tuple(f.name for f in dataclasses.fields(Form) if "Tensor" in str(f.type) or f.type == "Scalar")


LIST_ROOM = 128  # numbers that a row may keep for backward about its few keys, where a backend keeps such


def output_shapes(form: Form, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shape of the output and of each statistic."""
    assert form.query is not None and form.value is not None
    rows = tuple(form.query.shape[:3])
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, rows)
    for name in names:
        if name == "out" or name == "tilt":
            shapes[name] = (*rows, form.value.shape[3])
        elif name == "lists":
            shapes[name] = (*rows, LIST_ROOM)
        elif name == "key_mass":
            shapes[name] = (*rows[:2], form.value.shape[2])
    return shapes


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- the dropout mask: a pure function of integers, the same on every backend -----------------------------------------


def _multiply(a: Tensor, constant: int) -> Tensor:
    """a * constant mod 2^32 without leaving int64's range."""
    low, high = constant & 0xFFFF, constant >> 16
    return (a * low + (((a * high) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _mix(a: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser: every input bit flips each output bit with probability about 1/2."""
    a = _multiply(a ^ (a >> 16), 0x85EBCA6B)
    a = _multiply(a ^ (a >> 13), 0xC2B2AE35)
    return a ^ (a >> 16)


def hash_with(state: Tensor, number: Tensor) -> Tensor:
    """Fold a non-negative integer below 2^32 into a 32-bit hash."""
    return _mix(state ^ _mix((number + 0x9E3779B9) & 0xFFFFFFFF))


def dropout_keys(seed: Tensor, B: int, H: int) -> Tensor:
    """The hash of (seed, b, h): [B, H, 1, 1]."""
    state = hash_with(hash_with(torch.zeros_like(seed), seed & 0xFFFFFFFF), (seed >> 32) & 0xFFFFFFFF)
    batch = torch.arange(B, device=seed.device).view(B, 1, 1, 1)
    heads = torch.arange(H, device=seed.device).view(1, H, 1, 1)
    return hash_with(hash_with(state, batch), heads)


# --- lowering ---------------------------------------------------------------------------------------------------------

_SOFTMAX = Transport()


def lower(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    problem: Transport | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
) -> Form:
    """Check the arguments of `attention` and bring them to normal form."""
    query, key, value = autocast(query, key, value)
    if plain(query, key, value) and isinstance(enable_gqa, bool):
        lead = tuple(query.shape[:2])
    else:
        check_tensors(query, key, value)
        lead = leading_shape(query, key, value, enable_gqa)
        query, key, value = fold(query, lead, lead[-1]), fold(key, lead), fold(value, lead)
        if key.shape[1] != value.shape[1]:  # one head for all
            heads = max(key.shape[1], value.shape[1])
            key, value = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    if key_scale is not None:
        key, value = _scale_keys(key, value, key_scale, lead)
    B, H, Tq, D = query.shape
    Tk = key.shape[2]
    causal = None if attn_mask is None else _causal_bias(attn_mask, Tq, Tk)
    if causal is not None:
        attn_mask = None
    form = lower_problem(problem, lead, Tq, Tk, compute_dtype(query.dtype), query.device, is_causal, causal)
    form.query, form.key, form.value = query, key, value
    form.scale = default_scale(D) if scale is None else number("scale", scale, "a finite number", finite)
    if softcap is not None:
        form.softcap = number("softcap", softcap, "a positive, finite number", positive)
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask: expected a tensor, got {describe(attn_mask)}")
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask: expected a bool or floating-point tensor, got {describe(attn_mask)}")
        mask = broadcastable("attn_mask", attn_mask, lead, Tq, Tk, query.device)
        if mask.dtype == torch.bool:
            form.mask = mask
        else:
            form.score_bias = mask
        if form.marginal == "columns":
            _refuse_causal_tensor("attn_mask", mask)
            _refuse_causal("the prior and attn_mask together", form, Tq, Tk, query.device)
    if problem is not None or attn_mask is not None:
        _refuse_mixed(form)
    form.dropout_p = number("dropout_p", dropout_p, "a probability in [0, 1]", probability)
    if form.dropout_p > 0:
        seed = torch.randint(2**62, (1, 1, 1, 1), device=query.device)
        form.dropout_key = dropout_keys(seed, B, H)
    return form


def _causal_bias(attn_mask: object, Tq: int, Tk: int) -> Causal | None:
    """The prior that PyTorch's own mask type `CausalBias` stands for; None for any other mask.

    A CausalBias is a tensor over uninitialised memory: only its attributes mean something.
    """
    if type(attn_mask) in KNOWN_TYPES or not isinstance(attn_mask, Tensor):
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant  # here: it loads torch.compile, which takes seconds

    if not isinstance(attn_mask, CausalBias):
        return None
    if not isinstance(getattr(attn_mask, "variant", None), CausalVariant):  # an operation on one keeps its type alone
        raise TypeError(
            "attn_mask: expected a CausalBias as causal_upper_left or causal_lower_right returned it, got one that "
            "another operation made (indexing, a cast, a copy to a device)"
        )
    lower_right = attn_mask.variant == CausalVariant.LOWER_RIGHT
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (Tq, Tk):
        name = "causal_lower_right" if lower_right else "causal_upper_left"
        raise ValueError(
            f"attn_mask: expected {name}(Tq={Tq}, Tk={Tk}), got {name}({attn_mask.seq_len_q}, {attn_mask.seq_len_kv})"
        )
    return Causal("bottom_right" if lower_right else "top_left")


def _refuse_mixed(form: Form) -> None:
    """Raise for a tensor of a type of its own (a DTensor, say) in the problem or mask of a query of another type."""
    kind = type(form.query)
    for slot, tensor in form.tensors().items():
        if type(tensor) not in KNOWN_TYPES and type(tensor) is not kind:
            name = "attn_mask" if slot in ("mask", "score_bias") else "problem"
            raise TypeError(
                f"{name}: expected a plain tensor, or a {kind.__name__} as query, got a {type(tensor).__name__}"
            )


def _scale_keys(key: Tensor, value: Tensor, key_scale: Tensor, lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Each key times its multiplier, rounded once to the keys' dtype. Where query heads share a key but not its
    multiplier, each gets its own copy of keys and values."""
    if not isinstance(key_scale, Tensor) or not key_scale.is_floating_point():
        raise TypeError(f"key_scale: expected a floating-point tensor, got {describe(key_scale)}")
    check_type("key_scale", key_scale)
    check_device("key_scale", key_scale, key.device)
    (*batch, H), (Hkv, Tk) = lead, key.shape[1:3]
    shape = (1,) * (len(lead) + 1 - key_scale.dim()) + tuple(key_scale.shape)
    heads = Hkv if shape[-2] in (1, Hkv) else H
    full = (*batch, heads, Tk)
    if len(shape) > len(full) or any(s != 1 and s != f for s, f in zip(shape, full, strict=True)):
        shared = "" if Hkv == H else f" or {[*batch, Hkv, Tk]}"
        raise ValueError(
            f"key_scale: expected a shape that broadcasts to [..., H, Tk] = {[*lead, Tk]}{shared}, "
            f"got {list(key_scale.shape)}"
        )
    check_values("key_scale", key_scale, "finite multipliers", torch.isfinite)
    if heads != Hkv:
        key, value = (t.repeat_interleave(H // Hkv, 1) for t in (key, value))
    dtype = compute_dtype(key.dtype)
    multiplier = key_scale.to(dtype).expand(*batch, shape[-2], Tk).reshape(math.prod(batch), shape[-2], Tk, 1)
    wide = key.to(dtype)
    # A key that nobody may read can hold NaN: it stays in its own product, and out of the multiplier's gradient.
    good = wide.isfinite()
    scaled = torch.where(good, torch.where(good, wide, 0.0) * multiplier, wide * multiplier.detach())
    return scaled.to(key.dtype), value


def lower_problem(
    problem: Transport | None,
    lead: tuple[int, ...],
    Tq: int,
    Tk: int,
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool = False,
    causal: Causal | None = None,
) -> Form:
    """The problem's own part of the form, for a plan of shape [*lead, Tq, Tk] (lead ends with the heads). `is_causal`
    and `causal`, which a mask may stand for, multiply into its prior."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: expected a bool, got {describe(is_causal)}")
    given = () if causal is None else (causal,)
    if is_causal:
        given += (Causal("top_left"),)
    if problem is None:
        if not given:  # nothing to look at
            return Form()
        problem = _SOFTMAX
    if not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport, got {describe(problem)}")
    form = Form()

    def row(name: str, value: Scalar, per_head: bool = True) -> Scalar:
        if type(value) is float:
            return value
        return row_parameter(name, value, math.prod(lead[:-1]), lead[-1], Tq, dtype, device, per_head)

    regularizer, marginal = problem.regularizer, problem.marginal
    assert regularizer is not None
    form.family = regularizer.family
    form.declared = regularizer if isinstance(regularizer, FDivergence) else None
    if isinstance(regularizer, Tsallis):
        form.alpha = row("Tsallis(alpha)", regularizer.alpha)
        check_values("Tsallis(alpha)", form.alpha, "alpha > 1", lambda a: (a > 1) & a.isfinite())
    if isinstance(marginal, Rows):
        form.mass = float(marginal.mass)
        if marginal.sink is not None:
            form.marginal, form.level = "sink", row("Rows(sink)", marginal.sink)
            check_values("Rows(sink)", form.level, "finite scores", torch.isfinite)
        elif marginal.relax is not None:
            form.marginal, form.level = "relax", row("Rows(relax)", marginal.relax)
            check_values("Rows(relax)", form.level, "relax > 0", lambda rho: (rho > 0) & rho.isfinite())
    elif isinstance(marginal, Free):
        form.marginal, form.level = "free", row("Free(offset)", marginal.offset)
        check_values("Free(offset)", form.level, "finite numbers", torch.isfinite)
    elif isinstance(marginal, RowsAndColumns):
        _lower_columns(form, regularizer, marginal, lead, Tq, Tk, device, row, dtype)
    else:
        raise NotImplementedError(f"problem: no solver for the marginal {marginal!r}")

    if isinstance(problem.temperature, Budget):
        form.temperature = torch.ones(1, 1, 1, 1, dtype=dtype, device=device)  # `budget` finds the rows' own
    else:
        form.temperature = row("temperature", problem.temperature, per_head=False)
        check_values("temperature", form.temperature, "temperature >= 0", lambda tau: (tau >= 0) & tau.isfinite())
        form.hard = may_be_zero(form.temperature)
    factors = given if problem.prior is None else (*problem.prior.factors(), *given)
    if factors:
        _lower_prior(form, factors, lead, Tq, Tk, dtype, device)
    if form.marginal == "columns":
        _check_columns(form, problem, Tq, Tk, device)
    if form.hard and known_hard(form):
        # Keys that take at most pi each (Fermi-Dirac) share by other rules than "the best takes all".
        unlike = form.marginal != "rows" or form.mass != 1 or form.weighted
        if form.marginal == "free" or (regularizer.ceiling < math.inf and unlike):
            raise ValueError(f"temperature: 0 (hard routing) has no meaning for {problem!r}; expected temperature > 0")
    return form


def _lower_columns(
    form: Form,
    regularizer: Regularizer,
    marginal: RowsAndColumns,
    lead: tuple[int, ...],
    Tq: int,
    Tk: int,
    device: torch.device,
    row: Callable[..., Scalar],
    dtype: torch.dtype,
) -> None:
    if form.family != "kl":
        raise ValueError(
            f"problem: RowsAndColumns expects KL(), whose half-steps are in closed form, got {regularizer!r}"
        )
    form.marginal = "columns"
    if isinstance(marginal.row, Tensor):
        shipped = broadcastable("RowsAndColumns(row)", marginal.row[..., None], lead, Tq, 1, device).to(dtype)
        check_values("RowsAndColumns(row)", shipped, "finite numbers >= 0", lambda a: (a >= 0) & a.isfinite())
        form.row_mass = shipped
    elif marginal.row is not None:
        form.mass = float(marginal.row)
    if marginal.column is not None:
        column = marginal.column if marginal.column.dim() else marginal.column[None]
        received = broadcastable("RowsAndColumns(column)", column[..., None, :], lead, 1, Tk, device).to(dtype)
        check_values("RowsAndColumns(column)", received, "finite numbers >= 0", lambda b: (b >= 0) & b.isfinite())
        form.column_mass = received
    if marginal.relax is not None:
        form.level = row("RowsAndColumns(relax)", marginal.relax)
        check_values("RowsAndColumns(relax)", form.level, "relax > 0", lambda rho: (rho > 0) & rho.isfinite())


def _check_columns(form: Form, problem: Transport, Tq: int, Tk: int, device: torch.device) -> None:
    """What a plan with both marginals cannot have: temperatures of single queries, temperature 0, a causal prior."""
    for name, value in (("temperature", form.temperature), ("RowsAndColumns(relax)", form.level)):
        if isinstance(value, Tensor) and value.shape[2] > 1:
            raise ValueError(
                f"{name}: expected one for all queries of a head under RowsAndColumns ([H, 1, 1], or [B, H, 1, 1]), "
                f"got shape {list(value.shape)}: a key's price must mean the same to each query"
            )
    if form.hard and known_hard(form):
        raise ValueError(f"temperature: 0 (an assignment problem) has no solver here for {problem!r}; expected > 0")
    if form.right is not None and form.right <= 0:
        raise ValueError(_CAUSAL.format("prior"))
    for log_prior in form.log_priors:
        _refuse_causal_tensor("Bias(log_prior)", log_prior)
    _refuse_causal("the prior's factors together", form, Tq, Tk, device)


_CAUSAL = (
    "{}: RowsAndColumns refuses a causal prior (Causal, Window with right <= 0, is_causal, a mask or Bias that admits "
    "nothing above the diagonal): what a key receives in all depends on later queries, so the columns would read the "
    "future"
)


def _refuse_causal_tensor(name: str, mask: Tensor) -> None:
    """Raise if a mask, float mask or log-prior [B|1, H|1, Tq|1, Tk|1] is causal for some plan; warn of numbers in it
    that look like -inf and are not."""
    if not concrete(mask) or not mask.numel():
        return
    plain = mask.dtype == torch.bool
    Tq, Tk = mask.shape[2:]
    _refuse_causal(name, Form(mask=mask) if plain else Form(score_bias=mask), Tq, Tk, mask.device)
    if not plain and _meant_as_forbidden(mask) > -math.inf:
        warnings.warn(
            f"{name}: RowsAndColumns expects -inf (or a bool mask) where nothing may be sent, got numbers down to "
            f"{_lowest(mask):.3g}: they are scores, and a key that is to receive its share is sent it at any",
            stacklevel=2,
        )


_FORBIDDING = -1e4  # masks of finite numbers say -inf with these and lower ones: -65504, -1e9, the most negative one


def _lowest(mask: Tensor) -> float:
    mask = mask.detach()
    return float(torch.where(mask > -math.inf, mask, math.inf).min())


def _meant_as_forbidden(mask: Tensor) -> float:
    """The number up to which those of a float mask are to say -inf (-inf: there are none): far below all others, none
    of which is within a factor of 500. (A cost that merely is large has others between.)"""
    lowest = _lowest(mask)
    if not lowest <= _FORBIDDING:
        return -math.inf
    mask = mask.detach()
    if lowest == torch.finfo(mask.dtype).min:
        return lowest
    between = (mask > lowest / 2) & (mask < lowest / 1000)
    return -math.inf if bool(between.any()) else lowest / 2


def _refuse_causal(name: str, form: Form, Tq: int, Tk: int, device: torch.device) -> None:
    """Raise if all that a form says of its prior is causal for some plan, as far as its values may be looked at: it
    admits nothing above the diagonal and something below, and the columns have a say in it."""
    tensors = [t for t in (form.mask, form.score_bias, *form.log_priors, form.query_ids) if t is not None]
    if Tq != Tk or Tq < 2 or not tensors or not all(concrete(t) for t in tensors):
        return
    floats = [_one_of_each(t) for t in (form.score_bias, *form.log_priors) if t is not None]
    limits = [_meant_as_forbidden(t) for t in floats]
    prior = Form(log_priors=floats, query_ids=form.query_ids, key_ids=form.key_ids)
    prior.mask = None if form.mask is None else _one_of_each(form.mask)
    prior.left, prior.right, prior.offset = form.left, form.right, form.offset
    below: Any = False  # [B|1, H|1] each
    above: Any = False
    choice: Any = False
    others: Any = False
    for start in range(0, Tq, 256):
        rows = slice(start, min(Tq, start + 256))
        size = rows.stop - start
        block = prior.cut(slice(None), slice(None), rows, slice(0, Tk))
        allowed = block.admissible(size, Tk, device)
        assert allowed is not None
        for bias, limit in zip(block.log_priors, limits, strict=True):
            allowed = allowed & (bias > limit)
        allowed = allowed.expand(*allowed.shape[:2], size, Tk) if allowed.dim() == 4 else allowed.expand(1, 1, size, Tk)
        above |= allowed.triu(1 + start).flatten(2).any(-1)
        if bool(torch.as_tensor(above).all()):
            return
        below |= allowed.tril(start - 1).flatten(2).any(-1)
        # A query with one key sends it all; where only the last query reads, nobody is told of a later one.
        choice |= (allowed.sum(-1) > 1).any(-1)
        others |= allowed[:, :, : size - (rows.stop == Tq)].flatten(2).any(-1)
    if bool((below & ~above & choice & others).any()):
        raise ValueError(_CAUSAL.format(name))


def _one_of_each(tensor: Tensor) -> Tensor:
    """Without the copies of a batch or of heads that were expanded, and without a gradient."""
    tensor = tensor.detach()
    for dim in (0, 1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _lower_prior(
    form: Form,
    factors: tuple[Prior, ...],
    lead: tuple[int, ...],
    Tq: int,
    Tk: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    B, H = math.prod(lead[:-1]), lead[-1]
    alignments = {f.alignment for f in factors if isinstance(f, Causal | Window | ALiBi)}
    if "top_left" in alignments and "bottom_right" in alignments:
        raise ValueError(
            'alignment: expected one for the whole prior, got "top_left" and "bottom_right" (is_causal and '
            'causal_upper_left are "top_left", causal_lower_right is "bottom_right")'
        )
    if "bottom_right" in alignments:
        form.offset = Tk - Tq
    elif alignments == {None} and Tq != Tk:
        raise ValueError(
            f'alignment: expected "top_left" or "bottom_right" in the prior where Tq != Tk, got none with Tq={Tq}, '
            f"Tk={Tk}"
        )

    for factor in factors:
        if isinstance(factor, Causal):
            form.right = 0 if form.right is None else min(form.right, 0)
        elif isinstance(factor, Window):
            if factor.left is not None:
                form.left = factor.left if form.left is None else min(form.left, factor.left)
            if factor.right is not None:
                form.right = factor.right if form.right is None else min(form.right, factor.right)
        elif isinstance(factor, ALiBi):
            slopes = factor.slopes
            if not isinstance(slopes, Tensor):
                slopes = torch.full((1,), float(slopes), dtype=dtype, device=device)
            if slopes.numel() != 1 and slopes.numel() != H:
                raise ValueError(f"ALiBi(slopes): expected a number or shape [H={H}], got {list(slopes.shape)}")
            slopes = row_parameter("ALiBi(slopes)", slopes.reshape(-1), B, H, Tq, dtype, device, True)
            check_values("ALiBi(slopes)", slopes, "finite slopes", torch.isfinite)
            assert isinstance(slopes, Tensor)
            form.slopes = slopes if form.slopes is None else form.slopes + slopes
        elif isinstance(factor, Bias):
            form.log_priors.append(broadcastable("Bias(log_prior)", factor.log_prior, lead, Tq, Tk, device))
        elif isinstance(factor, Documents):
            _lower_documents(form, factor, B, Tq, Tk, device)
        else:
            raise NotImplementedError(f"prior: no solver for {factor!r}")


def _lower_documents(form: Form, documents: Documents, B: int, Tq: int, Tk: int, device: torch.device) -> None:
    if documents.key_ids is None and Tq != Tk:
        raise ValueError(f"Documents(key_ids): expected key ids where Tq != Tk, got None with Tq={Tq}, Tk={Tk}")
    sides = []
    for name, ids, T in (("query_ids", documents.query_ids, Tq), ("key_ids", documents.key_ids, Tk)):
        if ids is None:
            ids = documents.query_ids
        if ids.shape[-1] != T or (ids.dim() == 2 and ids.shape[0] != 1 and ids.shape[0] != B):
            raise ValueError(f"Documents({name}): expected shape [{T}] or [{B}, {T}], got {list(ids.shape)}")
        check_type(f"Documents({name})", ids)
        check_device(f"Documents({name})", ids, device)
        sides.append((ids if ids.dim() == 2 else ids[None]).long())
    queries, keys = sides[0][:, None, :, None], sides[1][:, None, None, :]
    if form.query_ids is not None and form.key_ids is not None and Tq > 0 and Tk > 0:
        # Two packings at once: a pair of ids is one id (small ones, so that the pair fits).
        if concrete(queries):
            _, small = torch.unique(torch.cat([form.query_ids.flatten(), form.key_ids.flatten()]), return_inverse=True)
            n = form.query_ids.numel()
            form.query_ids = torch.where(form.query_ids < 0, -1, small[:n].view_as(form.query_ids))
            form.key_ids = torch.where(form.key_ids < 0, -1, small[n:].view_as(form.key_ids))
        base = torch.maximum(form.query_ids.max(), form.key_ids.max()) + 1
        queries = torch.where((queries < 0) | (form.query_ids < 0), -1, queries * base + form.query_ids)
        keys = torch.where((keys < 0) | (form.key_ids < 0), -1, keys * base + form.key_ids)
    form.query_ids, form.key_ids = queries, keys


def known_hard(form: Form) -> bool:
    """Some row is known to have temperature 0 (a traced temperature is not known)."""
    return form.hard and (not isinstance(form.temperature, Tensor) or concrete(form.temperature))
