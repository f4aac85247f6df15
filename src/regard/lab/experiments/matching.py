"""Rows and columns: where the answer is a permutation, and where all must read one place."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...nn import Transformer
from ...problem import RowsAndColumns, Transport
from ...regularizers import Tsallis
from ..judging import Interval, Judged, differences, interval, judge, withhold
from ..runner import Cell, Conclusion, Config, Experiment, Outcomes, Refused
from ..training import Batch, Training, train
from .recall import accuracies, accuracy

SORTS = "ours; Cuturi, Teboul and Vert 2019: sorting is transport on a line"
HUB = "ours, docs/sinkhorn.md: no key can be a hub"
SINKFORMER = "ours; Sander et al. 2022 take 3 to 5 normalisations"
NEAR = 0.02  # of accuracy: as good as the same
SOLVED = 0.9  # the mean accuracy above which a task is learned


def sorting(count: int, config: Config, generator: torch.Generator) -> Batch:
    """Different numbers in any order; place i is to tell the i-th smallest."""
    numbers = torch.rand(count, config["symbols"], generator=generator).argsort(1)[:, : config["length"]]
    return numbers, numbers.sort(1).values


def telling(count: int, config: Config, generator: torch.Generator) -> Batch:
    """Letters, one of them marked (as a token of its own); every place is to tell that one."""
    length, symbols = config["length"], config["symbols"]
    letters = torch.randint(symbols, (count, length), generator=generator)
    where = torch.randint(length, (count, 1), generator=generator)
    told = letters.gather(1, where)
    return letters.scatter(1, where, told + symbols), told.expand(count, length).contiguous()


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
        raise Refused(f"--set symbols: expected at least length={config['length']}, got {config['symbols']}")
    return [f"{task}: {rule}" for task in TASKS for rule in config["rules"]]


def measure(cell: Cell) -> dict[str, Any]:
    name, rule = cell.setting.split(": ")
    task, config = TASKS[name], cell.config
    tested = [t.to(cell.device) for t in task(config["evaluate"], config, torch.Generator().manual_seed(10**6))]
    torch.manual_seed(cell.seed)
    sizes = {n: config[n] for n in ("layers", "heads", "width")}
    problem = problem_named(rule, config)
    model = Transformer(2 * config["symbols"], config["length"], causal=False, problem=problem, **sizes)

    def evaluate(model: Transformer) -> dict[str, float]:
        return {"accuracy": accuracy(model, *tested)}

    trained = train(cell, model, Training.of(config), lambda g: task(config["batch"], config, g), evaluate)
    return {"accuracy": trained.metrics[-1].get("accuracy") or 0.0, "seconds": trained.seconds}


def conclude(outcomes: Outcomes) -> Conclusion:
    rules = outcomes.config["rules"]

    def gap(task: str, more: str, less: str) -> Interval:
        return differences(*(outcomes.values(f"{task}: {rule}", "accuracy") for rule in (more, less)))

    def judged(claim: str, source: str, task: str, more: str, less: str, claimed: tuple[float, float]) -> Judged:
        what = f"{task}: accuracy of {more} minus that of {less}, in points of 1"
        found = judge(claim, source, what, gap(task, more, less), claimed, same=claimed[0] < 0)
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
