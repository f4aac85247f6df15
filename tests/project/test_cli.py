"""The command `regard`: its output as text and as JSON, and its exit status."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import cli, doctor
from regard.backends import BACKENDS
from regard.backends.native import engine


@pytest.fixture
def run(monkeypatch):
    def run(*arguments: str, width: int = 80):
        monkeypatch.setenv("COLUMNS", str(width))
        return CliRunner().invoke(cli.app, arguments)

    return run


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
    assert result.exit_code == 0 and "was not built" in result.output and "slower backends" in result.output
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


def test_every_backend_is_tested():
    assert {t["backend"] for t in doctor.examine()["self_test"]} | {"native"} == set(BACKENDS)


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


# --- regard inspect ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small untrained model in a folder, without a tokenizer, and tokens for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(folder)
    tokens = folder / "tokens.txt"
    tokens.write_text(" ".join(str(i) for i in torch.randint(64, (150,)).tolist()))
    return str(folder), str(tokens)


def test_inspect_a_folder(run, checkpoint, tmp_path):
    folder, tokens = checkpoint
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    arguments = ("inspect", folder, "--tokens", tokens, "--length", "100")
    result = run(*arguments, "--out", str(page), "--json", str(numbers))
    assert result.exit_code == 0, result.output
    assert "2 layers, 8 heads" in result.output and "diffuse" in result.output
    record = json.loads(numbers.read_text())
    assert record["provenance"]["tokens"] == 150 and record["provenance"]["longest"] == 100
    assert folder in page.read_text()
    # the heads of an untrained model are diffuse, which is a note
    for name, status in (("diffuse", 1), ("note", 1), ("warning", 0), ("alarm", 0)):
        assert run(*arguments, "--fail-on", name).exit_code == status, name
    assert run(*arguments, "--fail-on", "diffuse", "--threshold", "diffuse=1.5").exit_code == 0
    assert run(*arguments, "--fail-on", "alarm", "--threshold", "max_score=0.001").exit_code == 1
    both = run(*arguments, "--compare", str(numbers), "--out", str(page))
    assert both.exit_code == 0 and page.read_text().count('"regard-inspection"') == 2
    assert "against" in both.output and "largest difference +0" in both.output
    # the same model on another text is named by the text
    other = tmp_path / "other.txt"
    other.write_text("7 8 9 " * 30)
    both = run("inspect", folder, "--tokens", str(other), "--compare", str(numbers))
    assert f"against “{record['provenance']['begins_with'][:10]}" in both.output, both.output
    # a run that is continued gives the same numbers
    state = str(tmp_path / "run.safetensors")
    for _ in range(2):
        assert run(*arguments, "--run", state, "--json", str(tmp_path / "again.json")).exit_code == 0
    assert json.loads((tmp_path / "again.json").read_text())["heads"] == record["heads"]
    # its run file has no name of a text
    shown = run("report", state, "--out", str(page))
    assert shown.exit_code == 0 and "150 tokens of text" in shown.output, shown.output


def test_inspect_explains_invalid_requests(run, checkpoint, tmp_path):
    folder, tokens = checkpoint
    words = tmp_path / "words.txt"
    words.write_text("three words here")
    high = tmp_path / "high.txt"
    high.write_text("1 2 64")
    for arguments, message in (
        (("nowhere/at-all.gguf", "--tokens", tokens), "at-all.gguf"),
        ((str(words),), "words.txt"),
        (("[/x]",), "[/x]"),
        (("~nosuchuser/x",), "nosuchuser"),
        (("x" * 5000,), "cannot be"),
        ((folder, "--tokens", tokens, "--out", str(tmp_path)), "a folder"),
        ((folder, "--tokens", str(high)), "expected 0 to 63"),
        ((folder, "--tokens", tokens, "--compare", "nosuch.json"), "nosuch.json"),
        ((folder,), "no tokenizer"),
        ((folder, "--tokens", str(words)), "expected integers"),
        ((folder, "--tokens", str(tmp_path / "none")), "cannot be read"),
        ((folder, "--tokens", "30000"), "use --max-tokens 30000 (in all) or --length 30000 (in one sequence)"),
        (
            (folder, "--text", "30,000"),
            "--text: expected a file, got 30,000. To read this many",
        ),
        ((folder, "--tokens", tokens, "--text", str(words)), "expected one of them"),
        ((folder, "--tokens", tokens, "--fail-on", "boredom"), "--fail-on"),
        ((folder, "--tokens", tokens, "--threshold", "boredom=1"), "boredom=1"),
        ((folder, "--tokens", tokens, "--threshold", "diffuse=high"), "expected NAME=NUMBER"),
        ((folder, "--tokens", tokens, "--threshold", "diffuse=nan"), "diffuse: expected a number"),
        ((folder, "--tokens", tokens, "--compare", tokens.replace("tokens.txt", "config.json")), "is not what"),
        ((folder, "--tokens", tokens, "--out", str(tmp_path / "no" / "page.html")), "no folder"),
    ):
        result = run("inspect", *arguments, width=400)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.output and "Traceback" not in result.output, result.output


def test_inspect_names_the_option_that_helps(run, checkpoint, tmp_path):
    """What limits the number of tokens, and the option that changes it, if there is one."""
    folder, tokens = checkpoint
    small = tmp_path / "small"
    shutil.copytree(folder, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    for arguments, message in (
        ((folder, "--length", "100"), "reading 150 tokens in 2 sequences of at most 100 (--length sets it)\n"),
        ((str(small), "--length", "100"), "reading 150 tokens in 3 sequences of at most 60 (the model's limit)\n"),
        ((str(small), "--length", "50"), "reading 150 tokens in 3 sequences of at most 50 (--length sets it)\n"),
        ((folder,), "reading 150 tokens\n"),
        ((folder, "--max-tokens", "30"), "reading 30 tokens\n"),
        ((folder, "--max-tokens", "200"), "reading 150 tokens\n--max-tokens 200: tokens.txt has no more\n"),
    ):
        result = run("inspect", *arguments, "--tokens", tokens, width=400)
        assert result.exit_code == 0 and message in result.output, result.output
        assert ("--max-tokens" in message) == ("has no more" in result.output)
