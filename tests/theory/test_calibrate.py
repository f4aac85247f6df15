"""`calibrate`: temperatures and multipliers of keys from observed choices, against another optimizer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import Transport

double = torch.float64
some = settings(deadline=None, max_examples=40, derandomize=True)


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=double)


def chosen(logits, seed=0):
    """One key per row, drawn from softmax of the logits."""
    p = logits.softmax(-1).flatten(0, -2)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed)).view(logits.shape[:-1])


def moments(scores, targets, beta):
    """E_target[s] and E_model[s] of each row and key, from their definitions; integer targets."""
    p = (beta * scores).softmax(-1)
    t = torch.nn.functional.one_hot(targets, scores.shape[-1]).double()
    s = torch.where(scores == -math.inf, 0.0, scores)
    return t * s, p * s


def by_lbfgs(scores, targets, shape):
    """An oracle: beta of this shape that maximizes the mean log-likelihood, by PyTorch's LBFGS."""
    scores = scores.clamp(min=-1e4)  # 0 * inf has no derivative
    beta = torch.ones(shape, dtype=double, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [beta], max_iter=1000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        log_p = (beta * scores).log_softmax(-1)
        total = -log_p.gather(-1, targets[..., None]).mean()
        total.backward()
        return total

    optimizer.step(loss)
    return beta.detach()


SHAPES = {"global": (), "head": (3, 1, 1), "key": (6,)}


@pytest.mark.parametrize("per", SHAPES)
def test_calibrate_maximises_the_likelihood(per):
    scores = normal(2, 3, 100, 6)
    truly = torch.tensor([0.5, 1.0, 2.0], dtype=double).view(3, 1, 1)
    targets = chosen(truly * scores)
    found = regard.calibrate(scores, targets, per=per)
    expected = by_lbfgs(scores, targets, SHAPES[per])
    assert found.beta.shape == expected.flatten().shape if per != "global" else found.beta.shape == ()
    assert torch.allclose(found.beta, expected.view_as(found.beta), rtol=1e-6)
    assert torch.equal(found.temperature, 1 / found.beta)
    assert found.converged and not found.separable.any() and found.rows == 600 and 0 < found.iterations < 20
    # the certificate, computed independently
    observed, modelled = moments(scores, targets, found.beta.view(SHAPES[per]))
    over = {"global": (0, 1, 2, 3), "head": (0, 2, 3), "key": (0, 1, 2)}[per]
    rows = 200 if per == "head" else 600
    missed = (observed.sum(over) - modelled.sum(over)).abs() / rows
    assert (missed < 1e-12).all() and (found.residual < 1e-12).all()
    before, after = (-torch.nn.functional.cross_entropy((b * scores).flatten(0, -2), targets.flatten())
                     for b in (torch.ones(()), found.beta.view(SHAPES[per])))  # fmt: skip
    assert torch.allclose(found.log_likelihood_before.mean(), before)
    assert torch.allclose(found.log_likelihood.mean(), after) and after > before


@pytest.mark.parametrize("temperature", [0.1, 0.7, 3.0])
def test_a_known_temperature_is_recovered(temperature):
    scores = normal(20000, 8, seed=3)
    found = regard.calibrate(scores, chosen(scores / temperature))
    p = (scores / temperature).softmax(-1)
    variance = (p * scores**2).sum(-1) - (p * scores).sum(-1) ** 2
    error = 1 / variance.sum().sqrt().item()  # Cramer-Rao
    assert found.beta.item() == pytest.approx(1 / temperature, abs=4 * error) and error < 0.05 / temperature


def test_distributions_as_targets():
    """The fit recovers the temperatures, or the key multipliers, of the softmax that is the target."""
    scores = normal(2, 3, 40, 5)
    tau = torch.tensor([0.2, 1.0, 7.0], dtype=double)
    found = regard.calibrate(scores, (scores / tau.view(3, 1, 1)).softmax(-1), per="head")
    assert torch.allclose(found.temperature, tau, rtol=1e-10)
    assert torch.allclose(
        regard.calibrate(scores[0], (scores[0] / 0.3).softmax(-1), per="head").temperature, tau * 0 + 0.3
    )
    multipliers = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0], dtype=double)
    found = regard.calibrate(scores, (scores * multipliers).softmax(-1), per="key")
    assert torch.allclose(found.beta, multipliers, atol=1e-9) and found.converged
    half = regard.calibrate(scores.bfloat16(), (scores.bfloat16().float() / 0.5).softmax(-1).bfloat16())
    assert half.beta.dtype == double and half.temperature.item() == pytest.approx(0.5, rel=0.02)


def test_calibrated_multipliers_fit_attention():
    """The result of `calibrate` can be passed to attention as it is."""
    q, k = normal(1, 1, 50, 4), normal(1, 1, 6, 4, seed=1)
    wanted = torch.tensor([1.5, 0.5, 1.0, -0.5, 2.0, 1.0], dtype=double)
    plan = lambda multiplier: regard.weights_at(q, k, torch.arange(6), key_scale=multiplier)  # noqa: E731
    found = regard.calibrate(q @ k.mT / 2, plan(wanted), per="key")
    assert torch.allclose(plan(found.beta), plan(wanted), atol=1e-10)
    warm = regard.calibrate(q @ k.mT / 2, regard.weights_at(q, k, torch.arange(6), problem=Transport(temperature=0.4)))
    assert warm.temperature.item() == pytest.approx(0.4, rel=1e-9)


def test_keys_that_are_not_admissible():
    scores = normal(300, 5, seed=1)
    scores[:150, 3:] = -math.inf
    targets = chosen(1.7 * scores, seed=2)
    padded = torch.cat([scores, torch.full((300, 2), -math.inf, dtype=double)], -1)
    for per in ("global", "key"):
        plain, wide = regard.calibrate(scores, targets, per=per), regard.calibrate(padded, targets, per=per)
        beta = wide.beta if per == "global" else wide.beta[:5]
        assert torch.allclose(plain.beta, beta, rtol=1e-10) and plain.converged and wide.converged
    assert wide.uninformative.tolist() == [False] * 5 + [True] * 2 and (wide.beta[5:] == 1).all()
    assert regard.calibrate(scores, targets).beta.item() == pytest.approx(
        by_lbfgs(scores, targets, ()).item(), rel=1e-6
    )


def test_rows_left_out():
    scores = normal(60, 4, seed=2)
    targets = chosen(scores)
    some_targets = torch.where(torch.arange(60) % 3 == 0, -1, targets)
    scores[3] = -math.inf  # allowed, because the row is left out
    for per in ("global", "key"):
        used = torch.arange(60) % 3 != 0
        expected = regard.calibrate(scores[used], targets[used], per=per)
        found = regard.calibrate(scores, some_targets, per=per)
        assert torch.allclose(found.beta, expected.beta, rtol=1e-12) and found.rows == expected.rows == 40
        assert torch.allclose(found.log_likelihood, expected.log_likelihood)
    spread = torch.nn.functional.one_hot(some_targets.clamp(min=0), 4) * (some_targets >= 0)[:, None]
    assert torch.equal(regard.calibrate(scores, spread.double()).beta, regard.calibrate(scores, some_targets).beta)
    for per in ("global", "key"):
        nothing = regard.calibrate(scores, torch.full((60,), -1), per=per)
        assert nothing.rows == 0 and nothing.uninformative.all() and (nothing.beta == 1).all() and nothing.converged


@some
@given(st.integers(0, 2**31), st.floats(0.01, 100), st.floats(-50, 50), st.sampled_from(["global", "head"]))
def test_shifts_and_scales(seed, factor, shift, per):
    """A shift of a row does not change beta; multiplying the scores by c divides it by c."""
    scores = normal(2, 3, 20, 5, seed=seed)
    targets = chosen(0.8 * scores, seed=seed)
    plain = regard.calibrate(scores, targets, per=per)
    shifted = regard.calibrate(scores + shift * normal(2, 3, 20, 1, seed=seed + 1), targets, per=per)
    scaled = regard.calibrate(factor * scores, targets, per=per)
    assert plain.converged and shifted.converged and scaled.converged
    assert torch.allclose(shifted.beta, plain.beta, rtol=1e-8, atol=1e-10)
    assert torch.allclose(scaled.beta * factor, plain.beta, rtol=1e-8, atol=1e-10)
    assert torch.equal(scaled.separable, plain.separable) and torch.equal(scaled.anticorrelated, plain.anticorrelated)
    assert (plain.log_likelihood >= plain.log_likelihood_before - 1e-12).all()


@some
@given(st.integers(0, 2**31), st.floats(0.1, 10), st.integers(2, 6))
def test_multipliers_scale_and_match_their_moments(seed, factor, keys):
    scores = normal(40, keys, seed=seed)
    targets = chosen(scores, seed=seed)
    plain, scaled = (regard.calibrate(c * scores, targets, per="key") for c in (1.0, factor))
    assert plain.converged and scaled.converged and torch.equal(plain.separable, scaled.separable)
    assert torch.allclose(scaled.beta * factor, plain.beta, rtol=1e-6, atol=1e-8)
    if not plain.separable.any():
        observed, modelled = moments(scores, targets, plain.beta)
        assert ((observed - modelled).mean(0).abs() < 1e-9).all()


def test_separable_choices_are_reported():
    scores = normal(3, 50, 4)
    targets = scores.argmax(-1)
    targets[1] = chosen(scores[1])
    found = regard.calibrate(scores, targets, per="head")
    assert found.separable.tolist() == [True, False, True] and found.converged
    assert found.temperature[[0, 2]].tolist() == [0, 0] and 0.5 < found.temperature[1] < 2
    assert found.log_likelihood[0] == 0 and found.residual[0] == 0
    text = str(found)
    assert "separable" in text and "head 0, 2" in text and "temperature 0" in text
    # a single row that contradicts makes the answer finite, however large it is
    targets[0, 0] = scores[0, 0].argmin()
    nearly = regard.calibrate(scores, targets, per="head")
    assert not nearly.separable[0] and 0 < nearly.temperature[0] < math.inf and nearly.residual[0] < 1e-12
    # ties at the top are shared
    tied = regard.calibrate(torch.tensor([[1.0, 1.0, 0.0]] * 4), torch.tensor([0, 1, 1, 0]))
    assert tied.separable and tied.log_likelihood.item() == pytest.approx(-math.log(2))
    # a ridge makes it finite: its gradient is the difference of the moments
    ridged = regard.calibrate(scores[2], scores[2].argmax(-1), ridge=0.01)
    observed, modelled = moments(scores[2], scores[2].argmax(-1), ridged.beta)
    assert not ridged.separable and ridged.converged
    assert (observed - modelled).sum(-1).mean().item() == pytest.approx(0.01 * (ridged.beta.item() - 1), abs=1e-12)


def test_anticorrelated_scores():
    scores = normal(200, 5)
    found = regard.calibrate(scores, chosen(-2 * scores))
    assert found.anticorrelated and found.beta == 0 and found.temperature == math.inf and found.converged
    assert found.log_likelihood.item() == pytest.approx(-math.log(5)) and found.residual > 0.1
    assert "temperature inf" in str(found) and not found.separable
    uniform = regard.calibrate(scores, torch.full_like(scores, 0.2))
    assert uniform.temperature == math.inf and uniform.residual < 1e-12
    both = regard.calibrate(
        torch.stack([scores, scores]), torch.stack([scores.argmin(-1), scores.argmax(-1)]), per="head"
    )
    assert both.anticorrelated.tolist() == [True, False] and both.separable.tolist() == [False, True]


def test_scores_without_information():
    scores = normal(2, 30, 1).expand(2, 30, 4).clone()
    scores[1] += normal(30, 4, seed=1)
    targets = torch.stack([chosen(scores[0]), chosen(scores[1])])
    found = regard.calibrate(scores, targets, per="head")
    assert found.uninformative.tolist() == [True, False] and found.beta[0] == 1 and not found.separable.any()
    assert "uninformative" in str(found) and "head 0:" in str(found) and found.converged
    # rows without information do not change the result of the others
    alone = regard.calibrate(scores[1], targets[1])
    assert regard.calibrate(scores, targets).beta.item() == pytest.approx(alone.beta.item(), rel=1e-12)


def test_a_key_that_is_never_chosen():
    scores = normal(100, 4).abs() + 0.1
    targets = chosen(torch.where(torch.arange(4) == 2, -math.inf, scores))
    found = regard.calibrate(scores, targets, per="key")
    assert found.separable.tolist() == [False, False, True, False] and found.beta[2] == -math.inf
    keys = torch.tensor([0, 1, 3])
    without = regard.calibrate(scores[:, keys], torch.searchsorted(keys, targets), per="key")
    assert torch.allclose(found.beta[keys], without.beta, rtol=1e-8) and found.converged
    assert torch.allclose(found.log_likelihood, without.log_likelihood) and "key 2: the likelihood" in str(found)
    ridged = regard.calibrate(scores, targets, per="key", ridge=1e-3)
    observed, modelled = moments(scores, targets, ridged.beta)
    assert not ridged.separable.any() and ridged.converged
    assert torch.allclose((observed - modelled).mean(0), 1e-3 * (ridged.beta - 1), atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_keys_that_separate_together(seed):
    """No key separates alone; two do together, beside two that have a finite answer."""
    scores = torch.full((500, 4), -math.inf, dtype=double)
    scores[:200, :2], scores[200:, 2:] = normal(200, 2, seed=seed), normal(300, 2, seed=seed + 100)
    targets = torch.cat([(2 * scores[:200, 0] < scores[:200, 1]).long(), 2 + chosen(scores[200:, 2:], seed)])
    found = regard.calibrate(scores, targets, per="key")
    assert found.separable.tolist() == [True, True, False, False] and found.converged
    rest = regard.calibrate(scores[200:, 2:], targets[200:] - 2, per="key")
    assert torch.allclose(found.beta[2:], rest.beta, rtol=1e-6) and (found.beta[:2] == math.inf).all()
    assert found.log_likelihood.item() == pytest.approx(0.6 * rest.log_likelihood.item(), rel=1e-6)
    # A single row that contradicts makes it finite, however small its scores are.
    scores[0, :2] *= 1e-3
    targets[0] = 1 - targets[0]
    nearly = regard.calibrate(scores, targets, per="key")
    assert not nearly.separable.any() and nearly.converged and nearly.beta[0] > 50


def test_the_report_and_too_few_steps():
    scores = normal(200, 5)
    targets = chosen(3 * scores)
    text = str(regard.calibrate(scores, targets))
    for word in (
        "one temperature from 200 rows",
        "temperature  ",
        "log-likelihood",
        "->",
        "moments match",
        "converged",
    ):
        assert word in text
    for per in ("global", "key"):
        short = regard.calibrate(scores, targets, per=per, max_iterations=1)
        assert not short.converged and short.iterations == 1 and "NO, after 1 step" in str(short)
        assert (short.residual > 1e-6).any()
    assert "Calibration per key" in str(regard.calibrate(scores, targets, per="key"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_masks_lowest_number_is_not_admissible(dtype):
    scores = normal(200, 6).to(dtype)
    chosen = (scores[:, :4] / 2).softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
    forbidden, lowest = scores.clone(), scores.clone()
    forbidden[:, 4:], lowest[:, 4:] = -math.inf, torch.finfo(dtype).min
    fits = [regard.calibrate(x, chosen) for x in (forbidden, lowest)]
    assert float(fits[0].temperature) == pytest.approx(float(fits[1].temperature)) and fits[1].converged


# --- bad input --------------------------------------------------------------------------------------------------------

s, t = torch.randn(7, 5), torch.zeros(7).long()


def calibrate(scores=s, targets=t, **arguments):
    return lambda: regard.calibrate(scores, targets, **arguments)


ERRORS = {
    "scores": (calibrate([1.0]), TypeError, "scores: expected a floating-point tensor"),
    "integer scores": (calibrate(s.int()), TypeError, "scores: expected a floating-point tensor"),
    "no keys": (calibrate(s[:, :0]), ValueError, r"scores: expected shape \[..., Tk\] with Tk > 0"),
    "infinite scores": (calibrate(torch.full((7, 5), math.inf)), ValueError, "scores: expected finite numbers or -inf"),
    "targets": (calibrate(targets=[0] * 7), TypeError, "targets: expected integers or"),
    "bool targets": (calibrate(targets=s > 0), TypeError, "targets: expected integers or"),
    "targets' shape": (calibrate(targets=t[:3]), ValueError, r"targets: expected integers of shape \[7\], got"),
    "distributions' shape": (
        calibrate(targets=t.float()),
        ValueError,
        r"targets: expected distributions of shape \[7, 5\]",
    ),
    "index": (calibrate(targets=t + 5), ValueError, "targets: expected keys below Tk=5.*got 5"),
    "not a distribution": (
        calibrate(targets=s.softmax(-1) / 2),
        ValueError,
        "targets: expected rows >= 0 that sum to 1",
    ),
    "negative": (calibrate(targets=s / s.sum(-1, keepdim=True)), ValueError, "targets: expected rows >= 0"),
    "nan targets": (calibrate(targets=s * math.nan), ValueError, "targets: expected rows >= 0"),
    "forbidden": (calibrate(torch.full((7, 5), -math.inf)), ValueError, "targets: expected admissible keys"),
    "per": (calibrate(per="layer"), ValueError, 'per: expected "global", "head" or "key", got \'layer\''),
    "heads of what": (calibrate(per="head"), ValueError, r"scores: expected shape \[..., H, Tq, Tk\].*got \[7, 5\]"),
    "ridge": (calibrate(ridge=-1.0), ValueError, "ridge: expected a finite number >= 0, got -1.0"),
    "steps": (calibrate(max_iterations=0), ValueError, "max_iterations: expected a positive int, got 0"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
