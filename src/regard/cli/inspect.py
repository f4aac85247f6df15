"""`regard inspect`: inspects a model, and shows the findings of the inspection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..inspection.command import Refused, check_models, check_run, examine, judge, limits, read_record, read_source
from ..inspection.findings import Finding, find, verdict
from ..inspection.numbers import count_of, in_units
from ..inspection.report import incomparable, labels, to_html
from .terminal import OURS, check_outputs, fail, plain_table, show_remedies, write_outputs

COLOURS = {"alarm": "bold red", "warning": "yellow", "note": ""}
COMPARED = ("normalized_entropy", "first_key_mass")  # statistics of which --compare shows the largest difference


def inspect(
    model: Annotated[
        str,
        typer.Argument(help="A folder, a .gguf file, a model's name, or smollm2 (no network needed).", metavar="MODEL"),
    ],
    text: Annotated[
        Path | None,
        typer.Option(help="The text that the model reads; by default a short story.", metavar="FILE", **OURS),
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Token ids instead of a text: a file of integers.", metavar="FILE", **OURS)
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a sequence; a longer text is cut.", metavar="N")] = 2048,
    limit: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="Read at most this many tokens.", metavar="N")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report, one HTML file, to this path.", metavar="FILE", **OURS)
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this path.", metavar="FILE", **OURS)
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="A second model, or numbers that --json wrote.", metavar="OTHER")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Save the state in this file; the same command continues from it after an interruption.",
            metavar="FILE",
            **OURS,
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            help="Give MODEL (not --compare) this attention, as in 'Transport(Tsallis(1.5))', or as JSON.",
            metavar="TEXT",
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with status 1 on findings of this rule or severity (alarm, warning, note); repeatable.",
            metavar="NAME",
        ),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(help="Change the threshold of a rule, as in max_score=50; repeatable.", metavar="NAME=NUMBER"),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False,
    no_trust_remote_code: Annotated[bool, typer.Option("--no-trust-remote-code", hidden=True)] = False,
) -> None:
    """Show what the attention heads of a model do, without storing a Tq x Tk matrix."""
    console, errors = Console(), Console(stderr=True)

    def say(message: str) -> None:
        errors.print(Text(message), soft_wrap=True)  # Text: brackets in a name are not markup

    try:
        fails = judge(fail_on or [])
        arguments: dict[str, Any] = {
            "source": read_source(text, tokens),
            "length": length,
            "limit": limit,
            "trust_remote_code": trust_remote_code and not no_trust_remote_code,
            "thresholds": limits(threshold or []),
        }
        inputs = {"model": model, "--text": text, "--tokens": tokens, "--compare": compare}
        check_outputs({"--out": out, "--json": as_json, "--run": run}, inputs)
        check_run(run)
        other = read_record(Path(compare), "--compare") if compare is not None and compare.endswith(".json") else None
        check_models({"model": model} | ({} if compare is None or other is not None else {"--compare": compare}))
        record = examine(model, run=run, problem=problem, say=say, **arguments)
        if compare is not None and other is None:
            other = examine(compare, run=None, say=say, **arguments)
    except Refused as refusal:
        fail(refusal)
    except KeyboardInterrupt:
        if run is None:
            say("interrupted: nothing was saved; with --run FILE the same command would continue")
        elif run.exists():
            say(f"interrupted: the state is in {run}, and the same command continues from it")
        else:
            say("interrupted: nothing was recorded yet")
        raise typer.Exit(130) from None
    show_inspection(record, console)
    if other is not None:
        show_comparison(record, other, console)
    write_outputs(
        {
            "--json": (as_json, lambda: json.dumps(record, allow_nan=False) + "\n", "numbers"),
            "--out": (out, lambda: to_html(record, other), "report"),
        },
        console,
    )
    raise typer.Exit(1 if any(fails(found) for found in record["findings"]) else 0)


def show_inspection(record: dict[str, Any], console: Console) -> None:
    """The model, the verdict, a table with one row per rule that has findings, and what to do about
    alarms and warnings."""
    about, findings = record["provenance"], [Finding(**found) for found in record["findings"]]
    numbers = (
        f"{count_of(about['layers'], 'layer')}, {count_of(len(record['heads']), 'head')}, "
        f"{in_units(about['parameters'])} parameters, "
        f"{about.get('tokens', 0):,} tokens of {about.get('text', 'text')} in {about['seconds']:.1f} s"
    )
    apart = "  " if len(about["model"]) + 2 + len(numbers) <= console.width else "\n"  # a path stays whole
    console.print(Text.assemble((about["model"], "bold"), apart, numbers), soft_wrap=True)
    console.print(Text(verdict(record, findings), style="bold"))
    console.print()
    table = plain_table()
    table.add_column("finding", no_wrap=True)
    table.add_column("heads", justify="right")
    table.add_column("layer.head", no_wrap=True)
    table.add_column("why it matters")
    for rule in dict.fromkeys(found.rule for found in findings):
        mine = [found for found in findings if found.rule == rule]
        table.add_row(Text(rule, style=COLOURS[mine[0].severity]), *map(Text, _rule_row(mine)))
    console.print(table)
    show_remedies({found.rule: found.remedy for found in findings if found.severity != "note"}, console)
    console.print(
        Text("layer.head: the clearest case, with its value. The report lists all, with sources and remedies.", "dim")
    )
    console.print()


def _rule_row(findings: list[Finding]) -> tuple[str, str, str]:
    """The number of heads, the clearest head with its value, and the first sentence on why the rule matters."""
    heads = [found for found in findings if found.layer is not None]
    if not heads:
        return "-", "-", findings[0].message
    clearest = max(heads, key=lambda f: abs((f.value or 0) - f.threshold))
    sentence = clearest.why.split(". ")[0].removesuffix(".") + "."
    return str(len(heads)), f"{clearest.layer}.{clearest.head} ({clearest.value:.3g})", sentence


def show_comparison(record: dict[str, Any], other: dict[str, Any], console: Console) -> None:
    """The verdict on the second model, and the heads that differ most."""
    findings = [Finding(**found) for found in other.get("findings", [])] or find(other)
    console.print(Text.assemble("against ", (labels(record, other)[1], "bold")))
    console.print(Text(verdict(other, findings)))
    obstacle = incomparable(record, other)
    if obstacle is not None:
        console.print(Text(obstacle))
    else:
        _show_differences(record, other, console)
    console.print()


def _show_differences(record: dict[str, Any], other: dict[str, Any], console: Console) -> None:
    there = {(head["layer"], head["head"]): head["mean"] for head in other["heads"]}
    for name in COMPARED:
        differences = [
            (second - first, head)  # the same sign as in the report
            for head in record["heads"]
            if (first := head["mean"].get(name)) is not None
            and (second := there[head["layer"], head["head"]].get(name)) is not None
        ]
        if differences:
            largest, head = max(differences, key=lambda pair: abs(pair[0]))
            where = f"in {head['layer']}.{head['head']}"
            console.print(Text(f"{name}: largest difference {largest:+.3g} (second minus first), {where}"))
