"""Run files: an inspection that is interrupted or killed continues to the same numbers; the progress bar."""

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file

import regard
from regard import Inspection
from regard.inspection.command import Refused, read_any
from regard.inspection.recorder import Recorder
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


def test_an_interrupted_batch_is_not_recorded_twice(tmp_path, monkeypatch):
    """The calls that the run file has are computed again in the same way, and are not measured again."""
    model, batches = build("gemma3"), [tokens(64, 1, 60 + n, n) for n in range(3)]
    options = {"patterns": True, "views": True}
    expected, run = regard.inspect(model, batches, **options), tmp_path / "run.safetensors"
    measured = []
    plain = Recorder._record
    monkeypatch.setattr(
        Recorder, "_record", lambda self, call, *rest: (measured.append(call.name), plain(self, call, *rest))
    )

    def interrupted(*_):
        if len(measured) in stops:
            stops.discard(len(measured))
            raise KeyboardInterrupt

    stops = {1, 3, 6}  # in the first batch, in the second, and after the last call of the third
    hook = model.model.layers[0].register_forward_hook(interrupted), model.model.norm.register_forward_hook(interrupted)
    found = []
    while stops:
        with pytest.raises(KeyboardInterrupt):
            regard.inspect(model, batches, run=run, **options)
        kept = Inspection.load(run)
        found.append((kept.batches, kept.partial.calls))
    assert found == [(0, 1), (1, 1), (2, 2)]
    for one in hook:
        one.remove()
    resumed = regard.inspect(model, batches, run=run, **options)
    assert numbers(resumed) == numbers(expected) == numbers(Inspection.load(run))
    assert len(measured) == 6 and resumed.partial is None
    assert resumed.views["window"] and resumed.about["tokens"] == 60 + 61 + 62


def test_a_batch_under_way_is_continued_with_the_same_inputs(tmp_path):
    model, batches, run = build("gemma3"), [tokens(64, 1, 20, n) for n in range(2)], tmp_path / "run.safetensors"
    hook = model.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        regard.inspect(model, batches, run=run)
    hook.remove()
    with pytest.raises(Refused, match="expected a run with a finished sequence, got one that ended before"):
        read_any(run)
    assert repr(Inspection.load(run)).endswith("statistics=14, under way: 1 layer of a batch)")
    before = run.read_bytes()
    for changed, message in (
        ({"inputs": batches[1:]}, "run: expected the inputs that .* was begun with"),
        ({"views": True}, "views: expected False"),
        ({"statistics": ["entropy"]}, "statistics"),
    ):
        with pytest.raises(ValueError, match=message):
            regard.inspect(**{"model": model, "inputs": batches, "run": run} | changed)
    assert run.read_bytes() == before
    assert numbers(regard.inspect(model, batches, run=run)) == numbers(regard.inspect(model, batches))


TESTS = str(Path(__file__).resolve().parents[1])
OPTIONS = {"patterns": True, "views": True}
KILLED = """
import os, signal, sys, torch
sys.path.insert(0, sys.argv[2])
import regard
from regard.inspection import run
from support.models import build
from support.recorded import tokens

run.SAVE_EVERY = 0.0  # after every call
model, batches = build("gemma3"), [tokens(64, 1, 55 + n, n) for n in range(4)]
how, last, count = sys.argv[3], int(sys.argv[4]), 0
plain = os.fsync

def fsync(file):
    global count
    plain(file)
    count += 1
    if count == last and how == "writing":  # half a file
        part = sys.argv[1] + ".part"
        os.truncate(part, os.path.getsize(part) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

def wait(*_):
    if count == last and how == "reading":
        print("between two layers", flush=True)
        signal.pause()

os.fsync = fsync
model.model.layers[1].register_forward_pre_hook(wait)
regard.inspect(model, batches, run=sys.argv[1], patterns=True, views=True)
"""


# Two layers: a write after each of them, and one after the batch.
@pytest.mark.parametrize(
    ("how", "last", "batches", "calls"),
    [("reading", 1, 0, 1), ("reading", 7, 2, 1), ("writing", 2, 0, 1), ("writing", 6, 1, 2), ("writing", 7, 2, None)],
)
def test_a_run_that_is_killed_resumes(tmp_path, how, last, batches, calls):
    """SIGKILL: no cleanup runs. The last file is complete, and the run continues to the same numbers."""
    run = tmp_path / "run.safetensors"
    command = [sys.executable, "-c", KILLED, str(run), TESTS, how, str(last)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if how == "reading":
            assert process.stdout is not None and process.stdout.readline() == "between two layers\n"
            process.kill()
    assert process.returncode == -signal.SIGKILL
    kept = Inspection.load(run)
    assert (kept.batches, kept.partial and kept.partial.calls) == (batches, calls)
    assert kept.rows == sum(55 + n for n in range(batches))  # the finished batches only
    model, inputs = build("gemma3"), [tokens(64, 1, 55 + n, n) for n in range(4)]
    expected = regard.inspect(model, inputs, **OPTIONS)
    assert numbers(regard.inspect(model, inputs, run=run, **OPTIONS)) == numbers(expected)


def test_damaged_run_files_are_reported(tmp_path):
    model, batch, run = build("llama"), tokens(64, 1, 20), tmp_path / "run.safetensors"
    regard.inspect(model, batch, run=run)
    good = run.read_bytes()
    at = good.index(b'\\"batches\\": 1')
    damaged = {
        "empty": b"",
        "truncated header": good[:200],
        "truncated tensors": good[:-50],
        "one bit of a sum": good[:-1] + bytes([good[-1] ^ 1]),
        "another number": good[: at + 13] + b"2" + good[at + 14 :],
        "another file": b"no such thing",
        "another safetensors file": (Path(save_other(tmp_path)).read_bytes()),
    }
    for what, content in damaged.items():
        run.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"path: expected a run file .* got '.*run.safetensors', .*damaged.* delete"
        ):
            regard.inspect(model, batch, run=run)
        assert run.read_bytes() == content, what  # the file is left as it was
    run.write_bytes(good)
    assert Inspection.load(run).batches == 1


def save_other(folder):
    path = folder / "other.safetensors"
    save_file({"x": torch.ones(3)}, path)
    return path


def test_versions_of_run_files(tmp_path, monkeypatch):
    """Version 1 had neither a batch under way nor a checksum."""
    model, batches, run = build("llama"), [tokens(64, 1, 20, n) for n in range(2)], tmp_path / "run.safetensors"
    regard.inspect(model, batches[:1], run=run)
    with safe_open(run, framework="pt") as file:
        header = json.loads(file.metadata()["regard.inspection"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    del header["partial"]
    metadata = {"regard.inspection": json.dumps(header)}
    save_file(tensors | {"version": torch.tensor([1])}, run, metadata=metadata)
    assert numbers(regard.inspect(model, batches, run=run)) == numbers(regard.inspect(model, batches))
    save_file(tensors | {"version": torch.tensor([3])}, run, metadata=metadata)
    with pytest.raises(ValueError, match="path: expected a run file of version 1 or 2, got version 3"):
        Inspection.load(run)


# --- the progress bar -------------------------------------------------------------------------------------------------


def test_progress_goes_to_the_error_stream(capsys):
    regard.inspect(build("llama"), tokens(64, 4, 8), batch_size=1, progress=True)
    captured = capsys.readouterr()
    assert "sequence 4 of 4" in captured.err and "100%" in captured.err and captured.out == ""


def test_progress_shows_the_first_words(monkeypatch):
    class Words:
        def decode(self, ids, **_):
            return "[bold]Once upon\na time" if ids[0] else "The cat sat on the mat and the dog lay on the rug"

    shown = []
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Progress, "update", lambda *_, description, **__: shown.append(description))
    regard.inspect(build("llama"), [[1, 2, 3], [0, 2, 3]], tokenizer=Words(), progress=True)
    assert shown[0] == "sequence 1 of 2, layer 1 of 2: “[bold]Once …”"
    assert shown[-1] == "sequence 2 of 2: “The cat sat …”"


def test_progress_names_the_layer_and_the_sequence(monkeypatch, tmp_path):
    shown = []
    plain = Progress.update

    def update(self, task, *, completed, description):
        shown.append((completed, description))
        plain(self, task, completed=completed, description=description)

    monkeypatch.setattr(Progress, "update", update)
    model, run = build("llama"), tmp_path / "run.safetensors"
    regard.inspect(model, [tokens(64, 1, 8), tokens(64, 3, 8)], progress=True)
    assert shown == [
        (0, "sequence 1 of 2, layer 1 of 2"),
        (1, "sequence 1 of 2, layer 2 of 2"),
        (2, "sequence 1 of 2"),
        (2, "batch 2 of 2, layer 1 of 2"),
        (3, "batch 2 of 2, layer 2 of 2"),
        (4, "batch 2 of 2"),
    ]
    hook = model.model.layers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        regard.inspect(model, tokens(64, 1, 8), run=run)
    hook.remove()
    shown.clear()
    regard.inspect(model, (row for row in tokens(64, 1, 8)), run=run, progress=True)  # of unknown number
    assert [text for _, text in shown] == ["sequence 1, layer 1 of 2 (again)", "sequence 1, layer 2 of 2", "sequence 1"]
