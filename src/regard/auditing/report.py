"""`Audit` and `Finding`: what an audit found, as a text, a table and JSON."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from .._display import html_table

VERSION = 1  # of the JSON
SEVERITIES = ("error", "warning")


@dataclass(frozen=True)
class Finding:
    """One mistake: its name, what it is in one sentence, and the cases that show it."""

    name: str
    severity: str  # "error", or "warning" for what may be meant so
    message: str
    cases: tuple[str, ...]  # the worst first
    part: str = ""  # what is wrong in the worst case: output, lse, gradient of ...
    error: float = math.nan  # there
    allowed: float = math.nan  # what arithmetic in this dtype may lose there
    accepted: bool = False  # named in `allow`: it does not count

    @property
    def case(self) -> str:
        """The case that shows it most clearly."""
        return self.cases[0] if self.cases else ""

    def size(self) -> str:
        """The error against what is allowed."""
        if math.isnan(self.error):
            return ""
        wrong = "not finite" if math.isinf(self.error) else f"error {self.error:.2g}"
        return f"{self.part}: {wrong}, allowed {self.allowed:.2g}"

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class Refusal:
    """A case that the function does not take."""

    case: str
    message: str

    def __str__(self) -> str:
        return f"{self.case}: {self.message}"


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of an audit. `passed`: at least one case ran, and no finding counts as an error."""

    function: str
    problem: str
    convention: str
    dtype: str
    device: str
    seed: int
    gradients: bool  # whether gradients were compared in some case
    cases: tuple[str, ...]  # that ran
    findings: tuple[Finding, ...]
    refusals: tuple[Refusal, ...]

    @property
    def passed(self) -> bool:
        return not any(finding.severity == "error" and not finding.accepted for finding in self.findings)

    def __repr__(self) -> str:
        names = ", ".join(finding.name for finding in self.findings)
        state = "passed" if self.passed else "failed"
        return f"Audit({self.function}: {state}, {len(self.cases)} cases{f', findings: {names}' if names else ''})"

    def __str__(self) -> str:
        lines = [self.title(), *(f"  {note}" for note in self.notes())]
        for finding in self.findings:
            mark = "accepted" if finding.accepted else finding.severity
            lines.append(f"\n{mark}: {finding.name}")
            lines += textwrap.wrap(finding.message, 100, initial_indent="  ", subsequent_indent="  ")
            if finding.cases:
                more = f" and {len(finding.cases) - 1} more" if len(finding.cases) > 1 else ""
                lines.append(f"  case: {finding.case}{more}")
            if finding.size():
                lines.append(f"  {finding.size()}")
        return "\n".join(lines)

    def title(self) -> str:
        return f"{self.function} {'passed' if self.passed else 'FAILED'}: {self.verdict()}"

    def verdict(self) -> str:
        errors = sum(finding.severity == "error" and not finding.accepted for finding in self.findings)
        counted = f"{errors} error{'' if errors == 1 else 's'}" if errors else "no errors"
        return f"{counted} in {len(self.cases)} cases, {len(self.refusals)} refused"

    def notes(self) -> list[str]:
        """What was compared with what."""
        against = f"against {self.problem} in float64, convention {self.convention}, {self.dtype} on {self.device}"
        return [against + ("" if self.gradients else "; gradients were not compared")]

    def to_dict(self) -> dict[str, Any]:
        """As plain data. Numbers that JSON has no words for are None."""
        found: dict[str, Any] = {"version": VERSION, "passed": self.passed, **asdict(self)}
        for finding in found["findings"]:
            for name, value in finding.items():
                if isinstance(value, float) and not math.isfinite(value):
                    finding[name] = None
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __rich__(self) -> Any:
        """A table for rich's `print`."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        colours = {"error": "bold red", "warning": "yellow", "accepted": "dim"}
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        table.add_column("finding", no_wrap=True)
        table.add_column("diagnosis")
        table.add_column("clearest case")
        for finding in self.findings:
            mark = "accepted" if finding.accepted else finding.severity
            more = f"\n({len(finding.cases)} cases)" if len(finding.cases) > 1 else ""
            where = "\n".join(text for text in (finding.case, finding.size()) if text) + more
            table.add_row(Text(finding.name, style=colours[mark]), Text(finding.message), Text(where))
        style = "bold green" if self.passed else "bold red"
        parts: list[Any] = [Text(self.title(), style=style), *(Text(note, style="dim") for note in self.notes())]
        return Group(*parts, Text(""), table) if self.findings else Group(*parts)

    def _repr_html_(self) -> str:
        rows = [(f.name, f.severity, f.message, f.case, f.size()) for f in self.findings]
        header = ("finding", "severity", "diagnosis", "clearest case", "size") if rows else ()
        return html_table(self.title(), rows, header, self.notes())
