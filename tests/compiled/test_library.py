"""The cache of compiled functions: what is loaded, what is built again, what is refused."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import Transport
from regard.compiled import Unavailable, library

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("REGARD_CACHE", str(path))
    monkeypatch.delenv("REGARD_CACHE_MB", raising=False)
    try:
        library.compiler()
    except Unavailable as error:
        pytest.skip(str(error))
    library.forget()
    yield path
    library.forget()


def answer(number=1):
    return library.load(SOURCE % number, "baseline").handle.answer()


def built(monkeypatch):
    """Count how often the compiler runs."""
    calls, plain = [], library._build

    def count(*args):
        calls.append(args)
        return plain(*args)

    monkeypatch.setattr(library, "_build", count)
    return calls


def test_a_library_is_built_once(cache, monkeypatch):
    calls = built(monkeypatch)
    assert answer() == 1 and answer() == 1
    library.forget()
    assert answer() == 1 and len(calls) == 1
    assert answer(2) == 2 and len(calls) == 2
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    names = [path.name for path in cache.iterdir()]
    assert len(names) == 2 and all(name.endswith(".so") for name in names)


def test_the_key_depends_on_everything(cache, monkeypatch):
    calls = built(monkeypatch)
    answer()
    for change in (
        lambda: monkeypatch.setattr(library, "__version__", "9.9"),
        lambda: monkeypatch.setenv("REGARD_CXXFLAGS", "-O1"),
        lambda: monkeypatch.setattr(library, "_headers_hash", lambda: "other"),
        lambda: monkeypatch.setattr(library, "_identity", lambda command: "another compiler"),
    ):
        change()
        library.forget()
        before = len(calls)
        assert answer() == 1 and len(calls) == before + 1


@pytest.mark.parametrize("damage", ["truncated", "poisoned", "empty", "renamed"])
def test_a_damaged_file_is_built_again(damage, cache, monkeypatch):
    calls = built(monkeypatch)
    answer()
    (file,) = cache.iterdir()
    content = file.read_bytes()

    def replace(content):
        """A new file: writing into the one that is loaded would end this process."""
        beside = file.with_suffix(".new")
        beside.write_bytes(content)
        beside.replace(file)

    if damage == "truncated":
        replace(content[: len(content) // 2])
    elif damage == "poisoned":  # one bit of the code
        at = len(content) // 2
        replace(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "empty":
        replace(b"")
    else:  # the library of another source under the name of this one
        answer(2)
        other = next(path for path in cache.iterdir() if path != file)
        other.replace(file)
    before = len(calls)
    library.forget()
    assert answer() == 1 and len(calls) == before + 1
    library.forget()
    assert answer() == 1 and len(calls) == before + 1


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_files_of_others_are_built_again(cache, monkeypatch):
    calls = built(monkeypatch)
    answer()
    (file,) = cache.iterdir()
    file.chmod(0o666)
    library.forget()
    assert answer() == 1 and len(calls) == 2
    (file,) = cache.iterdir()
    elsewhere = cache.parent / "elsewhere.so"
    file.replace(elsewhere)
    file.symlink_to(elsewhere)
    library.forget()
    assert answer() == 1 and len(calls) == 3 and not file.is_symlink()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    library.forget()
    with pytest.raises(Unavailable, match="belongs to another user"):
        answer()


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_directories_that_are_not_trusted(cache, monkeypatch):
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    with pytest.raises(Unavailable, match="can be written by others"):
        answer()
    cache.rmdir()
    (cache.parent / "real").mkdir(mode=0o700)
    cache.symlink_to(cache.parent / "real")
    library.forget()
    with pytest.raises(Unavailable, match="is a symbolic link"):
        answer()
    cache.unlink()
    cache.write_text("a file")
    library.forget()
    with pytest.raises(Unavailable, match="is not a directory"):
        answer()
    monkeypatch.setenv("REGARD_CACHE", "/proc/none/cache")
    with pytest.raises(Unavailable, match="cannot be created"):
        answer()


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_directory_that_others_can_replace_is_not_trusted(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("REGARD_CACHE", str(shared / "below" / "cache"))
    library.forget()
    with pytest.raises(Unavailable, match=f"can be replaced by others, who may write to {shared}"):
        answer()
    shared.chmod(0o1777)  # as /tmp: only the owner renames
    library.forget()
    assert answer() == 1


@pytest.mark.skipif(os.name != "posix", reason="environment")
def test_without_a_home(monkeypatch):
    for name, value in {"REGARD_CACHE": "", "XDG_CACHE_HOME": "relative", "HOME": "here"}.items():
        monkeypatch.setenv(name, value)
    library.forget()
    with pytest.raises(Unavailable, match=r"no home directory.*REGARD_CACHE"):
        answer()
    assert library.contents().path is None and "no home directory" in library.contents().problem
    monkeypatch.setenv("HOME", "/home/somebody")
    assert library.directory() == Path("/home/somebody/.cache/regard")  # a relative XDG_CACHE_HOME does not count


def test_variables_that_no_shell_would_take(cache, monkeypatch):
    monkeypatch.setenv("REGARD_CXXFLAGS", "'")
    with pytest.raises(Unavailable, match="REGARD_CXXFLAGS: expected words"):
        answer()
    monkeypatch.setenv("CXX", '"c++')
    with pytest.raises(Unavailable, match="CXX: expected words"):
        answer()


def test_interrupted_and_endless_compilations(cache, monkeypatch, tmp_path):
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec sleep 100\n")
    endless.chmod(0o755)
    monkeypatch.setenv("CXX", str(endless))
    with monkeypatch.context() as patch:
        patch.setattr(library, "_PATIENCE", 0.3)
        with pytest.raises(Unavailable, match=r"was stopped after 0\.3 s"):
            answer()
    assert list(cache.iterdir()) == []

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    library.forget()
    with monkeypatch.context() as patch:
        patch.setattr(library.subprocess, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            answer()
    assert list(cache.iterdir()) == []
    monkeypatch.delenv("CXX")
    assert answer() == 1  # it is tried again, and the lock is free


def test_the_least_recently_used_files_are_deleted(cache, monkeypatch):
    for number in range(4):
        answer(number)
    size = max(path.stat().st_size for path in cache.iterdir())
    files = {library.load(SOURCE % n, "baseline").path: n for n in range(4)}
    for path, n in files.items():
        os.utime(path, (n + 1, n + 1))
    os.utime(next(path for path, n in files.items() if n == 0))  # 1 is the oldest now
    monkeypatch.setenv("REGARD_CACHE_MB", str(3.5 * size / 2**20))
    answer(5)
    left = {files[path] for path in cache.iterdir() if path in files}
    assert left == {0, 3}
    monkeypatch.setenv("REGARD_CACHE_MB", "many")
    with pytest.raises(Unavailable, match="REGARD_CACHE_MB"):
        answer(6)


def test_compilers_that_fail(cache, monkeypatch, tmp_path):
    with pytest.raises(Unavailable, match=r"failed.*error"):
        library.load("this is no C++", "baseline")
    assert [path for path in cache.iterdir() if path.name.startswith("build-")] == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unavailable, match=r"no C\+\+ compiler was found \(CXX=no-such-compiler\)"):
        answer()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(Unavailable, match="status 3"):
        answer()


PROGRAM = """
import sys, time, torch, regard
prior = regard.prior(lambda b, h, i, j: -0.0625 * (i - j).abs())
q = torch.arange(2 * 3 * 64 * 8).view(2, 3, 64, 8) / 1000
began = time.perf_counter()
out = regard.attention(q, q, q, problem=regard.Transport(prior=prior), backend="native")
print(repr(float(out.double().sum())), time.perf_counter() - began)
"""


def test_two_processes_compile_at_once(cache):
    pytest.importorskip("regard._native")
    environment = os.environ | {"REGARD_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = [process.communicate(timeout=300)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({result[0] for result in results}) == 1
    names = [path.name for path in cache.iterdir()]
    assert len({name.partition("-")[0] for name in names}) == 1 and not any("build" in name for name in names)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert again[0] == results[0][0]


def test_doctor_shows_and_clears_the_cache(cache):
    answer()
    environment = os.environ | {"REGARD_CACHE": str(cache)}

    def run(*arguments):
        command = [sys.executable, "-m", "regard", "doctor", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    facts = json.loads(run("--json"))["cache"]
    assert Path(facts["path"]) == cache and facts["libraries"] == 1 and facts["bytes"] > 0 and facts["compiler"]
    assert run("--clear-cache") == "Deleted 1 compiled functions.\n"
    assert list(cache.iterdir()) == []
    assert json.loads(run("--json"))["cache"]["libraries"] == 0


def test_messages(cache, caplog):
    with caplog.at_level("INFO", logger="regard.compiled"):
        answer()
    assert "compiling a function" in caplog.text and "compiled in" in caplog.text


def test_without_headers(cache, monkeypatch):
    pytest.importorskip("regard._native")
    monkeypatch.setattr(library, "headers", lambda: None)
    x = torch.randn(1, 1, 5, 4)
    problem = Transport(prior=regard.prior(lambda b, h, i, j: -0.03125 * (i - j).abs()))
    choice = regard.select_backend(x, x, x, problem=problem)
    assert choice.backend == "torch" and "headers" in choice.reasons["native"]
