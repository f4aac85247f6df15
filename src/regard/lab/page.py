"""One HTML page of the lab's results: all verdicts, then the tables and figures of every experiment.

The page is made from the conclusion.json of each run. It contains no script and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from importlib import resources
from pathlib import Path

from .figures import Record, colours_of, draw_figure, escaped
from .judging import VERDICTS


def read_conclusions(folder: Path) -> list[Record]:
    """The conclusions of all runs in a folder, and of all records that `results` keeps in it, by name."""
    runs = [json.loads(path.read_text("utf-8")) for path in folder.glob("*/conclusion.json")]
    found = runs + [json.loads(path.read_text("utf-8"))["conclusion"] for path in folder.glob("*.json")]
    return sorted(found, key=lambda record: (record["profile"] != "full", record["name"]))


def to_html(records: list[Record]) -> str:
    parts = ("regard.inspection", "page.css"), ("regard.lab", "page.css")
    style = "".join(resources.files(package).joinpath(name).read_text("utf-8") for package, name in parts)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    counted = Counter(v["verdict"] for r in records for v in r["verdicts"])
    counts = ", ".join(f"{counted[v]} {v}" for v in VERDICTS)
    summary = f"{_plural(len(records), 'experiment')}, {_plural(sum(counted.values()), 'claim')}: {counts}"
    body = "".join(map(_experiment, records))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>What the lab measured</title>
<style>{style}</style>
</head>
<body>
<header>
  <p class="kicker">regard lab</p>
  <h1>What the lab measured</h1>
  <p class="facts">{escaped(summary)}</p>
</header>
<main>
<section aria-labelledby="verdicts"><h2 id="verdicts">Verdicts</h2>
<p class="about">Measured: there is an effect, and it agrees with the claim. Refuted: its 95 % interval excludes the
claimed range. Not significant: these runs do not decide. Effects compare runs that share seed, weights and batches.</p>
<div class="scroll"><table class="verdicts">
<thead><tr><th>experiment</th><th>claim</th><th>measured</th><th>verdict</th></tr></thead>
<tbody>{"".join(_verdict_row(r, v) for r in records for v in r["verdicts"])}</tbody>
</table></div></section>
{body}
</main>
</body>
</html>
"""


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _name(record: Record) -> str:
    quick = " (quick)" if record["profile"] != "full" else ""
    return f"{record['name']}{quick}"


def _verdict_row(record: Record, verdict: Record) -> str:
    note = f'<br><span class="source">{escaped(verdict["note"])}</span>' if verdict["note"] else ""
    name, kind = _name(record), verdict["verdict"].replace(" ", "-")
    return (
        f'<tr><td class="top"><a href="#{escaped(_id(record))}">{escaped(name)}</a></td>'
        f'<td class="wrap">{escaped(verdict["claim"])}<br><span class="source">{escaped(verdict["source"])}</span></td>'
        f'<td class="wrap">{escaped(verdict["effect"])}{note}</td>'
        f'<td class="top"><span class="tag {kind}">{escaped(verdict["verdict"])}</span></td></tr>'
    )


def _id(record: Record) -> str:
    return f"{record['name']}-{record['profile']}"


def _experiment(record: Record) -> str:
    partly = "" if record["complete"] else f" Not finished: {_plural(len(record['seeds']), 'seed')} so far."
    colours = colours_of(record)
    figures = "".join(
        f"<figure><figcaption>{escaped(figure['title'])}</figcaption>"
        f'<div class="plot">{draw_figure(figure, colours)}</div></figure>'
        for figure in record["figures"]
    )
    tables = "".join(map(_table, record["tables"]))
    return f"""<section id="{escaped(_id(record))}">
<h2>{escaped(_name(record))}: {escaped(record["question"])}</h2>
<p class="about">{escaped(record["about"])}{escaped(partly)}</p>
<div class="charts">{figures}</div>
{tables}
<table class="provenance">
{"".join(f"<tr><th>{name}</th><td>{escaped(value)}</td></tr>" for name, value in provenance(record))}
<tr><th>command</th><td><code>{escaped(record["command"])}</code></td></tr>
</table>
</section>
"""


def provenance(record: Record) -> list[tuple[str, str]]:
    """The source of the claims, the text, the configuration and the versions, each under its name."""
    versions = record["versions"]
    by = ", ".join(f"{name} {versions[name]}" for name in ("regard", "torch", "python"))
    device = versions.get("device", "cpu")  # old runs did not record it: they were on the CPU
    by += f", {device}" if device != "cpu" else ""
    by += ", bf16" if versions.get("precision") == "bf16" else ""
    by += f", {versions['processor']}, {_plural(versions['threads'], 'thread')}"
    by += f" in each of {versions['processes']} processes" if versions["processes"] > 1 else ""
    return [
        ("source", record["source"]),
        ("text", f"{record['corpus']['name']}, {record['corpus']['characters']:,} characters"),
        ("configuration", ", ".join(f"{name} {_short(value)}" for name, value in record["config"].items())),
        ("computed by", by),
    ]


def _short(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(table: Record) -> str:
    head = "".join(f'<th class="text">{escaped(cell)}</th>' for cell in table["header"])
    rows = "".join(
        "<tr>" + f'<th scope="row">{escaped(row[0])}</th>' + "".join(map(_cell, row[1:])) + "</tr>"
        for row in table["rows"]
    )
    return (
        f'<figure class="wide"><figcaption>{escaped(table["title"])}</figcaption><div class="scroll">'
        f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></figure>'
    )


def _cell(text: str) -> str:
    """A table cell: numbers are aligned right, words left."""
    kind = "" if text[:1].isdigit() or text[:1] in "-−" else ' class="text"'
    return f"<td{kind}>{escaped(text)}</td>"
