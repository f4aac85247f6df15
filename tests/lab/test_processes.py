"""Runs on several processes: torchrun, accelerate and workers."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from regard.lab import workers
from regard.lab.corpus import Corpus
from regard.lab.experiments import load
from regard.lab.runner import Run
from regard.lab.workers import measure_on_workers


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
