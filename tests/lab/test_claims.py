"""The claims of the lab: verdicts recomputed with numpy, checks that can fail, and current pages."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import regard
from regard import Transport, Tsallis, cli
from regard.lab import claims, numbers, teasers, variants
from regard.lab.claims import document_000, document_004
from regard.lab.claims import rows as shared_rows
from regard.lab.claims.claim import CORRECTED, FAILS, HOLDS, UNTESTABLE, VERDICTS, matches
from regard.lab.teasers import teaser_1_normalisation as normalisation
from regard.lab.teasers import teaser_5_shift as shift
from regard.lab.teasers.teaser import FAMILY
from support.programs import fresh

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {claim.name: claim for claim in claims.CLAIMS}


@pytest.fixture(scope="module")
def rows():
    return claims.judge_claims()


@pytest.fixture
def run(monkeypatch):
    def run(*arguments: str, width: int = 80):
        monkeypatch.setenv("COLUMNS", str(width))
        return CliRunner().invoke(cli.app, ["lab", *arguments])

    return run


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_row_is_complete(rows):
    assert len(rows) == len(claims.CLAIMS) == len(BY_NAME) > 150
    assert {row.source for row in rows} == set(claims.DOCUMENTS)
    for row in rows:
        assert row.name and row.section and row.claim and len(row.computed) >= 3, row
        assert row.verdict in VERDICTS
        assert "{" not in row.claim.replace("{ h_i : i < t }", ""), row
        assert "✗" not in row.computed, row  # a side condition does not hold
        assert (row.verdict == UNTESTABLE) == (BY_NAME[row.name].check is None)


def test_printed_numbers_known_to_be_wrong_fail(rows):
    found = {row.name for row in rows if row.verdict == FAILS}
    assert found >= {
        "softmax_of_the_example",
        "interpretable_shares",
        "masked_example",
        "scenario_a_softmax",
        "scaled_softmax",
        "temperature_half",
        "temperature_two",
        "negative_scores_by_sum",
    }


def test_claims_about_training_are_not_testable(rows):
    for name in ("slower_unscaled", "worse_unscaled", "relu_degrades", "layers_differ", "small_gain"):
        (row,) = (row for row in rows if row.name == name)
        assert row.verdict == UNTESTABLE and "experiment" in row.computed


# --- printed numbers, by numpy ----------------------------------------------------------------------------------------


def np_softmax(*scores, tau=1.0):
    e = np.exp(np.array(scores, dtype=np.float64) / tau)
    return e / e.sum()


def np_by_sum(*scores):
    s = np.array(scores, dtype=np.float64)
    return s / s.sum()


TRUE = {
    "number_e": [np.e],
    "softmax_of_the_example": np_softmax(2.8, 1.2, 0.5, 3.1),
    "interpretable_shares": 100 * np_softmax(2.8, 1.2, 0.5, 3.1)[[3, 0]],
    "masked_example": np_softmax(2.8, 1.2, -np.inf, -np.inf),
    "sum_of_the_row": [2],
    "simple_division": [1.5, -1, 0.5],
    "minus_hundred_percent": [-100],
    "scenario_a_by_sum": np_by_sum(10, 9, 8),
    "scenario_b_by_sum": np_by_sum(100, 9, 8),
    "scenario_a_softmax": np_softmax(10, 9, 8),
    "scenario_b_softmax": np_softmax(100, 9, 8),
    "average_magnitude": np.sqrt(2 / np.pi) * np.sqrt([64, 512, 2048]),  # of a normal variable; exact as d grows
    "unscaled_softmax": np_softmax(45, 40, 35),
    "scaled_softmax": np_softmax(5, 4.4, 3.9),
    "masked_to_zero": np_by_sum(2.8, 1.2, 0, 0),
    "negative_scores_by_sum": np_by_sum(-1, -2, 0, 0),
    "exp_of_minus_infinity": [0],
    "exp_of_minus_hundred": [np.exp(-100)],
    "exp_of_zero": [1],
    "exp_of_ten": [np.exp(10) / 1000],
    "temperature_one": np_softmax(3, 2, 1),
    "temperature_half": np_softmax(3, 2, 1, tau=0.5),
    "temperature_two": np_softmax(3, 2, 1, tau=2),
}
PRINTED = [claim for claim in claims.CLAIMS if claim.printed]


def unit(printed: str) -> float:
    return 10.0 ** -len(printed.strip("~k%").partition(".")[2])


def rounded(printed: str, true: float) -> str:
    """The true number, printed like the given one."""
    digits = len(printed.strip("~k%").partition(".")[2])
    return f"{true + 0.0:.{digits}f}{printed[len(printed.rstrip('k%')) :]}"


def test_every_printed_number_is_recomputed():
    assert {claim.name for claim in PRINTED} == TRUE.keys()


@pytest.mark.parametrize("claim", PRINTED, ids=lambda claim: claim.name)
def test_printed_numbers_by_numpy(claim):
    true = TRUE[claim.name]
    right = all(
        abs(x - float(p.strip("~k%"))) <= 0.5 * unit(p) + 1e-12 for p, x in zip(claim.printed, true, strict=True)
    )
    assert (claim.judge().verdict == HOLDS) == right
    corrected = dataclasses.replace(claim, printed=tuple(map(rounded, claim.printed, true)))
    assert corrected.judge().verdict == HOLDS


@pytest.mark.parametrize("claim", PRINTED, ids=lambda claim: claim.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_changed_digit_changes_the_verdict(claim, sign):
    """From the right numbers, one unit in the last place of any of them makes the claim fail."""
    right = list(map(rounded, claim.printed, TRUE[claim.name]))
    for i, number in enumerate(right):
        wrong = rounded(number, float(number.strip("~k%")) + sign * unit(number))
        spoiled = dataclasses.replace(claim, printed=(*right[:i], wrong, *right[i + 1 :]))
        assert spoiled.judge().verdict == FAILS, spoiled.says
        assert wrong.replace("-", "−") in spoiled.says.replace("-", "−")


def test_corrections_accept_only_the_numbers_they_name(rows):
    magnitude = dataclasses.replace(BY_NAME["average_magnitude"], printed=("9", "23", "45"))
    assert BY_NAME["average_magnitude"].judge().verdict == CORRECTED and magnitude.judge().verdict == FAILS
    with pytest.raises(ValueError, match="printed: expected 4 numbers, got 3"):
        dataclasses.replace(BY_NAME["softmax_of_the_example"], printed=("0.3", "0.3", "0.3")).judge()
    with pytest.raises(ValueError, match="printed: expected a number"):
        matches("0,28", 0.28)


@pytest.mark.parametrize(
    ("printed", "true", "same"),
    [("0.28", 0.2849, True), ("0.28", 0.2851, False), ("22k", 22499, True), ("22k", 22501, False), ("~1.0", 0.96, True),
     ("-100%", -1.004, True), ("-100%", 1.0, False), ("0", math.nan, False)],
)  # fmt: skip
def test_comparison_at_the_printed_precision(printed, true, same):
    assert matches(printed, true) is same


def test_distance_of_nan_inf_and_empty_tensors():
    one = torch.ones(2, dtype=torch.float64)
    assert numbers.distance(one, one) == 0 and not numbers.agree(one, one + 1e-6)
    for bad in (math.nan, math.inf):
        assert not numbers.agree(torch.tensor([1.0, bad]), one) and not numbers.agree(one, torch.tensor([1.0, bad]))
    with pytest.raises(ValueError, match="got none to compare"):
        numbers.agree(one[:0], one[:0])


# --- checks that can fail ---------------------------------------------------------------------------------------------


def spoil_solve(change):
    solve = regard.solve

    def spoiled(scores, problem=None):
        plan = solve(scores, problem)
        return dataclasses.replace(plan, weights=change(plan.weights))

    return regard, "solve", spoiled


def spoil_attention(change):
    attention = regard.attention

    def spoiled(*args, return_aux=None, **kwargs):
        if return_aux is None:
            return change(attention(*args, **kwargs))
        out, aux = attention(*args, return_aux=return_aux, **kwargs)
        return change(out), dataclasses.replace(
            aux, **{f.name: change(x) for f in dataclasses.fields(aux) if (x := getattr(aux, f.name)) is not None}
        )

    return regard, "attention", spoiled


def spoil_certify():
    certify = regard.certify

    def spoiled(scores, weights, problem=None):
        found = certify(scores, weights, problem)
        return dataclasses.replace(found, gap=found.gap + 1, row_residual=0 * found.row_residual)

    return regard, "certify", spoiled


def in_every_module(name, value):
    """Replacements of a name in all modules of checks that use it."""
    return [(m, name, value) for m in (*claims.MODULES, shared_rows) if hasattr(m, name)]


def spoil_draws(change):
    draw = numbers.draw
    spoiled = lambda *shape, **how: change(draw(*shape, **how))  # noqa: E731
    return in_every_module("draw", spoiled)


def spoil_exp():
    exp = torch.Tensor.exp
    return torch.Tensor, "exp", lambda x: exp(1.1 * x) + 0.01


BREAKAGES = {
    "positive draws": lambda: spoil_draws(lambda x: x.abs() + 0.1),
    "constant draws": lambda: spoil_draws(torch.ones_like),
    "small draws": lambda: spoil_draws(lambda x: 1e-3 * x),
    "large draws": lambda: spoil_draws(lambda x: 30 * x),
    "tilted weights": lambda: spoil_solve(lambda p: p**1.05),
    "reversed weights": lambda: spoil_solve(lambda p: p.flip(-1)),
    "uniform weights": lambda: spoil_solve(lambda p: torch.full_like(p, 1 / p.shape[-1])),
    "negative weights": lambda: spoil_solve(lambda p: p - 0.3),
    "NaN weights": lambda: spoil_solve(lambda p: p * math.nan),
    "wrong certificate": spoil_certify,
    "wrong outputs": lambda: spoil_attention(lambda x: 1.01 * x + 0.001),
    "constant outputs": lambda: spoil_attention(lambda x: x * 0 + 0.3),
    "wrong exp": spoil_exp,
    "a tiny simple norm": lambda: in_every_module("by_sum", lambda s: s.abs().sqrt() / 100),
    "cheap products": lambda: in_every_module("multiply_adds", lambda compute: 7),
    "another Lagrangian": lambda: (document_000, "_lagrangian", lambda p, multiplier: (p * p).sum() + multiplier),
    "a wrong density": lambda: (document_004, "_log_density", lambda seen, v, theta: -theta * (v - 2 * seen) ** 2 - 1),
    "another precision": lambda: (document_004, "BETA", 1.0),
    "no precision": lambda: (document_004, "_precision", lambda: torch.full((5,), math.nan, dtype=torch.float64)),
    "wrong cosine": lambda: (torch.nn.functional, "cosine_similarity", lambda x, y, dim: x.sum()),
    "wrong correlation": lambda: (torch.nn.functional, "conv1d", lambda x, w, padding: torch.zeros(1, 1, 7).double()),
}


def test_every_check_can_fail(rows):
    """Break the library, or what a check uses: the verdict of every check changes under some breakage."""
    expected = {row.name: row.verdict for row in rows}
    unchanged = {claim.name for claim in claims.CLAIMS if claim.check is not None and not claim.printed}
    for make in BREAKAGES.values():
        with pytest.MonkeyPatch.context() as patch:
            made = make()
            for target in made if isinstance(made, list) else [made]:
                patch.setattr(*target)
            for name in sorted(unchanged):
                try:
                    verdict = BY_NAME[name].judge().verdict
                except Exception:  # a crash does not show that the check can fail
                    continue
                if verdict != expected[name]:
                    unchanged.discard(name)
    assert unchanged == set()


# --- brain teasers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shift.DTYPES)
def test_limits_of_the_formula_without_shift(name):
    """They agree with the limits of the dtype, up to its spacing of scores there."""
    dtype = shift.DTYPES[name]
    found, info = shift.limits(dtype), torch.finfo(dtype)
    spacing = {"float16": 0.01, "bfloat16": 0.5, "float32": 1e-4, "float64": 1e-9}[name]
    assert 0 <= math.log(info.max) - found.single <= spacing
    assert abs(math.log(info.max / shift.MANY) - found.sum) <= spacing
    least = math.log(info.smallest_normal) + math.log(info.eps) - math.log(2)  # half the smallest subnormal rounds to 0
    assert abs(found.floor - least) <= 4 * spacing and abs(found.gap - least) <= 4 * spacing
    for score, good in ((found.single, True), (found.single + 2 * spacing, False), (found.floor - 4 * spacing, False)):
        assert variants.naive_softmax(torch.tensor([score], dtype=dtype)).isfinite().all() == good
    lost = variants.naive_softmax(torch.full((shift.MANY,), found.sum + 2 * spacing, dtype=dtype))
    assert (lost == 0).all()  # not NaN: the row loses its mass silently


def test_bisection_needs_a_change():
    with pytest.raises(ValueError, match="expected the property"):
        shift.last_good(lambda x: True, torch.float32, 0.0, 1.0)


scores = st.lists(st.floats(-3, 3), min_size=2, max_size=6).map(lambda x: torch.tensor(x, dtype=torch.float64))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    scores,
    st.floats(-3, 3),
    st.floats(0.2, 5),
    st.sampled_from(list(FAMILY.values())),
    st.sampled_from(list(normalisation.MARGINALS.values())),
)
def test_the_weights_of_an_optimum_move_together(s, shift, tau, regularizer, marginal):
    problem = Transport(regularizer, marginal=marginal, temperature=tau)
    change = regard.solve(s + shift, problem).weights - regard.solve(s, problem).weights
    assert min(float(change.max()), float(-change.min())) < 1e-8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scores)
def test_simple_normalisations_use_the_sum_of_the_scores_as_temperature(s):
    if s.sum() > 0.1:
        flat = regard.solve(s, Transport(variants.without_sign(), temperature=float(s.sum()))).weights
        torch.testing.assert_close(flat, variants.by_sum(s), rtol=1e-8, atol=1e-8)
    if s.relu().sum() > 0.1:
        problem = Transport(Tsallis(2.0), temperature=float(s.relu().sum()))
        assert regard.certify(s, variants.by_relu(s), problem).holds(1e-9)


def test_simple_normalisations_are_no_optimum():
    for rule in normalisation.SIMPLE.values():
        assert normalisation.no_optimum(rule)
    assert not normalisation.no_optimum(lambda s: s.softmax(-1))
    assert not normalisation.no_optimum(lambda s: s.relu())


# --- the command and the pages ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solved():
    return {number: make() for number, make in teasers.TEASERS.items()}


@pytest.fixture
def quick(run, rows, solved, monkeypatch):
    """The command, with claims and teasers that are computed only once."""
    monkeypatch.setattr(
        claims,
        "judge_claims",
        lambda source, verdict: [r for r in rows if source in (None, r.source) and verdict in (None, r.verdict)],
    )
    for number, teaser in solved.items():
        monkeypatch.setitem(teasers.TEASERS, number, lambda teaser=teaser: teaser)
    return run


@pytest.mark.parametrize("number", teasers.TEASERS)
def test_teasers_are_complete(solved, number):
    teaser = solved[number]
    assert teaser.number == number and teaser.question and teaser.dropped and teaser.answer
    for exhibit in teaser.exhibits:
        assert exhibit.rows and all(len(row) == len(exhibit.header) for row in exhibit.rows)
    assert "✗" not in str(teaser)


@pytest.mark.parametrize("width", [80, 120])
def test_claims_fit_the_terminal(quick, rows, width):
    result = quick("claims", width=width)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= width
    words = set(result.output.split())
    for row in rows:  # no word is truncated
        assert set(f"{row.claim} {row.section} {row.computed} {row.verdict}".split()) <= words, row
    counts = claims.counts(rows)
    assert result.output.split("\n")[-2] == f"{len(rows)} claims: " + ", ".join(f"{v} {n}" for v, n in counts.items())


def test_claims_as_json(run, rows):
    result = run("claims", "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found.keys() == {"documents", "counts", "claims"} and found["documents"] == claims.DOCUMENTS
    assert sum(found["counts"].values()) == len(found["claims"])
    assert found["claims"] == [dataclasses.asdict(row) for row in rows]
    assert all(isinstance(value, str) for row in found["claims"] for value in row.values())


def test_claims_by_source_and_verdict(run, rows):
    found = json.loads(run("claims", "--json", "--source", "001", "--verdict", HOLDS).output)
    expected = [row for row in rows if (row.source, row.verdict) == ("001", HOLDS)]
    assert found["claims"] == [dataclasses.asdict(row) for row in expected] and len(expected) > 2
    assert "no claims" in run("claims", "--source", "001", "--verdict", "fails").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["claims", "--source", "3"], "--source: expected one of 000, 001"),
        (["claims", "--verdict", "true"], "--verdict: expected one of holds"),
        (["claims", "--json", "--markdown"], "expected one of --json and --markdown"),
        (["teasers", "6"], "number: expected 1 to 5, got 6"),
        (["teasers", "2", "--markdown"], "number: expected none with --markdown"),
    ],
)
def test_invalid_arguments_are_named(run, arguments, message):
    result = run(*arguments, width=200)
    assert result.exit_code == 2 and message in result.output


def test_judge_claims_names_invalid_arguments():
    with pytest.raises(ValueError, match=r"source: expected one of 000, .*, got '3'"):
        claims.judge_claims(source="3")
    with pytest.raises(ValueError, match=r"verdict: expected one of holds, .*, got 'no'"):
        claims.judge_claims(verdict="no")


@pytest.mark.parametrize("width", [80, 120])
def test_teasers_fit_the_terminal(quick, width):
    result = quick("teasers", width=width)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= width
    assert "…" not in result.output  # nothing is truncated
    assert "float16" in quick("teasers", "5").output and "float16" not in quick("teasers", "1").output


def test_the_pages_are_current(quick):
    """After a change: regard lab claims --markdown > docs/claims.md, and the same for teasers."""
    for name in ("claims", "teasers"):
        assert quick(name, "--markdown").output == (ROOT / "docs" / f"{name}.md").read_text(), name


def test_importing_regard_does_not_load_the_lab():
    code = (
        "import sys, regard; print('regard.lab' in sys.modules); import regard.lab.claims; print('rich' in sys.modules)"
    )
    assert fresh(code).split() == ["False", "False"]
