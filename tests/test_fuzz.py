"""Fixed seeds of tests/fuzz.py, and that it notices what is wrong."""

import pytest

import fuzz
from regard.backends import native

pytest.importorskip("regard._native", reason="the native engine was not built")


@pytest.mark.parametrize("seed", range(96))
def test_seed(seed):
    wrong = fuzz.check(seed)
    assert wrong is None, fuzz.report(seed, wrong)


def test_problems_are_served_and_vary():
    problems = [fuzz.Problem(seed) for seed in range(96)]
    assert {p.family for p in problems} == {"kl", "tsallis", "fermi"}
    assert {p.marginal for p in problems} == {"rows", "mass", "sink", "relax", "free"}
    assert {name for p in problems for name in p.priors} == set(fuzz.PRIORS)
    assert min(p.Tk for p in problems) == 0
    served = [p for p in problems if fuzz.served(p)]
    assert len(served) == len(problems)


def test_one_wrong_element_is_noticed(monkeypatch):
    seed = next(s for s in range(48) if fuzz.Problem(s).Tq > 2 and fuzz.Problem(s).Tk > 2)
    plain = native.forward

    def wrong(form, names):
        results = plain(form, names)
        results["out"].view(-1)[3] += 0.5
        return results

    monkeypatch.setattr(native, "forward", wrong)
    found = fuzz.check(seed)
    assert found is not None and f"--seed {seed}" in fuzz.report(seed, found)
