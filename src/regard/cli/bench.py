"""`regard bench`: how fast regard is on this machine, beside PyTorch's own attention."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..doctor import machine, versions
from ..speed import CASES, Measured, Size, measure
from ..timing import Spread
from .terminal import fail, plain_table

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bench(
    tokens: Annotated[int, typer.Option(min=1, help="Queries and keys.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(_DTYPES)}.")] = "float32",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each case.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Compare regard with PyTorch's scaled_dot_product_attention on this machine.

    Each case is checked against float64 before it is timed; then both take turns. PyTorch computes softmax in every
    case. regard also computes statistics of the weights (lse, entropy, maximum, variance) where it computes softmax.
    Exits with status 1 if a result is wrong. The repository's `make bench` has more cases and peers.
    """
    if dtype not in _DTYPES:
        fail(f"--dtype: expected one of {', '.join(_DTYPES)}, got {dtype}")
    size = Size(tokens, heads, head_dim, _DTYPES[dtype])
    console, results = Console(stderr=as_json), []
    with console.status("") as status:
        cases = measure(size, seconds)
        for case in CASES:
            status.update(f"measuring {case.name}")
            results.append(next(cases))
    about = {"versions": versions(), "machine": machine(), "threads": torch.get_num_threads()}
    if as_json:
        shape = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
        print(json.dumps(about | shape | {"cases": [_as_dict(result) for result in results]}, indent=2))
    else:
        console.print(_table(results))
        console.print()
        shape = f"{heads} heads of {head_dim}, {tokens:,} tokens, {dtype}"
        console.print(
            Text(f"{about['machine']['cpu']}, {about['threads']} threads, PyTorch {torch.__version__}; {shape}.")
        )
        console.print("ratio: how many times as fast as PyTorch. Medians, and the middle 80 % of the rounds.")
    raise typer.Exit(0 if all(result.right for result in results) else 1)


def _table(results: list[Measured]) -> Table:
    table = plain_table()
    table.add_column("case", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for header in ("regard ms", "torch ms", "ratio"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("80 %", justify="right", min_width=12)
    for result in results:
        if result.regard_ms is None or result.torch_ms is None or result.ratio is None:
            wrong = f"WRONG: error {result.error:.1e}, allowed {result.allowed:.1e}"
            table.add_row(result.name, result.backend, "", "", "", Text(wrong, style="bold red"))
            continue
        middles = (spread.middle for spread in (result.regard_ms, result.torch_ms, result.ratio))
        interval = f"{_digits(result.ratio.low)} to {_digits(result.ratio.high)}"
        table.add_row(result.name, result.backend, *map(_digits, middles), interval)
    return table


def _digits(number: float) -> str:
    """Three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _as_dict(result: Measured) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return dataclasses.asdict(value) if isinstance(value, Spread) else value

    found = {field.name: plain(getattr(result, field.name)) for field in dataclasses.fields(result)}
    return found | {"right": result.right}
