"""For other people's test suites: `assert_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .auditing import audit
from .problem import Transport

__all__ = ["assert_attention"]


def assert_attention(function: Callable[..., Any], problem: Transport | None = None, **options: Any) -> None:
    """Assert that a function computes the attention of `problem` (None: softmax), to rounding, with its gradients.

    The options are those of `regard.audit`. A failure lists the findings: the name of each mistake, what it is, and
    the case that shows it.
    """
    __tracebackhide__ = True
    found = audit(function, problem, **options)
    assert found.passed, f"\n{found}"
