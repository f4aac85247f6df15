"""Random problems for the tests of geometry."""

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import regard
from regard import KL, Bias, FermiDirac, Free, Rows, Transport, Tsallis
from support.cases import custom

OWN = custom()
REGULARIZERS = [KL(), Tsallis(1.2), Tsallis(1.5), Tsallis(2.0), Tsallis(3.0), FermiDirac(), OWN]
MARGINALS = [Rows(), Rows(mass=2.5), Rows(sink=0.3), Rows(relax=0.8), Free(0.4)]
every_problem = pytest.mark.parametrize(
    "problem",
    [Transport(r, marginal=m, temperature=0.7) for r in REGULARIZERS for m in MARGINALS],
    ids=lambda p: f"{type(p.regularizer).__name__} {getattr(p.regularizer, 'alpha', '')} {p.marginal}",
)
few = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
sizes = st.integers(2, 9)


def draw(seed, *shape, scale=2.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def problems(choose, marginals=MARGINALS, n=9):
    """Every regularizer and marginal; no prior, or one with a masked key; one temperature, or one for each head."""
    seed = choose(seeds)
    log_prior = draw(seed, n, scale=1.0)
    log_prior[seed % n] = -math.inf
    tau = choose(st.floats(0.3, 3.0))
    per_head = torch.tensor([[[tau]], [[1.0]]], dtype=torch.float64)
    return Transport(
        choose(st.sampled_from(REGULARIZERS)),
        prior=choose(st.sampled_from([None, Bias(log_prior)])),
        marginal=choose(st.sampled_from(marginals)),
        temperature=choose(st.sampled_from([tau, per_head])),
    )


def tau_of(problem):
    """The temperature as [H, 1, 1, 1] (or a number)."""
    tau = problem.temperature
    return tau[..., None] if isinstance(tau, torch.Tensor) else tau


def smooth(scores, problem):
    """Whether no key is about to enter or leave the support, where derivatives do not exist."""
    near = [regard.solve(scores + h * draw(7, *scores.shape, scale=1.0), problem).weights > 0 for h in (-1e-4, 1e-4)]
    return bool((near[0] == near[1]).all())


def close(a, b, tolerance=1e-9):
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * (1 + b.abs().max())).all())
