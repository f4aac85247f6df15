"""Problems that are built for each call of a module: what they are told about it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard import Causal, Decay, Transport
from regard.nn import Context, MultiheadAttention, Transformer


class Gates(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.gate = nn.Linear(width, heads)

    def forward(self, context):
        gates = context.remember("gates", F.logsigmoid(self.gate(context.hidden_states)).mT)
        return Transport(prior=Decay(gates))


def contexts(call, **options):
    """The contexts of a call of an attention."""
    found = []
    attention = MultiheadAttention(16, 2, batch_first=True, problem=lambda context: found.append(context), **options)
    call(attention)
    return found


def test_positions_and_lengths():
    x = torch.randn(2, 5, 16)
    (context,) = contexts(lambda attention: attention(x, x, x))
    assert isinstance(context, Context) and context.layer == 0 and context.heads == 2 and not context.is_cross
    assert context.hidden_states is x and isinstance(context.module, MultiheadAttention)
    assert context.query_positions.tolist() == context.key_positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert context.lengths.tolist() == [5, 5]
    ones = torch.ones(2, 3, 5)
    assert context.remember("x", ones) is ones


@pytest.mark.parametrize("floating", [False, True])
def test_padding_is_not_counted(floating):
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[True, True, False, False, False], [False, False, False, False, True]])
    given = torch.zeros(2, 5).masked_fill(padding, -torch.inf) if floating else padding
    (context,) = contexts(lambda attention: attention(x, x, x, key_padding_mask=given))
    assert context.query_positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    assert context.key_positions.tolist() == context.query_positions.tolist() and context.lengths.tolist() == [3, 4]


def test_keys_of_another_sequence():
    x, y = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True]])
    (context,) = contexts(lambda attention: attention(x, y, y, key_padding_mask=padding))
    assert context.is_cross and context.query_positions.tolist() == [[0, 1, 2]] * 2
    assert context.key_positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 3]] and context.lengths.tolist() == [5, 4]
    with pytest.raises(ValueError, match=r"remember\('x'\): expected keys of the sequence that the hidden states"):
        context.remember("x", torch.ones(2, 3))
    (appended,) = contexts(lambda attention: attention(x, x, x), add_bias_kv=True)
    assert appended.is_cross and appended.key_positions.shape == (2, 4)


def test_wrong_tensors_raise():
    x = torch.randn(2, 5, 16)
    (context,) = contexts(lambda attention: attention(x, x, x))
    for wrong in (torch.ones(5), torch.ones(2, 4), torch.ones(3, 5), 1.0):
        with pytest.raises(ValueError, match=r"remember\('x'\): expected a tensor \[B, ..., Tq\] with B=2 .* Tq=5"):
            context.remember("x", wrong)
    with pytest.raises(TypeError, match=r"remember\(name\): expected a str, got"):
        context.remember(0, torch.ones(2, 5))


def test_a_wrong_result_raises():
    x = torch.randn(1, 3, 16)
    attention = MultiheadAttention(16, 2, batch_first=True, problem=lambda context: Causal())
    with pytest.raises(TypeError, match="expected a callable that returns a Transport or None, got"):
        attention(x, x, x)


def test_gates_equal_a_mask_of_their_sums():
    x = torch.randn(2, 6, 16)
    gates = Gates()
    attention = MultiheadAttention(16, 2, batch_first=True, problem=gates)
    sums = F.logsigmoid(gates.gate(x)).mT.cumsum(-1)
    mask = sums[..., :, None] - sums[..., None, :]
    mask = mask.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    stock = nn.MultiheadAttention(16, 2, batch_first=True)
    stock.load_state_dict({k: v for k, v in attention.state_dict().items() if "problem" not in k})
    expected, weights = stock(x, x, x, attn_mask=mask.flatten(0, 1), average_attn_weights=False)
    found, plan = attention(x, x, x, average_attn_weights=False)
    assert torch.allclose(found, expected, atol=1e-6) and torch.allclose(plan, weights, atol=1e-6)


# --- Transformer ------------------------------------------------------------------------------------------------------


def model(problem):
    torch.manual_seed(0)
    return Transformer(11, 8, layers=3, heads=2, width=16, problem=problem)


def test_a_module_is_shared_by_the_layers():
    gates = Gates()
    shared = model(gates)
    assert all(block.attention.problem is gates for block in shared.blocks)
    assert sum(p is gates.gate.weight for p in shared.parameters()) == 1
    own = model(lambda layer: Gates())
    assert len({id(block.attention.problem) for block in own.blocks}) == 3
    tokens = torch.randint(11, (2, 9))
    for one in (shared, own):
        one.loss(tokens).backward()
        assert all((p.grad != 0).any() for name, p in one.named_parameters() if "problem" in name)


def test_layers_have_numbers():
    seen = []

    def build(context):
        seen.append((context.layer, context.lengths.tolist()))

    model(build)(torch.randint(11, (2, 8)))
    assert seen == [(0, [8, 8]), (1, [8, 8]), (2, [8, 8])]
    assert [p is None for p in model(build).problems(torch.randint(11, (1, 4)))] == [True] * 3


def test_a_function_of_the_layers_number_is_one_still():
    numbers = []
    model(lambda layer: numbers.append(layer))
    assert numbers == [0, 1, 2]


def test_a_compiled_module():
    x = torch.randn(2, 6, 16)
    attention = MultiheadAttention(16, 2, batch_first=True, problem=Gates())
    found = torch.compile(attention, backend="aot_eager", fullgraph=True)(x, x, x, need_weights=False)[0]
    assert torch.allclose(found, attention(x, x, x, need_weights=False)[0], atol=1e-6)
