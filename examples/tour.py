"""A tour of regard in the terminal: solve, certify, measure, compare with PyTorch. Run it with `make tour`."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import ALiBi, AuxRequest, Causal, FermiDirac, Rows, Transport, Tsallis, Window

WIDTH = 100
began = time.perf_counter()
torch.manual_seed(0)
torch.set_num_threads(1)  # everything here is small


def section(title: str, text: str) -> None:
    print(f"\n── {title} " + "─" * (WIDTH - len(title) - 4) + f"\n{text}\n")


def cell(weight: float, size: int = 5) -> str:
    """A weight as a number and a bar; blank if it is exactly 0."""
    eighths = min(round(weight * size * 8), size * 8)
    bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    number = f"{weight:.3f}".lstrip("0")[:4] if weight else ""
    return f"{number:<4} {bar:<{size}} "


print(f"regard {regard.__version__}: attention, declared as a transport problem   (PyTorch {torch.__version__})")

# ----------------------------------------------------------------------------------------------------------------------
section(
    "1. One row of scores, many attentions",
    "Each is the optimum of one problem: a regularizer, a marginal, a temperature. Blank is exactly 0.",
)

scores = torch.tensor([2.8, 1.2, 0.5, 3.1])
problems = {
    "softmax": Transport(),
    "softmax, cold": Transport(temperature=0.5),
    "entmax": Transport(Tsallis(1.5)),
    "sparsemax": Transport(Tsallis(2.0)),
    "soft top-2": Transport(FermiDirac(), marginal=Rows(mass=2.0)),
    "with a sink": Transport(marginal=Rows(sink=3.0)),
    "hard routing": Transport(temperature=0.0),
}
print(f"{'scores':<14}" + "".join(f"{s:<11.1f}" for s in scores.tolist()) + "sum  problem")
for name, problem in problems.items():
    weights = regard.solve(scores, problem).weights
    cells = "".join(map(cell, weights.tolist()))
    print(f"{name:<14}{cells}{weights.sum():.2f} {repr(problem).removeprefix('Transport')}")

# ----------------------------------------------------------------------------------------------------------------------
section(
    "2. The proof comes with the plan",
    "A plan achieves at most the optimum, and a dual bounds it from above. If they agree, both are optimal.",
)

entmax = problems["entmax"]
ours = str(regard.solve(scores.double(), entmax).certificate()).splitlines()
theirs = str(regard.certify(scores, scores.softmax(-1), entmax)).splitlines()
print(f"{'weights of entmax, checked as entmax':<48}weights of softmax, checked as entmax")
for left, right in zip(ours[1:], theirs[1:], strict=True):
    print(f"{left:<48}{right}")

# ----------------------------------------------------------------------------------------------------------------------
section(
    "3. Statistics of a plan that is never stored",
    "They are computed together with the output. Three heads read the same 256 tokens, each sharper\n"
    "than the one before.",
)

tokens = torch.randn(1, 1, 256, 64)
q, k, v = (tokens * torch.tensor([0.2, 0.6, 1.0])[:, None, None] for _ in range(3))  # [B=1, H=3, T=256, D=64]
meanings = {
    "entropy": "diffuse (log of the number of keys) or peaked (0)",
    "kl": "distance of the rows from the uniform plan",
    "max_weight": "the weight of the largest key",
    "max_scores": "the largest score: it grows when training goes wrong",
    "score_variance": "how strongly entropy depends on the temperature",
    "first_key_mass": "mass on the first token: a sink, if large",
    "value_spread": "how much the values that are read differ",
}
request = AuxRequest(**dict.fromkeys(meanings, True))
_, aux = regard.attention(q, k, v, is_causal=True, return_aux=request)
print(f"{'mean over queries':<18}{'head 0':>8}{'head 1':>9}{'head 2':>9}")
for name, meaning in meanings.items():
    by_head = getattr(aux, name).mean((0, 2))
    print(f"{name:<18}" + "".join(f"{x:8.3f} " for x in by_head.tolist()) + f"   {meaning}")

# ----------------------------------------------------------------------------------------------------------------------
section(
    "4. The same as PyTorch, where PyTorch has it",
    "Largest difference from F.scaled_dot_product_attention in float32, [2, 4, 128, 32]. Backend native\n"
    "is the fused CPU engine, sdpa PyTorch itself, torch the definition; the three share no code.",
)


def difference(backend: str, **arguments) -> str:
    q, k, v = inputs = [torch.randn(2, 4, 128, 32, requires_grad=True) for _ in range(3)]
    attentions: list[Callable[..., Any]] = [partial(regard.attention, backend=backend), F.scaled_dot_product_attention]
    results = []
    for attention in attentions:
        out = attention(q, k, v, **arguments)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    out, *gradients = (float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))
    return f"out {out:.0e}  gradients {max(gradients):.0e}"


x = torch.randn(1, 1, 2, 2)
built = regard.select_backend(x, x, x).backend == "native"
backends = ["native", "sdpa", "torch"] if built else ["sdpa", "torch"]
print(" " * 17 + "".join(f"{backend:<28}" for backend in backends))
cases = {"full": {}, "is_causal": {"is_causal": True}, "float attn_mask": {"attn_mask": torch.randn(128, 128)}}
for name, arguments in cases.items():
    print(f"{name:<17}" + "".join(f"{difference(backend, **arguments):<28}" for backend in backends))

# ----------------------------------------------------------------------------------------------------------------------
section(
    "5. A drop-in for a whole model",
    "A small network that calls F.scaled_dot_product_attention learns in 30 steps to name the token two\n"
    "places back. The second and third runs replace that function by regard; the network is the same.",
)


class Block(nn.Module):
    """Embed, attend causally, predict."""

    def __init__(self, vocabulary: int = 16, width: int = 32, heads: int = 4, length: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2))


def train(attention: Callable[..., Any]) -> tuple[list[float], int]:
    """The losses, and the number of calls of the attention."""
    torch.manual_seed(1)
    model, losses = Block(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    with mock.patch.object(F, "scaled_dot_product_attention", mock.Mock(side_effect=attention)) as counted:
        for _ in range(30):
            tokens = torch.randint(16, (16, 32))
            loss = F.cross_entropy(model(tokens)[:, 2:].flatten(0, 1), tokens[:, :-2].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, counted.call_count


for name, attention in {
    "PyTorch's attention": F.scaled_dot_product_attention,
    "regard.attention": regard.attention,
    "regard.attention, Transport(Tsallis(1.5))": partial(regard.attention, problem=Transport(Tsallis(1.5))),
}.items():
    losses, calls = train(attention)
    print(f"{name:<44}loss {losses[0]:.4f} → {losses[-1]:.4f}   ({calls} calls)")

# ----------------------------------------------------------------------------------------------------------------------
section(
    "6. Which backend, and why not the other",
    "A named backend computes the call or raises; auto chooses one, and select_backend gives its reasons.",
)

questions = {
    "softmax, causal": {"is_causal": True},
    "a window and ALiBi": {"problem": Transport(prior=Causal() * Window(63) * ALiBi(torch.tensor([0.5, 0.25, 0.125])))},
    "entmax": {"problem": Transport(Tsallis(1.5))},
    "a learned sink": {"problem": Transport(marginal=Rows(sink=torch.zeros(3)))},
    "softmax and its entropy": {"return_aux": AuxRequest(entropy=True)},
}
for name, arguments in questions.items():
    choice = regard.select_backend(q, k, v, **arguments)
    because = "; ".join(f"{backend} {reason.partition(' (')[0]}" for backend, reason in choice.reasons.items())
    print(f"{name:<26}{choice.backend:<7}{because}".rstrip())

print(f"\nThat took {time.perf_counter() - began:.0f} s. Next: README.md, then docs/choose.md.")
