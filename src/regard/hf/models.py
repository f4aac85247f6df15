"""Which modules of a model use transformers' attention interface, and errors for models that do not use it."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .biases import use_tables


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The model's attention modules that use transformers' attention interface, by name."""
    return {name: module for name, module in model.named_modules() if _uses_interface(type(module))}


def layer_numbers(modules: Iterable[nn.Module]) -> dict[int, int]:
    """The number of each attention in its model, by its id: its own `layer_idx` (hybrid models keep their numbers),
    or its place among the attentions if these are not all different."""
    modules = list(modules)
    own = [n for module in modules if isinstance(n := getattr(module, "layer_idx", None), int)]
    numbers = own if len(set(own)) == len(modules) else range(len(modules))
    return {id(module): number for module, number in zip(modules, numbers, strict=True)}


def configurations(*roots: Any) -> list[Any]:
    """These configurations and those of their parts that name an attention implementation, each once."""
    found: dict[int, Any] = {}
    queue = list(roots)
    while queue:
        config = queue.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            queue += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(found.values())


def configurations_of(model: nn.Module) -> list[Any]:
    """The configurations of a model and of its parts."""
    return configurations(*(module.config for module in model.modules() if hasattr(module, "config")))


def check(model: nn.Module) -> dict[str, nn.Module]:
    """`attentions(model)`. Raises if there are none; warns about modules that compute attention in another way."""
    found = attentions(model)
    if not found:
        raise ValueError(f"model: {_no_attention_in(model)}")
    if bypassing := _bypassing_classes(model):
        warnings.warn(
            f"{type(model).__name__}: {', '.join(bypassing)} do not go through transformers' AttentionInterface: "
            f"regard neither computes nor records them",
            stacklevel=2,
        )
    return found


def _bypassing_classes(model: nn.Module) -> list[str]:
    """The classes of modules that compute attention without the interface, judged by their names."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        if "Attention" in type(module).__name__ and not any(_uses_interface(type(m)) for m in module.modules())
    }
    return sorted(kinds)


def _no_attention_in(model: nn.Module) -> str:
    """The text of the error for a model in which no module uses the interface."""
    bypassing = _bypassing_classes(model)
    if bypassing:
        why = f"which bypasses it ({', '.join(bypassing)} compute attention on their own)"
    else:
        why = "which has no attention, or one that bypasses it in another way: regard would change nothing"
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        why += "; regard.Monitor records the modules of PyTorch"
    kind = type(model).__name__
    return f"expected a model whose attention goes through transformers' AttentionInterface, got {kind}, {why}"


@functools.cache
def _uses_interface(kind: type) -> bool:
    """Whether a method of the class looks the attention function up in transformers' registry."""
    for base in kind.__mro__:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and {"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= set(code.co_names):
                return True
    return False


# --- errors for models that would ignore a registered name ------------------------------------------------------------


@functools.cache
def guard_models(is_registered: Callable[[str | None], bool], is_installed: Callable[[str | None], bool]) -> None:
    """Make transformers raise when a registered name is set on a model that would ignore it.

    Many such models do not call the mask function either, so none of our functions would run that could raise later.
    In other models, T5's bias becomes a table (biases.py) where the attention function `is_installed`.
    """
    correct, adjust, finish = (
        getattr(PreTrainedModel, name)
        for name in ("get_correct_attn_implementation", "_check_and_adjust_attn_implementation", "post_init")
    )

    @functools.wraps(correct)
    def guarded(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        # A model with sub-configurations is not checked here: some of its parts may use the interface.
        if is_registered(requested_attention) and not self.config.sub_configs:
            check_configuration(type(self.config))
        return correct(self, requested_attention, *args, **kwargs)

    @functools.wraps(adjust)
    def adjusted(
        self: PreTrainedModel, attn_implementation: str | None, is_init_check: bool = False, *args: Any, **kwargs: Any
    ) -> str:
        if not is_init_check and is_registered(attn_implementation):  # set_attn_implementation, called on this model
            use_tables(_check_has_attention(self), is_installed)
        return adjust(self, attn_implementation, is_init_check, *args, **kwargs)

    @functools.wraps(finish)
    def finished(self: PreTrainedModel) -> None:
        # Only the whole model is checked: a part without attention is fine (the ResNet of a DETR, a vocoder).
        if is_registered(self.config._attn_implementation_internal) and outermost_model(self) is self:
            use_tables(_check_has_attention(self), is_installed)
        finish(self)

    PreTrainedModel.get_correct_attn_implementation = guarded  # type: ignore[method-assign]
    PreTrainedModel._check_and_adjust_attn_implementation = adjusted  # type: ignore[method-assign]
    PreTrainedModel.post_init = finished  # type: ignore[method-assign]


def check_configuration(config: type) -> None:
    """Raise if the model of this configuration class computes its attention without the interface."""
    if _bypasses(config):
        raise ValueError(
            f"attn_implementation: {config.__module__.rpartition('configuration_')[2]} models bypass transformers' "
            f"AttentionInterface and would ignore regard; expected a model that uses it{_advice_by_part()}"
        )


def _check_has_attention(model: nn.Module) -> list[nn.Module]:
    """The attentions of a model. Raises if there are none."""
    if not (found := attentions(model)):
        raise ValueError(f"attn_implementation: {_no_attention_in(model)}")
    return list(found.values())


def outermost_model(part: PreTrainedModel | None = None) -> PreTrainedModel | None:
    """The outermost model whose method is on the call stack: the one being built or called, of which `part` is a
    part."""
    frame, found = sys._getframe(1), part
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), PreTrainedModel):
            found = owner
        frame = frame.f_back
    return found


@functools.cache
def _bypasses(config: type) -> bool:
    """Whether a configuration's model computes attention by itself, and so would ignore the registered function."""
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    own = [n for n, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__]
    return any("Attention" in name for name in own)


def _advice_by_part() -> str:
    """For a model made of several parts: which `attn_implementation` each part can have."""
    whole = outermost_model()
    config = None if whole is None else whole.config
    parts = {} if config is None else {n: p for n in config.sub_configs if (p := getattr(config, n, None)) is not None}
    given = {name: "eager" if _bypasses(type(part)) else "regard" for name, part in parts.items()}
    if len(set(given.values())) < 2:
        return ""
    return f"; each part of {type(whole).__name__} can be given its own: attn_implementation={given}"
