"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RANK = {"kernels": 0, "profiler": 1, "solver": 2, "heterollm": 3}
SHARED = {"heterollm.base.errors", "heterollm.base.units"}
MODULES = [path for folder in RANK for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_modules(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def rank_of(name: str) -> int | None:
    parts = name.split(".")
    if parts[0] != "heterollm" or name in SHARED or ".".join(parts[:2]) in SHARED:
        return None
    return RANK[parts[1]] if len(parts) > 1 and parts[1] in RANK else RANK["heterollm"]


def upward_imports(folder: str, tree: ast.AST) -> list[str]:
    return [
        name
        for name in imported_modules(tree)
        if name != "heterollm" and (rank := rank_of(name)) is not None and rank > RANK[folder]
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    assert upward_imports(folder, ast.parse(path.read_text("utf-8"))) == []


def test_an_upward_import_would_be_found() -> None:
    tree = ast.parse("from heterollm.engine.runner import Engine\nimport heterollm.solver.plan")
    assert sorted(upward_imports("kernels", tree)) == [
        "heterollm.engine.runner",
        "heterollm.engine.runner.Engine",
        "heterollm.solver.plan",
    ]


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("pyopencl", "kernels/gpu/binding.py"),
        ("heterollm.kernels.gpu.binding", "kernels/opencl_"),
        ("rich", "heterollm/report"),
        ("matplotlib", "heterollm/plots"),
        ("joblib", "heterollm/sweep"),
        ("typer", "heterollm/cli"),
    ],
)
def test_a_library_has_one_home(library: str, home: str) -> None:
    users = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if any(
            name == library or name.startswith(f"{library}.")
            for name in imported_modules(ast.parse(path.read_text("utf-8")))
        )
    ]
    assert users
    assert all(user.startswith(home) for user in users), users


def test_nothing_unpickles() -> None:
    for path in MODULES:
        names = imported_modules(ast.parse(path.read_text("utf-8")))
        assert not {"pickle", "marshal", "shelve"} & names, path
        # joblib hands out work; its files would be pickles.
        if "joblib" in names:
            tree = ast.parse(path.read_text("utf-8"))
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == "joblib"
                for alias in node.names
            }
            assert imported == {"Parallel", "delayed"}, path


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys, heterollm; "
        "heavy = {'numpy', 'pyopencl', 'onnxruntime', 'transformers', 'rich', 'onnx', 'joblib'}; "
        "print(sorted(heavy & set(sys.modules)), heterollm.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.startswith("[] ")
