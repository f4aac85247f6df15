"""What full runs found, kept small enough to be committed, and the page made of it.

    python -m regard.lab.results RUNS     keep the full runs of a folder in docs/lab, then write docs/lab.md
    python -m regard.lab.results          write docs/lab.md from what is kept

Of each experiment docs/lab has NAME.json (what was asked, by what it was computed, every cell's result and metrics,
the conclusion), NAME.csv (a line per cell) and the figures. The page's head, above the mark, is written by hand.
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

from .experiments import NAMES, load
from .page import Record, colours_of, provenance, to_svg
from .runner import Outcome, Outcomes, finite, outcome

DOCS = Path(__file__).parents[3] / "docs"
MARK = "<!-- what follows is written by `python -m regard.lab.results` -->\n"
DIGITS = 9  # of every number that is kept


def kept(run: Path) -> Record:
    """A finished run: every cell, its numbers rounded, and what the experiment concludes from these numbers."""
    conclusion = json.loads((run / "conclusion.json").read_text("utf-8"))
    settings = load(conclusion["name"]).settings(conclusion["config"])
    cells = []
    for setting in settings:
        for seed in range(conclusion["config"]["seeds"]):
            found = outcome(run, setting, seed)
            if found is None:
                raise ValueError(f"{run}: expected a finished run, got none of {setting!r} with seed {seed}")
            cells.append(rounded(asdict(found)))
    return {"cells": cells, "conclusion": rounded(conclusion | concluded(conclusion, cells))}


def concluded(conclusion: Record, cells: list[Record]) -> Record:
    """Verdicts, tables and figures, as the experiment draws them from these cells."""
    outcomes = Outcomes([Outcome(**cell) for cell in cells], conclusion["config"])
    return finite(asdict(load(conclusion["name"]).conclude(outcomes)))


def rounded(value: Any) -> Any:
    """The same with every number to so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def to_csv(cells: list[Record]) -> str:
    """A line per cell: the setting, the seed, and every result that is one number or word."""
    plain = [{n: v for n, v in c["result"].items() if not isinstance(v, list | dict)} for c in cells]
    names = list(dict.fromkeys(name for result in plain for name in result))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["setting", "seed", *names])
    for cell, result in zip(cells, plain, strict=True):
        writer.writerow([cell["setting"], cell["seed"], *(result.get(name) for name in names)])
    return text.getvalue()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _plain(text: str) -> str:
    """A record's words, none of which Markdown takes for its own."""
    return re.sub(r"([\\`*_<|])", r"\\\1", text).replace("](", "]\\(").replace("\n", " ")


def _table(header: list[str], rows: list[list[str]]) -> str:
    return _row(*header) + "|" + "---|" * len(header) + "\n" + "".join(_row(*row) for row in rows) + "\n"


def _effect(verdict: Record) -> str:
    return _plain(f"{verdict['effect']}. {verdict['note']}" if verdict["note"] else verdict["effect"])


def to_markdown(records: list[Record]) -> str:
    """What is below the mark: all verdicts, then every experiment. Figures are those of `files`."""
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
    """What docs/lab has of an experiment, by name."""
    conclusion = record["conclusion"]
    name, colours = conclusion["name"], colours_of(conclusion)
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace('{"setting"', '\n{"setting"')  # a line per cell, for diffs
    drawn = {figure_name(conclusion, f): to_svg(f, colours) for f in conclusion["figures"]}
    return {f"{name}.json": text + "\n", f"{name}.csv": to_csv(record["cells"]), **drawn}


def read(folder: Path) -> list[Record]:
    """What is kept, in the order of `regard lab list`."""
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    return sorted(found, key=lambda record: NAMES.index(record["conclusion"]["name"]))


def main(arguments: list[str]) -> None:
    folder, page = DOCS / "lab", DOCS / "lab.md"
    folder.mkdir(exist_ok=True)
    for runs in arguments:
        for path in sorted(Path(runs).glob("*/conclusion.json")):
            if json.loads(path.read_text("utf-8"))["profile"] == "full":
                record = kept(path.parent)
                for old in folder.glob(f"{record['conclusion']['name']}-*.svg"):
                    old.unlink()
                for name, text in files(record).items():
                    (folder / name).write_text(text, encoding="utf-8")
    head = page.read_text("utf-8").partition(MARK)[0] if page.exists() else "# What the lab measured\n\n"
    page.write_text(head + MARK + "\n" + to_markdown([r["conclusion"] for r in read(folder)]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
