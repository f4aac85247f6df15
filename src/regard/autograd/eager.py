"""The autograd Function of eager mode, which also serves torch.func.grad, jvp, vmap and double backward.

In forward mode the chosen backend computes the output, and the reference backend computes its tangent, block by block.
Nothing is kept for later, so memory is O(T).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._compat import (
    fast_apply,
    forward_mode,
    forward_mode_enabled,
    get_unwrapped,
    is_gradtrackingtensor,
    transform_depth,
    transforms_active,
    unwrap_dead_wrappers,
    unwrap_if_dead,
)
from ..backends import BACKENDS
from ..backends.derivatives import differentiable
from ..backends.derivatives import tangents as tangents_of
from ..form import UNBATCHED, Form
from ..statistics import DIFFERENTIABLE
from .batched import one_by_one, per_sample
from .library import with_saved


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
        """`grads` are those of the first outputs. The other outputs were saved for this pass only."""
        saved = ctx.saved_tensors  # read once: under checkpointing a second read fails
        needed = tuple(s for s, need in zip(ctx.slots, ctx.needs_input_grad[4:], strict=True) if need)
        incoming = {
            name: g for name, g in zip(ctx.names, grads, strict=False) if g is not None and name in DIFFERENTIABLE
        }
        if not incoming or not needed:
            return (None,) * (4 + len(ctx.slots))
        plan = _Pullback(ctx.form, ctx.slots, ctx.names, tuple(incoming), needed, ctx.backend)
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
            with forward_mode_enabled():
                duals = _with_tangents(saved, tuple(map(by_slot.get, ctx.slots)))
                form = ctx.form.with_tensors(dict(zip(ctx.slots, duals, strict=True)))
                if _first_order_only((*saved, *given)):
                    found = tangents_of(form, names)
                else:
                    found = {name: _tangent(result) for name, result in differentiable(form, names).items()}
            return tuple(found[name] for name in names)

        found = dict(zip(names, one_by_one(push, tuple(moved.values())), strict=True))
        return tuple(found[n].to(d) if n in found else None for n, d in zip(ctx.names, ctx.dtypes, strict=True))

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple, form: Form, slots: tuple, names: tuple, backend: str, *tensors: Tensor
    ) -> tuple:
        V = info.batch_size
        if form.function is not None:  # its batch index must stay that of one sample
            bare = form.without_tensors()
            return _stacked(lambda *own: Attend.apply(bare, slots, names, backend, *own), V, in_dims[4:], tensors)
        B = _logical_batch(slots, in_dims[4:], tensors)
        folded = [_fold(s, t, d, V, B, s in _PER_SAMPLE) for s, t, d in zip(slots, tensors, in_dims[4:], strict=True)]
        outputs = Attend.apply(form.without_tensors(), slots, names, backend, *folded)
        return tuple(o.unflatten(0, (V, B)) for o in outputs), (0,) * len(outputs)


class AttendPlainly(torch.autograd.Function):
    """`Attend` where no transform is active, in fewer steps: backward's tensors are saved and are no outputs.

    apply(form without tensors, slots, names, backend, *tensors) -> one output per name.
    """

    @staticmethod
    def forward(ctx: Any, form: Form, slots: tuple, names: tuple, backend: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        whole = form.with_tensors(dict(zip(slots, tensors, strict=True)))
        computed = with_saved(backend, whole, names)
        results = BACKENDS[backend].forward(whole, computed)
        ctx.form, ctx.slots, ctx.names, ctx.backend = form, slots, computed, backend
        ctx.save_for_backward(*tensors, *(results[name] for name in computed))
        if len(names) > 1:
            ctx.mark_non_differentiable(*(results[name] for name in names if name not in DIFFERENTIABLE))
        ctx.set_materialize_grads(False)
        return tuple(results[name] for name in names)

    backward = Attend.backward


_apply_plainly = fast_apply(AttendPlainly)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pullback:
    """What a backward pass needs besides tensors."""

    form: Form
    slots: tuple[str, ...]  # of the tensors
    names: tuple[str, ...]  # of the outputs
    incoming: tuple[str, ...]  # of the incoming gradients
    needed: tuple[str, ...]  # slots whose gradient is needed
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
        if torch.is_grad_enabled() or transforms_active() or forward_mode():
            return AttendBackward.apply(self, *saved, *grads)  # type: ignore[return-value]
        # The gradient will not be differentiated. (A vjp called after its transform has ended leaves wrappers.)
        return AttendBackward.forward(self, *unwrap_dead_wrappers((*saved, *grads)))


class AttendBackward(torch.autograd.Function):
    """apply(plan, *slots, *outputs, *gradients) -> gradients of the needed slots; differentiable again."""

    @staticmethod
    def forward(plan: _Pullback, *tensors: Tensor) -> tuple[Tensor, ...]:
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
        """The second derivative, through the definition. It stores the whole plan: memory is linear in the first order
        only."""
        plan: _Pullback = ctx.plan
        slots, outputs, incoming = plan.split(ctx.saved_tensors)

        # All slots, not only those whose gradient was taken: each gradient depends on all slots.
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
        """The tangents of the gradients, through the definition. (Tangents of saved outputs follow from those of
        slots.)"""
        plan: _Pullback = ctx.plan
        with forward_mode_enabled():
            duals = _with_tangents(ctx.saved_tensors, tangents[1:])
            slots, _, incoming = plan.split(duals)
            return tuple(map(_tangent, _first_order(plan, slots, tuple(incoming.values()))))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, plan: _Pullback, *tensors: Tensor) -> tuple:  # type: ignore[override]
        V = info.batch_size
        if plan.form.function is not None:
            return _stacked(lambda *own: AttendBackward.apply(plan, *own), V, in_dims[1:], tensors)
        dims, n = in_dims[1:], len(plan.slots)
        B = _logical_batch(plan.slots, dims[:n], tensors[:n])
        # A needed slot gets a gradient per sample, even where the samples share its value.
        folded = [
            _fold(plan.slots[i] if i < n else "", t, d, V, B, i >= n or plan.slots[i] in (*_PER_SAMPLE, *plan.needed))
            for i, (t, d) in enumerate(zip(tensors, dims, strict=True))
        ]
        found = AttendBackward.apply(dataclasses.replace(plan, form=plan.form.without_tensors()), *folded)
        unfolded = []
        for slot, grad in zip(plan.needed, found, strict=True):
            i = plan.slots.index(slot)
            own = tensors[i].shape[0] if dims[i] is None else tensors[i].movedim(dims[i], 0).shape[1]
            grad = grad.unflatten(0, (V, B))
            unfolded.append(grad.sum(1, keepdim=True) if own == 1 and B > 1 else grad)
        return tuple(unfolded), (0,) * len(unfolded)


def _first_order(plan: _Pullback, slots: dict[str, Tensor], incoming: tuple) -> tuple[Tensor, ...]:
    """What AttendBackward computes, as plain operations."""
    form = plan.form.with_tensors(slots)

    def outcome(*needed: Tensor) -> tuple[Tensor, ...]:
        varied = form.with_tensors(dict(zip(plan.needed, needed, strict=True)))
        results = differentiable(varied, plan.incoming)
        return tuple(results[name] for name in plan.incoming)

    results, pull = torch.func.vjp(outcome, *(slots[slot] for slot in plan.needed))  # type: ignore[misc]
    return pull(tuple(g.to(r.dtype) for g, r in zip(incoming, results, strict=True)))


def _with_tangents(primals: tuple[Tensor, ...], tangents: tuple) -> tuple[Tensor, ...]:
    """Dual tensors. A tensor without a tangent is returned unchanged."""
    return tuple(
        primal if tangent is None else forward_ad.make_dual(forward_ad.unpack_dual(primal).primal, tangent)
        for primal, tangent in zip(primals, tangents, strict=True)
    )


def _first_order_only(tensors: tuple[Tensor, ...]) -> bool:
    """Whether the tangents made from these tensors will not be differentiated again: no other transform, no graph."""
    if transform_depth() > 1:
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


def _stacked(function: Callable[..., Any], samples: int, dims: tuple, tensors: tuple[Tensor, ...]) -> tuple:
    """The results of `function` for each sample, stacked, and their dimensions."""
    found = [
        function(*(t if dim is None else t.select(dim, n) for t, dim in zip(tensors, dims, strict=True)))
        for n in range(samples)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*found, strict=True))
    return outputs, (0,) * len(outputs)


def _logical_batch(slots: tuple, dims: tuple, tensors: tuple) -> int:
    """The batch size B of one sample."""
    i = slots.index("query")
    shape = list(tensors[i].shape)
    if dims[i] is not None:
        shape.pop(dims[i])
    return shape[0]


_PER_SAMPLE = ("query", "key", "value")  # never broadcast over the batch


def _fold(slot: str, tensor: Tensor, dim: int | None, V: int, B: int, expand: bool) -> Tensor:
    """Fold vmap's dimension into the batch: [V, B, ...] -> [V * B, ...]. A tensor that the samples share may stay
    broadcast. A slot without a batch dimension is shared by all (its values are never batched: form.py)."""
    if slot in UNBATCHED:
        return tensor
    if dim is None:
        if tensor.shape[0] == 1 and not expand:
            return tensor
        tensor = tensor.unsqueeze(0).expand(V, *tensor.shape)
    else:
        tensor = tensor.movedim(dim, 0)
    return tensor.expand(V, B, *tensor.shape[2:]).reshape(V * B, *tensor.shape[2:])


def apply(backend: str, form: Form, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The outputs of the Function. Any outputs after those in `names` are saved for backward."""
    tensors = form.tensors()
    if transforms_active() or forward_mode():
        return Attend.apply(form, tuple(tensors), with_saved(backend, form, names), backend, *tensors.values())  # type: ignore[return-value]
    alive = map(unwrap_if_dead, tensors.values())  # tensors may keep the wrapper of a transform that has ended
    bare = form.with_tensors(dict.fromkeys(tensors))  # type: ignore[arg-type]
    return _apply_plainly(bare, tuple(tensors), names, backend, *alive)
