"""The variants of attention that the lab compares: their definitions, and which of them see the future."""

import math

import pytest
import torch

import regard
from regard import Causal, FDivergence, Transport
from regard.lab.variants import VARIANTS, mask_to_zero, no_mask, no_scaling, no_shift, raw_dot_products, relu_features
from support.gpt import leak, small

torch.manual_seed(3)
q, k, v = (torch.randn(2, 2, 70, 4, dtype=torch.float64) for _ in range(3))
CAUSAL = torch.ones(70, 70, dtype=torch.bool).tril()


def test_variants_equal_their_definitions():
    s = q @ k.mT / 2
    positive = s.relu().where(CAUSAL, 0.0)
    expected = {
        "raw_dot_products": s.where(CAUSAL, 0.0),
        "row_sum_normalisation": s.where(CAUSAL, 0.0) / s.where(CAUSAL, 0.0).sum(-1, keepdim=True),
        "relu_normalisation": (positive / positive.sum(-1, keepdim=True)).nan_to_num(0.0),
        "mask_to_zero": s.where(CAUSAL, 0.0).softmax(-1),
        "no_mask": s.softmax(-1),
        "no_scaling": (2 * s).where(CAUSAL, -math.inf).softmax(-1),
        "no_shift": s.where(CAUSAL, -math.inf).softmax(-1),
    }
    for name, weights in expected.items():
        torch.testing.assert_close(VARIANTS[name](q, k, v, True), weights @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_relu_features_equal_their_definition(is_causal):
    features = q.relu() @ k.relu().mT
    weights = features.where(CAUSAL, 0.0) if is_causal else features
    weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
    torch.testing.assert_close(relu_features(q, k, v, is_causal), weights @ v)


def test_relu_features_are_linear_in_the_length():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(T):
        x = torch.randn(1, 1, T, 8)
        with FlopCounterMode(display=False) as counter:
            relu_features(x, x, x, True)
        return counter.get_total_flops()

    assert flops(4096) == pytest.approx(4 * flops(1024), rel=0.1)


def test_raw_dot_products_are_the_optimum_without_constraints():
    # The L2 regularizer without p >= 0 and without a marginal has the identity as its link: p = s.
    problem = Transport(
        FDivergence(lambda x: x.square() / 2, lambda t: t, torch.ones_like), marginal=regard.Free(), prior=Causal()
    )
    torch.testing.assert_close(
        raw_dot_products(q, k, v, True), regard.attention(q, k, v, problem=problem, backend="torch")
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_which_variants_see_the_future(variant):
    leaks = leak(small(attention=VARIANTS[variant], init="unit"))
    assert (leaks > 1e-3) if VARIANTS[variant] in (mask_to_zero, no_mask) else (leaks == 0)


def test_no_shift_overflows_where_softmax_does_not():
    big = torch.full((1, 1, 2, 4), 10.0)
    assert no_shift(big, big, big, True).isnan().all()
    assert no_scaling(big, big, big, True).isfinite().all()
