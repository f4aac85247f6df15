"""The command `regard`. Each command has its file, with what it prints; other modules compute what it shows.

To add a command, write its file and add a line below.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import __version__
from . import audit, bench, doctor, inspect, lab, report
from .terminal import guarded_streams, plain_warnings


class _Commands(typer.Typer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with guarded_streams(), plain_warnings():
            return super().__call__(*args, **kwargs)


app = _Commands(
    name="regard",
    help="Attention, declared as a transport problem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("audit")(audit.audit)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("report")(report.report)
app.add_typer(lab.app, name="lab")
