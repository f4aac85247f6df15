"""A training run whose attention collapses, and the same run with an entropy floor: python examples/entropy_floor.py

A small character model without the scale 1/sqrt(d), at a high learning rate. Scores grow, rows become one-hot, queries
and keys receive almost no gradient, and the loss hardly falls. `regard.nn.entropy_floor` adds a term to the loss: the
amount by which the rows' entropies are below a share of log n. The entropies come from the same fused pass as the
output.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.nn import entropy_floor

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 2, 32, 16
STATISTICS = regard.AuxRequest(entropy=True, support=True, max_scores=True)


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        nn.init.normal_(self.qkv.weight, std=WIDTH**-0.5)  # queries and keys of variance 1

    def forward(self, x: Tensor) -> tuple[Tensor, regard.AuxOutput]:
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)  # [B, H, T, D]
        out, aux = regard.attention(q, k, v, is_causal=True, scale=self.scale, return_aux=STATISTICS)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x)), aux


class Model(nn.Module):
    def __init__(self, characters: int, scale: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(scale) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[regard.AuxOutput]]:
        x, seen = self.token(tokens) + self.place.weight, []
        for block in self.blocks:
            x, aux = block(x)
            seen.append(aux)
        return self.head(self.norm(x)), seen


@dataclass
class Record:
    """One step of a run."""

    loss: float  # of the next character, without the floor's term
    least: float  # H / log n of the head with the smallest mean over its rows
    mean: float  # H / log n over all heads
    score: float  # the largest score


def train(floor: float | None, scale: float, steps: int, *, weight: float = 1.0, seed: int = 0) -> list[Record]:
    """Train a new model; `floor` is a share of log n."""
    text = resources.files("regard.inspection").joinpath("sample.txt").read_text()
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])
    torch.manual_seed(seed)
    model = Model(len(alphabet), scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    records = []
    for _ in range(steps):
        begin = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        batch = tokens[begin + torch.arange(LENGTH + 1)]
        logits, seen = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        total = loss
        if floor is not None:
            missing = [entropy_floor(aux.entropy, floor, keys=aux.support, relative=True) for aux in seen]
            total = loss + weight * torch.stack(missing).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        shares = torch.stack([(aux.entropy / aux.support.log())[..., 1:].mean((0, 2)) for aux in seen]).detach()
        score = max(float(aux.max_scores.max()) for aux in seen)
        records.append(Record(float(loss.detach()), float(shares.min()), float(shares.mean()), score))
    return records


def mean(records: list[Record], name: str) -> float:
    return sum(getattr(record, name) for record in records) / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--floor", type=float, default=0.3, help="share of log n (default 0.3)")
    steps, floor = (arguments := parser.parse_args()).steps, arguments.floor
    runs = {
        "no scale": train(None, 1.0, steps),
        f"no scale, floor {floor:g}": train(floor, 1.0, steps),
        "scaled": train(None, 1 / math.sqrt(WIDTH // HEADS), steps),
    }
    print("Means over the steps up to the given one; H / log n is 1 for a uniform row and 0 for a one-hot row.\n")
    columns = (("loss", "loss", 2), ("H/log n", "mean", 2), ("least", "least", 2), ("score", "score", 0))
    print(" " * 5 + "".join(f"   {name:>32}" for name in runs))
    print(" step" + "".join("   " + "".join(f"{title:>8}" for title, _, _ in columns) for _ in runs))
    every = max(1, steps // 8)
    for stop in range(every, steps + 1, every):
        cells = []
        for records in runs.values():
            window = records[stop - every : stop]
            cells.append("   " + "".join(f"{mean(window, name):>8.{digits}f}" for _, name, digits in columns))
        print(f"{stop:>5}" + "".join(cells))


if __name__ == "__main__":
    main()
