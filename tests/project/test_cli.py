"""The command `regard`: its output as text and as JSON, and its exit status."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import regard
from regard import cli, doctor
from regard.backends import BACKENDS
from regard.backends.native import engine
from regard.cli import terminal
from support.command import FULL, command


@pytest.fixture
def without_engine(monkeypatch):
    monkeypatch.setattr(engine, "_loaded", (None, "the native engine was not built (no C++ compiler at installation?)"))


def test_the_command_is_installed():
    found = subprocess.run(
        [sys.executable, "-m", "regard.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == regard.__version__
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="regard")
    assert script.load() is cli.app


@pytest.mark.parametrize("width", [80, 120])
def test_doctor_fits_the_terminal(run, width):
    result = run("doctor", width=width)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= width
    for word in (regard.__version__, torch.__version__, "processor", "OMP_NUM_THREADS", "temperature 0", "passed"):
        assert word in result.output


def test_doctor_as_json(run):
    result = run("doctor", "--json")
    facts = json.loads(result.output)
    assert result.exit_code == 0 and facts["problems"] == []
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["threads"]["torch"] == torch.get_num_threads()
    assert {test["backend"] for test in facts["self_test"]} >= {"sdpa", "torch"}
    assert all(test["passed"] for test in facts["self_test"])
    served = {row["problem"]: row for row in facts["problems_served"]}
    assert (
        served["temperature 0"]["auto"] == "torch" and "no temperature 0" in served["temperature 0"]["refusals"]["sdpa"]
    )
    for row in served.values():
        assert row["auto"] not in row["refusals"]


def test_one_openmp_runtime_is_loaded():
    pytest.importorskip("regard._native", reason="the native engine was not built")
    # In a new process, because other tests may have loaded other libraries.
    code = "import torch, regard.doctor as d; d.engine(); print(*d.openmp_runtimes() or ['unknown'], sep='\\n')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(found.stdout.split("\n")) == 2, found.stdout


def test_two_openmp_runtimes_are_reported(run, monkeypatch):
    monkeypatch.setattr(doctor, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libgomp.so.1"])
    result = run("doctor")
    assert result.exit_code == 0  # slow, but not broken
    assert "2 OpenMP runtimes in one process" in result.output and "/b/libgomp.so.1" in result.output


def test_doctor_without_the_engine(run, without_engine):
    result = run("doctor")
    shown = " ".join(result.output.split())
    assert result.exit_code == 0 and "was not built" in shown and "all problems run on the slower backends" in shown
    assert "Install a C++17 compiler, then regard again: pip install -v --force-reinstall --no-deps ." in shown
    facts = json.loads(run("doctor", "--json").output)
    assert facts["engine"]["loaded"] is False
    assert {row["auto"] for row in facts["problems_served"]} == {"sdpa", "torch"}


def test_an_engine_that_does_not_load_is_reported_as_broken(run, monkeypatch):
    monkeypatch.setattr(engine, "_loaded", (None, "the native engine does not load: undefined symbol"))
    result = run("doctor")
    assert result.exit_code == 1 and "broken: the native engine does not load" in result.output


@pytest.mark.parametrize("how", ["wrong", "NaN", "raises"])
def test_a_backend_with_wrong_results_is_reported_as_broken(run, monkeypatch, how):
    plain = doctor.attention

    def wrong(*args, backend, **kwargs):
        out = plain(*args, backend=backend, **kwargs)
        if backend != "sdpa":
            return out
        if how == "raises":
            raise RuntimeError("illegal [instruction]")
        return out * (1.001 if how == "wrong" else float("nan"))

    monkeypatch.setattr(doctor, "attention", wrong)
    result = run("doctor")
    assert result.exit_code == 1 and 'backend "sdpa" fails the self-test' in " ".join(result.output.split())
    facts = json.loads(run("doctor", "--json").output)
    assert [t["backend"] for t in facts["self_test"] if not t["passed"]] == ["sdpa"]


def test_every_backend_of_the_cpu_is_tested():
    assert {t["backend"] for t in doctor.examine()["self_test"]} | {"native", "triton"} == set(BACKENDS)


def test_an_invalid_instruction_set_is_one_line(tmp_path):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    environment = {**os.environ, "REGARD_ISA": "abacus"}
    for arguments in (["doctor"], ["doctor", "--json"], ["lab", "run", "masking", "--quick", "--out", str(tmp_path)]):
        found = subprocess.run(
            [sys.executable, "-m", "regard", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert found.returncode == 2 and found.stdout == ""
        (line,) = found.stderr.splitlines()
        assert line.startswith("error: REGARD_ISA: expected an instruction set of this machine (")
        assert "baseline" in line and line.endswith(", got abacus")


def test_help_lists_every_command(run):
    for arguments, names in (
        ((), ("doctor", "inspect", "report", "lab")),
        (("lab",), ("claims", "teasers", "list", "run")),
    ):
        shown = run(*arguments, "--help")
        assert shown.exit_code == 0 and all(name in shown.output for name in names)
        assert max(map(len, shown.output.splitlines())) <= 80


# --- what is printed cannot be written --------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--json"), ("--help",), ("--version",), ("lab", "list")])
def test_a_full_standard_output(arguments):
    with open("/dev/full", "w") as full:
        done = command(*arguments, stdout=full)
    assert done.returncode == 2 and done.stderr.splitlines() == [FULL]


def test_a_closed_standard_output():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m regard --version >&-"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == ""


def test_a_warning_is_one_line(capfd):
    usual = warnings.formatwarning
    with terminal.plain_warnings():
        print(warnings.formatwarning(UserWarning("it is slow"), UserWarning, "file.py", 3), end="")
    assert capfd.readouterr().out == "warning: it is slow\n" and warnings.formatwarning is usual


def test_errors_of_a_command_and_its_status_stay(monkeypatch):
    with pytest.raises(ZeroDivisionError), terminal.guarded_streams():
        _ = 1 / 0
    with pytest.raises(SystemExit, match="3"), terminal.guarded_streams():
        sys.exit(3)
