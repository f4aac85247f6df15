"""MultiheadAttention with both marginals, and by features."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regard
from regard import RowsAndColumns, Transport
from regard.features import LinearAttention, Performer
from regard.nn import MultiheadAttention
from support.multihead import FEATURES, B, E, H, S, T, both, gradients, inputs, padding

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
