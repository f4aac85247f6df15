"""What a declared problem says about the inputs of an audit: sizes, alignment, and tensors with a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._compat import pytree
from .._pytree import Part
from ..priors import Alignment, Causal, Documents, Prior, Product, Union, Window
from ..problem import Rows, Transport
from ..regions import Blocks

# The axes of the tensors in a problem, from the last one backwards. "." fixes no size.
_AXES = {
    "Transport.temperature": "BHq.",
    "Rows.sink": "H",
    "Rows.relax": "BHq.",
    "Free.offset": "BHq.",
    "Tsallis.alpha": "H",
    "ByKeys.slope": "BHq.",
    "ByKeys.offset": "BHq.",
    "ByKeys.power": "BHq.",
    "ALiBi.slopes": "H",
    "Relative.table": "H.",
    "Bias.log_prior": "BHqk",
    "Density.prior": "BHqk",
    "Documents.query_ids": "Bq",
    "Documents.key_ids": "Bk",
    "Decay.log_forget": "BHk",
    "LowRank.query_factor": "BHq.",
    "LowRank.key_factor": "B.k.",
    "Selected.index": "BHq.",
    "Prefix.n": "B",
    "RowsAndColumns.row": "BHq",
    "RowsAndColumns.column": "BHk",
}
_PER_HEAD = ("Rows.relax", "Free.offset", "ByKeys.slope", "ByKeys.offset", "ByKeys.power")  # where [H] is allowed
_NAMES = {"log_prior": "bias", "prior": "density", "table": "relative table", "log_forget": "decay"}


@dataclass(frozen=True)
class Sizes:
    """The sizes that the tensors of a problem fix; None where they fix none."""

    B: int | None = None
    H: int | None = None
    Tq: int | None = None
    Tk: int | None = None


def parts(part: Part) -> Iterator[Part]:
    """A part and the parts that it is made of."""
    yield part
    for value in part.arguments().values():
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Part):
                yield from parts(inner)


def sizes_of(problem: Transport) -> Sizes:
    found: dict[str, int] = {}
    for part in parts(problem):
        for field, value in part.arguments().items():
            name = f"{type(part).__name__}.{field}"
            if not isinstance(value, Tensor) or name not in _AXES:
                continue
            axes = "H" if value.dim() == 1 and name in _PER_HEAD else _AXES[name]
            sizes = zip(reversed(axes), reversed(value.shape), strict=False)
            found |= {axis: size for axis, size in sizes if axis != "." and size != 1}
        if isinstance(part, Documents):
            found.setdefault("q", part.query_ids.shape[-1])
            found.setdefault("k", (part.query_ids if part.key_ids is None else part.key_ids).shape[-1])
        if isinstance(part, Blocks):
            found.setdefault("q", part.map.shape[-2] * part.size)
            found.setdefault("k", part.map.shape[-1] * part.size)
    return Sizes(found.get("B"), found.get("H"), found.get("q"), found.get("k"))


def widest_window(problem: Transport) -> int:
    """How many keys a sequence needs for every declared window to leave one out."""
    spans = [part.left or 0 for part in parts(problem) if isinstance(part, Window)]
    return max(spans, default=0)


def with_alignment(problem: Transport, default: Alignment | None) -> Transport:
    """The problem with an alignment where none is set. A problem without `Causal` keeps its own."""
    leaves = () if problem.prior is None else problem.prior.leaves()
    unset = all(getattr(leaf, "alignment", None) is None for leaf in leaves)
    if default is None or not unset or not any(isinstance(leaf, Causal) for leaf in leaves):
        return problem
    return dataclasses.replace(problem, prior=aligned(problem.prior, default))


def aligned(prior: Prior | None, alignment: Alignment | None) -> Prior | None:
    """The prior with this alignment in every part that has one."""
    if isinstance(prior, Product | Union):
        inner = tuple(aligned(part, alignment) for part in prior.parts)
        return type(prior)(inner)  # type: ignore[arg-type]
    if prior is not None and prior.positioned:
        return dataclasses.replace(prior, alignment=alignment)  # type: ignore[call-arg]
    return prior


def needs_equal_lengths(problem: Transport) -> bool:
    """Whether the problem has no meaning where Tq and Tk differ."""
    leaves = () if problem.prior is None else problem.prior.leaves()
    positioned = [leaf for leaf in leaves if leaf.positioned]
    return bool(positioned) and all(leaf.alignment is None for leaf in positioned)  # type: ignore[attr-defined]


def sink_of(problem: Transport) -> Tensor | float | None:
    return problem.marginal.sink if isinstance(problem.marginal, Rows) else None


def learned_tensors(problem: Transport) -> dict[str, Tensor]:
    """The tensors of a problem that require a gradient, by a name for messages. The sink is not among them."""
    found: dict[str, Tensor] = {}
    for part in parts(problem):
        for field, value in part.arguments().items():
            if isinstance(value, Tensor) and value.requires_grad and field != "sink":
                found.setdefault(_NAMES.get(field, field), value)
    return found


def substituted(problem: Transport, replacements: Mapping[int, Tensor]) -> Transport:
    """The problem with other tensors, by the id of the one that each replaces."""
    return pytree.tree_map_only(Tensor, lambda tensor: replacements.get(id(tensor), tensor), problem)


def on_cpu(problem: Transport) -> Transport:
    """A copy for the definition: on the CPU, numbers in float64, without gradients."""

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        return tensor.to(torch.float64) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, copied, problem)
