"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    ("heterollm.__main__",),
    ("heterollm.cli",),
    ("heterollm.report",),
    ("heterollm.doctor", "heterollm.benchmarks", "heterollm.serve"),
    ("heterollm.simulate",),
    ("heterollm",),
    ("heterollm.llm", "heterollm.exporting"),
    ("heterollm.loaded", "heterollm.drafting", "heterollm.export_files"),
    ("heterollm.loading",),
    ("heterollm.exported",),
    ("heterollm.planning",),
    ("heterollm.trace",),
    ("heterollm.calibration",),
    ("heterollm.engine",),
    ("heterollm.tools",),
    ("heterollm.text",),
    ("heterollm.solver",),
    ("heterollm.profiler",),
    ("heterollm.profiler.tune", "heterollm.profiler.predict"),
    ("heterollm.profiler.measure",),
    ("heterollm.profiler.work",),
    ("heterollm.profiler.records",),
    ("heterollm.model",),
    ("heterollm.model.stored", "heterollm.data"),
    ("heterollm.model.fields",),
    ("heterollm.kernels.devices",),
    ("heterollm.kernels.sim",),
    ("heterollm.kernels.device",),
    ("heterollm.kernels.sync", "heterollm.kernels.operators"),
    ("heterollm.kernels.gpu", "heterollm.kernels.npu"),
    ("heterollm.kernels.formats", "heterollm.kernels.threads"),
    ("heterollm.kernels.ops",),
    ("heterollm.base",),
)
"""Rooms from top to bottom: a room imports those below it. A module on this list is a room by itself."""

FLOOR = {room: -floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SOC = "heterollm.kernels.sim.soc"
FOLDERS = {"kernels": "heterollm.kernels", "profiler": "heterollm.profiler", "solver": "heterollm.solver"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    top = FOLDERS.get(parts[0], parts[0])
    return ".".join((top, *parts[1:])).removesuffix(".__init__")


MODULES = [path for folder in (*FOLDERS, "heterollm") for path in sorted((ROOT / folder).rglob("*.py"))]
PATHS = {module_of(path): path for path in MODULES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def room_of(module: str) -> str:
    """Return the innermost room that a module lies in."""
    parts = module.split(".")
    return next(
        (room for end in range(len(parts), 0, -1) if (room := ".".join(parts[:end])) in FLOOR), "heterollm"
    )


@functools.cache
def imports_of(tree: ast.AST) -> list[tuple[str, str]]:
    """Return ``(module, name)`` of everything that is imported; the name is empty for ``import module``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
    return found


@functools.cache
def imported_modules(tree: ast.AST) -> set[str]:
    return {name for module, name in imports_of(tree) for name in (module, f"{module}.{name}")}


def faults(module: str, tree: ast.AST) -> list[str]:
    """Return the imports of a module that point up, or reach past another room's front door."""
    own, found = room_of(module), []
    for target, name in imports_of(tree):
        if target.split(".")[0] != "heterollm" or (target, name) == ("heterollm", "__version__"):
            continue
        room = room_of(f"{target}.{name}" if f"{target}.{name}" in FLOOR else target)
        if room == own:
            continue
        if FLOOR[room] >= FLOOR[own]:
            found.append(f"up: {target} {name}")
        if target != room and f"{target}.{name}" != room:
            found.append(f"past the door: {target} {name}")
    return found


@pytest.mark.parametrize("module", PATHS)
def test_imports_point_down_and_go_through_front_doors(module: str) -> None:
    assert faults(module, parsed(PATHS[module])) == []


def test_an_import_that_points_up_or_past_a_door_would_be_found() -> None:
    tree = ast.parse("from heterollm.solver import Plan\nfrom heterollm.base.errors import DeviceError")
    assert faults("heterollm.kernels.gpu.linear", tree) == [
        "up: heterollm.solver Plan",
        "past the door: heterollm.base.errors DeviceError",
    ]


def test_every_folder_is_a_room() -> None:
    packages = {module for module, path in PATHS.items() if path.name == "__init__.py"}
    rooms = "data", "engine", "planning", "serve", "solver", "kernels.gpu"
    inner = (*(f"heterollm.{room}." for room in rooms), SOC)
    parts = {module for module in packages if module.startswith(inner)}
    homeless = packages - parts - {"heterollm.kernels", *FLOOR}
    assert not homeless, f"add {sorted(homeless)} to FLOORS, and to the packages of pyproject.toml"


def test_modules_import_each_other_without_circles() -> None:
    """Doors are left out: their names load on first use. Imports inside functions and for types count."""
    left = {}
    for module, path in PATHS.items():
        named = imported_modules(parsed(path))
        left[module] = {name for name in named if name in PATHS and PATHS[name].name != "__init__.py"}
    while free := [module for module, named in left.items() if not named & left.keys()]:
        for module in free:
            del left[module]
    assert sorted(left) == []


@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: path.name)
def test_a_bench_finds_what_it_imports(path: Path) -> None:
    """Inside functions as well: nothing else runs most scripts, and some need libraries of their own."""
    for target, name in imports_of(parsed(path)):
        neighbour = path.with_name(f"{target}.py")
        if neighbour.exists():
            assert re.search(rf"^(def |class )?{name}\b", neighbour.read_text("utf-8"), re.M), (
                f"{target} {name}"
            )
        elif target.split(".")[0] == "heterollm" and f"{target}.{name}" not in PATHS:
            home = PATHS[target]
            source = home.with_suffix(".pyi") if home.with_suffix(".pyi").exists() else home
            assert re.search(rf"\b{name}\b", source.read_text("utf-8")), f"{target} {name}"


def test_front_doors_open_to_what_other_rooms_import() -> None:
    """A name that nobody outside asks for is not on a door; ``heterollm`` itself is for users."""
    wanted: dict[str, set[str]] = {}
    for module, path in PATHS.items():
        for target, name in imports_of(parsed(path)):
            if room_of(module) != target:
                wanted.setdefault(target, set()).add(name)
    for room, path in PATHS.items():
        stub = path.with_suffix(".pyi")
        if path.name == "__init__.py" and stub.exists() and room != "heterollm":
            tree = ast.parse(stub.read_text("utf-8"))
            offered = {
                alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
            }
            assert offered == wanted.get(room, set()), room
            assert all(hasattr(importlib.import_module(room), name) for name in offered)


def test_doors_alone_list_their_names() -> None:
    """A second list in each module repeats its door, or names that only its room uses."""
    listing = {
        module
        for module, path in PATHS.items()
        for node in parsed(path).body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    }
    assert listing == {module for module, path in PATHS.items() if path.with_suffix(".pyi").exists()}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("pyopencl", "kernels/gpu/binding.py"),
        ("heterollm.kernels.gpu.binding", "kernels/gpu/"),
        ("rich", "heterollm/report"),
        ("matplotlib", "heterollm/report"),
        ("joblib", "heterollm/benchmarks"),
        ("typer", "heterollm/cli"),
        ("starlette", "heterollm/serve"),
        ("uvicorn", "heterollm/serve"),
        ("prometheus_client", "heterollm/serve"),
    ],
)
def test_a_library_has_one_home(library: str, home: str) -> None:
    users = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if any(name == library or name.startswith(f"{library}.") for name in imported_modules(parsed(path)))
    ]
    assert users
    assert all(user.startswith(home) for user in users), users


RIDDLE = re.compile(
    r"\s*(what|which|how|who|whoever)\b|.*\b(what is|whoever|anew)\b", re.IGNORECASE | re.DOTALL
)


def riddles(tree: ast.AST) -> list[str]:
    """Return docstrings that begin with a question word, or use a phrase that the house style bans."""
    strings = (
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    return [text for text in strings if isinstance(text, str) and RIDDLE.match(text)]


@pytest.mark.parametrize("module", PATHS)
def test_docstrings_begin_with_a_verb_or_a_noun(module: str) -> None:
    assert riddles(parsed(PATHS[module])) == []


def test_a_riddle_would_be_found() -> None:
    assert (
        len(riddles(ast.parse('"""What a plan is."""\nx = 1\n"""Measure it anew."""\n"""The plan."""'))) == 2
    )


def public_types(tree: ast.Module) -> set[str]:
    """Return the public classes and type aliases that a module defines."""
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "TypeAlias" in ast.unparse(node.annotation)
    }
    return {name for name in named | aliases if not name.startswith("_")}


PYOPENCL_NAMES = "heterollm.kernels.gpu.ctypes_"
"""The modules whose types have the names of pyopencl's; one room alone imports them."""


def test_a_public_type_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = {}
    own = {module: path for module, path in PATHS.items() if not module.startswith(PYOPENCL_NAMES)}
    for module, path in own.items():
        for name in public_types(parsed(path)):
            homes.setdefault(name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_a_second_type_of_the_same_name_would_be_found() -> None:
    tree = ast.parse("class Job: ...\nclass _Job: ...\nTimes: TypeAlias = float\nJobs: int = 3")
    assert public_types(tree) == {"Job", "Times"}


def test_nothing_unpickles() -> None:
    for path in MODULES:
        names = imported_modules(parsed(path))
        assert not {"pickle", "marshal", "shelve"} & names, path
        # joblib hands out work; its files would be pickles.
        if "joblib" in names:
            tree = parsed(path)
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == "joblib"
                for alias in node.names
            }
            assert imported == {"Parallel", "delayed", "parallel_config"}, path


SIZE_ROW = re.compile(r"^\| [^|]+ \| (`[^|]+`) \| ([\d,]+) \|$", re.MULTILINE)
SLACK = 1.05


def stated_sizes() -> dict[tuple[str, ...], int]:
    """Return the lines that CONTRIBUTING.md allows, by the paths of a part."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("### Sizes")[2].partition("\n## ")[0]
    return {
        tuple(re.findall(r"`([^`]+)`", paths)): int(lines.replace(",", ""))
        for paths, lines in SIZE_ROW.findall(section)
    }


def test_parts_are_no_larger_than_contributing_says() -> None:
    stated = stated_sizes()
    found = dict.fromkeys(stated, 0)
    for path in (*MODULES, *sorted((ROOT / "bench").rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        fitting = [(len(one), part) for part in stated for one in part if name.startswith(f"{one}/")]
        found[max(fitting)[1]] += path.read_text("utf-8").count("\n")
    assert len(stated) > 12
    assert all(found.values())
    assert {part: lines for part, lines in found.items() if lines > SLACK * stated[part]} == {}


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys, heterollm; "
        "heavy = {'numpy', 'pyopencl', 'onnxruntime', 'transformers', 'rich', 'onnx', 'joblib', "
        "'sklearn', 'scipy'}; "
        "print(sorted(heavy & set(sys.modules)), heterollm.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.startswith("[] ")
