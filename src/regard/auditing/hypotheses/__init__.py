"""The wrong attentions that people have shipped, each as a small change of a `Call`.

A hypothesis explains a wrong result if the attention with its change gives that result to rounding, output and
gradients alike. Several changes may have one name: they are the same mistake in other words. A change that does not
apply to a call (no sink to drop) returns None.
"""

from .base import Change, Hypothesis
from .masks import MASKS
from .positions import POSITIONS
from .results import RESULTS
from .scores import SCORES
from .sinks import SINKS

HYPOTHESES: tuple[Hypothesis, ...] = (*SINKS, *MASKS, *POSITIONS, *SCORES, *RESULTS)

__all__ = ["HYPOTHESES", "Change", "Hypothesis"]
