"""Rows of little mass, of small priors and of one key, for the links of the native engine."""

import pytest
import torch

import regard
from regard import AuxRequest, Bias, Free, Rows, Transport, Tsallis
from support.native import each_isa, engine, error, normal, qkv, spread

pytestmark = pytest.mark.usefixtures("isa", "poison")


@each_isa
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("level", [-100.0, -300.0, -1e9])
def test_links_rows_whose_priors_underflow(level, alpha):
    """y overflows, or is so large that scores have no effect. Then the plan is proportional to the prior."""
    given = qkv(11, B=1, H=1, Hkv=1, Tq=70, Tk=130, D=8, Dv=5) | {"bias": normal(12, 70, 130)}
    q, k, v, bias = (t.requires_grad_() for t in given.values())
    far = torch.arange(70) % 3 != 1  # the other rows are ordinary
    log_prior = bias + torch.where(far[:, None], level / (alpha - 1), 0.0)  # at -1e9 rounding removes the bias
    problem = Transport(Tsallis(alpha), prior=Bias(log_prior), marginal=Rows(mass=2.0))
    expected = 2 * log_prior.double().softmax(-1)
    close = 1e-5 - 1e-7 * max(-300.0, level) / (alpha - 1)  # a large logarithm has fewer digits
    weight = normal(13, 70, 5)
    right = torch.autograd.grad((expected @ v[0, 0].double())[far].mul(weight[far]).sum(), (bias, v), retain_graph=True)
    for isa in engine.isas():
        engine.use(isa)
        out, aux = regard.attention(
            q, k, v, problem=problem, backend="native", return_aux=AuxRequest(entropy=True, support=True, key_mass=True)
        )
        assert error(out[0, 0, far].detach(), (expected @ v[0, 0].double())[far].detach()) < close
        assert out.isfinite().all() and (aux.support[0, 0] == 130)[far].all()
        assert abs(aux.key_mass.double().sum() / 140 - 1) < close
        distribution = torch.distributions.Categorical(logits=log_prior.detach().double())
        assert error(aux.entropy[0, 0, far].detach(), distribution.entropy()[far]) < close
        weights, _ = regard.topk(q, k, 130, problem=problem)
        assert error(weights[0, 0, far], expected.detach().sort(-1, descending=True).values[far]) < close
        found = torch.autograd.grad(out[0, 0, far].mul(weight[far]).sum(), (q, k, bias, v), retain_graph=True)
        assert found[0].abs().max() == found[1].abs().max() == 0
        assert error(found[2], right[0].double()) < close and error(found[3], right[1].double()) < close


@each_isa
@pytest.mark.parametrize(("alpha", "level", "mass"), [(10.0, -5.0, 1.0), (2.0, -48.6, 1e-25)])
def test_links_rows_of_small_priors_whose_scores_matter(alpha, level, mass):
    """With many keys or a small mass, the price at which a single key takes the mass is far from the price of the
    row."""
    q, k, v = qkv(16, B=1, H=1, Hkv=1, Tq=9, Tk=2000, D=8, Dv=5).values()
    for isa in engine.isas():
        engine.use(isa)
        found, truth = (
            regard.attention(
                *(t.to(dtype) for t in (q, k, v)),
                problem=Transport(Tsallis(alpha), prior=Bias(torch.full((9, 1), level)), marginal=Rows(mass=mass)),
                backend=backend,
            ).double()
            / mass
            for backend, dtype in (("native", torch.float32), ("torch", torch.float64))
        )
        assert error(found, truth) < (1e-5 if alpha < 3 else 1e-3)


@each_isa
@pytest.mark.parametrize("alpha", [1.3, 2.0, 2.5])
def test_links_a_row_of_one_key_has_no_entropy(alpha):
    """The entropy is exactly 0, because none of its sums is rounded."""
    q, k, v = qkv(17, B=1, H=1, Hkv=1, Tq=200, Tk=1, D=8, Dv=5).values()
    for marginal in (Rows(relax=0.7), Rows(mass=0.3), Free(4.0)):
        for isa in engine.isas():
            engine.use(isa)
            problem = Transport(Tsallis(alpha), marginal=marginal)
            _, aux = regard.attention(
                q.requires_grad_(), k, v, problem=problem, backend="native", return_aux=AuxRequest(entropy=True)
            )
            assert aux.entropy.abs().max() == 0
            assert torch.autograd.grad(aux.entropy.sum(), q)[0].abs().max() < 1e-5


@each_isa
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_links_a_sink_takes_the_mass_of_a_row_without_keys(alpha):
    """The other rows of the call store lists."""
    q, k, v = spread(18, 6.0, B=1, H=1, Hkv=1, Tq=20, Tk=1000, D=8, Dv=5).values()
    mask = torch.arange(20)[:, None] != 7
    for isa in engine.isas():
        engine.use(isa)
        sink = torch.tensor([0.5]).requires_grad_()
        out, aux = regard.attention(
            q, k, v, mask, problem=Transport(Tsallis(alpha), marginal=Rows(sink=sink)), backend="native",
            return_aux=AuxRequest(dual=True, mass=True, entropy=True, max_weight=True),
        )  # fmt: skip
        assert out[0, 0, 7].abs().max() == aux.mass[0, 0, 7] == aux.entropy[0, 0, 7] == 0
        assert aux.max_weight[0, 0, 7] == 1 and abs(aux.dual[0, 0, 7] - (0.5 - 1 / (alpha - 1))) < 1e-5
        assert torch.autograd.grad(out.sum() + aux.entropy.sum(), sink)[0].isfinite().all()


@each_isa
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 2.5, 3.0])
def test_links_relaxed_rows_of_little_mass(alpha, backend):
    """The mass is exp(price/rho), also where the prior makes it very small."""
    prior = Bias(torch.linspace(-70, 3, 90)[:, None])
    problem = Transport(Tsallis(alpha), prior=prior, marginal=Rows(relax=0.9))
    for isa in engine.isas() if backend == "native" else [engine.isa()]:
        engine.use(isa)
        for dtype in (torch.float32, torch.float64):
            q, k, v = (t.to(dtype) for t in qkv(14, B=1, H=1, Hkv=1, Tq=90, Tk=40, D=8, Dv=5).values())
            _, aux = regard.attention(
                q, k, v, problem=problem, backend=backend, return_aux=AuxRequest(dual=True, mass=True)
            )
            log_mass, price = aux.mass.double().log(), aux.dual.double() / 0.9
            assert (log_mass - price).abs().max() < (2e-5 if dtype == torch.float32 else 1e-9)
