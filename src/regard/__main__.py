"""`python -m regard` runs the command `regard`. Launchers that start a module need it: `torchrun -m regard lab run`."""

from .cli import app

app(prog_name="regard")
