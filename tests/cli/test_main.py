"""The command's front door: quick help without torch, and layers that import only downwards."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "apportion"
LAYERS = ("core", "numerics", "models", "device", "cost", "tasks", "methods", "report", "cli")


@pytest.mark.parametrize("args", [["--help"], ["fit", "--help"], ["targets", "--help"], ["tasks", "--help"]])
def test_help_loads_neither_torch_nor_numpy(args):
    script = (
        "import sys\n"
        f"sys.argv = ['apportion', *{args!r}]\n"
        "from apportion.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'cvxpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Example" in done.stdout or args in (["--help"], ["tasks", "--help"])


def test_the_package_loads_torch_only_when_a_name_needs_it():
    script = "import sys, apportion; assert 'torch' not in sys.modules; apportion.Budget.parse('8ms')"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_layers_import_only_those_below():
    rank = {name: index for index, name in enumerate(LAYERS)}
    wrong = []
    for path in SRC.rglob("*.py"):
        layer = path.relative_to(SRC).parts[0]
        if layer not in rank:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "apportion" and len(parts) > 1 and rank.get(parts[1], -1) > rank[layer]:
                    wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert wrong == []


def test_the_core_needs_the_standard_library_alone():
    for path in (SRC / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                for name in names:
                    top = name.split(".")[0]
                    assert top == "apportion" or top in sys.stdlib_module_names, f"{path.name} imports {name}"
