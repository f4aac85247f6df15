"""One training on several processes, as `torchrun` and `accelerate launch` start them, and the device of each.

Under `torchrun` every process runs the same command. Each takes its share of every batch, gradients are averaged (DDP),
and only the first process writes files. Without `torchrun` there is one process, and these functions cost nothing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn import Transformer


def requested_processes() -> int:
    """The number of processes that the environment names: 1 without `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_named(name: str) -> torch.device:
    """The device of this process: "cpu", "cuda" (the GPU of its local rank), "cuda:n", or "auto" (a GPU if any)."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"expected auto, cpu, cuda or cuda:n, got {name!r}")
    if colon and requested_processes() > 1:
        raise ValueError(f"expected cuda under torchrun, where each process takes a GPU of its own, got {name!r}")
    index = int(number) if colon else int(os.environ.get("LOCAL_RANK", "0"))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= there:
        raise ValueError(f"expected at least {index + 1} CUDA GPUs for {name!r}, found {there}")
    return torch.device("cuda", index)


def join(device: torch.device) -> None:
    """Join the processes that the environment names, if there are several."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if requested_processes() > 1 and not dist.is_initialized():
        # Messages and sums of a few numbers are exchanged on the CPU, gradients on the model's device.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def leave() -> None:
    if several():
        gc.collect()  # a model that is still alive would keep the group, whose threads must end before Python does
        dist.destroy_process_group()


def several() -> bool:
    """Whether this is one of several processes."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if several() else 0


def processes() -> int:
    return dist.get_world_size() if several() else 1


def from_first(value: Any) -> Any:
    """The value that the first process passed, in all processes."""
    if not several():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def wait_for_all() -> None:
    """Return when the first process has arrived here: what it wrote before can be read."""
    from_first(None)


def mean(*numbers: float) -> tuple[float, ...]:
    """The mean of each number over the processes."""
    if not several():
        return numbers
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return tuple((total / processes()).tolist())


def share(batch: Tensor) -> Tensor:
    """The rows of a batch that belong to this process."""
    if batch.shape[0] % processes():
        raise ValueError(f"batch: expected a multiple of the {processes()} processes, got {batch.shape[0]}")
    return batch.chunk(processes())[rank()]


class _Loss(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


def loss_of(model: Transformer) -> Callable[[Tensor, Tensor], Tensor]:
    """The model's loss; its backward pass averages the gradients over the processes."""
    if not several():
        return model.loss
    return nn.parallel.DistributedDataParallel(_Loss(model))
