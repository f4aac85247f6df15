"""One operator for every backend that has no autograd of its own: schema, fake, gradient, transforms.

Two ways in. While compiling or tracing, `torch.ops.regard.attend` (its schema derived from `Form`): opaque to the
compiler. In eager mode, the autograd Function `Attend`, which also serves torch.func.grad, jvp, vmap and double
backward. In forward mode the output is the named backend's and its tangent comes from the definition's differentiable
blocks, whose own forward mode keeps nothing for later: O(T) memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    get_interpreter_stack,
    get_unwrapped,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
    unwrap_if_dead,
)
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .backends import native, sdpa
from .backends import torch as definition
from .form import Form, output_shapes
from .statistics import DIFFERENTIABLE

# Those that follow the protocol forward(form, names), backward(...).
BACKENDS: dict[str, Any] = {"torch": definition, "native": native, "sdpa": sdpa}


def forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    return forward_ad._current_level >= 0


def run(backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Output and statistics by a backend, differentiable where promised."""
    if torch.compiler.is_compiling():
        if forward_mode():
            raise NotImplementedError("forward mode under torch.compile is not served: use the transform in eager mode")
        return _run_compiled(backend, form, names)
    transformed, ahead = torch._C._are_functorch_transforms_active(), forward_mode()
    if torch._C._len_torch_dispatch_stack():
        # Somebody watches or replaces every operator (fake tensors, make_fx): show our own, or the definition's. The
        # engine reads memory, which fake tensors have none of and tracing would not see.
        if not (ahead or transformed):
            return _run_compiled(backend, form, names)
        backend = "torch"
    if ahead and backend == "torch":
        return definition.differentiable(form, names)
    if ahead or transformed:
        # A transform does not ask whether an output is differentiable: a statistic's tangent must be right, not zero.
        others = tuple(name for name in names if name not in DIFFERENTIABLE)
        if others:
            results = definition.differentiable(form, others)
            rest = tuple(name for name in names if name in DIFFERENTIABLE)
            return results | run(backend, form, rest) if rest else results
    elif not torch.is_grad_enabled() or not form.requires_grad():
        return BACKENDS[backend].forward(form, names)
    tensors = form.tensors()
    if ahead or transformed:
        computed = _with_saved(backend, form, names)
        outputs = Attend.apply(form, tuple(tensors), computed, backend, *tensors.values())
    else:
        alive = map(unwrap_if_dead, tensors.values())  # of those that left a transform
        outputs = _apply_plainly(_skeleton(form, tensors), tuple(tensors), names, backend, *alive)
    return dict(zip(names, outputs, strict=False))


def _with_saved(backend: str, form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
    """What to compute when a gradient may follow."""
    return (*names, *(name for name in BACKENDS[backend].saved(form, names) if name not in names))


# --- batched gradients ------------------------------------------------------------------------------------------------
#
# `torch.autograd.grad(..., is_grads_batched=True)`, `jacobian(..., vectorize=True)` and gradcheck hand a backward pass
# PyTorch's older kind of batched tensor, which has neither memory nor rules for most views. These two give the pass
# plain tensors.

_TOGETHER = 2**24  # numbers that the samples computed together may store


def per_sample(pull: Callable[..., Any], grads: tuple[Tensor, ...], size: int) -> Any:
    """`pull(*grads)`, for each sample if the gradients are a batch: by `torch.func.vmap`, whose rules our Functions
    have. A sample stores about `size` numbers; this bounds how many are computed together."""
    if not any(map(is_legacy_batchedtensor, grads)):
        return pull(*grads)
    plain, dims, level = _unbatched(grads)
    found = torch.func.vmap(pull, dims, chunk_size=max(1, _TOGETHER // max(1, size)))(*plain)
    return tree_map(lambda t: torch._add_batch_dim(t, 0, level), found)  # type: ignore[reportPrivateImportUsage]


def one_by_one(pull: Callable[..., Any], grads: tuple[Tensor, ...]) -> Any:
    """The same by a loop over the samples, for what `torch.func.vmap` cannot see through."""
    if not any(map(is_legacy_batchedtensor, grads)):
        return pull(*grads)
    plain, dims, level = _unbatched(grads)
    size = next(t.shape[0] for t, dim in zip(plain, dims, strict=True) if dim == 0)
    samples = [pull(*(t if dim is None else t[i] for t, dim in zip(plain, dims, strict=True))) for i in range(size)]
    stacked = tree_map(lambda *parts: torch.stack(parts), *samples)
    return tree_map(lambda t: torch._add_batch_dim(t, 0, level), stacked)  # type: ignore[reportPrivateImportUsage]


def _unbatched(grads: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[int | None, ...], int]:
    """The tensors with the batch as an ordinary first dimension, where it is (None: not batched), and its level."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    dims = tuple(0 if is_legacy_batchedtensor(grad) else None for grad in grads)
    # The size given (here 1) counts only for tensors that are not batched.
    remove = torch._remove_batch_dim  # type: ignore[reportPrivateImportUsage]
    plain = [g if dim is None else remove(g, level, 1, dim) for g, dim in zip(grads, dims, strict=True)]
    if any(map(is_legacy_batchedtensor, plain)):
        raise NotImplementedError("is_grads_batched: expected one batch of gradients, got a batch inside a batch")
    return plain, dims, level


# --- eager: an autograd Function --------------------------------------------------------------------------------------


class Attend(torch.autograd.Function):
    """apply(form, slots, names, backend, *tensors) -> one output per name; the tensors fill the form's slots."""

    @staticmethod
    def forward(form: Form, slots: tuple, names: tuple, backend: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = BACKENDS[backend].forward(form.with_tensors(dict(zip(slots, tensors, strict=True))), names)
        return tuple(results[name] for name in names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.form, ctx.slots, ctx.names, ctx.backend, *tensors = inputs
        ctx.form = ctx.form.with_tensors(dict.fromkeys(ctx.slots))  # the tensors are saved once, below
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)
        ctx.dtypes = tuple(o.dtype for o in output)
        ctx.mark_non_differentiable(*(o for n, o in zip(ctx.names, output, strict=True) if n not in DIFFERENTIABLE))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        """`grads` are of the first outputs; what was saved besides has none."""
        saved = ctx.saved_tensors  # read once: checkpointing hands each tensor out one time
        needed = tuple(s for s, need in zip(ctx.slots, ctx.needs_input_grad[4:], strict=True) if need)
        incoming = {
            name: g for name, g in zip(ctx.names, grads, strict=False) if g is not None and name in DIFFERENTIABLE
        }
        if not incoming or not needed:
            return (None,) * (4 + len(ctx.slots))
        plan = _BackwardPlan(ctx.form, ctx.slots, ctx.names, tuple(incoming), needed, ctx.backend)
        size = sum(t.numel() for t in saved)
        found = per_sample(lambda *grads: plan.pull(saved, grads), tuple(incoming.values()), size)
        by_slot = dict(zip(needed, found, strict=True))
        return (None,) * 4 + tuple(by_slot.get(slot) for slot in ctx.slots)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple:  # type: ignore[override]
        """The outputs' tangents, from the definition, block by block."""
        names = tuple(name for name in ctx.names if name in DIFFERENTIABLE)
        saved = ctx.saved_tensors
        moved = {slot: t for slot, t in zip(ctx.slots, tangents[4:], strict=True) if t is not None}

        def push(*given: Tensor) -> tuple[Tensor, ...]:
            by_slot = dict(zip(moved, given, strict=True))
            with forward_ad._set_fwd_grad_enabled(True):
                duals = _with_tangents(saved, tuple(map(by_slot.get, ctx.slots)))
                form = ctx.form.with_tensors(dict(zip(ctx.slots, duals, strict=True)))
                if _first_order_only((*saved, *given)):
                    found = definition.tangents(form, names)
                else:
                    found = {name: _tangent(result) for name, result in definition.differentiable(form, names).items()}
            return tuple(found[name] for name in names)

        found = dict(zip(names, one_by_one(push, tuple(moved.values())), strict=True))
        return tuple(found[n].to(d) if n in found else None for n, d in zip(ctx.names, ctx.dtypes, strict=True))

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple, form: Form, slots: tuple, names: tuple, backend: str, *tensors: Tensor
    ) -> tuple:
        V = info.batch_size
        B = _logical_batch(slots, in_dims[4:], tensors)
        folded = [_fold(t, d, V, B, s in _CARRIED) for s, t, d in zip(slots, tensors, in_dims[4:], strict=True)]
        outputs = Attend.apply(_skeleton(form), slots, names, backend, *folded)
        return tuple(o.unflatten(0, (V, B)) for o in outputs), (0,) * len(outputs)


class AttendPlainly(torch.autograd.Function):
    """`Attend` where no transform is active, in fewer steps: what backward wants is saved without being an output.

    apply(form without tensors, slots, names, backend, *tensors) -> one output per name.
    """

    @staticmethod
    def forward(ctx: Any, form: Form, slots: tuple, names: tuple, backend: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        whole = form.with_tensors(dict(zip(slots, tensors, strict=True)))
        computed = _with_saved(backend, whole, names)
        results = BACKENDS[backend].forward(whole, computed)
        ctx.form, ctx.slots, ctx.names, ctx.backend = form, slots, computed, backend
        ctx.save_for_backward(*tensors, *(results[name] for name in computed))
        if len(names) > 1:
            ctx.mark_non_differentiable(*(results[name] for name in names if name not in DIFFERENTIABLE))
        ctx.set_materialize_grads(False)
        return tuple(results[name] for name in names)

    backward = Attend.backward


# What `apply` does outside of transforms, without its slow look at forward's signature.
_apply_plainly = super(torch.autograd.Function, AttendPlainly).apply  # type: ignore[misc]


@dataclasses.dataclass(frozen=True, eq=False)
class _BackwardPlan:
    form: Form
    slots: tuple[str, ...]  # of the tensors
    names: tuple[str, ...]  # of the outputs
    incoming: tuple[str, ...]  # of the gradients given
    needed: tuple[str, ...]  # slots whose gradient is wanted
    backend: str

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[dict, dict, dict]:
        """Slots, outputs and incoming gradients by name."""
        a = len(self.slots)
        b = a + len(self.names)
        return (
            dict(zip(self.slots, tensors[:a], strict=True)),
            dict(zip(self.names, tensors[a:b], strict=True)),
            dict(zip(self.incoming, tensors[b:], strict=True)),
        )

    def pull(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of the needed slots, from all slots and outputs (`saved`) and the incoming gradients."""
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or forward_mode():
            return AttendBackward.apply(self, *saved, *grads)  # type: ignore[return-value]
        # Nothing will differentiate the gradient. (A vjp called after its transform has ended leaves wrappers.)
        return AttendBackward.forward(self, *unwrap_dead_wrappers((*saved, *grads)))


class AttendBackward(torch.autograd.Function):
    """apply(plan, *slots, *outputs, *gradients) -> gradients of the needed slots; differentiable again."""

    @staticmethod
    def forward(plan: _BackwardPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
        slots, outputs, grads = plan.split(tensors)
        found = BACKENDS[plan.backend].backward(plan.form.with_tensors(slots), plan.needed, outputs, grads)
        return tuple(found[slot] for slot in plan.needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        """The second derivative, through the definition (it keeps the whole plan: memory is promised for one order)."""
        plan: _BackwardPlan = ctx.plan
        slots, outputs, incoming = plan.split(ctx.saved_tensors)

        # Not only the slots whose gradient was taken: each gradient depends on all of them.
        needs = dict(zip(plan.slots, ctx.needs_input_grad[1:], strict=False))
        varied = tuple(slot for slot in plan.slots if needs[slot])

        def first_order(tensors: tuple, incoming: tuple) -> tuple[Tensor, ...]:
            return _first_order(plan, slots | dict(zip(varied, tensors, strict=True)), incoming)

        tensors = tuple(slots[slot] for slot in varied)
        _, pull = torch.func.vjp(first_order, tensors, tuple(incoming.values()))  # type: ignore[misc]
        plan_size = math.prod(plan.form.with_tensors(slots).shape)
        by_slot, by_grad = per_sample(lambda *grads: pull(grads), grads, plan_size)
        found = dict(zip(varied, by_slot, strict=True))
        return (None, *(found.get(s) for s in plan.slots), *(None,) * len(outputs), *by_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple:  # type: ignore[override]
        """The gradients' tangents, likewise. (Those of the saved outputs follow from the slots'.)"""
        plan: _BackwardPlan = ctx.plan
        with forward_ad._set_fwd_grad_enabled(True):
            duals = _with_tangents(ctx.saved_tensors, tangents[1:])
            slots, _, incoming = plan.split(duals)
            return tuple(map(_tangent, _first_order(plan, slots, tuple(incoming.values()))))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, plan: _BackwardPlan, *tensors: Tensor) -> tuple:  # type: ignore[override]
        V = info.batch_size
        dims, n = in_dims[1:], len(plan.slots)
        B = _logical_batch(plan.slots, dims[:n], tensors[:n])
        # A needed slot gets a gradient per sample, even where the samples share its value.
        folded = [
            _fold(t, d, V, B, i >= n or plan.slots[i] in (*_CARRIED, *plan.needed))
            for i, (t, d) in enumerate(zip(tensors, dims, strict=True))
        ]
        found = AttendBackward.apply(dataclasses.replace(plan, form=_skeleton(plan.form)), *folded)
        unfolded = []
        for slot, grad in zip(plan.needed, found, strict=True):
            i = plan.slots.index(slot)
            own = tensors[i].shape[0] if dims[i] is None else tensors[i].movedim(dims[i], 0).shape[1]
            grad = grad.unflatten(0, (V, B))
            unfolded.append(grad.sum(1, keepdim=True) if own == 1 and B > 1 else grad)
        return tuple(unfolded), (0,) * len(unfolded)


def _first_order(plan: _BackwardPlan, slots: dict[str, Tensor], incoming: tuple) -> tuple[Tensor, ...]:
    """What AttendBackward computes, as plain operations."""
    form = plan.form.with_tensors(slots)

    def outcome(*needed: Tensor) -> tuple[Tensor, ...]:
        varied = form.with_tensors(dict(zip(plan.needed, needed, strict=True)))
        results = definition.differentiable(varied, plan.incoming)
        return tuple(results[name] for name in plan.incoming)

    results, pull = torch.func.vjp(outcome, *(slots[slot] for slot in plan.needed))  # type: ignore[misc]
    return pull(tuple(g.to(r.dtype) for g, r in zip(incoming, results, strict=True)))


def _with_tangents(primals: tuple[Tensor, ...], tangents: tuple) -> tuple[Tensor, ...]:
    """Dual tensors; one without a tangent as it is."""
    return tuple(
        primal if tangent is None else forward_ad.make_dual(forward_ad.unpack_dual(primal).primal, tangent)
        for primal, tangent in zip(primals, tangents, strict=True)
    )


def _first_order_only(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nobody will differentiate what is made of these in forward mode: no other transform, no graph."""
    if len(get_interpreter_stack() or ()) > 1:
        return False
    if not torch.is_grad_enabled():
        return True
    for tensor in tensors:
        while is_gradtrackingtensor(tensor):
            tensor = get_unwrapped(tensor)
        if tensor.requires_grad:
            return False
    return True


def _tangent(dual: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(dual)
    return torch.zeros_like(primal) if tangent is None else tangent


def _skeleton(form: Form, tensors: dict[str, Tensor] | None = None) -> Form:
    """The form without its tensors (log-priors keep their number), so that a context does not hold them twice."""
    return form.with_tensors(dict.fromkeys(form.tensors() if tensors is None else tensors))  # type: ignore[arg-type]


def _logical_batch(slots: tuple, dims: tuple, tensors: tuple) -> int:
    """B as one sample sees it."""
    i = slots.index("query")
    shape = list(tensors[i].shape)
    if dims[i] is not None:
        shape.pop(dims[i])
    return shape[0]


_CARRIED = ("query", "key", "value")  # never broadcast over the batch


def _fold(tensor: Tensor, dim: int | None, V: int, B: int, expand: bool) -> Tensor:
    """Fold vmap's dimension into the batch: [V, B, ...] -> [V * B, ...]; what samples share may stay broadcast."""
    if dim is None:
        if tensor.shape[0] == 1 and not expand:
            return tensor
        tensor = tensor.unsqueeze(0).expand(V, *tensor.shape)
    else:
        tensor = tensor.movedim(dim, 0)
    return tensor.expand(V, B, *tensor.shape[2:]).reshape(V * B, *tensor.shape[2:])


# --- compiled: an operator --------------------------------------------------------------------------------------------

_TYPES = {
    "Tensor | None": "Tensor? {0}",
    "list[Tensor]": "Tensor[] {0}",
    "Scalar": "float {0}, Tensor? {0}_tensor",
    "float": "float {0}",
    "float | None": "float? {0}",
    "int": "SymInt {0}",
    "int | None": "SymInt? {0}",
    "str": "str {0}",
    "bool": "bool {0}",
}
_FIELDS = tuple((f.name, str(f.type)) for f in dataclasses.fields(Form) if f.name != "declared")
_SCHEMA = ", ".join(_TYPES[kind].format(name) for name, kind in _FIELDS)


def _to_arguments(form: Form) -> list[Any]:
    arguments: list[Any] = []
    for name, kind in _FIELDS:
        value = getattr(form, name)
        if kind == "Scalar":
            arguments += [0.0, value] if isinstance(value, Tensor) else [value, None]
        else:
            arguments.append(value)
    return arguments


def _from_arguments(arguments: tuple) -> Form:
    values, rest = {}, iter(arguments)
    for name, kind in _FIELDS:
        value = next(rest)
        if kind == "Scalar":
            tensor = next(rest)
            value = value if tensor is None else tensor
        values[name] = list(value) if kind == "list[Tensor]" else value
    return Form(**values)


@torch.library.custom_op("regard::attend", mutates_args=(), schema=f"(str backend, str names, {_SCHEMA}) -> Tensor[]")
def attend_op(backend: str, names: str, *arguments: Any) -> list[Tensor]:
    wanted = tuple(names.split(","))
    results = BACKENDS[backend].forward(_from_arguments(arguments), wanted)
    return [results[name] for name in wanted]


@attend_op.register_fake
def _(backend: str, names: str, *arguments: Any) -> list[Tensor]:
    form = _from_arguments(arguments)
    assert form.query is not None
    shapes = output_shapes(form, tuple(names.split(",")))
    return [form.query.new_empty(shape, dtype=form.dtype) for shape in shapes.values()]


@torch.library.custom_op(
    "regard::attend_backward",
    mutates_args=(),
    schema="(str backend, str names, str incoming, str needed, Tensor[] outputs, Tensor[] grads, "
    f"{_SCHEMA}) -> Tensor[]",
)
def attend_backward_op(
    backend: str, names: str, incoming: str, needed: str, outputs: list[Tensor], grads: list[Tensor], *arguments: Any
) -> list[Tensor]:
    wanted = tuple(needed.split(","))
    by_name = dict(zip(names.split(","), outputs, strict=True))
    by_grad = dict(zip(incoming.split(","), grads, strict=True))
    with autograd_inside():
        found = BACKENDS[backend].backward(_from_arguments(arguments), wanted, by_name, by_grad)
    return [found[slot] for slot in wanted]


def autograd_inside() -> Any:
    """An operator's body runs below autograd; a backend may want autograd inside."""
    inside, outside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(inside, outside - _AUTOGRAD)


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutogradOther
)


@attend_backward_op.register_fake
def _(
    backend: str, names: str, incoming: str, needed: str, outputs: list[Tensor], grads: list[Tensor], *arguments: Any
) -> list[Tensor]:
    tensors = _from_arguments(arguments).tensors()
    return [torch.empty_like(tensors[slot], memory_format=torch.contiguous_format) for slot in needed.split(",")]


def batch_by_loop(operator: Any) -> None:
    """Let a compiled call's backward operator take batches of gradients (`is_grads_batched`)."""

    def batched(*arguments: Any) -> Any:
        flat, tree = tree_flatten(arguments)
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and is_legacy_batchedtensor(x)]

        def pull(*sample: Tensor) -> Any:
            chosen = dict(zip(places, sample, strict=True))
            return operator(*tree_unflatten([chosen.get(i, x) for i, x in enumerate(flat)], tree))

        return one_by_one(pull, tuple(flat[i] for i in places))

    _library.impl(operator._opname, batched, "Batched")


_library = torch.library.Library("regard", "FRAGMENT")
batch_by_loop(torch.ops.regard.attend_backward.default)


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.backend, ctx.names, *arguments = inputs
    form = _from_arguments(tuple(arguments))
    tensors = form.tensors()
    ctx.slots = tuple(tensors)
    ctx.needed = tuple(slot for slot, tensor in tensors.items() if tensor.requires_grad)
    ctx.form = _skeleton(form)
    ctx.save_for_backward(*tensors.values(), *output)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grads: list[Tensor | None]) -> tuple:
    n = len(ctx.slots)
    saved = ctx.saved_tensors
    form = ctx.form.with_tensors(dict(zip(ctx.slots, saved[:n], strict=True)))
    incoming = {
        name: g for name, g in zip(ctx.names.split(","), grads, strict=True) if g is not None and name in DIFFERENTIABLE
    }
    found = {}
    if incoming and ctx.needed:
        found = dict(
            zip(
                ctx.needed,
                torch.ops.regard.attend_backward(
                    ctx.backend,
                    ctx.names,
                    ",".join(incoming),
                    ",".join(ctx.needed),
                    list(saved[n:]),
                    list(incoming.values()),
                    *_to_arguments(form),
                ),
                strict=True,
            )
        )
    return (None, None, *by_argument(form, found))


def by_argument(form: Form, found: dict[str, Tensor]) -> list[Any]:
    """Gradients by slot, in the order of the schema."""
    ordered: list[Any] = []
    for name, kind in _FIELDS:
        if kind == "list[Tensor]":
            ordered.append([found.get(f"{name}.{i}") for i in range(len(getattr(form, name)))])
        else:
            ordered += [None, found.get(name)] if kind == "Scalar" else [found.get(name)]
    return ordered


attend_op.register_autograd(_gradient, setup_context=_setup)


def _run_compiled(backend: str, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
    computed = _with_saved(backend, form, names)
    outputs = torch.ops.regard.attend(backend, ",".join(computed), *_to_arguments(form))
    results = dict(zip(computed, outputs, strict=True))
    return {n: results[n] if n in DIFFERENTIABLE else results[n].detach() for n in names}
