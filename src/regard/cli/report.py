"""`regard report`: shows a training run that `regard.Monitor` recorded, or a saved inspection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..inspection.command import Refused, read_any
from ..inspection.journal import located
from ..inspection.report import to_html, training_html, training_verdict
from .inspect import COLOURS, show_inspection
from .terminal import OURS, check_outputs, fail, plain_table, show_remedies, write_outputs

METRICS = (("entropy_norm", "p10"), ("entropy_norm", "p50"), ("max_score", "all"), ("first_key_mass", "p90"))
MOST_EVENTS = 12


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="The file or folder that regard.Monitor wrote, or what regard inspect wrote (--run, --json).",
            metavar="RUN",
            **OURS,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the report, one HTML file, to this path.", metavar="FILE", **OURS)
    ] = None,
) -> None:
    """Show how the attention of a model changed during training (layers over steps, and events), or a saved
    inspection."""
    console = Console()
    check_outputs({"--out": out}, {"RUN": located(run)})
    try:
        kind, record = read_any(run)
    except Refused as refusal:
        fail(refusal)
    if kind == "training":
        show_training(record, console)
    else:
        show_inspection(record, console)
    page = training_html if kind == "training" else to_html
    write_outputs({"--out": (out, lambda: page(record), "report")}, console)


def show_training(record: dict[str, Any], console: Console) -> None:
    """The model, the verdict, the metrics of each layer at the first and the last sample, and the first events."""
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
    shown = [(metric, kind) for metric, kind in METRICS if kind in record["metrics"].get(metric, {})]
    table = plain_table()
    table.add_column("layer", justify="right")
    for metric, kind in shown:
        table.add_column(metric if kind == "all" else f"{metric}\n{kind}", justify="right", no_wrap=True)
    for n, layer in enumerate(layers):
        ends = ([v for v in record["metrics"][metric][kind][n] if v is not None] for metric, kind in shown)
        table.add_row(str(layer[0]), *(f"{some[0]:.3g} → {some[-1]:.3g}" if some else "-" for some in ends))
    console.print(table)
    _show_events(record["events"], console)
    console.print()


def _show_events(events: list[dict[str, Any]], console: Console) -> None:
    if events:
        console.print()
    for event in events[:MOST_EVENTS]:
        rule = (str(event["rule"]), COLOURS.get(event["severity"], ""))
        console.print(Text.assemble(f"step {event['step']:,}  ", rule, f"  {event['message']}"))
    if len(events) > MOST_EVENTS:
        console.print(Text(f"and {len(events) - MOST_EVENTS} more events, which the report lists", "dim"))
    show_remedies({str(event["rule"]): str(event["remedy"]) for event in events}, console)
