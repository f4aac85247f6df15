"""One training on several processes, as `torchrun` and `accelerate launch` start them, and the device of each.

Under `torchrun` every process runs the same command: each takes its share of every batch, gradients are averaged (DDP),
and the first process alone writes. Without it, all of this is one process and costs nothing.
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


def asked() -> int:
    """The number of processes that the environment names: 1 without `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_named(name: str) -> torch.device:
    """The device of this process: "cpu", "cuda" (the GPU of its local rank), "cuda:n", or "auto", a GPU if there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"expected auto, cpu, cuda or cuda:n, got {name!r}")
    if colon and asked() > 1:
        raise ValueError(f"expected cuda under torchrun, where each process takes a GPU of its own, got {name!r}")
    index = int(number) if colon else int(os.environ.get("LOCAL_RANK", "0"))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= there:
        raise ValueError(f"expected at least {index + 1} CUDA GPUs for {name!r}, found {there}")
    return torch.device("cuda", index)


def join(device: torch.device) -> None:
    """Join the processes that the environment names, if it does."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if asked() > 1 and not dist.is_initialized():
        # What is agreed upon, and sums of a few numbers, are on the CPU; gradients are where the model is.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def leave() -> None:
    if several():
        gc.collect()  # a model that is left over would hold the group, whose threads must not outlive Python
        dist.destroy_process_group()


def several() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if several() else 0


def processes() -> int:
    return dist.get_world_size() if several() else 1


def agree(value: Any) -> Any:
    """What the first process says, in all of them."""
    if not several():
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0, device=torch.device("cpu"))
    return said[0]


def mean(*numbers: float) -> tuple[float, ...]:
    """The mean over the processes, of each."""
    if not several():
        return numbers
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return tuple((total / processes()).tolist())


def share(batch: Tensor) -> Tensor:
    """This process' rows of a batch."""
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
    """The model's loss, whose backward pass averages the gradients over the processes."""
    if not several():
        return model.loss
    return nn.parallel.DistributedDataParallel(_Loss(model))
