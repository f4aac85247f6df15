"""`entropies`: the differentiable entropies of a training step's attention, as a term of the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._compat import in_backward
from .._display import Displayed
from ..nn.stability import entropy_floor
from ..problem import Budget, TemperatureRule, Transport
from ..regularizers import KL
from ..statistics import AuxRequest
from .calls import attend, counted_keys
from .factories import Factory
from .interception import AttentionCall, Interception


@dataclass(frozen=True, eq=False, repr=False)
class Entropy(Displayed):
    """The entropies of one attention's rows, with their gradient."""

    name: str
    entropy: Tensor  # [B, H, Tq], differentiable
    keys: Tensor  # [B, H, Tq], number of keys that each query may read (a null key counts)
    rows: Tensor | None  # [B, 1, Tq], False for padding; None: no row is padding


class Entropies(list[Entropy]):
    """One `Entropy` for each attention that the last forward pass called, in the order of the calls."""

    def floor(self, floor: float, *, relative: bool = False, power: float = 1.0) -> Tensor:
        """The mean of `regard.nn.entropy_floor` over the attentions. With `relative` the floor is a share of the row's
        maximum, log n."""
        if not self:
            raise RuntimeError("floor: expected a forward pass of the model before it, got none")
        losses = [
            entropy_floor(e.entropy, floor, keys=e.keys, relative=relative, rows=e.rows, power=power) for e in self
        ]
        return torch.stack(losses).mean()


@contextlib.contextmanager
def entropies(model: nn.Module) -> Iterator[Entropies]:
    """While the block runs, the entropies of the model's attention, for a loss:

    with regard.hf.entropies(model) as rows:
        loss = model(**batch).loss
        (loss + 0.1 * rows.floor(1.0)).backward()

    Inside the block regard computes the model's attention; afterwards the model is as it was. Activation checkpointing
    must use use_reentrant=False: the reentrant kind hides the gradient, and raises.
    """
    listener = _EntropyListener()
    interception = Interception(model, listener)
    for problem in interception.problems.values():
        if not isinstance(problem, Factory):  # the problem of a factory is checked when it is built
            _check_has_gradient(problem)
    with interception.attached():
        yield listener.found


class _EntropyListener:
    def __init__(self) -> None:
        self.found = Entropies()
        self.with_gradients = False  # whether gradients were enabled where the model was called

    def model_called(self) -> None:
        self.found.clear()
        self.with_gradients = torch.is_grad_enabled()

    def model_returned(self) -> None:
        pass

    def attend(self, call: AttentionCall) -> Tensor:
        _check_has_gradient(call.problem)
        out, aux = attend(call.module, call.arguments, AuxRequest(entropy=True, support=True))
        if in_backward():
            return out
        if self.with_gradients and not torch.is_grad_enabled():
            raise RuntimeError(
                "model: expected activation checkpointing with use_reentrant=False, under which the entropies have a "
                "gradient, got the reentrant kind"
            )
        assert aux.entropy is not None and aux.support is not None
        keys = counted_keys(call.module, call.arguments["problem"] or Transport(), aux.support)
        real = call.place.real
        rows = None if real is None else real[:, None].to(out.device)
        self.found.append(Entropy(call.name, aux.entropy, keys, rows))
        return out


def _check_has_gradient(problem: object) -> None:
    """Raise if the entropy of a problem's rows has no gradient."""
    if problem is None:
        return
    plain = isinstance(problem, Transport) and isinstance(problem.regularizer, KL)
    temperature = problem.temperature if isinstance(problem, Transport) else 0.0
    if not plain or isinstance(temperature, Budget) or _is_cold(temperature):
        raise ValueError(
            f"model: expected one that solves KL() at a temperature above 0 that is no budget, whose entropy has a "
            f"gradient, got {problem!r}"
        )


def _is_cold(temperature: object) -> bool:
    """Whether some row has temperature 0."""
    return not isinstance(temperature, TemperatureRule) and not bool(torch.as_tensor(temperature).all())
