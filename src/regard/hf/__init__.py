"""Hugging Face transformers on regard: after `regard.hf.register()` every model accepts `attn_implementation="regard"`.

Transformers calls an attention function (module, query, key, value, mask, ...) and, before it, a mask function. The
files of this package, in the order in which a call passes through them:

    registry.py      `register`: puts both functions into transformers under a name
    models.py        which modules of a model use transformers' attention interface; errors for models that do not
    masks.py         the mask function: `StructuredMask`, a mask in O(Tq + Tk) memory
    biases.py        `RelativeBias`: the position bias of T5 as a table over distances
    calls.py         the attention function: turns its arguments into a call of the public `regard.attention`
    factories.py     problems that see the model: the context of a call, and the hooks that find it
    memory.py        what such a problem remembers for each key, beside a model's cache
    adoption.py      how a model takes up such a problem: its module becomes a part of the model
    checkpoints.py   the registered problem of a model in its checkpoint
    lengths.py       errors for registered problems that fit one length only
    parameters.py    `Retrofit`: the parameters that `retrofit` adds to one attention
    positions.py     which queries are padding, and the position of each query and key in its sequence
    interception.py  `Interception`: passes every attention call of a model to a listener while a block runs
    inputs.py        what `inspect` and `retrofit` accept as inputs, as arguments of a model
    entropy.py       `entropies`: the differentiable entropies of a training step, on an interception
    clipping.py      `qk_clip_`: clips the query and key weights of a whole model
    retrofitting.py  `retrofit`, `unretrofit`: adds parameters to a trained model, and removes them
    hub.py           whether a model can be fetched by its name
    small_models.py  a small model with random weights, from a configuration
    auditing.py      `audit`: every attention of a model, under each implementation, against the definition
    loading.py       `load`, `from_pretrained`: models from files, folders and names

This package is below `regard.inspection` and imports nothing of it. Transformers is loaded when a name of this package
is first used, not by `import regard.hf`.
"""

# ruff: noqa: F401 - the names are public
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; `_NAMES` says the same at run time
    from .adoption import problem_parameters
    from .auditing import LayerFinding, audit
    from .biases import RelativeBias
    from .calls import HARMLESS, as_call, as_features_call, attend, attention_function, counted_keys
    from .clipping import qk_clip_
    from .entropy import Entropies, Entropy, entropies
    from .factories import Factory
    from .inputs import batches, evaluation_mode, prepared
    from .interception import AttentionCall, Interception, Listener
    from .loading import EMBEDDED, from_pretrained, load, locate
    from .masks import StructuredMask, make_mask
    from .models import attentions, check, configurations, configurations_of
    from .parameters import RECORD, Retrofit
    from .positions import Place
    from .registry import install, problem_of, register, remove
    from .retrofitting import retrofit, retrofitted_parameters, unretrofit
    from .small_models import has_weights, load_configuration, small_model

_NAMES = {
    ".adoption": ("problem_parameters",),
    ".auditing": ("LayerFinding", "audit"),
    ".biases": ("RelativeBias",),
    ".calls": ("HARMLESS", "as_call", "as_features_call", "attend", "attention_function", "counted_keys"),
    ".clipping": ("qk_clip_",),
    ".entropy": ("Entropies", "Entropy", "entropies"),
    ".factories": ("Factory",),
    ".inputs": ("batches", "evaluation_mode", "prepared"),
    ".interception": ("AttentionCall", "Interception", "Listener"),
    ".loading": ("EMBEDDED", "from_pretrained", "load", "locate"),
    ".masks": ("StructuredMask", "make_mask"),
    ".models": ("attentions", "check", "configurations", "configurations_of"),
    ".parameters": ("RECORD", "Retrofit"),
    ".positions": ("Place",),
    ".registry": ("install", "problem_of", "register", "remove"),
    ".retrofitting": ("retrofit", "retrofitted_parameters", "unretrofit"),
    ".small_models": ("has_weights", "load_configuration", "small_model"),
    # A public alias: the callback is built on `Monitor` and belongs to `regard.inspection`, above this package.
    "..inspection.callback": ("MonitorCallback",),
}
_FILE_OF = {name: file for file, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Loads the file of a public name, and with it transformers, when the name is first used."""
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_FILE_OF[name], __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise ImportError("regard.hf needs transformers: pip install 'regard[hf]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILE_OF})
