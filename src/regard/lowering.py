"""From arguments to `Form`: `lower` checks what the caller wrote and fills the flat record for solvers and backends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ._compat import PLAIN_TENSOR_TYPES, pytree
from ._dropout import dropout_keys
from ._validate import (
    Scalar,
    autocast,
    broadcastable,
    check_device,
    check_tensors,
    check_type,
    check_values,
    compute_dtype,
    concrete,
    describe,
    finite,
    fold,
    leading_shape,
    may_be_zero,
    number,
    plain,
    positive,
    probability,
    row_parameter,
)
from .causality import CAUSAL, refuse_causal, refuse_causal_tensor
from .compiled.pairs import indices, log_prior_at, product
from .counting import lower_by_keys, times_one
from .form import ColumnSettings, Form
from .priors import Causal, PlanShape, Prior, Product, join_ids
from .problem import Budget, ByKeys, Free, Rows, RowsAndColumns, TemperatureRule, Transport
from .regularizers import FDivergence, Regularizer
from .similarities import as_dot_products, check_score, scale_of
from .structured import add_tables
from .tiles import tile_map


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
    score: str = "dot",
) -> Form:
    """Check the arguments of `attention` and bring them to normal form."""
    query, key, value = autocast(query, key, value)
    if plain(query, key, value) and isinstance(enable_gqa, bool):
        lead = tuple(query.shape[:2])
    else:
        check_tensors(query, key, value)
        lead = leading_shape(query, key, value, enable_gqa)
        query, key, value = fold(query, lead, lead[-1]), fold(key, lead), fold(value, lead)
        if key.shape[1] != value.shape[1]:  # one head of keys or of values for all
            heads = max(key.shape[1], value.shape[1])
            key, value = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    dtype, D, kv_heads = query.dtype, query.shape[3], key.shape[1]
    if score != "dot":
        check_score(score)
        query, key = as_dot_products(score, query, key)
        value = value.to(query.dtype)
    if key_scale is not None:
        key, value = _scale_keys(key, value, key_scale, lead)
    B, H, Tq, _ = query.shape
    Tk = key.shape[2]
    causal = None if attn_mask is None else _causal_bias(attn_mask, Tq, Tk)
    if causal is not None:
        attn_mask = None
    if problem is None and is_causal is False and causal is None:  # plain softmax
        form = Form()
    else:
        shape = _plan_shape(query, key, lead, kv_heads)
        form = lower_problem(problem, shape, is_causal, causal)
    form.query, form.key, form.value = query, key, value
    form.scale = scale_of(score, D) if scale is None else number("scale", scale, "a finite number", finite)
    if query.dtype != dtype:
        form.output_dtype = dtype
    if softcap is not None:
        form.softcap = number("softcap", softcap, "a positive, finite number", positive)
    if attn_mask is not None:
        _lower_mask(form, attn_mask, lead, Tq, Tk)
    if problem is not None or attn_mask is not None:
        _refuse_mixed(form)
    if problem is not None and isinstance(problem.temperature, ByKeys):
        factor = lower_by_keys(form, problem.temperature, _plan_shape(query, key, lead, kv_heads))
        if factor is not None:
            # In float32, because the gradient of the factor is a sum over the gradient of the query.
            form.query, form.key, form.value = (x.to(form.dtype) for x in (query, key, value))
            form.query, form.output_dtype = times_one(form.query, factor), dtype
            _scale_marginal(form, factor)
    form.dropout_p = number("dropout_p", dropout_p, "a probability in [0, 1]", probability)
    if form.dropout_p > 0:
        seed = torch.randint(2**62, (1, 1, 1, 1), device=query.device)
        form.dropout_key = dropout_keys(seed, B, H)
    return form


def _plan_shape(query: Tensor, key: Tensor, lead: tuple[int, ...], kv_heads: int) -> PlanShape:
    """`kv_heads` as the caller gave them: `key_scale` may have copied the keys of shared heads."""
    dtype = compute_dtype(query.dtype)
    return PlanShape(lead, query.shape[2], key.shape[2], dtype, query.device, kv_heads=kv_heads)


def lower_scores(scores: Tensor, problem: Transport, dtype: torch.dtype | None = None) -> tuple[Form, Tensor]:
    """The form of a problem whose scores [..., Tk] or [..., Tq, Tk] are given, and the scores as [B, H, Tq, Tk].

    A score of -inf masks its key; it is replaced by 0."""
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores: expected a floating-point tensor, got {describe(scores)}")
    check_type("scores", scores)
    if scores.dim() < 1:
        raise ValueError(f"scores: expected shape [..., Tk] or [..., Tq, Tk], got {list(scores.shape)}")
    dtype = dtype or compute_dtype(scores.dtype)
    shape = (1,) * (4 - scores.dim()) + tuple(scores.shape)
    plan_shape = PlanShape(shape[:-2], shape[-2], shape[-1], dtype, scores.device)
    form = lower_problem(problem, plan_shape)
    folded = scores.reshape(shape).flatten(0, -4).to(dtype)
    finite_scores = folded != -math.inf
    folded = torch.where(finite_scores, folded, 0.0)
    _also(form, finite_scores)
    if form.function is not None:
        form = _with_shape(form, folded)
    if isinstance(problem.temperature, ByKeys):
        shaped = _with_shape(form, folded)
        factor = lower_by_keys(shaped, problem.temperature, plan_shape)
        form.temperature = shaped.temperature
        if factor is not None:
            folded = folded * factor
            _scale_marginal(form, factor)
    return form, folded


def _scale_marginal(form: Form, factor: Tensor) -> None:
    """The parameter of the marginal is in the unit of the scores."""
    if form.marginal in ("sink", "relax", "free"):
        form.marginal_parameter = form.marginal_parameter * factor


def _also(form: Form, mask: Tensor) -> None:
    """Mask the form by one more bool mask."""
    form.mask = mask if form.mask is None else form.mask & mask


def _with_shape(form: Form, scores: Tensor) -> Form:
    """The form with queries and keys that have no features, so that it knows its shape."""
    B, H, Tq, Tk = scores.shape
    query, key = scores.new_empty(B, H, Tq, 0), scores.new_empty(B, H, Tk, 0)
    return dataclasses.replace(form, query=query, key=key, value=key)


def _lower_mask(form: Form, attn_mask: object, lead: tuple[int, ...], Tq: int, Tk: int) -> None:
    assert form.query is not None
    device = form.query.device
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask: expected a tensor, got {describe(attn_mask)}")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask: expected a bool or floating-point tensor, got {describe(attn_mask)}")
    mask = broadcastable("attn_mask", attn_mask, lead, Tq, Tk, device)
    if mask.dtype == torch.bool:
        _also(form, mask)
    else:
        form.score_bias = mask
    if form.marginal == "columns":
        refuse_causal_tensor("attn_mask", mask)
        refuse_causal("the prior and attn_mask together", form, Tq, Tk, device)


def _causal_bias(attn_mask: object, Tq: int, Tk: int) -> Causal | None:
    """The prior that PyTorch's mask type `CausalBias` stands for; None for any other mask.

    A CausalBias is a tensor over uninitialised memory: only its attributes have a meaning.
    """
    if type(attn_mask) in PLAIN_TENSOR_TYPES or not isinstance(attn_mask, Tensor):
        return None
    from torch.nn.attention.bias import (
        CausalBias,
        CausalVariant,
    )  # not at the top: it loads torch.compile, which takes seconds

    if not isinstance(attn_mask, CausalBias):
        return None
    # An operation on a CausalBias keeps the type and drops the attributes.
    if not isinstance(getattr(attn_mask, "variant", None), CausalVariant):
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
    """Raise if the problem or mask holds a subclass of Tensor (a DTensor, say) and the query has another type."""
    kind = type(form.query)
    for slot, tensor in form.tensors().items():
        if type(tensor) not in PLAIN_TENSOR_TYPES and type(tensor) is not kind:
            name = "attn_mask" if slot in ("mask", "score_bias") else "problem"
            raise TypeError(
                f"{name}: expected a plain tensor, or a {kind.__name__} as query, got a {type(tensor).__name__}"
            )


def _scale_keys(key: Tensor, value: Tensor, key_scale: Tensor, lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Each key times its multiplier, which multiplies its scores, rounded once to the keys' dtype. Query heads that
    share a key but not its multiplier get copies of keys and values."""
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
    # A key that is masked for every query may hold NaN, which must not reach the gradient of the multiplier.
    good = wide.isfinite()
    scaled = torch.where(good, torch.where(good, wide, 0.0) * multiplier, wide * multiplier.detach())
    return scaled.to(key.dtype), value


# --- the problem's own part -------------------------------------------------------------------------------------------


def lower_problem(
    problem: Transport | None, shape: PlanShape, is_causal: bool = False, causal: Causal | None = None
) -> Form:
    """The part of the form that comes from the problem. `is_causal` and `causal` (the prior that a CausalBias stands
    for) multiply into its prior."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: expected a bool, got {describe(is_causal)}")
    given = () if causal is None else (causal,)
    if is_causal:
        given += (Causal("top_left"),)
    form = Form()
    if problem is None:  # softmax, which the defaults of Form describe
        if given:
            _lower_prior(form, given, shape)
        return form
    if not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport, got {describe(problem)}")
    assert problem.regularizer is not None
    _lower_regularizer(form, problem.regularizer, shape)
    _lower_marginal(form, problem, shape)
    factors = given if problem.prior is None else (*problem.prior.factors(), *given)
    if factors:
        _lower_prior(form, factors, shape)
    _lower_temperature(form, problem, shape)
    if form.marginal == "columns":
        _check_columns(form, problem, shape)
    if form.hard and form.known_hard:
        # Under Fermi-Dirac each key takes at most pi, so the best key cannot take all the mass.
        unlike = form.marginal != "rows" or form.mass != 1 or form.weighted
        if form.marginal == "free" or (problem.regularizer.ceiling < math.inf and unlike):
            raise ValueError(f"temperature: 0 (hard routing) has no meaning for {problem!r}; expected temperature > 0")
    return form


def _row(name: str, value: Scalar, shape: PlanShape, per_head: bool = True) -> Scalar:
    """A parameter of the rows: a number, or a tensor [B|1, H|1, Tq|1, 1]."""
    if type(value) is float:
        return value
    return row_parameter(name, value, shape.B, shape.H, shape.Tq, shape.dtype, shape.device, per_head)


def _lower_regularizer(form: Form, regularizer: Regularizer, shape: PlanShape) -> None:
    form.family = regularizer.family
    if isinstance(regularizer, FDivergence):
        form.declared = regularizer
        return
    kind = type(regularizer)
    for name, value in regularizer.parameters.items():
        if type(value) is not float:
            where = f"{kind.__name__}({name})"
            value = _row(where, value, shape)
            if name in kind.domains:
                text, above, below = kind.domains[name]
                check_values(where, value, text, lambda x: (x > above) & (x < below))  # noqa: B023
        form.parameters.append(value)


def _lower_marginal(form: Form, problem: Transport, shape: PlanShape) -> None:
    marginal = problem.marginal
    if isinstance(marginal, Rows):
        form.mass = float(marginal.mass)
        if marginal.sink is not None:
            form.marginal, form.marginal_parameter = "sink", _row("Rows(sink)", marginal.sink, shape)
            check_values("Rows(sink)", form.marginal_parameter, "finite scores", torch.isfinite)
        elif marginal.relax is not None:
            form.marginal, form.marginal_parameter = "relax", _row("Rows(relax)", marginal.relax, shape)
            check_values("Rows(relax)", form.marginal_parameter, "relax > 0", lambda rho: (rho > 0) & rho.isfinite())
    elif isinstance(marginal, Free):
        form.marginal, form.marginal_parameter = "free", _row("Free(offset)", marginal.offset, shape)
        check_values("Free(offset)", form.marginal_parameter, "finite numbers", torch.isfinite)
    elif isinstance(marginal, RowsAndColumns):
        _lower_columns(form, problem, marginal, shape)
    else:
        raise NotImplementedError(f"problem: no solver for the marginal {marginal!r}")


def _lower_columns(form: Form, problem: Transport, marginal: RowsAndColumns, shape: PlanShape) -> None:
    if form.family != "kl":
        raise ValueError(
            f"problem: RowsAndColumns expects KL(), whose half-steps are in closed form, got {problem.regularizer!r}"
        )
    lead, Tq, Tk, dtype, device = shape.lead, shape.Tq, shape.Tk, shape.dtype, shape.device
    form.marginal = "columns"
    form.columns = ColumnSettings(marginal.tolerance, marginal.max_iterations, marginal.iterations, marginal.strict)
    if isinstance(marginal.row, Tensor):
        row_mass = broadcastable("RowsAndColumns(row)", marginal.row[..., None], lead, Tq, 1, device).to(dtype)
        check_values("RowsAndColumns(row)", row_mass, "finite numbers >= 0", lambda a: (a >= 0) & a.isfinite())
        form.row_mass = row_mass
    elif marginal.row is not None:
        form.mass = float(marginal.row)
    if marginal.column is not None:
        column = marginal.column if marginal.column.dim() else marginal.column[None]
        column_mass = broadcastable("RowsAndColumns(column)", column[..., None, :], lead, 1, Tk, device).to(dtype)
        check_values("RowsAndColumns(column)", column_mass, "finite numbers >= 0", lambda b: (b >= 0) & b.isfinite())
        form.column_mass = column_mass
    if marginal.relax is not None:
        form.marginal_parameter = rho = _row("RowsAndColumns(relax)", marginal.relax, shape)
        check_values("RowsAndColumns(relax)", rho, "relax > 0", lambda rho: (rho > 0) & rho.isfinite())


def _check_columns(form: Form, problem: Transport, shape: PlanShape) -> None:
    """Raise for what a plan with both marginals cannot have: a temperature per query, temperature 0, a causal prior.
    A function becomes dense, because the solver also reads the plan with both sides exchanged."""
    if form.function is not None:
        index = indices((shape.B, shape.H, shape.Tq, shape.Tk), (0, 0, form.offset, 0), shape.device)
        dense = log_prior_at(form.function, form.captured, index, shape.dtype)
        form.log_priors.append(dense.expand(*(1,) * (4 - dense.dim()), *dense.shape))
        form.function, form.captured = None, []
    if isinstance(problem.temperature, ByKeys):
        raise ValueError(
            "temperature: expected one for all queries of a head under RowsAndColumns, got ByKeys, which gives each "
            "row its own: a key has one price, which all queries share"
        )
    values = (("temperature", form.temperature), ("RowsAndColumns(relax)", form.marginal_parameter))
    for name, value in values:
        if isinstance(value, Tensor) and value.shape[2] > 1:
            raise ValueError(
                f"{name}: expected one for all queries of a head under RowsAndColumns ([H, 1, 1], or [B, H, 1, 1]), "
                f"got shape {list(value.shape)}: a key has one price, which all queries share"
            )
    if form.hard and form.known_hard:
        raise ValueError(f"temperature: 0 (an assignment problem) has no solver here for {problem!r}; expected > 0")
    if form.right is not None and form.right <= 0:
        raise ValueError(CAUSAL.format("prior"))
    for log_prior in form.log_priors:
        refuse_causal_tensor("Bias(log_prior)", log_prior)
    refuse_causal("the prior's factors together", form, shape.Tq, shape.Tk, shape.device)


def _lower_temperature(form: Form, problem: Transport, shape: PlanShape) -> None:
    temperature = problem.temperature
    if isinstance(temperature, Budget):
        form.temperature = torch.ones(1, 1, 1, 1, dtype=shape.dtype, device=shape.device)  # the solver replaces it
        form.matched, form.budget = temperature.statistic, _lower_budget(form, temperature, shape)
        return
    if type(temperature) is float:
        form.temperature, form.hard = temperature, temperature == 0
        return
    if isinstance(temperature, TemperatureRule):  # ByKeys: computed when the masks are known
        form.temperature = torch.ones(1, 1, 1, 1, dtype=shape.dtype, device=shape.device)
        return
    form.temperature = _row("temperature", temperature, shape, per_head=False)
    check_values("temperature", form.temperature, "temperature >= 0", lambda tau: (tau >= 0) & tau.isfinite())
    form.hard = may_be_zero(form.temperature)


def _lower_budget(form: Form, rule: Budget, shape: PlanShape) -> Tensor:
    """The budget as [B|1, H|1, Tq|1, 1]."""
    name, value = f"{type(rule).__name__}(budget)", rule.budget
    if not isinstance(value, Tensor):
        value = torch.full((1, 1, 1, 1), float(value), dtype=shape.dtype, device=shape.device)
    budget = _row(name, value, shape, per_head=False)
    check_values(name, budget, "finite numbers", torch.isfinite)
    if rule.statistic == "entropy":  # priors that are weighted by construction raised when the Transport was made
        for bias in form.log_priors:
            if concrete(bias) and bool(((bias != 0) & (bias != -math.inf)).any()):
                raise ValueError(
                    "temperature: MatchEntropy expects a prior of 0 and 1 (log_prior 0 or -inf), got a weighted Bias "
                    "(MatchKL takes any prior)"
                )
    assert isinstance(budget, Tensor)
    return budget


def _lower_prior(form: Form, factors: tuple[Prior, ...], shape: PlanShape) -> None:
    """The product of the factors: windows intersect, slopes, tables and decays add, factors are joined, log-priors are
    listed, ids are paired, regions become one map of tiles."""
    form.offset = _offset(factors, shape.Tq, shape.Tk)
    if form.offset:
        shape = PlanShape(shape.lead, shape.Tq, shape.Tk, shape.dtype, shape.device, form.offset, shape.kv_heads)
    regions: list[Prior] = []
    for factor in factors:
        terms = factor.terms(shape)
        if terms.left is not None:
            form.left = terms.left if form.left is None else min(form.left, terms.left)
        if terms.right is not None:
            form.right = terms.right if form.right is None else min(form.right, terms.right)
        if terms.log_prior is not None:
            form.log_priors.append(terms.log_prior)
        if terms.function is not None:
            form.function = terms.function if form.function is None else product(form.function, terms.function)
            form.captured = [*form.captured, *terms.captured]
        form.untraced = form.untraced or terms.untraced
        form.slopes = _joined(torch.add, form.slopes, terms.slopes)
        form.relative = _joined(add_tables, form.relative, terms.relative)
        form.query_factor = _joined(_join_factors, form.query_factor, terms.query_factor)
        form.key_factor = _joined(_join_factors, form.key_factor, terms.key_factor)
        form.decay_query = _joined(torch.add, form.decay_query, terms.decay_query)
        form.decay_key = _joined(torch.add, form.decay_key, terms.decay_key)
        form.density = _joined(torch.mul, form.density, terms.density)
        if terms.selected is not None and form.selected is None and form.marginal != "columns":
            form.selected, form.selected_block = terms.selected, terms.selected_block
        elif terms.selected is not None:
            # A second selection: the intersection of both is a region. So is one that has to be read from the keys.
            regions.append(factor)
        if terms.region is not None:
            regions.append(terms.region)
        if terms.query_ids is not None and terms.key_ids is not None:
            ids = (terms.query_ids, terms.key_ids)
            if form.query_ids is not None and form.key_ids is not None and shape.Tq > 0 and shape.Tk > 0:
                ids = join_ids((form.query_ids, form.key_ids), ids)
            form.query_ids, form.key_ids = ids
    if regions and shape.Tq and shape.Tk:
        _lower_regions(form, regions[0] if len(regions) == 1 else Product(tuple(regions)), shape)


def _joined(join: Callable[[Tensor, Tensor], Tensor], one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else join(one, other)


def _join_factors(one: Tensor, other: Tensor) -> Tensor:
    """Factors of both ranks, side by side."""
    shape = torch.broadcast_shapes(one.shape[:-1], other.shape[:-1])
    return torch.cat([one.expand(*shape, -1), other.expand(*shape, -1)], -1)


def _lower_regions(form: Form, region: Prior, shape: PlanShape) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(region) if isinstance(leaf, Tensor)]
    if torch.compiler.is_compiling() or not all(map(concrete, leaves)):
        # The number of mixed tiles depends on values, which a traced graph cannot: it gets a dense bool mask. (For
        # long sequences operator.py breaks the graph instead. Under torch.func there is no such limit.)
        index = [torch.arange(n, device=shape.device) for n in (shape.B, shape.H, shape.Tq, shape.Tk)]
        b, h, i, j = (x.view([-1 if d == n else 1 for d in range(4)]) for n, x in enumerate(index))
        _also(form, region.admits(shape, b, h, i, j))
        return
    form.tile_map, form.tiles = tile_map(region, shape)


def _offset(factors: tuple[Prior, ...], Tq: int, Tk: int) -> int:
    """The key position of query 0, from the alignments of the factors that depend on positions."""
    leaves = [leaf for factor in factors for leaf in factor.leaves()]
    alignments = {leaf.alignment for leaf in leaves if leaf.positioned}  # type: ignore[attr-defined]
    if "top_left" in alignments and "bottom_right" in alignments:
        raise ValueError(
            'alignment: expected one for the whole prior, got "top_left" and "bottom_right" (is_causal and '
            'causal_upper_left are "top_left", causal_lower_right is "bottom_right")'
        )
    if "bottom_right" in alignments:
        return Tk - Tq
    if alignments == {None} and Tq != Tk:
        raise ValueError(
            f'alignment: expected "top_left" or "bottom_right" in the prior where Tq != Tk, got none with Tq={Tq}, '
            f"Tk={Tk}"
        )
    return 0
