"""What this installation is, and whether it works: the facts behind `regard doctor`, as plain data."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import __version__
from .backends import BACKENDS
from .backends.native.engine import extension
from .operator import attention, select_backend
from .priors import ALiBi, Causal, Window
from .problem import Free, Rows, Transport
from .regularizers import FermiDirac, Tsallis
from .statistics import AuxRequest

_OPENMP = ("libgomp", "libiomp", "libomp")  # GCC's, Intel's, LLVM's


def examine() -> dict[str, Any]:
    """Everything that `regard doctor` shows. `problems` lists what is broken, `notes` what is merely worth knowing."""
    facts: dict[str, Any] = {"versions": versions(), "machine": machine(), "engine": engine(), "threads": threads()}
    facts["problems_served"] = problems_served()
    facts["self_test"] = [
        self_test(backend) for backend in BACKENDS if backend != "native" or facts["engine"]["loaded"]
    ]
    facts["problems"], facts["notes"] = _verdict(facts)
    return facts


def versions() -> dict[str, str]:
    found = {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("transformers",):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.system(), "architecture": platform.machine(), "cpu": _cpu(), "cores": cores}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def engine() -> dict[str, Any]:
    """The native engine: loaded or why not, its instruction sets, its compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is missing is said below
        module, reason = extension()
    facts: dict[str, Any] = {"loaded": module is not None, "forced": os.environ.get("REGARD_ISA") or None}
    if module is None:
        return facts | {"reason": reason, "built": "not built" not in reason}
    return facts | {
        "isa": module.isa(),
        "isas": module.isas(),
        "compiler": module.compiler(),
        "threading": module.threading(),
        "file": module.__file__,
    }


def threads() -> dict[str, Any]:
    """Threads, and the OpenMP runtimes in this process, by file (None where they cannot be listed)."""
    return {
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "openmp": openmp_runtimes(),
    }


def openmp_runtimes() -> list[str] | None:
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if os.path.basename(file).startswith(_OPENMP))


# --- who serves what --------------------------------------------------------------------------------------------------


def _samples() -> dict[str, dict[str, Any]]:
    slopes = torch.tensor([0.5, 0.25])
    return {
        "softmax": {},
        "softmax with statistics": {"return_aux": AuxRequest(lse=True, entropy=True)},
        "causal, ALiBi": {"problem": Transport(prior=Causal() * ALiBi(slopes))},
        "sliding window": {"problem": Transport(prior=Causal() * Window(2))},
        "dropout": {"dropout_p": 0.1},
        "sink": {"problem": Transport(marginal=Rows(sink=0.0))},
        "entmax": {"problem": Transport(Tsallis(1.5))},
        "sparsemax": {"problem": Transport(Tsallis(2.0))},
        "sigmoid": {"problem": Transport(FermiDirac(), marginal=Free(-math.log(6)))},
        "soft top-2": {"problem": Transport(FermiDirac(), marginal=Rows(mass=2.0))},
        "temperature 0": {"problem": Transport(temperature=0.0)},
    }


def problems_served() -> list[dict[str, Any]]:
    """For some problems: what "auto" takes, and why each backend that cannot serve cannot."""
    q = torch.zeros(1, 2, 6, 8)
    rows = []
    for name, arguments in _samples().items():
        refusals = {}
        for backend in BACKENDS:
            try:
                select_backend(q, q, q, **arguments, backend=backend)
            except NotImplementedError as error:
                refusals[backend] = str(error).partition(": ")[2]
        rows.append({"problem": name, "auto": select_backend(q, q, q, **arguments).backend, "refusals": refusals})
    return rows


# --- does it compute? -------------------------------------------------------------------------------------------------

TOLERANCE = 1e-4  # far above rounding in float32, far below a mistake


def self_test(backend: str) -> dict[str, Any]:
    """Output and gradients of a small causal problem in float32, against the definition in float64."""
    inputs = [torch.randn(2, 4, 37, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    try:
        found, truth = _run(inputs, backend), _run([t.double() for t in inputs], "torch")
        error = max(float((a - b).abs().nan_to_num(nan=math.inf).max()) for a, b in zip(found, truth, strict=True))
        if error == math.inf:
            raise ArithmeticError("NaN or inf in the result")
    except Exception as problem:  # whatever it is, it is what the doctor was called for
        return {"backend": backend, "passed": False, "error": None, "raised": f"{type(problem).__name__}: {problem}"}
    return {"backend": backend, "passed": error <= TOLERANCE, "error": error, "raised": None}


def _run(inputs: list[Tensor], backend: str) -> list[Tensor]:
    inputs = [t.clone().requires_grad_() for t in inputs]
    q, k, v = inputs
    out = attention(q, k, v, is_causal=True, backend=backend)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


# --- the verdict ------------------------------------------------------------------------------------------------------


def _verdict(facts: dict[str, Any]) -> tuple[list[str], list[str]]:
    problems, notes = [], []
    engine, threads, cores = facts["engine"], facts["threads"], facts["machine"]["cores"]
    if not engine["loaded"]:
        (problems if engine["built"] else notes).append(f"{engine['reason']}: everything runs, on the slower backends")
    for test in facts["self_test"]:
        if not test["passed"]:
            what = test["raised"] or f"error {test['error']:.1e}, expected at most {TOLERANCE:.0e}"
            problems.append(f'backend "{test["backend"]}" fails the self-test: {what}')
    runtimes = threads["openmp"] or []
    if len(runtimes) > 1:
        notes.append(
            f"{len(runtimes)} OpenMP runtimes in one process: their threads get in each other's way, and small "
            "problems become slow. Often a second copy of a library brings one"
        )
    if engine["loaded"] and engine["threading"] != "openmp":
        notes.append(
            f"the native engine was built without OpenMP (threads: {engine['threading']}): small calls are slower"
        )
    if engine["loaded"] and engine["isa"] != engine["isas"][0]:
        notes.append(f"REGARD_ISA={engine['forced']}: this machine could use {engine['isas'][0]}")
    if cores and threads["torch"] > cores:
        notes.append(f"{threads['torch']} threads on {cores} cores: torch.set_num_threads({cores}) is faster")
    return problems, notes
