"""Outcomes of experiments: of a quick run, and made up."""

from pathlib import Path
from tempfile import TemporaryDirectory

from regard.lab.configuration import configured
from regard.lab.corpus import standard_library
from regard.lab.experiment import Outcome, Outcomes
from regard.lab.experiments import load
from regard.lab.judging import NOT_SIGNIFICANT
from regard.lab.runner import Run

TEXT = standard_library(60_000)


def quick(name: str) -> Outcomes:
    """The outcomes of an experiment in its quick profile."""
    experiment = load(name)
    with TemporaryDirectory() as folder:
        run = Run(experiment, configured(experiment, True, {}), TEXT, Path(folder), "quick")
        run.open()
        for setting, seed in run.cells():
            run.measure(setting, seed)
        concluded = run.conclude()
        assert concluded is not None and concluded["complete"]
        assert {v["verdict"] for v in concluded["verdicts"]} == {NOT_SIGNIFICANT}
        return run.outcomes()


def made_up(name: str, results: dict[str, list[dict]]) -> dict[str, str]:
    """The verdicts, by claim and effect, on invented results."""
    experiment = load(name)
    outcomes = [Outcome(s, seed, r, []) for s, each in results.items() for seed, r in enumerate(each)]
    concluded = experiment.conclude(Outcomes(outcomes, experiment.full))
    return {f"{v.claim} | {v.effect} | {v.note}": v.verdict for v in concluded.verdicts}


def only(found: dict[str, str], *words: str) -> str:
    (verdict,) = (v for text, v in found.items() if all(word in text for word in words))
    return verdict
