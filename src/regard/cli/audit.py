"""`regard audit`: audits a function or a model, and shows the findings."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from .. import hf
from ..auditing import Audit
from ..auditing import audit as audit_function
from ..expressions import read_problem
from .terminal import check_outputs, existing_device, fail, progress_bar, write_outputs

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def audit(
    target: Annotated[
        str,
        typer.Argument(help="A function as package.module:function, or a model: a folder, a .gguf file, a name."),
    ],
    problem: Annotated[
        str | None,
        typer.Option(help="What the function computes, as in 'Transport(prior=Causal())', or as JSON.", metavar="TEXT"),
    ] = None,
    convention: Annotated[
        str, typer.Option(help="How the function is called: sdpa, flex, varlen or transformers.")
    ] = "sdpa",
    softcap: Annotated[float | None, typer.Option(help="The softcap that the function applies.")] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="An attention implementation of the model; repeatable. Default: sdpa and eager."),
    ] = None,
    device: Annotated[str, typer.Option(help="The device of the inputs, or of the model.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = None,
    gradients: Annotated[bool, typer.Option(help="Compare gradients, too.")] = True,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    allow: Annotated[
        list[str] | None, typer.Option(help="The name of a finding that is known and does not count; repeatable.")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the result to this path.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False,
) -> None:
    """Compare an attention with its definition in float64, and say which mistake explains a difference.

    Exits with status 1 if it failed, and with 2 if it could not run.
    """
    console = Console()
    check_outputs({"--json": as_json}, {"target": target})
    if dtype is not None and dtype not in DTYPES:
        fail(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    place = existing_device(device)
    is_function = ":" in target and not Path(target).exists()
    wrong = ("--implementation", implementation) if is_function else ("--problem", problem)
    if wrong[1]:
        kind = "a model" if is_function else "a function, package.module:function,"
        fail(f"{wrong[0]}: expected {kind} for this option, got {target!r}")
    try:
        with progress_bar("audit") as report:
            if is_function:
                found = audit_function(
                    _imported(target),
                    None if problem is None else read_problem(problem),
                    convention=convention,
                    softcap=softcap,
                    device=place,
                    dtype=None if dtype is None else DTYPES[dtype],
                    gradients=gradients,
                    seed=seed,
                    allow=tuple(allow or ()),
                    progress=report,
                )
            else:
                found = _of_model(
                    target, implementation, place, dtype, seed, tuple(allow or ()), trust_remote_code, report
                )
    except (ValueError, TypeError) as error:
        fail(error)
    show(found, console)
    write_outputs({"--json": (as_json, lambda: found.to_json() + "\n", "result")}, console)
    raise typer.Exit(0 if found.passed else 1)


def show(found: Audit, console: Console) -> None:
    """The findings, and below them what was refused, each message once."""
    console.print(found)
    if not found.refusals:
        return
    console.print()
    by_message: dict[str, list[str]] = {}
    for refusal in found.refusals:
        by_message.setdefault(refusal.message, []).append(refusal.case)
    console.print(Text("refused (these cases are not errors)", style="bold"))
    for message, cases in by_message.items():
        more = f" and {len(cases) - 2} more" if len(cases) > 2 else ""
        console.print(Text.assemble(("  " + ", ".join(cases[:2]) + more, "dim"), f": {message}"))


def _imported(target: str) -> Callable[..., Any]:
    """The function of package.module:function. Modules of the current folder are found, too."""
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # the module runs, and may raise anything
        raise ValueError(f"target: {module!r} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"target: expected a function of {module}, got {name!r}, which it does not have")
        found = getattr(found, part)
    return found


def _of_model(
    target: str,
    implementations: list[str] | None,
    device: torch.device,
    dtype: str | None,
    seed: int,
    allow: tuple[str, ...],
    trust_remote_code: bool,
    report: Callable[[str, int, int], None],
) -> Audit:
    kind = DTYPES[dtype] if dtype is not None else torch.float32
    if hf.has_weights(target):
        model, _ = hf.load(target, dtype=kind, trust_remote_code=trust_remote_code)
    else:
        model = hf.small_model(hf.load_configuration(target), seed).to(kind)
    return hf.audit(
        model.to(device), tuple(implementations or ("sdpa", "eager")), seed=seed, allow=allow, progress=report
    )
