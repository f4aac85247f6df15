"""The structure of the source, read from its syntax trees: layers, private names, file sizes.

docs/architecture.md describes the layers. A module may import from its own layer and from those below it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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


def attributes(tree: ast.AST) -> set[str]:
    """The names that a module defines or assigns: functions, classes, fields and attributes."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store))
    return names | {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in stored}


# Names with an underscore that are documented, and those of Transformers, which has no others.
DOCUMENTED = {"_replace", "_asdict", "_getframe", "_exit"}
OF_TRANSFORMERS = {"_attn_implementation", "_attn_implementation_internal", "_global_mapping", "_from_config"}
OF_TENSORS_AND_MODULES = {*dir(torch.Tensor), *vars(torch.nn.Module()), "_schema", "_orig_mod"}


def is_private_in_pytorch(name: str) -> bool:
    """Whether a string is such an attribute, or the name of an operator."""
    is_name = re.fullmatch(r"_[a-z]\w*", name) is not None
    return is_name and (name in OF_TENSORS_AND_MODULES or hasattr(torch.ops.aten, name))


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_private_attributes_stay_in_their_module(importer):
    """`thing._name` of an object of another module. `self._name` may be inherited."""
    allowed = attributes(TREES[importer]) | DOCUMENTED | (OF_TRANSFORMERS if layer(importer) == RANK["hf"] else set())
    wrong = []
    for node in ast.walk(TREES[importer]):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in allowed:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and importer != "_compat":
                wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert wrong == []


@pytest.mark.parametrize("importer", [name for name in MODULES if name != "_compat"], ids=lambda name: name or "regard")
def test_private_names_of_pytorch_are_in_one_module(importer):
    """Imported, as an attribute of a module of PyTorch, or as a string."""
    wrong = []
    for node in ast.walk(TREES[importer]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and re.match(r"(torch|forward_ad|F|nn)\.", text := ast.unparse(node)):
            names = text.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if is_private_in_pytorch(node.value) else []
        else:
            continue
        if any(re.match(r"_[^_]", name) for name in names):
            wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert wrong == []


# Where a backend is named outside of its own module. Everything else asks the registry.
NAMED = {
    "acceleration": {"native"},  # puts this engine in the place of PyTorch's kernel on the CPU
    "doctor": {"native", "triton"},  # says why one of them cannot be tested here
    "cli.device": {"native", "triton"},  # checks the kernels of one kind of device
    "features.base": {"native"},  # feature maps have two implementations of their own
}


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_backends_are_named_by_themselves(importer):
    named = {node.value for node in ast.walk(TREES[importer]) if isinstance(node, ast.Constant)} & {"native", "triton"}
    packages = importer.split(".")
    own = set(packages[1:2]) if packages[0] == "backends" else set()
    assert named - own <= NAMED.get(importer, set())


# The arguments of attention are declared once, in arguments.py, and written out where a signature must be read:
SIGNATURES = {
    ("operator", "attention"): "the public function",
    ("lowering", "lower"): "implements it",
    ("features.base", "forward"): "the call of a module, which has no problem",
    ("geometry.natural", "natural_attention"): "with the damping, without dropout",
    ("inspection.listeners", "_call"): "takes the place of PyTorch's function",
    ("acceleration", "_forward"): "takes the place of PyTorch's operator",
    ("acceleration", "_backward"): "takes the place of PyTorch's operator",
    ("acceleration", "_form"): "takes the arguments of both",
}
OPTIONS = {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_the_signature_of_attention_is_not_repeated(importer):
    found = set()
    for node in ast.walk(TREES[importer]):
        arguments = [*node.args.args, *node.args.kwonlyargs] if isinstance(node, ast.FunctionDef) else []
        if len(OPTIONS & {argument.arg for argument in arguments}) >= 3:
            found.add((importer, node.name))
    assert found <= set(SIGNATURES)


FAMILIES = ({"KL", "Tsallis", "FermiDirac", "FDivergence"}, {"Rows", "Free", "RowsAndColumns"})
LADDERS = {
    ("lowering", "_lower_marginal"): "the only place that translates every marginal",
    ("hf.lengths", "_row_parameters"): "the tensors of a problem, for a check of their lengths",
    ("estimation.uniformity", "evidence"): "names the problems that have no bound",
}


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_kinds_of_problems_are_told_apart_in_one_place(importer):
    """A function that asks for two kinds of regularisers or of marginals would have to know the next one, too."""
    found = set()
    for node in ast.walk(TREES[importer]):
        if isinstance(node, ast.FunctionDef):
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            asked = [call.args[1] for call in calls if ast.unparse(call.func) == "isinstance"]
            kinds = {name.id for each in asked for name in ast.walk(each) if isinstance(name, ast.Name)}
            if any(len(family & kinds) > 1 for family in FAMILIES):
                found.add((importer, node.name))
    assert found <= set(LADDERS)


# Packages that are imported inside of functions: optional ones, and parts of required ones that take long to load.
OPTIONAL = {"accelerate", "gguf", "pandas", "ray", "rich", "safetensors", "tensorboard", "transformers", "triton"}
SLOW = {"torch.nn.attention.bias", "torch.nn.attention.flex_attention", "torch.utils.tensorboard"}


@pytest.mark.parametrize("importer", MODULES, ids=lambda name: name or "regard")
def test_only_optional_packages_are_imported_late(importer):
    wrong = []
    for function in ast.walk(TREES[importer]):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            needed = [name for name in names if name.partition(".")[0] not in OPTIONAL and name not in SLOW]
            wrong += [f"line {node.lineno}: {name}" for name in needed]
    assert wrong == []


def test_the_exceptions_are_needed():
    """An exception that nothing uses any more is removed."""
    written = {node.value for name in NAMED for node in ast.walk(TREES[name]) if isinstance(node, ast.Constant)}
    assert set.union(*NAMED.values()) <= written
    for exceptions in (SIGNATURES, LADDERS):
        for module, function in exceptions:
            names = {node.name for node in ast.walk(TREES[module]) if isinstance(node, ast.FunctionDef)}
            assert function in names, (module, function)


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
    text = """
def f(attn_mask, dropout_p, is_causal):
    from .plan import _x
    import numpy
    torch._C.y()
    isinstance(a, KL) or isinstance(a, Tsallis)
    found._hidden
    return "triton"
"""
    TREES["problem"], kept = ast.parse(text), TREES["problem"]
    try:
        with pytest.raises(AssertionError, match="higher layer"):
            test_imports_go_down("problem")
        with pytest.raises(AssertionError):
            test_regard_is_imported_at_the_top("problem")
        with pytest.raises(AssertionError, match="_x of regard"):
            test_private_names_stay_in_their_module("problem")
        with pytest.raises(AssertionError, match=r"found\._hidden"):
            test_private_attributes_stay_in_their_module("problem")
        with pytest.raises(AssertionError, match=r"torch\._C"):
            test_private_names_of_pytorch_are_in_one_module("problem")
        with pytest.raises(AssertionError, match="triton"):
            test_backends_are_named_by_themselves("problem")
        with pytest.raises(AssertionError):
            test_the_signature_of_attention_is_not_repeated("problem")
        with pytest.raises(AssertionError):
            test_kinds_of_problems_are_told_apart_in_one_place("problem")
        with pytest.raises(AssertionError, match="numpy"):
            test_only_optional_packages_are_imported_late("problem")
        with pytest.raises(AssertionError, match="->"):
            test_no_cycle_of_modules()
        TREES["problem"] = ast.parse("operator = '_local_scalar_dense'")
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            test_private_names_of_pytorch_are_in_one_module("problem")
    finally:
        TREES["problem"] = kept
