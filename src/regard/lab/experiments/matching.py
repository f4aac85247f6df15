"""Rows and columns: one task whose answer is a permutation, and one in which all queries must read the same key."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...nn import Transformer
from ...problem import RowsAndColumns, Transport
from ...regularizers import Tsallis
from ..experiment import Cell, Conclusion, Config, Experiment, LabError, Outcomes
from ..judging import Interval, Judged, differences, interval, judge_effect, withhold
from ..tasks import accuracies, measure_task, task_settings
from ..training import Batch

SORTS = "ours; Cuturi, Teboul and Vert 2019: sorting is transport on a line"
HUB = "ours, docs/sinkhorn.md: no key can be a hub"
SINKFORMER = "ours; Sander et al. 2022 take 3 to 5 normalisations"
NEAR = 0.02  # a difference in accuracy that counts as none
SOLVED = 0.9  # the mean accuracy above which a task is learned


def sorting(count: int, config: Config, generator: torch.Generator) -> Batch:
    """Different numbers in any order; the target at place i is the i-th smallest."""
    numbers = torch.rand(count, config["symbols"], generator=generator).argsort(1)[:, : config["length"]]
    return numbers, numbers.sort(1).values


def telling(count: int, config: Config, generator: torch.Generator) -> Batch:
    """Letters, one of them marked (as a token of its own); the target at every place is the marked letter."""
    length, symbols = config["length"], config["symbols"]
    letters = torch.randint(symbols, (count, length), generator=generator)
    where = torch.randint(length, (count, 1), generator=generator)
    marked = letters.gather(1, where)
    return letters.scatter(1, where, marked + symbols), marked.expand(count, length).contiguous()


TASKS = {"sorting": sorting, "telling": telling}


def problem_named(rule: str, config: Config) -> Transport:
    columns = {"tolerance": config["tolerance"], "max_iterations": config["iterations"]}
    return {
        "softmax": Transport(),
        "entmax-1.5": Transport(Tsallis(1.5)),
        "Sinkhorn": Transport(marginal=RowsAndColumns(**columns)),
        "Sinkhorn, 3 steps": Transport(marginal=RowsAndColumns(iterations=3)),
    }[rule]


def settings(config: Config) -> list[str]:
    if config["symbols"] < config["length"]:
        raise LabError(f"--set symbols: expected at least length={config['length']}, got {config['symbols']}")
    return task_settings(TASKS, config)


def measure(cell: Cell) -> dict[str, Any]:
    config = cell.config

    def model_for(rule: str, length: int) -> Transformer:
        sizes = {name: config[name] for name in ("layers", "heads", "width")}
        return Transformer(2 * config["symbols"], length, causal=False, problem=problem_named(rule, config), **sizes)

    return measure_task(cell, TASKS, model_for)


def conclude(outcomes: Outcomes) -> Conclusion:
    rules = outcomes.config["rules"]

    def gap(task: str, more: str, less: str) -> Interval:
        return differences(*(outcomes.values(f"{task}: {rule}", "accuracy") for rule in (more, less)))

    def judged(claim: str, source: str, task: str, more: str, less: str, claimed: tuple[float, float]) -> Judged:
        what = f"{task}: accuracy of {more} minus that of {less}, in points of 1"
        found = judge_effect(claim, source, what, gap(task, more, less), claimed, same=claimed[0] < 0)
        if any(interval(outcomes.values(f"{task}: {rule}", "accuracy")).mean > SOLVED for rule in (more, less)):
            return found
        return withhold(found, "Neither of the two learned the task: it tells nothing.")

    sorts = "One layer with both marginals sorts; with rows alone ({}) it does worse"
    hub = "Where all must read one key, columns that share stand in the way"
    few = "A few normalisations do what convergence does"
    claims = [
        *((sorts.format(rule), SORTS, "sorting", "Sinkhorn", rule, (NEAR, math.inf)) for rule in RULES[:2]),
        (hub, HUB, "telling", "softmax", "Sinkhorn", (NEAR, math.inf)),
        *((few, SINKFORMER, task, "Sinkhorn, 3 steps", "Sinkhorn", (-NEAR, NEAR)) for task in TASKS),
    ]
    verdicts = [judged(*claim) for claim in claims if {claim[3], claim[4]} <= set(rules)]
    return Conclusion(verdicts, *accuracies(outcomes, list(TASKS), "Both tasks, all seeds"))


RULES = ["softmax", "entmax-1.5", "Sinkhorn", "Sinkhorn, 3 steps"]

EXPERIMENT = Experiment(
    name="matching",
    question="What do columns do that rows cannot, and the other way round?",
    source="Cuturi, Teboul and Vert 2019; Sander et al. 2022",
    about="Encoders of one layer learn two tasks without end, every batch new: to sort different numbers, where the "
    "plan that answers is a permutation, and to tell one marked letter at every place, where all queries want one key.",
    quick={
        "seeds": 1, "steps": 12, "every": 6, "warmup": 3, "rate": 3e-3, "batch": 16, "layers": 1, "heads": 2,
        "width": 32, "length": 6, "symbols": 12, "decay": 0.1, "evaluate": 64, "tolerance": 1e-2, "iterations": 50,
        "rules": RULES,
    },
    full={
        "seeds": 3, "steps": 800, "every": 80, "warmup": 50, "rate": 3e-3, "batch": 32, "layers": 1, "heads": 4,
        "width": 64, "length": 16, "symbols": 64, "decay": 0.01, "evaluate": 512, "tolerance": 1e-2, "iterations": 100,
        "rules": RULES,
    },
    settings=settings,
    measure=measure,
    conclude=conclude,
)  # fmt: skip
