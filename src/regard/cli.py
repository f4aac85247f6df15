"""The command `regard`. Each subcommand shows what another module found out; nothing is computed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__

app = typer.Typer(
    name="regard",
    help="Attention, declared as a transport problem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- regard doctor ----------------------------------------------------------------------------------------------------


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the facts for a machine.")] = False) -> None:
    """Look at this installation: versions, processor, threads, which backend serves what, and a self-test.

    Ends with status 1 if something is broken.
    """
    from .doctor import examine

    facts = examine()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts, Console())
    raise typer.Exit(1 if facts["problems"] else 0)


def _show(facts: dict[str, Any], console: Console) -> None:
    machine, engine, threads = facts["machine"], facts["engine"], facts["threads"]

    about = Table.grid(padding=(0, 2))
    about.add_column(style="bold", no_wrap=True)
    about.add_column(overflow="fold")

    def line(name: str, value: str) -> None:
        about.add_row(name, Text(value))  # Text: brackets in it are no markup

    line("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    line("processor", f"{machine['cpu']} ({machine['architecture']}, {machine['system']}), {machine['cores']} cores")
    if engine["loaded"]:
        forced = ", forced by REGARD_ISA" if engine["forced"] else ""
        line("native engine", f"uses {engine['isa']}{forced}; this machine has {', '.join(engine['isas'])}")
        line("built by", f"{engine['compiler']}, threads: {engine['threading']}")
    else:
        line("native engine", engine["reason"].removeprefix("the native engine "))
    limit = threads["OMP_NUM_THREADS"]
    line("threads", f"{threads['torch']} (torch.get_num_threads), OMP_NUM_THREADS {limit or 'not set'}")
    runtimes = threads["openmp"]
    line("OpenMP", "cannot be listed here" if runtimes is None else "\n".join(runtimes) or "none in this process")
    for test in facts["self_test"]:
        found = test["raised"] or f"largest error {test['error']:.1e}"
        line(f"self-test {test['backend']}", f"{'passed' if test['passed'] else 'FAILED'}: {found}")
    console.print(about)

    served = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    served.add_column("problem", no_wrap=True)
    served.add_column("auto takes", style="bold", no_wrap=True)
    served.add_column("who cannot serve it, and why")
    for row in facts["problems_served"]:
        # That the engine is missing was said above; here it would be said in every row.
        refusals = {b: reason for b, reason in row["refusals"].items() if reason != engine.get("reason")}
        reasons = "\n".join(f"{backend}: {reason}" for backend, reason in refusals.items())
        served.add_row(row["problem"], row["auto"], Text(reasons))
    console.print()
    console.print(served)

    console.print()
    for note in facts["notes"]:
        console.print(Text.assemble(("note: ", "yellow"), note))
    for problem in facts["problems"]:
        console.print(Text.assemble(("broken: ", "bold red"), problem))
    if not facts["problems"]:
        console.print(Text("All is well." if not facts["notes"] else "Nothing is broken.", style="green"))


# --- regard inspect ---------------------------------------------------------------------------------------------------


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(help="A folder, a .gguf file, a model's name, or smollm2 (no network needed).")
    ],
    text: Annotated[Path | None, typer.Option(help="What the model reads; a text of our own if left out.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Token ids instead of text: a file of integers.")] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a sequence; a longer text is cut.")] = 2048,
    limit: Annotated[int | None, typer.Option("--max-tokens", min=2, help="Read no more than this.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report, one HTML file, here.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
    compare: Annotated[str | None, typer.Option(help="A second model, or numbers that --json wrote.")] = None,
    run: Annotated[Path | None, typer.Option(help="Keep the state in this file, and continue from it.")] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(help="End with status 1 on findings of this severity (alarm, warning, note) or rule; repeatable."),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(help="Where a rule draws its line, as in max_score=50; repeatable.", metavar="NAME=NUMBER"),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that the checkpoint brings along.")] = False,
) -> None:
    """See what the attention heads of a language model do, without a Tq x Tk matrix."""
    from .inspection.command import Refused, examine, judge, limits, read_record

    console, errors = Console(), Console(stderr=True)
    asked: dict[str, Any] = {
        "text": text,
        "tokens": tokens,
        "length": length,
        "limit": limit,
        "trust_remote_code": trust_remote_code,
    }
    try:
        failing = judge(fail_on or [])
        asked["thresholds"] = limits(threshold or [])
        for path in (out, as_json, run):
            if path is not None and path.is_dir():
                raise Refused(f"{path}: expected a file, got a folder")
            if path is not None and not path.resolve().parent.is_dir():
                raise Refused(f"{path}: there is no folder {path.resolve().parent}")

        def say(text: str) -> None:
            errors.print(Text(text))  # no markup in a name

        other = read_record(Path(compare)) if compare is not None and compare.endswith(".json") else None
        record = examine(model, run=run, say=say, **asked)
        if compare is not None and other is None:
            other = examine(compare, run=None, say=say, **asked)
    except Refused as refusal:
        errors.print(Text.assemble(("error: ", "bold red"), str(refusal)))
        raise typer.Exit(2) from None
    _show_record(record, console)
    if other is not None:
        _show_comparison(record, other, console)
    if as_json is not None:
        as_json.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
        console.print(Text(f"numbers: {as_json}"), soft_wrap=True)
    if out is not None:
        from .inspection.report import to_html

        out.write_text(to_html(record, other), encoding="utf-8")
        console.print(Text(f"report: {out}"), soft_wrap=True)
    raise typer.Exit(1 if any(failing(found) for found in record["findings"]) else 0)


def _show_record(record: dict[str, Any], console: Console) -> None:
    from .inspection.findings import Finding, verdict

    about, findings = record["provenance"], [Finding(**found) for found in record["findings"]]
    console.print(
        Text.assemble(
            (about["model"], "bold"),
            f"  {about['layers']} layers, {len(record['heads'])} heads, {about['parameters'] / 1e6:.0f} M parameters, "
            f"{about.get('tokens', 0):,} tokens of {about['text']} in {about['seconds']:.1f} s",
        )
    )
    console.print(Text(verdict(record, findings), style="bold"))
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("finding", no_wrap=True)
    table.add_column("heads", justify="right")
    table.add_column("layer.head", no_wrap=True)
    table.add_column("why it matters")
    colours = {"alarm": "bold red", "warning": "yellow", "note": ""}
    for rule in dict.fromkeys(found.rule for found in findings):
        mine = [found for found in findings if found.rule == rule]
        heads = [found for found in mine if found.layer is not None]
        first = max(heads, key=lambda f: abs((f.value or 0) - f.threshold)) if heads else mine[0]
        where = f"{first.layer}.{first.head} ({first.value:.3g})" if first.layer is not None else "-"
        sentence = (
            first.why.split(". ")[0].removesuffix(".") + "." if heads else first.message
        )  # the report has the rest
        row = (str(len(heads)) if heads else "-", where, sentence)
        table.add_row(Text(rule, style=colours[mine[0].severity]), *map(Text, row))
    console.print(table)
    console.print(
        Text("layer.head: the clearest one, and its value. The report has all, with sources and remedies.", "dim")
    )
    console.print()


def _show_comparison(record: dict[str, Any], other: dict[str, Any], console: Console) -> None:
    """The other side's verdict, and the heads that differ most."""
    from .inspection.findings import Finding, find, verdict
    from .inspection.report import incomparable

    findings = [Finding(**found) for found in other.get("findings", [])] or find(other)
    console.print(Text.assemble("against ", (str(other.get("provenance", {}).get("model")), "bold")))
    console.print(Text(verdict(other, findings)))
    obstacle = incomparable(record, other)
    if obstacle is not None:
        console.print(Text(obstacle))
    else:
        there = {(head["layer"], head["head"]): head["mean"] for head in other["heads"]}
        for name in ("normalized_entropy", "first_key_mass"):
            moves = [
                (there_mean - head["mean"][name], head)  # as in the report
                for head in record["heads"]
                if head["mean"].get(name) is not None
                and (there_mean := there[head["layer"], head["head"]].get(name)) is not None
            ]
            if moves:
                move, head = max(moves, key=lambda pair: abs(pair[0]))
                where = f"in {head['layer']}.{head['head']}"
                console.print(Text(f"{name}: largest difference {move:+.3g} (second minus first), {where}"))
    console.print()


# --- regard report ----------------------------------------------------------------------------------------------------


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(help="What regard.Monitor wrote: its file, or the folder; or an inspection's run file.")
    ],
    out: Annotated[Path | None, typer.Option(help="Write the report, one HTML file, here.")] = None,
) -> None:
    """See how the attention of a model went during training: layers over steps, and what happened."""
    from .inspection.command import Refused, read_any
    from .inspection.report import to_html, training_html

    console, errors = Console(), Console(stderr=True)
    try:
        if out is not None and out.is_dir():
            raise Refused(f"{out}: expected a file, got a folder")
        if out is not None and not out.resolve().parent.is_dir():
            raise Refused(f"{out}: there is no folder {out.resolve().parent}")
        kind, record = read_any(run)
    except Refused as refusal:
        errors.print(Text.assemble(("error: ", "bold red"), str(refusal)), soft_wrap=True)
        raise typer.Exit(2) from None
    if kind == "training":
        _show_training(record, console)
    else:
        _show_record(record, console)
    if out is not None:
        out.write_text(training_html(record) if kind == "training" else to_html(record), encoding="utf-8")
        console.print(Text(f"report: {out}"), soft_wrap=True)


def _show_training(record: dict[str, Any], console: Console) -> None:
    from .inspection.report import training_verdict

    about, steps, layers = record["about"], record["steps"], record["layers"]
    heads = sum(layer[2] for layer in layers)
    console.print(
        Text.assemble(
            (str(about.get("checkpoint") or about.get("model") or "model"), "bold"),
            f"  {len(layers)} layers, {heads} heads, {record['samples']} samples from step {steps[0]:,} "
            f"to {steps[-1]:,}",
        )
    )
    console.print(Text(training_verdict(record), style="bold"))
    console.print()
    wanted = (("entropy_norm", "p10"), ("entropy_norm", "p50"), ("max_score", "all"), ("first_key_mass", "p90"))
    shown = [(metric, kind) for metric, kind in wanted if kind in record["metrics"].get(metric, {})]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right")
    for metric, kind in shown:
        table.add_column(metric if kind == "all" else f"{metric} {kind}", justify="right")
    for n, layer in enumerate(layers):
        ends = ([v for v in record["metrics"][metric][kind][n] if v is not None] for metric, kind in shown)
        table.add_row(str(layer[0]), *(f"{some[0]:.3g} → {some[-1]:.3g}" if some else "-" for some in ends))
    console.print(table)
    colours = {"alarm": "bold red", "warning": "yellow"}
    if record["events"]:
        console.print()
    for event in record["events"][:12]:
        rule = (str(event["rule"]), colours.get(event["severity"], ""))
        console.print(Text.assemble(f"step {event['step']:,}  ", rule, f"  {event['message']}"))
    if len(record["events"]) > 12:
        console.print(Text(f"and {len(record['events']) - 12} more events, which the report has", "dim"))
    console.print()


# --- regard lab -------------------------------------------------------------------------------------------------------

lab = typer.Typer(help="What has been claimed about attention, checked by running it.", no_args_is_help=True)
app.add_typer(lab, name="lab")

_COLOURS = {"holds": "green", "holds with correction": "yellow", "fails": "red", "not testable": "dim"}


@lab.command()
def claims(
    source: Annotated[str | None, typer.Option(help="Only this document: 000 to 004.")] = None,
    verdict: Annotated[
        str | None, typer.Option(help="Only this verdict: holds, 'holds with correction', fails or 'not testable'.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table for a machine.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print it as the page docs/claims.md.")] = False,
) -> None:
    """Judge every checkable sentence and printed number of the five documents regard grew out of.

    A claim that fails is a result: the status is 0.
    """
    from .lab import claims as book

    if as_json and markdown:
        raise typer.BadParameter("expected one of --json and --markdown, got both")
    for name, value, known in (("--source", source, book.DOCUMENTS), ("--verdict", verdict, book.VERDICTS)):
        if value is not None and value not in known:
            raise typer.BadParameter(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    rows = book.table(source, verdict)
    if as_json:
        print(book.to_json(rows))
    elif markdown:
        print(book.to_markdown(rows), end="")
    else:
        _show_claims(rows, Console())


def _show_claims(rows: list[Any], console: Console) -> None:
    from .lab.claims import DOCUMENTS, summary

    for source, title in DOCUMENTS.items():
        mine = [row for row in rows if row.source == source]
        if not mine:
            continue
        console.print(Text.assemble((f"{source}  ", "bold"), title))
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), leading=1, expand=True
        )
        table.add_column("claim", ratio=4)
        table.add_column("computed", ratio=6)
        table.add_column("verdict", width=10)
        for row in mine:
            claim = Text.assemble(row.claim, "\n", (row.section, "dim italic"))
            table.add_row(claim, Text(row.computed), Text(row.verdict, style=_COLOURS[row.verdict]))
        console.print(table)
        console.print()
    console.print(Text(summary(rows), style="bold"))


@lab.command()
def teasers(
    number: Annotated[int | None, typer.Argument(help="Which one, 1 to 5; all if left out.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print them as the page docs/teasers.md.")] = False,
) -> None:
    """Run the five brain teasers: which constraint each drops, and what that does."""
    from .lab.teasers import TEASERS, to_markdown

    if number is not None and number not in TEASERS:
        raise typer.BadParameter(f"number: expected 1 to {len(TEASERS)}, got {number}")
    if markdown:
        if number is not None:
            raise typer.BadParameter("number: expected none with --markdown, which prints the whole page")
        print(to_markdown(), end="")
        return
    console = Console()
    for make in TEASERS.values() if number is None else [TEASERS[number]]:
        teaser = make()
        console.print(Text(f"{teaser.number}. {teaser.question}", style="bold"))
        console.print(Text.assemble(("Dropped: ", "bold"), teaser.dropped))
        for exhibit in teaser.exhibits:
            console.print()
            console.print(Text(f"{exhibit.title}:"))
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
            for name in exhibit.header:
                table.add_column(name)
            for row in exhibit.rows:
                table.add_row(*map(Text, row))
            console.print(table)
        console.print()
        for sentence in teaser.answer:
            bullet = Table.grid(padding=(0, 1))
            bullet.add_row("-", Text(sentence))
            console.print(bullet)
        console.print()


@lab.command("list")
def list_experiments() -> None:
    """The experiments, and what each asks."""
    from .lab.experiments import NAMES, load

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("question")
    table.add_column("source")
    for name in NAMES:
        experiment = load(name)
        table.add_row(name, Text(experiment.question), Text(experiment.source, style="dim"))
    Console().print(table)


@lab.command("run")
def run_experiment(
    name: Annotated[str, typer.Argument(help="An experiment that `regard lab list` shows, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="A profile of seconds, too small for a verdict.")] = False,
    text: Annotated[Path | None, typer.Option(help="Learn from this file, not from Python's standard library.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of all runs; each experiment has its own in it.")] = Path(
        "runs"
    ),
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change the configuration: name=value; repeatable.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, forgetting what an earlier run left.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the cells, and the threads.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Compute the cells on a Ray cluster, or on a local Ray.")] = False,
    ray_address: Annotated[
        str | None, typer.Option(help="Of the cluster; without, Ray looks for one and else starts its own.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:n, or auto: a GPU if there is one.")] = "cpu",
    precision: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="bf16: products in bfloat16, weights and sums in float32.")
    ] = "fp32",
) -> None:
    """Run an experiment: every setting with every seed, then the verdicts.

    Ctrl-C keeps what is done, and the same command goes on from there.
    """
    from .lab.command import run_all
    from .lab.runner import Refused

    errors = Console(stderr=True)
    try:
        finished = run_all(
            name,
            quick,
            text,
            out,
            changes or [],
            fresh,
            workers,
            errors,
            Console(),
            ray=ray,
            ray_address=ray_address,
            device=device,
            precision=precision,
        )
    except Refused as refusal:
        errors.print(Text.assemble(("error: ", "bold red"), str(refusal)))
        raise typer.Exit(2) from None
    raise typer.Exit(0 if finished else 130)


@lab.command("report")
def report_experiments(
    runs: Annotated[Path, typer.Argument(help="The folder of all runs.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="Write the page, one HTML file, here.")] = Path("lab.html"),
) -> None:
    """Write one HTML page with the verdicts and figures of all runs."""
    from .lab.page import read, to_html

    records = read(runs)
    if not records:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), f"{runs}: no finished run in it"))
        raise typer.Exit(2)
    out.write_text(to_html(records), encoding="utf-8")
    Console().print(Text(f"report: {out}"), soft_wrap=True)


if __name__ == "__main__":
    app()
