"""`regard lab list`, `run` and `report`: results, errors, progress and Ctrl-C."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from regard import cli
from regard.lab.experiments import NAMES, load
from regard.lab.session import Display, RunRequest, run_experiments


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
