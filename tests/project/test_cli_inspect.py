"""The command `regard inspect`: models, problems, files, and what it prints when one of them fails."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import terminal
from support.command import FULL, command


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


SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
KINDS = {  # class, configuration, and what the command shows
    "bert": ("BertModel", {}, "3 layers, 12 heads"),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 16}, "3 layers, 12 heads"),
    "roberta": ("RobertaModel", {"pad_token_id": 1}, "sequences of at most 48 (the model's limit)"),  # 50 - 2
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}, "6 layers"),
    "vit": ("ViTModel", {"image_size": 16, "patch_size": 8}, "expected one that reads tokens, got ViTModel"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_other_kinds_of_models(run, checkpoint, tmp_path, kind):
    import transformers

    name, changes, message = KINDS[kind]
    shape = {"vocab_size": 64} if kind == "t5" else SHAPE | {"max_position_embeddings": 50}
    torch.manual_seed(0)
    model = getattr(transformers, name)
    model(model.config_class(**shape | changes)).save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path), "--tokens", checkpoint[1], width=400)
    assert result.exit_code == (2 if kind == "vit" else 0), result.output
    assert message in result.output and "Traceback" not in result.output


def test_inspect_names_the_remedy_of_an_alarm(run, checkpoint, tmp_path):
    """Once per rule, in the terminal of the inspection and of its record; not for notes."""
    folder, tokens = checkpoint
    numbers = tmp_path / "numbers.json"
    arguments = ("inspect", folder, "--tokens", tokens, "--json", str(numbers))
    plain = run(*arguments, width=400)
    assert "Nothing alarming" in plain.output and "what to do" not in plain.output
    alarming = run(*arguments, "--threshold", "max_score=0.001", width=400)
    assert alarming.exit_code == 0 and "alarms (logit-alarm" in alarming.output, alarming.output
    assert alarming.output.count("what to do about logit-alarm: QK-clip (regard.nn.qk_clip_: rescale the query") == 1
    assert alarming.output.count("what to do about") == 1
    assert "what to do about logit-alarm: QK-clip" in run("report", str(numbers), width=400).output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inspect_a_model_that_diverged(run, checkpoint, tmp_path, value):
    """Weights that are not finite are an alarm, and the report can be written."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint[0])
    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.q_proj.weight")[3, 5] = value  # of head 0
    model.save_pretrained(tmp_path)
    page = tmp_path / "page.html"
    arguments = ("inspect", str(tmp_path), "--tokens", checkpoint[1], "--out", str(page), "--fail-on", "alarm")
    result = run(*arguments, width=400)
    assert result.exit_code == 1 and "1 alarm (not-finite in layer 1, head 0: 1 against 0)" in result.output
    assert "what to do about not-finite: Look at the first layer with this finding" in result.output
    assert "the output of 150 of 150 rows is NaN or infinite" in page.read_text()


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
        ((folder, "--tokens", tokens, "--out", str(tmp_path)), "--out: expected a file, got the folder"),
        ((folder, "--tokens", str(high)), "expected 0 to 63"),
        ((folder, "--tokens", tokens, "--compare", "nosuch.json"), "--compare: expected a text file that can be read"),
        ((folder, "--tokens", tokens, "--compare", "/no/such/model"), "--compare: nothing is at '/no/such/model'"),
        ((folder,), "no tokenizer"),
        ((folder, "--tokens", str(words)), f"--tokens: expected integers of at most 18 digits, got 'three' in {words}"),
        ((folder, "--tokens", "30k"), "use --max-tokens 30000 (in all) or --length 30000 (in one sequence)"),
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


def test_an_output_never_replaces_what_is_read(run, checkpoint, tmp_path):
    folder, tokens = checkpoint
    ids, link, numbers = tmp_path / "ids.txt", tmp_path / "link", tmp_path / "numbers.json"
    shutil.copy(tokens, ids)
    link.symlink_to(ids)
    assert run("inspect", folder, "--tokens", str(ids), "--json", str(numbers)).exit_code == 0
    for arguments, message in (
        (("inspect", folder, "--tokens", str(ids), "--out", str(ids)), "another file than that of --tokens"),
        (("inspect", folder, "--text", str(ids), "--json", str(link)), "another file than that of --text"),
        (("inspect", folder, "--tokens", str(ids), "--compare", str(numbers), "--out", str(numbers)), "of --compare"),
        (("inspect", str(ids), "--out", str(ids)), "another file than that of model"),
        (("report", str(numbers), "--out", str(numbers)), "--out: expected another file than that of RUN"),
    ):
        before = ids.read_bytes(), numbers.read_bytes()
        result = run(*arguments, width=400)
        assert result.exit_code == 2 and message in result.output, (arguments, result.output)
        assert (ids.read_bytes(), numbers.read_bytes()) == before


def test_a_pipe_receives_the_numbers(checkpoint, tmp_path):
    """As in `--json >(jq .)`: the check of the outputs must not end what the pipe's reader reads."""
    folder, tokens = checkpoint
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "regard", "inspect", folder, "--tokens", tokens, "--json", str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        received = subprocess.run(["cat", str(pipe)], capture_output=True, text=True, check=True, timeout=120).stdout
        if not received:
            process.kill()
    assert json.loads(received)["format"] == "regard-inspection" and process.returncode == 0


def test_the_name_of_a_model_stays_whole(run, checkpoint, tmp_path):
    folder, tokens = checkpoint
    deep = tmp_path / ("a-long-name-" * 8)
    shutil.copytree(folder, deep)
    lines = run("inspect", str(deep), "--tokens", tokens, width=80).output.splitlines()
    place = lines.index(str(deep))
    assert lines[place + 1].startswith("2 layers, ")


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


def test_inspect_with_a_problem(run, checkpoint, tmp_path):
    folder, tokens = checkpoint
    numbers, state = tmp_path / "numbers.json", tmp_path / "run.safetensors"
    arguments = ("inspect", folder, "--tokens", tokens, "--length", "100", "--json", str(numbers))
    plain = run(*arguments)
    assert plain.exit_code == 0, plain.output
    softmax = json.loads(numbers.read_text())
    problem = regard.Transport(regard.Tsallis(1.5), prior=regard.Window(15), temperature=0.5)
    records = []
    for text in (repr(problem), problem.to_json()):
        done = run(*arguments, "--problem", text)
        assert done.exit_code == 0, done.output
        records.append(json.loads(numbers.read_text()))
    assert records[0]["heads"] == records[1]["heads"]
    assert max(head["max"]["support"] for head in records[0]["heads"]) <= 16
    assert max(head["max"]["support"] for head in softmax["heads"]) == 100
    about = records[0]["provenance"]
    assert about["problems"] == {"regard-declared": repr(problem)}
    (declared,) = about["declared"].values()
    assert regard.Transport.from_json(declared) == problem
    # --compare is the model as it is: here the same one with softmax
    both = run(*arguments, "--problem", repr(problem), "--compare", folder)
    assert both.exit_code == 0 and "against" in both.output and "largest difference" in both.output
    # a run file belongs to one problem
    assert run(*arguments, "--problem", repr(problem), "--run", str(state)).exit_code == 0
    (kept,) = regard.Inspection.load(state).about["declared"].values()
    assert regard.Transport.from_json(kept) == problem
    assert run(*arguments, "--problem", repr(problem), "--run", str(state)).exit_code == 0
    other = run(*arguments, "--problem", "Transport(Tsallis(2.0))", "--run", str(state), width=400)
    assert other.exit_code == 2 and "was begun with other problems" in other.output
    slopes = [f"Transport(prior=ALiBi([{n}, 1.0, 1.0, 1.0]))" for n in (0.5, 0.25)]  # the same repr, other numbers
    state.unlink()
    assert run(*arguments, "--problem", slopes[0], "--run", str(state)).exit_code == 0
    other = run(*arguments, "--problem", slopes[1], "--run", str(state), width=400)
    assert other.exit_code == 2 and "was begun with other declared" in other.output


def test_inspect_explains_invalid_problems(run, checkpoint):
    folder, tokens = checkpoint
    for text, message in (
        ("Transport(Tsalis(1.5))", "--problem: problem: expected a call of"),
        ("{", "--problem: text: expected JSON"),
        ("Transport(__import__('os').system('true'))", "--problem: problem: expected a call of"),
        ("Transport(prior=Bias([1]))", ""),  # whole numbers become floats: this one is valid
        ("Transport(prior=Documents([0.5]))", "--problem: Documents(query_ids): expected an integer tensor"),
        ("Transport(prior=ALiBi([1.0, 2.0]))", "ALiBi(slopes): expected a number or shape [H=4], got [2]"),
        ("Transport(marginal=RowsAndColumns())", "RowsAndColumns"),  # a causal model
    ):
        result = run("inspect", folder, "--tokens", tokens, "--problem", text, width=400)
        assert result.exit_code == (2 if message else 0), (text, result.output)
        assert message in result.output and "Traceback" not in result.output, result.output


def test_inspect_checks_its_files_before_it_loads_the_model(run, checkpoint, tmp_path, monkeypatch):
    """One line that names the option, status 2, and no file is left behind."""
    folder, tokens = checkpoint

    def load(*_, **__):
        pytest.fail("the model was loaded")

    monkeypatch.setattr("regard.hf.loading.load", load)
    given = {
        "empty": b"",
        "blank": b" \n\t\n",
        "binary": b"text \xff\xfe",
        "one": b"7",
        "huge": b"1 99999999999999999999",
    }
    files = {name: tmp_path / name for name in given}
    for name, content in given.items():
        files[name].write_bytes(content)
    before = sorted(tmp_path.iterdir())
    page = str(tmp_path / "page.html")
    for arguments, message in (
        (("--text", str(tmp_path / "none")), "--text: expected a text file that can be read, got"),
        (("--text", str(tmp_path)), "Is a directory"),
        (("--text", str(files["empty"])), f"--text: expected some text, got {files['empty']}, which is empty"),
        (("--text", str(files["blank"])), "which is blank"),
        (("--text", str(files["binary"])), "byte 5 is not UTF-8"),
        (("--tokens", str(tmp_path / "none")), "--tokens: expected a text file that can be read"),
        (("--tokens", str(files["empty"])), f"expected at least 2 token ids, got {files['empty']} with 0"),
        (("--tokens", str(files["one"])), "with 1"),
        (("--tokens", str(files["huge"])), "--tokens: expected integers"),
        (("--tokens", tokens, "--out", str(tmp_path / "no" / "page.html")), "--out: expected a path in a folder"),
        (
            ("--tokens", tokens, "--json", "/proc/numbers.json"),
            "--json: expected a file that can be written, got /proc",
        ),
        (
            ("--tokens", tokens, "--out", "/dev/full"),
            "--out: expected a file that can be written, got /dev/full: No space left on device",
        ),
        (("--tokens", tokens, "--run", "/proc/run"), "--run: expected a file that can be written, got /proc/run"),
        (
            ("--tokens", tokens, "--run", str(files["one"])),
            f"--run: expected a run file that Inspection.save wrote, got '{files['one']}', which is another file",
        ),
        (("--tokens", tokens, "--out", page, "--json", page), "--json: expected another file than that of --out"),
    ):
        result = run("inspect", folder, *arguments, width=400)
        assert result.exit_code == 2, (arguments, result.output)
        (line,) = result.output.splitlines()
        assert line.startswith("error: ") and message in line, line
    assert sorted(tmp_path.iterdir()) == before and [path.read_bytes() for path in before] == [
        given[path.name] for path in before
    ]


def _full_disk(monkeypatch, room: int) -> None:
    """Every file that is written from now on ends with ENOSPC after this many bytes."""
    plain = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            self.file.write(content[:room])
            if len(content) > room:
                raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path, mode="r", *args, **kwargs):
        file = plain(path, mode, *args, **kwargs)
        return Full(file) if "w" in mode else file

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("option", ["--out", "--json", "--run"])
def test_inspect_on_a_full_disk(run, checkpoint, tmp_path, monkeypatch, option):
    """Before the model is loaded if nothing fits, later if not everything does. What was there stays."""
    folder, tokens = checkpoint
    file = tmp_path / "file"
    arguments = ("inspect", folder, "--tokens", tokens, "--max-tokens", "20", option, str(file))
    assert run(*arguments).exit_code == 0
    whole = file.read_bytes()
    for room, stage in ((100, "checked"), (3000, "written")):
        with monkeypatch.context() as patch:
            _full_disk(patch, room)
            if stage == "checked":
                patch.setattr("regard.hf.loading.load", lambda *_, **__: pytest.fail("the model was loaded"))
            else:
                patch.setattr("regard.cli.terminal.check_writable", lambda path: None)
            if option == "--run":
                arguments = (*arguments[:4], "--max-tokens", "20", option, str(tmp_path / "new"))
            result = run(*arguments, width=400)
        assert result.exit_code == 2, (stage, result.output)
        assert "Traceback" not in result.output
        assert (
            f"error: {option}: expected a file that can be written, got {arguments[-1]}: No space left on device"
            in (result.output.splitlines()[-1])
        )
        assert [path.name for path in tmp_path.iterdir()] == ["file"] and file.read_bytes() == whole


def test_a_report_that_fails_does_not_cost_the_others(run, checkpoint, tmp_path, monkeypatch):
    folder, tokens = checkpoint
    plain, page, numbers = terminal.write, tmp_path / "page.html", tmp_path / "numbers.json"

    def write(path, text):
        if path == numbers:
            raise OSError(errno.EIO, "Input/output error", str(path))
        plain(path, text)

    monkeypatch.setattr(terminal, "write", write)
    result = run("inspect", folder, "--tokens", tokens, "--out", str(page), "--json", str(numbers), width=400)
    assert result.exit_code == 2 and page.exists() and not numbers.exists()
    assert "--json: expected a file that can be written" in result.output and "report: " in result.output


def test_the_lab_on_a_full_disk(run, tmp_path, monkeypatch):
    _full_disk(monkeypatch, 10)
    result = run("lab", "run", "masking", "--quick", "--out", str(tmp_path), width=400)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert result.output.startswith(f"error: --out: expected a folder that can be written, got {tmp_path}")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_inspect_fails_at_once_without_a_network(run, monkeypatch):
    from regard.hf import hub

    monkeypatch.setattr(hub, "_answers", lambda endpoint: False)
    began = time.monotonic()
    result = run("inspect", "nobody/no-such-model", width=400)
    assert time.monotonic() - began < 5 and result.exit_code == 2
    (line,) = result.output.splitlines()
    assert "model: 'nobody/no-such-model' is neither a folder nor in the cache" in line and "cannot be reached" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_inspect_keeps_its_files_if_it_cannot_print(checkpoint, tmp_path):
    folder, tokens = checkpoint
    files = {option: tmp_path / option.strip("-") for option in ("--out", "--json", "--run")}
    options = [str(part) for item in files.items() for part in item]
    arguments = ("inspect", folder, "--tokens", tokens, *options)

    def written():
        found = {option: path.stat().st_size for option, path in files.items()}
        json.loads(files["--json"].read_text())
        assert regard.Inspection.load(files["--run"]).partial is None and "</html>" in files["--out"].read_text()
        for path in files.values():
            path.unlink()
        return found

    with open("/dev/full", "w") as full:
        done = command(*arguments, stdout=full)
        assert done.returncode == 2 and done.stderr.splitlines()[-1] == FULL and "Traceback" not in done.stderr
        assert min(written().values()) > 1000
        assert command(*arguments, stdout=full, stderr=full).returncode == 2
        assert min(written().values()) > 1000
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does when it has read enough
    done = command(*arguments, stdout=writer)
    os.close(writer)
    assert done.returncode == 1 and "error" not in done.stderr and "Traceback" not in done.stderr
    assert min(written().values()) > 1000


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (True, "interrupted: the state is in {}, and the same command continues from it"),
        (False, "interrupted: nothing was recorded yet"),
        (None, "interrupted: nothing was saved; with --run FILE the same command would continue"),
    ],
)
def test_ctrl_c_says_how_to_continue(run, checkpoint, tmp_path, monkeypatch, saved, expected):
    folder, tokens = checkpoint
    file = tmp_path / "run"

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    if saved:
        assert run("inspect", folder, "--tokens", tokens, "--max-tokens", "20", "--run", str(file)).exit_code == 0
    monkeypatch.setattr("regard.inspection.command.inspect", interrupted)
    options = () if saved is None else ("--run", str(file))
    result = run("inspect", folder, "--tokens", tokens, *options, width=400)
    assert result.exit_code == 130 and result.output.splitlines()[-1] == expected.format(file)


def test_a_file_without_permission_is_one_line(run, checkpoint, tmp_path, monkeypatch):
    """Root may read everything, so the two functions that would fail are replaced."""
    file = tmp_path / "closed.json"
    file.write_text("{}")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)

    def denied(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", denied)
    monkeypatch.setattr(Path, "open", denied)
    for arguments in (
        ("inspect", checkpoint[0], "--text", str(file)),
        ("inspect", checkpoint[0], "--tokens", str(file)),
        ("report", str(file)),
    ):
        result = run(*arguments, width=400)
        (line,) = result.output.splitlines()
        assert result.exit_code == 2 and line.startswith("error: ") and "Permission denied" in line, line
