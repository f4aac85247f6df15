"""Compiling C++ text with the machine's compiler, and the cache of the libraries that result.

A library is loaded into this process, so the cache is trusted like the installed package: it is one directory of the
user (mode 0700) that no other user may write to and that is not a symbolic link. The name of a file is its key (a hash
of source, headers, flags, instruction set, compiler and version) and the checksum of its content. A file whose content
does not match its name, or that belongs to another user, is deleted and built again. Files are written beside their
place and renamed, so several processes may compile the same source at once. The least recently used files are deleted
when the cache is larger than its limit. SECURITY.md describes what this protects from.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .._version import __version__

logger = logging.getLogger("regard.compiled")

LIMIT_MB = 256  # the size of the cache, unless REGARD_CACHE_MB gives another
_SUFFIX = ".so"
_PATIENCE = 300  # seconds after which the compiler is stopped
_STALE = 3600  # seconds after which a directory of an interrupted compilation is deleted
_FLAGS = (
    *("-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),  # as the engine (CMakeLists.txt)
    "-fwrapv",  # PyTorch's integers wrap around
)
_ISA_FLAGS = {
    "baseline": (),
    "x86_64_v3": ("-march=x86-64-v3",),
    "x86_64_v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86_64_v4_bf16": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "aarch64_bf16": (),
}


class Unavailable(Exception):
    """Nothing can be compiled or loaded. The message is the reason."""


class Library(NamedTuple):
    """A loaded library."""

    path: Path
    handle: ctypes.CDLL

    def address(self, name: str) -> int:
        """The address of a function."""
        return ctypes.cast(getattr(self.handle, name), ctypes.c_void_p).value or 0


class Contents(NamedTuple):
    """What `regard doctor` reports about the cache."""

    path: Path | None
    files: int
    bytes: int
    limit: int
    problem: str | None  # why it is not used


# --- the compiler -----------------------------------------------------------------------------------------------------


def compiler() -> list[str]:
    """The command of the C++ compiler: CXX, else c++, g++ or clang++. Raises Unavailable without one."""
    chosen = os.environ.get("CXX")
    command = _words("CXX")
    for name in command[:1] or ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path, *command[1:]]
    searched = f"CXX={chosen}" if chosen else "c++, g++ or clang++"
    raise Unavailable(f"no C++ compiler was found ({searched}); install one, or name it by CXX")


def _words(variable: str) -> list[str]:
    """The words of an environment variable, as a shell splits them."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Unavailable(f"{variable}: expected words as in a shell, got {text!r} ({error})") from None


def compiler_version() -> str:
    """The first line that the compiler prints about itself, for people."""
    command = compiler()
    found = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return f"{command[0]}: {(found.stdout or found.stderr).splitlines()[0] if found.stdout or found.stderr else '?'}"


def _identity(command: list[str]) -> str:
    """Changes when another compiler is installed. (Asking for its version would take longer than loading a library.)"""
    real = os.path.realpath(command[0])
    about = os.stat(real)
    return f"{real} {about.st_size} {about.st_mtime_ns} {command[1:]}"


@cache
def headers() -> Path | None:
    """The directory of the engine's headers: in the installed package, or in the source tree."""
    package = Path(__file__).parents[1]
    for place in (package / "csrc", package.parents[1] / "csrc"):
        if (place / "engine" / "functions.h").is_file():
            return place
    return None


@cache
def _headers_hash() -> str:
    place = headers()
    assert place is not None
    total = hashlib.sha256()
    for path in sorted(place.rglob("*.h")):
        total.update(str(path.relative_to(place)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


# --- the directory ----------------------------------------------------------------------------------------------------


def directory() -> Path:
    """REGARD_CACHE, else regard below XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # such a value is to be ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            base = Path()
    if not base.is_absolute():  # below the current directory anybody may have put files
        raise Unavailable("there is no home directory for the cache; name a directory by REGARD_CACHE")
    return base / "regard"


def limit() -> int:
    """The size of the cache in bytes."""
    text = os.environ.get("REGARD_CACHE_MB") or str(LIMIT_MB)
    try:
        megabytes = float(text)
        if not 0 <= megabytes < 2**40:
            raise ValueError
    except ValueError:
        raise Unavailable(f"REGARD_CACHE_MB: expected a number of megabytes, got {text!r}") from None
    return int(megabytes * 2**20)


def checked(path: Path, create: bool = True) -> Path:
    """The directory, if libraries may be loaded from it. Raises Unavailable with the reason."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        about = path.lstat()
    except OSError as error:
        raise Unavailable(
            f"the cache {path} cannot be created ({error.strerror}); name another by REGARD_CACHE"
        ) from None
    problem = None
    if stat.S_ISLNK(about.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISDIR(about.st_mode):
        problem = "is not a directory"
    elif os.name == "posix" and about.st_uid != os.geteuid():
        problem = "belongs to another user"
    elif os.name == "posix" and about.st_mode & 0o022:
        problem = "can be written by others (chmod go-w)"
    elif os.name == "posix" and (above := _replaceable(path)):
        problem = f"can be replaced by others, who may write to {above}"
    if problem:
        raise Unavailable(f"the cache {path} {problem}, so no code is loaded from it; name another by REGARD_CACHE")
    return path


def _replaceable(path: Path) -> Path | None:
    """A directory above in which anybody may rename what belongs to others."""
    for above in path.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return above
    return None


def _entries(path: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            yield from (entry for entry in found if entry.name.endswith(_SUFFIX) and len(entry.name) > 64)
    except OSError:
        return


def contents() -> Contents:
    """What is in the cache."""
    path, problem, sizes, most = None, None, [], 0
    try:
        path = directory()
        most = limit()
        checked(path, create=False)
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in _entries(path)]
    except Unavailable as error:
        problem = str(error) if path is None or path.exists() or path.is_symlink() else None
    return Contents(path, len(sizes), sum(sizes), most, problem)


def clear() -> int:
    """Delete every file of the cache. Returns how many libraries there were."""
    path = directory()
    if not path.exists() and not path.is_symlink():
        return 0
    checked(path, create=False)
    deleted = 0
    for entry in list(_entries(path)):
        os.unlink(entry.path)
        deleted += 1
    _sweep(path, 0)
    return deleted


def _sweep(path: Path, older: float) -> None:
    """Delete the directories of compilations that were interrupted."""
    for part in path.glob("build-*"):
        try:
            if time.time() - part.lstat().st_mtime >= older:
                shutil.rmtree(part)
        except OSError:
            continue


def _evict(path: Path, keep: str) -> None:
    """Delete the least recently used libraries until the cache fits its limit."""
    found = []
    for entry in _entries(path):
        try:
            about = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        found.append((about.st_mtime_ns, about.st_size, entry))
    total, most = sum(size for _, size, _ in found), limit()
    for _, size, entry in sorted(found, key=lambda item: item[0]):
        if total <= most:
            return
        if entry.name != keep:
            try:
                os.unlink(entry.path)
            except OSError:
                continue
            total -= size


# --- building and loading ---------------------------------------------------------------------------------------------

_lock = threading.Lock()
_loaded: dict[tuple[str, str, str], Library | str] = {}


def load(source: str, isa: str) -> Library:
    """The library of a source text, for the engine of this instruction set. Compiles it unless it is in the cache.
    Raises Unavailable with the reason; then it is not tried again in this process."""
    at = (source, isa, os.environ.get("CXX", "") + "\0" + os.environ.get("PATH", "") + "\0" + str(directory()))
    with _lock:
        if at not in _loaded:
            try:
                _loaded[at] = _load(source, isa)
            except Unavailable as error:
                _loaded[at] = str(error)
        found = _loaded[at]
    if isinstance(found, str):
        raise Unavailable(found)
    return found


def forget() -> None:
    """Load or build every library again at its next use. For tests."""
    with _lock:
        _loaded.clear()


def _load(source: str, isa: str) -> Library:
    place = headers()
    if place is None:
        raise Unavailable("the headers of the engine (csrc/) are not installed with regard")
    path = checked(directory())
    command = compiler()
    flags = [*_FLAGS, *_ISA_FLAGS[isa], *_words("REGARD_CXXFLAGS")]
    parts = (source, _headers_hash(), repr(flags), isa, _identity(command), __version__)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    for entry in list(_entries(path)):
        if entry.name.startswith(f"{key}-"):
            if _intact(Path(entry.path)):
                os.utime(entry.path)
                return _open(Path(entry.path))
            logger.warning("%s does not match its checksum or its owner: it is built again", entry.path)
            os.unlink(entry.path)
    return _open(_build(source, key, path, [*command, *flags, f"-I{place}"]))


def _intact(path: Path) -> bool:
    """Whether a file is the user's own, and its content has the checksum in its name."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        return False
    if os.name == "posix" and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
        return False
    return path.name == _name(path.name.partition("-")[0], path.read_bytes())


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()}{_SUFFIX}"


def _build(source: str, key: str, path: Path, command: list[str]) -> Path:
    logger.info("compiling a function for the native engine (once; kept in %s)", path)
    began = time.perf_counter()
    try:
        _sweep(path, _STALE)
        part = Path(tempfile.mkdtemp(prefix="build-", dir=path))  # mode 0700
        try:
            (part / "function.cpp").write_text(source, "utf-8")
            made = part / f"function{_SUFFIX}"
            call = [*command, "-o", str(made), str(part / "function.cpp")]
            try:
                done = subprocess.run(
                    call, capture_output=True, text=True, errors="replace", check=False, timeout=_PATIENCE
                )
            except subprocess.TimeoutExpired:
                raise Unavailable(f"the C++ compiler {command[0]} was stopped after {_PATIENCE} s") from None
            except OSError as error:
                raise Unavailable(f"the C++ compiler {command[0]} does not run: {error}") from None
            if done.returncode or not made.is_file():
                lines = [*filter(lambda line: "error" in line, done.stderr.splitlines()), *done.stderr.splitlines(), ""]
                raise Unavailable(f"the C++ compiler {command[0]} failed (status {done.returncode}): {lines[0]}")
            made.chmod(0o700)
            final = path / _name(key, made.read_bytes())
            made.replace(final)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        _evict(path, final.name)
    except OSError as error:
        raise Unavailable(f"the cache {path} cannot be written: {error.strerror or error}") from None
    logger.info("compiled in %.1f s", time.perf_counter() - began)
    return final


def _open(path: Path) -> Library:
    try:
        return Library(path, ctypes.CDLL(str(path)))
    except OSError as error:
        raise Unavailable(f"{path} does not load: {error}") from None
