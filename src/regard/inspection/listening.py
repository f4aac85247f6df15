"""Listening to a model in training: who calls attention in a sampled step, and what its heads do there.

Two kinds of model. The attention of a transformers model is computed by us while we listen, as `watch` does it. Modules
that call `regard.attention` compute theirs as ever: the operator tells us of each call, hooks tell which module makes
it, and the statistics come from a second pass over the same problem. Outside `listening()` there is no hook, no
observer and no other implementation: the model is the stock model.
"""

from __future__ import annotations

import contextlib
import inspect as signatures
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import dispatch
from ..features import Features
from ..form import Form
from ..statistics import ROW_STATISTICS, AuxRequest, undefined
from .recorder import Recorder, admissible, sees_first
from .result import DERIVED, Layer

Real = Callable[[dict[str, Any]], Tensor | None]


def listener(model: nn.Module, statistics: Iterable[str] | None, evaluation: bool, real: Real | None) -> Listener:
    """What listens to this model."""
    if "transformers" in sys.modules:
        from .. import hf

        if hf.attentions(model):
            if real is not None:
                raise ValueError("real: expected None for a transformers model, whose attention_mask says it")
            return OfTransformers(model, statistics, evaluation)
    return OfModules(model, statistics, evaluation, real)


def _names(wanted: Iterable[str] | None) -> tuple[str, ...]:
    """Statistics in their order; entropy and the largest score, which events are about, are always among them."""
    wanted = [*("max_weight", "score_variance", "first_key_mass")] if wanted is None else wanted
    wanted = {wanted} if isinstance(wanted, str) else set(wanted)
    possible = tuple(name for name in ROW_STATISTICS if name != "key_mass")
    for name in wanted:
        if name not in possible:
            raise ValueError(f"statistics: expected names among {', '.join(possible)}, got {name!r}")
    return tuple(name for name in possible if name in wanted | {"entropy", "max_scores"})


class _Passes:
    """Which of a model's passes count: not those that checkpointing repeats in backward, nor, unless asked for, those
    without gradients (evaluation, generation). That is read where the model is called: reentrant checkpointing
    switches gradients off further inside."""

    def __init__(self, evaluation: bool) -> None:
        self.evaluation = evaluation
        self.called: bool | None = None  # whether the call of the model under way counts; None: it is not under way

    def begin(self) -> None:
        self.called = self.evaluation or torch.is_grad_enabled()

    def end(self) -> None:
        self.called = None

    def count(self) -> bool:
        if torch._C._current_graph_task_id() != -1:
            return False
        return self.called if self.called is not None else self.evaluation or torch.is_grad_enabled()


class OfTransformers(Recorder):
    """A transformers model in training."""

    def __init__(self, model: nn.Module, statistics: Iterable[str] | None, evaluation: bool) -> None:
        self.passes = _Passes(evaluation)
        self.chosen = statistics is not None
        super().__init__(model, statistics, patterns=False)

    def _statistics(self, wanted: Iterable[str] | None) -> tuple[str, ...]:
        names = _names(wanted)
        for problem in self.problems.values():
            if isinstance(problem, Features):
                raise ValueError(f"model: expected attention whose plan has an entropy, got features ({problem!r})")
        if not self.chosen:  # what the model's problems do not define is left out of our own choice
            requests = [AuxRequest.all(problem) for problem in self.problems.values()]
            names = tuple(name for name in names if all(getattr(request, name) for request in requests))
        return names

    @property
    def layers(self) -> list[Layer]:
        return self.inspection.layers

    def clear(self) -> None:
        self.inspection.layers.clear()
        self.found.clear()

    def _before_part(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self.frames:
            self.passes.begin()
        super()._before_part(module, args, kwargs)

    def _after_part(self, module: nn.Module, *_: Any) -> None:
        super()._after_part(module)
        if not self.frames:
            self.passes.end()

    def _counts(self) -> bool:
        return self.passes.count()


class OfModules:
    """Modules that call `regard.attention`: each that does is a layer, numbered in the order of the first calls."""

    def __init__(self, model: nn.Module, statistics: Iterable[str] | None, evaluation: bool, real: Real | None) -> None:
        self.model, self.real = model, _attention_mask if real is None else real
        self.names: dict[int, str] = {}  # of the modules
        self.statistics = _names(statistics)
        self.strict = () if statistics is None else self.statistics  # asked for: undefined ones raise
        self.passes = _Passes(evaluation)
        self.parameters = signatures.signature(model.forward).parameters
        self.order: dict[tuple[str, int], int] = {}  # (module's name, heads): the layer's number
        self.found: dict[tuple[str, int], Layer] = {}
        self.stack: list[nn.Module] = []  # modules whose forward is under way
        self.rows: Tensor | None = None  # [B, T]: tokens that are not padding
        # Out of a compiled model's sight, and the same objects each time, so that it knows them again.
        hidden: Any = torch.compiler.disable
        self.before_model, self.after_model = hidden(self._before_model), hidden(self._after_model)
        self.before, self.after, self.seen = hidden(self._before), hidden(self._after), hidden(self._seen)

    @property
    def layers(self) -> list[Layer]:
        return sorted(self.found.values(), key=lambda layer: layer.index)

    def clear(self) -> None:
        self.found.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the block runs we are told of every call of attention, and by whom; then everything is as before."""
        self.names = {id(module): name or type(module).__name__ for name, module in self.model.named_modules()}
        hooks = [
            self.model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            self.model.register_forward_hook(self.after_model, always_call=True),
        ]
        for module in self.model.modules():
            hooks += [
                module.register_forward_pre_hook(self.before),
                module.register_forward_hook(self.after, always_call=True),
            ]
        dispatch.observers.append(self.seen)
        try:
            yield
        finally:
            dispatch.observers.remove(self.seen)
            for hook in hooks:
                hook.remove()
            self.stack.clear()
            self.rows = None
            self.passes.end()

    def _before_model(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.passes.begin()
        self.rows = self.real(dict(zip(self.parameters, args, strict=False)) | kwargs)

    def _after_model(self, *_: Any) -> None:
        self.passes.end()
        self.rows = None

    def _before(self, module: nn.Module, _: Any) -> None:
        self.stack.append(module)

    def _after(self, module: nn.Module, *_: Any) -> None:
        while self.stack and self.stack.pop() is not module:
            pass  # one that ended without a word: an exception came

    @torch.no_grad()
    def _seen(self, form: Form, compute: Callable[[tuple[str, ...]], dict[str, Tensor]], out: Tensor) -> None:
        """A call: its statistics, row by row, added to the layer of the module that made it."""
        if not self.stack or not self.passes.count() or torch._C._are_functorch_transforms_active():
            return
        B, H, Tq, Tk = form.shape
        if 0 in (B, H, Tq, Tk):
            return
        plain = form.family == "kl" and not form.hard  # then the support is all that is admissible
        missing = {name for name in self.statistics if name not in self.strict and undefined(name, form) is not None}
        wanted = {*self.statistics, *(("support",) if plain else ())} - missing
        results = compute(tuple(name for name in ROW_STATISTICS if name in wanted))
        none = torch.full_like(results["entropy"], torch.nan)
        values = {name: none if name in missing else results[name] for name in self.statistics}
        keys = results["support"] if plain else admissible(form, None)[0]
        log_keys = (keys + (form.marginal == "sink")).clamp(min=1).log().expand(B, H, Tq)
        values |= {
            "output_norm": out.float().norm(dim=-1),
            "log_keys": log_keys,
            "normalized_entropy": torch.where(log_keys > 0, results["entropy"] / log_keys, torch.nan),
        }
        if "first_key_mass" in values:
            values["first_key_mass"] = torch.where(sees_first(form), values["first_key_mass"], torch.nan)
        valid = results["max_scores"] > -torch.inf
        if self.rows is not None and self.rows.shape == (B, Tq):
            valid = valid & self.rows.to(valid.device, torch.bool)[:, None]
        self._layer(H).add(values, valid, torch.zeros(1, Tq, dtype=torch.long))

    def _layer(self, heads: int) -> Layer:
        name = self.names[id(self.stack[-1])]
        key = (name, heads)
        index = self.order.setdefault(key, len(self.order))
        if key not in self.found:
            several = any(other == name and h != heads for other, h in self.order)  # calls with other numbers of heads
            self.found[key] = Layer.empty(f"{name} ({heads})" if several else name, index, heads, self.channels)
        return self.found[key]

    @property
    def channels(self) -> tuple[str, ...]:
        return self.statistics + DERIVED


def _attention_mask(given: dict[str, Any]) -> Tensor | None:
    """Which tokens are real, where the model is called with a 2-D `attention_mask`."""
    mask = given.get("attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


Listener = OfTransformers | OfModules
