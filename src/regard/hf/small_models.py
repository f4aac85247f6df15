"""A small model with random weights from the configuration of a large one, for an audit of its attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from .loading import locate

# How large the sizes of a configuration stay. Names that a configuration does not have are left out.
_LIMITS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "vocab_size": 256,
    "sliding_window": 12,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def small_model(config: Any, seed: int = 0) -> Any:
    """A model with the attention of this configuration: the same kinds of layers, windows, sinks and softcaps, with few
    and narrow layers and random weights that spread the scores."""
    config = copy.deepcopy(config)
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        kept = list(dict.fromkeys(kinds))
        kept = kept if len(kept) > 1 else kept * 2
        config.layer_types = kept
    for name, limit in _LIMITS.items():
        given = getattr(config, name, None)
        if isinstance(given, int) and not isinstance(given, bool) and given > limit:
            setattr(config, name, limit)
    if kinds:
        config.num_hidden_layers = len(config.layer_types)
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads:
        config.num_key_value_heads = max(1, config.num_attention_heads * kv_heads // heads)
    if isinstance(heads, int) and hasattr(config, "hidden_size"):
        config.hidden_size = config.num_attention_heads * (getattr(config, "head_dim", None) or 16)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        given = getattr(config, name, None)
        if given is not None:
            setattr(config, name, None if name == "eos_token_id" else 0)
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.3
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _class_of(config)._from_config(config).eval()


def has_weights(name: str) -> bool:
    """Whether a checkpoint has weights. A folder with a config.json alone has none."""
    where, options = locate(name)
    folder = Path(where)
    if options or not folder.is_dir():
        return True
    return any(any(folder.glob(f"*.{ending}")) for ending in ("safetensors", "bin", "gguf", "index.json"))


def load_configuration(name: str) -> Any:
    """The configuration of a checkpoint."""
    where, options = locate(name)
    try:
        return transformers.AutoConfig.from_pretrained(where, **options)
    except Exception as error:  # transformers raises many types of exceptions
        raise ValueError(f"model: the configuration of {name!r} cannot be read: {error}") from error


def _class_of(config: Any) -> Any:
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"model: expected a configuration of one of transformers' models, got {type(config).__name__}")
