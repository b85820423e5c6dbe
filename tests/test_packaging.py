"""The wheel holds every module, kernel and model file of the four folders, under one name."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import heterollm

ROOT = Path(__file__).resolve().parents[1]
HOMES = {
    "heterollm": "heterollm",
    "kernels": "heterollm/kernels",
    "profiler": "heterollm/profiler",
    "solver": "heterollm/solver",
}


SOURCES = {*HOMES, "tests", "bench", "docs", "packaging", ".ci", "pyproject.toml", "MANIFEST.in"}
SOURCES |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "mkdocs.yml"}
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
HARMLESS = re.compile("byte-compiling is disabled|no previously-included files matching")


def files_below(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in paths}


def shipped_files() -> set[str]:
    return {f"{home}/{name}" for folder, home in HOMES.items() for name in files_below(ROOT / folder)}


def installed_names(wheel: Path) -> set[str]:
    """Return the files of a wheel without its metadata; pages of the documents go below ``share``."""
    with zipfile.ZipFile(wheel) as archive:
        names = {re.sub(r".*\.data/data/", "", name) for name in archive.namelist()}
    return {name for name in names if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and with the wheel that is built from it."""
    # From a copy: setuptools leaves stale files in build/, which it would ship the next time.
    work = tmp_path_factory.mktemp("release")
    for source in sorted(ROOT.iterdir()):
        if source.name in SOURCES:
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, work / source.name, **({"ignore": LEFT_OUT} if source.is_dir() else {}))
    command = [sys.executable, "-Im", "build", "--no-isolation", "--outdir", str(work / "dist"), "."]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Files that are named and not there, or there and not named, are what setuptools warns of.
    warnings = [line for line in (done.stdout + done.stderr).splitlines() if "warning" in line.lower()]
    assert not [line for line in warnings if not HARMLESS.search(line)]
    return work / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_the_source_distribution_has_what_tests_and_docs_need(built: Path) -> None:
    """It is what a distributor builds and tests from."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"{folder}/{name}" for folder in HOMES for name in files_below(ROOT / folder)}
    expected |= {
        f"{folder}/{name}"
        for folder in ("tests", "bench", "docs", "packaging", ".ci")
        for name in files_below(ROOT / folder)
    }
    expected |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "mkdocs.yml", "pyproject.toml"}
    assert expected <= names


def test_the_wheel_holds_the_files_of_the_checkout(wheel: Path) -> None:
    """Its files went through the source distribution, and came out as they are here."""
    with zipfile.ZipFile(wheel) as archive:
        for folder, home in HOMES.items():
            for name in files_below(ROOT / folder):
                assert archive.read(f"{home}/{name}") == (ROOT / folder / name).read_bytes(), name


def test_the_tests_run_what_is_installed() -> None:
    """A wheel's files, and not the folders beside these tests; those only after ``pip install -e``."""
    package = Path(heterollm.__file__).resolve().parent
    origin = json.loads(distribution("heterollm").read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        assert package == ROOT / "heterollm"
        return
    assert package != ROOT / "heterollm"
    assert files_below(package) == {name.removeprefix("heterollm/") for name in shipped_files()}
    for folder, home in HOMES.items():
        for name in files_below(ROOT / folder):
            installed = package.parent / home / name
            assert installed.read_bytes() == (ROOT / folder / name).read_bytes(), f"{name}: install again"


def test_the_version_is_in_one_place(wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert wheel.name.split("-")[:2] == ["heterollm", version]
    assert heterollm.__version__ == version
    named = [path for path in ROOT.rglob("*.py") if path.parts[len(ROOT.parts)] in HOMES]
    assert not [path for path in named if f'"{version}"' in path.read_text("utf-8")]


def test_the_wheel_has_every_file_and_no_other(wheel: Path) -> None:
    pages = {f"share/doc/heterollm/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert installed_names(wheel) == shipped_files() | pages


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in installed_names(wheel)}
    with zipfile.ZipFile(wheel) as archive:
        entry = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "heterollm = heterollm.__main__:run" in archive.read(entry).decode()
    assert tops == {"heterollm", "share"}


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(
            next(name for name in archive.namelist() if name.endswith("METADATA"))
        ).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.parametrize(("extra", "large"), [("", False), ("host", False), ("serve", False), ("test", True)])
def test_large_libraries_come_with_extras_alone(wheel: Path, extra: str, large: bool) -> None:
    """An unconditional torch would bring gigabytes to everyone, the others hundreds of megabytes."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    asked, seen, needed = [extra], set(), set()
    while asked:
        seen.add(own := asked.pop())
        for found in map(Requirement, metadata.get_all("Requires-Dist")):
            if not found.marker or found.marker.evaluate({"extra": own}):
                needed.add(found.name)
                asked += [other for other in found.extras - seen if found.name == "heterollm"]
    for name in ("torch", "transformers", "scikit-learn", "scipy"):
        assert (name in needed) is large, name


@pytest.mark.parametrize(
    ("system", "machine", "extra", "needed"),
    [
        ("linux", "x86_64", "", False),
        ("linux", "x86_64", "emulator", True),
        ("linux", "x86_64", "test", False),  # by way of heterollm[emulator]
        ("win32", "AMD64", "", False),
        ("win32", "AMD64", "emulator", True),
        ("linux", "aarch64", "", True),
        ("win32", "ARM64", "", True),
        ("darwin", "arm64", "emulator", False),
    ],
)
def test_qnn_is_required_only_where_it_can_run(
    wheel: Path, system: str, machine: str, extra: str, needed: bool
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(
            next(name for name in archive.namelist() if name.endswith("METADATA"))
        ).decode()
    lines = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: onnxruntime-qnn")]
    requirements = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines]
    place = {"sys_platform": system, "platform_machine": machine, "python_version": "3.12", "extra": extra}
    assert any(found.marker.evaluate(place) for found in requirements) is needed
