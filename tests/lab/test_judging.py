"""From numbers to verdicts: intervals, effects and their words."""

import math

import pytest

from regard.lab.judging import (
    MEASURED,
    NOT_SIGNIFICANT,
    REFUTED,
    Interval,
    Judged,
    decide,
    differences,
    equivalent,
    interval,
    judge_effect,
    ratios,
    verdict,
)


def test_interval_is_students():
    # scipy.stats.t.interval(0.95, 2, loc=2, scale=1/sqrt(3))
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert (found.low, found.high) == (pytest.approx(-0.48413771), pytest.approx(4.48413771))
    assert interval([1.0]).low == -math.inf and interval([1.0]).high == math.inf


@pytest.mark.parametrize(
    ("numbers", "claimed", "expected"),
    [
        ([0.020, 0.021, 0.019], (0.01, 0.03), MEASURED),
        ([0.020, 0.021, -0.019], (0.01, 0.03), NOT_SIGNIFICANT),
        ([0.001, 0.002, 0.0015], (0.01, 0.03), REFUTED),  # an effect, but far smaller than claimed
        ([-0.020, -0.021, -0.019], (0.01, 0.03), REFUTED),  # in the opposite direction
        ([0.30, 0.31, 0.29], (0.01, 0.03), REFUTED),  # far larger than claimed
        ([0.0, 0.0, 0.0], (0.01, 0.03), REFUTED),
        ([0.035, 0.04, 0.036], (0.01, 0.03), REFUTED),
        ([0.035, 0.04, 0.03], (0.01, 0.03), NOT_SIGNIFICANT),  # an effect, and the interval reaches the range
        ([0.02], (0.01, 0.03), NOT_SIGNIFICANT),  # one seed does not decide
        ([math.inf, math.inf], (0.01, math.inf), MEASURED),
        ([math.nan, 1.0], (0.01, math.inf), NOT_SIGNIFICANT),
    ],
)
def test_verdicts(numbers, claimed, expected):
    assert verdict(interval(numbers), claimed) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0.001, -0.002, 0.0], MEASURED),
        ([0.010, 0.011, 0.009], MEASURED),  # certainly a difference, but a small one
        ([0.1, -0.1, 0.0], NOT_SIGNIFICANT),  # the mean is 0, but the interval is wide
        ([0.015, 0.025, 0.01], NOT_SIGNIFICANT),
        ([0.0], NOT_SIGNIFICANT),
        ([math.nan, 0.0], NOT_SIGNIFICANT),
        ([0.05, 0.051, 0.049], REFUTED),
        ([math.inf, math.inf], REFUTED),
    ],
)
def test_equivalence_needs_the_whole_interval(numbers, expected):
    assert equivalent(interval(numbers), (-0.02, 0.02)) == expected
    assert judge_effect("a", "b", "c", interval(numbers), (-0.02, 0.02), same=True).verdict == expected


def test_the_note_reports_an_effect_whose_size_is_not_settled():
    size = judge_effect("a", "b", "c", interval([0.035, 0.04, 0.03]), (0.01, 0.03), note="Read so.")
    assert size.verdict == NOT_SIGNIFICANT and size.note == "Read so. An effect, but its size is not settled."
    assert judge_effect("a", "b", "c", interval([0.02, -0.02, 0.01]), (0.01, 0.03)).note == ""
    assert judge_effect("a", "b", "c", interval([0.02, 0.021, 0.019]), (0.01, 0.03)).note == ""


def test_verdicts_on_ratios():
    slower = ratios([400.0, 420.0, 390.0], [100.0, 100.0, 100.0])
    assert slower.low < 4.03 < slower.high
    assert verdict(slower, (3.0, 5.0), null=1.0) == MEASURED
    assert verdict(ratios([110.0, 112.0, 111.0], [100.0] * 3), (3.0, 5.0), null=1.0) == REFUTED
    back = ratios([100.0] * 3, [400.0, 420.0, 390.0])
    assert back.mean == pytest.approx(1 / slower.mean) and back.low == pytest.approx(1 / slower.high)
    assert ratios([0.0, 0.0], [1.0, 1.0]).mean == 0 and ratios([1.0, 1.0], [0.0, 0.0]).mean == math.inf
    assert math.isnan(ratios([math.inf], [math.inf]).mean)


def test_effects_in_words():
    found = judge_effect(
        "gains 1-3 %", "003", "gain", differences([1.02, 1.03], [1.0, 1.01]), (0.01, 0.03), percent=True
    )
    assert found.verdict == MEASURED and found.effect == "gain: 2 % [2, 2], 2 seeds"
    assert decide("never", "003", "once", False).verdict == REFUTED
    with pytest.raises(ValueError, match="expected one number per seed"):
        differences([1.0], [1.0, 2.0])


def test_interval_in_words():
    assert str(Interval(1.0, 0.5, 1.5, 3)) == "1 [0.5, 1.5], 3 seeds" and interval([2.0]).brief() == "2.000"
    assert Interval(1.0, 0.5, 1.5, 3).brief(1) == "1.0 ± 0.5"
    assert Judged("a", "b", "c", MEASURED).to_dict()["verdict"] == MEASURED
