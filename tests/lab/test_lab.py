"""The lab: verdicts from numbers, runs that reproduce and continue bit for bit, the page, and the command."""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regard import cli
from regard.lab import page, provenance, workers
from regard.lab.configuration import configured
from regard.lab.corpus import UNKNOWN, Corpus, from_file, standard_library
from regard.lab.experiment import Conclusion, Experiment, Figure, LabError, Outcomes, Series, Stopped, Table
from regard.lab.experiments import NAMES, load
from regard.lab.figures import Axis
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
from regard.lab.runner import Run
from regard.lab.session import Display, RunRequest, run_experiments
from regard.lab.training import Training, text_model, train_on_text
from regard.lab.workers import measure_on_workers
from support.lab import TEXT, contents

# --- verdicts ---------------------------------------------------------------------------------------------------------


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


# --- text -------------------------------------------------------------------------------------------------------------


def test_standard_library():
    corpus = standard_library(50_000)
    assert len(corpus.text) == 50_000 and "def " in corpus.text and "import " in corpus.text
    assert corpus.decode(corpus.tokens[:500]) == corpus.text[:500]
    assert standard_library(50_000).digest == corpus.digest != standard_library(50_001).digest
    pieces = corpus.batch(40, 30, torch.Generator().manual_seed(0), "validation")
    assert pieces.shape == (40, 31) and all(corpus.decode(p) in corpus.text[45_000:] for p in pieces)
    assert all(corpus.decode(p) in corpus.text[:45_000] for p in corpus.batch(40, 30, torch.Generator()))


def test_rare_characters_share_a_token():
    corpus = Corpus("many", "".join(chr(0x4E00 + n) for n in range(300)) + "ab" * 50)
    assert len(corpus.characters) == 256 and UNKNOWN in corpus.characters
    assert corpus.decode(corpus.tokens[-4:]) == "abab" and UNKNOWN in corpus.decode(corpus.tokens)
    with pytest.raises(ValueError, match="expected characters of the corpus, got 'c'"):
        Corpus("few", "ab" * 50).encode("abc")


def test_a_text_file(tmp_path):
    (tmp_path / "a.txt").write_text("to be " * 300)
    assert from_file(tmp_path / "a.txt").characters == " beot"
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(ValueError, match="at least 1000 characters, got 5"):
        from_file(tmp_path / "b.txt")


# --- runs -------------------------------------------------------------------------------------------------------------

CONFIG = {
    "seeds": 2, "steps": 12, "every": 5, "warmup": 2, "batch": 4, "length": 8, "layers": 1, "heads": 2, "width": 8,
    "evaluate": 4,
}  # fmt: skip


def _measure(cell):
    # Dropout uses the global generator, which is part of the state.
    trained = train_on_text(cell, text_model(cell, dropout=0.1 if cell.setting == "dropout" else 0.0))
    return {"val": trained.last("val"), "worst": math.inf, "seconds": trained.seconds}


def _conclude(outcomes):
    effect = differences(outcomes.values("dropout", "val"), outcomes.values("none", "val"))
    lines = Figure("Loss <b>", "step", "nats", [outcomes.curve(s, "val") for s in outcomes.settings])
    dots = Figure("Loss", "nats", "", [Series("none", [], outcomes.values("none", "val"))], kind="dots", reference=2.0)
    table = Table("T", ["a", "b"], [["x & y", "<script>alert(1)</script>"]])
    return Conclusion([judge_effect("dropout hurts", "us", "loss", effect, (0, math.inf))], [table], [lines, dots])


EXPERIMENT = Experiment(
    "made-up", "?", "us", "a test", CONFIG, CONFIG, lambda c: ["none", "dropout"], _measure, _conclude
)


def fresh(folder: Path) -> Run:
    run = Run(EXPERIMENT, dict(CONFIG), TEXT, folder, "full", "regard lab run made-up")
    run.open()
    return run


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
        fresh(tmp_path / name).measure("dropout", 1)
    one, two = (contents(tmp_path / name / "cells" / "dropout" / "1") for name in ("a", "b"))
    assert one == two
    fresh(tmp_path / "a").measure("dropout", 0)
    assert contents(tmp_path / "a" / "cells" / "dropout" / "0") != one


@pytest.mark.parametrize("steps", [0, 3, 5, 10, 11])
def test_an_interrupted_cell_continues_bit_for_bit(tmp_path, steps):
    whole, parts = fresh(tmp_path / "whole"), fresh(tmp_path / "parts")
    whole.measure("dropout", 0)
    with pytest.raises(Stopped):
        parts.measure("dropout", 0, stopping=stop_after(steps))
    assert parts.result("dropout", 0) is None
    torch.manual_seed(99)
    parts.measure("dropout", 0)
    cell = Path("cells", "dropout", "0")
    assert contents(tmp_path / "whole" / cell) == contents(tmp_path / "parts" / cell)


def test_metrics_after_the_checkpoint_are_logged_once(tmp_path):
    run = fresh(tmp_path)
    with pytest.raises(Stopped):
        run.measure("none", 0, stopping=stop_after(3))
    metrics = tmp_path / "cells" / "none" / "0" / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text() + '{"step": 5, "val": 1.0}\n'
    )  # logged, but killed before the next checkpoint
    run.measure("none", 0)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 5, 10, 12]


def test_finished_cells_are_not_computed_again(tmp_path):
    run = fresh(tmp_path)
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
    fresh(tmp_path)
    other = Run(EXPERIMENT, {**CONFIG, "steps": 13}, TEXT, tmp_path)
    with pytest.raises(LabError, match=r"config.steps = 12, not 13; use another --out, or --fresh"):
        other.open()
    versions = tmp_path / "versions.json"
    versions.write_text(versions.read_text().replace(torch.__version__, "1.0"))
    with pytest.raises(LabError, match=r"versions.json: this run was started with torch = '1.0'"):
        fresh(tmp_path)


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
    fresh(tmp_path / "run")
    monkeypatch.setattr(provenance, "sources_hash", lambda: changed)
    with pytest.raises(LabError, match=f"versions.json: this run was started with sources = '{before}'"):
        fresh(tmp_path / "run")


def test_a_run_does_not_continue_with_another_engine(tmp_path, monkeypatch):
    hashed = provenance.engine_hash.__wrapped__  # without the cache
    spec = importlib.util.find_spec("regard._native")
    if spec is None:
        assert hashed() is None
        return
    assert hashed() == hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() == provenance.versions()["engine"]
    fresh(tmp_path / "run")
    rebuilt = tmp_path / "_native.so"
    rebuilt.write_bytes(Path(spec.origin).read_bytes() + b"changed")
    other = importlib.util.spec_from_file_location("regard._native", rebuilt)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: other)
    changed = hashed()
    monkeypatch.setattr(provenance, "engine_hash", lambda: changed)
    with pytest.raises(LabError, match=r"versions.json: this run was started with engine = '\w+', not '\w+'"):
        fresh(tmp_path / "run")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hashed() is None


def test_a_diverging_training_stops(tmp_path):
    def measure(cell):
        model = text_model(cell, attention=lambda q, k, v, is_causal: v * math.nan)
        trained = train_on_text(cell, model)
        assert trained.last("val") == math.inf
        return {"val": trained.last("val"), "diverged_at": trained.diverged_at}

    experiment = Experiment("x", "?", "us", "", CONFIG, CONFIG, lambda c: ["nan"], measure, _conclude)
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


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_everything_and_contains_no_script(tmp_path):
    run = fresh(tmp_path / "made-up")
    for setting, seed in run.cells():
        run.measure(setting, seed)
    assert run.conclude()["complete"]
    made = page.to_html(page.read_conclusions(tmp_path))
    assert "<script" not in made and "&lt;script&gt;" in made and "Loss &lt;b&gt;" in made
    assert made.count("<svg viewBox") == 2 and made.count("<polyline") == 2 and "x &amp; y" in made
    assert "dropout hurts" in made and "http://" not in made and "https://" not in made
    assert "regard lab run made-up" in made
    assert "None" not in made and ">nan" not in made and '"nan' not in made


def test_axes_have_round_ticks():
    assert Axis([0.0, 10.0], 0, 100, False).ticks() == [0, 2, 4, 6, 8, 10]
    assert Axis([1.0, 100.0], 0, 100, True).ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert Axis([3.0], 0, 100, False)(3.0) == 50
    for values in ([], [math.inf], [0.0, 0.0], [-1e-9, 1e-9], [2.0, 2.5]):
        assert len(Axis(values, 0, 100, False).ticks()) <= 12


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(cli.app, ["lab", *arguments])


def test_list(command):
    shown = command("list")
    assert shown.exit_code == 0 and all(name in shown.output for name in NAMES)
    assert all(load(name).name == name for name in NAMES)


def test_run_and_report(command, tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    arguments = ("run", "masking", "--quick", "--text", "a.txt", "--set", "steps=4", "--set", "every=2")
    shown = command(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "not significant" in shown.output
    assert shown.output.count("too small for a verdict") == 1
    result = tmp_path / "runs" / "masking-quick" / "cells" / "no_mask" / "0" / "result.json"
    written = result.stat().st_mtime_ns
    assert command(*arguments).exit_code == 0 and result.stat().st_mtime_ns == written
    assert command(*arguments[:-2]).exit_code == 2  # another configuration
    assert command(*arguments, "--fresh").exit_code == 0 and result.stat().st_mtime_ns != written
    assert command("report", "--out", "lab.html").exit_code == 0
    made = (tmp_path / "lab.html").read_text()
    assert "regard lab run masking --quick --text a.txt --set steps=4 --set every=2" in made


class Recorder(Display):
    """A display that records its calls."""

    def __init__(self):
        self.calls = []

    def running(self, experiment, cells, finished):
        self.calls.append(("running", experiment, cells, finished))
        return contextlib.nullcontext()

    def cell(self, description):
        self.calls.append(("cell", description))

    def steps(self, done, total, description=None):
        self.calls.append(("steps", done, total))

    def cell_finished(self):
        self.calls.append(("finished",))

    def concluded(self, record):
        self.calls.append(("concluded", record["name"], record["complete"]))

    def stopped(self):
        self.calls.append(("stopped",))


def test_a_display_receives_the_progress_of_a_session(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    changes = ["steps=2", "every=1"]
    request = RunRequest("masking", quick=True, text=tmp_path / "a.txt", out=tmp_path / "runs", changes=changes)
    display = Recorder()
    assert run_experiments(request, display)
    cells = [
        call
        for setting in ("minus infinity", "mask to zero", "no mask")
        for call in (("cell", f"{setting}, seed 0"), ("steps", 1, 2), ("steps", 2, 2), ("finished",))
    ]
    assert display.calls == [("running", "masking", 3, 0), *cells, ("concluded", "masking", True)]
    again = Recorder()  # every cell is finished
    assert run_experiments(request, again)
    assert again.calls == [("running", "masking", 3, 0), *[("finished",)] * 3, ("concluded", "masking", True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nothing"), "NAME: expected one of"),
        (("run", "masking", "--quick", "--set", "steps"), "--set: expected name=value, got 'steps'"),
        (("run", "masking", "--text", "missing.txt"), "--text: "),
        (("report", "empty"), "empty: expected a folder with finished runs"),
    ],
)
def test_invalid_requests_are_explained(command, arguments, message):
    shown = command(*arguments)
    assert shown.exit_code == 2 and message in shown.output


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to one process")
def test_after_ctrl_c_the_same_command_continues(tmp_path):
    command = [sys.executable, "-m", "regard.cli", "lab", "run", "masking", "--quick", "--out", str(tmp_path)]
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    command += ["--text", str(tmp_path / "a.txt"), "--set", "steps=100000", "--set", "every=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    cell = tmp_path / "masking-quick" / "cells" / "minus_infinity" / "0"
    steps = []
    for _ in range(2):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        started = len(steps) and steps[-1]
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            metrics = cell / "metrics.jsonl"
            if metrics.exists() and len(metrics.read_text().splitlines()) > started / 2 + 3:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output.decode()
        assert b"the same command continues from here" in output
        assert (cell / "checkpoint.safetensors").exists() and not (cell / "result.json").exists()
        found = [json.loads(line)["step"] for line in (cell / "metrics.jsonl").read_text().splitlines()]
        assert found == list(range(0, 2 * len(found), 2))  # each exactly once
        steps.append(found[-1])
    assert steps[1] > steps[0] > 0


def test_interval_in_words():
    assert str(Interval(1.0, 0.5, 1.5, 3)) == "1 [0.5, 1.5], 3 seeds" and interval([2.0]).brief() == "2.000"
    assert Interval(1.0, 0.5, 1.5, 3).brief(1) == "1.0 ± 0.5"
    assert Judged("a", "b", "c", MEASURED).to_dict()["verdict"] == MEASURED


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch was built without gloo")
def test_two_processes_train_as_one(tmp_path):
    """As torchrun starts them, and as accelerate does (with --multi_gpu: --cpu would start one process)."""
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    arguments = ["-m", "regard", "lab", "run", "masking", "--quick", "--text", str(tmp_path / "a.txt")]
    arguments += ["--set", "steps=12", "--set", "every=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = {
        "one": [sys.executable, *arguments],
        "two": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments],
        "accelerated": [
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"),
            *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", *arguments),
        ],
    }
    started = [
        subprocess.Popen(
            [*c, "--out", str(tmp_path / n)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for n, c in commands.items()
    ]
    for process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()
        assert output.decode().count("not significant") == 3  # only one process prints
    losses = []
    for name in commands:
        folder = tmp_path / name / "masking-quick"
        lines = (folder / "cells" / "mask_to_zero" / "0" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [r["step"] for r in records] == [0, 3, 6, 9, 12]
        losses.append([[r["val"], r.get("loss", 0.0)] for r in records])
    for several in losses[1:]:
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(several), rtol=2e-4, atol=2e-4)
    for name, processes in {"one": 1, "two": 2, "accelerated": 2}.items():
        versions = json.loads((tmp_path / name / "masking-quick" / "versions.json").read_text())
        assert versions["processes"] == processes and versions["device"] == "cpu"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for processes in /proc")
def test_workers_exit_after_the_first_process(tmp_path):
    """A first process that is killed cannot notify its workers: they write their checkpoints and exit by themselves."""
    long = ["masking", "--quick", "--workers", "2", "--set", "steps=100000", "--set", "every=10"]
    order = [sys.executable, "-m", "regard", "lab", "run", *long, "--out", str(tmp_path)]
    first = subprocess.Popen(order, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def workers():
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                own = f"PPid:\t{first.pid}\n" in (process / "status").read_text()
                if own and "spawn_main" in (process / "cmdline").read_text():
                    found.append(process)
        return found

    def wait_for(done):
        for _ in range(3000):
            if done():
                return
            time.sleep(0.1)
        pytest.fail("waited for five minutes")

    wait_for(lambda: len(list(tmp_path.glob("masking-quick/cells/*/0/metrics.jsonl"))) == 2)
    mine = workers()
    assert len(mine) == 2
    first.kill()
    first.wait()

    def ended(process):
        try:
            return "State:\tZ" in (process / "status").read_text()  # it has ended; its status was not collected
        except OSError:
            return True

    wait_for(lambda: all(map(ended, mine)))
    assert len(list(tmp_path.glob("masking-quick/cells/*/0/checkpoint.safetensors"))) == 2


def test_workers_start_no_cell_after_the_stop(monkeypatch):
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(workers, "_given", {"run": None, "stop": stop})
    assert workers._measure("a", 0) is False  # a cell that was sent before the stop


def test_workers_compute_the_same_cells(tmp_path):
    experiment = load("variance")
    config = {**experiment.quick, "steps": 4, "every": 2, "seeds": 2, "draws": 10}
    text = Corpus("a", "to be or not to be, that is the question. " * 100)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [Run(experiment, config, text, tmp_path / name, "quick") for name in ("alone", "shared", "stopped")]
        finished = []
        for run in runs:
            run.open()
        for cell in runs[0].cells():
            runs[0].measure(*cell)
        assert measure_on_workers(runs[1], 2, lambda: finished.append(1)) and len(finished) == 2
        for setting, seed in runs[0].cells():
            one, two = (run.result(setting, seed) for run in runs[:2])
            assert (one.result, one.metrics) == (two.result, two.metrics)
        assert measure_on_workers(runs[1], 2)  # all cells are finished
        assert not measure_on_workers(runs[2], 1, stopping=lambda: True)
        assert not list((tmp_path / "stopped").rglob("checkpoint.safetensors"))  # waiting cells did not start
    finally:
        torch.set_num_threads(before)
