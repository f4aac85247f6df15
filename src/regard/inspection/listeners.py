"""What listens to a model in the sampled steps of a training run.

Two kinds of model. For a transformers model, `TransformersListener` computes the attention, as `watch` does. For a
model whose modules call `regard.attention` or PyTorch's `scaled_dot_product_attention`, `ModuleListener` lets them
compute: each call is reported, hooks tell which module makes it, and the statistics come from a second pass over the
same problem. Outside `listening()` there is no hook, no observer and no replaced function: the model is the stock
model.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import dispatch, hf
from .._compat import in_backward, transforms_active
from ..features import Features
from ..form import Form
from ..lowering import lower
from ..operator import attention
from ..statistics import ROW_STATISTICS, undefined
from . import provenance
from .layers import DERIVED, Layer, derived_channels, nth_call
from .patterns import count_admissible, sees_first_key
from .recorder import Recorder, defined_statistics

Real = Callable[[dict[str, Any]], Tensor | None]


def listener(
    model: nn.Module, statistics: Iterable[str] | None, evaluation: bool, real: Real | None
) -> TrainingListener:
    """The listener for this kind of model."""
    # A model of transformers can only exist if transformers is loaded; otherwise it is not loaded for this question.
    if "transformers" in sys.modules and hf.attentions(model):
        if real is not None:
            raise ValueError(
                "real: expected None for a transformers model, whose attention_mask is used, got a function"
            )
        return TransformersListener(model, statistics, evaluation)
    return ModuleListener(model, statistics, evaluation, real)


def _names(wanted: Iterable[str] | None) -> tuple[str, ...]:
    """Statistics in their order. Entropy and the largest score, which the event rules need, are always included."""
    wanted = [*("max_weight", "score_variance", "first_key_mass")] if wanted is None else wanted
    wanted = {wanted} if isinstance(wanted, str) else set(wanted)
    possible = tuple(name for name in ROW_STATISTICS if name != "key_mass")
    for name in wanted:
        if name not in possible:
            raise ValueError(f"statistics: expected names among {', '.join(possible)}, got {name!r}")
    return tuple(name for name in possible if name in wanted | {"entropy", "max_scores"})


class _Passes:
    """Which forward passes of a model count.

    Passes that checkpointing repeats in backward do not. Passes without gradients (evaluation, generation) count only
    with `evaluation`. Whether gradients are enabled is read where the model is called: reentrant checkpointing disables
    them further inside.
    """

    def __init__(self, evaluation: bool) -> None:
        self.evaluation = evaluation
        self.current: bool | None = None  # whether the call of the model under way counts; None: none is under way

    def begin(self) -> None:
        self.current = self.evaluation or torch.is_grad_enabled()

    def end(self) -> None:
        self.current = None

    def count(self) -> bool:
        if in_backward():
            return False
        return self.current if self.current is not None else self.evaluation or torch.is_grad_enabled()


class TransformersListener(Recorder):
    """Listens to a transformers model in training."""

    def __init__(self, model: nn.Module, statistics: Iterable[str] | None, evaluation: bool) -> None:
        self.passes = _Passes(evaluation)
        super().__init__(model, statistics, patterns=False)

    def choose_statistics(self, wanted: Iterable[str] | None) -> tuple[str, ...]:
        names = _names(wanted)
        problems = list(self.interception.problems.values())
        for problem in problems:
            if isinstance(problem, Features):
                raise ValueError(f"model: expected attention whose plan has an entropy, got features ({problem!r})")
        if wanted is None:  # of the default ones, only those that every problem of the model defines
            requests = [defined_statistics(problem) for problem in problems if not isinstance(problem, Features)]
            names = tuple(name for name in names if all(getattr(request, name) for request in requests))
        return names

    def problems_as_json(self) -> dict[str, str | None]:
        """The problems of the model as JSON, by the names of their attention implementations."""
        return self.inspection.about["declared"]

    def model_called(self) -> None:
        self.passes.begin()

    def model_returned(self) -> None:
        self.passes.end()

    def counts(self) -> bool:
        return self.passes.count()


class ModuleListener:
    """Listens to modules that call `regard.attention` or PyTorch's own, as `nn.MultiheadAttention` does. Each such
    module is a layer, or several if the model calls it again in the same pass. Layers are numbered in the order of the
    first calls."""

    def __init__(self, model: nn.Module, statistics: Iterable[str] | None, evaluation: bool, real: Real | None) -> None:
        self.model, self.real = model, _attention_mask if real is None else real
        self.names: dict[int, str] = {}  # of the modules, by id
        self.statistics = _names(statistics)
        self.strict = () if statistics is None else self.statistics  # asked for by name: raise where undefined
        self.passes = _Passes(evaluation)
        self.parameters = inspect.signature(model.forward).parameters
        self.order: dict[tuple[str, int], int] = {}  # (module's name, heads) -> number of the layer
        self.found: dict[tuple[str, int], Layer] = {}
        self.stack: list[nn.Module] = []  # modules whose forward is under way
        self.entered: Counter[int] = Counter()  # how often the pass under way has called each module, by its id
        self.rows: Tensor | None = None  # [B, T]: tokens that are not padding
        # Not traced by torch.compile, and the same objects each time, so that a model is not compiled again.
        hidden: Any = torch.compiler.disable
        self.before_model, self.after_model = hidden(self._before_model), hidden(self._after_model)
        self.before, self.after, self.seen = hidden(self._before), hidden(self._after), hidden(self._seen)

    def problems_as_json(self) -> dict[str, str | None]:
        """The problems of the modules of `regard.nn` as JSON, by the names of the modules."""
        return provenance.declared_in(self.model)

    @property
    def layers(self) -> list[Layer]:
        return sorted(self.found.values(), key=lambda layer: layer.index)

    def clear(self) -> None:
        self.found.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the block runs every call of attention is recorded, with its module. Then all hooks are removed."""
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
        _stock.add(self)
        try:
            yield
        finally:
            _stock.remove(self)
            dispatch.observers.remove(self.seen)
            for hook in hooks:
                hook.remove()
            self.stack.clear()
            self.rows = None
            self.passes.end()

    def _before_model(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.passes.begin()
        self.entered.clear()
        self.rows = self.real(dict(zip(self.parameters, args, strict=False)) | kwargs)

    def _after_model(self, *_: Any) -> None:
        self.passes.end()
        self.rows = None

    def _before(self, module: nn.Module, _: Any) -> None:
        self.stack.append(module)
        self.entered[id(module)] += 1

    def _after(self, module: nn.Module, *_: Any) -> None:
        while self.stack and self.stack.pop() is not module:
            pass  # modules whose forward an exception ended

    def counts(self) -> bool:
        """Whether a call that is made now is recorded."""
        return bool(self.stack) and self.passes.count()

    def stock_called(self, form: Form, out: Tensor) -> None:
        """A call of F.scaled_dot_product_attention."""
        self._seen(form, lambda names: dispatch.compute(form, names), out.reshape(*form.shape[:3], -1))

    @torch.no_grad()
    def _seen(self, form: Form, compute: Callable[[tuple[str, ...]], dict[str, Tensor]], out: Tensor) -> None:
        """A call of attention: add its statistics, row by row, to the layer of the module that made it."""
        if not self.counts() or transforms_active():
            return
        B, H, Tq, Tk = form.shape
        if 0 in (B, H, Tq, Tk):
            return
        full_support = form.family == "kl" and not form.hard  # then the support contains every admissible key
        missing = {name for name in self.statistics if name not in self.strict and undefined(name, form) is not None}
        wanted = {*self.statistics, *(("support",) if full_support else ())} - missing
        results = compute(tuple(name for name in ROW_STATISTICS if name in wanted))
        none = torch.full_like(results["entropy"], torch.nan)
        values = {name: none if name in missing else results[name] for name in self.statistics}
        keys = results["support"] if full_support else count_admissible(form, None)[0]
        log_keys = (keys + (form.marginal == "sink")).clamp(min=1).log().expand(B, H, Tq)
        values |= derived_channels(out, results["entropy"], log_keys)
        if "first_key_mass" in values:
            values["first_key_mass"] = torch.where(sees_first_key(form), values["first_key_mass"], torch.nan)
        valid = results["max_scores"] != -torch.inf
        if self.rows is not None and self.rows.shape == (B, Tq):
            valid = valid & self.rows.to(valid.device, torch.bool)[:, None]
        self._layer(H).add(values, valid, torch.zeros(1, Tq, dtype=torch.long))

    def _layer(self, heads: int) -> Layer:
        module = self.stack[-1]
        name = nth_call(self.names[id(module)], self.entered[id(module)])
        key = (name, heads)
        index = self.order.setdefault(key, len(self.order))
        if key not in self.found:
            several = any(other == name and h != heads for other, h in self.order)  # other calls have other heads
            label = f"{name} ({heads})" if several else name
            self.found[key] = Layer.empty(label, index, heads, self.statistics + DERIVED)
        return self.found[key]


class _StockAttention:
    """Stands in for F.scaled_dot_product_attention while modules are listened to, and tells the listeners of each call.

    Listeners may come and go in any order: the function is replaced for the first and restored after the last."""

    def __init__(self) -> None:
        self.listeners: list[ModuleListener] = []
        self.replacement: Any = torch.compiler.disable(self._call)
        self.function: Any = None
        self.kernels = True

    def add(self, listener: ModuleListener) -> None:
        if not self.listeners:
            self.function, F.scaled_dot_product_attention = F.scaled_dot_product_attention, self.replacement
            self.kernels = torch.backends.mha.get_fastpath_enabled()
        self.listeners.append(listener)
        self._set_kernels()

    def remove(self, listener: ModuleListener) -> None:
        self.listeners.remove(listener)
        self._set_kernels()
        if not self.listeners:
            F.scaled_dot_product_attention, self.function = self.function, None

    def _set_kernels(self) -> None:
        """In evaluation the modules of PyTorch have kernels of their own, whose attention cannot be seen."""
        counted = any(listener.passes.evaluation for listener in self.listeners)
        torch.backends.mha.set_fastpath_enabled(self.kernels and not counted)

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes what the function computes without listeners."""
        out = self.function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        reports_itself = self.function is attention
        listeners = [] if reports_itself or transforms_active() else [one for one in self.listeners if one.counts()]
        if listeners:
            try:
                with torch.no_grad():
                    form = lower(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
            except (TypeError, ValueError):  # nested tensors, for example: not seen, and the training goes on
                return out
            for listener in listeners:
                listener.stock_called(form, out)
        return out


_stock = _StockAttention()


def _attention_mask(given: dict[str, Any]) -> Tensor | None:
    """Which tokens are real, if the model is called with a 2-D `attention_mask`, or with the `src_key_padding_mask` of
    nn.TransformerEncoder."""
    mask, padding = given.get("attention_mask"), given.get("src_key_padding_mask")
    if isinstance(padding, Tensor) and padding.dtype == torch.bool and padding.dim() == 2:
        return ~padding
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


TrainingListener = TransformersListener | ModuleListener
