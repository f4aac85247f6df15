"""Small models in training: a plain one whose attention calls `regard.attention`, a Llama of transformers, and the
metrics of their heads by definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard

WORDS = 20


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        self.seen = q.detach(), k.detach()  # for `by_definition`
        p = self.dropout if self.training else 0.0
        mixed = regard.attention(q, k, v, None if mask is None else mask[:, None, None], p, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """Predicts the next token. `repeat`: how to checkpoint activations ("reentrant", "not reentrant", None)."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 2, words: int = WORDS, dropout: float = 0.0):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(64, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(Attention(width, heads, dropout) for _ in range(layers))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)
        self.repeat: str | None = None

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        mask = None if attention_mask is None else attention_mask.bool()
        for norm, layer, feed in zip(self.norms, self.layers, self.feeds, strict=True):
            y = norm(x)
            if self.repeat is None:
                x = x + layer(y, mask)
            else:
                x = x + checkpoint(layer, y, mask, use_reentrant=self.repeat == "reentrant")
            x = x + feed(x)
        return self.head(x)


def reader(seed: int = 0, **options: Any) -> Reader:
    """With weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model = Reader(**options)
    with torch.no_grad():
        for layer in model.layers:
            layer.mix.weight.mul_(6)
    return model


def llama(**changes: Any) -> Any:
    import transformers as hf  # not at the top: the processes of torchrun start faster

    torch.manual_seed(0)
    configuration = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    configuration |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    configuration |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**configuration | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4 if parameter.dim() > 1 else 0.5)
    return model.train()


def tokens(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(3, WORDS, (B, T), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    if isinstance(model, Reader):
        return F.cross_entropy(model(ids, attention_mask=mask)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def by_definition(q: Tensor, k: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """{name: [H]} of one layer from the matrix of its scores, over the rows of real tokens. mask [B, T]."""
    T = q.shape[2]
    scores = (q.double() @ k.double().mT) / math.sqrt(q.shape[-1])
    allowed = (torch.ones(T, T).tril().bool() & mask[:, None])[:, None]
    p = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    n = allowed.sum(-1).double().expand_as(entropy)
    real = mask[:, None].expand_as(entropy)

    def mean(values: Tensor, counted: Tensor = real) -> Tensor:
        return torch.where(counted, values, 0.0).sum((0, 2)) / counted.sum((0, 2))

    top = scores.masked_fill(~allowed | ~real[..., None], -math.inf)
    return {
        "entropy": mean(entropy),
        "entropy_norm": mean(entropy / n.clamp(min=2).log(), real & (n > 1)),
        "max_weight": mean(p.amax(-1)),
        "max_score": top.amax((0, 2, 3)),
        "first_key_mass": mean(p[..., 0]),
        "score_variance": mean((p * torch.where(p > 0, scores, 0.0) ** 2).sum(-1) - (p * scores).sum(-1) ** 2),
    }


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def samples(path: str | Path) -> list[dict[str, Any]]:
    return [line for line in lines(path) if "step" in line and "event" not in line]


def events(path: str | Path) -> list[dict[str, Any]]:
    return [line for line in lines(path) if "event" in line]


def train(model: nn.Module, monitor: Any, steps: int, fast: float = 0.0, at: int = -1, rate: float = 3e-3, B: int = 8):
    """Adam on a repeating text; from step `at` on with the learning rate `fast`."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, WORDS, (200,), generator=generator).repeat(3)
    for step in range(steps):
        if step == at:
            optimizer.param_groups[0]["lr"] = fast
        starts = torch.randint(len(text) - 24, (B,), generator=generator)
        ids = torch.stack([text[s : s + 24] for s in starts.tolist()])
        with monitor(step):
            loss = loss_of(model, ids)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        monitor.log(loss)
