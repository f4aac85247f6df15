"""Every verdict of an experiment can be reached and missed."""

import math

import pytest

from regard.lab.configuration import configured
from regard.lab.experiment import LabError, Outcome, Outcomes
from regard.lab.experiments import baseline, load, matching, recall, scaling, sharpness, sinks, temperature
from regard.lab.judging import MEASURED, NOT_SIGNIFICANT, REFUTED
from support.experiments import made_up, only


def test_masking_verdicts_can_go_either_way():
    def results(gaps, leak):
        return [{"apparent": 2.0, "honest": 2.0 + g, "leak": leak} for g in gaps]

    clean = results([0, 0, 0], 0.0)
    leaky = made_up(
        "masking", {"minus infinity": clean, "mask to zero": results([0.5, 0.51, 0.49], 0.1), "no mask": clean}
    )
    assert only(leaky, "instead of −∞") == MEASURED and only(leaky, "No masking") == REFUTED
    assert only(leaky, "is clean") == MEASURED
    other = made_up("masking", {"minus infinity": results([0, 0, 0], 1e-9), "mask to zero": clean, "no mask": clean})
    assert only(other, "is clean") == REFUTED


def test_normalizer_verdicts_can_go_either_way():
    def rule(*losses, diverged=None):
        return [{"val": x, "best": 2.0, "diverged_at": diverged, "steps_per_second": 1.0} for x in losses]

    found = made_up(
        "normalizer",
        {
            "softmax": rule(2.0, 2.01, 1.99),
            "ReLU, normalised": rule(2.1, 2.11, 2.09),
            "ReLU features": rule(2.5, 2.51, 2.49),
            "linear (elu + 1)": rule(1.9, 2.11, 2.0),
            "raw dot products": rule(None, None, None, diverged=3),
            "row sum": rule(None, None, None, diverged=3),
        },
    )
    assert only(found, "ReLU + normalization") == MEASURED and only(found, "with ReLU degrades") == REFUTED
    assert only(found, "Linear Transformers") == NOT_SIGNIFICANT
    assert only(found, "Raw dot products") == MEASURED and only(found, "row sum fails") == MEASURED


def test_steps_to_equal_loss():
    assert scaling.steps_to([[0, 4.0], [10, 3.0], [20, 2.0]], 2.5) == 15
    assert scaling.steps_to([[0, 4.0], [10, 3.0]], 2.5) == math.inf
    slow = [{"val": 2.5, "curve": [[0, 4.0], [40, 3.0], [80, 2.5]]}]
    fast = [{"val": 2.0, "curve": [[0, 4.0], [10, 3.0], [20, 2.5], [80, 2.0]]}]
    outcomes = Outcomes([Outcome("slow", 0, slow[0], []), Outcome("fast", 0, fast[0], [])], {})
    assert scaling.slowdown(outcomes, "slow", "fast").mean == pytest.approx(4.0)


def test_steps_to_equal_loss_of_runs_that_did_not_learn():
    results = {
        "learns": {"val": 2.0, "curve": [[0, 4.0], [10, 2.0]]},
        "worsens": {"val": 4.5, "curve": [[0, 4.0], [10, 4.5]]},  # its final loss was reached at step 0
        "diverges": {"val": None, "curve": [[0, 4.0]]},
    }
    outcomes = Outcomes([Outcome(name, 0, r, []) for name, r in results.items()], {})
    assert scaling.steps_to(results["learns"]["curve"], 4.5) == 1
    assert scaling.slowdown(outcomes, "worsens", "learns").mean == 1
    assert scaling.slowdown(outcomes, "diverges", "learns").mean == math.inf
    assert scaling.slowdown(outcomes, "learns", "diverges").mean == 0
    assert math.isnan(scaling.slowdown(outcomes, "diverges", "diverges").mean)


def test_scaling_verdicts_can_go_either_way():
    def results(*losses):
        numbers = {"spread": 1.0, "entropy": 0.5, "saturated": 0.1}
        return [{"val": x, "curve": [[0, 4.0]] if x is None else [[0, 4.0], [600, x]], **numbers} for x in losses]

    def found(unscaled, natural, qk_norm):
        cells = {name: results(2.0, 2.01, 1.99) for name in scaling.settings(load("scaling").full)}
        cells["init unit, d 64, unscaled"] = results(*unscaled)
        cells["init unit, d 64, natural gradient"] = results(*natural)
        return made_up("scaling", {**cells, "init unit, d 64, QK-norm": results(*qk_norm)})

    gap = found((2.4, 2.41, 2.39), (2.35, 2.36, 2.34), (2.1, 2.11, 2.09))
    assert only(gap, "Natural gradient rescues") == REFUTED  # an eighth of the gap
    assert only(gap, "QK-norm rescues", "75 %") == MEASURED
    assert only(found((2.4, 2.41, 2.39), (2.1, 2.3, 2.2), (2.0, 2.0, 2.0)), "Natural gradient") == NOT_SIGNIFICANT
    same = found((2.0, 2.01, 1.99), (1.9, 1.91, 1.89), (1.9, 1.91, 1.89))
    assert only(same, "QK-norm rescues", "nothing to rescue") == NOT_SIGNIFICANT
    diverged = found((None,) * 3, (None,) * 3, (2.0, 2.01, 1.99))
    assert only(diverged, "Natural gradient") == REFUTED and only(diverged, "QK-norm") == MEASURED


def test_temperature_verdicts_can_go_either_way():
    def results(losses, taus):
        return [{"val": x, "temperatures": [[t] * 2 for t in taus], "entropy": [1.0] * 4} for x in losses]

    fixed = results([2.0, 2.1, 1.9], [1.0] * 4)
    falling = made_up("temperature", {"fixed": fixed, "learned": results([1.98, 2.08, 1.88], [1.6, 1.2, 1.0, 0.8])})
    assert only(falling, "1-3 %") == MEASURED and only(falling, "Lower layers") == MEASURED
    u = made_up("temperature", {"fixed": fixed, "learned": results([2.0, 2.1, 1.9], [0.9, 0.5, 0.5, 1.5])})
    assert only(u, "1-3 %") == REFUTED and only(u, "Lower layers") == REFUTED and only(u, "follow a U") == MEASURED
    assert temperature.slope([3.0, 2.0, 1.0]) == -1 and temperature.curvature([1.0, 0.0, 1.0]) == 1


def test_temperature_of_a_pretrained_model_verdicts_can_go_either_way():
    def results(losses, name="", numbers=()):
        return [{"val": x, **({name: [[n] * 3 for n in numbers]} if name else {})} for x in losses]

    falling = [1.3 - 0.02 * n for n in range(30)]
    u = [1.5 if n < 5 or n > 24 else 0.9 for n in range(30)]
    untouched = results([2.0, 2.1, 1.9])

    def found(temperatures, gains, taus):
        return made_up(
            "temperature",
            {
                temperature.UNTOUCHED: untouched,
                temperature.TEMPERATURES: results(temperatures, "temperatures", taus),
                temperature.GAINS: results(gains, "gains", [1.0] * 30),
            },
        )

    good = found([1.98, 2.08, 1.881], [1.99, 2.09, 1.892], falling)
    assert only(good, "1-3 %") == MEASURED and only(good, "What helps") == MEASURED
    assert only(good, "Lower layers") == MEASURED and only(good, "follow a U") != MEASURED
    bad = found([2.01, 2.11, 1.912], [1.95, 2.05, 1.85], u)
    assert only(bad, "1-3 %") == REFUTED and only(bad, "What helps") == REFUTED
    assert only(bad, "follow a U", "5 on each side") == MEASURED and only(bad, "Lower layers") == NOT_SIGNIFICANT
    assert only(found([2.0, 2.1, 1.9], [2.0, 2.11, 1.89], falling[::-1]), "Lower layers") == REFUTED


def test_sharpness_verdicts_can_go_either_way():
    taus, layers = load("sharpness").full["temperatures"], load("sharpness").full["layer_temperatures"]

    def results(sign):
        bump = [sign * (tau - 1) ** 2 for tau in taus]
        heads = {"entropy": [0.1, 0.5, 0.9], "score_variance": [3.0, 2.0, 1.0]}
        losses = {"softer": [2 + sign * x for x in (0.3, 0.2, 0.1)], "sharper": [2.0, 2.0, 2.0]}
        return [{"base": 2.0, "all": [2 + b for b in bump], "layers": [[2.1] * len(layers)], **heads, **losses}] * 3

    found = made_up("sharpness", {"own": results(1)})
    assert set(found.values()) == {MEASURED}
    assert REFUTED in made_up("sharpness", {"own": results(-1)}).values()
    assert sharpness.rank_correlation([1.0, 2.0, 3.0], [5.0, 6.0, 9.0]) == pytest.approx(1)
    assert sharpness.rank_correlation([1.0, 2.0, 3.0], [9.0, 6.0, 5.0]) == pytest.approx(-1)


def test_rank_correlation_with_ties():
    a, b = [1.0, 2.0, 2.0, 3.0, 0.0], [2.0, 1.0, 3.0, 3.0, 1.0]
    # scipy.stats.spearmanr(a, b).statistic
    assert sharpness.rank_correlation(a, b) == pytest.approx(0.64888568)
    order = [3, 0, 4, 2, 1]
    assert sharpness.rank_correlation([a[n] for n in order], [b[n] for n in order]) == pytest.approx(0.64888568)
    assert math.isnan(sharpness.rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sampling", "[0.5, 1.0]", r"--set temperatures: expected 0.5, 1, 1.5 among them.*got \[0.5, 1.0\]"),
        ("sharpness", "[1.0, 2.0]", r"--set temperatures: expected 0.5, 2 among them.*got \[1.0, 2.0\]"),
        ("sampling", '[0.5, 1, 1.5, "hot"]', "--set temperatures: expected finite numbers >= 0"),
    ],
)
def test_temperatures_that_a_verdict_compares_are_required(name, given, message):
    with pytest.raises(LabError, match=message):
        configured(load(name), True, {"temperatures": given})
    assert configured(load("sampling"), True, {"temperatures": "[1.5, 0.5, 1]"})["temperatures"] == [1.5, 0.5, 1]


def test_matching_verdicts_can_go_either_way():
    def results(sorts, tells):
        near = (-0.001, 0.0, 0.001)
        return {
            f"{task}: {rule}": [{"accuracy": mean + e, "seconds": 1.0} for e in near]
            for task, means in (("sorting", sorts), ("telling", tells))
            for rule, mean in zip(matching.RULES, means, strict=True)
        }

    found = made_up("matching", results((0.5, 0.98, 0.97, 0.5), (0.99, 0.99, 0.1, 0.1)))
    assert only(found, "rows alone (softmax)") == MEASURED and only(found, "rows alone (entmax-1.5)") == REFUTED
    assert only(found, "Where all must read one key") == MEASURED
    assert only(found, "A few normalisations", "sorting") == REFUTED
    assert only(found, "A few normalisations", "telling") == NOT_SIGNIFICANT  # both fail
    found = made_up("matching", results((0.99, 0.5, 0.6, 0.5), (0.99, 0.99, 0.99, 0.99)))
    assert only(found, "rows alone (softmax)") == REFUTED
    assert only(found, "rows alone (entmax-1.5)") == NOT_SIGNIFICANT  # neither learned the task
    assert only(found, "Where all must read one key") == REFUTED
    assert only(found, "A few normalisations", "telling") == MEASURED


def test_recall_verdicts_can_go_either_way():
    def results(*values):
        return [{"accuracy": v} for v in values]

    rules = dict.fromkeys(recall.RULES, results(0.96, 0.97, 0.95))
    good = {f"{task}: {rule}": r for task in recall.TASKS for rule, r in rules.items()}
    found = made_up("recall", {**good, "recall: Performer": results(0.5, 0.51, 0.49)})
    assert only(found, "recall: accuracy", "Performer") == MEASURED
    assert only(found, "copying: accuracy", "Performer") == REFUTED  # no difference
    noisy = made_up("recall", {**good, "copying: Performer": results(1.0, 0.4, 0.6)})
    assert only(noisy, "copying: accuracy", "Performer") == NOT_SIGNIFICANT
    unsolved = made_up("recall", {s: results(0.7, 0.71, 0.69) if "softmax" in s else r for s, r in good.items()})
    assert set(unsolved.values()) == {NOT_SIGNIFICANT}
    assert all("Softmax itself does not solve the task (accuracy 0.70)" in text for text in unsolved)


def test_sinks_verdicts_can_go_either_way():
    def results(worst):
        return [{"val": 2.0, "first": w / 2, "worst": w} for w in worst]

    sink, none = results([0.8, 0.81, 0.79]), results([0.05, 0.06, 0.04])
    found = made_up("sinks", {f"text: {rule}": none if rule == "null key" else sink for rule in sinks.RULES})
    assert only(found, "Softmax grows") == MEASURED and only(found, "Null key removes") == MEASURED
    assert only(found, "Entmax-1.5 removes") == REFUTED
    nothing = made_up("sinks", {f"text: {rule}": none for rule in sinks.RULES})
    assert only(nothing, "Softmax grows") == REFUTED
    assert only(nothing, "Null key removes", "No sink grew") == NOT_SIGNIFICANT
    less = {f"text: {rule}": results([0.5, 0.51, 0.49]) for rule in sinks.RULES[1:]} | {"text: softmax": sink}
    assert only(made_up("sinks", less), "Null key removes") == REFUTED  # weaker than softmax's, but a sink
    noisy = less | {"text: null key": results([0.1, 0.4, 0.1])}
    assert only(made_up("sinks", noisy), "Null key removes") == NOT_SIGNIFICANT


def test_priors_verdicts_can_go_either_way():
    def results(*rise):
        return [{"losses": [2.0 + n / 10, 2.0 + n / 10 + r, 2.0 + n / 10 + 2 * r]} for n, r in enumerate(rise)]

    found = made_up(
        "priors",
        {
            "uniform": results(0.3, 0.31, 0.29),
            "ALiBi": results(-0.01, -0.012, -0.011),
            "learned offsets": results(0.2, -0.2, 0.1),
        },
    )
    assert only(found, "uniform", "at 4x") == MEASURED and only(found, "With ALiBi", "at 2x") == MEASURED
    assert only(found, "learned offsets", "at 2x") == NOT_SIGNIFICANT
    failing = made_up("priors", dict.fromkeys(("uniform", "ALiBi", "learned offsets"), results(0.3, 0.31, 0.29)))
    assert only(failing, "With ALiBi", "at 4x") == REFUTED


def test_forgetting_verdicts_can_go_either_way():
    def results(at_first, *rise):
        return [{"losses": [at_first + n / 10 + m * r for m in range(4)]} for n, r in enumerate(rise)]

    steady, rising = (-0.01, -0.012, -0.011), (0.3, 0.31, 0.29)
    found = made_up(
        "forgetting",
        {
            "softmax": results(2.0, *rising),
            "scalable softmax": results(2.0, 0.1, 0.11, 0.1),
            "ALiBi": results(1.7, 0.2, -0.2, 0.1),
            "forget gates": results(1.6, *steady),
        },
    )
    for times in (2, 4, 8):
        assert only(found, "With forget gates", f"at {times}x") == MEASURED
        assert only(found, "With ALiBi", f"at {times}x") == NOT_SIGNIFICANT
        assert only(found, "scalable softmax less", f"what {times}x") == MEASURED
    assert only(found, "more than softmax") == MEASURED and only(found, "more than ALiBi") == MEASURED
    failing = made_up(
        "forgetting",
        {
            "softmax": results(1.5, *steady),
            "scalable softmax": results(2.0, *rising),
            "ALiBi": results(1.5, *rising),
            "forget gates": results(1.6, *rising),
        },
    )
    assert set(failing.values()) == {REFUTED}


def test_baseline_verdicts_can_go_either_way():
    def results(*values, shakespeare=True):
        return [{"val": v, "shakespeare": shakespeare} for v in values]

    def time_ratios(*medians):
        return [{"ratios": {str(n): [m, m, m] for n in load("baseline").full["lengths"]}} for m in medians]

    same = {"regard": results(1.88, 1.89, 1.87), "stock SDPA": results(1.88, 1.891, 1.869)}
    found = made_up("baseline", {**same, "time": time_ratios(0.9, 0.91, 0.92)})
    assert set(found.values()) == {MEASURED} and len(found) == 4
    slow = made_up("baseline", {**same, "time": time_ratios(1.5, 1.52, 1.49)})
    assert only(slow, "T = 256") == REFUTED
    other = made_up(
        "baseline",
        {"regard": results(2.2, 2.21, 2.19), "stock SDPA": same["stock SDPA"], "time": time_ratios(1.0, 1.1, 0.9)},
    )
    assert only(other, "Validation loss 1.88") == REFUTED and only(other, "learns what it learns") == REFUTED
    assert only(other, "T = 512") == NOT_SIGNIFICANT
    noisy = made_up("baseline", {**same, "regard": results(1.78, 1.98, 1.88), "time": time_ratios(0.9, 0.91, 0.92)})
    assert only(noisy, "Validation loss 1.88") == NOT_SIGNIFICANT
    assert only(noisy, "learns what it learns") == NOT_SIGNIFICANT
    assert baseline.median([3.0, 1.0, 2.0]) == 2 and baseline.median([1.0, 2.0]) == 1.5
