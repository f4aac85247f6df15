"""Tensors and calls for the tests of priors with structure."""

import pytest
import torch

import regard
from regard import Transport

by_engine = pytest.mark.parametrize("backend", ["native", "torch"])
double = torch.float64


def draw(*shape, seed=0, dtype=double):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=double).to(dtype)


def uniform(low, high, *shape, seed=0, dtype=double):
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=double)
    return (drawn * (high - low) + low).to(dtype)


def attend(q, k, v, prior, backend, regularizer=None, marginal=None, **more):
    problem = Transport(regularizer, prior=prior, marginal=marginal)
    return regard.attention(q, k, v, problem=problem, enable_gqa=True, backend=backend, **more)
