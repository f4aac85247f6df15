"""The problem of a model in its checkpoint: `save_pretrained` writes it, and a model without it is not loaded silently.

Transformers does not save the name of an attention implementation. A model that was trained with a registered problem
would be loaded with PyTorch's attention, and its results would be wrong without an error. So the configuration of such
a model gets an entry `regard_problem`: the registered name, the problem as text and as JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from ..features import Features
from ..problem import Transport
from .adoption import check_whole
from .factories import Factory
from .models import configurations, outermost_model

ENTRY = "regard_problem"  # of a model's configuration

Lookup = Callable[[str | None], "Transport | Features | Factory | None"]  # of a name, None if it is softmax


def entry_of(name: str, problem: Transport | Features | Factory) -> dict[str, Any]:
    """The entry for a registered problem. "problem" is None where JSON cannot express it: features, lambdas. The name
    of a factory's class or function is "factory"; its parameters are among the model's weights."""
    if isinstance(problem, Factory):
        return {"name": name, "text": f"the factory {problem.text}", "problem": None, "factory": problem.text}
    try:
        written = problem.to_json() if isinstance(problem, Transport) else None
    except (TypeError, ValueError):
        written = None
    return {"name": name, "text": repr(problem), "problem": written}


def required_name(config: Any, lookup: Lookup) -> str | None:
    """The registered name that a checkpoint with this configuration needs; None if it needs none. Raises if that name
    is not registered with the same problem."""
    names = {name for part in configurations(config) if (name := _required_by(part, lookup)) is not None}
    if len(names) > 1:
        raise ValueError(f"config: expected one problem for all parts of the model, got {sorted(names)}")
    return next(iter(names), None)


def _required_by(config: Any, lookup: Lookup) -> str | None:
    """`required_name` of one part."""
    entry = getattr(config, ENTRY, None)
    if entry is None:
        return None
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
        raise ValueError(f"config: expected the entry {ENTRY} with a name, got {entry!r}")
    found, written, factory = lookup(name), entry.get("problem"), entry.get("factory")
    now = {} if found is None else entry_of(name, found)
    if found is None or now.get("factory") != factory or (written is not None and written != now["problem"]):
        problem = factory or "its problem"
        other = ", or give `regard inspect` the option --problem" if factory is None else ""
        problem = problem if written is None else f"regard.Transport.from_json(config.{ENTRY}['problem'])"
        raise ValueError(
            f"attn_implementation: expected {name!r}, registered with {entry.get('text')}, because the checkpoint was "
            f"saved with it, got {'no such name' if found is None else repr(found)}; call regard.hf.register({name!r}, "
            f"{problem}) before you load the model{other}"
        )
    return name


def forget(config: Any) -> None:
    """Remove the entry from a configuration and its parts."""
    for part in configurations(config):
        part.__dict__.pop(ENTRY, None)


@functools.cache
def guard_checkpoints(original_name: Callable[[str | None], str | None], lookup: Lookup) -> None:
    """Make transformers write the entry when a model is saved, and raise if a model is loaded without its problem."""
    save, finish = PreTrainedModel.save_pretrained, PreTrainedModel.post_init

    @functools.wraps(save)
    def saved(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        forget(self.config)
        check_whole(self)
        for part in configurations(self.config):
            name = original_name(part._attn_implementation_internal)
            if name is not None and (problem := lookup(name)) is not None:
                setattr(part, ENTRY, entry_of(name, problem))
        try:
            return save(self, *args, **kwargs)
        finally:
            forget(self.config)

    @functools.wraps(finish)
    def finished(self: PreTrainedModel) -> None:
        if outermost_model(self) is self:
            for part in configurations(self.config):
                check_implementation(part, original_name, lookup)
            forget(self.config)
        finish(self)

    PreTrainedModel.save_pretrained = saved  # type: ignore[method-assign]
    PreTrainedModel.post_init = finished  # type: ignore[method-assign]


def check_implementation(config: Any, original_name: Callable[[str | None], str | None], lookup: Lookup) -> None:
    """Raise if a configuration has the entry and names another attention."""
    required, given = _required_by(config, lookup), original_name(config._attn_implementation_internal)
    if required is not None and given != required:
        raise ValueError(
            f"attn_implementation: expected {required!r}, because the checkpoint was saved with it, got {given!r}; "
            f"pass attn_implementation={required!r} (to load it with another one, remove {ENTRY} from config.json)"
        )
