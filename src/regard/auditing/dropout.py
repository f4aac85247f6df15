"""Whether dropout keeps the expected output: dropped weights are made up for by a factor 1/(1 - p)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .calls import solve_exactly
from .cases import Maker
from .conventions import SDPA
from .report import Finding

RUNS, RATE, SIGMAS = 8, 0.25, 6.0
_stock = F.scaled_dot_product_attention


def biased_dropout(function: Callable[..., Any], maker: Maker, device: torch.device) -> list[Finding]:
    """A finding if the mean over many dropout masks is not the output without dropout.

    All values are 1, so each entry of the output is the mass of its row, and many rows give one mean. Only a function
    that has an argument `dropout_p` is asked; one that ignores it is not a finding here."""
    if not _takes_dropout(function):
        return []
    case = maker.case("dropout", Tq=64)
    if "is_causal" not in maker.passes and case.is_causal:
        return []
    case.leaves["value"].fill_(1.0)
    leaves = {name: tensor.to(device, case.dtype) for name, tensor in case.leaves.items()}
    inputs = case.inputs(leaves)
    _, kwargs = SDPA().arguments(inputs)
    rows = []
    try:
        with torch.no_grad():
            for _ in range(RUNS):
                found = function(**kwargs, dropout_p=RATE)
                out, _ = SDPA().results(found, inputs)
                rows.append(out[..., 0].double().cpu())
    except Exception:  # a refusal
        return []
    with torch.no_grad():
        truth = solve_exactly(case.call(case.leaves))[0][..., 0]
    differences = torch.stack(rows) - truth
    spread = float(differences.std())
    if spread == 0:
        return []
    mean, error = float(differences.mean()), spread / math.sqrt(differences.numel())
    rounding = 4 * torch.finfo(case.dtype).eps
    if abs(mean) <= SIGMAS * error + rounding:
        return []
    message = "dropout changes the expected output: the kept weights are not divided by 1 - p"
    return [Finding("dropout-bias", "error", message, ("dropout",), "mean output", abs(mean), SIGMAS * error)]


def _takes_dropout(function: Callable[..., Any]) -> bool:
    if function is _stock:
        return True
    try:
        return "dropout_p" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
