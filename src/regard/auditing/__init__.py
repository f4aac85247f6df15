"""`audit`: is a function the attention that it is declared to be?

declared.py      what a problem says about the inputs: sizes, alignment, tensors with a gradient
calls.py         `Call`: one attention; the definition in float64, and plain operations in the function's dtype
cases.py         the inputs that expose mistakes
conventions.py   how a function is called, and what it returns
outcomes.py      the results of a case by the function and by the definition; how far apart they may be
hypotheses/      the wrong attentions that people have shipped, each as a change of a `Call`
diagnosis.py     which of them explains the cases that failed
dropout.py       whether dropout is unbiased
report.py        `Audit`, `Finding`
run.py           `audit`
"""

from .cases import Inputs
from .report import Audit, Finding, Refusal
from .run import audit

__all__ = ["Audit", "Finding", "Inputs", "Refusal", "audit"]
