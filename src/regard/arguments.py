"""The arguments of `attention`, described once for every function that takes them.

`attention` writes its own signature out. A function that takes some of the same arguments declares
`**options: Unpack[PlanOptions]` and is decorated with `takes_options`: type checkers see each option, `help()` lists
them, and an unknown name raises TypeError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Literal, ParamSpec, TypedDict, TypeVar

from torch import Tensor

from .problem import Transport


class ScoreOptions(TypedDict, total=False):
    """What decides the scores and which keys are masked. Names, meaning and defaults are those of `attention`."""

    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class PlanOptions(ScoreOptions, total=False):
    """What decides the plan: everything but query, key, value and dropout."""

    problem: Transport | None
    softcap: float | None
    key_scale: Tensor | None
    score: Literal["dot", "cosine", "euclidean"]


class AttentionOptions(PlanOptions, total=False):
    """Every option of `attention` but `return_aux`, whose value decides the type of the result."""

    dropout_p: float
    backend: str


# The value of an option that is not given.
DEFAULTS: dict[str, object] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
    "problem": None,
    "softcap": None,
    "key_scale": None,
    "score": "dot",
    "backend": "auto",
}

P = ParamSpec("P")
R = TypeVar("R")


def takes_options(kind: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose last parameter is `**options: Unpack[kind]`.

    The signature that `inspect.signature` and `help()` show lists the options one by one, and an unknown option raises
    TypeError with the function's own name."""
    known: frozenset[str] = kind.__optional_keys__  # type: ignore[attr-defined]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = inspect.signature(function)
        named = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind.__annotations__[name]
            )
            for name, default in DEFAULTS.items()
            if name in known
        ]
        accepted = {p.name for p in named} | set(known)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in accepted:
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'")
            return function(*args, **kwargs)

        checked.__signature__ = plain.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return checked

    return decorate
