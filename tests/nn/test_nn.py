"""`regard.nn`: MultiheadAttention against PyTorch's, learned temperatures, the transformer."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
from regard import (
    KL,
    ALiBi,
    ByKeys,
    Causal,
    Decay,
    Density,
    FDivergence,
    LowRank,
    Prefix,
    Relative,
    Rows,
    RowsAndColumns,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from regard.features import LinearAttention, Performer, ReLUFeatures
from regard.nn import Context, MultiheadAttention, Temperature, Transformer
from regard.nn.declared import built
from regard.nn.transformer import Block
from support.gpt import SMALL, leak, small, tokens

B, T, S, E, H = 2, 5, 7, 12, 3


def both(**kwargs):
    """PyTorch's module and ours with the same weights, in float64, with biases that are not 0."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **kwargs)
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def gradients(module, inputs, call):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out, weights = module(*inputs, **call)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    if weights is not None:
        loss = loss + (weights * torch.linspace(-1, 2, weights.numel(), dtype=out.dtype).view_as(weights)).sum()
    loss.backward()
    return out, weights, [x.grad for x in inputs], {n: p.grad for n, p in module.named_parameters()}


def inputs(kdim=E, vdim=E, batch_first=True, batched=True):
    found = [torch.randn(B, n, e, dtype=torch.float64) for n, e in ((T, E), (S, kdim), (S, vdim))]
    if not batched:
        return [x[0] for x in found]
    return found if batch_first else [x.transpose(0, 1) for x in found]


forbidden = torch.rand(T, S) < 0.3
forbidden[:, 2] = False
padding = torch.zeros(B, S, dtype=torch.bool)
padding[1, 4:] = True
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


class Learned(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.temperature = Temperature(heads)
        self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self):
        return Transport(KL(), marginal=Rows(sink=self.sink), temperature=self.temperature())


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


# --- both marginals, and features -------------------------------------------------------------------------------------

COLUMNS = Transport(marginal=RowsAndColumns(tolerance=1e-12))


def test_multihead_attention_with_both_marginals():
    _, ours = both(batch_first=True)
    ours.problem = COLUMNS
    found = inputs()
    out, weights, grads, _ = gradients(ours, found, {"average_attn_weights": False})
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    torch.testing.assert_close(weights.sum(-2), torch.full((B, H, S), T / S, dtype=torch.float64))
    q, k, v = ours._projected(*found)
    expected = regard.attention(q, k, v, problem=COLUMNS, backend="torch")
    torch.testing.assert_close(out, ours.out_proj(expected.transpose(1, 2).flatten(2)))
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in grads)
    with pytest.raises(ValueError, match="causal"):
        ours(*[found[0]] * 3, is_causal=True)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_sends_and_receives_no_mass_with_both_marginals(kind):
    _, ours = both(batch_first=True)
    ours.problem = COLUMNS
    x, idle = torch.randn(B, T, E, dtype=torch.float64), torch.zeros(B, T, dtype=torch.bool)
    idle[1, 3:] = True
    mask = idle if kind == "bool" else torch.zeros(B, T, dtype=torch.float64).masked_fill(idle, -math.inf)
    out, weights = ours(x, x, x, key_padding_mask=mask)
    alone, _ = ours(x[1:, :3], x[1:, :3], x[1:, :3])
    torch.testing.assert_close(out[1:, :3], alone)
    assert (weights[1, 3:] == 0).all() and (weights[1, :, 3:] == 0).all()
    # In cross-attention the mask says nothing about the queries: all of them send mass.
    _, weights = ours(x, x.clone(), x, key_padding_mask=mask)
    torch.testing.assert_close(weights[1].sum(0), torch.tensor([T / 3] * 3 + [0, 0], dtype=torch.float64))


def test_padding_under_checkpointing():
    """Reentrant checkpointing passes one tensor as three that share its memory."""
    module = MultiheadAttention(E, H, batch_first=True, problem=COLUMNS).double()
    x, idle = torch.randn(B, T, E, dtype=torch.float64), torch.zeros(B, T, dtype=torch.bool)
    idle[1, 3:] = True
    found = []
    for again in (False, True):
        y = x.clone().requires_grad_()
        call = lambda *given: module(*given, key_padding_mask=idle, need_weights=False)[0]  # noqa: E731
        out = checkpoint(call, y, y, y, use_reentrant=True) if again else call(y, y, y)
        out.square().sum().backward()
        found.append(y.grad)
    torch.testing.assert_close(*found)


FEATURES = {
    "linear": LinearAttention,
    "relu": ReLUFeatures,
    "performer": lambda: Performer(E // H, 16, generator=torch.Generator().manual_seed(0)),
}
FEATURE_CALLS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, by a mask": {"is_causal": True, "attn_mask": torch.ones(S, S, dtype=torch.bool).triu(1)},
    "padding": {"key_padding_mask": padding},
    "float padding": {"key_padding_mask": torch.zeros(B, S, dtype=torch.float64).masked_fill(padding, -math.inf)},
}


@pytest.mark.parametrize("call", FEATURE_CALLS.values(), ids=FEATURE_CALLS)
@pytest.mark.parametrize("made", FEATURES.values(), ids=FEATURES)
def test_multihead_attention_by_features(made, call):
    _, ours = both(batch_first=True)
    features = ours.problem = made().double()
    x = torch.randn(B, S, E, dtype=torch.float64)
    out, weights, grads, _ = gradients(ours, [x, x, x], {**call, "average_attn_weights": False})
    q, k, v = ours._projected(x, x, x)
    scale = math.sqrt(E // H) ** -1 if made is FEATURES["performer"] else None
    phi = [features.features(t, scale) for t in (q, k)]
    kernel = phi[0][0] @ (phi[1][0] if phi[1][1] is None else phi[1][0] * phi[1][1].exp()).mT
    if call.get("is_causal"):
        kernel = kernel.tril()
    if "key_padding_mask" in call:
        kernel = kernel.masked_fill(padding[:, None, None], 0.0)
    plan = kernel / kernel.sum(-1, keepdim=True)
    plan = plan.nan_to_num(0.0)  # rows whose features are all 0
    torch.testing.assert_close(weights, plan)
    torch.testing.assert_close(out, ours.out_proj((plan @ v).transpose(1, 2).flatten(2)))
    assert all(g.isfinite().all() for g in grads) and grads[2].abs().max() > 0


def test_output_and_weights_use_the_same_random_features():
    _, ours = both(batch_first=True)
    ours.problem = Performer(E // H, 16, redraw_interval=1).double()
    x = torch.randn(B, S, E, dtype=torch.float64)
    for _ in range(2):
        out, weights = ours(x, x, x, average_attn_weights=False)
        expected = (weights @ ours._projected(x, x, x)[2]).transpose(1, 2).flatten(2)
        torch.testing.assert_close(out, ours.out_proj(expected))


def test_features_read_appended_keys():
    _, ours = both(batch_first=True, add_bias_kv=True, add_zero_attn=True)
    ours.problem = LinearAttention()
    found = inputs()
    _, weights = ours(*found, key_padding_mask=padding)
    assert weights.shape == (B, T, S + 2) and (weights[1, :, 4:S] == 0).all() and (weights[..., S:] > 0).all()
    with pytest.raises(ValueError, match="is_causal: expected False for attention by features with add_bias_kv"):
        ours(*found, is_causal=True)


def test_attention_by_features_raises_for_what_it_does_not_support():
    x = torch.randn(B, T, E)
    module = MultiheadAttention(E, H, batch_first=True, problem=LinearAttention())
    with pytest.raises(ValueError, match="attn_mask: expected None for attention by features"):
        module(x, x, x, attn_mask=torch.zeros(T, T))
    with pytest.raises(ValueError, match="key_padding_mask: expected a bool mask, or one of 0 and -inf"):
        module(x, x, x, key_padding_mask=torch.ones(B, T))
    with pytest.raises(ValueError, match=r"key_padding_mask: expected shape \[2, 5\], got \[2, 4\]"):
        module(x, x, x, key_padding_mask=torch.ones(B, T - 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"dropout: expected 0 for attention by features, which has none, got 0.1"):
        MultiheadAttention(E, H, dropout=0.1, problem=LinearAttention())


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


# --- tensors of a Transport given directly ----------------------------------------------------------------------------


def held(heads=H):
    """A module whose Transport has two parameters and a constant; and the parameter that is its sink."""
    torch.manual_seed(0)
    sink = nn.Parameter(torch.zeros(heads))
    prior = Causal() * ALiBi(torch.linspace(0.1, 0.5, heads))
    problem = Transport(prior=prior, marginal=Rows(sink=sink), temperature=nn.Parameter(torch.ones(heads, 1, 1)))
    return MultiheadAttention(E, heads, batch_first=True, problem=problem), sink


def output(module, x):
    return module(x, x, x, need_weights=False)[0]


x_held = torch.randn(B, T, E, generator=torch.Generator().manual_seed(5))


def test_a_parameter_in_a_transport_is_a_parameter_of_the_module():
    module, sink = held()
    assert dict(module.named_parameters())["problem.marginal.sink"] is sink
    assert {"problem.marginal.sink", "problem.temperature"} == {n for n in module.state_dict() if "problem" in n}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = output(module, x_held)
    before.square().sum().backward()
    optimizer.step()
    assert sink.abs().min() > 0 and not torch.allclose(output(module, x_held), before)


def test_constants_of_a_transport_do_not_enter_the_state_dict():
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    ours = MultiheadAttention(E, H, batch_first=True, problem=Transport(prior=ALiBi(torch.ones(H))))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match=r"Missing.*problem\.marginal\.sink"):  # torch's module has no sinks
        held()[0].load_state_dict(theirs.state_dict())
    assert held()[0].load_state_dict(theirs.state_dict(), strict=False).missing_keys


def with_sink(module, value):
    """The module's output with the sink `value`, computed with a new Transport."""
    problem = module.problem()
    other = Transport(prior=problem.prior, marginal=Rows(sink=value), temperature=problem.temperature)
    plain = MultiheadAttention(E, H, batch_first=True, problem=lambda: other)
    plain.load_state_dict({n: p for n, p in module.state_dict().items() if "problem" not in n})
    return output(plain, x_held)


def test_the_forward_pass_uses_replaced_parameters():
    module, sink = held()
    value = torch.tensor([1.0, -1.0, 2.0])
    expected = with_sink(module, value)
    assert not torch.allclose(output(module, x_held), expected)
    called = torch.func.functional_call(
        module, {"problem.marginal.sink": value}, (x_held, x_held, x_held), {"need_weights": False}
    )
    torch.testing.assert_close(called[0], expected)
    copied = copy.deepcopy(module)
    copied.load_state_dict(module.state_dict() | {"problem.marginal.sink": value})
    torch.testing.assert_close(output(copied, x_held), expected)
    assert not sink.any()  # the copy has its own parameter


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_with_a_transport_can_be_copied(copied):
    module, sink = held()
    other = copied(module)
    torch.testing.assert_close(output(other, x_held), output(module, x_held))
    output(other, x_held).square().sum().backward()
    assert other.problem.marginal.sink.grad.abs().sum() > 0 and sink.grad is None


def test_conversions_reach_the_tensors_of_a_transport():
    module, _ = held()
    problem = built(module.to(torch.bfloat16).problem)
    assert problem.marginal.sink.dtype == problem.temperature.dtype == torch.bfloat16
    slopes = problem.prior.factors()[1].slopes
    assert torch.equal(slopes, torch.linspace(0.1, 0.5, H))  # a constant is not rounded
    assert torch.equal(built(module.to_empty(device="cpu").problem).prior.factors()[1].slopes, slopes)  # nor erased
    problem = built(module.to("meta").problem)
    assert problem.marginal.sink.is_meta and problem.prior.factors()[1].slopes.is_meta


def test_a_module_with_a_transport_compiles():
    module, sink = held()
    # Parts without tensors are not rebuilt: under torch.compile this one could not be.
    chi2 = FDivergence(lambda x: (x - 1).square() / 2, lambda t: t + 1, torch.ones_like, lower=-1.0)
    other = MultiheadAttention(E, H, batch_first=True, problem=Transport(chi2, marginal=Rows(sink=sink)))
    for each in (module, other):
        compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(output(compiled, x_held), output(each, x_held))
            sink.data += 1.0
    torch._dynamo.reset()


def test_a_shared_parameter_stays_shared():
    shared = nn.Parameter(torch.ones(H, 1, 1))
    module = MultiheadAttention(E, H, problem=Transport(marginal=Rows(sink=shared), temperature=shared))
    for each in (module, copy.deepcopy(module).double()):
        assert each.get_parameter("problem.marginal.sink") is each.get_parameter("problem.temperature")
        assert len([n for n, _ in each.named_parameters() if "problem" in n]) == 1
    assert {"problem.marginal.sink", "problem.temperature"} < set(module.state_dict())


def test_tensors_that_cannot_be_registered_raise():
    parameter = nn.Parameter(torch.zeros(H, 1, 1))
    with pytest.raises(ValueError, match=r"problem: expected an nn.Parameter.*at temperature, got .* computed"):
        MultiheadAttention(E, H, problem=Transport(temperature=parameter.exp()))
    prior = Causal() * ALiBi(torch.ones(H, requires_grad=True))
    with pytest.raises(ValueError, match=r"at prior.parts.1.slopes, got .* that requires grad"):
        MultiheadAttention(E, H, problem=Transport(prior=prior))


def test_a_problem_can_be_replaced():
    module, sink = held()
    plain = Transport(Tsallis(1.5))
    for problem in (plain, lambda: plain, None, LinearAttention(), Learned(H), plain):
        module.problem = problem
        assert module.problem is problem and sink not in set(module.parameters())
    module.problem = Transport(marginal=Rows(sink=sink))
    assert dict(module.named_parameters())["problem.marginal.sink"] is sink
    with pytest.raises(TypeError, match="problem: expected a Transport"):
        module.problem = "softmax"


@pytest.mark.parametrize("each", [False, True])
def test_the_transformer_learns_parameters_of_a_transport(each, tmp_path):
    def problem(_):
        return Transport(marginal=Rows(sink=nn.Parameter(torch.zeros(2))))

    model, other = (small(problem=problem if each else problem(0)) for _ in range(2))
    sinks = [p for n, p in model.named_parameters() if n.endswith("problem.marginal.sink")]
    assert len(sinks) == (2 if each else 1)  # layers share the parameters of one Transport
    model.loss(tokens).backward()
    assert all(sink.grad.abs().sum() > 0 for sink in sinks)
    for sink in sinks:
        sink.data += 1.0
    model.save(tmp_path / "model.safetensors")
    other.load(tmp_path / "model.safetensors")
    assert all(p.marginal.sink.min() == 1 for p in other.problems())
    assert torch.equal(other(tokens[:, :-1]), model(tokens[:, :-1]))


def structured(heads, length, parameters=nn.Parameter):
    """A Transport with structured priors and a temperature by keys, all of whose tensors are `parameters`."""
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator) / 2

    priors = (
        Causal()
        * Relative(parameters(drawn(heads, 5)))
        * LowRank(parameters(drawn(heads, length, 2)), parameters(drawn(heads, length, 2)))
        * Decay(parameters(-drawn(heads, length).abs()))
        * Density(parameters(drawn(length, length).abs() + 0.1))
    )
    rule = ByKeys(*(parameters(drawn(heads).abs() + 1) for _ in range(3)))
    return Transport(prior=priors, temperature=rule)


LEARNED = {
    "prior.parts.1.table",
    "prior.parts.2.query_factor",
    "prior.parts.2.key_factor",
    "prior.parts.3.log_forget",
    "prior.parts.4.prior",
    "temperature.slope",
    "temperature.offset",
    "temperature.power",
}


def test_structured_priors_are_registered_trained_and_saved():
    torch.manual_seed(0)
    module = MultiheadAttention(E, H, batch_first=True, problem=structured(H, T))
    own = {n.removeprefix("problem."): p for n, p in module.named_parameters() if n.startswith("problem.")}
    assert own.keys() == LEARNED == {n.removeprefix("problem.") for n in module.state_dict() if "problem" in n}
    before, at_first = output(module, x_held), {n: p.detach().clone() for n, p in own.items()}
    before.square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.01).step()
    assert all((p != at_first[n]).any() for n, p in own.items())
    assert not torch.allclose(output(module, x_held), before)
    other = MultiheadAttention(E, H, batch_first=True, problem=structured(H, T))
    assert not torch.allclose(output(other, x_held), output(module, x_held))
    other.load_state_dict(module.state_dict())
    assert torch.equal(output(other, x_held), output(module, x_held))


def test_the_transformer_learns_structured_priors(tmp_path):
    model, other = (small(problem=lambda layer: structured(2, 16)) for _ in range(2))
    names = {n for n, _ in model.named_parameters() if ".problem." in n}
    assert names == {f"blocks.{layer}.attention.problem.{name}" for layer in range(2) for name in LEARNED}
    model.loss(tokens).backward()
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in names)
    for name in names:
        model.get_parameter(name).data *= 1.1
    model.save(tmp_path / "model.safetensors")
    other.load(tmp_path / "model.safetensors")
    assert torch.equal(other(tokens[:, :-1]), model(tokens[:, :-1]))


def test_constants_of_unions_are_buffers():
    lengths, index = torch.tensor([2, 3]), torch.tensor([[0], [1], [2], [3], [4]])
    prior = Causal() | Prefix(lengths) | Window(1, 1) * Selected(index)
    module = MultiheadAttention(E, H, batch_first=True, problem=Transport(prior=prior))
    held_by = {n.removeprefix("problem."): b for n, b in module.named_buffers()}
    assert held_by == {"prior.parts.1.n": lengths, "prior.parts.2.parts.1.index": index}
    assert not any("problem" in n for n in module.state_dict())
    problem = built(module.to(torch.bfloat16).problem)
    assert problem.prior.parts[1].n.dtype == torch.long and problem.prior == prior
    q = torch.randn(B, H, T, 4)
    torch.testing.assert_close(
        regard.attention(q, q, q, problem=problem), regard.attention(q, q, q, problem=Transport(prior=prior))
    )


# --- problems that depend on the hidden states ------------------------------------------------------------------------


class Gates(nn.Module):
    """Forget gates from the hidden states."""

    def __init__(self, heads, width):
        super().__init__()
        self.gate = nn.Linear(width, heads)

    def forward(self, context):
        assert isinstance(context, Context) and context.heads == self.gate.out_features
        return Transport(prior=Decay(nn.functional.logsigmoid(self.gate(context.hidden_states)).mT))


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_problem_from_the_hidden_states(batch_first):
    torch.manual_seed(0)
    gates = Gates(H, E)
    module = MultiheadAttention(E, H, batch_first=batch_first, problem=gates)
    x = torch.randn(B, T, E)
    problem = gates(Context(module, H, x))
    fixed = MultiheadAttention(E, H, batch_first=True, problem=lambda: problem)
    fixed.load_state_dict({n: p for n, p in module.state_dict().items() if "problem" not in n})
    given = x if batch_first else x.transpose(0, 1)
    out = output(module, given)
    expected = output(fixed, x)
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected)
    out.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in gates.parameters())


def test_the_transformer_builds_problems_from_its_hidden_states():
    model = small(problem=lambda layer: Gates(2, SMALL["width"]), positions=None)
    assert leak(model) == 0
    model.loss(tokens).backward()
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if ".problem.gate." in n)
    with pytest.raises(ValueError, match="problem: expected one that is the same for all inputs, got Gates"):
        model.problems()
    h = model._stream(tokens[:, :-1])
    for block, (q, k, v), problem in zip(
        model.blocks, model.heads(tokens[:, :-1]), model.problems(tokens[:, :-1]), strict=True
    ):
        out = regard.attention(q, k, v, is_causal=True, problem=problem).transpose(1, 2).flatten(2)
        torch.testing.assert_close(block.attention(block.get_submodule("norms.0")(h)), block.attention.out(out))
        h = block(h)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens[:, :-1]), model(tokens[:, :-1]))
    torch._dynamo.reset()


def test_a_constant_on_the_meta_device_cannot_be_moved():
    with torch.device("meta"):
        module = MultiheadAttention(E, H, problem=Transport(temperature=torch.ones(H, 1, 1)))
    with pytest.raises(
        RuntimeError, match=r"problem: expected a Transport that is built outside.*got temperature on the meta"
    ):
        module.to_empty(device="cpu")
