"""Files are written as a whole or not at all."""

import os
import stat
import threading

import pytest

from regard import _files
from regard._files import check_writable, replacing, write


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "page.html"
    write(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    with replacing(path) as part:
        part.write_bytes(b"new")
        assert path.read_text("utf-8") == "é\n"
    write(str(path), b"newer")
    assert path.read_bytes() == b"newer" and os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_write_that_fails_leaves_nothing_behind(tmp_path, error):
    path = tmp_path / "page.html"
    for before in (None, b"old"):
        if before is not None:
            path.write_bytes(before)
        with pytest.raises(type(error)) as raised, replacing(path) as part:  # noqa: PT012
            part.write_bytes(b"half of the new")
            raise error
        if isinstance(error, OSError):
            assert raised.value.filename == str(path) and raised.value.strerror == "No space left on device"
        assert os.listdir(tmp_path) == ([] if before is None else ["page.html"])
        assert before is None or path.read_bytes() == before


def test_the_mode_of_a_file_and_a_link_to_it_are_kept(tmp_path):
    path, link = tmp_path / "private", tmp_path / "folder" / "link"
    link.parent.mkdir()
    write(path, "old")
    path.chmod(0o600)
    link.symlink_to(path)
    check_writable(link)
    write(link, "new")
    assert link.is_symlink() and path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(link.parent) == ["link"]


def test_a_pipe_is_written_itself(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write(pipe, "through")
    reader.join()
    assert found == [b"through"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_check_of_a_pipe_opens_nothing(tmp_path):
    """Opened only to be checked, the pipe would end for its reader; without a reader, opening waits."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check = threading.Thread(target=check_writable, args=(pipe,), daemon=True)
    check.start()
    check.join(timeout=3)
    waits = check.is_alive()
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # ends the thread if it waits
    assert not waits


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_devices_are_written_themselves():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write("/dev/full", "text")
    write("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_cannot_be_written_is_known_before(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")
    for bad in (tmp_path / "no" / "page.html", path / "below", "/proc/page.html", tmp_path):
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the subclass depends on the reason
            check_writable(bad)
        assert raised.value.filename == str(bad)
    check_writable(path)
    check_writable(tmp_path / "other")
    check_writable("/dev/null")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]
    monkeypatch.setattr(_files.Path, "write_bytes", lambda self, content: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        check_writable(path)
    assert os.listdir(tmp_path) == ["page.html"]


def test_no_module_writes_files_in_another_way():
    """Except for lines that are appended, and files that only the project's own tools write."""
    source = _files.Path(_files.__file__).parent
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if any(word in line for word in (".write_text(", ".write_bytes(", "save_file(", 'open("w', "os.replace("))
    }
    # cluster, library: into a temporary folder; the library renames what it compiled
    own = {"_files.py", "compiled/library.py", "lab/design_space.py", "lab/cluster.py"}
    assert found == own
