"""A Form as the record that the engine reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._validate import Scalar
from ...compiled import pairs
from ...form import Form
from .engine import SMALL, TYPES, UNBOUNDED, Record, extension
from .links import link_of

FAMILIES = {"kl": 0, "tsallis": 1, "fermi_dirac": 2}  # with kernels of their own
COMPILED = 3
MARGINALS = {"rows": 0, "sink": 1, "relax": 2, "free": 3}
LOG_PRIORS = 4  # the number that a record holds
_CENTRED = 1.25  # Tsallis orders below this are computed as a distance from KL, wherever a price must be found
# The other tensors of a form, by the name of their field.
_TENSORS = {
    **{name: name for name in ("score_bias", "mask", "slopes", "query_ids", "key_ids", "dropout_key", "temperature")},
    **{name: name for name in ("relative", "query_factor", "key_factor", "decay_query", "decay_key", "density")},
    **{name: name for name in ("selected", "tile_map")},
    "marginal_parameter": "level",
}


def order_of(form: Form) -> Scalar:
    """alpha of a Tsallis regulariser, 0 for others."""
    return form.parameters[0] if form.family == "tsallis" else 0.0


def centred(form: Form) -> bool:
    """Whether y = (alpha - 1)(s - lambda)/tau is computed as its distance from 1 (csrc/links/links.h)."""
    if form.family != "tsallis" or form.marginal == "free":
        return False
    alpha = form.parameters[0]
    return (float(alpha.detach().min()) if isinstance(alpha, Tensor) else alpha) < _CENTRED


def record_of(form: Form) -> Record:
    """The problem, with room for results and gradients still to be written."""
    query, key, value = form.query, form.key, form.value
    assert query is not None and key is not None and value is not None
    B, H, Tq, D = query.shape
    _, Hkv, Tk, Dv = value.shape
    element, alpha = TYPES[query.dtype], order_of(form)
    record = Record(
        1 if B * H * Tq * Tk * (D + Dv) < SMALL else torch.get_num_threads(),
        1 if element == 1 else 0,  # float64 is computed in float64, all others in float32
        B,
        H,
        Hkv,
        Tq,
        Tk,
        D,
        Dv,
        UNBOUNDED if form.left is None else form.left,
        UNBOUNDED if form.right is None else form.right,
        form.offset,
        FAMILIES.get(form.family, COMPILED),
        MARGINALS[form.marginal],
        int(form.dropout_p * 2**32),
        form.scale,
        form.softcap or 0.0,
        form.mass,
        1 / (1 - form.dropout_p) if form.dropout_p < 1 else 0.0,
        form.marginal_parameter if isinstance(form.marginal_parameter, float) else 0.0,
        form.temperature if isinstance(form.temperature, float) else 0.0,
        alpha if isinstance(alpha, float) else 0.0,
        centred(form),
        0,  # scratch memory, which the module provides
        *(query.data_ptr(), element, *query.stride()),
        *(key.data_ptr(), element, *key.stride()),
        *(value.data_ptr(), element, *value.stride()),
    )
    slots = form.__dict__
    for name, field in _TENSORS.items():
        tensor = slots[name]
        if tensor is not None and not isinstance(tensor, float):
            record.tensor(field, tensor)
    if isinstance(alpha, Tensor):
        record.tensor("alpha", alpha)
    if form.family not in FAMILIES:
        _put_link(record, form)
    if form.relative is not None:
        record.put("reach", form.relative.shape[3] // 2)
    if form.query_factor is not None:
        record.put("rank", form.query_factor.shape[3])
    if form.selected is not None:
        record.put("selections", form.selected.shape[3])
        record.put("selected_block", form.selected_block)
    if form.tiles is not None:
        record.put("tiles", form.tiles.data_ptr())
    for n, prior in enumerate(form.log_priors):
        record.tensor(f"prior{n}", prior)
    if form.function is not None:
        _put_function(record, form, form.function)
    return record


def _put_link(record: Record, form: Form) -> None:
    """The compiled link of the problem's regulariser, with the tensors that it depends on."""
    link = link_of(form)
    for field, address in link.addresses(form.dtype).items():
        record.put(field, address)
    record.put("link_lower", link.lower)
    record.put("link_upper", link.upper)
    record.put("link_ceiling", link.ceiling)
    record.put("link_full_support", link.full_support)
    arguments = link.arguments(form)
    record.put("link_parameters", len(arguments))
    for n, tensor in enumerate(arguments):
        record.tensor(f"link_parameter{n}", tensor)
    record.keep(link, arguments)


def _put_function(record: Record, form: Form, function: str) -> None:
    """The compiled function of a prior, and the tensors that it reads (`Captured` in csrc/engine/functions.h)."""
    record.put("function", function_address(form, function, "fill"))
    numbers: list[int] = []
    for tensor in form.captured:
        none = [0] * (pairs.MOST_DIMENSIONS - tensor.dim())
        numbers += [tensor.data_ptr(), *tensor.shape, *none, *tensor.stride(), *none]
    record.numbers("captured", numbers or [0])


def function_address(form: Form, function: str, name: str) -> int:
    library = pairs.library(function, extension()[0].isa())
    return library.address(f"{name}_{'f64' if form.dtype == torch.float64 else 'f32'}")
