"""What is committed of the lab's full runs: the verdicts follow from the numbers, the page from the verdicts."""

import json
from pathlib import Path

import pytest

from regard.lab import page, results
from regard.lab.experiments import NAMES, load
from regard.lab.runner import Run, configured

KEPT = results.DOCS / "lab"
RECORDS = results.read(KEPT)


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
        assert (KEPT / name).read_text("utf-8") == text, f"{name}: `python -m regard.lab.results` writes it"


def test_the_page_shows_them():
    written = (results.DOCS / "lab.md").read_text("utf-8")
    _, mark, rest = written.partition(results.MARK)
    assert mark and rest == "\n" + results.to_markdown([r["conclusion"] for r in RECORDS])
    made = page.to_html(page.read(KEPT))
    for record in RECORDS:
        assert page._text(record["conclusion"]["question"]) in made
    names = {name for record in RECORDS for name in results.files(record)}
    assert {path.name for path in KEPT.iterdir()} == names  # nothing is left of an older run


def test_a_run_is_kept_whole_or_not_at_all(tmp_path, corpus):
    experiment = load("masking")
    config = configured(experiment, True, {"steps": "2", "every": "1"})
    run = Run(experiment, config, corpus, tmp_path / "masking", "full", "regard lab run masking")
    run.open()
    cells = run.cells()
    for cell in cells:
        run.measure(*cell)
    run.conclude()
    record = results.kept(run.folder)
    assert [(c["setting"], c["seed"]) for c in record["cells"]] == cells
    again = results.concluded(record["conclusion"], json.loads(json.dumps(record["cells"])))
    assert results.rounded(again)["verdicts"] == record["conclusion"]["verdicts"]
    changed = json.loads(json.dumps(record["cells"]))
    for cell in changed:
        cell["result"] = {n: 3.0 * v if isinstance(v, float) else v for n, v in cell["result"].items()}
    assert results.concluded(record["conclusion"], changed)["tables"] != again["tables"]
    (run.folder / "cells" / "no_mask" / "0" / "result.json").unlink()
    with pytest.raises(ValueError, match="expected a finished run, got none of 'no mask' with seed 0"):
        results.kept(run.folder)


@pytest.fixture
def corpus(tmp_path: Path):
    from regard.lab.corpus import from_file

    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 100)
    return from_file(tmp_path / "a.txt")
