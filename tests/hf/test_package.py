"""The package `regard.hf` is light to import, below `regard.inspection`, and has the names that it declares."""

import ast
from pathlib import Path

import regard
from regard import hf
from support.programs import fresh

FOLDER = Path(regard.__file__).parent / "hf"


def test_importing_it_loads_no_transformers():
    code = "import sys, regard.hf, regard.inspection; print('transformers' in sys.modules)"
    assert fresh(code).strip() == "False"


def test_without_transformers_an_error_names_the_extra():
    code = """
import sys
sys.modules["transformers"] = None  # an import of it raises
import regard.hf
for name in ("register", "Interception"):
    try:
        getattr(regard.hf, name)
    except ImportError as error:
        print(error)
"""
    assert fresh(code).splitlines() == ["regard.hf needs transformers: pip install 'regard[hf]'"] * 2


def test_no_file_imports_inspection():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                assert "inspection" not in ast.unparse(node), path.name


def test_type_checkers_see_the_names_of_run_time():
    declared, loaded = set(), set()
    for node in ast.walk(ast.parse((FOLDER / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            declared |= {(f".{node.module}", alias.name) for alias in node.names}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES":
            loaded |= {(file, name) for file, names in ast.literal_eval(node.value).items() for name in names}
    assert declared == loaded - {("..inspection.callback", "MonitorCallback")}
    for _, name in loaded:
        assert getattr(hf, name) is not None and name in dir(hf)
