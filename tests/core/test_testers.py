"""Tests of the tests: a defect is put into the library, and the tests that cover it must fail."""

import pytest
import test_attention
import test_plan
import test_properties
import test_statistics
import torch

import regard
from regard.backends import BACKENDS, reference, row_equation
from regard.solvers import rows
from regard.statistics import ROW_STATISTICS, STATISTICS
from support.cases import CASES, build
from support.tolerance import assert_close

ENTMAX = next(c for c in CASES if c.name == "entmax 1.5")
SOFTMAX = next(c for c in CASES if c.name == "bias per key")


def test_the_comparison_detects_one_wrong_entry():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        exact = torch.randn(4, 5, dtype=torch.float64)
        assert_close(exact.to(dtype), exact, dtype)
        for wrong in (1.05, float("nan"), float("inf")):
            spoiled = exact.clone()
            spoiled[2, 3] = wrong * (1 + exact.abs().max())
            with pytest.raises(AssertionError):
                assert_close(spoiled.to(dtype), exact, dtype)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros(3), torch.zeros(2), torch.float32)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros(2), torch.tensor([0.0, float("inf")]), torch.float32)


def test_a_wrong_solver_is_caught(monkeypatch):
    """The defect: the search stops early."""
    search = row_equation._search
    monkeypatch.setattr(row_equation, "_search", lambda *a: search(*a) + 1e-2)
    # The Newton step after the search would correct its small error. It is removed, too.
    monkeypatch.setattr(row_equation.RowEquation, "sides", spoil_sides(row_equation.RowEquation.sides))
    with pytest.raises(AssertionError):
        test_attention.test_output(ENTMAX, "torch", torch.float64)


def spoil_sides(sides):
    def spoiled(self, mu):
        taken, target, slope = sides(self, mu)
        return taken * 1.001, target, slope

    return spoiled


@pytest.mark.parametrize("case", [SOFTMAX, ENTMAX], ids=lambda c: c.name)
def test_a_wrong_gradient_is_caught(monkeypatch, case):
    """The defect: without the derivative of the dual the gradient has no baseline."""
    solve_rows = row_equation.solve_rows
    monkeypatch.setattr(reference, "solve_rows", lambda form, scores, mu=None, order=1: solve_rows(form, scores, mu, 0))
    with pytest.raises(Exception, match=r"Jacobian|backward not|gradcheck"):
        test_attention.test_gradcheck(case)


def test_a_slightly_wrong_gradient_is_caught(monkeypatch):
    backward = BACKENDS["torch"].backward

    def spoiled(form, needed, outputs, grads):
        found = backward(form, needed, outputs, grads)
        if form.dtype == torch.float32:  # the float64 reference stays correct
            found["key"] = found["key"] * (1 + 1e-4)
        return found

    monkeypatch.setattr(BACKENDS["torch"], "backward", spoiled)
    with pytest.raises(AssertionError, match="gradient of key"):
        test_attention.test_gradients(SOFTMAX, "torch", torch.float32)


def test_a_wrong_certificate_is_caught(monkeypatch):
    """With a wrong dual, the certificate of the right plan has a gap."""
    dual_value = rows.dual_value
    monkeypatch.setattr(rows, "dual_value", lambda best: dual_value(best) + 1e-3)
    with pytest.raises(AssertionError):
        test_plan.test_float32_certificate()
    with pytest.raises(AssertionError):
        test_properties.test_the_optimum_is_certified()


@pytest.mark.parametrize("name", ROW_STATISTICS)
def test_a_wrong_statistic_is_caught(monkeypatch, name):
    found = STATISTICS[name]
    wrong = found._replace(formula=lambda rows: found.formula(rows) * 1.001 + 0.001)
    monkeypatch.setitem(STATISTICS, name, wrong)
    with pytest.raises(AssertionError, match=name):
        test_statistics.test_statistics(SOFTMAX, "torch", torch.float64)


def test_the_cases_are_not_trivial():
    """The output or the gradients of every case differ from plain softmax, so that no case tests the default by
    accident."""
    plain = {"softmax", "gqa", "odd sizes", "one query", "one key"}
    for case in CASES:
        if case.name in plain:
            continue
        built = build(case)
        group = case.H // case.Hkv
        k, v = (t.detach().repeat_interleave(group, 1) for t in (built.key, built.value))
        softmax = (built.query.detach() @ k.mT / case.D**0.5).softmax(-1) @ v
        out = regard.attention(built.query, built.key, built.value, **built.arguments)
        assert (out - softmax).abs().max() > 1e-4, case.name
