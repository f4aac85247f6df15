"""`retrofit`: adds learnable parameters to every attention head of a trained model; `unretrofit` removes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import remove_forward_hook
from .._validate import describe
from ..features import Features
from ..statistics import AuxRequest
from .calls import attend
from .inputs import batches, evaluation_mode, prepared
from .interception import AttentionCall, Interception
from .models import attentions, check, configurations_of
from .parameters import PARAMETERS, RECORD, Retrofit, check_not_lost, retrofit_of
from .registry import is_installed, is_registered, problem_of, register


def retrofit(
    model: nn.Module,
    learn: str | Iterable[str] = ("temperature", "sink", "bias"),
    *,
    freeze: bool = False,
    inputs: Any = None,
) -> nn.Module:
    """Add parameters to every head of a trained model. At first they change nothing. Returns the model.

    "temperature": a factor on the head's temperature, learned through its logarithm.
    "sink": a null key, which takes mass and contributes no value, learned through its prior weight (from 0) and its
        score.
    "bias": how much distance counts, a slope as in ALiBi (from 0; a negative one prefers distant keys).

    The parameters belong to the submodule `retrofit` of each attention (a `regard.hf.Retrofit`): the state dict, `to`,
    `deepcopy` and `save_pretrained` include them, and `regard.hf.from_pretrained` loads them. All are neutral at 0.
    From now on regard computes the model's attention: its implementation becomes "regard", unless it already is one of
    regard's.

    `freeze` makes all other parameters untrainable. `inputs` (as for `regard.inspect`) sets the score of each null key
    to the mean of its head's potential (the aux `dual`) over them: a weight of 1 then takes half of a typical row's
    mass. Without `inputs` the score is 0.
    """
    learn = checked_parts(learn)
    found = check(model)
    if any(retrofit_of(module, allow_lost=True) is not None for module in found.values()):
        raise ValueError("model: expected one that is not retrofitted yet (regard.hf.unretrofit undoes it)")
    check_not_lost(getattr(model, "config", None))
    own = [name for name, module in found.items() if isinstance(getattr(module, "sinks", None), Tensor)]
    if "sink" in learn and own:
        raise ValueError(f'learn: expected no "sink" for a model that has sinks of its own, got {own[0]}.sinks')
    if "sink" not in learn and inputs is not None:
        raise ValueError('inputs: expected None without "sink", whose score they set')
    potentials = {} if inputs is None else _mean_potentials(model, inputs)
    before = {
        "implementations": [config._attn_implementation_internal for config in configurations_of(model)],
        "trainable": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    }
    attach_parameters(model, learn)
    model._before_retrofit = before  # type: ignore[assignment]
    for name, potential in potentials.items():
        with torch.no_grad():
            model.get_submodule(name).retrofit.null_score.copy_(potential)  # type: ignore[union-attr]
    if freeze:
        learned = {id(parameter) for parameter in retrofitted_parameters(model)}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in learned)
    return model


def retrofitted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that `retrofit` added, for an optimizer."""
    found = [p for module in model.modules() if isinstance(module, Retrofit) for p in module.parameters()]
    if not found:
        raise _not_retrofitted(model)
    return found


def unretrofit(model: nn.Module) -> nn.Module:
    """Remove what `retrofit` added, the learned values included: the model is as it was before. Returns the model."""
    found = [module for module in model.modules() if isinstance(getattr(module, "retrofit", None), Retrofit)]
    record = getattr(getattr(model, "config", None), RECORD, None)
    if not found and record is None:
        raise _not_retrofitted(model)
    for module in found:
        del module.retrofit
        remove_forward_hook(module, _check_implementation)
    for config in configurations_of(model):
        if hasattr(config, RECORD):
            delattr(config, RECORD)
    before: Any = model.__dict__.pop("_before_retrofit", None)
    if before is not None:  # None: the model was loaded retrofitted, and stays on regard
        for config, name in zip(configurations_of(model), before["implementations"], strict=True):
            config._attn_implementation_internal = name
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in before["trainable"])
    return model


def _not_retrofitted(model: nn.Module) -> ValueError:
    return ValueError(f"model: expected one that regard.hf.retrofit has changed, got {type(model).__name__}")


def checked_parts(learn: object) -> tuple[str, ...]:
    """The names of the parts to learn, in their fixed order."""
    names = (learn,) if isinstance(learn, str) else tuple(learn) if isinstance(learn, Iterable) else (learn,)
    for name in names:
        if name not in PARAMETERS:
            raise ValueError(f"learn: expected some of {', '.join(PARAMETERS)}, got {describe(name)}")
    if not names:
        raise ValueError(f"learn: expected some of {', '.join(PARAMETERS)}, got none")
    return tuple(name for name in PARAMETERS if name in names)


def attach_parameters(model: nn.Module, learn: tuple[str, ...]) -> None:
    """Add a `Retrofit` to each attention, record it in the configuration, and make regard the implementation."""
    found = check(model)
    for config in configurations_of(model):
        name = config._attn_implementation_internal
        if is_registered(name) and isinstance(problem_of(name), Features):
            raise ValueError("model: expected one whose attention is a Transport, got attention by features")
    if "bias" in learn and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            'learn: expected no "bias" for an encoder-decoder, whose two sequences have no distance between them'
        )
    heads = {where: _number_of_heads(where, module) for where, module in found.items()}
    name = register()
    for config in configurations_of(model):
        setattr(config, RECORD, list(learn))
        if not is_installed(config._attn_implementation_internal):
            config._attn_implementation_internal = name
    for where, module in found.items():
        like = next((p for p in module.parameters() if p.is_floating_point()), None)
        dtype, device = (None, None) if like is None else (like.dtype, like.device)
        module.retrofit = Retrofit(heads[where], learn, dtype=dtype, device=device)
        module.register_forward_pre_hook(_check_implementation)


def _number_of_heads(name: str, module: nn.Module) -> int:
    """The number of query heads of an attention."""
    for owner in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads"):
            if isinstance(heads := getattr(owner, attribute, None), int):
                return heads
    raise ValueError(
        f"model: expected attentions with a number of heads among their attributes, got {name} "
        f"({type(module).__name__})"
    )


def _check_implementation(module: Any, args: Any) -> None:
    """A hook before each retrofitted attention: another implementation would ignore the learned parameters."""
    name = module.config._attn_implementation_internal
    if not is_installed(name):
        raise RuntimeError(
            f"attn_implementation: expected one of regard's for a retrofitted model, got {name!r}, which would ignore "
            f"the learned parameters (regard.hf.unretrofit removes them)"
        )


# --- the scores of the null keys --------------------------------------------------------------------------------------


def _mean_potentials(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The mean of each head's dual over the rows of the inputs, [H] by attention. Padding is not counted."""
    listener = _PotentialListener()
    with Interception(model, listener).attached(), evaluation_mode(model):
        for batch in batches(inputs):
            model(**prepared(model, batch))
    found = {name: total / count for name, (total, count) in listener.sums.items()}
    for name in attentions(model):
        if name not in found or not bool(found[name].isfinite().all()):
            raise ValueError(f"inputs: expected some that reach every head, got none that reach {name}")
    return found


class _PotentialListener:
    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # by attention: sums and numbers of rows, [H] each

    def model_called(self) -> None:
        pass

    def model_returned(self) -> None:
        pass

    def attend(self, call: AttentionCall) -> Tensor:
        if isinstance(call.problem, Features):
            raise ValueError("model: expected one whose attention is a Transport, got attention by features")
        out, aux = attend(call.module, call.arguments, AuxRequest(dual=True, max_scores=True))
        assert aux.dual is not None and aux.max_scores is not None
        counted = (aux.max_scores > -torch.inf) & ~aux.dual.isnan()
        if call.place.real is not None:
            counted = counted & call.place.real[:, None].to(counted.device)
        total = torch.where(counted, aux.dual, 0.0).double().sum((0, 2)).cpu()
        before = self.sums.get(call.name, (0.0, 0.0))
        self.sums[call.name] = before[0] + total, before[1] + counted.double().sum((0, 2)).cpu()
        return out
