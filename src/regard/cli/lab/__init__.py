"""`regard lab`: claims about attention, checked by computing and by training."""

from __future__ import annotations

import typer

from . import claims, experiments, teasers

app = typer.Typer(help="Check claims about attention by computing and by training.", no_args_is_help=True)
app.command("claims")(claims.claims)
app.command("teasers")(teasers.teasers)
app.command("list")(experiments.list_experiments)
app.command("run")(experiments.run_experiment)
app.command("report")(experiments.report_experiments)
