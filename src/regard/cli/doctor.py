"""`regard doctor`: shows the facts that `regard.doctor` collects about this installation."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..doctor import SettingError, clear_cache, examine
from .device import check_device
from .terminal import fail, plain_table


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    clear: Annotated[bool, typer.Option("--clear-cache", help="Delete the compiled functions, and exit.")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Check the kernels on a device instead: cuda, cuda:N, rocm or cpu. Takes minutes on a GPU."),
    ] = None,
) -> None:
    """Check this installation: versions, processor, threads, the backends for some problems, and a self-test.

    With --device: compare every kind of problem with float64 on that device, twice for the same bits, then time it
    beside PyTorch. The result is written to a file, and backend="auto" uses the kernels of a GPU only after that.
    Exits with status 1 if something is broken.
    """
    if device is not None:
        check_device(device, as_json)
    if clear:
        try:
            print(f"Deleted {clear_cache()} compiled functions.")
        except SettingError as error:
            fail(error)
        return
    try:
        facts = examine()
    except SettingError as error:
        fail(error)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show_facts(facts, Console())
    raise typer.Exit(1 if facts["problems"] else 0)


def show_facts(facts: dict[str, Any], console: Console) -> None:
    console.print(_installation(facts))
    console.print()
    console.print(_backends(facts))
    console.print()
    for note in facts["notes"]:
        console.print(Text.assemble(("note: ", "yellow"), note))
    for problem in facts["problems"]:
        console.print(Text.assemble(("broken: ", "bold red"), problem))
    if not facts["problems"]:
        console.print(Text("No problems found.", style="green"))


def _installation(facts: dict[str, Any]) -> Table:
    """Versions, processor, engine, threads and self-tests, one per line."""
    machine, engine, threads = facts["machine"], facts["engine"], facts["threads"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def line(name: str, value: str) -> None:
        table.add_row(name, Text(value))  # Text: brackets in the value are not markup

    line("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    line("processor", f"{machine['cpu']} ({machine['architecture']}, {machine['system']}), {machine['cores']} cores")
    if engine["loaded"]:
        forced = ", forced by REGARD_ISA" if engine["forced"] else ""
        line("native engine", f"uses {engine['isa']}{forced}; this machine has {', '.join(engine['isas'])}")
        line("built by", f"{engine['compiler']}, threads: {engine['threading']}")
    else:
        line("native engine", engine["reason"].removeprefix("the native engine "))
    cache = facts["cache"]
    kept = f"{cache['libraries']} compiled functions, {cache['bytes'] / 2**20:.1f} of {cache['limit'] / 2**20:.0f} MiB"
    line("function cache", cache["problem"] or f"{cache['path']}: {kept}")
    line("compiler", cache["compiler"] or cache["no_compiler"])
    limit = threads["OMP_NUM_THREADS"]
    line("threads", f"{threads['torch']} (torch.get_num_threads), OMP_NUM_THREADS {limit or 'not set'}")
    runtimes = threads["openmp"]
    line("OpenMP", "cannot be listed on this system" if runtimes is None else "\n".join(runtimes) or "not loaded")
    for test in facts["self_test"]:
        found = test["raised"] or f"largest error {test['error']:.1e}"
        line(f"self-test {test['backend']}", f"{'passed' if test['passed'] else 'FAILED'}: {found}")
    return table


def _backends(facts: dict[str, Any]) -> Table:
    """For some problems, the backend that "auto" uses, and the reasons of those that decline."""
    table = plain_table()
    table.add_column("problem", no_wrap=True)
    table.add_column("auto uses", style="bold", no_wrap=True)
    table.add_column("backends that decline it, and why")
    for row in facts["problems_served"]:
        # A missing engine is reported above; here it would be repeated in every row.
        refusals = {b: reason for b, reason in row["refusals"].items() if reason != facts["engine"].get("reason")}
        reasons = "\n".join(f"{backend}: {reason}" for backend, reason in refusals.items())
        table.add_row(row["problem"], row["auto"], Text(reasons))
    return table
