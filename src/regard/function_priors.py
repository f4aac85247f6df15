"""Priors that are functions of the user's: `prior(function)`, and `from_flex` for the mods of FlexAttention.

A function is traced when the prior is made (compiled/). Its graph and the tensors that it reads go into the form; the
native engine compiles the graph, and other backends evaluate it block by block. A function that cannot be traced is
called with the indices of the whole plan: the result is a dense bias, and `select_backend` reports why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._compat import transforms_active
from ._validate import check_device, check_type, describe
from .compiled import BOOL, INT, REAL, SideEffect, Traced, Untraceable, pairs, trace
from .compiled.flex import traced_mask_mod, traced_score_mod
from .priors import Alignment, PlanShape, Prior, PriorTerms, check_alignment


class FunctionPrior(Prior, abstract=True):
    """What the priors of this file share: a traced graph and the tensors that it reads (`tensors`)."""

    positioned: ClassVar[bool] = True

    def _trace(self, name: str, traced: Callable[[], Traced], strict: bool = False) -> None:
        """Set the fields `tensors`, `traced` and `reason`. With `strict`, what cannot be traced raises."""
        found: Traced | None = None
        reason: str | None = None
        # Inside of a transform or of a compiled function tensors have no identity: the function is called instead.
        hidden = torch.compiler.is_compiling() or transforms_active()
        if hidden and strict:
            raise ValueError(
                f"{name}: expected a call outside of torch.compile and of torch.func's transforms, where the mod "
                "cannot be checked: make the prior before, or use regard.prior"
            )
        if not hidden:
            try:
                found = traced()
                for slot in found.graph.slots:
                    if slot.ndim > pairs.MOST_DIMENSIONS:
                        raise Untraceable(f"it reads a tensor of more than {pairs.MOST_DIMENSIONS} dimensions")
            except Untraceable as error:
                reason = str(error)
                if strict or isinstance(error, SideEffect):
                    raise ValueError(f"{name}: expected a function that can be traced, but {reason}") from error
        tensors = () if found is None else tuple(found.leaves)
        fields = {"tensors": tensors, "traced": None if found is None else found.without_leaves(), "reason": reason}
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        self._declare()

    def _declare(self) -> None:
        traced: Traced | None = self.traced  # type: ignore[attr-defined]
        mask = traced is not None and pairs.is_mask(traced.graph)
        object.__setattr__(self, "binary", mask)
        object.__setattr__(self, "weighted", traced is not None and not mask)
        object.__setattr__(self, "text", None if traced is None else pairs.to_text(traced.graph))

    def _call(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        """The user's function itself, at indices that broadcast. (Only `prior` has functions that are not traced.)"""
        raise NotImplementedError

    def _identity(self) -> tuple:
        fields = {n: getattr(self, n) for n in self._names if n not in ("tensors", "traced", "reason")}
        return (type(self), *fields.values(), *map(id, self.tensors))  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, FunctionPrior) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())

    # --- lowering -----------------------------------------------------------------------------------------------------

    def terms(self, shape: PlanShape) -> PriorTerms:
        if self.traced is None:  # type: ignore[attr-defined]
            return PriorTerms(log_prior=self._dense(shape), untraced=self.reason)  # type: ignore[attr-defined]
        return PriorTerms(function=self.text, captured=self._captured(shape))  # type: ignore[attr-defined]

    def _captured(self, shape: PlanShape) -> tuple[Tensor, ...]:
        """The tensors that the graph reads, in the dtypes that backends expect."""
        traced, name, found = self.traced, repr(self), []  # type: ignore[attr-defined]
        for leaf in self.tensors:  # type: ignore[attr-defined]
            check_type(f"{name}: a captured tensor", leaf)
            check_device(f"{name}: a captured tensor", leaf, shape.device)
        for tensor, slot in zip(traced.captured(self.tensors), traced.graph.slots, strict=True):  # type: ignore[attr-defined]
            dtype = {REAL: shape.dtype, INT: torch.int64, BOOL: torch.bool}[slot.kind]
            found.append(tensor.to(dtype))
        return tuple(found)

    def _dense(self, shape: PlanShape) -> Tensor:
        """log pi of every pair, [B|1, H|1, Tq|1, Tk|1]."""
        index = pairs.indices((shape.B, shape.H, shape.Tq, shape.Tk), (0, 0, shape.offset, 0), shape.device)
        return _as_log_prior(repr(self), self._call(*index), shape)

    def admits(self, shape: PlanShape, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        index = (b, h, i + shape.offset, j)
        found = pairs.log_prior_at(self.text, self._captured(shape), index, shape.dtype)  # type: ignore[attr-defined]
        return ~(found == -math.inf)

    def tile_bounds(self, shape: PlanShape) -> tuple[Tensor, Tensor]:
        """No tile is decided. Only the batch entries and heads that the function depends on are known."""
        graph = self.traced.graph  # type: ignore[attr-defined]
        names = graph.depends()[graph.outputs[0]]
        sizes = (shape.B if "b" in names else 1, shape.H if "h" in names else 1, 1, 1)
        nothing = torch.zeros(sizes, dtype=torch.bool, device=shape.device)
        return ~nothing, nothing


def _as_log_prior(name: str, found: Any, shape: PlanShape) -> Tensor:
    if isinstance(found, (bool, int, float)):
        found = torch.full((1, 1, 1, 1), found, dtype=torch.bool if isinstance(found, bool) else shape.dtype)
    if not isinstance(found, Tensor) or found.is_complex():
        raise TypeError(f"{name}: expected a function that returns a tensor of real numbers, got {describe(found)}")
    sizes, full = (1,) * (4 - found.dim()) + tuple(found.shape), (shape.B, shape.H, shape.Tq, shape.Tk)
    if len(sizes) > 4 or any(s != 1 and s != f for s, f in zip(sizes, full, strict=True)):
        raise ValueError(
            f"{name}: expected a result that broadcasts to [B, H, Tq, Tk] = {list(full)}, got {list(found.shape)}"
        )
    found = found.reshape(sizes).to(shape.device)
    if found.dtype == torch.bool:
        return torch.zeros_like(found, dtype=shape.dtype).masked_fill(~found, -math.inf)
    return found.to(shape.dtype)


def _named(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _check_callable(name: str, function: object) -> None:
    if not callable(function):
        raise TypeError(f"{name}: expected a callable, got {describe(function)}")


class FromFunction(FunctionPrior):
    """log pi = function(b, h, i, j), the result of `regard.prior`."""

    function: Callable[..., Any]
    alignment: Alignment | None = None
    tensors: tuple[Tensor, ...] = ()
    traced: Any = None
    reason: str | None = None

    def __init__(self, function: Callable[..., Any], alignment: Alignment | None = None) -> None:
        _check_callable("prior(function)", function)
        check_alignment("prior", alignment)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "alignment", alignment)
        self._trace("prior(function)", lambda: trace(function, pairs.INPUTS).map(pairs.as_log_prior))

    def arguments(self) -> dict[str, Any]:
        return {"function": self.function, "alignment": self.alignment}

    def _call(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        return self.function(b, h, i, j)

    def __repr__(self) -> str:
        aligned = "" if self.alignment is None else f", alignment={self.alignment!r}"
        return f"prior({_named(self.function)}{aligned})"


class MaskMod(FunctionPrior):
    """A mask_mod of FlexAttention: the pair is masked where mask_mod(b, h, q_idx, kv_idx) is false."""

    alignment: ClassVar[Alignment] = "top_left"
    mask_mod: Callable[..., Any]
    tensors: tuple[Tensor, ...] = ()
    traced: Any = None
    reason: str | None = None

    def __init__(self, mask_mod: Callable[..., Any]) -> None:
        _check_callable("from_flex(mask_mod)", mask_mod)
        object.__setattr__(self, "mask_mod", mask_mod)
        self._trace("from_flex(mask_mod)", lambda: traced_mask_mod(mask_mod), strict=True)

    def arguments(self) -> dict[str, Any]:
        return {"mask_mod": self.mask_mod}

    def __repr__(self) -> str:
        return f"from_flex(mask_mod={_named(self.mask_mod)})"


class ScoreMod(FunctionPrior):
    """A score_mod of FlexAttention that adds to the score: log pi is what it adds."""

    alignment: ClassVar[Alignment] = "top_left"
    score_mod: Callable[..., Any]
    tensors: tuple[Tensor, ...] = ()
    traced: Any = None
    reason: str | None = None

    def __init__(self, score_mod: Callable[..., Any]) -> None:
        _check_callable("from_flex(score_mod)", score_mod)
        object.__setattr__(self, "score_mod", score_mod)
        self._trace("from_flex(score_mod)", lambda: traced_score_mod(score_mod), strict=True)

    def arguments(self) -> dict[str, Any]:
        return {"score_mod": self.score_mod}

    def __repr__(self) -> str:
        return f"from_flex(score_mod={_named(self.score_mod)})"


def prior(function: Callable[..., Any], alignment: Alignment | None = None) -> Prior:
    """A prior from a function: log pi = function(b, h, i, j).

    The arguments are int64 tensors that broadcast against each other: the batch entry (leading dimensions are numbered
    through), the query head, the *position* of the query among the keys (index + offset, so that decoding agrees with
    prefill) and the index of the key. -inf masks a pair; a result of truth values is a mask, too. `alignment` is as in
    `Causal`.

    Tensors that the function reads (closures, parameters, attributes) are captured when the prior is made, by identity:
    later changes of their values count, and they may require a gradient. docs/own.md lists the operations that can be
    traced. Any other function is called with all indices at once and served by the reference backend.
    """
    return FromFunction(function, alignment)


def from_flex(score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None) -> Prior:
    """A prior from the mods of FlexAttention: score_mod(score, b, h, q_idx, kv_idx), mask_mod(b, h, q_idx, kv_idx).

    q_idx is the index of the query, aligned top-left, as in FlexAttention. A score_mod must add to the score something
    that does not depend on it, or mask it (torch.where(condition, score, -inf)). Everything else raises ValueError
    here, which names the remedy. At temperature 1 softmax attention with this prior is FlexAttention's.
    """
    parts: list[Prior] = []
    if score_mod is not None:
        parts.append(ScoreMod(score_mod))
    if mask_mod is not None:
        parts.append(MaskMod(mask_mod))
    if not parts:
        raise ValueError("from_flex: expected a score_mod or a mask_mod, got neither")
    return parts[0] if len(parts) == 1 else parts[0] * parts[1]
