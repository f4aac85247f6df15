"""The contract of a backend. A backend is one class in a file of its own and one line in `BACKENDS` (__init__.py).

A backend computes passes over one-sided problems (rows). Autograd, torch.compile, transforms, budgets and plans with
both marginals are built on these passes and need nothing more from it. Backends import neither one another nor the
code that calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from ..form import Form
from ..statistics import DIFFERENTIABLE, STATISTICS

READOUT = "readout"  # listed in `names` if `topk`, `weights_at` or `block_sums` will be called


class Backend(ABC):
    """How a problem is computed. `form` is a `Form` of rows; `names` lists "out" and statistics."""

    name: ClassVar[str]  # as in attention(backend=name)

    # The statistics that `forward` computes.
    statistics: ClassVar[tuple[str, ...]] = ()

    # The outputs that `backward` can start from.
    differentiable: ClassVar[tuple[str, ...]] = DIFFERENTIABLE

    # Whether log pi is added to s/tau in the compute dtype. In float32, rows at low temperatures then lose their prior.
    rounds_cold_priors: ClassVar[bool] = False

    # Whether `attend` runs under PyTorch's own autograd, which is then used in place of `backward`.
    has_own_autograd: ClassVar[bool] = False

    @abstractmethod
    def unsupported(self, form: Form, names: tuple[str, ...]) -> str | None:
        """Why this backend cannot serve the problem or one of the outputs, or None.

        No other code decides this: "auto", the errors, docs/support.md and the skips of the tests call this method."""

    def unwise(self, form: Form, names: tuple[str, ...]) -> str | None:
        """Why "auto" does not choose this backend although it could serve the problem and the outputs, or None."""
        return None

    def saved(self, form: Form, names: tuple[str, ...]) -> tuple[str, ...]:
        """The outputs that `backward` needs besides `names`. `forward` computes them, too, if a gradient may follow."""
        return ()

    def saved_shapes(self, form: Form) -> dict[str, tuple[int, ...]]:
        """The shapes of those outputs in `saved` that are not [B, H, Tq]."""
        return {}

    @abstractmethod
    def forward(self, form: Form, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Outputs by name, in the compute dtype, outside of autograd."""

    @abstractmethod
    def backward(
        self, form: Form, needed: tuple[str, ...], outputs: dict[str, Tensor], grads: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The gradients of the `needed` slots of `form.tensors()`, each in the dtype of its slot.

        `outputs` are those of `forward` (including `saved`), `grads` the gradients of some of them."""

    def attend(self, form: Form) -> Tensor:
        """The output, recorded by PyTorch's own autograd (only if `has_own_autograd`)."""
        raise NotImplementedError(f'backend "{self.name}" has no autograd of its own')

    # Reading single weights of a plan that is not stored. A backend that supports READOUT has these three.

    def topk(self, form: Form, n: int) -> tuple[Tensor, Tensor]:
        """The n largest weights of each row and their keys, [B, H, Tq, n]."""
        raise NotImplementedError(f'backend "{self.name}" has no topk')

    def weights_at(self, form: Form, index: Tensor) -> Tensor:
        """The weights of chosen keys: int64 [B, H, Tq, n] -> [B, H, Tq, n]."""
        raise NotImplementedError(f'backend "{self.name}" has no weights_at')

    def block_sums(self, form: Form, block: int) -> Tensor:
        """The plan summed over blocks, [B, H, ceil(Tq/block), ceil(Tk/block)]."""
        raise NotImplementedError(f'backend "{self.name}" has no block_sums')

    def output_shapes(self, form: Form, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """The shape of each output."""
        assert form.query is not None and form.value is not None
        rows = tuple(form.query.shape[:3])
        shapes: dict[str, tuple[int, ...]] = {}
        others = False
        for name in names:
            found = STATISTICS.get(name)
            if found is None:
                shapes[name] = (*rows, form.value.shape[3]) if name == "out" else rows
                others = others or name != "out"
            else:
                shapes[name] = (*rows[:2], form.value.shape[2]) if found.per == "key" else rows
        if others:
            shapes |= {name: shape for name, shape in self.saved_shapes(form).items() if name in shapes}
        return shapes
