"""REGARD_ENGINE=path tests another build of the native engine than the one installed (`make sanitize` does)."""

import importlib.util
import os
import sys

import torch  # noqa: F401  # first: its OpenMP runtime is the one that the engine finds

if path := os.environ.get("REGARD_ENGINE"):
    spec = importlib.util.spec_from_file_location("regard._native", path)
    assert spec is not None and spec.loader is not None
    sys.modules["regard._native"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
