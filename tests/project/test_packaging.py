"""`import regard` is fast and loads no heavy packages, and the package's metadata is consistent."""

import ast
import builtins
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import build_wheels as wheels
import regard
from requirements import pins, requirements
from support.programs import fresh

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ("transformers", "triton", "matplotlib", "plotly", "pandas", "IPython", "torch._dynamo", "torch._inductor")


def test_import_adds_under_100_ms_to_torch():
    # Processor time, so that other work on the machine does not matter. Without the garbage collector: whether it
    # starts during an import depends on what was allocated before, and it walks through all of PyTorch's objects.
    code = "import gc, time, torch; gc.disable(); began = time.process_time(); import regard"
    code += "; print(time.process_time() - began)"
    seconds = []
    for _ in range(5):  # the first run may have to compile bytecode
        seconds.append(float(fresh(code)))
        if seconds[-1] < 0.1:
            return
    pytest.fail(f"import regard took {seconds} s")


def test_import_loads_no_heavy_packages():
    code = "import sys, torch; before = set(sys.modules); import regard; print(*(set(sys.modules) - before))"
    loaded = fresh(code).split()
    assert "regard.operator" in loaded
    assert [m for m in loaded if m.startswith(HEAVY)] == []
    foreign = {m.partition(".")[0] for m in loaded} - {"regard", "torch"} - sys.stdlib_module_names
    assert foreign == set()  # only the command `regard` imports typer and rich


def test_packages_load_when_first_used():
    code = "import regard; print(*(getattr(regard, name).__name__ for name in {names}))"
    names = ("auditing", "estimation", "features", "geometry", "hf", "inspection", "lab", "nn", "testing")
    assert fresh(code.format(names=names)).split() == [f"regard.{name}" for name in names]


def test_public_names_exist_once():
    assert len(set(regard.__all__)) == len(regard.__all__)
    assert all(hasattr(regard, name) for name in regard.__all__)
    modules = {path.stem for path in (ROOT / "src" / "regard").iterdir()}
    assert not modules & set(regard.__all__)  # a module would hide a function of the same name


def test_the_lock_pins_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(r for e in extras for r in e),
    ]
    lock = (ROOT / "constraints.txt").read_text()
    pinned = {name.lower().replace("_", "-") for name in re.findall(r"^([\w.-]+)==[\w.]+$", lock, re.MULTILINE)}
    for requirement in requirements:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert name[0].lower() in pinned, requirement
    assert "+" not in lock  # a local version (such as +cpu of torch) is not on every index


# --- versions ---------------------------------------------------------------------------------------------------------


def version_of(text: str) -> tuple[int, ...]:
    numbers = [int(n) for n in text.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def test_the_oldest_pins_are_the_bounds_of_pyproject():
    bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", r).groups() for r in requirements("hf", "lab"))
    pinned = pins("constraints-oldest.txt")
    assert bounds and {name: version_of(pinned[name]) for name in bounds} == {
        n: version_of(v) for n, v in bounds.items()
    }
    newest = pins("constraints.txt")
    assert all(version_of(pinned[name]) < version_of(newest[name]) for name in bounds)
    assert f"`torch>={bounds['torch']}`" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(f"{name} {pinned[name]}" in page for name in ("torch", "transformers"))
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert python == ">=3.11" and "Python 3.11" in page


def test_no_union_of_types_where_pytorch_2_8_may_trace():
    """Dynamo of PyTorch 2.8 cannot trace an expression such as `isinstance(x, A | B)`."""
    assert list(unions_of_types("def f(x):\n    return isinstance(x, int | None)\n"))
    assert not list(unions_of_types("Alias = int | None\ndef f(x: int | None) -> int | str:\n    return x | 1\n"))
    never_traced = ("auditing", "cli", "compiled", "inspection", "lab", "_display", "expressions", "serialization")
    found = []
    for path in sorted((ROOT / "src" / "regard").rglob("*.py")):
        part = path.relative_to(ROOT / "src" / "regard").parts[0].removesuffix(".py")
        if part not in never_traced:
            found += [f"{path.name}:{line}" for line in unions_of_types(path.read_text())]
    assert found == []


def unions_of_types(code: str) -> Iterator[int]:
    """Lines on which a function evaluates a union of types."""
    for function in ast.walk(ast.parse(code)):
        if isinstance(function, ast.FunctionDef | ast.Lambda):
            body = function.body if isinstance(function.body, list) else [function.body]
            for node in (n for statement in body for n in _evaluated(statement)):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                    right = ast.unparse(node.right)
                    if right == "None" or right in vars(builtins) or re.fullmatch(r"(\w+\.)*[A-Z]\w*[a-z]\w*", right):
                        yield node.lineno


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that run: not annotations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _evaluated(child)


# --- wheels -----------------------------------------------------------------------------------------------------------


def archive(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name), content)
    return path


def test_two_builds_that_differ_are_noticed(tmp_path, capsys):
    files = {"regard/a.py": b"1", "regard/b.py": b"2"}
    first = archive(tmp_path / "1" / "regard.whl", files)
    wheels.same(first, archive(tmp_path / "2" / "regard.whl", files))
    assert "twice the same" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"two builds differ: .*\['regard/b.py'\]"):
        wheels.same(first, archive(tmp_path / "3" / "regard.whl", files | {"regard/b.py": b"3"}))
    with pytest.raises(SystemExit, match="two builds differ"):
        wheels.same(first, archive(tmp_path / "2" / "other.whl", files))


def test_a_wrong_wheel_is_noticed(tmp_path):
    headers = [f"regard/csrc/{path.relative_to(ROOT / 'csrc')}" for path in (ROOT / "csrc").rglob("*.h")]
    modules = [str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")]
    about = [f"regard-1.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")]
    library = "regard/_native.abi3.so"
    files = dict.fromkeys([*headers, *modules, *about, library, "regard/py.typed"], b"")
    name = "regard-1-cp312-abi3-linux.whl"
    wheels.check_wheel(archive(tmp_path / "good" / name, files))
    for lacking, message in ((headers[0], "lacks"), (about[1], "lacks NOTICE"), (library, "one library")):
        rest = {name: content for name, content in files.items() if name != lacking}
        with pytest.raises(SystemExit, match=message):
            wheels.check_wheel(archive(tmp_path / "lacking" / name, rest))
    for more in ("regard.libs/libgomp.so", "tests/test_a.py", "regard/csrc/kernel.cpp"):
        with pytest.raises(SystemExit, match=more if "libs" not in more else "one library"):
            wheels.check_wheel(archive(tmp_path / "more" / name, files | {more: b""}))
    with pytest.raises(SystemExit, match="one library"):  # not of the stable ABI
        wheels.check_wheel(archive(tmp_path / "named" / "regard-1-cp311-cp311-linux.whl", files))
    with pytest.raises(SystemExit, match="more than"):
        wheels.check_wheel(archive(tmp_path / "large" / name, files | {"regard/data": bytes(10**7)}))


def test_the_release_workflow_says_what_it_is():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert "NEVER RUN" in text.partition("name:")[0]
    jobs = workflow["jobs"]
    assert {job for job in jobs if jobs[job].get("permissions", {}).get("id-token")} == {"publish"}
    assert "windows" not in jobs["publish"]["needs"] and jobs["windows"]["continue-on-error"]
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-*" for version in wheels.BUILD_FOR]


def test_no_large_file_is_in_the_source():
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git repository")
    sizes = {name: (ROOT / name).stat().st_size for name in tracked.stdout.split("\0") if (ROOT / name).is_file()}
    assert sizes and {name: size for name, size in sizes.items() if size > 300_000} == {}
