"""A `Transport` inside a module: its tensors become the module's parameters and buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .._compat import pytree
from .._pytree import Part
from .._validate import describe
from ..problem import Transport
from .context import Context, called, takes_context

# A callable builds the problem in every forward: from its own parameters alone, or also from the call.
Problem = Transport | Callable[[], Transport] | Callable[[Context], Transport] | None


class Declared(nn.Module):
    """The tensors of a `Transport` as parameters and buffers. Calling the module builds the Transport from them.

    Names follow the Transport's fields: `marginal.sink`, `temperature`, `prior.parts.1.slopes`. An `nn.Parameter` is
    registered itself, not a copy. Every other tensor is a constant: a buffer that is not part of the state dict, that
    follows the module to another device, and that keeps its dtype and values (`half` and `to_empty` do not change it).
    """

    def __init__(self, problem: Transport) -> None:
        super().__init__()
        found, structure = pytree.tree_flatten_with_path(problem, is_leaf=_without_tensors)
        self._leaves = [self._registered(tuple(map(_name, path)), leaf) for path, leaf in found]
        self._pattern = pytree.tree_unflatten(range(len(found)), structure)  # the Transport with numbers for its leaves

    def _registered(self, names: tuple[str, ...], leaf: Any) -> Any:
        """Register a tensor under its names and return the names; return everything else as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        _check_leaf(".".join(names), leaf)
        owner: nn.Module = self
        for name in names[:-1]:
            if name not in dict(owner.named_children()):
                owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        if isinstance(leaf, nn.Parameter):
            owner.register_parameter(names[-1], leaf)
        else:
            owner.register_buffer(names[-1], leaf, persistent=False)
        return names

    def forward(self) -> Transport:
        return pytree.tree_map(lambda number: self._current(self._leaves[number]), self._pattern)

    def _current(self, leaf: Any) -> Any:
        if not isinstance(leaf, tuple):
            return leaf
        found: Any = self
        for name in leaf:
            found = getattr(found, name)
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Declared:
        constants = {(owner, name): t for owner in self.modules() for name, t in owner.named_buffers(recurse=False)}
        super()._apply(fn, recurse)
        for (owner, name), constant in constants.items():
            if constant.is_meta and not owner.get_buffer(name).is_meta:
                raise RuntimeError(
                    f"problem: expected a Transport that is built outside of torch.device('meta'), got {name} on the "
                    f"meta device, which has no values to move"
                )
            setattr(owner, name, constant.to(owner.get_buffer(name).device))
        return self

    def __repr__(self) -> str:
        return f"Declared({self()!r})"


def _without_tensors(node: Any) -> bool:
    """Whether a part has no tensors. Such a part never changes, so it is kept instead of being rebuilt."""
    return isinstance(node, Part) and not pytree.tree_leaves(node)


def _name(key: Any) -> str:
    return key.name if isinstance(key, pytree.GetAttrKey) else str(key.idx)


def _check_leaf(name: str, leaf: Tensor) -> None:
    if leaf.requires_grad and not isinstance(leaf, nn.Parameter):
        raise ValueError(
            f"problem: expected an nn.Parameter, or a tensor without requires_grad, at {name}, got "
            f"{describe(leaf)} {'that requires grad' if leaf.is_leaf else 'computed from others'}, which the module "
            f"cannot register; a problem computed from parameters is built in every forward: pass a module (or "
            f"function) that returns the Transport"
        )


def learned(problem: Transport | nn.Module) -> list[str]:
    """Names of the tensors that require grad in a problem or a module of features."""
    if isinstance(problem, nn.Module):
        return [name for name, parameter in problem.named_parameters() if parameter.requires_grad]
    leaves = pytree.tree_leaves_with_path(problem)
    return [".".join(map(_name, path)) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


class HasProblem(nn.Module):
    """A module whose attribute `problem` may be a `Transport`. A Transport with tensors is stored as a `Declared`."""

    layer = 0  # number of the attention in its model, which a `Context` has; `Transformer` sets it
    _with_context = False  # whether `problem` is a callable that takes a `Context`

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "problem":
            check_problem(name, value)
            self._with_context = callable(value) and takes_context(value)
            value = _stored(value)
            if name in self.__dict__ or name in dict(self.named_children()):
                delattr(self, name)  # nn.Module allows only a module or None in place of a module
        super().__setattr__(name, value)

    def problem_of(
        self, heads: int, hidden_states: Tensor, keys: int | None = None, padding: Tensor | None = None
    ) -> Transport | None:
        """The problem of a forward call, with the current values of its parameters. `keys` and `padding` as in
        `Context`."""
        given: Any = self.problem
        if not self._with_context:
            return built(given)
        return called(given, Context(self, heads, hidden_states, self.layer, keys=keys, padding=padding))


def _stored(problem: Any) -> Any:
    return Declared(problem) if isinstance(problem, Transport) and pytree.tree_leaves(problem) else problem


def built(problem: Problem) -> Transport | None:
    """The problem with the current values of its parameters. One that depends on the hidden states raises."""
    if problem is None or isinstance(problem, Transport):
        return problem
    if takes_context(problem):
        raise ValueError(
            f"problem: expected one that is the same for all inputs, got {problem!r}, which takes a Context"
        )
    return problem()  # type: ignore[call-arg]


def is_factory(problem: object) -> bool:
    """Whether a callable builds a problem for a call: a module, or a function of an argument named `context`."""
    if isinstance(problem, nn.Module):
        return True
    return inspect.isfunction(problem) and next(iter(inspect.signature(problem).parameters), None) == "context"


def check_problem(name: str, problem: object) -> None:
    if problem is not None and not isinstance(problem, Transport) and not callable(problem):
        raise TypeError(f"{name}: expected a Transport, a callable that builds one, or None, got {describe(problem)}")
