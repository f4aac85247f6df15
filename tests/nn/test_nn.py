"""`regard.nn`: MultiheadAttention against PyTorch's, learned temperatures, the transformer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import ALiBi, Causal, RowsAndColumns, Transport, Tsallis
from regard.features import LinearAttention, Performer
from regard.nn import MultiheadAttention, Temperature, Transformer
from regard.nn.transformer import Block
from support.gpt import SMALL, leak, small, tokens
from support.multihead import FEATURES, B, E, H, Learned, S, T, both, forbidden, gradients, inputs, padding

CALLS = {
    "weights": {},
    "weights per head": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "bool mask": {"attn_mask": forbidden},
    "float mask": {"attn_mask": torch.linspace(-2, 2, T * S, dtype=torch.float64).view(T, S), "need_weights": False},
    "mask per head": {"attn_mask": forbidden.repeat(B * H, 1, 1)},
    "padding": {"key_padding_mask": padding, "need_weights": False},
    "both": {"attn_mask": forbidden, "key_padding_mask": padding},
    "float padding": {
        "attn_mask": torch.zeros(T, S, dtype=torch.float64).masked_fill(forbidden, -math.inf),
        "key_padding_mask": torch.zeros(B, S, dtype=torch.float64).masked_fill(padding, -math.inf),
    },
}
KINDS = {
    "plain": {"batch_first": True},
    "sequence first": {},
    "no bias": {"bias": False, "batch_first": True},
    "own sizes": {"kdim": 8, "vdim": 6, "batch_first": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_multihead_attention_equals_pytorchs(kind, call):
    theirs, ours = both(**kind)
    given = inputs(kind.get("kdim", E), kind.get("vdim", E), kind.get("batch_first", False))
    for wanted, found in zip(gradients(theirs, given, call), gradients(ours, given, call), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_multihead_attention_without_a_batch():
    theirs, ours = both()
    given = inputs(batched=False)
    call = {"key_padding_mask": padding[1], "average_attn_weights": False}
    for wanted, found in zip(gradients(theirs, given, call), gradients(ours, given, call), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_hint_with_and_without_its_mask(need_weights, added):
    theirs, ours = both(batch_first=True, add_zero_attn=added)
    x = torch.randn(B, T, E, dtype=torch.float64)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    wanted = theirs(x, x, x, attn_mask=causal, need_weights=need_weights)
    for mask in (None, causal):
        found = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_multihead_attention_solves_its_problem():
    _, ours = both(batch_first=True)
    x = torch.randn(B, T, E, dtype=torch.float64)
    ours.problem = Transport(Tsallis(1.5), prior=Causal())
    out, weights = ours(x, x, x, average_attn_weights=False)
    assert (weights.triu(1) == 0).all() and (weights == 0).sum() > B * H * T * (T - 1) / 2
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    v = (x @ ours.in_proj_weight[2 * E :].T + ours.in_proj_bias[2 * E :]).unflatten(2, (H, -1)).transpose(1, 2)
    torch.testing.assert_close(out, ours.out_proj((weights @ v).transpose(1, 2).flatten(2)))


def test_a_learned_problem_is_part_of_the_module():
    learned = Learned(H)
    module = MultiheadAttention(E, H, batch_first=True, problem=learned)
    assert {"problem.sink", "problem.temperature.log_temperature"} < set(module.state_dict())
    x = torch.randn(B, T, E)
    module(x, x, x, is_causal=True, need_weights=False)[0].square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in learned.parameters())


def test_an_encoder_layer_calls_our_forward():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 16, batch_first=True).eval()
    x, before = torch.randn(B, T, E), None
    for problem in (None, Transport(Tsallis(2.0), temperature=0.1)):
        ours = MultiheadAttention(E, 2, batch_first=True, problem=problem)
        ours.load_state_dict(layer.self_attn.state_dict())
        with torch.no_grad():
            before = layer(x) if before is None else before
            layer.self_attn = ours.eval()
            after = layer(x)
        assert torch.allclose(before, after, atol=1e-5) == (problem is None)


def test_a_query_without_keys_gets_only_the_bias():
    _, ours = both(batch_first=True)
    x = torch.randn(B, T, E, dtype=torch.float64)
    out, weights = ours(x, x, x, key_padding_mask=torch.ones(B, T, dtype=torch.bool))
    assert torch.equal(out, ours.out_proj.bias.expand_as(out)) and (weights == 0).all()


def test_multihead_attention_names_wrong_arguments():
    module = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, T, E)
    with pytest.raises(ValueError, match=r"attn_mask: expected shape \[5, 5\] or \[6, 5, 5\], got \[4, 5\]"):
        module(x, x, x, attn_mask=torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"key_padding_mask: expected shape \[2, 5\], got \[5, 2\]"):
        module(x, x, x, key_padding_mask=torch.zeros(5, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"key: expected shape .* got \[5, 12\]"):
        module(x, x[0], x)
    with pytest.raises(TypeError, match="problem: expected a Transport"):
        MultiheadAttention(E, H, problem="softmax")


def test_temperature():
    tau = Temperature(4)
    assert torch.equal(tau(), torch.ones(4, 1, 1)) and Temperature(2, init=3.0)()[1].item() == pytest.approx(3)
    tau.log_temperature.data -= 100
    assert (tau() > 0).all()
    with pytest.raises(ValueError, match="init: expected a positive"):
        Temperature(4, init=0.0)


# --- the transformer --------------------------------------------------------------------------------------------------


def test_the_transformer_computes_its_equations():
    model = small(init="unit").double()
    h = model.token(tokens[:, :-1]) + model.position.weight
    for block in model.blocks:
        assert isinstance(block, Block)
        q, k, v = block.attention.into(block.norms[0](h)).chunk(3, -1)
        q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf)
        h = h + block.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        h = h + block.mlp(block.norms[1](h))
    logits = model.norm(h) @ model.token.weight.T
    torch.testing.assert_close(model(tokens[:, :-1]), logits)
    wanted = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(model.loss(tokens), wanted)


PROBLEMS = {
    "softmax": None,
    "entmax": Transport(Tsallis(1.5)),
    "alibi": Transport(prior=ALiBi(torch.tensor([0.5, 0.1]))),
    "by layer": lambda layer: Transport(temperature=1.0 + layer),
    "learned": lambda layer: Learned(2),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_any_problem_is_causal_and_learns(problem):
    model = small(problem=problem)
    assert leak(model) == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = model.loss(tokens).item()
    for _ in range(20):
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()
    assert model.loss(tokens).item() < before - 0.1
    assert all(p.grad is not None for p in model.parameters())
    problems = model.problems()
    assert (problems[0] is None) == (problem is None)


@pytest.mark.parametrize("made", FEATURES.values(), ids=FEATURES)
def test_features_are_causal_and_learn(made):
    features = made() if made is not FEATURES["performer"] else Performer(8, 32)
    model = small(problem=features)
    assert leak(model) == 0
    before = model.loss(tokens)
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert model.loss(tokens) < before
    copies = [m for m in model.modules() if isinstance(m, type(features))]
    assert len(copies) == 2 and features not in copies
    mixed = small(problem=lambda layer: made() if layer == 0 and made is not FEATURES["performer"] else None)
    assert leak(mixed) == 0
    with pytest.raises(ValueError, match="dropout: expected 0 with `attention` or features"):
        small(problem=lambda layer: LinearAttention(), dropout=0.1)


def test_a_transformer_that_is_not_causal():
    model = small(problem=Transport(marginal=RowsAndColumns()), causal=False, init="unit")
    x = tokens[:, :-1]
    for q, k, v in model.heads(x):
        aux = regard.attention(q, k, v, problem=model.problems()[0], return_aux=regard.AuxRequest(key_mass=True))[1]
        torch.testing.assert_close(aux.key_mass, torch.ones_like(aux.key_mass), atol=1e-4, rtol=0)
    assert leak(model) > 1e-4
    model.loss(x, tokens[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises(ValueError, match="targets: expected a tensor for a model that is not causal"):
        model.loss(tokens)
    with pytest.raises(ValueError, match="causal: expected True to generate"):
        model.generate(tokens, 1)
    with pytest.raises(ValueError, match="causal"):  # column sums depend on the future
        small(problem=Transport(marginal=RowsAndColumns()))(x)


def test_heads_are_the_inputs_of_attention():
    seen = []

    def attention(q, k, v, is_causal):
        seen.append((q, k, v))
        return regard.attention(q, k, v, is_causal=is_causal)

    with torch.no_grad():
        model = small(attention=attention)
        model(tokens[:, :-1])
        expected = list(seen)
    torch.testing.assert_close(model.heads(tokens[:, :-1]), expected)


def test_a_module_is_copied_for_each_layer():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.tau = Temperature(2)

        def forward(self, q, k, v, is_causal):
            return regard.attention(q, k, v, is_causal=is_causal, problem=Transport(temperature=self.tau()))

    model = small(attention=Own())
    assert sum("log_temperature" in name for name, _ in model.named_parameters()) == 2
    assert leak(model) == 0


def test_weights_are_saved_and_loaded(tmp_path):
    model = small(problem=lambda layer: Learned(2), tied=False)
    model.save(tmp_path / "model.safetensors")
    torch.manual_seed(9)
    other = Transformer(**SMALL, problem=lambda layer: Learned(2), tied=False)
    assert not torch.equal(other(tokens[:, :-1]), model(tokens[:, :-1]))
    other.load(tmp_path / "model.safetensors")
    assert torch.equal(other(tokens[:, :-1]), model(tokens[:, :-1]))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        small(tied=False).load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("init", "expected"), [(0.02, 0.02**2 * 128), ("pytorch", 1 / 3), ("unit", 1.0)])
def test_init_sets_the_spread_of_queries_and_keys(init, expected):
    torch.manual_seed(0)
    model = Transformer(31, 32, layers=2, heads=2, width=128, init=init)
    for q, k, _ in model.heads(torch.randint(31, (8, 32))):
        assert q.var().item() == pytest.approx(expected, rel=0.25)
        assert k.var().item() == pytest.approx(expected, rel=0.25)


def test_qk_norm_bounds_the_scores():
    model = small(init="unit", qk_norm=True)
    for q, k, _ in model.heads(tokens[:, :-1]):
        assert q.norm(dim=-1).max() <= 8**0.5 * 1.001 and k.norm(dim=-1).max() <= 8**0.5 * 1.001


def test_generation():
    model = small(init="unit")
    assert torch.equal(model.generate(tokens[:, :4], 20, temperature=0.0)[:, :4], tokens[:, :4])
    greedy = model.generate(tokens[:, :4], 3, temperature=0.0)
    assert torch.equal(greedy[:, 4], model(tokens[:, :4])[:, -1].argmax(-1))
    draws = [model.generate(tokens, 20, 2.0, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*draws) and draws[0].shape == (3, 37)
    counts = torch.bincount(model.generate(tokens[:1, :4].expand(4000, 4), 1)[:, -1], minlength=11) / 4000
    torch.testing.assert_close(counts, model(tokens[:1, :4])[0, -1].softmax(-1), atol=0.03, rtol=0)


def test_the_transformer_names_wrong_arguments():
    with pytest.raises(ValueError, match="width: expected a multiple of heads=3, got 16"):
        Transformer(11, 16, heads=3, width=16)
    with pytest.raises(ValueError, match="attention: expected None together with a problem"):
        small(problem=Transport(), attention=F.scaled_dot_product_attention)
    with pytest.raises(ValueError, match="tokens: expected at most length=16 positions, got 17"):
        small()(tokens)
    with pytest.raises(ValueError, match=r"init: expected a positive number"):
        small(init="big")
    with pytest.raises(TypeError, match=r"problem\(1\): expected a Transport"):
        small(problem=lambda layer: "softmax" if layer else None)
