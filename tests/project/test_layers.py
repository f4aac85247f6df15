"""The structure of the source, read from its syntax trees: layers, private names, file sizes.

docs/architecture.md describes the layers. A module may import from its own layer and from those below it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "regard"
LONGEST = 600  # lines of a file

# From the lowest layer to the highest. A name is a module or a package with all of its modules.
LAYERS = (
    ("_compat", "_dropout", "_files", "_version", "timing"),
    ("_validate",),
    ("_display", "_pytree"),
    ("serialization",),
    ("compiled", "convex", "agreement", "tiles"),
    ("regularizers", "priors"),
    ("structured", "regions", "function_priors"),
    ("problem",),
    ("arguments", "expressions", "form"),
    ("statistics",),
    ("counting", "causality", "similarities", "lowering"),
    ("backends",),
    ("autograd", "acceleration"),
    ("solvers",),
    ("dispatch",),
    ("compile_break",),
    ("operator",),
    ("plan", "features"),
    ("geometry", "estimation"),
    ("auditing",),
    ("testing",),
    ("nn",),
    ("hf",),
    ("inspection",),
    ("",),  # regard/__init__.py: the public names
    ("device_cases",),
    ("doctor", "speed", "device_check"),
    ("lab",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Imports of regard inside of functions: what loads something heavy, on purpose. (importer, imported): reason
LAZY = {
    ("operator", "compile_break"): "needs Dynamo, which takes seconds to load",
}


def modules() -> dict[str, Path]:
    """Dotted names below regard ("" is regard itself) and their files."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def layer(module: str) -> int:
    return RANK[module.partition(".")[0]]


def resolve(importer: str, node: ast.ImportFrom) -> str | None:
    """The regard module that a `from ... import` names; None for other packages."""
    if node.level == 0:
        if node.module == "regard":
            return ""
        return node.module.removeprefix("regard.") if (node.module or "").startswith("regard.") else None
    package = importer.split(".") if importer else []
    if MODULES[importer].name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *(node.module.split(".") if node.module else [])])


def imports(importer: str) -> Iterator[tuple[str, str, bool, int]]:
    """(imported module, name, whether inside of a function, line) of each import of regard."""
    inside = set()
    checking = set()
    for node in ast.walk(TREES[importer]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside.update(id(child) for child in ast.walk(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            checking.update(id(child) for part in node.body for child in ast.walk(part))
    for node in ast.walk(TREES[importer]):
        if id(node) in checking:
            continue
        if isinstance(node, ast.ImportFrom) and (base := resolve(importer, node)) is not None:
            for alias in node.names:
                if alias.name == "_native":  # the compiled engine, which need not be there
                    continue
                module = f"{base}.{alias.name}" if base else alias.name
                module = module if module in MODULES else base
                yield module, alias.name, id(node) in inside, node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "regard":
                    yield alias.name.partition(".")[2], "", id(node) in inside, node.lineno


def test_every_module_has_a_layer():
    assert {name.partition(".")[0] for name in MODULES} == set(RANK)


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_imports_go_down(importer):
    wrong = []
    for imported, name, _, line in imports(importer):
        same = importer.partition(".")[0] == imported.partition(".")[0]
        if not same and layer(imported) > layer(importer):
            wrong.append(f"line {line}: {name} of regard.{imported}, which is in a higher layer")
    assert wrong == []


def test_no_cycle_of_modules():
    """Also counting imports inside of functions. A package and its own modules count as they are imported."""
    graph = {name: {m for m, *_ in imports(name) if m != name} for name in MODULES}
    for name, found in graph.items():  # a package runs before its modules, and is no dependency of them
        graph[name] = {m for m in found if not name.startswith(f"{m}.") and m != ""}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_regard_is_imported_at_the_top(importer):
    """An import inside of a function hides a dependency. Those that keep `import regard` light are listed."""
    late = {(importer, imported) for imported, _, inside, _ in imports(importer) if inside}
    assert late <= set(LAZY)


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_private_names_stay_in_their_module(importer):
    wrong, aliases = [], {}
    for imported, name, _, line in imports(importer):
        private = re.match(r"_[^_]", name) and not imported.endswith(name)  # a private module is not a private name
        if private:
            wrong.append(f"line {line}: {name} of regard.{imported}")
        if imported.rpartition(".")[2] == name:
            aliases[name] = imported
    for node in ast.walk(TREES[importer]):
        of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
        if of_module and re.match(r"_[^_]", node.attr):
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert wrong == []


@pytest.mark.parametrize("importer", [name for name in MODULES if name != "_compat"], ids=lambda name: name or "regard")
def test_private_names_of_pytorch_are_in_one_module(importer):
    wrong = []
    for node in ast.walk(TREES[importer]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and re.match(r"(torch|forward_ad|F|nn)\.", text := ast.unparse(node)):
            names = text.split(".")
        else:
            continue
        if any(re.match(r"_[^_]", name) for name in names):
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_no_file_is_long():
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.js"), *SOURCE.rglob("*.css"), *(ROOT / "csrc").rglob("*.*")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in files}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def test_the_reading_path_is_short():
    """README, problem, form, reference backend, operator: what a newcomer reads first."""
    path = ["README.md", *(f"src/regard/{f}.py" for f in ("problem", "form", "backends/reference", "operator"))]
    lengths = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in path}
    assert sum(lengths.values()) <= 1200, lengths


def test_the_checks_notice():
    """A test of the tests: each kind of violation, in a made-up module."""
    TREES["problem"], kept = ast.parse("def f():\n    from .plan import _x\n    torch._C.y()"), TREES["problem"]
    try:
        with pytest.raises(AssertionError, match="higher layer"):
            test_imports_go_down("problem")
        with pytest.raises(AssertionError):
            test_regard_is_imported_at_the_top("problem")
        with pytest.raises(AssertionError, match="_x of regard"):
            test_private_names_stay_in_their_module("problem")
        with pytest.raises(AssertionError, match=r"torch\._C"):
            test_private_names_of_pytorch_are_in_one_module("problem")
        with pytest.raises(AssertionError, match="->"):
            test_no_cycle_of_modules()
    finally:
        TREES["problem"] = kept
