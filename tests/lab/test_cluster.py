"""The cells of a run on Ray: the same as on one process, stopped and continued, refused and failed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from regard.lab import cluster, command
from regard.lab.experiments import load
from regard.lab.runner import Experiment, Refused, Run
from support.lab import TEXT, contents

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def local():
    """A Ray of this machine alone, with two CPUs, and one thread in each cell."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # by itself Ray gives way to all that runs beside it
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    torch.set_num_threads(before)


def opened(folder, experiment=None, **changes) -> Run:
    experiment = experiment or load("variance")
    config = {**experiment.quick, "steps": 4, "every": 2, "seeds": 2, "draws": 10, **changes}
    run = Run(experiment, config, TEXT, folder, "quick")
    run.open()
    return run


def alone(run: Run) -> Run:
    for cell in run.cells():
        run.measure(*cell)
    return run


def same(one: Run, other: Run) -> bool:
    """Results, metrics and checkpoints, bit for bit."""
    assert one.cells() == other.cells() and one.cells()
    return all(contents(one.folder_of(*cell)) == contents(other.folder_of(*cell)) for cell in one.cells())


@pytest.mark.usefixtures("local")
def test_ray_gives_the_same_cells_also_when_stopped_and_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", 0.05)  # so that it stops soon
    run, running, told = opened(tmp_path / "ray", steps=100, every=40), [], []

    def steps(cells, done, total):
        running.append(cells)

    assert not cluster.measure_all(run, lambda: told.append(1), lambda: any(running), steps)
    begun = [cell for cell in run.cells() if (run.folder_of(*cell) / "checkpoint.safetensors").exists()]
    assert begun and all(run.result(*cell) is None for cell in begun) and not told
    metrics = run.folder_of(*begun[0]) / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 0,', '"step": 0.0,', 1))  # kept, unless it begins anew
    assert cluster.measure_all(run, lambda: told.append(1)) and len(told) == 2
    assert metrics.read_text().count('"step": 0.0,') == 1
    metrics.write_text(metrics.read_text().replace('"step": 0.0,', '"step": 0,'))
    assert same(alone(opened(tmp_path / "alone", steps=100, every=40)), run)
    assert not same(alone(opened(tmp_path / "other")), run)
    node = json.loads((run.folder_of("softmax", 1) / "versions.json").read_text())
    assert node == json.loads((run.folder / "versions.json").read_text())  # this machine is the node
    assert cluster.measure_all(run, lambda: told.append(1)) and len(told) == 2  # nothing is left to do


@pytest.mark.usefixtures("local")
def test_a_cell_that_fails_is_named(tmp_path):
    def measure(cell):
        return {"fine": 1 // (cell.setting == "good")}

    def settings(config):
        return ["good", "bad"]

    failing = Experiment("x", "?", "us", "", {}, {}, settings, measure, load("variance").conclude)
    run = opened(tmp_path / "one", failing, seeds=1)
    with pytest.raises(Refused, match=r"(?s)^bad, seed 0: failed on the cluster.*in measure.*ZeroDivisionError"):
        cluster.measure_all(run)
    assert run.result("good", 0).result == {"fine": 1}


@pytest.mark.usefixtures("local")
def test_what_the_cluster_cannot_do_is_refused(tmp_path, monkeypatch):
    run = opened(tmp_path)
    torch.set_num_threads(3)
    with pytest.raises(Refused, match=r"expected a node with 3 CPUs .* and 0 GPUs, got 2 CPUs and 0 GPUs"):
        cluster.measure_all(run)
    torch.set_num_threads(1)
    run.device = torch.device("cuda")
    with pytest.raises(Refused, match=r"expected a node with 1 CPUs .* and 1 GPUs, got 2 CPUs and 0 GPUs"):
        cluster.measure_all(run)
    run.device = torch.device("cpu")
    mine = cluster.versions()
    monkeypatch.setattr(cluster, "versions", lambda *_: {**mine, "torch": "1.0"})
    with pytest.raises(Refused, match=r"^softmax, seed .: node .*: expected torch = '1.0', got '2"):
        cluster.measure_all(run)
    assert cluster.device_named("auto") == cluster.device_named("cpu") == torch.device("cpu")
    assert cluster.device_named("cuda") == torch.device("cuda")  # the driver needs none
    with pytest.raises(ValueError, match="expected auto, cpu or cuda with --ray"):
        cluster.device_named("cuda:1")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refused, match=r"--ray: Ray cannot be loaded .*; pip install 'regard\[ray\]'"):
        cluster.connected(None).__enter__()


@pytest.mark.parametrize(
    ("arguments", "processes", "message"),
    [
        ({"workers": 2, "ray": True}, 1, "--workers: expected 1 with --ray"),
        ({"workers": 1, "ray": True}, 2, "--ray: expected no under torchrun"),
        ({"workers": 2}, 2, "--workers: expected 1 under torchrun"),
        ({"workers": 1, "ray_address": "auto"}, 1, "--ray-address: expected none without --ray"),
    ],
)
def test_ways_to_share_the_work_do_not_mix(monkeypatch, tmp_path, arguments, processes, message):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    console = command.Console(quiet=True)
    with pytest.raises(Refused, match=message):
        command.run_all("masking", True, None, tmp_path, [], False, errors=console, console=console, **arguments)


@pytest.fixture
def brief_folder():
    """Ray's sockets lie in it, and their paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a group of processes")
def test_ctrl_c_stops_the_nodes_in_order(tmp_path, brief_folder):
    """As in a terminal, every process of the group gets the signal."""
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    arguments = ["lab", "run", "masking", "--quick", "--ray", "--ray-address", "local", "--out", str(tmp_path)]
    arguments += ["--text", str(tmp_path / "a.txt"), "--set", "steps=100000", "--set", "every=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    environment["TMPDIR"] = str(brief_folder)  # where nodes keep what they compute
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if any(len(found.read_text().splitlines()) > 2 for found in brief_folder.rglob("metrics.jsonl")):
            break
        time.sleep(0.1)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said.decode()
    assert b"the same command goes on from here" in said
    cells = tmp_path / "masking-quick" / "cells"
    found = [
        [json.loads(line)["step"] for line in metrics.read_text().splitlines()] for metrics in cells.rglob("*.jsonl")
    ]
    assert max(map(len, found)) > 2 and all(steps == list(range(0, 2 * len(steps), 2)) for steps in found)
    assert list(cells.rglob("checkpoint.safetensors")) and not list(cells.rglob("result.json"))
    assert not list(brief_folder.rglob("metrics.jsonl"))  # nodes are left clean
