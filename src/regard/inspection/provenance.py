"""Where a record comes from: the model, the versions and the machine."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.declared import Declared, HasProblem
from ..problem import Transport

LONGEST = 2**16  # characters of a problem in a record


def of_run(model: nn.Module) -> dict[str, Any]:
    """What the records of an inspection and of a training run both contain."""
    config = getattr(model, "config", None)
    return {
        "model": type(model).__name__,
        "checkpoint": str(getattr(config, "_name_or_path", "") or ""),
        "parameters": sum(p.numel() for p in model.parameters()),
        "regard": metadata.version("regard"),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def of_inspection(model: nn.Module, problems: dict[str, str]) -> dict[str, Any]:
    """What the record of an inspection contains. `problems`: by the name of the attention implementation."""
    config = getattr(model, "config", None)
    return of_run(model) | {
        "model_type": str(getattr(config, "model_type", "") or ""),
        "heads": getattr(config, "num_attention_heads", None),
        "kv_heads": getattr(config, "num_key_value_heads", None),
        "weights": _weights_digest(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "problems": problems,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def declared_in(model: nn.Module) -> dict[str, str | None]:
    """The problems of the modules of `regard.nn` in a model, by the modules' names, as JSON. Parameters are written by
    their names. None where a problem is built in every forward call, or where JSON cannot express it."""
    parameters, found = dict(model.named_parameters()), {}
    for name, module in model.named_modules():
        problem = module.problem if isinstance(module, HasProblem) else None
        if isinstance(problem, Transport | Declared):
            found[name] = as_json(problem() if isinstance(problem, Declared) else problem, parameters)
        elif problem is not None:
            found[name] = None
    return found


def as_json(problem: object, parameters: Mapping[str, Tensor] | None = None) -> str | None:
    """The problem of a model as JSON; None where JSON cannot express it or would be long (see "problems" then)."""
    if problem is not None and not isinstance(problem, Transport):
        return None
    try:
        text = (problem or Transport()).to_json(parameters)
    except (TypeError, ValueError):
        return None
    return text if len(text) <= LONGEST else None


def _weights_digest(model: nn.Module) -> str:
    """A digest of the first numbers of every parameter: it tells checkpoints of one architecture apart."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{list(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()
