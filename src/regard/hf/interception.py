"""`Interception`: while a block runs, every attention call of a transformers model goes to a listener.

The listener computes the attention and may record what it needs. `entropies` and `retrofit` (in this package) and the
recorder of `regard.inspection` are listeners. Several interceptions may be attached to one model, and may be detached
in any order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..features import Features
from ..problem import Transport
from .biases import use_tables
from .calls import as_call, attention_function
from .checkpoints import check_implementation
from .factories import Factory
from .models import check, configurations_of, layer_numbers
from .positions import CallStack, Place, named_arguments, parts_of
from .registry import TEMPORARY, install, is_installed, original_name, problem_of, registered_problem, remove

Problem = Transport | Features | Factory | None

_numbers = itertools.count()
_attached: dict[str, Interception] = {}  # by the name under which a model finds its attention function


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call of a model."""

    module: nn.Module
    name: str  # of the module in the model
    depth: int  # how often the model called this module before in the same pass: layers may share their weights
    layer: int  # number of the module among the model's attentions, or its own `layer_idx`
    problem: Transport | Features | None  # as registered, or as a factory built it (with the mask); None: softmax
    arguments: dict[str, Any]  # of `regard.attention`
    place: Place


class Listener(Protocol):
    """What an `Interception` calls."""

    def model_called(self) -> None:
        """The model, or a part of it called on its own, begins."""

    def model_returned(self) -> None:
        """The call that `model_called` announced has ended, by a result or an exception."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the attention of this call: [B, H, Tq, Dv]."""
        ...


class Interception:
    """Replaces a model's attention functions by ones that call `listener.attend`, while `attached()` is entered."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        self.model, self.listener = model, listener
        modules = list(check(model).values())
        use_tables(modules, is_installed)
        for config in configurations_of(model):
            check_implementation(config, original_name, registered_problem)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.layers = layer_numbers(modules)
        self.modules, self.parts, self.calls = modules, parts_of(model, modules), CallStack()
        self.replacements: dict[str | None, str] = {}  # the model's implementation name -> our temporary name
        self._stacks: dict[str, list[Interception]] = {}  # our name -> the interceptions that receive its calls
        self.refresh()

    def refresh(self) -> None:
        """Read which implementations the model names now, and their problems.

        The same implementation keeps the same temporary name, so that a compiled model is not compiled again.
        """
        self.configurations = configurations_of(self.model)
        names = {config._attn_implementation_internal for config in self.configurations}
        # If another interception is already attached, this one goes on top: the other still receives every call.
        self.beneath = {name: _attached[name] for name in names if name in _attached}
        self.problems: dict[str | None, Problem] = {
            name: self.beneath[name]._problem_under(name) if name in self.beneath else problem_of(name)
            for name in names
        }
        for name in names - self.replacements.keys():
            self.replacements[name] = f"{TEMPORARY}{next(_numbers)}"

    def _problem_under(self, ours: str) -> Problem:
        """The problem that the model solves under one of our temporary names."""
        return next(problem for name, problem in self.problems.items() if self.replacements[name] == ours)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """While the block runs the listener computes the model's attention. Afterwards the model is as it was."""
        self.refresh()
        self.originals = [(config, config._attn_implementation_internal) for config in self.configurations]
        installed: list[str] = []
        hooks: list[Any] = []
        try:
            for name, problem in self.problems.items():
                ours = self.replacements[name]
                other = None if name is None else self.beneath.get(name)
                below = [] if other is None or name is None else other._stacks[name]
                self._stacks[ours] = [self, *(one for one in below if one is not self)]
                install(ours, self._function(problem, self._stacks[ours]), name)
                installed.append(ours)
                _attached[ours] = self
            for config, name in self.originals:
                config._attn_implementation_internal = self.replacements[name]
            for module in self.parts:
                hooks.append(module.register_forward_pre_hook(self._before_part, with_kwargs=True))
                hooks.append(module.register_forward_hook(self._after_part, always_call=True))
            hooks += [
                module.register_forward_pre_hook(self._before_attention, with_kwargs=True) for module in self.modules
            ]
            yield
        finally:
            self._restore()
            for name in installed:
                remove(name)
                _attached.pop(name, None)
                self._stacks.pop(name, None)
            for name in self.beneath:  # the temporary name of another interception: it may mean another problem later
                del self.replacements[name]
            for hook in hooks:
                hook.remove()
            self.calls.clear()

    def _restore(self) -> None:
        """Put the implementation names of the configurations back."""
        for config, name in self.originals:
            ours = self.replacements[name]
            if config._attn_implementation_internal == ours:
                config._attn_implementation_internal = name
                continue
            # An interception that was attached later is still attached. It must restore the name that we found.
            for other in set(_attached.values()) - {self}:
                other.originals = [
                    (c, name if c is config and given == ours else given) for c, given in other.originals
                ]
                if ours in other.replacements:
                    other.replacements[name] = other.replacements[ours]

    # --- one call -----------------------------------------------------------------------------------------------------

    def _before_part(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self.calls.frames:
            self.listener.model_called()
        self.calls.push(module, args, kwargs)

    def _after_part(self, module: nn.Module, *_: Any) -> None:
        self.calls.pop(module)
        if not self.calls.frames:
            self.listener.model_returned()

    def _before_attention(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.calls.enter_attention(module, named_arguments(module, args, kwargs))

    def _function(self, problem: Problem, stack: list[Interception]) -> Callable[..., tuple[Tensor, None]]:
        """The attention function that is installed under one of our names."""

        @torch.compiler.disable
        def function(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            receivers = [one for one in stack if id(module) in one.layers and one in _attached.values()]
            if not receivers:  # a module of another model that shares the configuration
                return attention_function(problem, module, query, key, value, attention_mask, **kwargs)
            transport = None if isinstance(problem, Features) else problem
            call = as_call(transport, module, query, key, value, attention_mask, **kwargs)
            position_ids = kwargs.get("position_ids")
            out = receivers[0]._handle(problem, module, dict(call), position_ids)
            for other in receivers[1:]:  # each computes for itself; the dropout is that of the output, drawn once
                other._handle(problem, module, {**call, "dropout_p": 0.0}, position_ids)
            return out.transpose(1, 2).contiguous(), None

        return function  # type: ignore[return-value]

    def _handle(self, problem: Problem, module: nn.Module, call: dict[str, Any], position_ids: object) -> Tensor:
        (B, _, Tq, _), Tk = call["query"].shape, call["key"].shape[2]
        place, depth = self.calls.place(module, B, Tq, Tk, position_ids), self.calls.depth(module)
        name, layer = self.names[id(module)], self.layers[id(module)]
        solved = call["problem"] if isinstance(problem, Factory) else problem
        return self.listener.attend(AttentionCall(module, name, depth, layer, solved, call, place))
