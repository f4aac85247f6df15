"""What a user declares: an attention as a transport problem.

Each query sends mass to the keys. The plan p maximises the total score and stays close to a prior:

    maximise over p >= 0    sum_j p_j s_j  -  tau * sum_j pi_j f(p_j / pi_j)      subject to a marginal

`Transport` names the four parts: the regulariser (f, in regularizers.py), the prior (pi, in priors.py), the marginal
and the temperature (tau). The objects only describe: nothing is computed until `attention` or `solve` is called. They
are frozen, compare and hash by structure (tensors by identity), and are pytrees whose leaves are their tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import ClassVar

from torch import Tensor

from . import serialization
from ._pytree import Part
from ._validate import Scalar, check_scalar, describe, finite, is_integer, not_negative, positive
from .priors import ALiBi, Bias, Causal, Documents, Prior, Product, Window  # noqa: F401 - where 0.1 had them
from .regularizers import KL, Regularizer

# --- marginals --------------------------------------------------------------------------------------------------------


class Marginal(Part, abstract=True):
    """What the rows (and columns) of the plan must sum to."""


class Rows(Marginal):
    """Each query sends `mass` (sum_j p_j = mass).

    `sink` adds a null key of that score (a number, or per head): it takes mass and returns nothing.
    `relax` replaces the constraint by the penalty relax * (m log m - m + 1) on the mass m = sum_j p_j. A mass other
    than 1, a sink and a relaxation exclude one another.
    """

    mass: float = 1.0
    sink: Scalar | None = None
    relax: Scalar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mass, Tensor):
            raise TypeError(f"Rows(mass): expected a number, got {describe(self.mass)}")
        check_scalar("Rows(mass)", self.mass, "a positive, finite number", positive)
        if self.sink is not None:
            check_scalar("Rows(sink)", self.sink, "a finite number", finite)
        if self.relax is not None:
            check_scalar("Rows(relax)", self.relax, "a positive, finite number", positive)
        if len([given for given in (self.mass != 1, self.sink is not None, self.relax is not None) if given]) > 1:
            raise ValueError(f"Rows: mass other than 1, sink and relax exclude one another, got {self!r}")


class Free(Marginal):
    """No constraint on the rows: p = pi * g((s + offset) / tau), where the link g is the inverse of f'."""

    offset: Scalar = 0.0

    def __post_init__(self) -> None:
        check_scalar("Free(offset)", self.offset, "a finite number", finite)


class RowsAndColumns(Marginal):
    """Each query sends `row` and each key receives `column`: attention as optimal transport (Sinkhorn), KL only.

    The plan is p_ij = pi_ij exp((s_ij - f_i - g_j)/tau). The prices f_i of the queries and g_j of the keys are numbers,
    not the functions f and g. `row` is a number or a tensor that broadcasts to [..., H, Tq] (None: 1). `column` is a
    tensor that broadcasts to [..., H, Tk] (None: all keys receive the same, Tq/Tk each; with a prior `Documents`, all
    keys of one document). A query without admissible keys sends nothing, and a key that is masked for every query
    receives nothing. `relax` replaces the constraint on the columns by a penalty relax * KL(column sums || column). All
    three may require grad.

    The rows are met exactly, the columns to `tolerance`: at most that share of the mass (of each document, if there are
    several) is in a wrong column. If `max_iterations` are not enough, a warning states the share, or with `strict` an
    error is raised. The gradient is that of the solution (implicit differentiation), exact to rounding; if `tolerance`
    is above 1e-6, to a tenth of `tolerance`. `iterations=n` stops after n normalisations (rows, columns, ..., rows, so
    n is odd) instead; 1 is softmax, 3 or 5 is Sinkformer's setting. The gradient is then that of those n steps.

    A causal prior or mask raises: what a key receives depends on later queries, so earlier ones would see the future.
    """

    row: Scalar | None = None
    column: Tensor | None = None
    tolerance: float = 1e-6
    max_iterations: int = 1000
    relax: Scalar | None = None
    iterations: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.row is not None:
            check_scalar("RowsAndColumns(row)", self.row, "a positive, finite number", positive)
        if self.column is not None and not (isinstance(self.column, Tensor) and self.column.is_floating_point()):
            raise TypeError(
                f"RowsAndColumns(column): expected a floating-point tensor that broadcasts to [..., H, Tk] or None, "
                f"got {describe(self.column)}"
            )
        if self.relax is not None:
            check_scalar("RowsAndColumns(relax)", self.relax, "a positive, finite number", positive)
        if isinstance(self.tolerance, Tensor):
            raise TypeError(f"RowsAndColumns(tolerance): expected a number, got {describe(self.tolerance)}")
        check_scalar("RowsAndColumns(tolerance)", self.tolerance, "a positive, finite number", positive)
        if not is_integer(self.max_iterations) or self.max_iterations < 1:
            raise ValueError(
                f"RowsAndColumns(max_iterations): expected a positive int, got {describe(self.max_iterations)}"
            )
        if self.iterations is not None and (
            not is_integer(self.iterations) or self.iterations < 1 or not self.iterations % 2
        ):
            raise ValueError(
                f"RowsAndColumns(iterations): expected an odd positive int (rows are normalised first and last) or "
                f"None, got {describe(self.iterations)}"
            )
        if not isinstance(self.strict, bool):
            raise TypeError(f"RowsAndColumns(strict): expected a bool, got {describe(self.strict)}")


# --- rules for the temperature ----------------------------------------------------------------------------------------


class TemperatureRule(Part, abstract=True):
    """A rule in place of a temperature, which gives each row its own."""


class Budget(TemperatureRule, abstract=True):
    """A rule in place of a temperature: each row gets the temperature at which a statistic of its plan is `budget`."""

    statistic: ClassVar[str]
    budget: Scalar

    def __post_init__(self) -> None:
        check_scalar(f"{type(self).__name__}(budget)", self.budget, "a finite number", finite)


class MatchKL(Budget):
    """Each row's temperature is the one at which KL(p || pi / sum(pi)) = budget.

    This is the constrained form of the problem: among all plans within `budget` nats of the prior, it takes the one of
    highest expected score. `budget` is a number or a tensor that broadcasts to [B, H, Tq, 1], and may require grad.

    A row that cannot meet its budget gets the nearest plan. For a budget of 0 or less this is the prior itself
    (temperature near infinity). For a budget above the KL of the hard plan, log(sum(pi) / sum of the best keys' pi), it
    is hard routing: the best key, or equally good keys in proportion to their priors. The plan of such a row is
    constant: only the values get a gradient. Mask keys with a bool mask or -inf: a key with a very low score is still
    admissible.
    """

    statistic: ClassVar[str] = "kl"


class MatchEntropy(Budget):
    """Each row's temperature is the one at which its entropy -sum(p log p) is `budget`; otherwise as `MatchKL`.

    The prior must be 0 or 1 (masks, windows, documents): under a weighted prior the entropy is not monotone in the
    temperature. A budget above log n (n admissible keys) gives the uniform plan. One below log m (m equally good best
    keys) gives hard routing.
    """

    statistic: ClassVar[str] = "entropy"


class ByKeys(TemperatureRule):
    """A rule in place of a temperature: 1/temperature = offset + slope * (log n)^power, with n the admissible keys of
    the row.

    n is counted after masks, documents and windows, and in a decoding step as in the whole sequence. `slope`, `offset`
    and `power` are numbers or tensors, per head [H] or broadcastable to [B, H, Tq, 1], and may require grad. In a row
    of one key (log n)^power is 0, without a gradient. Where 1/temperature is 0 the plan is the prior's own, so a slope
    may start at 0 (not under a softcap or a float attn_mask: there its gradient raises). A negative value raises.
    Scalable softmax is `ByKeys(slope)`.
    """

    slope: Scalar
    offset: Scalar = 0.0
    power: Scalar = 1.0

    def __post_init__(self) -> None:
        check_scalar("ByKeys(slope)", self.slope, "a finite number", finite)
        check_scalar("ByKeys(offset)", self.offset, "a finite number", finite)
        check_scalar("ByKeys(power)", self.power, "a positive, finite number", positive)


# --- the problem ------------------------------------------------------------------------------------------------------


class Transport(Part):
    """An attention: regulariser, prior, marginal and temperature. None means `KL()`, no prior, `Rows()`.

    `temperature` is a number or a tensor that broadcasts to [B, H, Tq, 1] (per head: [H, 1, 1]); 0 is hard routing.
    It may be a rule: `ByKeys(slope)` for any problem, and `MatchKL(c)`, `MatchEntropy(h)` for KL with plain rows.
    """

    regularizer: Regularizer | None = None
    _: dataclasses.KW_ONLY
    prior: Prior | None = None
    marginal: Marginal | None = None
    temperature: Scalar | TemperatureRule = 1.0

    def __post_init__(self) -> None:
        # Dynamo cannot build an object whose defaults are objects: None is replaced here.
        if self.regularizer is None:
            object.__setattr__(self, "regularizer", KL())
        if self.marginal is None:
            object.__setattr__(self, "marginal", Rows())
        for name, value, kind in (
            ("regularizer", self.regularizer, Regularizer),
            ("marginal", self.marginal, Marginal),
            ("prior", self.prior, (Prior, NoneType)),
        ):
            if not isinstance(value, kind):
                hint = f" (did you mean {value.__name__}()?)" if isinstance(value, type) else ""
                raise TypeError(f"Transport({name}): expected a {name}, got {describe(value)}{hint}")
        if isinstance(self.temperature, Budget):
            self._check_budget()
        elif not isinstance(self.temperature, TemperatureRule):
            check_scalar("Transport(temperature)", self.temperature, "a finite number >= 0", not_negative)

    def _check_budget(self) -> None:
        name = type(self.temperature).__name__
        if not isinstance(self.regularizer, KL) or self.marginal != Rows():
            raise ValueError(
                f"Transport(temperature): {name} expects KL() with plain Rows(), where the divergence rises with "
                f"1/temperature; got {self.regularizer!r}, {self.marginal!r}"
            )
        factors = () if self.prior is None else self.prior.leaves()
        if isinstance(self.temperature, MatchEntropy) and any(f.weighted for f in factors):
            raise ValueError(
                "Transport(temperature): MatchEntropy expects a prior of 0 and 1, where entropy rises with the "
                f"temperature; got {self.prior!r} (MatchKL takes any prior)"
            )

    def to_json(self, parameters: Mapping[str, Tensor] | None = None) -> str:
        """This problem as a text that `from_json` reads: its tensors by value, functions by module:name.

        A tensor that is one of `parameters` (a mapping such as `dict(model.named_parameters())`) is written by its
        name there. A function that no import finds (a lambda, a local function) raises."""
        return serialization.to_json(self, parameters)

    @classmethod
    def from_json(
        cls, text: str, parameters: Mapping[str, Tensor] | None = None, *, allow_imports: bool = False
    ) -> Transport:
        """The problem that `to_json` wrote. Tensors are on the CPU; those that required grad are `nn.Parameter`s.

        `parameters` gives the tensors that are written by name. Functions (of an `FDivergence`, say) and classes that
        are not regard's are imported only with `allow_imports=True`: an import runs the code of its module."""
        found = serialization.from_json(text, parameters, allow_imports)
        if not isinstance(found, cls):
            raise ValueError(f"problem: expected a {cls.__name__}, got {found!r}")
        return found

    def __repr__(self) -> str:
        shown = [repr(self.regularizer)]
        if self.prior is not None:
            shown.append(f"prior={self.prior!r}")
        if self.marginal != Rows():
            shown.append(f"marginal={self.marginal!r}")
        if isinstance(self.temperature, (Tensor, TemperatureRule)) or self.temperature != 1:
            shown.append(f"temperature={describe(self.temperature)}")
        return f"Transport({', '.join(shown)})"
