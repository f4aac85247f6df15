"""How a registered factory becomes part of a model: its module is a submodule, and hooks read the calls.

A model adopts the factory of its attention implementation when it is built with the name (`from_pretrained`,
`from_config`, or the class itself) and in `set_attn_implementation`. A registered module becomes `regard_problem` of
the model's base model, one for all layers; of a registered class, each attention has an instance of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from .._compat import remove_forward_hook
from .factories import ADOPTED, Adopted, Factory, after_part, before_attention, before_part
from .models import attentions, layer_numbers, outermost_model
from .positions import parts_of

PART = "regard_problem"  # the submodule that a factory becomes
_ASSIGNING = "_regard_assigning"  # the attribute of a model while its implementation is set
_FROZEN = "_regard_frozen"  # the attribute of a module with the names of the parameters that are not trained
_KEPT = "_regard_kept"  # the attribute with every module that a holder has had, by the number of its factory

_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()

Lookup = Callable[[Any], Factory | None]  # the factory that an attention module's implementation names


def adopt(model: Any, lookup: Lookup) -> None:
    """Make the model ready for the factory that its implementation names. If it names none, remove what an earlier
    factory needed. Its parameters leave the model; they return when its name is set again."""
    found = attentions(model)
    wanted = {name: lookup(module) for name, module in found.items()}
    factories = {factory.number: factory for factory in wanted.values() if factory is not None}
    if len(factories) > 1:
        names = sorted(factory.name for factory in factories.values())
        raise ValueError(f"attn_implementation: expected one factory for all parts of a model, got {names}")
    factory = next(iter(factories.values()), None)
    if factory is not None:
        _check_passes_arguments(factory, [found[name] for name, one in wanted.items() if one is not None])
    base = model.base_model
    shared = None
    if factory is not None and isinstance(factory.given, nn.Module):
        shared = _hold(base, factory, lambda: _own(factory, base))
    else:
        _drop(base)
    numbers = layer_numbers(found[name] for name, one in wanted.items() if one is not None)
    for name, module in found.items():
        _unhook(module)
        if factory is None or wanted[name] is None:
            _drop(module)
            continue
        build: Any = factory.given if shared is None else shared
        if isinstance(build, type):
            build = _hold(module, factory, lambda module=module: _made(factory, module))
        names = tuple(inspect.signature(module.forward).parameters)
        vars(module)[ADOPTED] = Adopted(factory.number, numbers[id(module)], names, build)
        module.register_forward_pre_hook(before_attention, with_kwargs=True)
    for part in parts_of(model, found.values()):
        remove_forward_hook(part, before_part)
        remove_forward_hook(part, after_part)
        if factory is not None:
            part.register_forward_pre_hook(before_part, with_kwargs=True)
            part.register_forward_hook(after_part, always_call=True)


def _unhook(module: nn.Module) -> None:
    vars(module).pop(ADOPTED, None)
    remove_forward_hook(module, before_attention)


def _check_passes_arguments(factory: Factory, modules: list[nn.Module]) -> None:
    for module in modules:
        kinds = {p.kind for p in inspect.signature(module.forward).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(
                f"attn_implementation: expected attentions that accept keyword arguments for {factory.name!r}, got "
                f"{type(module).__name__}, which does not: {factory.label} could not see its hidden states"
            )


# --- modules ----------------------------------------------------------------------------------------------------------


def _own(factory: Factory, holder: nn.Module) -> nn.Module:
    """The registered module for the first model, and a copy of it as it was registered for every other one."""
    module = factory.given
    assert isinstance(module, nn.Module)
    other = _owners[module]() if module in _owners else None  # it may have been registered before
    if factory.owned or (other is not None and other is not holder):
        return copy.deepcopy(factory.as_registered)  # type: ignore[return-value]
    factory.owned, _owners[module] = True, weakref.ref(holder)
    return module


def _made(factory: Factory, module: nn.Module) -> nn.Module:
    """An instance of a registered class for one attention."""
    with torch.device("cpu"):  # with values, also while from_pretrained builds the model on the meta device
        return factory.given(module)


def _hold(holder: Any, factory: Factory, make: Callable[[], nn.Module]) -> nn.Module:
    """Make the module of a factory a submodule, with the device and dtype of its holder."""
    kept: dict[int, nn.Module] = vars(holder).setdefault(_KEPT, {})
    like = next((p for name, p in holder.named_parameters() if p.is_floating_point() and PART not in name), None)
    if factory.number not in kept:
        module = kept[factory.number] = make()
        vars(module)[_FROZEN] = [name for name, p in module.named_parameters() if not p.requires_grad]
    module = kept[factory.number]
    if like is not None:
        module.to(dtype=like.dtype, device=None if like.is_meta else like.device)
    for part in module.modules():
        part._is_hf_initialized = True  # type: ignore[assignment] # transformers must not initialize it again
    _drop(holder)
    holder.add_module(PART, module)
    return module


def _drop(holder: nn.Module) -> None:
    if PART in dict(holder.named_children()):
        delattr(holder, PART)


def held(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that factories have in a model, by name."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == PART:
            yield name, module


def problem_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model's registered factory, for an optimizer."""
    if next(held(model), None) is None:
        raise ValueError(
            f"model: expected one whose attention implementation is a module that builds problems, got "
            f"{type(model).__name__}"
        )
    return list({id(p): p for _, module in held(model) for p in module.parameters()}.values())


def check_whole(model: nn.Module) -> None:
    """Raise if a model that is saved does not contain the module of its factory."""
    own = {id(module) for module in model.modules()}
    for module in attentions(model).values():
        adopted: Adopted | None = vars(module).get(ADOPTED)
        if adopted is not None and isinstance(adopted.build, nn.Module) and id(adopted.build) not in own:
            raise ValueError(
                f"save_pretrained: expected the model whose part {PART!r} is {type(adopted.build).__name__}, got a "
                f"part of it without it; save the whole model"
            )


# --- transformers -----------------------------------------------------------------------------------------------------


@functools.cache
def guard_adoption(lookup: Lookup, named: Callable[[str | None], Factory | None]) -> None:
    """Make transformers' models adopt factories when they are built and when their implementation is set. `named`: the
    factory of a name."""
    assign, finish = PreTrainedModel.set_attn_implementation, PreTrainedModel.post_init
    adjust = PreTrainedModel._check_and_adjust_attn_implementation
    move = PreTrainedModel._move_missing_keys_from_meta_to_device

    @functools.wraps(assign)
    def assigned(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        vars(self)[_ASSIGNING] = True
        try:
            assign(self, *args, **kwargs)
        finally:
            del vars(self)[_ASSIGNING]
        adopt(self, lookup)

    @functools.wraps(adjust)
    def adjusted(self: PreTrainedModel, attn_implementation: Any, is_init_check: bool = False, **kwargs: Any) -> Any:
        found = adjust(self, attn_implementation, is_init_check, **kwargs)
        # In `model.set_attn_implementation(regard.hf.register(...))` Python reads the method before it calls
        # `register`. If that is the first call of `register`, the method is still transformers', which calls this one.
        if not is_init_check and _ASSIGNING not in vars(self):
            adopt(self, lambda module: named(found))
        return found

    @functools.wraps(finish)
    def finished(self: PreTrainedModel) -> None:
        finish(self)
        if outermost_model(self) is self:
            adopt(self, lookup)

    @functools.wraps(move)
    def moved(self: PreTrainedModel, missing_keys: Any, *args: Any, **kwargs: Any) -> None:
        # Transformers replaces what the checkpoint does not have by memory without values.
        initial: dict[str, Tensor] = {}
        for name, module in held(self):
            inside = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            saved = module.state_dict().keys()
            for key, tensor in inside.items():
                if f"{name}.{key}" in missing_keys or key not in saved:
                    initial[f"{name}.{key}"] = tensor.detach().clone()
        move(self, missing_keys, *args, **kwargs)
        with torch.no_grad():
            for key, tensor in initial.items():
                self.get_parameter_or_buffer(key).copy_(tensor)
        for _, module in held(self):
            for name in vars(module)[_FROZEN]:
                module.get_parameter(name).requires_grad_(False)

    PreTrainedModel.set_attn_implementation = assigned  # type: ignore[method-assign]
    PreTrainedModel._check_and_adjust_attn_implementation = adjusted  # type: ignore[method-assign]
    PreTrainedModel.post_init = finished  # type: ignore[method-assign]
    PreTrainedModel._move_missing_keys_from_meta_to_device = moved  # type: ignore[method-assign]
