"""Runs that reproduce and continue bit for bit, with the same configuration, sources and engine only."""

import hashlib
import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from regard.lab import provenance
from regard.lab.configuration import configured
from regard.lab.experiment import Experiment, LabError, Outcomes, Stopped
from regard.lab.judging import NOT_SIGNIFICANT
from regard.lab.runner import Run
from regard.lab.training import Training, text_model, train_on_text
from support.lab import CONFIG, EXPERIMENT, TEXT, conclude, contents, made_up_run


def stop_after(calls: int):
    """A function that returns True after this many calls."""
    left = [calls]

    def stopping():
        left[0] -= 1
        return left[0] < 0

    return stopping


def test_runs_reproduce_bit_for_bit(tmp_path):
    for name in ("a", "b"):
        torch.manual_seed(ord(name))  # the global state before the cell must not matter
        made_up_run(tmp_path / name).measure("dropout", 1)
    one, two = (contents(tmp_path / name / "cells" / "dropout" / "1") for name in ("a", "b"))
    assert one == two
    made_up_run(tmp_path / "a").measure("dropout", 0)
    assert contents(tmp_path / "a" / "cells" / "dropout" / "0") != one


@pytest.mark.parametrize("steps", [0, 3, 5, 10, 11])
def test_an_interrupted_cell_continues_bit_for_bit(tmp_path, steps):
    whole, parts = made_up_run(tmp_path / "whole"), made_up_run(tmp_path / "parts")
    whole.measure("dropout", 0)
    with pytest.raises(Stopped):
        parts.measure("dropout", 0, stopping=stop_after(steps))
    assert parts.result("dropout", 0) is None
    torch.manual_seed(99)
    parts.measure("dropout", 0)
    cell = Path("cells", "dropout", "0")
    assert contents(tmp_path / "whole" / cell) == contents(tmp_path / "parts" / cell)


def test_metrics_after_the_checkpoint_are_logged_once(tmp_path):
    run = made_up_run(tmp_path)
    with pytest.raises(Stopped):
        run.measure("none", 0, stopping=stop_after(3))
    metrics = tmp_path / "cells" / "none" / "0" / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text() + '{"step": 5, "val": 1.0}\n'
    )  # logged, but killed before the next checkpoint
    run.measure("none", 0)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 5, 10, 12]


def test_finished_cells_are_not_computed_again(tmp_path):
    run = made_up_run(tmp_path)
    assert run.cells() == [("none", 0), ("dropout", 0), ("none", 1), ("dropout", 1)]
    assert run.conclude() is None
    for setting, seed in run.cells()[:3]:
        run.measure(setting, seed)
    concluded = run.conclude()
    assert concluded["seeds"] == [0] and not concluded["complete"]  # seed 1 lacks a setting
    assert concluded["verdicts"][0]["verdict"] == NOT_SIGNIFICANT
    outcome = run.result("none", 0)
    assert outcome.result["worst"] is None and math.isfinite(outcome.result["val"])
    assert Outcomes([outcome], CONFIG).values("none", "worst") == [math.inf]
    assert json.loads((tmp_path / "versions.json").read_text())["torch"] == torch.__version__


def test_another_run_in_the_same_folder_raises(tmp_path):
    made_up_run(tmp_path)
    other = Run(EXPERIMENT, {**CONFIG, "steps": 13}, TEXT, tmp_path)
    with pytest.raises(LabError, match=r"config.steps = 12, not 13; use another --out, or --fresh"):
        other.open()
    versions = tmp_path / "versions.json"
    versions.write_text(versions.read_text().replace(torch.__version__, "1.0"))
    with pytest.raises(LabError, match=r"versions.json: this run was started with torch = '1.0'"):
        made_up_run(tmp_path)


def test_a_run_does_not_continue_with_other_sources(tmp_path, monkeypatch):
    def hashed():
        return provenance.sources_hash.__wrapped__()

    package = tmp_path / "regard"
    shutil.copytree(Path(provenance.__file__).parents[1], package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    before = hashed()
    assert provenance.sources_hash() == before  # cached before anything changes
    monkeypatch.setattr(provenance, "__file__", str(package / "lab" / "provenance.py"))
    assert hashed() == before  # independent of the folder
    with (package / "lab" / "judging.py").open("a") as file:
        file.write("# changed\n")
    changed = hashed()
    assert changed != before
    made_up_run(tmp_path / "run")
    monkeypatch.setattr(provenance, "sources_hash", lambda: changed)
    with pytest.raises(LabError, match=f"versions.json: this run was started with sources = '{before}'"):
        made_up_run(tmp_path / "run")


def test_a_run_does_not_continue_with_another_engine(tmp_path, monkeypatch):
    hashed = provenance.engine_hash.__wrapped__  # without the cache
    spec = importlib.util.find_spec("regard._native")
    if spec is None:
        assert hashed() is None
        return
    assert hashed() == hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() == provenance.versions()["engine"]
    made_up_run(tmp_path / "run")
    rebuilt = tmp_path / "_native.so"
    rebuilt.write_bytes(Path(spec.origin).read_bytes() + b"changed")
    other = importlib.util.spec_from_file_location("regard._native", rebuilt)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: other)
    changed = hashed()
    monkeypatch.setattr(provenance, "engine_hash", lambda: changed)
    with pytest.raises(LabError, match=r"versions.json: this run was started with engine = '\w+', not '\w+'"):
        made_up_run(tmp_path / "run")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hashed() is None


def test_a_diverging_training_stops(tmp_path):
    def measure(cell):
        model = text_model(cell, attention=lambda q, k, v, is_causal: v * math.nan)
        trained = train_on_text(cell, model)
        assert trained.last("val") == math.inf
        return {"val": trained.last("val"), "diverged_at": trained.diverged_at}

    experiment = Experiment("x", "?", "us", "", CONFIG, CONFIG, lambda c: ["nan"], measure, conclude)
    run = Run(experiment, dict(CONFIG), TEXT, tmp_path)
    run.open()
    run.measure("nan", 0)
    assert run.result("nan", 0).result == {"val": None, "diverged_at": 0}


def test_learning_rate():
    training = Training(steps=100, every=10, rate=1.0, warmup=10)
    rates = [training.rate_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11) and max(rates) == rates[10] == 1.0 and rates[100] == pytest.approx(0.1)


def test_changes_of_the_configuration():
    assert configured(EXPERIMENT, True, {"steps": "3", "batch": "9"}) == {**CONFIG, "steps": 3, "batch": 9}
    for changes, message in (
        ({"stepz": "3"}, "--set: expected one of seeds, steps"),
        ({"steps": "many"}, "--set steps: expected a whole number such as 12, got 'many'"),
        ({"seeds": "0"}, "--set seeds: expected at least 1, got 0"),
    ):
        with pytest.raises(LabError, match=message):
            configured(EXPERIMENT, True, changes)
