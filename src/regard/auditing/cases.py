"""The inputs of an audit: for each way in which attention goes wrong in practice, a case that shows it.

A case is drawn once, in float64, from numbers that the dtype under test can hold. The function receives them in its
dtype and the definition in float64, so that both see the same numbers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._compat import pytree
from ..priors import Alignment, Causal
from ..problem import Rows, Transport
from .calls import Call, admissible
from .declared import (
    Sizes,
    learned_tensors,
    needs_equal_lengths,
    on_cpu,
    sink_of,
    sizes_of,
    substituted,
    widest_window,
)

Leaves = dict[str, Tensor]
Layout = Callable[[Leaves], Leaves]
LONGEST_WINDOW = 1000  # keys; a larger window is not tested at its edge
MANY_KEYS = 3000  # so many similar weights that their sum, kept in half precision, no longer grows


@dataclass(frozen=True)
class Inputs:
    """The arguments of one case, in the dtype and on the device of the function. A convention passes them on.

    query [B, H, Tq, D], key [B, Hkv, Tk, D], value [B, Hkv, Tk, Dv], attn_mask as in PyTorch's function, sink [H]. The
    function must honour what is not None or False. `problem` and `softcap` are what it is declared to compute."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    sink: Tensor | None
    softcap: float | None
    problem: Transport
    lengths: Tensor | None = None  # [B]: how many leading queries and keys of each entry are real; None: all


@dataclass(frozen=True)
class Case:
    """One input, with what is compared. Leaves are the tensors whose gradients are compared."""

    name: str
    dtype: torch.dtype
    leaves: Leaves  # float64, on the CPU; query, key, value, and attn_mask or sink where they are passed
    problem: Transport  # with Causal where is_causal is passed; tensors in float64 on the CPU
    learned: dict[str, Tensor]  # the caller's own tensors of the problem that require grad
    placeholders: dict[str, int]  # by name of a leaf: id of the tensor in `problem` that it replaces
    layout: Layout
    mask: Tensor | None = None  # bool, or numbers without a gradient
    is_causal: bool = False
    passes_sink: bool = False
    scale: float | None = None
    softcap: float | None = None
    lengths: Tensor | None = None
    head: int | None = None  # the loss reads this head only
    reads_lse: bool = False  # the loss reads lse, too
    forward_only: bool = False  # no gradients: they are too small for the dtype
    exposes: str | None = None  # what a failure of this case alone means
    also_right: Callable[[Call], Call] | None = None  # a second reading of the arguments that is right, too

    def call(self, leaves: Leaves) -> Call:
        """The definition's arguments, from leaves of any floating dtype."""
        arguments = self.layout(leaves)
        replacements = {self.placeholders[name]: leaves[name] for name in self.learned}
        problem = substituted(self.problem, replacements)
        if "sink" in leaves:
            problem = replace(problem, marginal=Rows(sink=leaves["sink"]))
        mask = arguments.get("attn_mask") if self.mask is None else _as(self.mask, arguments["query"])
        return Call(arguments["query"], arguments["key"], arguments["value"], problem, mask, self.scale, self.softcap)

    def inputs(self, leaves: Leaves) -> Inputs:
        """The function's arguments."""
        found = self.layout(leaves)
        query, key = found["query"], found["key"]
        mask = found.get("attn_mask") if self.mask is None else _as(self.mask, query)
        return Inputs(
            name=self.name,
            query=query,
            key=key,
            value=found["value"],
            attn_mask=mask,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            sink=found.get("sink") if self.passes_sink else None,
            softcap=self.softcap,
            problem=self.problem,
            lengths=None if self.lengths is None else self.lengths.to(query.device),
        )

    def generator(self, purpose: str = "") -> torch.Generator:
        return generator(0, self.name + purpose)


def _as(mask: Tensor, like: Tensor) -> Tensor:
    return mask.to(like.device) if mask.dtype == torch.bool else mask.to(like)


def generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))


@dataclass
class Maker:
    """Draws the cases of one declared problem."""

    declared: Transport
    softcap: float | None
    dtype: torch.dtype
    seed: int
    passes: frozenset[str]  # which arguments the function takes
    alignment: Alignment = "top_left"  # of is_causal
    sizes: Sizes = field(init=False)
    problem: Transport = field(init=False)  # the copy for the definition

    def __post_init__(self) -> None:
        self.sizes = sizes_of(self.declared)
        self.problem = on_cpu(self.declared)
        self.causal = any(isinstance(f, Causal) for f in self._factors())
        self.equal_lengths = needs_equal_lengths(self.problem)
        learned, copies = learned_tensors(self.declared), _tensors(self.problem)
        sink = sink_of(self.declared)
        if isinstance(sink, Tensor) and sink.requires_grad and "sink" not in self.passes:
            learned["sink"] = sink
        self.learned = learned
        positions = {id(tensor): n for n, tensor in enumerate(_tensors(self.declared))}
        self.placeholders = {name: id(copies[positions[id(tensor)]]) for name, tensor in learned.items()}
        self.plain = self.declared == Transport()

    def _factors(self) -> tuple:
        return () if self.problem.prior is None else self.problem.prior.factors()

    def case(
        self,
        name: str,
        *,
        B: int = 2,
        H: int = 4,
        Tq: int = 17,
        Tk: int | None = None,
        D: int = 16,
        Dv: int | None = None,
        group: int = 1,
        spread: float = 1.0,
        causal: bool = False,
        dtype: torch.dtype | None = None,
        sink: Callable[[Tensor], Tensor] | None = None,
        mask: Callable[[Case, torch.Generator], dict[str, Any]] | None = None,
        change: Callable[[Case, torch.Generator], dict[str, Any]] | None = None,
        **fields: Any,
    ) -> Case:
        """One case. `spread` multiplies the scores, `sink` changes the drawn sinks, `mask` and `change` return fields
        that replace those of the case."""
        dtype, draw = dtype or self.dtype, generator(self.seed, name)
        B, H = self.sizes.B or B, self.sizes.H or H
        Tk = self.sizes.Tk or (Tq if Tk is None else Tk)
        Tq = self.sizes.Tq or Tq
        Hkv = H // group
        problem, is_causal = self.problem, self.causal and "is_causal" in self.passes
        if causal and not self.causal:
            prior = Causal(self.alignment)
            problem = replace(problem, prior=prior if problem.prior is None else problem.prior * prior)
            is_causal = True

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        leaves = {
            "query": normal(B, H, Tq, D) * spread,
            "key": normal(B, Hkv, Tk, D),
            "value": normal(B, Hkv, Tk, D if Dv is None else Dv),
        }
        declared = sink_of(self.problem)
        passes_sink = declared is not None and "sink" in self.passes
        if passes_sink:
            leaves["sink"] = normal(H) if sink is None else sink(normal(H))
        found = Case(
            name=name,
            dtype=dtype,
            leaves={n: _rounded(t, dtype) for n, t in leaves.items()},
            problem=problem,
            learned=self.learned,
            placeholders=self.placeholders,
            layout=dict,
            is_causal=is_causal,
            passes_sink=passes_sink,
            softcap=self.softcap,
            **fields,
        )
        for own, tensor in self.learned.items():
            found.leaves[own] = tensor.detach().cpu().double()
        for edit in (mask, change):
            if edit is not None:
                found = replace(found, **edit(found, draw))
        if "attn_mask" in found.leaves:
            found.leaves["attn_mask"] = _rounded(found.leaves["attn_mask"], dtype)
        return found

    def all(self, half: bool, ragged: bool) -> Iterator[Case]:
        """The cases in order: the simple ones first. `half`: some in half precision; `ragged`: sequences of different
        lengths."""
        lengths_vary = self.sizes.Tq is None and self.sizes.Tk is None and not self.equal_lengths
        H = self.sizes.H or 4
        group = next((g for g in (2, 3, 5) if H % g == 0 and g < H), 1)
        window = widest_window(self.problem)
        T = max(17, window + 6) if window <= LONGEST_WINDOW else 17
        many = B1 = 1 if T > 200 else 2
        yield self.case("plain", Tq=T, B=many)
        yield self.case("scale given", Tq=T, B=many, scale=0.4, change=None)
        if lengths_vary:
            yield self.case("more keys than queries", Tq=9, Tk=T + 5, B=many)
            yield self.case("more queries than keys", Tq=T + 5, Tk=max(9, T - 6), B=many)
            yield self.case("one query", Tq=1, Tk=T + 4)
            yield self.case("across blocks", Tq=max(133, T), Tk=max(133, T) + 20, B=B1)
        elif self.sizes.Tq is None and self.sizes.Tk is None:
            yield self.case("across blocks", Tq=max(147, T), B=B1)
        if self.plain:
            yield self.case("causal", causal=True)
            yield self.case("causal, more keys than queries", Tq=9, Tk=19, causal=True)
            yield self.case("causal, more queries than keys", Tq=19, Tk=9, causal=True)
            yield self.case("causal, one query", Tq=1, Tk=19, causal=True)
            yield self.case("causal and a mask", Tq=13, causal=True, mask=_random_mask("B1"))
        yield self.case("wide values", Tq=T, B=many, Dv=24)
        if group > 1:
            yield self.case("shared key heads", Tq=T, B=many, group=group)
            yield self.case("shared key heads, causal", Tq=13, group=group, causal=self.plain)
        if H > 1:
            yield self.case("one key head", Tq=T, B=many, group=H)
        yield from self._masked(T, lengths_vary, many)
        if sink_of(self.problem) is not None and "sink" in self.passes:
            yield self.case("large sinks", Tq=T, B=many, sink=lambda s: s + 6)
            yield self.case("negative sinks", Tq=T, B=many, sink=lambda s: s - 3)
            yield self.case("sinks far apart", Tq=T, B=many, sink=lambda s: torch.linspace(-40, 40, len(s)).double())
        if self.softcap is not None:
            yield self.case("scores beyond the softcap", Tq=T, B=many, spread=1.5 * self.softcap)
            yield self.case(
                "scores beyond the softcap and a bias", Tq=T, B=many, spread=self.softcap, mask=_bias("BHqk", 2.0)
            )
        yield self.case("large scores", Tq=T, B=many, spread=40.0, exposes="overflow")
        yield self.case("large common score", Tq=T, B=many, change=_common_offset, exposes="overflow")
        yield self.case("transposed inputs", Tq=T, B=many, change=_transposed, exposes="strides")
        yield self.case("expanded inputs", Tq=T, B=many, change=_expanded, exposes="strides")
        yield self.case("sliced inputs", Tq=T, B=many, change=_sliced, exposes="strides")
        if self.sizes.Tq == self.sizes.Tk:
            yield self.case("one tensor as query, key and value", Tq=T, B=many, change=_shared)
        yield self.case("loss on one head", Tq=T, B=many, head=H - 1)
        yield self.case("loss with lse", Tq=T, B=many, reads_lse=True)
        if ragged:
            yield self.case("ragged sequences", Tq=T, B=3, change=_ragged)
        if half:
            for dtype in (torch.bfloat16, torch.float16):
                name = str(dtype).removeprefix("torch.")
                yield self.case(name, Tq=T, B=many, dtype=dtype)
                yield self.case(f"{name}, a bias", Tq=T, B=many, dtype=dtype, mask=_bias("BHqk"))
                yield self.case(f"{name}, shared key heads", Tq=T, B=many, dtype=dtype, group=group, causal=self.plain)
        halves = (torch.bfloat16, torch.float16) if half else (self.dtype,)
        for dtype in halves if lengths_vary else ():
            if dtype in (torch.bfloat16, torch.float16):
                name = f"{str(dtype).removeprefix('torch.')}, many keys"
                length = int(MANY_KEYS / (self.sizes.H or 1) ** 0.5)  # the definition takes memory of H * Tk**2
                shape: dict[str, Any] = {"B": 1, "H": 1, "Tq": 1, "Tk": length}
                yield self.case(
                    name, **shape, dtype=dtype, spread=0.1, change=_rising, forward_only=True, exposes="precision"
                )

    def _masked(self, T: int, lengths_vary: bool, B: int) -> Iterator[Case]:
        """Cases that pass `attn_mask`."""
        Tq, Tk = (T - 4, T) if lengths_vary else (T, T)
        shape: dict[str, Any] = {"Tq": Tq, "Tk": Tk, "B": B}
        yield self.case("bool mask", mask=_random_mask("B1"), **shape)
        yield self.case("bool mask per head", mask=_random_mask("1H"), **shape)
        yield self.case("bool mask of queries and keys", mask=_random_mask(""), **shape)
        yield self.case("left padding", mask=_padding(left=True), **shape)
        yield self.case("right padding", mask=_padding(left=False), **shape)
        yield self.case("one visible key", mask=_one_key, **shape)
        yield self.case("rows without keys", mask=_empty_rows, exposes="empty-row", **shape)
        yield self.case("bias", mask=_bias("BHqk"), **shape)
        yield self.case("bias for all batch entries", mask=_bias("1Hqk"), **shape)
        yield self.case("bias of keys", mask=_bias("H1k"), **shape)
        yield self.case("bias without a gradient", mask=_bias("B1qk", learned=False), **shape)
        yield self.case("-inf without a gradient", mask=_bias("B1qk", masked=True, learned=False), **shape)
        yield self.case("bias with -inf", mask=_bias("B1qk", masked=True), **shape)
        yield self.case(
            "the lowest number as mask", mask=_lowest, exposes="lowest-mask", also_right=_as_masked, **shape
        )
        yield self.case(
            "NaN in masked keys", mask=_padding(left=False), change=_poisoned, exposes="masked-nan", **shape
        )


def _tensors(problem: Transport) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(problem) if isinstance(leaf, Tensor)]


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).double()


# --- masks ------------------------------------------------------------------------------------------------------------


def _shape(case: Case) -> tuple[int, int, int, int]:
    B, H, Tq, _ = case.leaves["query"].shape
    return B, H, Tq, case.leaves["key"].shape[2]


def _with_a_key(case: Case, mask: Tensor) -> Tensor:
    """The mask, with one more key in each row of the plan that would have none, if the problem admits one."""
    allowed = admissible(case.call(case.leaves))  # [B, H, Tq, Tk]
    lead = torch.Size((1,) * (4 - mask.dim())) + mask.shape[:-2]
    common = allowed
    for axis in (0, 1):
        if lead[axis] == 1:
            common = common.all(axis, keepdim=True)
    full = mask.expand(*lead[:2], *_shape(case)[2:])
    missing = ~(full & common).any(-1, keepdim=True)
    last = common.long().cumsum(-1)
    last_key = common & (last == last.amax(-1, keepdim=True)) & (last.diff(dim=-1, prepend=last[..., :1] * 0) > 0)
    found = full | (last_key & missing)
    return found.reshape(*mask.shape[:-2], *found.shape[-2:])


def _random_mask(lead: str) -> Callable[[Case, torch.Generator], dict[str, Any]]:
    def mask(case: Case, draw: torch.Generator) -> dict[str, Any]:
        B, H, Tq, Tk = _shape(case)
        shape = [{"B": B, "H": H, "1": 1}[letter] for letter in lead]
        return {"mask": _with_a_key(case, torch.rand(*shape, Tq, Tk, generator=draw) < 0.6)}

    return mask


def _padding(left: bool) -> Callable[[Case, torch.Generator], dict[str, Any]]:
    def mask(case: Case, draw: torch.Generator) -> dict[str, Any]:
        B, _, _, Tk = _shape(case)
        keys = torch.arange(Tk)
        padded = torch.tensor([4 + 2 * b for b in range(B)])[:, None]
        return {"mask": (keys >= padded if left else keys < Tk - padded)[:, None, None]}

    return mask


def _one_key(case: Case, draw: torch.Generator) -> dict[str, Any]:
    Tq, Tk = _shape(case)[2:]
    return {"mask": _with_a_key(case, torch.zeros(1, 1, Tq, Tk, dtype=torch.bool))}


def _empty_rows(case: Case, draw: torch.Generator) -> dict[str, Any]:
    mask = _random_mask("B1")(case, draw)["mask"].clone()
    mask[0, :, 2:4] = False
    mask[-1, :, -1] = False
    return {"mask": mask}


def _bias(
    axes: str, size: float = 1.0, masked: bool = False, learned: bool = True
) -> Callable[[Case, torch.Generator], dict[str, Any]]:
    """A float mask with these axes (1: one entry). `learned`: its gradient is compared."""

    def mask(case: Case, draw: torch.Generator) -> dict[str, Any]:
        B, H, Tq, Tk = _shape(case)
        shape = [{"B": B, "H": H, "q": Tq, "k": Tk, "1": 1}[axis] for axis in axes]
        bias = torch.randn(shape, generator=draw, dtype=torch.float64) * size
        if masked:
            keep = _with_a_key(case, torch.rand(shape, generator=draw) < 0.7)
            bias = bias.masked_fill(~keep, -math.inf)
        if not learned:
            return {"mask": _rounded(bias, case.dtype)}
        return {"leaves": {**case.leaves, "attn_mask": bias}}

    return mask


def _lowest(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """finfo.min where a key is masked, and one row of nothing else."""
    keep = _random_mask("B1")(case, draw)["mask"].clone()
    lowest = torch.finfo(case.dtype).min
    if lowest < -1e30 and _is_stock(case.problem):  # float16's lowest number is small enough to be a score
        keep[0, :, 1] = False
    return {"mask": torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, lowest)}


def _is_stock(problem: Transport) -> bool:
    """Whether a row of nothing but the lowest number has one meaning: all scores are equal, so its keys share the mass.
    A weighted prior, a sink or a temperature would be added to a number that absorbs it, or not."""
    leaves = () if problem.prior is None else problem.prior.leaves()
    same = Transport(prior=problem.prior) == problem
    return same and all(leaf.binary for leaf in leaves)


def _as_masked(call: Call) -> Call:
    """The lowest number as -inf."""
    assert call.mask is not None
    lowest = torch.finfo(torch.float16).min
    return call.change(mask=torch.where(call.mask <= lowest, -math.inf, call.mask))


# --- other changes ----------------------------------------------------------------------------------------------------


def _poisoned(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """NaN and inf in keys and values that are masked for every query."""
    assert case.mask is not None
    masked = ~case.mask[:, 0, 0].expand(_shape(case)[0], -1)  # [B, Tk]
    leaves = dict(case.leaves)
    for name, bad in (("key", math.nan), ("value", math.nan)):
        leaves[name] = leaves[name].masked_fill(masked[:, None, :, None], bad)
    first = masked.int().argmax(1)
    for b, j in enumerate(first.tolist()):
        leaves["value"][b, :, j] = math.inf
    return {"leaves": leaves}


def _common_offset(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """Scores of about 300 more than usual, for all keys: exp of them is beyond float32."""
    leaves = dict(case.leaves)
    D = leaves["query"].shape[-1]
    size = (300 * D**0.5) ** 0.5
    for name in ("query", "key"):
        leaves[name] = torch.cat([leaves[name][..., :-1], torch.full_like(leaves[name][..., -1:], size)], -1)
        leaves[name] = _rounded(leaves[name], case.dtype)
    return {"leaves": leaves}


def _rising(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """Values of about 1 in the first half of the keys and of about 3 in the second: sums that stop growing show."""
    value = case.leaves["value"] * 0.25 + 1
    value[:, :, value.shape[2] // 2 :] += 2
    return {"leaves": {**case.leaves, "value": _rounded(value, case.dtype)}}


def _transposed(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """Tensors [B, T, H, D] that are passed as [B, H, T, D]."""
    names = ("query", "key", "value")
    leaves = {n: t.transpose(1, 2).contiguous() if n in names else t for n, t in case.leaves.items()}
    return {
        "leaves": leaves,
        "layout": lambda given: {n: t.transpose(1, 2) if n in names else t for n, t in given.items()},
    }


def _expanded(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """One key and value head, expanded to all heads without a copy."""
    names, H = ("key", "value"), case.leaves["query"].shape[1]
    leaves = {n: t[:, :1].clone() if n in names else t for n, t in case.leaves.items()}
    return {
        "leaves": leaves,
        "layout": lambda given: {n: t.expand(-1, H, -1, -1) if n in names else t for n, t in given.items()},
    }


def _sliced(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """Every second entry of a larger tensor: no dimension has stride 1."""
    names = ("query", "key", "value")
    leaves = {n: t.repeat_interleave(2, -1) if n in names else t for n, t in case.leaves.items()}
    return {"leaves": leaves, "layout": lambda given: {n: t[..., ::2] if n in names else t for n, t in given.items()}}


def _shared(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """Query, key and value are one tensor."""
    leaves = {n: t for n, t in case.leaves.items() if n not in ("key", "value")}
    return {"leaves": leaves, "layout": lambda given: {**given, "key": given["query"], "value": given["query"]}}


def _ragged(case: Case, draw: torch.Generator) -> dict[str, Any]:
    """Sequences of different lengths; only a convention with lengths can pass them."""
    B, _, Tq, Tk = _shape(case)
    T = min(Tq, Tk)
    lengths = torch.tensor([max(1, T - 5 * b) for b in range(B)])
    keep = torch.arange(Tk) < lengths[:, None]
    return {"lengths": lengths, "mask": keep[:, None, None]}
