"""Try an installed regard: `python tools/smoke.py` in the environment into which its wheel was installed.

    --engine present|absent    whether the native engine must be there, or must be reported as missing
    --compiler present|absent  whether functions of a user must be compiled, or declined with the reason; by default
                               neither is checked

Needs nothing of the source tree. Exits with an error at the first wrong answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]

import regard  # noqa: E402
from regard import AuxRequest, Causal, Transport, Tsallis  # noqa: E402
from regard.backends.native.engine import extension  # noqa: E402
from regard.compiled import library  # noqa: E402
from regard.doctor import openmp_runtimes  # noqa: E402


def expect(fact: object, message: str) -> None:
    """Unlike `assert`, this also checks under `python -O`."""
    if not fact:
        sys.exit(f"smoke test failed: {message}")


def installation() -> None:
    where = Path(regard.__file__).resolve()
    expect(where.is_relative_to(Path(sys.prefix).resolve()), f"regard is imported from {where}, not from {sys.prefix}")
    files = {str(file) for file in importlib.metadata.files("regard") or []}
    for name in ("LICENSE", "NOTICE"):
        expect(any(file.endswith(f"licenses/{name}") for file in files), f"{name} is not installed")
    expect("regard/py.typed" in files, "py.typed is not installed")
    bundled = [file for file in files if ".libs/" in file]
    expect(not bundled, f"the wheel carries other libraries: {bundled}")


def numbers(backend: str) -> None:
    """Output, statistics and gradients of `backend` against the definition in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 4, 70, 16, generator=generator) for _ in range(3)]
    for problem in (None, Transport(Tsallis(1.5), prior=Causal())):
        found = []
        for tensors, how in ((inputs, backend), ([t.double() for t in inputs], "torch")):
            q, k, v = (t.clone().requires_grad_() for t in tensors)
            out, aux = regard.attention(q, k, v, problem=problem, backend=how, return_aux=AuxRequest(entropy=True))
            found.append([out, aux.entropy, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        for mine, truth in zip(*found, strict=True):
            error = float((mine.double() - truth).detach().abs().max())
            expect(error < 1e-4, f"backend {backend!r} is off by {error:.1e} for {problem}")  # NaN fails, too


def engine_is_used() -> None:
    module, reason = extension()
    expect(module is not None, reason)
    q = torch.randn(1, 2, 9, 8)
    expect(regard.select_backend(q, q, q).backend == "native", 'backend="auto" does not use the native engine')
    numbers("native")
    runtimes = openmp_runtimes()
    if runtimes is not None and module.threading() == "openmp":
        inside = Path(torch.__file__).resolve().parents[1]
        expect(len(runtimes) == 1, f"{len(runtimes)} OpenMP runtimes in one process: {runtimes}")
        expect(Path(runtimes[0]).resolve().is_relative_to(inside), f"the OpenMP runtime is not PyTorch's: {runtimes}")


def engine_is_missing() -> None:
    module, reason = extension()
    expect(module is None, "the native engine is there, and was expected to be missing")
    expect("was not built" in reason, f"the reason for the missing engine: {reason}")
    q = torch.randn(1, 2, 9, 8)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        regard.attention(q, q, q)
    expect(any("was not built" in str(w.message) for w in heard), "no warning about the missing engine")
    expect("was not built" in regard.select_backend(q, q, q).reasons["native"], "no reason for the missing engine")
    numbers("torch")


def users_function(compiler: str) -> None:
    """A prior that is a function: compiled against the installed headers, or declined with the reason."""
    headers = library.headers()
    expect(
        headers is not None and headers.is_relative_to(Path(regard.__file__).parent), f"the headers are in {headers}"
    )
    problem = Transport(prior=regard.prior(lambda b, h, i, j: torch.sin(0.3 * (i - j)) - (i - j).abs() * 0.01))
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    choice = regard.select_backend(q, k, v, problem=problem)
    if compiler == "present":
        expect(choice.backend == "native", f"a user's function is not compiled: {choice}")
    else:
        reason = choice.reasons.get("native", "")
        expect(choice.backend != "native", "a user's function was compiled without a compiler")
        expect("no C++ compiler was found" in reason, f"the reason for not compiling a user's function: {reason!r}")
    out = regard.attention(q, k, v, problem=problem)
    truth = regard.attention(q.double(), k.double(), v.double(), problem=problem, backend="torch")
    error = float((out.double() - truth).abs().max())
    expect(error < 1e-4, f"a user's function is off by {error:.1e}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--engine", choices=("present", "absent"), default="present")
    options.add_argument("--compiler", choices=("present", "absent"))
    asked = options.parse_args()
    installation()
    engine_is_used() if asked.engine == "present" else engine_is_missing()
    if asked.compiler:
        users_function(asked.compiler)
    about = f"Python {platform.python_version()}, torch {torch.__version__}"
    module, _ = extension()
    if module is not None:
        about += f", {Path(module.__file__).name} ({module.isa()}, threads: {module.threading()})"
    if asked.compiler:
        about += f", compiler {asked.compiler}"
    print(f"regard {regard.__version__} works: {about}")


if __name__ == "__main__":
    # Functions that were compiled before, by another installation, must not be found.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REGARD_CACHE"] = str(Path(folder) / "cache")
        main()
