"""FDivergence: construction compares f, link, slope and lower. slope is optional. The certificate uses f alone, so it
is valid even if link is wrong."""

import copy
import functools
import itertools
import math
import pickle
import time

import pytest
import torch
from torch.autograd import forward_ad

import regard
from regard import Bias, FDivergence, Free, Rows, Transport
from regard.backends.row_equation import solve_rows
from regard.convex import conjugate_bound
from regard.lowering import lower_scores
from regard.solvers.rows import judge_rows
from support.fake_device import DEVICE, pretended

D = torch.float64


def xlogx(x):
    return torch.xlogy(x, x)


def dilogarithm(z, one_minus_z):
    """Li2 for 0 < z < 1, by its series where that converges quickly and by reflection elsewhere."""
    small = torch.where(z < 0.5, z, one_minus_z)
    series = sum(small**k / k**2 for k in range(1, 60))
    return torch.where(z < 0.5, series, math.pi**2 / 6 - z.log() * one_minus_z.log() - series)


def softplus_f(x):
    """The integral of log(exp(x) - 1)."""
    return x * x / 2 + dilogarithm((-x).exp().clamp(1e-30, 1 - 1e-16), (-torch.expm1(-x)).clamp(1e-30, 1))


def alpha_divergence(a):
    lower = -1 / (a - 1) if a > 1 else -math.inf
    return (
        lambda x: (x**a - a * x - (1 - a)) / (a * (a - 1)),
        lambda t: (1 + (a - 1) * t) ** (1 / (a - 1)),
        None,
        lower,
    )


def tsallis(a):
    return lambda x: x**a / (a * (a - 1)), lambda t: ((a - 1) * t) ** (1 / (a - 1)), None, 0.0


def bend(x):
    return torch.where(x < 1, x * x / 2, x * x - x + 0.5)


def bent_link(t):
    return torch.where(t < 1, t, (t + 1) / 2)


def bent_slope(t):
    return torch.where(t < 1, torch.ones_like(t), 0.5)


# name -> (f, link, slope, lower)
RIGHT = {
    "kl": (lambda x: x * x.log() - x + 1, torch.exp, torch.exp),
    "kl, slope left out": (lambda x: xlogx(x) - x + 1, torch.exp),
    "reverse kl": (lambda x: -x.log(), lambda t: -1 / t, lambda t: 1 / t**2),
    "reverse kl, from 1": (lambda x: x - 1 - x.log(), lambda t: 1 / (1 - t)),
    "relu by itself": (lambda x: x * x / 2, torch.relu),
    "pearson": (lambda x: (x - 1) ** 2 / 2, lambda t: t + 1, torch.ones_like, -1.0),
    "neyman": (lambda x: (x - 1) ** 2 / x, lambda t: (1 - t) ** -0.5),
    "hellinger": (lambda x: (x.sqrt() - 1) ** 2, lambda t: (1 - t) ** -2),
    "jensen-shannon": (lambda x: xlogx(x) - (x + 1) * ((x + 1) / 2).log(), lambda t: 1 / (2 * (-t).exp() - 1)),
    "le cam": (lambda x: (x - 1) ** 2 / (x + 1), lambda t: 2 / (1 - t).sqrt() - 1, None, -3.0),
    "fermi-dirac": (lambda x: xlogx(x) + xlogx(1 - x), torch.sigmoid),
    "fermi-dirac, with logs": (lambda x: x * x.log() + (1 - x) * (1 - x).log(), torch.sigmoid),
    "bose-einstein": (lambda x: xlogx(x) - xlogx(1 + x), lambda t: 1 / torch.expm1(-t)),
    "softplus": (softplus_f, torch.nn.functional.softplus),
    "exponential": (torch.exp, torch.log, None, 1.0),
    "at most 1": (lambda x: torch.where(x <= 1, x * x / 2, math.inf), lambda t: t.clamp(max=1), None, 0.0),
    "bent": (bend, bent_link, bent_slope, 0.0),
    "bent, slope left out": (bend, bent_link, None, 0.0),
    "signed": (lambda x: x * x / 2, lambda t: t, torch.ones_like),
    "signed, sinh": (lambda x: x * x.asinh() - (1 + x * x).sqrt(), torch.sinh),
    **{f"alpha {a}": alpha_divergence(a) for a in (-2.0, -0.5, 0.5, 1.5, 3.0)},
    **{f"tsallis {a}": tsallis(a) for a in (1.01, 1.1, 1.5, 2.0, 4.0, 10.0)},
}
right = pytest.mark.parametrize("name", RIGHT)


def three_rows(scale=2.0):
    return scale * torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=D)


# --- functions that agree ---------------------------------------------------------------------------------------------


@right
def test_textbook_divergences_are_accepted_and_solved(name):
    own = FDivergence(*RIGHT[name])
    prior = Bias(torch.linspace(-1, 1, 6, dtype=D))
    for marginal in (Rows(), Rows(sink=0.3), Rows(relax=1.3), Free(-9.0)):
        plan = regard.solve(three_rows(), Transport(own, prior=prior, marginal=marginal, temperature=0.7))
        assert plan.certificate().holds(1e-10), (marginal, plan.certificate())


@right
def test_float32_finds_the_same_plan(name):
    own = FDivergence(*RIGHT[name])
    plan = regard.solve(three_rows().float(), Transport(own)).weights
    assert torch.allclose(plan.double(), regard.solve(three_rows(), Transport(own)).weights, atol=1e-5)


def test_what_construction_finds_out():
    found = {name: (own.upper, own.signed) for name in RIGHT for own in [FDivergence(*RIGHT[name])]}
    assert {name for name, (_, signed) in found.items() if signed} == {"signed", "signed, sinh"}
    bounds = {"reverse kl": 0, "neyman": 1, "hellinger": 1, "jensen-shannon": math.log(2), "alpha 0.5": 2}
    for name, bound in bounds.items():
        assert found[name][0] == pytest.approx(bound, abs=1e-9)
    assert found["kl"][0] == found["tsallis 1.5"][0] == found["fermi-dirac"][0] == math.inf


def test_checking_is_quick():
    seconds = []
    for _ in range(10):  # processor time, so that other work on the machine does not matter
        began = time.process_time()
        FDivergence(*RIGHT["hellinger"])
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.01


def test_kl_and_tsallis_by_hand_equal_the_built_in_ones():
    for name, built_in in (("kl", regard.KL()), ("tsallis 1.5", regard.Tsallis(1.5)), ("pearson", regard.Tsallis(2.0))):
        own = regard.solve(three_rows(), Transport(FDivergence(*RIGHT[name]))).weights
        assert torch.allclose(own, regard.solve(three_rows(), Transport(built_in)).weights, atol=1e-12)


def test_nan_scores_stay_nan():
    own = FDivergence(*RIGHT["hellinger"])
    t = torch.tensor([-1.0, math.nan, 2.0], dtype=D)
    assert own.link(t).isnan().tolist() == own.slope(t).isnan().tolist() == [False, True, False]
    assert own.link(t)[2] == math.inf  # above the range of f'


# --- functions that do not --------------------------------------------------------------------------------------------

WRONG = {
    "another power": ("link", "f'(link(t)) = t", lambda x: x**4, lambda t: t + 1),
    "another factor": ("link", "f'(link(t)) = t", torch.square, torch.relu),
    "another constant": ("link", "f'(link(t)) = t", lambda x: x * x.log(), torch.exp),
    "a little off": ("link", "f'(link(t)) = t", lambda x: (x - 1) ** 2 / 2, lambda t: t + 1.0001, None, -1.0),
    "right up to 20": ("link", "f'(link(t)) = t", lambda x: xlogx(x) - x, lambda t: t.clamp(max=20).exp()),
    "too large a link": ("link", "f'(link(t)) = t", lambda x: xlogx(x) + xlogx(1 - x), lambda t: 2 * t.sigmoid()),
    "decreasing": ("link", "an increasing function", lambda x: x * x / 2, torch.neg),
    "a kink in f": (
        "link",
        "an increasing function",
        lambda x: x * x / 2 + (x - 1).abs(),
        lambda t: torch.where(t < 0, t + 1, torch.where(t < 2, 1.0, t - 1)),
        None,
        -1.0,
    ),
    "link mixes elements": ("link", "f'(link(t)) = t", lambda x: xlogx(x) - x, lambda t: t.softmax(0)),
    "f adds up": ("f", "Tensor(float64", lambda x: x.square().sum(), torch.relu),
    "f mixes elements": ("f", "a function of each element", lambda x: x * x / 2 + 0 * x + x[..., :1].detach() * 0.01,
                         lambda t: t),
    "no tensor": ("f", "Tensor(float64", lambda x: 1.0, torch.exp),
    "NaN": ("f", "finite values", lambda x: x * math.nan, torch.exp),
    "concave": ("f", "a strictly convex function", lambda x: -xlogx(x), lambda t: (-t - 1).exp()),
    "straight between 1 and 3": (
        "f",
        "a strictly convex function",
        lambda x: torch.where(x < 1, x * x / 2, torch.where(x < 3, x - 0.5, (x - 2) ** 2 / 2 + 2)),
        lambda t: torch.where(t <= 1, t, t + 2),
        None,
        0.0,
    ),
    "no derivative": ("f", "autograd can differentiate", lambda x: x.detach() ** 2, torch.exp),
    "half a derivative": ("f", "whose derivative autograd finds", lambda x: x * x.detach().log() - x, torch.exp),
    "a slope of 1": ("slope", "the derivative of link", lambda x: xlogx(x) - x, torch.exp, torch.ones_like),
    "a slope 1 % off": ("slope", "the derivative of link", lambda x: xlogx(x) - x, torch.exp, lambda t: 1.01 * t.exp()),
    "a slope below 0": ("slope", "the derivative of link", lambda x: x * x / 2, lambda t: t, torch.sign),
    "no slope to derive": ("slope", "a link that autograd", lambda x: x * x / 2, lambda t: t.detach(), None, 0.0),
    "slope of one number": ("slope", "Tensor(float64", lambda x: x * x / 2, lambda t: t, lambda t: torch.ones(1), 0.0),
    "lower too high": ("lower", "at most -1, got 0", lambda x: (x - 1) ** 2 / 2, lambda t: t + 1, None, 0.0),
    "lower too low": ("lower", "-1, got -2", lambda x: (x - 1) ** 2 / 2, lambda t: t + 1, None, -2.0),
    "lower missing": ("lower", "0, got -inf", lambda x: x * x / 2, lambda t: t.clamp(min=-1)),
    "a slope where link is 0": ("slope", "0 where link is 0", lambda x: x * x / 2, torch.relu, torch.ones_like),
    "lower not needed": ("lower", "the infimum of f'", lambda x: xlogx(x) - x, torch.exp, None, -5.0),
    "float64 only": ("f", "Tensor(float32", lambda x: x * x / 2 * torch.ones(1, dtype=D), torch.relu, None, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_wrong_function(name):
    argument, expected, *functions = WRONG[name]
    with pytest.raises(ValueError, match=rf"^FDivergence\({argument}\): expected .*, got ") as raised:
        FDivergence(*functions)
    assert expected in str(raised.value)


def test_errors_name_the_point_of_failure():
    with pytest.raises(
        ValueError, match=r"^FDivergence\(link\): expected f'\(link\(t\)\) = t, got f'\(5\) = 500 at t = 4$"
    ):
        FDivergence(lambda x: x**4, lambda t: t + 1, torch.ones_like)


@pytest.mark.parametrize("argument", ["f", "link", "slope"])
def test_a_function_that_raises_is_reported(argument):
    def fails(x):
        raise KeyError("no such entry")

    functions = {"f": lambda x: x * x / 2, "link": torch.relu, "slope": None, "lower": 0.0}
    with pytest.raises(ValueError, match=rf"^FDivergence\({argument}\): .*no such entry") as raised:
        FDivergence(**functions | {argument: fails})
    assert isinstance(raised.value.__cause__, KeyError)


# --- where values and derivatives come from ---------------------------------------------------------------------------


def cubic():
    """f = x^3/6: its link sqrt(2 t) has a slope and higher derivatives that differ from it."""
    return FDivergence(lambda x: x**3 / 6, lambda t: (2 * t).sqrt(), lower=0.0)


def test_a_derived_slope_has_all_derivatives():
    own, t = cubic(), torch.linspace(0.2, 3, 5, dtype=D)
    first, second, third = (2 * t) ** -0.5, -((2 * t) ** -1.5), 3 * (2 * t) ** -2.5
    ones = torch.ones_like(t)
    assert torch.allclose(own.slope(t), first)
    assert torch.allclose(torch.func.vmap(own.slope)(t), first)
    assert torch.allclose(torch.func.jvp(own.slope, (t,), (ones,))[1], second)
    assert torch.allclose(torch.func.vmap(torch.func.grad(torch.func.grad(torch.func.grad(own.link))))(t), third)
    with forward_ad.dual_level():
        assert torch.allclose(forward_ad.unpack_dual(own.slope(forward_ad.make_dual(t, ones))).tangent, second)
    x = t.clone().requires_grad_()
    (once,) = torch.autograd.grad(own.slope(x).sum(), x, create_graph=True)
    assert torch.allclose(torch.autograd.grad(once.sum(), x)[0], third)
    with torch.inference_mode():
        assert torch.allclose(own.slope(t.clone()), first)


def test_plans_are_differentiated_by_a_derived_slope():
    own, scores = cubic(), three_rows()[:2].requires_grad_()
    weights = lambda s: regard.solve(s, Transport(own)).weights  # noqa: E731
    assert torch.autograd.gradcheck(weights, scores, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(weights, scores)


def test_attention_is_compiled_with_a_derived_slope():
    own, q = cubic(), torch.randn(1, 2, 5, 4, requires_grad=True)
    attend = functools.partial(regard.attention, problem=Transport(own))
    results = [torch.compile(attend, fullgraph=True)(q, q, q), attend(q, q, q)]
    assert torch.allclose(*results, atol=1e-6)
    assert torch.allclose(*(torch.autograd.grad(out.sum(), q)[0] for out in results), atol=1e-5)


def test_construction_is_checked_at_a_graph_break():
    def build(f, t):
        return FDivergence(f, torch.relu, lower=0.0).link(t)

    compiled, t = torch.compile(build, backend="eager"), torch.ones(3)
    assert torch.equal(compiled(lambda x: x * x / 2, t), t)
    with pytest.raises(ValueError, match=r"FDivergence\(link\)"):
        compiled(torch.square, t)


def test_construction_in_any_mode():
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.device("meta")):
        with mode():
            assert FDivergence(*RIGHT["signed"]).signed
            with pytest.raises(ValueError, match="link"):
                FDivergence(torch.square, torch.relu)


def test_functions_may_hold_tensors():
    a = torch.tensor(1.5, requires_grad=True)
    with pytest.warns(UserWarning, match="requires a gradient and will not get one"):
        own = FDivergence(*tsallis(a))
    plan = regard.solve(three_rows(), Transport(own))
    assert torch.allclose(plan.weights, regard.solve(three_rows(), Transport(regard.Tsallis(1.5))).weights)
    assert not plan.weights.requires_grad and plan.certificate().holds(1e-10)
    scores = three_rows()
    by_order = torch.func.vmap(lambda a: regard.solve(scores, Transport(FDivergence(*tsallis(a)))).weights)
    assert torch.allclose(by_order(torch.tensor([1.5, 1.7], dtype=D))[0], plan.weights)


def test_functions_may_hold_tensors_of_another_device():
    with pretended():
        one = torch.ones(1, device=DEVICE)
        FDivergence(lambda x: x * x / 2 * one, lambda t: t.relu() * one, lower=0.0)
        with pytest.raises(ValueError, match=r"f'\(2\) = 4 at t = 2"):
            FDivergence(lambda x: x * x * one, lambda t: t.relu() * one, lower=0.0)
    empty = torch.ones(1, device="meta")  # no values to compare
    FDivergence(lambda x: x * x / 2 * empty, lambda t: t.relu() * empty, lower=0.0)


def _half_log(x):
    return -x.log() / 2


def _half_over(t):
    return -0.5 / t


def test_copies_are_not_checked_again(monkeypatch):
    own = FDivergence(_half_log, _half_over)
    monkeypatch.setattr("regard.regularizers.examine", lambda *_: pytest.fail("checked again"))
    clones = [copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))]
    clones += [torch.utils._pytree.tree_map(lambda t: t, Transport(own)).regularizer]
    assert len({clone.family for clone in clones}) == 4
    assert all(clone == own and clone.upper == own.upper < 0 for clone in clones)


# --- the certificate --------------------------------------------------------------------------------------------------


def unchecked(f, link, slope=torch.ones_like, lower=-math.inf):
    """An FDivergence that was made without the checks of construction."""
    made = object.__new__(FDivergence)
    made.__setstate__({"user_f": f, "user_link": link, "user_slope": slope, "lower": lower})
    return made


def quartic(x):
    return x**4


LIES = {
    "t + 1": lambda t: t + 1,
    "decreasing": lambda t: -t,
    "zero": torch.zeros_like,
    "infinite": lambda t: torch.full_like(t, math.inf),
    "NaN": lambda t: t * math.nan,
    "1 % too much": lambda t: 1.01 * (t.clamp(min=0) / 4) ** (1 / 3),
}


@pytest.mark.parametrize(("lie", "lower"), list(itertools.product(LIES, (-math.inf, -1.0))))
@pytest.mark.parametrize("marginal", [Rows(), Rows(sink=0.1), Rows(relax=1.0), Free()], ids=repr)
def test_a_wrong_link_does_not_lower_the_bound(lie, lower, marginal):
    """The dual value that is found with a wrong link is at least the true optimum for f = x^4."""
    s = torch.tensor([1.0, 0.5, 0.0], dtype=D)
    best = regard.solve(s, Transport(FDivergence(quartic, lambda t: (t / 4) ** (1 / 3), lower=0.0), marginal=marginal))
    problem = Transport(unchecked(quartic, LIES[lie], lower=lower), marginal=marginal)
    found = regard.certify(s, best.weights, problem)
    assert best.certificate().holds(1e-10)
    assert float(found.primal) == pytest.approx(float(best.certificate().primal), abs=1e-12)  # f alone
    assert not found.dual < found.primal - 1e-12
    if (lie, marginal) != ("1 % too much", Rows()):  # this link gives each key its right share
        assert not regard.solve(s, problem).certificate().holds(1e-6)


def test_a_plan_that_another_beats_is_not_certified():
    """f = x^4 with link = t + 1: a plan 0.02 from the optimum used to have a gap of 0."""
    s, wrong = torch.tensor([0.5, 0.2, -0.3, -0.1], dtype=D), unchecked(quartic, lambda t: t + 1, lower=-1.0)
    plan = regard.solve(s, Transport(wrong))
    judged = plan.certificate()
    better = regard.solve(s, Transport(FDivergence(quartic, lambda t: (t / 4) ** (1 / 3), lower=0.0)))
    loss = float(better.certificate().primal - judged.primal)
    assert loss > 0.02 and float(judged.gap) >= loss and not judged.holds(1e-3)


def test_a_price_of_minus_infinity_is_no_proof():
    """Only rows without keys have a single plan and no price. In other rows a price of -inf is invalid, and the
    certificate computes the bound."""
    s = torch.tensor([[1.0, 0.5], [-math.inf, -math.inf]], dtype=D)
    form, folded = lower_scores(s, Transport(FDivergence(*RIGHT["tsallis 2.0"])), D)
    best = solve_rows(form, folded, order=2)
    best.dual = torch.full_like(best.dual, -math.inf)
    best.weights = torch.where(best.weights > 0, 0.5, best.weights)  # not the optimum, which is (0.75, 0.25)
    found = {name: part.flatten().tolist() for name, part in judge_rows(best, best.weights).items()}
    assert found["gap"][0] > 0.05 and found["gap"][1] == 0


def test_signed_plans_are_certified_without_p_above_0():
    scores = torch.tensor([3.0, -2.0, 1.0], dtype=D)
    problem = Transport(FDivergence(*RIGHT["signed"]))
    plan = regard.solve(scores, problem)
    assert (plan.weights < 0).any() and plan.certificate().holds(1e-12)
    nonnegative = regard.solve(scores, Transport(regard.Tsallis(2.0))).weights
    assert float(regard.certify(scores, nonnegative, problem).gap) > 0.1  # p >= 0 costs something
    assert not regard.certify(scores, plan.weights, Transport(FDivergence(*RIGHT["tsallis 2.0"]))).holds(1e-3)


def test_hard_routing_is_certified_where_the_conjugate_is_infinite():
    problem = Transport(FDivergence(*RIGHT["reverse kl"]), temperature=0.0)
    assert regard.solve(three_rows(), problem).certificate().holds(1e-12)


CONJUGATES = {  # f, its conjugate over x >= 0, and etas
    "kl": (lambda x: xlogx(x) - x, torch.exp, (-900.0, -30.0, -1.0, 0.0, 5.0, 100.0)),
    "square": (lambda x: x * x / 2, lambda t: t.relu() ** 2 / 2, (-1e6, -1.0, 0.0, 1e-9, 1.0, 1e6)),
    "reverse kl": (lambda x: -x.log(), lambda t: -1 - (-t).log(), (-1e6, -1.0, -1e-6)),
    "fermi-dirac": (lambda x: xlogx(x) + xlogx(1 - x), torch.nn.functional.softplus, (-50.0, -1.0, 0.0, 1.0, 15.0)),
    "absolute": (lambda x: (x - 1).abs(), lambda t: torch.where(t < -1, -1.0, t), (-3.0, -1.0, -0.5, 0.0, 0.9)),
}


@pytest.mark.parametrize("name", CONJUGATES)
@pytest.mark.parametrize("start", [0.0, 1e-9, 1.0, 1e9, -5.0, math.inf, math.nan])
def test_the_bound_is_the_conjugate_wherever_the_search_begins(name, start):
    f, conjugate, etas = CONJUGATES[name]
    eta = torch.tensor(etas, dtype=D)
    bound, exact = conjugate_bound(f, eta, torch.full_like(eta, start)), conjugate(eta)
    assert (bound >= exact - 1e-14 * (1 + exact.abs())).all()
    assert torch.allclose(bound, exact, rtol=1e-13, atol=1e-13)


def test_an_unbounded_conjugate_is_infinite():
    eta = torch.tensor([-1.0, 0.0, 1.0, math.nan], dtype=D)
    found = conjugate_bound(lambda x: -x.log(), eta, torch.ones_like(eta))
    assert found[0].isfinite() and found[1:3].tolist() == [math.inf, math.inf] and found[3].isnan()
    line = conjugate_bound(lambda x: x, torch.tensor([0.5, 1.0, 2.0], dtype=D), torch.ones(3, dtype=D), signed=True)
    assert line[0] == line[2] == math.inf and abs(line[1]) < 1e-12


def test_the_bound_over_negative_ratios():
    eta = torch.tensor([-1e3, -1.0, 0.0, 2.0], dtype=D)
    for start in (-1e6, 0.0, 3.0, math.nan):
        found = conjugate_bound(lambda x: x * x / 2, eta, torch.full_like(eta, start), signed=True)
        assert torch.allclose(found, eta**2 / 2, rtol=1e-13, atol=1e-13)


# --- regularisers written as classes ----------------------------------------------------------------------------------


def stiff(inverse):
    """A class with f = 2 (r - 1)^2 and the given link, whose right form is relu(1 + t / 4)."""

    class Stiff(regard.regularizers.Regularizer):
        family = f"stiff {inverse(torch.ones(1)).item()}"

        def f(self, ratio):
            return 2 * (ratio - 1) ** 2

        def link(self, t):
            return inverse(t)

        def slope(self, t):
            return torch.ones_like(t) / 4

    return Stiff()


def test_a_certificate_does_not_rely_on_the_link_of_a_class():
    problem = Transport(stiff(lambda t: (1 + t / 4).relu()))
    assert regard.solve(three_rows(), problem).certificate().holds(1e-10)
    wrong = Transport(stiff(lambda t: (1 + 4 * t).relu()))
    judged = regard.solve(three_rows(), wrong).certificate()
    assert not judged.holds(1e-3)
    better = regard.solve(three_rows(), problem).weights
    assert (regard.certify(three_rows(), better, wrong).primal <= judged.dual + 1e-9).all()  # the bound is a bound


def test_a_class_without_its_formulas_raises_when_it_is_defined():
    with pytest.raises(TypeError, match="Half: expected `family`, `f`, `link` and `slope`, got no family, slope"):

        class Half(regard.regularizers.Regularizer):
            def f(self, ratio):
                return ratio

            def link(self, t):
                return t


def test_a_class_may_extend_a_regulariser_and_not_replace_its_formulas():
    class Half(regard.Tsallis):
        alpha: float = 1.5

    scores = three_rows()
    assert torch.equal(
        regard.solve(scores, Transport(Half())).weights, regard.solve(scores, Transport(regard.Tsallis(1.5))).weights
    )

    class Squares(FDivergence):
        def __init__(self):
            super().__init__(lambda ratio: ratio**2 / 2, torch.relu, lower=0.0)

    expected = regard.solve(scores, Transport(regard.Tsallis(2.0))).weights
    assert torch.allclose(regard.solve(scores, Transport(Squares())).weights, expected)
    with pytest.raises(TypeError, match="Other: expected a `family` of its own, got 'tsallis' and its own link"):
        type("Other", (regard.Tsallis,), {"link": lambda self, t: t})
    with pytest.raises(ValueError, match="family: expected a name that is not taken, got 'kl'"):
        type("KL", (regard.KL,), {"family": "kl", "__module__": "elsewhere"})
