"""Run files: an inspection that is interrupted or killed continues to the same numbers; the progress bar."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard import Inspection
from support.models import build
from support.recorded import numbers, tokens


def test_an_interrupted_run_resumes_to_the_same_numbers(tmp_path):
    model = build("gemma3")
    batches = [tokens(64, 2, 15 + n, n) for n in range(5)]
    expected = regard.inspect(model, batches)
    run = tmp_path / "run.safetensors"

    calls = 0

    def interrupted(*_):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_hook(interrupted)  # in the middle of the third pass
    with pytest.raises(KeyboardInterrupt):
        regard.inspect(model, batches, run=run)
    hook.remove()
    assert Inspection.load(run).batches == 2
    resumed = regard.inspect(model, batches, run=run)
    assert numbers(resumed) == numbers(expected) == numbers(Inspection.load(run))
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        pickle.loads(run.read_bytes())

    for changed, message in (
        ({"inputs": [batches[1], *batches[1:]]}, "inputs"),
        ({"inputs": batches[:2]}, "batches"),
        ({"statistics": ["entropy"]}, "statistics"),
        ({"model": build("gemma3").double().bfloat16().float()}, "weights"),
    ):
        with pytest.raises(ValueError, match=message):
            regard.inspect(**{"model": model, "inputs": batches, "run": run} | changed)
    run.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="path"):
        Inspection.load(run)


TESTS = os.pathsep.join(map(str, Path(__file__).resolve().parents[:2]))
KILLED = """
import os, signal, sys, torch
sys.path[:0] = sys.argv[2].split(os.pathsep)
import regard, safetensors.torch
from regard.inspection import run
from support.models import build
from support.recorded import tokens

run.SAVE_EVERY = 0.0  # after every batch
model, batches = build("gemma3"), [tokens(64, 2, 15 + n, n) for n in range(5)]
how, count = sys.argv[3], 0
plain = safetensors.torch.save_file

def save_file(tensors, path, **options):
    global count
    plain(tensors, path, **options)
    count += 1
    if count == 3 and how == "writing":  # half a file
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

def wait(*_):
    if count == 3:
        print("in the fourth batch", flush=True)
        signal.pause()

safetensors.torch.save_file = save_file
model.model.layers[1].register_forward_hook(wait)
regard.inspect(model, batches, run=sys.argv[1])
"""


@pytest.mark.parametrize(("how", "batches"), [("reading", 3), ("writing", 2)])
def test_a_run_that_is_killed_resumes(tmp_path, how, batches):
    """SIGKILL: no cleanup runs. The last file is complete, and the run continues to the same numbers."""
    run = tmp_path / "run.safetensors"
    command = [sys.executable, "-c", KILLED, str(run), TESTS, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if how == "reading":
            assert process.stdout is not None and process.stdout.readline() == "in the fourth batch\n"
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert Inspection.load(run).batches == batches
    model, inputs = build("gemma3"), [tokens(64, 2, 15 + n, n) for n in range(5)]
    assert numbers(regard.inspect(model, inputs, run=run)) == numbers(regard.inspect(model, inputs))


def test_progress_goes_to_the_error_stream(capsys):
    regard.inspect(build("llama"), tokens(64, 4, 8), batch_size=1, progress=True)
    captured = capsys.readouterr()
    assert "inspecting" in captured.err and captured.out == ""
