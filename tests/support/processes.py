"""A program for torchrun: each of two processes trains on half of each batch, and both are monitored together.

torchrun --nproc-per-node 2 tests/support/processes.py FOLDER KIND

KIND is "reader" or "llama"; a third argument "late" gives the processes unequal layers.
"""

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard import Monitor
from support.training import Attention, llama, loss_of, reader, tokens

STEPS = 5


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of different lengths, so that the halves have different numbers of rows."""
    mask = torch.ones(6, 10, dtype=torch.long)
    mask[:3, 4 + step :] = 0
    return tokens(6, 10, seed=step), mask


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives that the block calls, in order."""
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather", "barrier")
    names += ("all_gather_object", "broadcast_object_list", "gather_object")
    originals = {name: getattr(dist, name) for name in names}
    collectives = []

    def counting(name):
        def call(*args, **kwargs):
            collectives.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield collectives
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def train(folder: Path, kind: str, rank: int = 0, world: int = 1) -> list[str]:
    """Returns the collectives that the monitor called."""
    torch.set_num_threads(1)
    model = reader() if kind == "reader" else llama()
    inner = model
    if world > 1:
        model = DistributedDataParallel(model)
    monitor = Monitor(model, every=2, path=folder / f"{kind}-{world}.jsonl")
    with counted() as collectives:
        for step in range(STEPS):
            ids, mask = batch(step)
            mine = slice(rank * 6 // world, (rank + 1) * 6 // world)
            with monitor(step):
                if type(inner).__name__ == "Reader":
                    loss = model(ids[mine], attention_mask=mask[mine]).square().mean()
                else:
                    loss = model(input_ids=ids[mine], attention_mask=mask[mine], labels=ids[mine]).loss
                loss.backward()
            monitor.log(1.0)
    monitor.close()
    assert loss_of(inner, *batch(0)).isfinite()
    return collectives


class Stack(nn.Module):
    """Calls the first `depth` attentions, or the last -`depth` if it is negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(16, 4) for _ in range(2))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        for layer in self.layers[:depth] if depth > 0 else self.layers[depth:]:
            x = x + layer(x)
        return x


# The depth of each process in each step (0: no call). In the first step the second process sees no layer, and in the
# third the first process does not see the new layer.
DEPTHS = [(1, 0), (1, 1), (0, 2), (2, 2)]


def train_unequally(folder: Path, rank: int = 0, world: int = 1) -> list[str]:
    torch.set_num_threads(1)
    model = Stack()
    monitor = Monitor(model, every=1, path=folder / f"late-{world}.jsonl")
    with counted() as collectives:
        for step, depths in enumerate(DEPTHS):
            with monitor(step):
                for process, depth in enumerate(depths):
                    if depth and (world == 1 or process == rank):
                        x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(10 * step + process))
                        model(x, depth).sum().backward()
            monitor.log(1.0)
    monitor.close()
    if world > 1:
        other = Monitor(model, every=1, path=folder / "unlike.jsonl")
        try:
            with other(0):
                model(torch.ones(1, 3, 16), 1 if rank == 0 else -1)
        except RuntimeError as error:
            collectives.append(str(error))
    return collectives


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    for kind in sys.argv[2:]:
        given = (rank, dist.get_world_size())
        taken = train_unequally(folder, *given) if kind == "late" else train(folder, kind, *given)
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(taken))
    gc.collect()  # a group is destroyed with its last reference; its threads must not outlive Python
    dist.destroy_process_group()
