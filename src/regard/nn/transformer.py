"""A small transformer for experiments: attention and an MLP in turn are added to the residual stream.

    h ← h + O(attention(W_Q h', W_K h', W_V h')),   h ← h + MLP(h'),   h' = LayerNorm(h)

The attention is any `Transport`, or any function of queries, keys and values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._files import replacing
from .._validate import describe
from ..features import Features
from ..operator import attention as solve_and_average
from ..problem import Transport
from .declared import HasProblem, Problem, built, check_problem, is_factory

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # query, key, value, is_causal -> output
Init = float | Literal["pytorch", "unit"]


class SelfAttention(HasProblem):
    """Multi-head self-attention over the residual stream, by a problem or by a function of queries, keys and values."""

    def __init__(
        self,
        width: int,
        heads: int,
        problem: Problem,
        attention: Attention | None,
        qk_norm: bool,
        dropout: float,
        causal: bool,
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        # QK-norm: queries and keys have length √D times a learned gain, so scores can only grow with the gain.
        self.norms = nn.ModuleList(nn.RMSNorm(width // heads) for _ in range(2)) if qk_norm else None
        self.problem, self.attention = problem, attention

    def project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the stream [B, T, E]: [B, H, T, D] each."""
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.into(h).chunk(3, 2))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        return q, k, v

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.project(h)
        if self.attention is not None:
            o = self.attention(q, k, v, self.causal)
        else:
            problem = self.problem_of(self.heads, h)
            o = solve_and_average(q, k, v, None, self.dropout if self.training else 0.0, self.causal, problem=problem)
        return self.out(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: adds attention and an MLP to the stream."""

    def __init__(self, attention: SelfAttention, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.dropout(self.attention(self.norms[0](h)))
        return h + self.dropout(self.mlp(self.norms[1](h)))


class Transformer(nn.Module):
    """Predicts the next token at every position: tokens [B, T] -> logits [B, T, vocabulary].

    `problem` is a `Transport`, a module of `regard.features`, a module that builds a `Transport` in every forward call,
    or a function of the layer's number, which returns one of these (or another callable that builds a Transport). If
    what builds it has an argument, it receives a `Context` with the layer's `hidden_states` and number: forget gates
    are computed so. A function whose argument is named `context` is not a function of the layer's number: it builds the
    problem of every layer. A module is shared by the layers, unless a function of the layer's number makes one for
    each.
    Instead of a problem, `attention` may be a function or module that is called with (query, key, value, is_causal); of
    a module, every layer has its own copy. An `nn.Parameter` in a `Transport` is a parameter of the model. Layers with
    the same Transport share its parameters; a function of the layer's number can give each layer its own.
    Attention is causal unless `causal` is False: then positions read in both directions, and `loss` needs targets.

    `positions` is "learned", or None for problems whose prior depends on the distance. `init` is the standard deviation
    of all matrices (0.02; those that write to the stream get 1/√(2 layers) of it, as in GPT-2), "unit" (variance
    1/fan-in, so that queries and keys of a normalized stream have variance 1) or "pytorch" (the default of `nn.Linear`:
    a third of that variance). Embeddings always start with 0.02. They are also the output matrix, unless `tied` is
    False.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        positions: Literal["learned"] | None = "learned",
        tied: bool = True,
        init: Init = 0.02,
        qk_norm: bool = False,
        causal: bool = True,
        problem: Problem | Features | Callable[[int], Problem | Features] = None,
        attention: Attention | None = None,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "length": length, "layers": layers, "heads": heads, "width": width}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected a positive int, got {describe(size)}")
        if width % heads:
            raise ValueError(f"width: expected a multiple of heads={heads}, got {width}")
        if positions not in ("learned", None):
            raise ValueError(f'positions: expected "learned" or None, got {describe(positions)}')
        check_problem("problem", problem)
        if isinstance(problem, Features) and attention is None:
            problem, attention = None, problem
        if attention is not None and not callable(attention):
            raise TypeError(f"attention: expected a function or module, got {describe(attention)}")
        if attention is not None and problem is not None:
            raise ValueError("attention: expected None together with a problem, got both")
        if not isinstance(causal, bool):
            raise TypeError(f"causal: expected a bool, got {describe(causal)}")
        self.length, self.causal = length, causal
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        blocks = []
        for layer in range(layers):
            own: Any = problem(layer) if callable(problem) and not is_factory(problem) else problem  # type: ignore[call-arg]
            check_problem(f"problem({layer})", own)
            attend = copy.deepcopy(attention) if isinstance(attention, nn.Module) else attention
            if isinstance(own, Features):
                own, attend = None, own
            if attend is not None and dropout:
                raise ValueError(f"dropout: expected 0 with `attention` or features, which have none, got {dropout}")
            blocks.append(Block(SelfAttention(width, heads, own, attend, qk_norm, dropout, causal), width, dropout))
            blocks[-1].attention.layer = layer
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        self._initialise(init)

    def _initialise(self, init: Init) -> None:
        if init not in ("pytorch", "unit") and not (isinstance(init, (float, int)) and init > 0):
            raise ValueError(f'init: expected a positive number, "pytorch" or "unit", got {describe(init)}')
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if init == "pytorch":
            return
        writes = [m for b in self._each() for m in (b.attention.out, b.mlp[2])]
        for module in [m for b in self._each() for m in (b.attention.into, b.attention.out, b.mlp[0], b.mlp[2])]:
            assert isinstance(module, nn.Linear)
            std = 1 / math.sqrt(module.in_features) if isinstance(init, str) else float(init)
            nn.init.normal_(module.weight, std=std / math.sqrt(len(writes)) if module in writes else std)
            nn.init.zeros_(module.bias)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)

    def _each(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _stream(self, tokens: Tensor) -> Tensor:
        """The input of the first layer, [B, T, E]."""
        T = tokens.shape[1]
        h = self.token(tokens)
        if self.position is not None:
            if self.length < T:
                raise ValueError(f"tokens: expected at most length={self.length} positions, got {T}")
            h = h + self.position(torch.arange(T, device=tokens.device))
        return self.dropout(h)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self._stream(tokens)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return F.linear(h, self.token.weight) if self.head is None else self.head(h)

    def loss(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats of every token of [B, T + 1] but the first, given the tokens before it.

        With targets [B, T], the targets are predicted from tokens [B, T]; a negative target is ignored.
        """
        if targets is None:
            if not self.causal:
                raise ValueError("targets: expected a tensor for a model that is not causal, which sees the next token")
            tokens, targets = tokens[:, :-1], tokens[:, 1:]
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten().clamp(min=-1), ignore_index=-1)

    def _inputs(self, tokens: Tensor) -> Iterator[tuple[SelfAttention, Tensor]]:
        """Each layer's attention and its input, [B, T, E]."""
        h = self._stream(tokens)
        for block in self._each():
            yield block.attention, block.norms[0](h)
            h = block(h)

    @torch.no_grad()
    def heads(self, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of each layer, [B, H, T, D], from which statistics of its plan can be computed."""
        return [attention.project(h) for attention, h in self._inputs(tokens)]

    def problems(self, tokens: Tensor | None = None) -> list[Transport | None]:
        """The current problem of each layer (None: softmax, or `attention`). Problems that depend on the hidden states
        are those of these tokens."""
        if tokens is None:
            return [built(block.attention.problem) for block in self._each()]
        with torch.no_grad():
            return [attention.problem_of(attention.heads, h) for attention, h in self._inputs(tokens)]

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Append `count` tokens to [B, T], drawn from softmax(logits / temperature); 0 takes the most likely one.

        The model sees the last `length` tokens. A CPU generator gives the same draws for a model on any device.
        """
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature: expected a finite number >= 0, got {describe(temperature)}")
        if not self.causal:
            raise ValueError("causal: expected True to generate (otherwise there is no prediction of the next token)")
        for _ in range(count):
            logits = self(tokens[:, -self.length :])[:, -1]
            if temperature == 0:
                drawn = logits.argmax(-1, keepdim=True)
            else:
                chances = (logits / temperature).softmax(-1)
                where = chances.device if generator is None else generator.device
                drawn = torch.multinomial(chances.to(where), 1, generator=generator).to(tokens.device)
            tokens = torch.cat([tokens, drawn], 1)
        return tokens

    def save(self, path: str | Path) -> None:
        """Write the weights as safetensors; a shared parameter is written once."""
        from safetensors.torch import save_model

        with replacing(path) as part:
            save_model(self, str(part))

    def load(self, path: str | Path) -> None:
        """Read weights that a model of the same shape wrote; the names of the parameters must match exactly."""
        from safetensors.torch import load_model

        load_model(self, path)
