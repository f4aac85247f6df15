"""The facts that `regard doctor` shows, as plain data: what is installed, which backend serves what, a self-test."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._version import __version__
from .backends import BACKENDS
from .backends.native.engine import REMEDY, extension
from .compiled import Unavailable, library
from .operator import attention, select_backend
from .priors import ALiBi, Causal, Window
from .problem import Free, Rows, Transport
from .regularizers import FermiDirac, Tsallis
from .statistics import AuxRequest

_ENGINE_BACKEND = "native"  # the backend that cannot be tested where its compiled engine is missing
_GPU_BACKEND = "triton"  # it has nothing to test on a CPU
_OPENMP = ("libgomp", "libiomp", "libomp")  # GCC's, Intel's, LLVM's


class SettingError(ValueError):
    """An environment variable has an invalid value; the message names it, the value and the valid ones."""


def examine() -> dict[str, Any]:
    """Everything that `regard doctor` shows. `problems` lists what is broken, `notes` what is only worth knowing.

    Raises `SettingError` if REGARD_ISA is invalid.
    """
    facts: dict[str, Any] = {"versions": versions(), "machine": machine(), "engine": engine(), "threads": threads()}
    facts["cache"] = cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing engine is among the notes or the problems
        facts["problems_served"] = problems_served()
    facts["self_test"] = [
        self_test(backend) for backend in _cpu_backends() if backend != _ENGINE_BACKEND or facts["engine"]["loaded"]
    ]
    facts["problems"], facts["notes"] = _problems_and_notes(facts)
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
    """The native engine: its instruction sets and its compiler, or the reason why it is not loaded.

    Raises `SettingError` if REGARD_ISA names no instruction set of this machine.
    """
    try:
        module, reason = extension()
    except ValueError as error:
        raise SettingError(str(error)) from None
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


def cache() -> dict[str, Any]:
    """The cache of compiled functions, and the compiler for new ones."""
    found = library.contents()
    try:
        compiler, missing = library.compiler_version(), None
    except Unavailable as error:
        compiler, missing = None, str(error)
    except (OSError, subprocess.SubprocessError) as error:
        compiler, missing = None, f"the C++ compiler does not run: {error}"
    return {
        "path": None if found.path is None else str(found.path),
        "libraries": found.files,
        "bytes": found.bytes,
        "limit": found.limit,
        "problem": found.problem,
        "compiler": compiler,
        "no_compiler": missing,
    }


def clear_cache() -> int:
    """Delete the compiled functions. Returns how many there were; raises `SettingError` if the cache is not used."""
    try:
        return library.clear()
    except (Unavailable, OSError) as error:
        raise SettingError(str(error)) from None


def threads() -> dict[str, Any]:
    """The number of threads, its limit, and the OpenMP runtimes of this process."""
    return {
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "openmp": openmp_runtimes(),
    }


def openmp_runtimes() -> list[str] | None:
    """The files of the OpenMP runtimes in this process; None if the system does not list them."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if os.path.basename(file).startswith(_OPENMP))


# --- which backend serves what ----------------------------------------------------------------------------------------


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


def _cpu_backends() -> list[str]:
    return [name for name in BACKENDS if name != _GPU_BACKEND]


def problems_served() -> list[dict[str, Any]]:
    """For some problems: the backend that "auto" uses, and the reason of each backend that declines the problem."""
    q = torch.zeros(1, 2, 6, 8)
    rows = []
    for name, arguments in _samples().items():
        refusals = {}
        for backend in _cpu_backends():
            try:
                select_backend(q, q, q, **arguments, backend=backend)
            except NotImplementedError as error:
                refusals[backend] = str(error).partition(": ")[2]
        rows.append({"problem": name, "auto": select_backend(q, q, q, **arguments).backend, "refusals": refusals})
    return rows


# --- self-test --------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-4  # far above rounding in float32, far below the effect of a mistake


def self_test(backend: str) -> dict[str, Any]:
    """Compare output and gradients of a small causal problem in float32 with the definition in float64."""
    inputs = [torch.randn(2, 4, 37, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    in_double = [t.double() for t in inputs]
    try:
        found, truth = _output_and_gradients(inputs, backend), _output_and_gradients(in_double, "torch")
        error = max(float((a - b).abs().nan_to_num(nan=math.inf).max()) for a, b in zip(found, truth, strict=True))
        if error == math.inf:
            raise ArithmeticError("NaN or inf in the result")
    except Exception as problem:  # every failure of a backend is a finding
        return {"backend": backend, "passed": False, "error": None, "raised": f"{type(problem).__name__}: {problem}"}
    return {"backend": backend, "passed": error <= TOLERANCE, "error": error, "raised": None}


def _output_and_gradients(inputs: list[Tensor], backend: str) -> list[Tensor]:
    inputs = [t.clone().requires_grad_() for t in inputs]
    q, k, v = inputs
    out = attention(q, k, v, is_causal=True, backend=backend)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


# --- problems and notes -----------------------------------------------------------------------------------------------


def _problems_and_notes(facts: dict[str, Any]) -> tuple[list[str], list[str]]:
    problems, notes = [], []
    engine, threads, cores = facts["engine"], facts["threads"], facts["machine"]["cores"]
    if not engine["loaded"]:
        (problems if engine["built"] else notes).append(
            f"{engine['reason']}: all problems run on the slower backends. {REMEDY}"
        )
    for test in facts["self_test"]:
        if not test["passed"]:
            what = test["raised"] or f"error {test['error']:.1e}, expected at most {TOLERANCE:.0e}"
            problems.append(f'backend "{test["backend"]}" fails the self-test: {what}')
    runtimes = threads["openmp"] or []
    if len(runtimes) > 1:
        notes.append(
            f"{len(runtimes)} OpenMP runtimes in one process: their threads compete, and small problems become slow. "
            "The cause is often a second copy of a library"
        )
    if engine["loaded"] and engine["threading"] != "openmp":
        notes.append(
            f"the native engine was built without OpenMP (threads: {engine['threading']}): small calls are slower"
        )
    if engine["loaded"]:
        reasons = filter(None, (facts["cache"]["problem"], facts["cache"]["no_compiler"]))
        notes += [f"{reason}: functions of your own run on the slower backends" for reason in reasons]
    if engine["loaded"] and engine["isa"] != engine["isas"][0]:
        notes.append(f"REGARD_ISA={engine['forced']}: this machine could use {engine['isas'][0]}")
    if cores and threads["torch"] > cores:
        notes.append(f"{threads['torch']} threads on {cores} cores: torch.set_num_threads({cores}) is faster")
    return problems, notes
