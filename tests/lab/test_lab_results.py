"""The records of full runs in docs/lab: verdicts follow from the numbers, and the page shows them."""

import json
from pathlib import Path

import pytest

from regard.lab import page, results
from regard.lab.configuration import configured
from regard.lab.corpus import from_file
from regard.lab.experiments import NAMES, load
from regard.lab.figures import escaped
from regard.lab.runner import Run

FOLDER = results.DOCS / "lab"
RECORDS = results.read_records(FOLDER)


def test_every_experiment_has_a_finished_full_run():
    assert [r["conclusion"]["name"] for r in RECORDS] == list(NAMES)
    for record in RECORDS:
        found = record["conclusion"]
        assert found["profile"] == "full" and found["complete"] and found["command"].startswith("regard lab run ")
        assert found["versions"]["torch"] and found["corpus"]["sha256"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["conclusion"]["name"])
def test_verdicts_follow_from_the_numbers(record):
    concluded = results.rounded(results.concluded(record["conclusion"], record["cells"]))
    assert concluded == {name: record["conclusion"][name] for name in concluded}
    for name, text in results.files(record).items():
        assert (FOLDER / name).read_text("utf-8") == text, f"{name}: `python -m regard.lab.results` writes it"


def test_the_page_shows_all_records():
    written = (results.DOCS / "lab.md").read_text("utf-8")
    _, mark, rest = written.partition(results.MARK)
    assert mark and rest == "\n" + results.to_markdown([r["conclusion"] for r in RECORDS])
    made = page.to_html(page.read_conclusions(FOLDER))
    for record in RECORDS:
        assert escaped(record["conclusion"]["question"]) in made
    names = {name for record in RECORDS for name in results.files(record)}
    assert {path.name for path in FOLDER.iterdir()} == names  # no file of an older run


def test_only_a_finished_run_is_recorded(tmp_path, corpus):
    experiment = load("masking")
    config = configured(experiment, True, {"steps": "2", "every": "1"})
    run = Run(experiment, config, corpus, tmp_path / "masking", "full", "regard lab run masking")
    run.open()
    cells = run.cells()
    for cell in cells:
        run.measure(*cell)
    run.conclude()
    record = results.record_of(run.folder)
    assert [(c["setting"], c["seed"]) for c in record["cells"]] == cells
    again = results.concluded(record["conclusion"], json.loads(json.dumps(record["cells"])))
    assert results.rounded(again)["verdicts"] == record["conclusion"]["verdicts"]
    changed = json.loads(json.dumps(record["cells"]))
    for cell in changed:
        cell["result"] = {n: 3.0 * v if isinstance(v, float) else v for n, v in cell["result"].items()}
    assert results.concluded(record["conclusion"], changed)["tables"] != again["tables"]
    (run.folder / "cells" / "no_mask" / "0" / "result.json").unlink()
    with pytest.raises(ValueError, match="expected a finished run, got none of 'no mask' with seed 0"):
        results.record_of(run.folder)


@pytest.fixture
def corpus(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    return from_file(tmp_path / "a.txt")
