"""Every structured prior, unions and rules for the temperature in the modules of `regard.nn`."""

import pytest
import torch
from torch import nn

import regard
from regard import (
    Blocks,
    ByKeys,
    Causal,
    Decay,
    Density,
    Documents,
    LowRank,
    Prefix,
    Relative,
    Selected,
    Transport,
    Tsallis,
    Window,
)
from regard.nn import MultiheadAttention, Transformer

B, T, E, H = 2, 12, 16, 4
generator = torch.Generator().manual_seed(0)


def learned(*shape):
    return nn.Parameter(torch.randn(*shape, generator=generator) / 2)


PROBLEMS = {  # each call builds new parameters
    "relative": lambda: Transport(prior=Relative(learned(H, 7))),
    "T5": lambda: Transport(prior=Relative(Relative.t5(torch.randn(8, H), True, 6).table)),
    "low rank": lambda: Transport(prior=LowRank(learned(H, T, 3), learned(1, T, 3))),
    "decay": lambda: Transport(prior=Decay(nn.Parameter(-torch.rand(H, T)))),
    "density": lambda: Transport(prior=Density(nn.Parameter(torch.rand(T, T)))),
    "selected": lambda: Transport(prior=Selected((torch.arange(T) // 4)[None, None, :, None], 4)),
    "prefix-LM": lambda: Transport(prior=Causal() | Prefix(3)),
    "blocks": lambda: Transport(prior=Blocks(torch.ones(3, 3, dtype=torch.bool).tril(), 4)),
    "union": lambda: Transport(prior=Window(2, 2) | Prefix(2) | Documents(torch.arange(T) // 6)),
    "by keys": lambda: Transport(
        temperature=ByKeys(nn.Parameter(torch.full((H,), 0.5)), 0.5, nn.Parameter(torch.rand(H) + 0.5))
    ),
    "all of them": lambda: Transport(
        Tsallis(1.5),
        prior=Relative(learned(H, 7)) * Decay(nn.Parameter(-torch.rand(H, T))) * (Window(4) | Prefix(2)),
        temperature=ByKeys(nn.Parameter(torch.full((H,), 0.5)), 0.5),
    ),
}


def made(name):
    generator.manual_seed(0)
    torch.manual_seed(0)
    return PROBLEMS[name]()


@pytest.mark.parametrize("name", PROBLEMS)
def test_multihead_attention(name):
    """Output and weights are those of the problem, and every parameter gets a gradient."""
    problem = made(name)
    module = MultiheadAttention(E, H, batch_first=True, problem=problem)
    x = torch.randn(B, T, E, requires_grad=True)
    out, weights = module(x, x, x, average_attn_weights=False)
    q, k, v = (
        t.unflatten(2, (H, E // H)).transpose(1, 2) for t in nn.functional.linear(x, *_into(module)).chunk(3, -1)
    )
    expected = regard.attention(q, k, v, problem=problem)
    torch.testing.assert_close(out, module.out_proj(expected.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(weights @ v, expected)
    out.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


def _into(module):
    weight = module.in_proj_weight
    if weight is None:
        weight = torch.cat([module.q_proj_weight, module.k_proj_weight, module.v_proj_weight])
    return weight, module.in_proj_bias


@pytest.mark.parametrize("name", PROBLEMS)
def test_transformer(name):
    """A causal model stays causal with every problem, and all of its parameters learn."""
    torch.manual_seed(1)
    model = Transformer(11, T, layers=2, width=E, heads=H, problem=lambda layer: made(name))
    tokens = torch.randint(0, 11, (B, T + 1))
    model.loss(tokens).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name
    changed = tokens[:, :-1].clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 11
    assert torch.equal(model(tokens[:, :-1])[:, :8], model(changed)[:, :8])
