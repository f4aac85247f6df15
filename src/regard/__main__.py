"""`python -m regard` is the command `regard`: for launchers that start modules, as `torchrun -m regard lab run ...`."""

from .cli import app

app(prog_name="regard")
