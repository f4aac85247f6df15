"""Whole models, unchanged, with F.scaled_dot_product_attention replaced."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard


@pytest.fixture
def replaced(monkeypatch):
    """Replaces PyTorch's attention by regard.attention and counts the calls: one that is never made proves nothing."""

    class Counter:
        calls = 0

        def __call__(self, *args, **kwargs):
            self.calls += 1
            return regard.attention(*args, **kwargs, backend=self.backend)

        def install(self, backend):
            self.calls, self.backend = 0, backend
            monkeypatch.setattr(F, "scaled_dot_product_attention", self)

        def remove(self):
            monkeypatch.undo()

    return Counter()


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=50, width=32, heads=4, layers=3, length=24, dropout=0.0):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]]))


def loss_and_gradients(model, tokens):
    model.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["auto", "torch", "sdpa"])
def test_a_small_gpt(replaced, backend):
    torch.manual_seed(0)
    model, tokens = GPT().double(), torch.randint(50, (2, 24))
    expected, expected_gradients = loss_and_gradients(model, tokens)
    replaced.install(backend)
    loss, gradients = loss_and_gradients(model, tokens)
    assert replaced.calls == 3
    assert torch.allclose(loss, expected) and all(map(torch.allclose, gradients, expected_gradients))


@pytest.mark.parametrize(
    "masks", [{}, {"key_padding_mask": torch.arange(7).expand(3, 7) > torch.tensor([[6], [4], [2]])}]
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_multihead_attention_in_training_mode(replaced, backend, masks):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True).double().train()
    x = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)

    def run():
        out, _ = attention(x, x, x, need_weights=False, **masks)
        return out, *torch.autograd.grad(out.sin().sum(), (x, *attention.parameters()))

    expected = run()
    replaced.install(backend)
    got = run()
    assert replaced.calls == 1
    assert all(map(torch.allclose, got, expected))


def test_a_transformer_encoder_layer_in_training_mode(replaced):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double().train()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    expected = layer(x)
    replaced.install("torch")
    assert torch.allclose(layer(x), expected) and replaced.calls == 1


def test_replacement_does_not_recurse(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", regard.attention)
    q = torch.randn(1, 2, 5, 4)
    assert torch.allclose(F.scaled_dot_product_attention(q, q, q), (q @ q.mT / 2).softmax(-1) @ q, atol=1e-6)
    assert torch.allclose(regard.attention(q, q, q, backend="sdpa"), (q @ q.mT / 2).softmax(-1) @ q, atol=1e-6)


class Before(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class After(nn.Module):  # a second class, because TorchScript compiles a class once
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torchscript_compiles_before_the_replacement_only(monkeypatch):
    x = torch.randn(1, 2, 5, 4)
    expected, scripted = Before()(x), torch.jit.script(Before())
    monkeypatch.setattr(F, "scaled_dot_product_attention", regard.attention)
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="keyword-only"):
        torch.jit.script(After())
    assert torch.allclose(scripted(x), expected)
    assert "aten::scaled_dot_product_attention" in str(
        scripted.graph
    )  # the compiled code still calls PyTorch's attention


def test_a_replaced_model_exports(monkeypatch):
    model, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 7, 16)
    expected = model(x, x, x, need_weights=False)[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", regard.attention)
    exported = torch.export.export(model, (x, x, x), {"need_weights": False})
    assert any("regard" in str(node.target) for node in exported.graph.nodes)
    assert torch.allclose(exported.module()(x, x, x, need_weights=False)[0], expected, atol=1e-6)


def test_a_replaced_model_compiles(monkeypatch):
    model, tokens = GPT(layers=1), torch.randint(50, (2, 24))
    expected = model(tokens)
    monkeypatch.setattr(F, "scaled_dot_product_attention", regard.attention)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(tokens), expected, atol=1e-5)
    torch._dynamo.reset()


def test_training_with_dropout_learns(replaced):
    """A few steps on a repeating sequence, with regard's dropout mask."""
    torch.manual_seed(0)
    replaced.install("auto")
    model, tokens = GPT(vocabulary=8, dropout=0.1), torch.arange(24).remainder(8).expand(4, 24)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss, _ = loss_and_gradients(model, tokens)
        optimizer.step()
        losses.append(float(loss))
    assert replaced.calls == 90 and losses[-1] < 0.5 < losses[0]
