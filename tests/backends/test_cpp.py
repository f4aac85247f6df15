"""The C++ of the native engine: headers that compile alone, and the unit tests of its kernels (tests/cpp)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = sorted(str(path.relative_to(ROOT / "csrc")) for path in (ROOT / "csrc").rglob("*.h"))
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
CMAKE = shutil.which("cmake", path=TOOLS)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")


def run(*command: str, **options) -> str:
    """Run a command and return its output. If it fails, the output is shown."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_compiler
def test_every_header_compiles_alone():
    assert HEADERS
    flags = ["-std=c++17", "-fsyntax-only", "-w", "-I.", "-x", "c++"]
    run(str(COMPILER), *flags, *HEADERS, cwd=ROOT / "csrc", timeout=300)


@needs_compiler
@pytest.mark.skipif(CMAKE is None, reason="there is no CMake here")
def test_kernels():
    """Built in build/kernel_tests, so that a second run rebuilds only changed files, and run on each instruction
    set."""
    build = ROOT / "build" / "kernel_tests"
    options = ["-DREGARD_KERNEL_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    configure = [str(CMAKE), "-S", str(ROOT), "-B", str(build), *options]
    if subprocess.run(configure, capture_output=True).returncode:  # made in another environment: build again
        shutil.rmtree(build)
        run(*configure)
    run(str(CMAKE), "--build", str(build), "--target", "kernel_tests", "-j2")
    programs = sorted(path for path in build.glob("kernel_tests_*") if path.is_file() and os.access(path, os.X_OK))
    assert programs
    for program in programs:
        lines = run(str(program), timeout=300).splitlines()
        assert "skipped" in lines[-1] or all(int(line.split(": ")[1].split()[0]) > 1000 for line in lines), lines
