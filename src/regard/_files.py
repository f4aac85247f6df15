"""Files that are written as a whole or not at all: beside their place first, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

PROBE = 1 << 16  # bytes that must fit where a file will be written


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside this one, to be written in the block. Afterwards the new file replaces the old one in one step.

    If the block raises or the disk is full, the new file is deleted and the old one stays as it was. The error is an
    OSError with the name of the file. A path that exists and is not a regular file (a pipe, /dev/stdout) is written
    itself.
    """
    with _named(path):
        part = _beside(path)
        if part is None:
            yield Path(path)
            return
        place = part.with_suffix("")
        try:
            yield part
            with part.open("rb") as written:
                os.fsync(written.fileno())  # the content is on disk before the name is, also if the power fails
            if place.exists():
                shutil.copymode(place, part)
            part.replace(place)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def _beside(path: str | os.PathLike[str]) -> Path | None:
    """Where the new content of a file is written first; None if the path is not that of a regular file."""
    place = Path(path)
    if str(place).startswith(("/dev/", "/proc/")) or (place.exists() and not place.is_file()):
        return None
    place = place.resolve() if place.is_symlink() else place
    return place.with_name(place.name + ".part")


@contextlib.contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an OSError of the block name this path: one of `write` names no file, others name the one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file (text as UTF-8). If that fails, an older file of this name stays as it was."""
    with replacing(path) as part, part.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise an OSError if `write` would fail now: no such folder, no permission, no space. Nothing is left behind."""
    with _named(path):
        if Path(path).is_fifo():  # opened only to write: its reader takes the first end for the end of the file
            return
        part = _beside(path)
        if part is None or Path(path).exists():  # a file that may not be written is not replaced either
            with Path(path).open("ab", buffering=0) as file:
                if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
                    file.write(b"\n")  # a device, such as /dev/null or /dev/full
        if part is None:
            return
        try:
            part.write_bytes(bytes(PROBE))
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
