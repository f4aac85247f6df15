"""The command `regard`: what it prints, for people and for machines, and how it ends."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import cli, doctor
from regard.backends import native
from regard.operator import BACKENDS


@pytest.fixture
def run(monkeypatch):
    def run(*arguments: str, width: int = 80):
        monkeypatch.setenv("COLUMNS", str(width))
        return CliRunner().invoke(cli.app, arguments)

    return run


@pytest.fixture
def without_engine(monkeypatch):
    monkeypatch.setattr(native, "_loaded", (None, "the native engine was not built (no C++ compiler at installation?)"))


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


def test_doctor_for_machines(run):
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


def test_one_openmp_runtime_here():
    pytest.importorskip("regard._native", reason="the native engine was not built")
    # A process of its own: other tests may have loaded who knows what.
    code = "import torch, regard.doctor as d; d.engine(); print(*d.openmp_runtimes() or ['unknown'], sep='\\n')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(found.stdout.split("\n")) == 2, found.stdout


def test_two_openmp_runtimes_are_told(run, monkeypatch):
    monkeypatch.setattr(doctor, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libgomp.so.1"])
    result = run("doctor")
    assert result.exit_code == 0  # slow is not broken
    assert "2 OpenMP runtimes in one process" in result.output and "/b/libgomp.so.1" in result.output


def test_without_the_engine(run, without_engine):
    result = run("doctor")
    assert result.exit_code == 0 and "was not built" in result.output and "slower backends" in result.output
    facts = json.loads(run("doctor", "--json").output)
    assert facts["engine"]["loaded"] is False
    assert {row["auto"] for row in facts["problems_served"]} == {"sdpa", "torch"}


def test_an_engine_that_does_not_load_is_broken(run, monkeypatch):
    monkeypatch.setattr(native, "_loaded", (None, "the native engine does not load: undefined symbol"))
    result = run("doctor")
    assert result.exit_code == 1 and "broken: the native engine does not load" in result.output


@pytest.mark.parametrize("how", ["wrong", "NaN", "raises"])
def test_a_backend_that_computes_rubbish_is_broken(run, monkeypatch, how):
    plain = doctor.attention

    def rubbish(*args, backend, **kwargs):
        out = plain(*args, backend=backend, **kwargs)
        if backend != "sdpa":
            return out
        if how == "raises":
            raise RuntimeError("illegal [instruction]")
        return out * (1.001 if how == "wrong" else float("nan"))

    monkeypatch.setattr(doctor, "attention", rubbish)
    result = run("doctor")
    assert result.exit_code == 1 and 'backend "sdpa" fails the self-test' in " ".join(result.output.split())
    facts = json.loads(run("doctor", "--json").output)
    assert [t["backend"] for t in facts["self_test"] if not t["passed"]] == ["sdpa"]


def test_every_backend_is_tested():
    assert {t["backend"] for t in doctor.examine()["self_test"]} | {"native"} == set(BACKENDS)
