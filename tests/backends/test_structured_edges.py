"""Edges of structured priors that random problems found: densities of 0, tiny priors, far null keys, no queries."""

import math

import pytest
import torch

import regard
from regard import AuxRequest, Bias, ByKeys, Causal, Density, Free, Prefix, Rows, Transport, Tsallis

BACKENDS = ["torch", "native"]
MARGINALS = {"rows": Rows(), "sink": Rows(sink=0.3), "relax": Rows(relax=0.7), "free": Free(0.1)}


def inputs(T=3, D=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, T, D, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("marginal", MARGINALS)
def test_the_gradient_of_lse_by_a_density_of_0(marginal, backend):
    """d lse / d pi = exp(s - lse), also where pi = 0."""
    q, k, v = inputs()
    density = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    density[1, 2] = 0

    def lse(density):
        problem = Transport(prior=Density(density), marginal=MARGINALS[marginal])
        return regard.attention(q, k, v, problem=problem, return_aux=AuxRequest(lse=True), backend=backend)[1].lse.sum()

    leaf = density.clone().requires_grad_()
    (found,) = torch.autograd.grad(lse(leaf), leaf)
    moved = density.clone()
    moved[1, 2] = 1e-7
    assert found[1, 2] > 0.01
    assert float(found[1, 2]) == pytest.approx(float(lse(moved) - lse(density)) / 1e-7, rel=1e-5)


def test_lse_with_a_density_of_0_far_above_the_other_keys():
    q, k, v = inputs()
    density = torch.ones(3, 3, dtype=torch.float64)
    density[:, 1] = 0
    leaf, bias = density.requires_grad_(), torch.tensor([0.0, 2000.0, 0.0], dtype=torch.float64)
    problem = Transport(prior=Density(leaf) * Bias(bias))
    _, aux = regard.attention(q, k, v, problem=problem, return_aux=AuxRequest(lse=True), backend="torch")
    (found,) = torch.autograd.grad(aux.lse.sum(), leaf)
    assert aux.lse.isfinite().all() and not found.isnan().any()


@pytest.mark.parametrize("regularizer", [None, Tsallis(1.5), Tsallis(2.0)], ids=["KL", "1.5", "2.0"])
def test_a_density_of_0_beside_tiny_priors_enters_no_other_gradient(regularizer):
    """The native backward counts a density of 0 as a tiny one, which is large beside a prior of exp(-70)."""
    q, k, v = inputs(5)
    log_prior = torch.linspace(-70, -66, 25, dtype=torch.float64).reshape(5, 5)
    log_prior[:, 1] = -5.0
    density = torch.rand(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    density[:, 1] = 0
    results = []
    for backend in BACKENDS:
        leaves = {
            "bias": log_prior.clone().requires_grad_(),
            "row": torch.zeros(5, 1, dtype=torch.float64, requires_grad=True),
            "table": torch.zeros(5, dtype=torch.float64, requires_grad=True),
            "tau": torch.ones(1, dtype=torch.float64, requires_grad=True),
            "density": density.clone().requires_grad_(),
        }
        prior = Bias(leaves["bias"]) * Bias(leaves["row"]) * regard.Relative(leaves["table"])
        problem = Transport(regularizer, prior=prior * Density(leaves["density"]), temperature=leaves["tau"])
        regard.attention(q, k, v, problem=problem, backend=backend).square().sum().backward()
        results.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("regularizer", [None, Tsallis(1.5)], ids=["KL", "entmax"])
def test_the_variance_of_scores_beside_a_far_null_key(regularizer):
    """The null key has all of the mass, so the variance is 0."""
    q = torch.full((1, 1, 2, 4), 10.0)
    k = -torch.rand(1, 1, 40, 4, generator=torch.Generator().manual_seed(0)) - 5
    problem = Transport(regularizer, prior=Bias(torch.linspace(-1, 1, 40)), marginal=Rows(sink=3.0))
    for backend in BACKENDS:
        _, aux = regard.attention(
            q, k, k, problem=problem, return_aux=AuxRequest(score_variance=True), scale=1.0, backend=backend
        )
        assert aux.score_variance.abs().max() < 1e-20, backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_entropy_gradient_of_free_rows_without_density(backend):
    """A free row whose only key has density 0 has no mass: its gradients are 0."""
    q, k, v = (x.requires_grad_() for x in inputs())
    density = torch.eye(3, dtype=torch.float64)
    density[1, 1] = 0
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    mask = torch.eye(3, dtype=torch.bool)
    problem = Transport(prior=Density(density) * Bias(bias), marginal=Free())
    out, aux = regard.attention(q, k, v, mask, problem=problem, return_aux=AuxRequest(entropy=True), backend=backend)
    (aux.entropy.sum() + out.sum()).backward()
    for leaf in (q, k, v, bias):
        assert leaf.grad.isfinite().all()
    assert bias.grad[1] == 0


@pytest.mark.parametrize("prior", [Causal("bottom_right"), Causal("bottom_right") | Prefix(3), None], ids=repr)
def test_a_temperature_by_keys_without_queries(prior):
    k = torch.randn(1, 2, 5, 4)
    density = Density(torch.rand(1, 5))
    problem = Transport(prior=density if prior is None else prior * density, temperature=ByKeys(0.5, 0.1))
    for backend in BACKENDS:
        out = regard.attention(k[:, :, :0], k, k, problem=problem, backend=backend)
        assert out.shape == (1, 2, 0, 4) and not math.isnan(out.sum())
