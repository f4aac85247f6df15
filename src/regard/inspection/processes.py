"""`ProcessGroup`: the layers of a sampled step, summed over the processes of a distributed run."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .layers import Layer
from .metrics import Layout, layout_of, over_positions


class ProcessGroup:
    """The processes that train one model. `group` as in torch.distributed (None: all processes)."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.model, self.group = model, group
        self._agreed: dict[int, Layout] = {}  # the layers that all processes know, by number

    def rank_and_size(self) -> tuple[int, int]:
        """The rank of this process and the number of processes."""
        if not dist.is_available() or not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    def is_first(self) -> bool:
        """Whether this process writes. Before the group is initialized, torchrun's RANK decides."""
        if dist.is_available() and dist.is_initialized():
            return self.rank_and_size()[0] == 0
        return os.environ.get("RANK", "0") == "0"

    def forget(self) -> None:
        """Agree on the layers again in the next sampled step."""
        self._agreed = {}

    def summed(self, layers: list[Layer], known: dict[int, Layout]) -> list[Layer]:
        """The layers of all processes, over all positions: one all-reduce of sums, counts and maxima.

        The size of the all-reduce follows from the layers that all processes have agreed on; a process that did not see
        one of them contributes zeros. If a process saw another layer (each does in the first sampled step), the
        processes agree again and repeat the sum. `known`: layers of earlier steps.
        """
        layers = [over_positions(layer) for layer in layers]
        if self.rank_and_size()[1] == 1:
            return layers
        if not self._agreed:
            self._agree(layers, known)
        while True:
            if not self._agreed:
                return []
            has_new = any(self._agreed.get(layer.index) != layout_of(layer) for layer in layers)
            joined, any_new = self._all_reduce(layers, has_new)
            if not any_new:
                return joined
            self._agree(layers, known)

    def _agree(self, layers: list[Layer], known: dict[int, Layout]) -> None:
        """Exchange the layers that each process has seen. The union is agreed."""
        rank, world = self.rank_and_size()
        mine = known | {layer.index: layout_of(layer) for layer in layers}
        of_all: list[Any] = [None] * world
        dist.all_gather_object(of_all, mine, group=self.group)
        agreed: dict[int, Layout] = {}
        for other, theirs in enumerate(of_all):
            for index, layout in theirs.items():
                if agreed.setdefault(index, layout) != layout:  # raises in every process, so that none waits
                    raise RuntimeError(
                        f"Monitor: expected every process to see the same layers, but layer {index} is "
                        f"{agreed[index]} in one and {layout} in process {other}; this is process {rank}"
                    )
        self._agreed = dict(sorted(agreed.items()))

    def _all_reduce(self, layers: list[Layer], has_new: bool) -> tuple[list[Layer], bool]:
        """The agreed layers over all processes, and whether any process has a layer that is not among them.

        Sums are added. Each process writes its maxima into a row of its own, so that one all-reduce is enough.
        """
        rank, world = self.rank_and_size()
        seen = {layer.index: layer for layer in layers}
        joined = []
        for index, (name, heads, channels) in self._agreed.items():
            known = index in seen and layout_of(seen[index]) == (name, heads, channels)
            joined.append(seen[index].copy() if known else over_positions(Layer.empty(name, index, heads, channels)))
        sums = [torch.tensor([float(has_new)], dtype=torch.float64)]
        sums += [part.flatten() for layer in joined for part in (layer.sums, layer.counts, layer.rows)]
        maxima = torch.cat([layer.maxima.flatten() for layer in joined])
        by_process = torch.zeros(world, len(maxima), dtype=torch.float64)
        by_process[rank] = maxima
        packed = torch.cat([*sums, by_process.flatten()]).to(self._device())
        dist.all_reduce(packed, group=self.group)
        packed = packed.cpu()
        maxima = packed[len(packed) - by_process.numel() :].view(world, -1).amax(0)
        at, at_max = 1, 0
        for layer in joined:
            for part in ("sums", "counts", "rows"):
                old = getattr(layer, part)
                setattr(layer, part, packed[at : at + old.numel()].view_as(old))
                at += old.numel()
            size = layer.maxima.numel()
            layer.maxima = maxima[at_max : at_max + size].view_as(layer.maxima)
            at_max += size
        return joined, bool(packed[0])

    def _device(self) -> torch.device:
        """The device on which the group exchanges tensors."""
        if "nccl" not in str(dist.get_backend(self.group)):
            return torch.device("cpu")
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))
