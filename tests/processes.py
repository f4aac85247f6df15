"""Run by torchrun: two processes train on half of each batch and monitor it together.

torchrun --nproc-per-node 2 tests/processes.py FOLDER KIND
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from regard import Monitor
from training import llama, loss_of, reader, tokens

STEPS = 5


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of unequal length, so that the halves have unequal weight."""
    mask = torch.ones(6, 10, dtype=torch.long)
    mask[:3, 4 + step :] = 0
    return tokens(6, 10, seed=step), mask


def train(folder: Path, kind: str, rank: int = 0, world: int = 1) -> int:
    """The number of collectives that monitoring took."""
    torch.set_num_threads(1)
    model = reader() if kind == "reader" else llama()
    inner = model
    if world > 1:
        model = DistributedDataParallel(model)
    monitor = Monitor(model, every=2, path=folder / f"{kind}-{world}.jsonl")
    collectives = []
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather", "barrier")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*args, **kwargs):
            collectives.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
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
    for name, original in originals.items():
        setattr(dist, name, original)
    assert set(collectives) <= {"all_reduce"}
    assert loss_of(inner, *batch(0)).isfinite()
    return len(collectives)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    for kind in sys.argv[2:]:
        (folder / f"{kind}-{rank}.count").write_text(str(train(folder, kind, rank, dist.get_world_size())))
    dist.destroy_process_group()
