"""`Calibration`: the result of `calibrate`, and the text that `print` shows of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._display import html_table
from .._validate import describe

# What the text says of each special case: of a temperature, and of a key's multiplier.
_SPECIAL = {
    "separable": "every target has the highest score of its row: the likelihood grows with beta and has no maximum"
    " (temperature 0)",
    "anticorrelated": "targets score no better than the mean of their rows: the best beta >= 0 is 0 (temperature inf)",
    "uninformative": "no row has scores that differ: every beta is equally likely, it stays 1",
}
_SPECIAL_KEYS = {
    "separable": "the likelihood has no maximum: it grows as the multiplier goes to inf or -inf (a ridge prevents it)",
    "uninformative": "its score is 0 in every row, or it is the only key: every multiplier is equally likely, it"
    " stays 1",
}


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What `calibrate` fitted: tensors of shape [] ("global"), [H] ("head") or [Tk] ("key"); float64, on the CPU.

    beta                    inverse temperatures; for "key" the multipliers, to be passed as `key_scale`
    residual                the certificate, |E_target[s] - E_model[s]| less the gradient of the ridge: 0 at the maximum
    separable               the maximum is at infinity: beta is inf ("key": inf or -inf)
    anticorrelated          the maximum is below 0: beta is 0, the best value that is a temperature (never for "key")
    uninformative           the likelihood does not depend on beta: it stays 1
    log_likelihood          mean log-likelihood of a row at beta (its supremum, if separable); for "key" of shape []
    log_likelihood_before   the same at beta = 1, for the scores as they were given
    converged               whether every residual that can be 0 is 0 (those of anticorrelated cannot)
    iterations              number of Newton steps
    rows                    number of observations used
    """

    per: str
    beta: Tensor
    residual: Tensor
    separable: Tensor
    anticorrelated: Tensor
    uninformative: Tensor
    log_likelihood: Tensor
    log_likelihood_before: Tensor
    converged: bool
    iterations: int
    rows: int

    @property
    def temperature(self) -> Tensor:
        """1/beta: 0 where separable, inf where anticorrelated. Per head, use `Transport(temperature=t.view(H, 1, 1))`.
        (For "key" this is not a temperature of the plan: pass `beta` as `key_scale` instead.)"""
        return 1 / self.beta

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {name:<16}{text}" for name, text in self._lines())])

    def __repr__(self) -> str:
        outcome = f"converged={self.converged}, iterations={self.iterations}, rows={self.rows}"
        return f"Calibration(per={self.per!r}, beta={describe(self.beta)}, {outcome})"

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._lines())

    def _title(self) -> str:
        header = f"Calibration per {self.per}" if self.per != "global" else "Calibration, one temperature"
        return f"{header} from {_count(self.rows, 'row')}"

    def _lines(self) -> list[tuple[str, str]]:
        keys = self.per == "key"
        lines = []
        if self.beta.numel():
            lines.append(("multiplier", _span(self.beta)) if keys else ("temperature", _span(self.temperature)))
            before, after = _span(self.log_likelihood_before), _span(self.log_likelihood)
            lines.append(("log-likelihood", f"{before} -> {after} per row"))
            checked = self.residual[~self.anticorrelated]
            if checked.numel():
                lines.append(("moments match", f"within {float(checked.max()):.1e}"))
        steps = _count(self.iterations, "step")
        lines.append(("converged", f"{'in' if self.converged else 'NO, after'} {steps}"))
        for name, reason in (_SPECIAL_KEYS if keys else _SPECIAL).items():
            found = getattr(self, name).reshape(-1).nonzero().flatten().tolist()
            if found:
                first = ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
                where = f"{self.per} {first}: " if self.beta.numel() > 1 else ""
                lines.append((name, f"{where}{reason}"))
        return lines


def _span(x: Tensor) -> str:
    low, high = float(x.min()), float(x.max())
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
