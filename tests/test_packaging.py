"""The wheel holds every module, kernel and model file of the four folders, under one name."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOMES = {
    "heterollm": "heterollm",
    "kernels": "heterollm/kernels",
    "profiler": "heterollm/profiler",
    "solver": "heterollm/solver",
}


def shipped_files() -> set[str]:
    expected = set()
    for folder, home in HOMES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(f"{home}/{path.relative_to(ROOT / folder).as_posix()}")
    return expected


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools leaves stale files in build/, which it would ship the next time.
    work = tmp_path_factory.mktemp("wheel")
    for name in (*HOMES, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, work / name)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(work / "dist"),
        ".",
    ]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((work / "dist").glob("*.whl"))


def test_the_wheel_has_every_file_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == shipped_files()


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" not in name}
        entry = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "heterollm = heterollm.cli:main" in archive.read(entry).decode()
    assert tops == {"heterollm"}


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(
            next(name for name in archive.namelist() if name.endswith("METADATA"))
        ).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0" in metadata
    assert "onnxruntime-qnn" in metadata
    # An unconditional torch would bring gigabytes to everyone.
    assert all(
        "extra ==" in line for line in metadata.splitlines() if line.startswith("Requires-Dist: torch")
    )
