"""`regard report`: the training page shows the run file, loads nothing else and executes nothing of it."""

import json
import math
import re
from importlib import resources
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import cli
from regard.inspection.journal import SHOWN, read_run
from regard.inspection.report import training_html, training_verdict
from support.browser import ATTACK, colour_of, contrast, fills, luminance, part
from support.training import Reader, events, reader, samples, tokens, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training that collapses after 60 steps."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    torch.manual_seed(0)
    model = Reader(width=32, layers=3)
    monitor = regard.Monitor(model, every=5, path=path)
    train(model, monitor, 100, fast=0.2, at=60)
    monitor.close()
    return path


def long_run(path: Path, layers: int = 48, count: int = 450) -> Path:
    """A run file of a large model, as `Monitor` would write it."""
    kinds = {"entropy_norm": ("p10", "p50", "p90", "min"), "first_key_mass": ("p10", "p50", "p90", "max")}
    with path.open("w") as file:
        about = {"format": "regard-monitor", "version": 1, "model": "Large", "every": 50}
        file.write(json.dumps(about) + "\n")
        file.write(json.dumps({"layers": [[n, f"layers.{n}", 32] for n in range(layers)]}) + "\n")
        for n in range(count):
            line = {"step": 50 * n, "loss": 3 + 5 / (1 + n), "loss_min": 2.9, "loss_max": 9.0, "grad_norm": 1.0 + n % 3}
            for name, some in kinds.items():
                for layer in range(layers):
                    for k, kind in enumerate(some):
                        wave = 0.5 + 0.3 * math.sin(n / 200 + layer / 8)
                        line[f"attn/{name}/L{layer:02d}_{kind}"] = round(wave + 0.05 * k * (kind != "min"), 4)
            line |= {f"attn/max_score/L{layer:02d}": 5 + layer / 10 for layer in range(layers)}
            file.write(json.dumps(line | {"max_attention_logit": 9.7}) + "\n")
    return path


def hostile(run: Path, path: Path) -> Path:
    """A script in every text."""
    found = [json.loads(line) for line in run.read_text().splitlines()]
    for line in found:
        if "format" in line:
            line |= {"model": ATTACK, "checkpoint": ATTACK, ATTACK: ATTACK}
        if "layers" in line:
            line["layers"] = [[n, ATTACK, heads] for n, _, heads in line["layers"]]
        if "event" in line:
            line |= dict.fromkeys(("event", "message", "why", "remedy", "source"), ATTACK)
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    return path


# --- the record and the file ------------------------------------------------------------------------------------------


def test_the_record_is_what_was_measured(run):
    record = read_run(run)
    found = samples(run)
    assert record["steps"] == [line["step"] for line in found] == list(range(0, 100, 5))
    assert record["values"]["loss"] == [line["loss"] for line in found]
    for metric, kind, name in (
        ("entropy_norm", "p10", "attn/entropy_norm/L02_p10"),
        ("max_score", "all", "attn/max_score/L02"),
    ):
        assert record["metrics"][metric][kind][2] == [line[name] for line in found]
    assert [e["rule"] for e in record["events"]] == [e["event"] for e in events(run)]
    assert "collapse-dip" in training_verdict(record)


def test_a_long_run_is_thinned_except_at_its_events(tmp_path):
    path = long_run(tmp_path / "long.jsonl", layers=2, count=3 * SHOWN)
    event = {"step": 50 * 777, "event": "spike", "severity": "warning", "layer": None, "head": None, "metric": "loss"}
    event |= {"value": 1.0, "threshold": 1.0} | dict.fromkeys(("message", "why", "remedy", "source"), "x")
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
    record = read_run(path)
    assert record["samples"] == 3 * SHOWN and SHOWN / 2 < len(record["steps"]) <= SHOWN
    assert record["steps"][0] == 0 and record["steps"][-1] == 50 * (3 * SHOWN - 1) and 50 * 777 in record["steps"]
    assert record["steps"] == sorted(record["steps"])


def test_the_file_refers_to_nothing_and_contains_the_record(run, tmp_path):
    page = training_html(read_run(run))
    assert json.loads(part(page, r'id="data">(.*?)</script>')) == read_run(run)
    assert set(re.findall(r"https?://[\w./-]+", page)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert "{{" not in page and "default-src 'none'" in page
    script = resources.files("regard.inspection").joinpath("training.js").read_text("utf-8")
    script += resources.files("regard.inspection").joinpath("plots.js").read_text("utf-8")
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert unsafe not in script
    page = training_html(read_run(hostile(run, tmp_path / "hostile.jsonl")))
    assert "<img" not in page and page.count("<script") == page.count("</script") == 2


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def test_the_command_shows_and_writes(command, run, tmp_path):
    result = command(run, "--out", tmp_path / "training.html")
    assert result.exit_code == 0, result.output
    assert "3 layers, 12 heads, 20 samples" in result.output and "collapse-dip" in result.output
    text = " ".join(result.output.split())  # lines are wrapped
    rules = {event["rule"]: event["remedy"] for event in read_run(run)["events"]}
    assert rules and all(text.count(f"what to do about {rule}: {remedy}") == 1 for rule, remedy in rules.items())
    assert (tmp_path / "training.html").read_text() == training_html(read_run(run))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "attention.jsonl").write_bytes(run.read_bytes())
    assert command(folder).output == command(run).output


def test_a_layer_is_one_line_of_the_table(command, run, tmp_path, monkeypatch):
    """Also where scores grew by many orders of magnitude, at 80 columns."""
    lines = [json.loads(line) for line in run.read_text().splitlines()]
    first, *_, last = [line for line in lines if "attn/max_score/L00" in line]
    first["attn/max_score/L00"], last["attn/max_score/L00"] = 0.0533, 33300.0
    first["attn/entropy_norm/L00_p10"], last["attn/entropy_norm/L00_p10"] = 0.981, 5.66e-5
    file = tmp_path / "wide.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("COLUMNS", "80")
    [row] = [line for line in command(file).output.splitlines() if line.startswith("    0 ")]
    assert "0.981 → 5.66e-05" in row and "0.0533 → 3.33e+04" in row and row.count("→") == 4


HEAD = b'{"format": "regard-monitor", "version": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"", "got an empty one"),
        (b"hello\n", "expected a run file of regard.Monitor, got another file (line 1: not JSON)"),
        (b"\x93NUMPY\x00\x01", "expected a run file of regard.Monitor, got another file"),
        (b'{"format": "regard-monitor", "version": 1}\n', "at least one sampled step"),
        (b'{"format": "regard-monitor", "version": 9}\n', "version 1"),
        (b'{"format": "regard-monitor", "version": 1}\n{"step": 1, "loss": 2}\n', "metrics of layers"),
        (
            b'{"format": "regard-monitor", "version": 1}\n{"step": 1, "attn/entropy/L00_p10": "x"}\n',
            "expected a number",
        ),
        (HEAD + b'{"step": "x"}\n', "step is not an integer"),
        (HEAD + b'{"step": 1, "event": "x"}\n', "sampled step"),
        (HEAD + b'{"step": 1, "attn/entropy/L00_p10": NaN}\n', "NaN is not a JSON number"),
        (HEAD + b'{"layers": [[0, 1]]}\n', "got a damaged one (line 2: "),
        (HEAD + b'{"step": 1, "loss": [], "attn/entropy/L00_p10": 1}\n', "expected a number as loss of step 1"),
    ],
)
def test_what_is_not_a_run_file_is_an_error(command, tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = command(path)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert "Traceback" not in result.output and result.exception.__class__ is SystemExit


def test_a_folder_without_a_run_and_a_missing_output_folder(command, run, tmp_path):
    assert command(tmp_path).exit_code == 2
    result = command(run, "--out", tmp_path / "no" / "report.html")
    assert result.exit_code == 2 and "--out: expected a path in a folder that exists" in result.output
    assert command(run, "--out", tmp_path).exit_code == 2


def test_an_inspection_gets_its_own_report(command, tmp_path):
    from support.training import llama

    inspection = regard.inspect(llama(), tokens(1, 12))
    inspection.about |= {"text": "tokens"}
    inspection.save(tmp_path / "run.safetensors")
    (tmp_path / "numbers.json").write_text(inspection.to_json())
    for name in ("run.safetensors", "numbers.json"):
        result = command(tmp_path / name, "--out", tmp_path / "report.html")
        assert result.exit_code == 0, result.output
        assert "LlamaForCausalLM" in result.output
        assert "Attention report" in (tmp_path / "report.html").read_text()


def test_one_sample_is_enough(command, tmp_path):
    monitor = regard.Monitor(reader(), every=1, path=tmp_path / "run.jsonl")
    with monitor(7):
        monitor.model(tokens(1, 5))
    monitor.close()
    result = command(tmp_path / "run.jsonl", "--out", tmp_path / "t.html")
    assert result.exit_code == 0 and "Nothing alarming" in result.output


# --- the page in a browser --------------------------------------------------------------------------------------------


@pytest.fixture
def show(browser, tmp_path):
    """show(run file, ...) opens the page. Afterwards: there was no error and no request except for the file."""
    opened, requests, errors = [], [], []

    def show(path, width=1280, scheme="light"):
        file = tmp_path / f"training{len(opened)}.html"
        file.write_text(training_html(read_run(path)), "utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append((context, file.as_uri()))
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_selector("#map rect.cell")
        return page

    yield show
    assert errors == []
    assert requests == [address for _, address in opened]
    for context, _ in opened:
        context.close()


def test_the_map_has_a_cell_for_each_layer_and_sample_and_a_metric_switch(show, run):
    page = show(run)
    assert page.locator("#map rect.cell").count() == 3 * 20
    before = fills(page)
    lines = page.locator("#lines path.line").count()
    page.select_option("#metric", "first_key_mass")
    assert fills(page) != before and "weight on the first key" in page.inner_text("#map-legend")
    page.select_option("#kind", "max")
    assert "highest head" in page.inner_text("#map-legend")
    page.select_option("#metric", "max_score")
    assert not page.is_visible("#kind")  # one number for a layer
    assert page.locator("#lines path.line").count() == 1 < lines
    assert page.locator("#loss path.line").count() == 1 and page.locator("#logit path.line").count() == 1


def test_the_cursor_moves_in_all_views(show, run):
    page = show(run)
    record = read_run(run)
    page.hover('#map rect[data-layer="1"][data-step="20"]')
    assert "step 20: loss " + f"{record['values']['loss'][4]:.3f}" in page.inner_text("#loss output")
    page.click('#map rect[data-layer="1"][data-step="20"]')
    value = record["metrics"]["entropy_norm"]["p10"][1][4]
    assert page.inner_text("#readout") == f"Step 20, layer 1 (layers.1): entropy / log n, 10 % quantile {value:.3f}"
    page.focus("#map svg")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#readout").startswith("Step 25, layer 2 (layers.2)")
    page.focus("#loss svg[tabindex]")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#readout").startswith("Step 20, layer 2")
    page.select_option("#layer", "0")
    assert page.inner_text("#readout").startswith("Step 20, layer 0")


def test_events_are_marked_listed_and_lead_to_their_step(show, run):
    page = show(run)
    found = events(run)
    assert page.locator("#events-list > li").count() == len(found) == page.locator("#map path.flag").count()
    assert page.locator("#loss line.event").count() == len(found)
    alarm = [e for e in found if e["event"] == "logit-alarm"][-1]
    page.focus("#loss svg[tabindex]")
    for _ in range(25):
        page.keyboard.press("ArrowLeft")
    assert page.inner_text("#readout").startswith("Step 0,")
    item = page.locator(f'#events-list li[data-rule="logit-alarm"][data-step="{alarm["step"]}"]').first
    assert alarm["message"] in item.inner_text()
    item.locator("summary").click()
    assert alarm["remedy"] in item.inner_text() and alarm["source"] in item.inner_text()
    item.locator("button").click()
    assert page.inner_text("#readout").startswith(f"Step {alarm['step']}, layer {alarm['layer']}")
    assert page.input_value("#metric") == "max_score"
    assert "near" in (item.get_attribute("class") or "")


def test_a_script_in_the_names_is_shown_and_not_executed(show, run, tmp_path):
    page = show(hostile(run, tmp_path / "hostile.jsonl"))
    page.locator("#events-list summary").first.click()
    page.hover("#map rect.cell >> nth=0")
    assert page.evaluate("window.harmed") is None and page.locator("img").count() == 0
    assert page.inner_text("h1") == ATTACK
    for where in ("#events-list", "#readout", "#provenance"):
        assert ATTACK in page.inner_text(where)


def test_the_provenance_is_plain_text(show, run, tmp_path):
    lines = run.read_text().splitlines(keepends=True)
    for declared, shown in (({}, None), ({"blocks.0": "{}", "blocks.1": None}, "blocks.0: {}; blocks.1: –")):
        header = json.loads(lines[0]) | {"parameters": 1234567, "declared": declared}
        file = tmp_path / f"{len(declared)}.jsonl"
        file.write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
        rows = dict(line.split("\t", 1) for line in show(file).inner_text("#provenance").splitlines())
        assert rows["parameters"] == "1,234,567" and rows.get("declared") == shown


def test_a_long_run_of_a_large_model(show, tmp_path):
    page = show(long_run(tmp_path / "long.jsonl"))
    assert page.locator("#map rect.cell").count() <= 9000 + 48
    assert "450 samples, 400 of them shown, 48 layers, 1,536 heads" in page.inner_text("#facts")
    assert page.inner_text("#events-list") == "No events."
    assert page.locator("#map svg").bounding_box()["height"] < 520
    page.select_option("#metric", "first_key_mass")
    assert page.is_visible("#norm svg")


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
def test_it_is_readable_on_any_screen(show, run, scheme, width):
    page = show(run, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for selector, ground in (("body", "body"), (".facts", "body"), (".tag", "#events"), (".verdict", ".verdict")):
        assert contrast(page, selector, ground) > 4.5, selector
    assert (luminance(colour_of(page, "body", "backgroundColor")) < 0.1) == (scheme == "dark")
