"""`register`: the names under which transformers finds our attention function and our mask function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._validate import describe
from ..features import Features
from ..nn.declared import learned
from ..problem import Transport
from .adoption import guard_adoption
from .calls import attention_function
from .checkpoints import guard_checkpoints
from .factories import Factory
from .masks import make_mask
from .models import guard_models

TEMPORARY = "regard-watch-"  # how the names begin that an `Interception` installs while it is attached

_problems: dict[str, Transport | Features | Factory | None] = {}  # by registered name
_stands_for: dict[str, str | None] = {}  # by temporary name: the name that the model had before
_installed: set[str] = set()  # all names whose attention function is ours, the temporary ones included


def register(name: str = "regard", problem: Transport | Features | Callable[..., Any] | None = None) -> str:
    """Make `attn_implementation=name` solve this problem (None: softmax, as the stock implementations). Returns `name`.

    A callable builds the problem of every attention call: `problem(context)`, with a `regard.nn.Context`. A module
    becomes `regard_problem` of the base model of each model that uses the name, so that its parameters are the model's:
    the first model has the module itself, every other one a copy of it as it was registered. Of a class of modules,
    each attention has an instance of its own, `problem(attention)`. Another implementation takes the parameters out of
    the model, and the name brings them back.

    What a model specifies about its attention (masks, windows, sinks, softcap, position biases) is combined with the
    problem. A module of `regard.features` accepts causal and bidirectional models with padding and raises for the rest;
    with a cache each new token is computed over all keys again (`step`, which avoids this, does not fit transformers'
    caches). RowsAndColumns is for bidirectional models (a causal one raises); padding positions take no part.

    A tensor of the problem that is made for one length (a `Bias` [T, T], ids [T], a temperature per query) raises in a
    call of another length, as `generate` makes them. Tensors per head and priors of positions fit every length. In a
    decoding step, a prior of positions without an alignment is aligned to the cache.

    A problem (or features) that requires grad raises: a registered name belongs to no model, so the learned tensors
    would be in no model's parameters() or state_dict(). `retrofit` adds parameters to a model.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {describe(name)}")
    for reserved in ("sdpa", "flex_attention", "flash", "/", "|"):
        if reserved in name:
            raise ValueError(
                f'name: expected one without "{reserved}", to which transformers gives a meaning of its own, got '
                f"{name!r}"
            )
    if name == "eager" or not name or (name in ALL_ATTENTION_FUNCTIONS and name not in _problems):
        raise ValueError(f"name: expected one that transformers does not use itself, got {name!r}")
    if isinstance(problem, type) and issubclass(problem, (Transport, Features)):
        raise TypeError(f"problem: expected an instance, got the class {problem.__name__}")
    if problem is not None and not isinstance(problem, (Transport, Features)) and not callable(problem):
        raise TypeError(
            f"problem: expected a Transport, a module of regard.features, a callable that builds a Transport, or None, "
            f"got {describe(problem)}"
        )
    if isinstance(problem, (Transport, Features)) and (names := learned(problem)):
        raise ValueError(
            f"problem: expected tensors that do not require grad, got {', '.join(names)} to learn, which no model's "
            f"parameters() would contain; detach() makes a constant, regard.hf.retrofit adds parameters to a model, "
            f"and a module that builds the Transport brings its own"
        )
    solved = problem if problem is None or isinstance(problem, (Transport, Features)) else Factory(name, problem)
    _problems[name] = solved
    install(name, functools.partial(attention_function, solved))
    guard_models(is_registered, is_installed)
    guard_checkpoints(original_name, registered_problem)
    guard_adoption(_factory_of, _factory_named)
    return name


def is_registered(name: str | None) -> bool:
    """Whether `register` put this name into transformers."""
    return name in _problems


def is_installed(name: str | None) -> bool:
    """Whether the attention function of this name is ours: registered, or installed by an interception."""
    return name in _installed


def registered_problem(name: str | None) -> Transport | Features | Factory | None:
    """The problem that was registered under this name. None if there is none, or if it is softmax."""
    return None if name is None else _problems.get(name)


def _factory_of(module: Any) -> Factory | None:
    """The factory that the implementation of an attention module names."""
    return _factory_named(getattr(getattr(module, "config", None), "_attn_implementation_internal", None))


def _factory_named(name: str | None) -> Factory | None:
    found = registered_problem(original_name(name))
    return found if isinstance(found, Factory) else None


def original_name(name: str | None) -> str | None:
    """The implementation that a model names, also while an interception has put a temporary name in its place."""
    while name in _stands_for:
        name = _stands_for[name]
    return name


def problem_of(name: str | None) -> Transport | Features | Factory | None:
    """The problem of an implementation's name. None is softmax, which every stock implementation computes."""
    if name is None or name in _problems:
        return None if name is None else _problems[name]
    stock = ("eager", "sdpa", "flex_attention", "flash_attention", "paged|", TEMPORARY)
    if not str(name).startswith(stock):
        raise ValueError(f"model: expected an attention implementation that regard knows, got {name!r}")
    return None


def install(name: str, function: Callable[..., tuple[Tensor, None]], stands_for: str | None = None) -> None:
    """Put an attention function (one that uses `as_call`) and our mask function into transformers under one name.
    `stands_for`: the name that a temporary one replaces."""
    _installed.add(name)
    if name.startswith(TEMPORARY):
        _stands_for[name] = stands_for
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, make_mask)


def remove(name: str) -> None:
    """Undo `install`."""
    _installed.discard(name)
    _stands_for.pop(name, None)
    del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[name]
    del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping[name]
