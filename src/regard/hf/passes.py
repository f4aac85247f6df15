"""Which forward passes are repetitions."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether a backward pass is under way. A forward pass then is one that activation checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1
