"""Records of full runs, small enough to be committed, and the page docs/lab.md that shows them.

    python -m regard.lab.results RUNS     record the full runs of a folder in docs/lab, then write docs/lab.md
    python -m regard.lab.results          write docs/lab.md from the records

For each experiment docs/lab holds NAME.json (configuration, versions, the results and metrics of every cell, the
conclusion), NAME.csv (a line per cell) and the figures. The head of the page, above the mark, is written by hand.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._files import write
from .experiment import Outcome, Outcomes, finite
from .experiments import NAMES, load
from .figures import Record, colours_of, to_svg
from .page import provenance
from .runner import read_outcome

DOCS = Path(__file__).parents[3] / "docs"
MARK = "<!-- what follows is written by `python -m regard.lab.results` -->\n"
DIGITS = 9  # of every recorded number


def record_of(run: Path) -> Record:
    """The record of a finished run: every cell with rounded numbers, and the conclusion from these numbers."""
    conclusion = json.loads((run / "conclusion.json").read_text("utf-8"))
    settings = load(conclusion["name"]).settings(conclusion["config"])
    cells = []
    for setting in settings:
        for seed in range(conclusion["config"]["seeds"]):
            found = read_outcome(run, setting, seed)
            if found is None:
                raise ValueError(f"{run}: expected a finished run, got none of {setting!r} with seed {seed}")
            cells.append(rounded(asdict(found)))
    return {"cells": cells, "conclusion": rounded(conclusion | concluded(conclusion, cells))}


def concluded(conclusion: Record, cells: list[Record]) -> Record:
    """The verdicts, tables and figures that the experiment concludes from these cells."""
    outcomes = Outcomes([Outcome(**cell) for cell in cells], conclusion["config"])
    return finite(asdict(load(conclusion["name"]).conclude(outcomes)))


def rounded(value: Any) -> Any:
    """The value with every number rounded to `DIGITS` digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def to_csv(cells: list[Record]) -> str:
    """A line per cell: the setting, the seed, and every result that is a single number or word."""
    plain = [{n: v for n, v in c["result"].items() if not isinstance(v, list | dict)} for c in cells]
    names = list(dict.fromkeys(name for result in plain for name in result))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["setting", "seed", *names])
    for cell, result in zip(cells, plain, strict=True):
        writer.writerow([cell["setting"], cell["seed"], *(result.get(name) for name in names)])
    return text.getvalue()


def _plain(text: str) -> str:
    """The text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_<|])", r"\\\1", text).replace("](", "]\\(").replace("\n", " ")


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [_row(header), "|" + "---|" * len(header), *map(_row, rows)]
    return "\n".join(lines) + "\n\n"


def _effect(verdict: Record) -> str:
    return _plain(f"{verdict['effect']}. {verdict['note']}" if verdict["note"] else verdict["effect"])


def to_markdown(records: list[Record]) -> str:
    """The part of the page below the mark: all verdicts, then every experiment. The figures are those of `files`."""
    rows = [
        [f"[{r['name']}](#{r['name']})", _plain(f"{v['claim']} ({v['source']})"), _effect(v), f"**{v['verdict']}**"]
        for r in records
        for v in r["verdicts"]
    ]
    missing = [name for name in NAMES if name not in {r["name"] for r in records}]
    text = f"Not run in full yet: {', '.join(missing)}.\n\n" if missing else ""
    text += "## Verdicts\n\n" + _table(["experiment", "claim", "measured", "verdict"], rows)
    for record in records:
        name = record["name"]
        text += f"## {name}\n\n**{record['question']}** {record['about']}\n\n"
        for table in record["tables"]:
            rows = [list(map(_plain, row)) for row in table["rows"]]
            text += f"{_plain(table['title'])}:\n\n" + _table(list(map(_plain, table["header"])), rows)
        for n in range(0, len(record["figures"]), 2):  # two side by side, under their titles
            pair = [(_plain(f["title"]), f"lab/{figure_name(record, f)}") for f in record["figures"][n : n + 2]]
            text += _table([title for title, _ in pair], [[f"![{title}]({path})" for title, path in pair]])
        text += f"`{record['command']}`\n\n"
        text += f"{'; '.join(f'{what}: {value}' for what, value in provenance(record))}.\n"
        text += f"[Every number](lab/{name}.json), [a line per cell](lab/{name}.csv).\n\n"
    return text.rstrip("\n") + "\n"


def figure_name(record: Record, figure: Record) -> str:
    return f"{record['name']}-{record['figures'].index(figure) + 1}.svg"


def files(record: Record) -> dict[str, str]:
    """The files of an experiment in docs/lab, by name."""
    conclusion = record["conclusion"]
    name, colours = conclusion["name"], colours_of(conclusion)
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace('{"setting"', '\n{"setting"')  # a line per cell, for diffs
    drawn = {figure_name(conclusion, f): to_svg(f, colours) for f in conclusion["figures"]}
    return {f"{name}.json": text + "\n", f"{name}.csv": to_csv(record["cells"]), **drawn}


def read_records(folder: Path) -> list[Record]:
    """The records of a folder, in the order of `regard lab list`."""
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    return sorted(found, key=lambda record: NAMES.index(record["conclusion"]["name"]))


def main(arguments: list[str]) -> None:
    folder, page = DOCS / "lab", DOCS / "lab.md"
    folder.mkdir(exist_ok=True)
    for runs in arguments:
        for path in sorted(Path(runs).glob("*/conclusion.json")):
            if json.loads(path.read_text("utf-8"))["profile"] == "full":
                record = record_of(path.parent)
                for old in folder.glob(f"{record['conclusion']['name']}-*.svg"):
                    old.unlink()
                for name, text in files(record).items():
                    write(folder / name, text)
    head = page.read_text("utf-8").partition(MARK)[0] if page.exists() else "# What the lab measured\n\n"
    write(page, head + MARK + "\n" + to_markdown([r["conclusion"] for r in read_records(folder)]))


if __name__ == "__main__":
    main(sys.argv[1:])
