"""Runs on Ray: the same cells as on one process, also when stopped and continued; errors of the cluster."""

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

from regard.lab import cluster
from regard.lab.experiment import Experiment, LabError
from regard.lab.experiments import load
from regard.lab.runner import Run
from regard.lab.session import Display, RunRequest, run_experiments
from support.lab import TEXT, contents

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def local():
    """A Ray cluster on this machine, with two CPUs and one thread per cell."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # the default would give all other processes precedence
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


def measured_alone(run: Run) -> Run:
    for cell in run.cells():
        run.measure(*cell)
    return run


def same(one: Run, other: Run) -> bool:
    """Whether results, metrics and checkpoints agree bit for bit."""
    assert one.cells() == other.cells() and one.cells()
    return all(contents(one.folder_of(*cell)) == contents(other.folder_of(*cell)) for cell in one.cells())


@pytest.mark.usefixtures("local")
def test_ray_gives_the_same_cells_also_when_stopped_and_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "REPORT_INTERVAL", 0.05)  # so that cells stop soon
    run, running, finished = opened(tmp_path / "ray", steps=100, every=40), [], []

    def steps(cells, done, total):
        running.append(cells)

    assert not cluster.measure_on_cluster(run, lambda: finished.append(1), lambda: any(running), steps)
    started = [cell for cell in run.cells() if (run.folder_of(*cell) / "checkpoint.safetensors").exists()]
    assert started and all(run.result(*cell) is None for cell in started) and not finished
    metrics = run.folder_of(*started[0]) / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text().replace('"step": 0,', '"step": 0.0,', 1)
    )  # this change is lost if the cell starts again
    assert cluster.measure_on_cluster(run, lambda: finished.append(1)) and len(finished) == 2
    assert metrics.read_text().count('"step": 0.0,') == 1
    metrics.write_text(metrics.read_text().replace('"step": 0.0,', '"step": 0,'))
    assert same(measured_alone(opened(tmp_path / "alone", steps=100, every=40)), run)
    assert not same(measured_alone(opened(tmp_path / "other")), run)
    node = json.loads((run.folder_of("softmax", 1) / "versions.json").read_text())
    assert node == json.loads((run.folder / "versions.json").read_text())  # this machine is the node
    assert cluster.measure_on_cluster(run, lambda: finished.append(1)) and len(finished) == 2  # all cells are finished


@pytest.mark.usefixtures("local")
def test_a_failing_cell_is_named(tmp_path):
    def measure(cell):
        return {"fine": 1 // (cell.setting == "good")}

    def settings(config):
        return ["good", "bad"]

    failing = Experiment("x", "?", "us", "", {}, {}, settings, measure, load("variance").conclude)
    run = opened(tmp_path / "one", failing, seeds=1)
    with pytest.raises(LabError, match=r"(?s)^bad, seed 0: failed on the cluster.*in measure.*ZeroDivisionError"):
        cluster.measure_on_cluster(run)
    assert run.result("good", 0).result == {"fine": 1}


@pytest.mark.usefixtures("local")
def test_requests_that_the_cluster_cannot_serve_raise(tmp_path, monkeypatch):
    run = opened(tmp_path)
    torch.set_num_threads(3)
    with pytest.raises(LabError, match=r"expected a node with 3 CPUs .* and 0 GPUs, got 2 CPUs and 0 GPUs"):
        cluster.measure_on_cluster(run)
    torch.set_num_threads(1)
    run.device = torch.device("cuda")
    with pytest.raises(LabError, match=r"expected a node with 1 CPUs .* and 1 GPUs, got 2 CPUs and 0 GPUs"):
        cluster.measure_on_cluster(run)
    run.device = torch.device("cpu")
    mine = cluster.versions()
    monkeypatch.setattr(cluster, "versions", lambda *_: {**mine, "torch": "1.0"})
    with pytest.raises(LabError, match=r"^softmax, seed .: node .*: expected torch = '1.0', got '2"):
        cluster.measure_on_cluster(run)
    assert cluster.device_named("auto") == cluster.device_named("cpu") == torch.device("cpu")
    assert cluster.device_named("cuda") == torch.device("cuda")  # the driver itself needs no GPU
    with pytest.raises(ValueError, match="expected auto, cpu or cuda with --ray"):
        cluster.device_named("cuda:1")


def test_a_missing_ray_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LabError, match=r"--ray: Ray cannot be loaded .*; pip install 'regard\[ray\]'"):
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
def test_ways_to_share_the_work_exclude_each_other(monkeypatch, tmp_path, arguments, processes, message):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(LabError, match=message):
        run_experiments(RunRequest("masking", quick=True, out=tmp_path, **arguments), Display())


@pytest.fixture
def short_folder():
    """A folder with a short path, because Ray puts its sockets in it."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a group of processes")
def test_ctrl_c_lets_the_nodes_write_checkpoints(tmp_path, short_folder):
    """Every process of the group gets the signal, as in a terminal."""
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    arguments = ["lab", "run", "masking", "--quick", "--ray", "--ray-address", "local", "--out", str(tmp_path)]
    arguments += ["--text", str(tmp_path / "a.txt"), "--set", "steps=100000", "--set", "every=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    environment["TMPDIR"] = str(short_folder)  # where nodes put the files of a cell
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if any(len(found.read_text().splitlines()) > 2 for found in short_folder.rglob("metrics.jsonl")):
            break
        time.sleep(0.1)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output.decode()
    assert b"the same command continues from here" in output
    cells = tmp_path / "masking-quick" / "cells"
    found = [
        [json.loads(line)["step"] for line in metrics.read_text().splitlines()] for metrics in cells.rglob("*.jsonl")
    ]
    assert max(map(len, found)) > 2 and all(steps == list(range(0, 2 * len(steps), 2)) for steps in found)
    assert list(cells.rglob("checkpoint.safetensors")) and not list(cells.rglob("result.json"))
    assert not list(short_folder.rglob("metrics.jsonl"))  # nodes leave no files
