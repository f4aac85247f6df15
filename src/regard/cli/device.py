"""`regard doctor --device`: the first run of a backend on a device, shown and written to the device's file."""

from __future__ import annotations

import json
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..backends.triton import device_record, launch
from ..device_cases import cases
from ..device_check import Checked, Timed, check, timing_size, timings
from .terminal import existing_device, fail, plain_table, progress_bar


def check_device(name: str, as_json: bool) -> None:
    """Check the backend of a device, time it, and write the file that lets "auto" use it. Exits with status 1 if a case
    failed."""
    device = existing_device({"rocm": "cuda"}.get(name, name))
    if name == "rocm" and torch.version.hip is None:
        fail("--device: expected a device that is there, got 'rocm': this PyTorch was built for CUDA")
    backend, interpreted = _backend(device)
    if backend == "triton" and not launch.installed():
        fail("--device: expected triton to be installed (pip install triton)")
    chosen = list(cases(small=interpreted))
    results: list[Checked] = []
    with progress_bar("cases") as report:
        for case, result in zip(chosen, check(device, backend, chosen), strict=True):
            results.append(result)
            report(case.label, len(results), len(chosen))
    passed = all(result.passed for result in results) and any(result.declined is None for result in results)
    timed: list[Timed] = []
    if passed and not interpreted:
        with progress_bar("timing") as report:
            timed.extend(timings(device, backend, report))
    facts = {
        "backend": backend,
        "passed": passed,
        "interpreted": interpreted,
        "cases": [result.as_dict() for result in results],
        "timings": [entry.as_dict() for entry in timed],
    }
    place = device_record.save(device, facts) if backend == "triton" and not interpreted else None
    if as_json:
        print(json.dumps({"device": device_record.device_name(device)} | facts, indent=2))
    else:
        _show(device, facts, results, timed, Console())
        if place is not None:
            print(f"written: {place}")
    raise typer.Exit(0 if passed else 1)


def _backend(device: torch.device) -> tuple[str, bool]:
    """The backend that is checked on a device, and whether its kernels are interpreted."""
    if device.type == "cuda":
        return "triton", False
    if device.type != "cpu":
        fail(f"--device: expected cpu, cuda, cuda:N or rocm (no backend has kernels for others), got {device.type!r}")
    return ("triton", True) if launch.interpreting() else ("native", False)


def _show(
    device: torch.device, facts: dict[str, Any], results: list[Checked], timed: list[Timed], console: Console
) -> None:
    kind = " (interpreted)" if facts["interpreted"] else ""
    console.print(Text(f'backend "{facts["backend"]}" on {device_record.device_name(device)}{kind}', style="bold"))
    console.print(_failures(results))
    served = [result for result in results if result.declined is None]
    good = sum(result.passed for result in served)
    console.print(
        Text(
            f"{good} of {len(served)} cases right and the same bits twice; {len(results) - len(served)} declined",
            style="green" if facts["passed"] else "bold red",
        )
    )
    if timed:
        tokens, dtype = timing_size(device)
        what = f"{tokens} tokens, 8 heads, causal, {str(dtype).removeprefix('torch.')}; softmax with statistics"
        console.print()
        console.print(Text(what, style="bold"))
        console.print(_times(timed))


def _failures(results: list[Checked]) -> Table:
    """The cases that failed; if all passed, the five that are closest to their limit."""
    table = plain_table()
    for header in ("case", "result", "error", "allowed", ""):
        table.add_column(header, justify="right" if header in ("error", "allowed") else "left")
    failed = [result for result in results if not result.passed]
    served = [result for result in results if result.declined is None]
    closest = sorted(served, key=lambda result: result.error / result.allowed, reverse=True)[:5]
    for result in failed or closest:
        what = result.raised or ("" if result.same_bits else "other bits in the second run")
        row = ("", "", "") if result.raised else (result.result, f"{result.error:.1e}", f"{result.allowed:.1e}")
        table.add_row(result.case, *row, Text(what, style="red"))
    return table


def _times(timed: list[Timed]) -> Table:
    table = plain_table()
    for header in ("case", "against", "regard ms", "its ms", "times as fast", "80 %"):
        left = header in ("case", "against")
        table.add_column(header, justify="left" if left else "right", no_wrap=left)
    for entry in timed:
        if entry.ratio is None or entry.ours_ms is None or entry.theirs_ms is None:
            table.add_row(entry.case, entry.peer, "", "", Text("not timed", style="dim"), Text(entry.note or ""))
            continue
        spread = f"{entry.ratio.low:.2f} to {entry.ratio.high:.2f}"
        numbers = f"{entry.ours_ms.middle:.3g}", f"{entry.theirs_ms.middle:.3g}", f"{entry.ratio.middle:.2f}"
        table.add_row(entry.case, entry.peer, *numbers, spread)
    return table
