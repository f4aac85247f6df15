"""`audit`: runs a function on the cases, compares, and diagnoses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from .._validate import describe
from ..problem import RowsAndColumns, Transport
from .cases import Case, Maker
from .conventions import SDPA, Convention, Inexpressible, Varlen, convention_for, taken_arguments
from .declared import with_alignment
from .diagnosis import FINITE_EXPOSED, UNEXPLAINED, Diagnosis, Failure, diagnose
from .dropout import biased_dropout
from .outcomes import Outcome, WrongShape, allowances, definition, disagreements, run_function
from .report import Audit, Finding, Refusal

Progress = Callable[[str, int, int], None]  # (what is done now, number, of how many)
REPEATED = ("plain", "across blocks")  # cases that run twice, as do the first failures
REPEATED_FAILURES = 4
WARNINGS = frozenset(("output-dtype", "lse-sink"))  # what may be meant so
_NOTES = {
    "inputs-changed": "the function changes its inputs in place",
    "output-dtype": "the output has another dtype than the query",
}


def audit(
    function: Callable[..., Any],
    problem: Transport | None = None,
    *,
    convention: str | Callable[..., Any] = "sdpa",
    softcap: float | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    gradients: bool = True,
    seed: int = 0,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Audit:
    """Is this function the attention that it is declared to be?

    The function runs on inputs that expose mistakes. Its output, its lse if it returns one, and the gradients of what
    it takes are compared with the definition of `problem` (None: softmax) in float64. Where they differ by more than
    the arithmetic of the dtype explains, the audit finds which wrong attention it is.

    `convention` says how the function is called. "sdpa": by keyword, as PyTorch's scaled_dot_product_attention. A
    causal prior is passed as is_causal=True and a sink as sink= [H]; everything else in the problem, and `softcap`, is
    what the function does by itself. "flex", "varlen" and "transformers" are the conventions of FlexAttention, of
    functions on packed sequences and of Hugging Face transformers. A function that maps a case (`Inputs`) to
    (args, kwargs) is a convention, too.

    `dtype` None is float32, with some cases in half precision. What the function raises on is a refusal, not a finding.
    `allow` names findings that are known and do not count. The result is the same for the same `seed`.
    """
    if not callable(function):
        raise TypeError(f"function: expected a function, got {describe(function)}")
    if problem is not None and not isinstance(problem, Transport):
        raise TypeError(f"problem: expected a Transport or None, got {describe(problem)}")
    if problem is not None and isinstance(problem.marginal, RowsAndColumns):
        raise ValueError(
            f"problem: expected one-sided rows, got {problem.marginal!r}: a plan with both marginals is found by "
            f"iterations to a tolerance, not to rounding (certificates judge it)"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point dtype or None, got {describe(dtype)}")
    called, place = convention_for(convention, function), torch.device(device)
    declared = with_alignment(Transport() if problem is None else problem, called.alignment)
    taken = taken_arguments(function, called)
    maker = Maker(declared, softcap, dtype or torch.float32, seed, taken, called.alignment or "top_left")
    cases = list(maker.all(half=dtype is None, ragged=isinstance(called, Varlen)))
    run = _Run(function, called, place, gradients, taken)
    with torch.random.fork_rng(devices=[]):
        for number, case in enumerate(cases):
            if progress is not None:
                progress(case.name, number, len(cases))
            torch.manual_seed(seed)
            run.case(case)
        if progress is not None:
            progress("diagnosis", len(cases), len(cases))
        diagnoses = diagnose(run.failures)
        if isinstance(called, SDPA):
            torch.manual_seed(seed)
            run.direct += biased_dropout(function, maker, place)
    if any(finding.name == "nondeterministic" and finding.severity == "error" for finding in run.direct):
        # What differs from call to call is not explained by a fixed mistake.
        diagnoses = [one for one in diagnoses if one.name not in ("precision", *UNEXPLAINED, *FINITE_EXPOSED)]
    findings = [*_findings(diagnoses, allow), *_direct(run.direct, allow)]
    if not run.ran:
        findings.append(_nothing_ran(run.refusals, allow))
    return Audit(
        function=name_of(function),
        problem=repr(declared) if softcap is None else f"{declared!r}, softcap={softcap}",
        convention=called.name,
        dtype=str(maker.dtype).removeprefix("torch."),
        device=str(place),
        seed=seed,
        gradients=run.compared_gradients,
        cases=tuple(run.ran),
        findings=tuple(sorted(findings, key=lambda f: (f.accepted, f.severity != "error", -len(f.cases)))),
        refusals=tuple(run.refusals),
    )


class _Run:
    """The cases of one audit as they run."""

    def __init__(
        self,
        function: Callable[..., Any],
        convention: Convention,
        device: torch.device,
        gradients: bool,
        taken: frozenset[str],
    ) -> None:
        self.function, self.convention, self.device = function, convention, device
        self.gradients, self.taken = gradients, taken
        self.ran: list[str] = []
        self.failures: list[Failure] = []
        self.refusals: list[Refusal] = []
        self.direct: list[Finding] = []  # that need no diagnosis
        self.compared_gradients = False
        self.without_gradients: list[str] = []

    def case(self, case: Case) -> None:
        missing = self._missing_argument(case)
        if missing is not None:
            self.refusals.append(Refusal(case.name, f"the function takes no argument {missing}"))
            return
        try:
            outcome = self._call(case)
        except Inexpressible as reason:
            self.refusals.append(Refusal(case.name, str(reason)))
            return
        except WrongShape as error:
            self.ran.append(case.name)
            self.direct.append(Finding("output-shape", "error", str(error), (case.name,)))
            return
        except Exception as error:  # whatever a function raises, it refuses the case
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.refusals.append(Refusal(case.name, f"{type(error).__name__}: {text}"))
            return
        self.ran.append(case.name)
        if outcome.refusal is not None:
            self.refusals.append(Refusal(f"{case.name}, gradients", outcome.refusal))
            self._give_up_gradients(outcome.refusal)
        self.compared_gradients |= outcome.has_gradients
        for name in outcome.notes:
            severity = "warning" if name in WARNINGS else "error"
            self.direct.append(Finding(name, severity, _NOTES[name], (case.name,)))
        failed = self._compare(case, outcome)
        if case.name in REPEATED or (failed and len(self.failures) <= REPEATED_FAILURES):
            self._repeat(case, outcome)

    def _give_up_gradients(self, reason: str) -> None:
        """A function that raises the same whenever a gradient is asked for is not asked again."""
        self.without_gradients.append(reason)
        if not self.compared_gradients and self.without_gradients == [reason] * 3:
            self.gradients = False
            self.refusals.append(Refusal("all further cases, gradients", reason))

    def _call(self, case: Case) -> Outcome:
        gradients = self.gradients and not case.forward_only
        return run_function(self.function, self.convention, case, self.device, gradients)

    def _missing_argument(self, case: Case) -> str | None:
        inputs = case.inputs(case.leaves)
        needed = {
            "attn_mask": inputs.attn_mask is not None,
            "scale": inputs.scale is not None,
            "enable_gqa": inputs.enable_gqa,
            "is_causal": inputs.is_causal,
        }
        return next((name for name, wanted in needed.items() if wanted and name not in self.taken), None)

    def _compare(self, case: Case, outcome: Outcome) -> bool:
        """Compare with the definition; True if it failed."""
        truth = definition(case, outcome)
        assert truth is not None
        allowed = allowances(case, outcome, truth)
        wrong = disagreements(outcome.parts, truth, allowed)
        if wrong and case.also_right is not None:
            other = definition(case, outcome, case.also_right)
            assert other is not None
            if not disagreements(outcome.parts, other, allowances(case, outcome, other, case.also_right)):
                return False
        if wrong:
            self.failures.append(Failure(case, outcome, truth, allowed, wrong))
        return bool(wrong)

    def _repeat(self, case: Case, outcome: Outcome) -> None:
        """The same call again: its results must be the same numbers."""
        again = self._call(case)
        zero = {name: torch.zeros_like(part) for name, part in outcome.parts.items()}
        changed = disagreements(again.parts, outcome.parts, zero)
        if not changed:
            return
        truth = definition(case, outcome)
        assert truth is not None
        beyond = disagreements(again.parts, outcome.parts, allowances(case, outcome, truth))
        worst = max(beyond or changed, key=lambda one: one.error)
        message = "two calls with the same inputs give different results"
        if not beyond:
            message += ", within rounding: sums are added in another order"
        severity = "error" if beyond else "warning"
        allowed = worst.allowed if beyond else 0.0
        self.direct.append(
            Finding("nondeterministic", severity, message, (case.name,), worst.part, worst.error, allowed)
        )


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function for a report."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__


def _findings(diagnoses: list[Diagnosis], allow: Collection[str]) -> list[Finding]:
    found = []
    for one in diagnoses:
        failures = sorted(one.failures, key=lambda f: -f.worst.error / f.worst.allowed)
        worst = failures[0].worst
        found.append(
            Finding(
                name=one.name,
                severity="warning" if one.name in WARNINGS else "error",
                message=one.sentence,
                cases=tuple(failure.case.name for failure in failures),
                part=worst.part,
                error=worst.error,
                allowed=worst.allowed,
                accepted=one.name in allow,
            )
        )
    return found


def _direct(found: list[Finding], allow: Collection[str]) -> list[Finding]:
    """One finding for each name, with all of its cases."""
    merged = []
    for name in dict.fromkeys(finding.name for finding in found):
        mine = [finding for finding in found if finding.name == name]
        worst = next((f for f in mine if f.severity == "error"), mine[0])
        cases = tuple(dict.fromkeys((*worst.cases, *(case for f in mine for case in f.cases))))
        merged.append(
            Finding(name, worst.severity, worst.message, cases, worst.part, worst.error, worst.allowed, name in allow)
        )
    return merged


def _nothing_ran(refusals: list[Refusal], allow: Collection[str]) -> Finding:
    first = f"; the first: {refusals[0]}" if refusals else ""
    message = f"the function refused all {len(refusals)} cases, so nothing was audited{first}"
    return Finding("nothing-ran", "error", message, (), accepted="nothing-ran" in allow)
