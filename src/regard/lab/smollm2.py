"""SmolLM2, a language model of 135 million parameters, as the subject of an experiment, and texts as its tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import hf
from .corpus import Corpus
from .experiment import Config, LabError

NAME = "SmolLM2"
OWN = "own"  # the experiment's own small model


def models(config: Config) -> list[str]:
    """The models that the configuration names: one of the two, or both."""
    found = config["models"]
    if not found or not all(name in (OWN, NAME) for name in found) or len(set(found)) < len(found):
        raise LabError(f'--set models: expected "{OWN}", "{NAME}" or both, got {found}')
    return found


@functools.cache
def loaded() -> tuple[Any, Any]:
    """The model and its tokenizer. Loading them takes longer than a small cell, so the cells of a process share them;
    every cell restores what it changes."""
    try:
        model, tokenizer = hf.load("smollm2")
    except (ImportError, OSError, ValueError) as problem:
        raise LabError(f'models: {NAME} cannot be loaded ({problem}); --set models=["{OWN}"] leaves it out') from None
    return model, tokenizer


@functools.lru_cache(maxsize=2)
def _tokens(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def pieces(
    corpus: Corpus, tokenizer: Any, count: int, length: int, generator: torch.Generator, part: str = "train"
) -> Tensor:
    """Random pieces of the training part (or of "validation") as the model's tokens, [count, length + 1]."""
    tokens = _tokens(tokenizer, corpus.text[: corpus.split] if part == "train" else corpus.text[corpus.split :])
    if len(tokens) <= length:
        raise LabError(f"length: expected less than the {len(tokens)} tokens of {corpus.name} ({part}), got {length}")
    begins = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    return tokens[begins + torch.arange(length + 1)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
